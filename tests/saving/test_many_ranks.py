"""Work that one rank does for all ranks: operations of the disk are counted."""

import json
import os
from collections import Counter

import numpy as np
import pytest
from storages import Hooked

from mindresume import storage as storage_room
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import ReadLocks
from mindresume.events import WARNING, ignore
from mindresume.formats import CheckpointDir, rank_folders, records, weight_files
from mindresume.formats.rank_folders import META, FileName, folder_name, label, meta_json
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    Details,
    FileRecord,
    Record,
    attempt_name,
    record_name,
    run_name,
)
from mindresume.model.training_state import TrainingState
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving import committer as commit
from mindresume.saving import garbage_collector
from mindresume.saving.committer import Committer
from mindresume.saving.garbage_collector import empty_trash
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import SaveTarget
from mindresume.tensor_files import encode

RUN, RANKS = run_name(1, "0000aaaa"), 256


def done(disk):
    """Returns {operation: how often} since the last call, with both kinds of flush as one."""
    found = Counter({"write": "flush", "sync": "flush"}.get(name, name) for name, _ in disk.asked)
    disk.asked.clear()
    return found


def name_of(step, rank):
    return FileName("net", rank, 0, 1, step, "safetensors")


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def write_all(root, step, ranks, recorded=True):
    state = TrainingState(step, 1000, step, 8)
    data = b"".join(
        bytes(piece) for _, piece in encode("safetensors", {}, {"format": "ms", **label(RUN, step)})
    )
    for rank in range(ranks):
        path = f"{folder_name(rank)}/{name_of(step, rank)}"
        put(root / path, data)
        if recorded:
            file = FileRecord(path, "safetensors", len(data), "0" * 32)
            record = Record(RUN, rank, ranks, state, 1000.0 + step, (file,), False)
            put(attempt(root, step) / record_name(rank), record.encode(Details()))


def attempt(root, step):
    return root / FOLDER / attempt_name(step, RUN)


def committer_of(disk, root, ranks, keep=3, emit=ignore):
    return Committer(SaveTarget(disk, str(root), RUN, 0, ranks), KeepLast(keep), emit)


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nothing here loses its power
    return Hooked()


def test_a_commit_flushes_as_often_as_one_of_two_ranks(disk, tmp_path):
    """A commit flushes the manifest and one meta.json with their folders; of each rank it reads
    only the record, twice."""
    counts = {}
    for ranks in (2, RANKS):
        root = tmp_path / str(ranks)
        write_all(root, 5, ranks)
        committer = committer_of(disk, root, ranks)
        committer.poll(5)
        assert committer.committed == [5]
        counts[ranks] = done(disk)
    few, many = counts[2], counts[RANKS]
    assert (
        many["flush"] == few["flush"] == 5
        and many["rename"] == few["rename"] == 2
        and many["remove"] == 0
    )
    assert many["open"] - few["open"] == RANKS - 2  # records
    # sizes, at the commit and before removal; other meta.json
    assert many["status"] - few["status"] == 3 * (RANKS - 2)
    assert many["list"] == few["list"]


def test_the_next_commit_does_not_look_for_other_pointers(disk, tmp_path):
    write_all(tmp_path, 5, 256)
    write_all(tmp_path, 6, 256)
    committer = committer_of(disk, tmp_path, 256)
    committer.poll(5)
    done(disk)
    committer.poll(6)
    asked = done(disk)
    assert asked["flush"] == 5 and asked["status"] < 2 * 256 + 20
    assert json.loads((tmp_path / "rank_0" / META).read_bytes())["last_step"] == 6


def test_pointers_of_former_versions_are_removed_after_the_first_commit(disk, tmp_path):
    """mindformers takes the oldest step that any of them names: they would hold it back."""
    write_all(tmp_path, 5, 4)
    pointers = [tmp_path / f"rank_{rank}" / META for rank in range(6)]
    # the job before had more ranks
    for rank, path in enumerate(pointers):
        put(path, json.dumps(meta_json(name_of(4, rank))).encode())
    disk.width = 1
    committer_of(disk, tmp_path, 4).poll(5)
    assert [*tmp_path.glob(f"rank_*/{META}")] == pointers[:1]
    assert [what for what in disk.asked if what[0] in ("rename", "remove")] == [
        ("rename", str(attempt(tmp_path, 5) / MANIFEST)),
        ("rename", str(pointers[0])),
        *(("remove", str(path)) for path in pointers[1:]),
    ]
    assert done(disk)["flush"] == 5 + 5


def test_a_pointer_that_cannot_be_written_stops_removal_only_once(disk, tmp_path):
    events = []
    for step in (5, 6, 7, 8):
        write_all(tmp_path, step, 2)
    committer = committer_of(disk, tmp_path, 2, keep=1, emit=events.append)
    committer.poll(5)

    def refuse(operation, path):
        if operation == "write" and META in path:
            raise PermissionError(13, "Permission denied", path)

    disk.before = refuse
    committer.poll(6)
    # meta.json still leads to step 5
    assert len(os.listdir(tmp_path / FOLDER)) == 4
    assert events[-1].level == WARNING and "Permission denied" in events[-1].text
    committer.poll(7)
    assert sorted(os.listdir(tmp_path / FOLDER)) == [attempt_name(step, RUN) for step in (5, 7, 8)]
    assert committer.committed == [5, 6, 7]


def trash(root, step, ranks):
    """Leaves the removal of a save whose records are damaged."""
    for rank in range(ranks):
        put(root / FOLDER / f"trash-{attempt_name(step, RUN)}" / record_name(rank), b"damaged")


def emptied(disk, root):
    directory = CheckpointDir(disk, str(root))
    empty_trash(directory, ReadLocks(directory))


@pytest.mark.parametrize("readable", [True, False])
def test_the_clean_up_of_a_save_without_records_reads_the_headers_of_its_own_files(
    disk, tmp_path, readable
):
    ranks = 256
    for step in (5, 6, 7, 8):
        write_all(tmp_path, step, ranks, recorded=False)
    first = tmp_path / "rank_0" / str(name_of(6, 0))
    if not readable:
        first.write_bytes(b"torn")
    trash(tmp_path, 6, 1)
    emptied(disk, tmp_path)
    assert [*tmp_path.glob("rank_*/*-1_6.safetensors")] == ([] if readable else [first])
    asked = done(disk)
    assert asked["open"] <= ranks + 10 and asked["list"] <= ranks + 10
    assert (tmp_path / "rank_171" / str(name_of(5, 171))).exists()
    assert os.listdir(tmp_path / FOLDER) == []


def counted_together(monkeypatch, *modules):
    """Returns a list that will have, of each call of ``parallel`` in ``modules``, its operations of
    the disk."""
    plain, together = storage_room.parallel, []

    def parallel(disk, function, items):
        before = len(disk.asked)
        found = plain(disk, function, items)
        together.append(len(disk.asked) - before)
        return found

    for module in modules:
        monkeypatch.setattr(module, "parallel", parallel)
    return together


def test_work_for_each_rank_runs_concurrently(disk, tmp_path, monkeypatch):
    """No loop over the ranks does one disk operation after the other."""
    together = counted_together(
        monkeypatch, commit, garbage_collector, storage_room, rank_folders, records, weight_files
    )
    for step in (5, 6, 7):
        write_all(tmp_path, step, 64)
    committer = committer_of(disk, tmp_path, 64, keep=1)
    for step in (5, 6, 7):
        committer.poll(step)
    write_all(tmp_path, 8, 64, recorded=False)
    trash(tmp_path, 8, 64)
    emptied(disk, tmp_path)
    assert len(disk.asked) - sum(together) < 130 and sum(together) > 64 * 20


def test_files_of_mindformers_ranks_are_checked_concurrently(disk, tmp_path, monkeypatch):
    together = counted_together(monkeypatch, rank_folders, records, weight_files)
    state = {"step_num": np.array(5, np.int64), "epoch_num": np.array(1, np.int64)}
    data = b"".join(bytes(piece) for _, piece in encode("safetensors", state, {"format": "ms"}))
    for rank in range(64):
        put(tmp_path / folder_name(rank) / str(name_of(5, rank)), data)
        put(tmp_path / folder_name(rank) / META, json.dumps(meta_json(name_of(5, rank))).encode())
    choice = select_checkpoint(disk, str(tmp_path), SingleProcess(), SelectionPolicy(64))
    assert choice.chosen.step == 5
    assert len(disk.asked) - sum(together) < 40 and sum(together) > 64 * 3
