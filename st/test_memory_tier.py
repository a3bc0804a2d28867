"""The tier in memory with the real Trainer: SIGKILL of all ranks of several. One rank, saves that
stop the training, and rot are cases of the judge; the loss of a rank or of the node is in
st/test_supervised_recovery.py."""


import pytest

from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.saving.memory_tier.directory import read_mark, tier_path
from mindresume.storage.posix import PosixStorage
from st.run_attempts import (
    LIMIT,
    assert_resumed,
    events,
    run_beside,
)
from st.training_run import FORMAT_2, Run

pytestmark = pytest.mark.timeout(1200)
STORAGE = PosixStorage()
EVERY = 3


def settings(memory: str, every: int = EVERY) -> dict[str, str]:
    return {"MINDRESUME_MEMORY_TIER_EVERY_STEPS": str(every), "MINDRESUME_MEMORY_TIER_DIR": memory}


def tier_of(run: Run) -> str:
    return tier_path(read_mark(CheckpointDir(STORAGE, str(run.checkpoints))))


def in_memory(run: Run) -> list:
    """Returns the saves in memory that are whole, newest first."""
    return [
        candidate
        for candidate in scan_records(CheckpointDir(STORAGE, tier_of(run)))[0]
        if candidate.problem is None
    ]


def sources(run: Run) -> list[str]:
    """Returns where each rank of the last attempt resumed from."""
    return [
        row["source"]
        for rank in range(run.workers)
        for row in events(run, "checkpoint_selected", rank)
    ]


def killed(run: Run, command: str, memory: str, step: int = 19, every: int = EVERY) -> Run:
    """Starts ``run`` and kills all of its ranks after ``step``."""
    run.start(command, **settings(memory, every)).wait_for_step(step)
    run.kill()
    return run


@pytest.mark.soak
@pytest.mark.parametrize("command", ["", FORMAT_2])
def test_several_processes_resume_from_memory_at_every_step(
    whole_several, tmp_path, memory, command
):
    run = killed(
        run_beside(whole_several, tmp_path / "run", copied=False), command, memory, every=1
    )
    newest = in_memory(run)[0].step
    assert newest >= 17
    run.start(command, **settings(memory, 1)).wait_for_success(LIMIT)
    assert_resumed(run, whole_several, newest)
    assert sources(run) == ["memory"] * run.workers
