import pytest

from mindresume.errors import ProgressError
from mindresume.resume.progress import Progress, check_sink, progress_of


@pytest.mark.parametrize("step, old, new, per_epoch, expected", [
    (15, 8, 8, 10, Progress(15, 1, 15, 1.0)),            # middle of epoch 2: one epoch is done
    (20, 8, 8, 10, Progress(20, 2, 20, 1.0)),
    (20, 8, 16, 5, Progress(10, 2, 10, 0.5)),            # the batch doubled: half the steps, the same epoch
    (20, 16, 8, 20, Progress(40, 2, 40, 2.0)),
    (40, 8, 8, 2, Progress(40, 20, 40, 1.0)),            # sink size 2: 20 sinks are done
    (7, None, 8, 10, Progress(7, 0, 7, 1.0)),            # a checkpoint that does not say: no scaling
])
def test_counters_of_the_new_run(step, old, new, per_epoch, expected):
    assert progress_of(step, step, old, new, per_epoch) == expected


def test_a_step_that_does_not_scale_is_refused_with_the_arithmetic():
    with pytest.raises(ProgressError, match=r"15 \* 8 samples are no multiple of 16"):
        progress_of(15, 15, 8, 16, 5)


def test_a_sink_is_not_cut():
    check_sink(progress_of(40, 40, 8, 8, 2), 2)
    with pytest.raises(ProgressError, match="step 15 is no multiple of sink_size 2"):
        check_sink(progress_of(15, 15, 8, 8, 2), 2)
