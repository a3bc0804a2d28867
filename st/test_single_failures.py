"""One process whose saves fail with true errors of the operating system: it goes on, says so, and knows when to stop."""
from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest

from st.copies import LIMIT, beside, flip, lines, names, said, steps_of, together, weights
from st.jobs import Run, differences

FULL = ("bash", "-c", 'ulimit -f 4000; exec "$@"', "_")     # no file grows beyond 4 MB: a checkpoint has 12, a log 0.1
EVERY_STEP = "--callbacks.1.save_checkpoint_steps 1"


@pytest.fixture(scope="module")
def full(whole_single, tmp_path_factory) -> SimpleNamespace:
    """Steps 30 and 35 are there, 40 is damaged, and every save of the resumed run fails."""
    base = tmp_path_factory.mktemp("full")
    warn, strict = beside(whole_single, base / "warn"), beside(whole_single, base / "raise")
    for run in (warn, strict):
        flip(weights(run, 40))
    together(lambda: warn.start(EVERY_STEP, prefix=FULL).wait(LIMIT),
             lambda: strict.start(EVERY_STEP, prefix=FULL, MINDRESUME_ON_SAVE_ERROR="raise").wait(LIMIT))
    return SimpleNamespace(warn=warn, strict=strict)


def failures(run: Run) -> list[str]:
    """The lines of failed saves, as errors of the log."""
    return [line for line in lines(run, "failed in a row)") if "ERROR" in line]


def nothing_torn(run: Run, steps: list[int]) -> None:
    """Nothing half-written or without a record; ``steps`` are good, and step 40 is the one that was damaged before."""
    assert run.half_written() == []
    files = {path.name for path in (run.checkpoints / "rank_0").glob("*.safetensors")}
    assert files == {"qwen3_rank_0-3_10.safetensors", "qwen3_rank_0-4_5.safetensors", "qwen3_rank_0-4_10.safetensors"}
    for step in steps:
        done = run.mindresume("verify", str(run.checkpoints), "--step", str(step))
        assert done.returncode == 0 and f"step {step} " in done.stdout, done.stdout + done.stderr
    assert run.which()["chosen"]["step"] == max(steps)


def test_full_disk_is_an_error_line_for_each_save(full, whole_single):
    """It names file and reason; the training itself is not touched by it."""
    found = failures(full.warn)
    assert len(found) == 3
    for number, (line, step) in enumerate(zip(found, (36, 37, 38), strict=True), start=1):
        assert f"step {step} was not saved on rank 0: File too large" in line
        assert f"qwen3_rank_0_1-4_{step - 30}.safetensors" in line and f"({number} failed in a row)" in line
        assert "The checkpoints saved before are untouched" in line
    assert [text for text in differences(whole_single.steps(), full.warn.steps()) if "missing" not in text] == []
    nothing_torn(full.warn, [30, 35])


def test_full_disk_stops_the_training_after_three_failures_in_a_row(full):
    assert full.warn.process.returncode == 1
    assert steps_of(full.warn)[:2] == [36, 37] and steps_of(full.warn)[-1] <= 38
    said(full.warn, "failed: SaveError: step 38 was not saved on rank 0: File too large")


def test_full_disk_ends_the_job_at_once_if_asked_to(full):
    assert full.strict.process.returncode == 1
    assert steps_of(full.strict) in ([], [36])
    assert len(failures(full.strict)) == 1
    said(full.strict, "failed: SaveError: step 36 was not saved on rank 0: File too large")
    nothing_torn(full.strict, [30, 35])


def test_a_blocked_folder_for_a_while(whole_single, tmp_path):
    """A file lies where the folder of the rank should be, then it is gone again: the job ends well, with what it could save."""
    run = beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.save_checkpoint_steps 10 --callbacks.1.keep_checkpoint_max 10")
    run.until(11)
    folder, aside = run.checkpoints / "rank_0", run.checkpoints / "aside"
    run.signal_all(signal.SIGSTOP)
    stopped_at = steps_of(run)[-1]
    assert stopped_at < 30, "the machine is too slow to look in time"
    os.rename(folder, aside)
    folder.write_text("in the way")
    run.signal_all(signal.SIGCONT)
    while not failures(run) and run.process.poll() is None:
        time.sleep(0.01)
    run.signal_all(signal.SIGSTOP)
    folder.unlink()
    os.rename(aside, folder)
    run.signal_all(signal.SIGCONT)
    run.ended(LIMIT)
    assert differences(whole_single.steps(), run.steps()) == []
    found = failures(run)
    assert 1 <= len(found) <= 2
    missed = [step for step in (20, 30, 40) if any(f"step {step} was not saved on rank 0: " in line for line in found)]
    assert len(missed) == len(found)
    for line in found:
        assert str(folder) in line and ("File exists" in line or "Not a directory" in line), line
    kept = [step for step in (10, 20, 30, 40) if step not in missed]
    assert sorted(names(run)) == kept and run.half_written() == []
    assert run.mindresume("verify", str(run.checkpoints)).returncode == 0
    assert run.which()["chosen"]["step"] == kept[-1]
