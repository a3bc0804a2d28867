"""``mindresume prune``: its output, the files that it removes, and that a dry run changes
nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
import rank_folders
from lease_holders import dead_reader
from rank_folders import (
    LATER_RUN,
    RUN,
    committed_steps,
    save,
    write_rank,
)

COMMAND = "prune"


@pytest.fixture
def saved(tmp_path):
    """Saves steps 5 to 30 of 2 ranks, and step 35 of rank 0 alone."""
    for step in range(5, 31, 5):
        save(tmp_path, step, world=2)
    write_rank(tmp_path, 35, 0, 2)
    return tmp_path


def contents(root):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(root).rglob("*")}


def steps(rows):
    return [row["step"] for row in rows]


def test_another_training_in_the_same_folder(tmp_path, read_ok, monkeypatch):
    """The one that saved last is meant, unless all are."""
    plain = rank_folders.target_of

    def target_of(root, rank, world, run, *part):
        return replace(plain(root, rank, world, run, *part), lineage=run)

    monkeypatch.setattr(rank_folders, "target_of", target_of)
    for run, saves in ((RUN, (100, 110)), (LATER_RUN, (5, 10, 15))):
        for step in saves:
            save(tmp_path, step, world=1, run=run, suffix=int(run[:4]))
    found = read_ok(tmp_path, "--keep-last", 1, "--dry-run")
    assert {row["step"]: row["reason"] for row in found["kept"]} == {
        15: "the newest one that is whole, the last one",
        110: "of another training",
        100: "of another training",
    }
    removed = read_ok(tmp_path, "--keep-last", 1, "--all-trainings")["removed"]
    assert steps(found["removed"]) == [10, 5] and steps(removed) == [10, 5, 110, 100]
    assert committed_steps(tmp_path) == [15]


def test_a_dry_run_keeps_the_lease_of_a_dead_reader_and_pruning_twice_removes_nothing_more(
    saved, read_ok
):
    dead_reader(saved, 5)
    before = contents(saved)
    assert steps(read_ok(saved, "--keep-last", 5, "--dry-run")["removed"]) == [35, 5]
    assert contents(saved) == before
    assert steps(read_ok(saved, "--keep-last", 5)["removed"]) == [35, 5]
    before = contents(saved)
    again = read_ok(saved, "--keep-last", 5)
    assert (again["removed"], again["freed_bytes"]) == ([], 0) and contents(saved) == before
