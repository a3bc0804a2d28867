"""The PyNative trainer with the tier in memory: SIGKILL of all ranks, and a node that is lost.
The graph trainer: tests/judge, st/test_supervised_recovery.py."""

import os
import shutil

import pytest

from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.saving.memory_tier.directory import read_mark, tier_path
from mindresume.storage.posix import PosixStorage
from st.pynative_cases import OURS, assert_same, build, dies, whole  # noqa: F401
from st.pynative_run import why_not
from st.run_attempts import LIMIT, assert_event, events
from st.training_run import Run

# ruff: noqa: F811  build and whole are fixtures
STORAGE = PosixStorage()


def settings(memory: str) -> dict[str, str]:
    return {"MINDRESUME_MEMORY_TIER_EVERY_STEPS": "3", "MINDRESUME_MEMORY_TIER_DIR": memory}


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


def on(release: str, workers: int, soak: bool = False):
    reason = why_not(release, workers)
    return pytest.param(
        release,
        workers,
        marks=[
            *([pytest.mark.skip(reason=reason)] if reason else []),
            *([pytest.mark.soak] if soak else []),
        ],
    )


@pytest.mark.parametrize(
    "release, workers",
    [
        on("1.9.0", 1),
        on("2.0.0", 2, soak=True),
        on("2.1.0", 1, soak=True),
        on("2.1.0", 2, soak=True),
    ],
)
def test_a_killed_training_resumes_from_memory_and_without_the_node_from_disk(
    whole, build, memory, release, workers
):
    """Saves on disk are at 20 and 40, saves in memory at multiples of 3."""
    reference, run = (
        whole(release, workers),
        build("run", release, workers, {"checkpoint.save_interleaved_steps": 20}),
    )
    run.start(CPU_CLUSTER_KILL="all@29", **OURS, **settings(memory))
    dies(run)
    newest = in_memory(run)[0].step
    # one is whole while the other is written
    assert newest in (24, 27)
    run.resume(CPU_CLUSTER_KILL="all@37", **OURS, **settings(memory))
    dies(run)
    assert sources(run) == ["memory"] * workers
    assert_event(run, "resumed", step=newest)
    assert_same(run, reference, newest + 1, 37)
    shutil.rmtree(tier_of(run))
    run.resume(**OURS, **settings(memory)).wait_for_success(LIMIT)
    assert sources(run) == ["disk"] * workers
    assert_same(run, reference, 21)
    # the last step is on disk
    assert not os.path.exists(tier_of(run)) and not events(run, "tier_refused")
