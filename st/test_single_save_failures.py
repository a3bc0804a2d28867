"""One process whose saves fail with real errors of the operating system: it continues, records
them, and stops after the third."""

import errno
import os

import pytest

from st.checkpoint_files import flip_bit, weights
from st.run_attempts import LIMIT, events, failure, not_identical, run_beside, steps_of
from st.training_run import Run

# no file grows beyond 4 MB: a checkpoint has 12, a log 0.1
FULL = ("bash", "-c", 'ulimit -f 4000; exec "$@"', "_")
EVERY_STEP = "--callbacks.1.save_checkpoint_steps 1"


@pytest.fixture(scope="module")
def full(whole_single, tmp_path_factory) -> Run:
    """Steps 30 and 35 are there, 40 is damaged, and every save of the resumed run fails."""
    run = run_beside(whole_single, tmp_path_factory.mktemp("full") / "run")
    flip_bit(weights(run, 40))
    run.start(EVERY_STEP, prefix=FULL).wait(LIMIT)
    return run


TOO_LARGE = os.strerror(errno.EFBIG)


def nothing_torn(run: Run, steps: list[int]) -> None:
    """Checks that no half-written or unrecorded file exists, that ``steps`` are good, and that step
    40 is the one damaged before."""
    assert run.half_written() == []
    files = {path.name for path in (run.checkpoints / "rank_0").glob("*.safetensors")}
    assert files == {
        "qwen3_rank_0-3_10.safetensors",
        "qwen3_rank_0-4_5.safetensors",
        "qwen3_rank_0-4_10.safetensors",
    }
    for step in steps:
        done = run.mindresume("verify", str(run.checkpoints), "--step", str(step))
        assert done.returncode == 0 and f"step {step} " in done.stdout, done.stdout + done.stderr
    assert run.which()["chosen"]["step"] == max(steps)


def test_full_disk_is_an_event_for_each_save(full, whole_single):
    """The event names file and reason; the training itself is not affected."""
    found = events(full, "save_failed")
    assert [(row["step"], row["failures_in_a_row"]) for row in found] == [(36, 1), (37, 2), (38, 3)]
    for row in found:
        assert (
            TOO_LARGE in row["reason"]
            and f"qwen3_rank_0_1-4_{row['step'] - 30}.safetensors" in row["reason"]
        )
    assert not_identical(whole_single, full.steps()) == []
    nothing_torn(full, [30, 35])


def test_full_disk_stops_the_training_after_three_failures_in_a_row(full):
    assert full.process.returncode == 1
    assert steps_of(full)[:2] == [36, 37] and steps_of(full)[-1] <= 38
    error = failure(full)
    assert error.startswith("SaveError") and "step 38" in error and TOO_LARGE in error
