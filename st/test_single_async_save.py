"""async_save on the real Trainer: the losses equal those of the uninterrupted run, kills in a
background save lose nothing, and a job that another one took over stops."""

import os

import pytest

from mindresume.formats import CheckpointDir
from st.checkpoint_files import not_equal, tensors_in, weights
from st.run_attempts import (
    LIMIT,
    assert_event,
    assert_resumed,
    failure,
    run_beside,
    steps_of,
)

# in a thread: by default st/test_syscalls.py and the judge, "2.0 in the background"
KINDS = [pytest.param("thread", marks=pytest.mark.soak), "process"]
ASYNC = (
    "--callbacks.1.async_save {} --callbacks.1.save_checkpoint_steps 1 "
    "--callbacks.1.keep_checkpoint_max 3"
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_killed_in_a_background_save_resumes(whole_single, tmp_path, kind):
    """It saves at every step. The last step is bit by bit that of a synchronous save: the snapshot
    was not changed by the steps that followed."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.start(ASYNC.format(kind)).stop_in_a_save(12)
    run.kill()
    before = run.which()
    reached = steps_of(run)[-1]
    assert reached - 2 <= before["chosen"]["step"] <= reached
    run.start(ASYNC.format(kind)).wait_for_success(LIMIT)
    assert_resumed(run, whole_single, before["chosen"]["step"])
    assert_event(run, "save_staged")
    assert run.half_written() == []
    assert run.mindresume("verify", str(run.checkpoints)).returncode == 0
    assert run.which()["chosen"]["step"] == 40
    assert not_equal(*(tensors_in(weights(each, 40)) for each in (whole_single, run))) == []


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
