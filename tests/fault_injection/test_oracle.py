"""The oracle gives the right verdict for folders that are built by hand."""

import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest

from mindresume.fault_injection.faults import FaultInjector, Scheduler
from mindresume.fault_injection.oracle import (
    HARD_FAIL,
    LOST_WORK,
    PASS,
    SILENT_DIVERGENCE,
    check_resume,
)
from mindresume.fault_injection.scenarios import RUNS, Sandbox, shard
from mindresume.formats.iterations import TRACKER
from mindresume.model.manifest import FOLDER, attempt_name
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import write_shard
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


def write_altered(sandbox, step, **arrays):
    """Makes all ranks record other tensors than the scenario saves."""
    for rank in range(RANKS):
        target = sandbox.target(rank, 0, PosixStorage())
        part = shard(target, step, sandbox.format)
        kept = {
            name: array
            for name, array in {**part.files[0].tensors, **arrays}.items()
            if array is not None
        }
        altered = replace(part, files=(replace(part.files[0], tensors=kept),))
        write_shard(target, altered)
    Committer(sandbox.target(0, 0, PosixStorage())).poll(step)


# ---- PASS ----------------------------------------------------------------------------------------


def test_the_newest_is_selected_and_the_next_run_cleans_up(sandbox):
    found = check_resume(saved(sandbox, 10, 20), [OLD, NEW])
    assert (found.verdict, found.reason, found.chosen, found.left) == (PASS, "", NEW, ())
    assert os.listdir(os.path.join(sandbox.root, FOLDER)) == [attempt_name(90, RUNS[2])]


def test_a_fresh_start_without_a_complete_save_passes(sandbox):
    found = check_resume(saved(sandbox, 10, commit=False, only=1), [])
    assert (found.verdict, found.reason, found.chosen, found.left) == (
        PASS,
        "nothing was complete",
        None,
        (),
    )


def test_a_step_that_all_ranks_have_finished_is_due(sandbox):
    """Counts complete saves that were not committed, too."""
    for rank in range(RANKS):
        sandbox.journal.report(NEW, rank)
    assert sandbox.journal.complete() == [NEW]
    assert check_resume(saved(sandbox, 10), [OLD], tidy=False).verdict == LOST_WORK
    assert check_resume(saved(sandbox, 20, commit=False), [OLD], tidy=False).verdict == PASS


# ---- LOST_WORK -----------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [cut, os.remove, lambda path: os.truncate(path, 0)])
def test_an_older_checkpoint_than_required_is_lost_work(sandbox, damage):
    saved(sandbox, 10, 20)
    damage(file_of(sandbox, 20, 1))
    found = check_resume(sandbox, [OLD, NEW])
    assert (found.verdict, found.chosen) == (LOST_WORK, OLD)
    assert "20" in found.reason and "rank 1" in found.reason


# ---- HARD_FAIL -----------------------------------------------------------------------------------


def test_a_fresh_start_despite_a_complete_save_is_reported(sandbox):
    found = check_resume(saved(sandbox, 10, commit=False, only=1), [OLD])
    assert found.verdict == HARD_FAIL and "a fresh start" in found.reason


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"last_ckpt_file": "no_such_file.ckpt"}', b'{"last_ckpt_file": 5}', b"\xff"],
)
def test_a_dangling_pointer_is_reported(sandbox, content):
    saved(sandbox, 10)
    with open(os.path.join(sandbox.root, "rank_1", "meta.json"), "wb") as file:
        file.write(content)
    found = check_resume(sandbox, [OLD])
    assert found.verdict == HARD_FAIL and found.reason.startswith("rank_1/meta.json ")


def test_a_pointer_to_a_torn_file(sandbox):
    """The file belongs to a save that never completed: mindformers alone would take it."""
    saved(sandbox, 20, commit=False, only=1)
    saved(sandbox, 10)
    cut(file_of(sandbox, 20, 0))
    with open(os.path.join(sandbox.root, "rank_0", "meta.json"), "w") as file:
        json.dump({"last_ckpt_file": os.path.basename(file_of(sandbox, 20, 0))}, file)
    found = check_resume(sandbox, [OLD])
    assert found.verdict == HARD_FAIL and found.reason.startswith("rank_0/meta.json ")


@pytest.mark.parametrize("damage", [cut, os.remove])
def test_an_incomplete_committed_checkpoint_is_reported(sandbox, damage):
    """It is not needed now, but a user can request it by name, or a resume can fall back to it."""
    saved(sandbox, 10, 20)
    damage(file_of(sandbox, 10, 1))
    found = check_resume(sandbox, [OLD, NEW])
    assert (found.verdict, found.chosen) == (HARD_FAIL, NEW) and "step 10" in found.reason


# ---- SILENT_DIVERGENCE ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "altered, named",
    [
        ({"embedding.weight": np.zeros((2, 2), np.float32)}, "embedding.weight"),
        ({"adam_m.embedding.weight": None}, "adam_m.embedding.weight"),
        ({"global_step": np.array([19], np.int32)}, "global_step"),
    ],
)
def test_other_tensors_than_were_saved(sandbox, altered, named):
    saved(sandbox, 10)
    write_altered(sandbox, 20, **altered)
    found = check_resume(sandbox, [OLD, NEW])
    assert (found.verdict, found.chosen) == (SILENT_DIVERGENCE, NEW) and named in found.reason


# ---- leftovers -----------------------------------------------------------------------------------


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


# ---- iteration folders ---------------------------------------------------------------------------


@pytest.fixture
def iterations(folder):
    injector = FaultInjector(PosixStorage(), Scheduler(RANKS, random.Random(0)))
    return Sandbox(injector, os.path.join(folder, "checkpoint"), "iteration", RANKS)


def visible(sandbox, step, *more):
    return os.path.join(sandbox.root, f"iteration_{step:08d}", *more)


def test_iterations_pass_and_only_the_name_of_the_run_is_left(iterations):
    found = check_resume(saved(iterations, 10, 20), [OLD, NEW])
    assert (found.verdict, found.reason, found.chosen, found.left) == (PASS, "", NEW, ())
    assert os.listdir(os.path.join(iterations.root, FOLDER)) == [f"ended-{RUNS[2]}.json"]
    assert sorted(os.listdir(iterations.root)) == [FOLDER, "iteration_00000090", TRACKER]


@pytest.mark.parametrize("content", ["", "15", "30", "ten"])
def test_a_dangling_tracker_is_reported(iterations, content):
    saved(iterations, 10, 20)
    with open(os.path.join(iterations.root, TRACKER), "w") as file:
        file.write(content)
    found = check_resume(iterations, [OLD] if content == "15" else [OLD, NEW], tidy=False)
    assert found.verdict == HARD_FAIL and found.reason.startswith(f"{TRACKER} ")


@pytest.mark.parametrize("name", ["common.json", "metadata.json"])
def test_small_files_count_although_a_resume_can_do_without_them(iterations, name):
    os.remove(visible(saved(iterations, 10, 20), 10, name))
    found = check_resume(iterations, [OLD, NEW], tidy=False)
    assert (
        found.verdict == HARD_FAIL and found.reason.startswith("committed") and name in found.reason
    )
