"""async_save on the real Trainer: the losses equal those of the uninterrupted run, kills in a
background save lose nothing, and a second job in the same folder is refused."""

import os
import signal

import pytest

from mindresume.formats import CheckpointDir
from st.checkpoint_files import not_equal, tensors_in, weights
from st.run_attempts import (
    LIMIT,
    assert_event,
    assert_resumed,
    failure,
    in_parallel,
    log_has,
    run_beside,
    steps_of,
)
from st.training_run import Run

KINDS = ["thread", "process"]
ASYNC = (
    "--callbacks.1.async_save {} --callbacks.1.save_checkpoint_steps 1 "
    "--callbacks.1.keep_checkpoint_max 3"
)


@pytest.fixture(scope="module")
def behind(whole_single, tmp_path_factory) -> dict[str, Run]:
    """Runs both kinds from the start, saving at every step, killed during a background save after
    step 12."""
    base = tmp_path_factory.mktemp("background")
    runs = {kind: run_beside(whole_single, base / kind, copied=False) for kind in KINDS}

    def start_and_kill(kind: str) -> None:
        run = runs[kind]
        run.start(ASYNC.format(kind))
        run.stop_in_a_save(12)
        run.kill()

    in_parallel(*(lambda kind=kind: start_and_kill(kind) for kind in KINDS))
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_killed_in_a_background_save_resumes(behind, whole_single, kind):
    run = behind[kind]
    before = run.which()
    reached = steps_of(run)[-1]
    assert reached - 2 <= before["chosen"]["step"] <= reached
    run.start(ASYNC.format(kind)).wait_for_success(LIMIT)
    assert_resumed(run, whole_single, before["chosen"]["step"])
    assert_event(run, "save_staged")
    assert run.half_written() == []
    assert run.mindresume("verify", str(run.checkpoints)).returncode == 0
    assert run.which()["chosen"]["step"] == 40


@pytest.mark.parametrize("kind", KINDS)
def test_an_asynchronous_save_writes_the_same_bits_as_a_synchronous_one(behind, whole_single, kind):
    """The last step of both, bit by bit: the snapshot was not changed by the steps that
    followed."""
    assert not_equal(*(tensors_in(weights(run, 40)) for run in (whole_single, behind[kind]))) == []


def test_a_second_job_in_the_same_folder_is_refused_and_the_first_continues(whole_single, tmp_path):
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.save_checkpoint_steps 5", MINDRESUME_HEARTBEAT="2")
    run.wait_for_step(6)
    # it must still exist, stopped, in a minute
    run.signal_all(signal.SIGSTOP)
    second = run_beside(run, tmp_path / "second", copied=False)
    second.start(f"--output_dir {run.folder}/output")
    try:
        status = second.wait(LIMIT)
    finally:
        run.signal_all(signal.SIGCONT)
    assert status != 0
    assert log_has(second, "LeaseHeldError", "0001-", "output_dir") and not log_has(
        second, f"process {os.getpid()}"
    )
    run.wait_for_success(LIMIT)
    assert [row["step"] for row in run.steps()][-1] == 40
    assert run.which()["chosen"]["step"] == 40


def test_a_job_that_was_taken_over_stops_saving(whole_single, tmp_path):
    """A later run appears in the folder, as after a network that was cut: the older one ends with
    an error that names it."""
    from mindresume.coordination.lease import SAVING, Lease, holder_of_this_process
    from mindresume.model.manifest import FOLDER, run_name
    from mindresume.storage.posix import PosixStorage

    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.save_checkpoint_steps 2")
    run.wait_for_step(4)
    holder = holder_of_this_process(SAVING, 1)
    later = Lease(
        CheckpointDir(PosixStorage(), str(run.checkpoints)),
        type(holder)(**{**vars(holder), "run": run_name(2, "0000beef")}),
    )
    later.publish()
    later.beat()  # it has acquired the folder
    assert run.wait(LIMIT) != 0
    assert "0002-0000beef" in failure(run)
    assert steps_of(run)[-1] < 40
    assert os.path.isdir(run.checkpoints / FOLDER) and run.which()["chosen"]["step"] >= 2
