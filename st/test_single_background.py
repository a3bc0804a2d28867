"""async_save on the real Trainer: the losses are those of the uninterrupted run, kills in a background save lose nothing, and a
second job in the same folder is refused."""
from __future__ import annotations

import os
import signal

import pytest

from mindresume.tensor_files import read_header, read_tensor
from st.copies import LIMIT, beside, said, steps_of, together, weights
from st.jobs import Run, differences

KINDS = ["thread", "process"]
ASYNC = "--callbacks.1.async_save {} --callbacks.1.save_checkpoint_steps 1 --callbacks.1.keep_checkpoint_max 3"


@pytest.fixture(scope="module")
def behind(whole_single, tmp_path_factory) -> dict[str, Run]:
    """Both kinds from the start, saving at every step, killed while a background save is being written after step 12."""
    base = tmp_path_factory.mktemp("background")
    runs = {kind: beside(whole_single, base / kind, copied=False) for kind in KINDS}

    def live(kind: str) -> None:
        run = runs[kind]
        run.start(ASYNC.format(kind))
        run.stop_in_a_save(12)
        run.kill()
    together(*(lambda kind=kind: live(kind) for kind in KINDS))
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_a_background_save_and_started_again(behind, whole_single, kind):
    run = behind[kind]
    before = run.which()
    reached = steps_of(run)[-1]
    assert reached - 2 <= before["chosen"]["step"] <= reached
    run.start(ASYNC.format(kind)).ended(LIMIT)
    said(run, f"mindresume: resume from step {before['chosen']['step']}")
    assert [text for text in differences(whole_single.steps(), run.steps(-1)) if "missing" not in text] == []
    assert steps_of(run)[-1] == 40
    said(run, "is being saved as")
    assert run.half_written() == []
    assert run.mindresume("verify", str(run.checkpoints)).returncode == 0
    assert run.which()["chosen"]["step"] == 40


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_behind_the_training_is_what_a_synchronous_save_writes(behind, whole_single, kind):
    """The last step of both, bit by bit: the snapshot was not changed by the steps that followed."""
    contents = []
    for run in (whole_single, behind[kind]):
        path = weights(run, 40)
        with open(path, "rb") as file:
            header = read_header(file, str(path))
            contents.append({name: read_tensor(file, entry).tobytes() for name, entry in header.tensors.items()})
    assert contents[0] == contents[1]


def test_a_second_job_in_the_same_folder_is_refused_and_the_first_goes_on(whole_single, tmp_path):
    run = beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.save_checkpoint_steps 5", MINDRESUME_HEARTBEAT="2")
    run.until(6)
    run.signal_all(signal.SIGSTOP)                              # it lives, and it must still be there in a minute
    second = beside(run, tmp_path / "second", copied=False)
    second.start(f"--output_dir {run.folder}/output")
    try:
        status = second.wait(LIMIT)
    finally:
        run.signal_all(signal.SIGCONT)
    assert status != 0
    text = second.launcher_log()
    assert "is in use: run 0001-" in text and f"process {os.getpid()}" not in text and "set another output_dir" in text
    run.ended(LIMIT)
    assert [row["step"] for row in run.steps()][-1] == 40
    assert run.which()["chosen"]["step"] == 40


def test_a_job_that_was_taken_over_stops_saving(whole_single, tmp_path):
    """A later run appears in the folder, as after a network that was cut: the older one ends and says who it is."""
    from mindresume.coordination.lease import SAVING, Lease, holder_of_this_process
    from mindresume.model.manifest import FOLDER, run_name
    from mindresume.storage.posix import PosixStorage
    run = beside(whole_single, tmp_path / "run", copied=False)
    run.start("--callbacks.1.save_checkpoint_steps 2")
    run.until(4)
    holder = holder_of_this_process(SAVING, 1)
    later = Lease(PosixStorage(), str(run.checkpoints), type(holder)(**{**vars(holder), "run": run_name(2, "0000beef")}))
    later.publish()
    later.beat()                                                # it has acquired the folder
    assert run.wait(LIMIT) != 0
    assert "run 0002-0000beef on host" in run.launcher_log() and "has taken over" in run.launcher_log()
    assert steps_of(run)[-1] < 40
    assert os.path.isdir(run.checkpoints / FOLDER) and run.which()["chosen"]["step"] >= 2
