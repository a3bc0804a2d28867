"""The commands as processes of a launch: process 0 prints the whole result, and all end with the
same status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rank_folders import flip_bit
from reshard.plans import MODEL, Plan, random_tensors, recorded

import mindresume

LAUNCHER = ("MS_", "RANK_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


def launch(size, *arguments, ranks=None, **variables):
    """Returns [(status, stdout, stderr)] of the processes ``ranks`` (default: all) of a launch of
    ``size``."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "mindresume", *map(str, arguments)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**clean, "RANK_ID": str(rank), "MS_WORKER_NUM": str(size), **variables},
        )
        for rank in ranks or range(size)
    ]
    found = [process.communicate(timeout=100) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, found, strict=True)]


@pytest.fixture
def source(tmp_path):
    return recorded(
        tmp_path / "checkpoint", Plan.parse("tp4"), random_tensors(MODEL)
    ), tmp_path / "checkpoint"


def test_each_process_verifies_a_share_and_prints_what_it_found(source, tmp_path):
    candidate, root = source
    damaged = [str(root / candidate.files[rank][0].path) for rank in (1, 3)]
    for path in damaged:
        flip_bit(Path(path), -1)
    found = launch(3, "verify", root, "--json")
    reports = [json.loads(out) for _, out, _ in found]
    assert sum(row["bytes_read"] for row in reports) >= sum(
        file.size for file in candidate.all_files
    )
    problems = [
        [problem["file"] for problem in row["checkpoints"][0]["problems"]] for row in reports
    ]
    assert [status for status, _, _ in found] == [int(bool(files)) for files in problems]
    assert sorted(sum(problems, [])) == damaged
    note = mindresume.open(root).verify(part=(1, 2)).notes[-1]
    assert note == "part 1 of 2: only this share of the files was read"
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_the_files_of_merged_weights_are_shared_too(source, tmp_path):
    mindresume.merge(source[1], tmp_path / "merged", part_size_bytes=2000)
    files = [str(tmp_path / "merged" / f"part{number}.safetensors") for number in (1, 2)]
    for file in files:
        flip_bit(Path(file), -1)
    catalog = mindresume.open(tmp_path / "merged")
    reports = [catalog.verify(part=(number, 3)) for number in (1, 2, 3)]
    assert sorted(row.file for report in reports for row in report.problems) == files


def test_the_processes_of_a_launch_share_the_files(source, tmp_path):
    _, root = source
    found = launch(2, "merge", root, tmp_path / "merged", "--part-size", "2000")
    assert [status for status, _, _ in found] == [0, 0] and found[0][1] and not found[1][1]
    assert (
        "this is process 1 of 2, as RANK_ID=1 and MS_WORKER_NUM=2 in the environment say"
        in found[1][2]
    )
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "merged"]


def test_a_process_that_does_not_come_is_an_error(source, tmp_path):
    _, root = source
    found = launch(
        3, "convert", root, tmp_path / "new", "--to", "dp=3", "--timeout", "2", ranks=(0, 2)
    )
    assert [status for status, _, _ in found] == [2, 2]
    assert "part 2 of 3" in found[0][2] and "MS_WORKER_NUM=3" in found[0][2]
    assert not (tmp_path / "new").exists()


def test_what_process_0_alone_does(source, tmp_path):
    _, root = source
    found = launch(2, "convert", root, tmp_path / "new", "--to", "tp=2", "--dry-run")
    assert (
        [status for status, _, _ in found] == [0, 0]
        and "dry run" in found[0][1]
        and not found[1][1]
    )
    (scheduler,) = launch(
        2, "convert", root, tmp_path / "new", "--to", "tp=2", ranks=(0,), MS_ROLE="MS_SCHED"
    )
    assert scheduler == (0, "", "")
    refused = launch(2, "convert", root, tmp_path / "new", "--to", "tp=2", "--engine", "mindspore")
    assert [status for status, _, _ in refused] == [2, 2]
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_parts_by_hand(source, tmp_path):
    _, root = source
    ((_, out, _),) = launch(1, "verify", root, "--part", "1/2")
    assert "part 1 of 2" in out
    for part, there in (("2/2", False), ("1/2", True)):
        ((status, _, err),) = launch(
            1, "convert", root, tmp_path / "new", "--to", "tp=2", "--part", part
        )
        assert (status, err) == (0, "") and (tmp_path / "new").exists() is there
