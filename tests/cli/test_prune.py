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

ROOT = Path(__file__).resolve().parents[2]


COMMAND = "prune"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Saves steps 5 to 30 of 2 ranks below ``run/output/checkpoint``, with the smallest loss at
    step 15, and step 35 of rank 0 alone."""
    root, plain = tmp_path / "run" / "output" / "checkpoint", rank_folders.state_of
    monkeypatch.setattr(
        rank_folders,
        "state_of",
        lambda step, batch=8: replace(plain(step, batch), metrics={"loss": abs(step - 15.0)}),
    )
    for step in (5, 10, 15, 20, 25, 30):
        save(root, step, world=2)
    write_rank(root, 35, 0, 2)
    return root


def contents(root):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(root).rglob("*")}


def steps(rows):
    return [row["step"] for row in rows]


def test_pruning_twice_removes_nothing_more(saved, read_ok):
    read_ok(saved, "--keep-last", 2, "--keep-minutes", 0.1)
    before = contents(saved)
    again = read_ok(saved, "--keep-last", 2, "--keep-minutes", 0.1)
    assert (again["removed"], again["freed_bytes"]) == ([], 0) and contents(saved) == before


def test_a_dry_run_keeps_the_lease_of_a_dead_reader(saved, read_ok):
    dead_reader(saved, 5)
    before = contents(saved)
    assert (
        steps(read_ok(saved, "--keep-last", 5, "--dry-run")["removed"]) == [35, 5]
        and contents(saved) == before
    )
    assert steps(read_ok(saved, "--keep-last", 5)["removed"]) == [35, 5]


def test_another_training_in_the_same_folder(tmp_path, read_ok, monkeypatch):
    """The one that saved last is meant, unless all are."""
    plain = rank_folders.target_of
    monkeypatch.setattr(
        rank_folders,
        "target_of",
        lambda root, rank, world, run, *part: replace(
            plain(root, rank, world, run, *part), lineage=run
        ),
    )
    for run, steps_of in ((RUN, (100, 110)), (LATER_RUN, (5, 10, 15))):
        for step in steps_of:
            save(tmp_path, step, world=1, run=run, suffix=int(run[:4]))
    found = read_ok(tmp_path, "--keep-last", 1, "--dry-run")
    assert {row["step"]: row["reason"] for row in found["kept"]} == {
        15: "the newest one that is whole, the last one",
        110: "of another training",
        100: "of another training",
    }
    assert steps(found["removed"]) == [10, 5]
    assert steps(read_ok(tmp_path, "--keep-last", 1, "--all-trainings")["removed"]) == [
        10,
        5,
        110,
        100,
    ]
    assert committed_steps(tmp_path) == [15]
