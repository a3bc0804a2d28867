"""The commands as processes of a launch: process 0 prints the whole result, and all end with the
same status. Those that wait for each other are real processes."""

import json
import os
from pathlib import Path

import pytest
from rank_folders import flip_bit
from reshard.plans import MODEL, Plan, random_tensors, recorded

import mindresume
from mindresume.cli.common import TIMEOUT

LAUNCHER = ("MS_", "RANK_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


def environment(size, rank):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER)}
    return {**clean, "RANK_ID": str(rank), "MS_WORKER_NUM": str(size)}


@pytest.fixture
def launch(call, monkeypatch):
    """Runs the process ``rank`` of a launch of ``size``. Returns (status, stdout, stderr)."""

    def run(size, rank, *arguments, **variables):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {**environment(size, rank), **variables})
            return call(*arguments)

    return run


@pytest.fixture
def source(tmp_path):
    return recorded(
        tmp_path / "checkpoint", Plan.parse("tp4"), random_tensors(MODEL)
    ), tmp_path / "checkpoint"


def test_each_process_verifies_a_share_and_prints_what_it_found(source, tmp_path, launch):
    candidate, root = source
    damaged = [str(root / candidate.files[rank][0].path) for rank in (1, 3)]
    for path in damaged:
        flip_bit(Path(path), -1)
    found = [launch(3, rank, "verify", root, "--json") for rank in range(3)]
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


def test_a_process_that_does_not_come_is_an_error(source, tmp_path, launch, clock):
    status, _, err = launch(2, 0, "convert", source[1], tmp_path / "new", "--to", "dp=3")
    assert status == 2 and "part 2 of 2" in err and "MS_WORKER_NUM=2" in err
    assert not (tmp_path / "new").exists() and TIMEOUT < clock.now < TIMEOUT + 60


def test_what_process_0_alone_does(source, tmp_path, launch, clock):
    convert = ("convert", source[1], tmp_path / "new", "--to", "tp=2")
    found = [launch(2, rank, *convert, "--dry-run") for rank in range(2)]
    assert [status for status, _, _ in found] == [0, 0]
    assert "dry run" in found[0][1] and not found[1][1]
    assert launch(2, 0, *convert, MS_ROLE="MS_SCHED") == (0, "", "")
    for rank in range(2):
        assert launch(2, rank, *convert, "--engine", "mindspore")[0] == 2
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_parts_by_hand(source, tmp_path, launch):
    _, root = source
    assert "part 1 of 2" in launch(1, 0, "verify", root, "--part", "1/2")[1]
    for part, there in (("2/2", False), ("1/2", True)):
        status, _, err = launch(
            1, 0, "convert", root, tmp_path / "new", "--to=tp=2", "--part", part
        )
        assert (status, err) == (0, "") and (tmp_path / "new").exists() is there
