"""``mindresume prune``: its output, the files that it removes, and that a dry run changes
nothing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import rank_folders
from lease_holders import dead_reader, publish_lease, reading
from rank_folders import (
    LATER_RUN,
    RUN,
    committed_steps,
    path_of,
    save,
    trash,
    write_foreign,
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


def size_of(root, *wanted):
    return sum(path_of(root, step, rank).stat().st_size for step, rank in wanted)


def test_prune_reports_what_is_kept_and_removed_and_why(saved, read_ok):
    going = size_of(saved, (5, 0), (5, 1), (25, 0), (25, 1), (35, 0))
    found = read_ok(
        saved, "--keep-last", 1, "--keep-every-steps", 10, "--keep-best", 2, "--mode", "min"
    )
    assert set(found) == {
        "root",
        "dry_run",
        "kept",
        "removed",
        "held",
        "resumed_removals",
        "freed_bytes",
    }
    assert (found["root"], found["dry_run"], found["held"]) == (str(saved), False, [])
    assert {row["step"]: row["reason"] for row in found["kept"]} == {
        30: "the newest one that is whole, the last one, one every 10 steps",
        # as far from 15 as step 10, and newer
        20: "one every 10 steps, the best 2 by loss (smallest)",
        15: "the best 2 by loss (smallest)",
        10: "one every 10 steps",
    }
    assert steps(found["removed"]) == [35, 25, 5] and committed_steps(saved) == [30, 20, 15, 10]
    assert set(found["removed"][0]) == {
        "step",
        "run_id",
        "saved_at",
        "size_bytes",
        "committed",
        "reason",
    }
    assert [row["committed"] for row in found["removed"]] == [False, True, True]
    assert found["freed_bytes"] == sum(row["size_bytes"] for row in found["removed"]) == going


def test_a_dry_run_reports_the_same_and_changes_nothing(saved, read_ok, call):
    before = contents(saved)
    dry = read_ok(saved, "--keep-last", 2, "--dry-run")
    status, out, err = call(saved, "--keep-last", 2, "--dry-run")
    assert contents(saved) == before and dry["dry_run"] is True and (status, err) == (0, "")
    assert "dry run, nothing was changed" in out and 0 < out.count("would be removed") == out.count(
        "removed"
    )
    real = read_ok(saved, "--keep-last", 2)
    assert {**dry, "dry_run": False} == real and committed_steps(saved) == [30, 25]


def test_the_table(saved, call):
    status, out, err = call(saved.parents[1], "--keep-best", 1, "--metric", "loss", "--mode", "max")
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()[2:] if line[:4].strip().isdigit()}
    assert list(lines) == ["35", "30", "25", "20", "15", "10", "5"]
    assert (
        "kept" in lines["30"]
        and "the best one by loss (largest)" in lines["30"]
        and "newest" in lines["30"]
    )
    assert "removed" in lines["15"] and "none of: the best one by loss (largest)" in lines["15"]
    assert "removed" in lines["35"] and "never completed" in lines["35"]
    assert out.rstrip().endswith("KiB freed") and committed_steps(saved) == [30]


def test_pruning_twice_removes_nothing_more(saved, read_ok):
    read_ok(saved, "--keep-last", 2, "--keep-minutes", 0.1)
    before = contents(saved)
    again = read_ok(saved, "--keep-last", 2, "--keep-minutes", 0.1)
    assert (again["removed"], again["freed_bytes"]) == ([], 0) and contents(saved) == before


def test_prune_keeps_a_checkpoint_that_a_job_reads(saved, read_ok, call):
    held = reading(saved, 10)
    try:
        found = read_ok(saved, "--keep-last", 1)
        assert steps(found["held"]) == [10] and str(os.getpid()) in found["held"][0]["reason"]
        assert steps(found["removed"]) == [35, 25, 20, 15, 5] and committed_steps(saved) == [30, 10]
        assert "held" in call(saved, "--keep-last", 1)[1]
    finally:
        held.release()
    assert steps(read_ok(saved, "--keep-last", 1)["removed"]) == [10]


def test_an_incomplete_save_of_a_running_job_is_kept(saved, read_ok):
    job = publish_lease(saved)
    found = read_ok(saved, "--keep-last", 6)
    assert steps(found["kept"]) == [35, 30, 25, 20, 15, 10, 5] and found["removed"] == []
    assert "may still go on" in found["kept"][0]["reason"] and path_of(saved, 35, 0).exists()
    job.release()
    assert (
        steps(read_ok(saved, "--keep-last", 6)["removed"]) == [35]
        and not path_of(saved, 35, 0).exists()
    )


def test_a_dry_run_keeps_the_lease_of_a_dead_reader(saved, read_ok):
    dead_reader(saved, 5)
    before = contents(saved)
    assert (
        steps(read_ok(saved, "--keep-last", 5, "--dry-run")["removed"]) == [35, 5]
        and contents(saved) == before
    )
    assert steps(read_ok(saved, "--keep-last", 5)["removed"]) == [35, 5]


def test_removals_cut_short_are_finished_and_counted(saved, read_ok, call):
    trash(saved, 5)
    size, before = size_of(saved, (5, 0), (5, 1), (35, 0)), contents(saved)
    out = call(saved, "--keep-last", 5, "--dry-run")[1]
    assert (
        "would also finish 1 interrupted removal(s) (step 5)" in out and contents(saved) == before
    )
    assert read_ok(saved, "--keep-last", 5)["freed_bytes"] == size
    assert not path_of(saved, 5, 0).exists() and sorted(committed_steps(saved)) == [
        10,
        15,
        20,
        25,
        30,
    ]


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


def test_a_folder_of_mindformers_alone(tmp_path, call, read_ok):
    write_foreign(tmp_path, 5, world=2)
    before = contents(tmp_path)
    status, out, _ = call(tmp_path, "--keep-last", 1)
    assert (
        status == 0
        and "what mindformers wrote alone is never removed" in out
        and "0 B freed" in out
    )
    assert read_ok(tmp_path, "--keep-last", 1)["kept"] == [] and contents(tmp_path) == before


@pytest.mark.parametrize(
    "options, word",
    [
        ([], "at least one of --keep-last"),
        (["--dry-run"], "at least one"),
        (["--keep-last", "0"], "--keep-last"),
        (["--keep-best", "x"], "--keep-best"),
        (["--keep-last", "1", "--metric", "loss"], "belong to --keep-best"),
        (["--keep-last", "1", "--mode", "min"], "--keep-best"),
        (["--keep-best", "1", "--mode", "least"], "min, max"),
        (["--keep-minutes", "0"], "above 0"),
    ],
)
def test_wrong_options(saved, call, options, word):
    before = contents(saved)
    status, out, err = call(saved, *options)
    assert (
        status == 2
        and out == ""
        and word.replace(" ", "") in err.replace(" ", "")
        and contents(saved) == before
    )


@pytest.mark.parametrize(
    "inner, word",
    [
        ("missing", "does not exist"),
        ("rank_0", "not a checkpoint folder"),
        ("rank_0/net_rank_0-1_5.safetensors", "not a checkpoint folder"),
    ],
)
def test_not_a_checkpoint_folder(saved, call, inner, word):
    status, _, err = call(saved / inner, "--keep-last", "1")
    assert status == 2 and word in err and len(committed_steps(saved)) == 6


def test_no_framework_is_imported(saved):
    code = (
        "import sys; from mindresume import cli; sys.argv = ['mindresume', 'prune', sys.argv[1], "
        "'--keep-last', '2']\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({name.split('.')[0] for name in sys.modules} & {'mindspore', "
        "'mindformers', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(saved)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stdout.rstrip().endswith("LOADED []"), (
        done.stdout + done.stderr
    )
