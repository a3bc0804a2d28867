"""A shuffled data set: every epoch has its own order, which a resume inside an epoch continues."""

from __future__ import annotations

from st.run_attempts import LIMIT, in_parallel, steps_of, train_well
from st.training_run import differences

SHUFFLE = "--train_dataset.data_loader.shuffle True"


def test_a_resume_inside_an_epoch_keeps_the_shuffled_order(whole_single, tmp_path):
    whole, broken = (whole_single.like(tmp_path / name) for name in ("whole", "broken"))
    in_parallel(
        lambda: train_well(whole, SHUFFLE),
        lambda: broken.start(SHUFFLE, CPU_CLUSTER_KILL="all@18").wait(LIMIT),
    )
    assert steps_of(broken)[-1] == 18
    train_well(broken, SHUFFLE)
    # from step 15, in the middle of the second epoch
    assert steps_of(broken) == list(range(16, 41))
    assert differences(whole.steps(), broken.steps(0)) == [
        f"step {step} is missing" for step in range(19, 41)
    ]
    assert differences(whole.steps(), broken.steps(1)) == []
    epochs = [
        [sample for row in whole.steps()[first : first + 10] for sample in row["samples"]]
        for first in (0, 10, 20, 30)
    ]
    assert (
        all(len(set(epoch)) == 80 for epoch in epochs)
        and len({tuple(epoch) for epoch in epochs}) == 4
    )
