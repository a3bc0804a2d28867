"""Dropout and a shuffled data set with several interruptions in a row, within an epoch and at its
end. Every step equals that of the uninterrupted run, and so do its samples and the values of the
random generators."""

import pytest

from st.run_attempts import LIMIT, not_identical, resume_summary, steps_of
from st.training_run import differences

pytestmark = pytest.mark.timeout(900)
RANDOM = (
    "--model.model_config.hidden_dropout 0.1 --train_dataset.data_loader.shuffle True "
    "--callbacks.1.save_checkpoint_steps 2"
)


def test_dropout_masks_and_the_order_of_each_epoch_continue_after_a_resume(whole_single, tmp_path):
    # a graph holds seeds
    whole, run = (whole_single.like(tmp_path / name, graphs=None) for name in ("whole", "run"))
    whole.start(RANDOM).wait_for_success(LIMIT)
    assert [row["hex"] for row in whole.steps()] != [row["hex"] for row in whole_single.steps()]
    begins = []
    # of epochs of 10 steps; at 21 the one before has just ended
    for reached in (7, 21):
        run.start(RANDOM).wait_for_step(reached)
        run.kill()
        begins.append(steps_of(run)[0])
        assert not_identical(whole, run.steps(-1)) == []
    run.start(RANDOM).wait_for_success(LIMIT)
    assert resume_summary(run)["random state"][0] == "restored"
    assert begins[0] == 1 and all(step % 2 for step in begins) and steps_of(run)[-1] == 40
    assert differences(whole.steps(), run.steps(-1)) == []
    assert {row["step"] for row in run.steps()} == set(range(1, 41))
    drawn = {row["step"]: row["draws"] for row in whole.steps()}
    assert [row["step"] for row in run.steps() if row["draws"] != drawn[row["step"]]] == []
    assert len({tuple(draws) for draws in drawn.values()}) == 40
    epochs = [
        [sample for row in whole.steps()[first : first + 10] for sample in row["samples"]]
        for first in (0, 10, 20, 30)
    ]
    assert [len(set(epoch)) for epoch in epochs] == [80] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
