"""Folders of records of both formats: where they are found, their candidates, and their
problems."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import rank_folders
from iteration_folders import folder_of, making, records_of, save, unname, write_all, write_rank
from rank_folders import RUN, STORAGE, dir_at

from mindresume.formats import CheckpointDir, records
from mindresume.formats.records import ReadManifests, attempts_within, find_attempts, scan_records
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    Manifest,
    attempt_name,
    record_name,
    run_name,
)
from mindresume.storage import publish
from mindresume.storage.posix import PosixStorage

NEXT = run_name(2, "0000bbbb")


def candidates(root, **how):
    return scan_records(dir_at(root), **how)[0]


def test_attempts_of_both_formats_and_in_every_state(tmp_path):
    rank_folders.save(tmp_path, 5, world=2)
    save(tmp_path, 10, 15)
    unname(tmp_path, 15)
    write_rank(tmp_path, 20, 1)
    (tmp_path / FOLDER / "trash-step-0000000001-run-0001-0000aaaa").mkdir()
    (tmp_path / "iteration_00000030").mkdir()
    found = {
        (a.step, a.iteration_dir): (str(tmp_path / a.place), MANIFEST in a.content)
        for a in find_attempts(dir_at(tmp_path))
    }
    assert found == {
        (5, ""): (str(tmp_path / FOLDER / attempt_name(5, RUN)), True),
        (10, "iteration_00000010"): (str(records_of(folder_of(tmp_path, 10), 10)), True),
        (15, f"{FOLDER}/{attempt_name(15, RUN)}"): (
            str(records_of(making(tmp_path, 15), 15)),
            True,
        ),
        (20, f"{FOLDER}/{attempt_name(20, RUN)}"): (
            str(records_of(making(tmp_path, 20), 20)),
            False,
        ),
    }


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_folders_of_a_writer_killed_while_it_created_them_are_an_attempt(tmp_path, depth):
    """Between the second and the third folder no listing contained it."""
    parts = [FOLDER, attempt_name(10, RUN), FOLDER, attempt_name(10, RUN)]
    os.makedirs(tmp_path.joinpath(*parts[: depth + 1]))
    (candidate,) = candidates(tmp_path)
    assert (candidate.step, candidate.run, candidate.name, candidate.maybe_completed) == (
        10,
        RUN,
        attempt_name(10, RUN),
        False,
    )
    assert candidate.commit_dir == str(making(tmp_path, 10)) and candidate.iteration_dir == (
        "" if depth == 1 else f"{FOLDER}/{candidate.name}"
    )
    assert candidate.problem.reason == "the save never completed: no rank recorded what it wrote"


def test_late_records_of_an_unpublished_iteration_are_found_by_name(tmp_path):
    """They were written before this host listed the parent folder for the last time."""
    write_all(tmp_path, 10)

    class Late(PosixStorage):
        def list(self, folder):
            return [] if folder == str(making(tmp_path, 10) / FOLDER) else super().list(folder)

    (candidate,) = scan_records(CheckpointDir(Late(), str(tmp_path)))[0]
    assert (
        candidate.maybe_completed
        and candidate.problem is None
        and sorted(candidate.files) == [0, 1]
    )


def test_the_later_run_counts_if_an_iteration_has_two_folders_of_records(tmp_path):
    save(tmp_path, 10)
    (folder_of(tmp_path, 10) / FOLDER / attempt_name(10, NEXT)).mkdir()
    assert [a.run for a in attempts_within(dir_at(tmp_path), "iteration_00000010")] == [NEXT]
    (candidate,) = candidates(tmp_path)
    assert candidate.maybe_completed and candidate.problem.reason.startswith(
        "the save never completed: no rank recorded"
    )


def test_a_published_folder_was_committed(tmp_path):
    """Its manifest and a record are lost: that is not a fresh start."""
    save(tmp_path, 10)
    for name in (MANIFEST, record_name(1)):
        os.remove(records_of(folder_of(tmp_path, 10), 10) / name)
    (candidate,) = candidates(tmp_path)
    assert candidate.maybe_completed and "missing: rank 1" in candidate.problem.reason
    os.rename(folder_of(tmp_path, 10), making(tmp_path, 10))
    assert not candidates(tmp_path)[0].maybe_completed


@pytest.mark.parametrize("iterations", [True, False])
def test_records_that_name_files_of_the_other_format_are_refused(tmp_path, iterations):
    # rank folders' records in an iteration folder
    if iterations:
        rank_folders.save(tmp_path, 10, world=2)
        os.makedirs(tmp_path / "iteration_00000010" / FOLDER)
        os.rename(
            tmp_path / FOLDER / attempt_name(10, RUN), records_of(folder_of(tmp_path, 10), 10)
        )
    else:  # records out of an iteration folder
        save(tmp_path, 10)
        os.makedirs(tmp_path / FOLDER, exist_ok=True)
        os.rename(
            records_of(folder_of(tmp_path, 10), 10), tmp_path / FOLDER / attempt_name(10, RUN)
        )
    (candidate,) = candidates(tmp_path)
    assert "which does not belong to it" in candidate.problem.reason


def test_brief_reads_one_record_of_an_incomplete_save(tmp_path):
    for rank in (1, 2):
        write_rank(tmp_path, 10, rank, 4)
    opened = []

    class Counting(PosixStorage):
        def open(self, path):
            opened.append(os.path.basename(path))
            return super().open(path)

    found, _, _ = scan_records(CheckpointDir(Counting(), str(tmp_path)), brief=True)
    assert (
        opened == [record_name(1)]
        and list(found[0].files) == [1]
        and "missing: rank 0, 3" in found[0].problem.reason
    )
    scan_records(CheckpointDir(Counting(), str(tmp_path)))
    assert opened == [record_name(1), record_name(1), record_name(2)]


# ---- manifests between scans ---------------------------------------------------------------------


class CountedReads(PosixStorage):
    """Counts the manifests that are opened."""

    def __init__(self):
        self.opened = []

    def open(self, path):
        if path.endswith(MANIFEST):
            self.opened.append(Path(path).parent.name)
        return super().open(path)


def test_a_manifest_that_another_process_replaced_is_read_again(tmp_path):
    rank_folders.save(tmp_path, 5)
    storage, manifests = CountedReads(), ReadManifests()
    (path,) = (tmp_path / FOLDER).glob(f"*/{MANIFEST}")

    def times():
        return [
            candidate.saved_at
            for candidate in scan_records(
                CheckpointDir(storage, str(tmp_path)), manifests=manifests
            )[0]
        ]

    first = times()
    assert times() == first and len(storage.opened) == 1
    with path.open("rb") as file:
        other = replace(Manifest.read(file), saved_at=1.0)
    publish(STORAGE, str(path), [other.encode()], "other")
    assert times() == [1.0] and len(storage.opened) == 2
    path.write_bytes(b"damaged")
    ((candidate,), _, notes) = scan_records(
        CheckpointDir(storage, str(tmp_path)), manifests=manifests
    )
    assert candidate.manifest_problem and notes


def test_few_manifests_are_remembered(tmp_path, monkeypatch):
    for step in (5, 10, 15):
        rank_folders.save(tmp_path, step)
    monkeypatch.setattr(records, "_MOST_RANKS", 24)  # of two checkpoints
    storage, manifests = CountedReads(), ReadManifests()
    for _ in range(2):
        assert len(scan_records(CheckpointDir(storage, str(tmp_path)), manifests=manifests)[0]) == 3
    # a job on one card remembered 131,072 of them
    assert manifests._ranks == 24 and len(storage.opened) > 3
