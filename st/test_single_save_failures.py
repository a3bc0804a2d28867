"""One process whose saves fail with real errors of the operating system: it continues, records
them, and stops after the third."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from st.checkpoint_files import flip_bit, weights
from st.run_attempts import LIMIT, events, failure, in_parallel, not_identical, run_beside, steps_of
from st.training_run import Run

# no file grows beyond 4 MB: a checkpoint has 12, a log 0.1
FULL = ("bash", "-c", 'ulimit -f 4000; exec "$@"', "_")
EVERY_STEP = "--callbacks.1.save_checkpoint_steps 1"


@pytest.fixture(scope="module")
def full(whole_single, tmp_path_factory) -> SimpleNamespace:
    """Steps 30 and 35 are there, 40 is damaged, and every save of the resumed run fails."""
    base = tmp_path_factory.mktemp("full")
    warn, strict = run_beside(whole_single, base / "warn"), run_beside(whole_single, base / "raise")
    for run in (warn, strict):
        flip_bit(weights(run, 40))
    in_parallel(
        lambda: warn.start(EVERY_STEP, prefix=FULL).wait(LIMIT),
        lambda: strict.start(EVERY_STEP, prefix=FULL, MINDRESUME_ON_SAVE_ERROR="raise").wait(LIMIT),
    )
    return SimpleNamespace(warn=warn, strict=strict)


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
    found = events(full.warn, "save_failed")
    assert [(row["step"], row["failures_in_a_row"]) for row in found] == [(36, 1), (37, 2), (38, 3)]
    for row in found:
        assert (
            TOO_LARGE in row["reason"]
            and f"qwen3_rank_0_1-4_{row['step'] - 30}.safetensors" in row["reason"]
        )
    assert not_identical(whole_single, full.warn.steps()) == []
    nothing_torn(full.warn, [30, 35])


def test_full_disk_stops_the_training_after_three_failures_in_a_row(full):
    assert full.warn.process.returncode == 1
    assert steps_of(full.warn)[:2] == [36, 37] and steps_of(full.warn)[-1] <= 38
    error = failure(full.warn)
    assert error.startswith("SaveError") and "step 38" in error and TOO_LARGE in error
