"""Work that one rank does for 8,192 ranks: operations are counted on a disk in memory."""

import io
import json
import os
from collections import Counter

import numpy as np
import pytest

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
from mindresume.storage import operations
from mindresume.storage.interface import Status
from mindresume.tensor_files import encode

ROOT, RUN, RANKS = "/c", run_name(1, "0000aaaa"), 8192


class Memory:
    """Is a disk in memory that counts its operations."""

    width = 1

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.folders: dict[str, set[str]] = {"/": set()}
        self.done: Counter = Counter()

    def put(self, path, data):
        self.make_folder(os.path.dirname(path))
        self.files[path] = data
        self.folders[os.path.dirname(path)].add(os.path.basename(path))

    def list(self, folder):
        self.done["list"] += 1
        return sorted(self.folders.get(folder, ()))

    def status(self, path):
        self.done["status"] += 1
        if path in self.files:
            return Status(len(self.files[path]), 0.0, False)
        return Status(0, 0.0, True) if path in self.folders else None

    def open(self, path):
        self.done["open"] += 1
        if path not in self.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self.files[path])

    def write(self, path, pieces, size=0):
        self.done["flush"] += 1
        data = b"".join(map(bytes, pieces))
        self.put(path, data)
        return len(data)

    def rename(self, old, new):
        self.done["rename"] += 1
        for path in [
            path
            for path in (*self.files, *self.folders)
            if path == old or path.startswith(old + "/")
        ]:
            target = new + path[len(old) :]
            if path in self.files:
                self.files[target] = self.files.pop(path)
            else:
                self.folders[target] = self.folders.pop(path)
        self.folders[os.path.dirname(old)].discard(os.path.basename(old))
        self.folders[os.path.dirname(new)].add(os.path.basename(new))

    def sync(self, folder):
        self.done["flush"] += 1
        if folder not in self.folders:
            raise FileNotFoundError(folder)

    def remove(self, path):
        self.done["remove"] += 1
        self.files.pop(path, None)
        self.folders.pop(path, None)
        self.folders[os.path.dirname(path)].discard(os.path.basename(path))

    def make_folder(self, path):
        if path not in self.folders:
            self.folders[path] = set()
            self.make_folder(os.path.dirname(path))
            self.folders[os.path.dirname(path)].add(os.path.basename(path))

    def free_space(self, folder):
        return 1 << 60


def name_of(step, rank):
    return FileName("net", rank, 0, 1, step, "safetensors")


def write_all(disk, step, ranks, recorded=True):
    state = TrainingState(step, 1000, step, 8)
    data = b"".join(
        bytes(piece) for _, piece in encode("safetensors", {}, {"format": "ms", **label(RUN, step)})
    )
    for rank in range(ranks):
        path = f"{folder_name(rank)}/{name_of(step, rank)}"
        disk.put(f"{ROOT}/{path}", data)
        if recorded:
            record = Record(
                RUN,
                rank,
                ranks,
                state,
                1000.0 + step,
                (FileRecord(path, "safetensors", len(data), "0" * 32),),
                False,
            )
            disk.put(
                f"{ROOT}/{FOLDER}/{attempt_name(step, RUN)}/{record_name(rank)}",
                record.encode(Details()),
            )


def committer_of(disk, ranks, keep=3, emit=None):
    return Committer(SaveTarget(disk, ROOT, RUN, 0, ranks), KeepLast(keep), emit or pytest.fail)


@pytest.fixture
def disk():
    return Memory()


def test_a_commit_flushes_as_often_as_one_of_two_ranks(disk):
    """A commit flushes the manifest and one meta.json with their folders; of each rank it reads
    only the record, twice."""
    counts = {}
    for ranks in (2, RANKS):
        disk = Memory()
        write_all(disk, 5, ranks)
        committer = committer_of(disk, ranks, emit=ignore)
        disk.done.clear()
        committer.poll(5)
        assert committer.committed == [5]
        counts[ranks] = disk.done
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


def test_the_next_commit_does_not_look_for_other_pointers(disk):
    write_all(disk, 5, 256)
    write_all(disk, 6, 256)
    committer = committer_of(disk, 256, emit=ignore)
    committer.poll(5)
    disk.done.clear()
    committer.poll(6)
    assert disk.done["flush"] == 5 and disk.done["status"] < 2 * 256 + 20
    assert json.loads(disk.files[f"{ROOT}/rank_0/{META}"])["last_step"] == 6


def test_pointers_of_former_versions_are_removed_after_the_first_commit(disk):
    """mindformers takes the oldest step that any of them names: they would hold it back."""
    write_all(disk, 5, 4)
    # the job before had more ranks
    for rank in range(6):
        disk.put(f"{ROOT}/rank_{rank}/{META}", json.dumps(meta_json(name_of(4, rank))).encode())
    order, remove, rename = [], disk.remove, disk.rename
    disk.remove = lambda path: (order.append(("remove", path)), remove(path))
    disk.rename = lambda old, new: (order.append(("rename", new)), rename(old, new))
    committer_of(disk, 4, emit=ignore).poll(5)
    assert [path for path in disk.files if path.endswith(META)] == [f"{ROOT}/rank_0/{META}"]
    assert order == [
        ("rename", f"{ROOT}/{FOLDER}/{attempt_name(5, RUN)}/{MANIFEST}"),
        ("rename", f"{ROOT}/rank_0/{META}"),
        *(("remove", f"{ROOT}/rank_{rank}/{META}") for rank in range(1, 6)),
    ]
    assert disk.done["flush"] == 5 + 5


def test_a_pointer_that_cannot_be_written_stops_removal_only_once(disk):
    events = []
    for step in (5, 6, 7, 8):
        write_all(disk, step, 2)
    committer = committer_of(disk, 2, keep=1, emit=events.append)
    committer.poll(5)
    write = disk.write

    def refused(path, pieces, size=0):
        if META in path:
            raise OSError(13, "Permission denied", path)
        return write(path, pieces, size)

    disk.write = refused
    committer.poll(6)
    kept = sorted(name for name in disk.folders[f"{ROOT}/{FOLDER}"])
    # meta.json still leads to step 5
    assert len(kept) == 4
    assert events[-1].level == WARNING and "Permission denied" in events[-1].text
    committer.poll(7)
    assert sorted(disk.folders[f"{ROOT}/{FOLDER}"]) == [
        attempt_name(step, RUN) for step in (5, 7, 8)
    ]
    assert committer.committed == [5, 6, 7]


@pytest.mark.parametrize("readable", [True, False])
def test_the_clean_up_of_a_save_without_records_reads_the_headers_of_its_own_files(disk, readable):
    ranks = 1024
    for step in (5, 6, 7, 8):
        write_all(disk, step, ranks, recorded=False)
    if not readable:
        disk.files[f"{ROOT}/rank_0/{name_of(6, 0)}"] = b"torn"
    disk.put(f"{ROOT}/{FOLDER}/trash-{attempt_name(6, RUN)}/rank_00000.json", b"damaged")
    disk.done.clear()
    empty_trash(CheckpointDir(disk, ROOT), ReadLocks(CheckpointDir(disk, ROOT)))
    left = [path for path in disk.files if path.endswith(str(name_of(6, 0)).partition("-")[2])]
    assert left == ([] if readable else [f"{ROOT}/rank_0/{name_of(6, 0)}"])
    assert disk.done["open"] <= ranks + 10 and disk.done["list"] <= ranks + 10
    assert (
        f"{ROOT}/rank_471/{name_of(5, 471)}" in disk.files
        and disk.folders[f"{ROOT}/{FOLDER}"] == set()
    )


def counted_together(monkeypatch, *modules):
    """Returns a list that will have, of each call of ``parallel`` in ``modules``, its operations of
    the disk."""
    plain, together = operations.parallel, []

    def parallel(disk, function, items):
        before = sum(disk.done.values())
        found = plain(disk, function, items)
        together.append(sum(disk.done.values()) - before)
        return found

    for module in modules:
        monkeypatch.setattr(module, "parallel", parallel)
    return together


def test_work_for_each_rank_runs_concurrently(disk, monkeypatch):
    """No loop over the ranks does one disk operation after the other."""
    together = counted_together(
        monkeypatch, commit, garbage_collector, operations, rank_folders, records, weight_files
    )
    for step in (5, 6, 7):
        write_all(disk, step, 64)
    committer = committer_of(disk, 64, keep=1, emit=ignore)
    disk.done.clear()
    for step in (5, 6, 7):
        committer.poll(step)
    write_all(disk, 8, 64, recorded=False)
    for rank in range(64):
        disk.put(f"{ROOT}/{FOLDER}/trash-{attempt_name(8, RUN)}/{record_name(rank)}", b"damaged")
    empty_trash(CheckpointDir(disk, ROOT), ReadLocks(CheckpointDir(disk, ROOT)))
    alone = sum(disk.done.values()) - sum(together)
    assert alone < 130 and sum(together) > 64 * 20


def test_files_of_mindformers_ranks_are_checked_concurrently(disk, monkeypatch):
    together = counted_together(monkeypatch, rank_folders, records, weight_files)
    state = {"step_num": np.array(5, np.int64), "epoch_num": np.array(1, np.int64)}
    data = b"".join(bytes(piece) for _, piece in encode("safetensors", state, {"format": "ms"}))
    for rank in range(64):
        disk.put(f"{ROOT}/{folder_name(rank)}/{name_of(5, rank)}", data)
        disk.put(
            f"{ROOT}/{folder_name(rank)}/{META}", json.dumps(meta_json(name_of(5, rank))).encode()
        )
    disk.done.clear()
    assert select_checkpoint(disk, ROOT, SingleProcess(), SelectionPolicy(64)).chosen.step == 5
    assert sum(disk.done.values()) - sum(together) < 40 and sum(together) > 64 * 3
