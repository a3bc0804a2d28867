"""Verdicts of the oracle that no mutant of test_teeth.py and no cell of test_all_pass.py shows."""

import os
import random

import pytest

from mindresume.fault_injection.faults import FaultInjector, Scheduler
from mindresume.fault_injection.scenarios import (
    HARD_FAIL,
    LOST_WORK,
    PASS,
    RUNS,
    Sandbox,
    check_resume,
    shard,
)
from mindresume.model.manifest import FOLDER
from mindresume.storage.posix import PosixStorage

RANKS = 2
OLD, NEW = (RUNS[0], 10), (RUNS[0], 20)


@pytest.fixture(params=["safetensors", "ckpt"])
def sandbox(request, folder):
    injector = FaultInjector(PosixStorage(), Scheduler(RANKS, random.Random(0)))
    return Sandbox(injector, os.path.join(folder, "checkpoint"), request.param, RANKS)


def saved(sandbox, *steps, run=0, **how):
    for step in steps:
        sandbox.save_without_faults(run, step, **how)
    return sandbox


def file_of(sandbox, step, rank, run=0):
    target = sandbox.target(rank, run)
    return os.path.join(target.data_dir(step), shard(target, step, sandbox.format).files[0].path)


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2 + 1)  # not at the end of an entry


def test_a_step_that_all_ranks_have_finished_is_due(sandbox):
    """Counts complete saves that were not committed, too."""
    for rank in range(RANKS):
        sandbox.journal.report(NEW, rank)
    assert sandbox.journal.complete() == [NEW]
    assert check_resume(saved(sandbox, 10), [OLD], tidy=False).verdict == LOST_WORK
    assert check_resume(saved(sandbox, 20, commit=False), [OLD], tidy=False).verdict == PASS


@pytest.mark.parametrize("damage", [cut, os.remove])
def test_an_incomplete_committed_checkpoint_is_reported(sandbox, damage):
    """It is not needed now, but a user can request it by name, or a resume can fall back to it."""
    saved(sandbox, 10, 20)
    damage(file_of(sandbox, 10, 1))
    found = check_resume(sandbox, [OLD, NEW])
    assert (found.verdict, found.chosen) == (HARD_FAIL, NEW) and "step 10" in found.reason


def test_all_orphaned_files_are_listed(sandbox):
    saved(sandbox, 10)
    os.makedirs(os.path.join(sandbox.root, FOLDER, "odd"))
    strays = [
        f"{FOLDER}/claim-0001-0000aaaa.json.tmp",
        f"rank_1/.x.{RUNS[2]}.mindresume-tmp",
        "rank_0/drill_rank_0_7-1_3.ckpt",
    ]
    for stray in strays:
        with open(os.path.join(sandbox.root, stray), "wb") as file:
            file.write(b"x")
    found = check_resume(sandbox, [OLD])
    assert (found.verdict, sorted(found.left)) == (PASS, sorted([*strays, f"{FOLDER}/odd"]))
