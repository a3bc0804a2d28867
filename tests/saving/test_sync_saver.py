"""Saving in the training thread, and the files for inference beside a checkpoint."""

import errno
from dataclasses import replace

import pytest
from rank_folders import RUN, name_of, path_of, state_of, target_of, tensors_of, write_rank
from storages import failing

from mindresume.errors import LeaseHeldError, OutOfSpaceError, SaveError
from mindresume.events import CheckpointsRemoved
from mindresume.model.manifest import LAST_STEPS, MANIFEST, record_name, run_name
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import (
    ExtraWeights,
    Save,
    SaveTarget,
    rank_shard,
    write_extra_weights,
    write_shard,
)
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header


def shard(step, rank=0, fmt="safetensors", suffix=0):
    return rank_shard(name_of(rank, step, suffix, fmt), state_of(step), tensors_of(rank, step))


def save_of(step, extras=()):
    return Save(shard(step), extras)


def extra(folder, step, keep=0, kind="network"):
    name = f"net_rank_0-{kind}-{state_of(step).epoch}_{state_of(step).step_in_epoch}.safetensors"
    return ExtraWeights(
        str(folder),
        name,
        kind,
        "safetensors",
        {"w": tensors_of(0, step)["layer.bias"]},
        {"format": "ms"},
        keep,
    )


def test_an_error_is_an_outcome_and_a_lost_folder_an_exception(tmp_path):
    saver = SyncSaver(target_of(tmp_path, 0, 1))
    saver.save(save_of(5))
    path_of(tmp_path, 6, 0).write_text("in the way")
    saver.save(save_of(6))
    good, bad = saver.poll()
    assert good.saved and not bad.saved and "exists already" in str(bad.error)
    write_shard(target_of(tmp_path, 0, 1, run_name(2, "0000bbbb")), shard(6, suffix=1))
    with pytest.raises(LeaseHeldError):
        saver.save(save_of(7))


def test_a_file_beside_it_that_fails_does_not_undo_the_checkpoint(tmp_path):
    (tmp_path / "network").write_text("a file in the way")
    saver = SyncSaver(target_of(tmp_path / "checkpoint", 0, 1), KEEP_ALL)
    saver.save(save_of(5, (extra(tmp_path / "network", 5),)))
    (outcome,) = saver.poll()
    assert (
        outcome.saved
        and "was not written" in str(outcome.error)
        and saver.committer.committed == [5]
    )


class Watched(PosixStorage):
    """Notes what is written where; ``error``: of writing a ledger; ``room``: free bytes."""

    def __init__(self, error=0, room=1 << 40):
        super().__init__()
        self.error, self.room, self.written = error, room, []

    def write(self, path, pieces, size=0):
        self.written.append(path.rpartition("/")[2])
        if self.error and path.endswith(LAST_STEPS):
            raise OSError(self.error, "an error", path)
        return super().write(path, pieces, size)

    def free_space(self, folder):
        return self.room


def saved_with_ledger(root, storage, times=1):
    target = replace(target_of(root, 0, 1), storage=storage)
    saver = SyncSaver(target, KEEP_ALL)
    for _ in range(times):
        saver.save(replace(save_of(5), ledger=b"rows"))
    assert all(outcome.saved and outcome.error is None for outcome in saver.poll())
    assert 5 in saver.committer.committed
    return [path.read_bytes() for path in root.rglob(LAST_STEPS)]


def test_the_ledger_is_written_between_the_record_and_the_manifest(tmp_path):
    storage = Watched()
    assert saved_with_ledger(tmp_path, storage, times=2) == [b"rows"]
    kinds = [name.strip(".").split(".0001")[0] for name in storage.written]
    record = kinds.index(record_name(0))
    assert kinds[record : record + 3] == [record_name(0), LAST_STEPS, MANIFEST]
    assert kinds.count(LAST_STEPS) == 1


@pytest.mark.parametrize(
    "trouble", [{"error": errno.ENOSPC}, {"error": errno.EIO}, {"room": 7 << 20}]
)
def test_a_ledger_that_cannot_be_written_costs_the_ledger_only(tmp_path, trouble):
    assert saved_with_ledger(tmp_path, Watched(**trouble)) == []


def test_a_save_whose_rank_died_while_it_wrote_the_ledger_is_complete(tmp_path):
    class Killed(BaseException):
        pass

    class Dying(PosixStorage):
        def write(self, path, pieces, size=0):
            if path.endswith(LAST_STEPS):
                with open(path, "wb") as file:
                    file.write(b"ro")
                raise Killed
            return super().write(path, pieces, size)

    saver = SyncSaver(replace(target_of(tmp_path, 0, 1), storage=Dying()), KEEP_ALL)
    with pytest.raises(Killed):
        saver.save(replace(save_of(5), ledger=b"rows"))
    saver = SyncSaver(target_of(tmp_path, 0, 1, run_name(2, "0000bbbb")), KeepLast(1))
    saver.begin()
    [path] = tmp_path.rglob(LAST_STEPS)
    assert path.read_bytes() == b"ro" and (path.parent / MANIFEST).exists()
    # the rest goes with its folder
    saver.save(Save(shard(10, suffix=1)))
    assert list(tmp_path.rglob(LAST_STEPS)) == []


def test_extra_files_appear_complete_and_the_oldest_are_removed(tmp_path):
    for step in (5, 10, 15):
        write_extra_weights(PosixStorage(), extra(tmp_path, step, keep=2), "tag")
    (tmp_path / "mine.safetensors").write_text("of the user")
    write_extra_weights(PosixStorage(), extra(tmp_path, 20, keep=2), "tag")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "mine.safetensors",
        "net_rank_0-network-2_10.safetensors",
        "net_rank_0-network-2_5.safetensors",
    ]
    with open(tmp_path / names[1], "rb") as file:
        assert list(read_header(file, names[1]).tensors) == ["w"]


def test_an_extra_that_cannot_be_encoded_is_named(tmp_path):
    bad = ExtraWeights(
        str(tmp_path),
        "x.safetensors",
        "network",
        "safetensors",
        {"w": tensors_of(0, 5)["layer.bias"].astype(">f4")},
        {},
    )
    with pytest.raises(SaveError, match=r"x\.safetensors was not written.*big-endian"):
        write_extra_weights(PosixStorage(), bad, "tag")


class Small(PosixStorage):
    """Is a disk of ``size`` bytes below ``root``."""

    def __init__(self, root, size):
        self.root, self.size = root, size

    def free_space(self, folder):
        return self.size - sum(path.stat().st_size for path in self.root.rglob("*.safetensors"))


def test_incomplete_saves_do_not_keep_a_disk_full(tmp_path):
    """Rank 1 cannot save; rank 0 can, until its useless files fill the disk. Then they go, and a
    later save completes."""
    write_rank(tmp_path / "elsewhere", 5, 0, 2)
    one = path_of(tmp_path / "elsewhere", 5, 0).stat().st_size
    root, events = tmp_path / "checkpoint", []
    target = SaveTarget(Small(root, 4 * one + (64 << 10)), str(root), RUN, 0, 2)
    saver = SyncSaver(target, KEEP_ALL, events.append)
    for step in (5, 10, 15, 20):
        saver.save(save_of(step))
        assert saver.poll()[0].saved
    saver.save(save_of(25))
    (outcome,) = saver.poll()
    assert isinstance(outcome.error, OutOfSpaceError) and "keep_checkpoint_max" in str(
        outcome.error
    )
    assert events[-1] == CheckpointsRemoved((5, 10, 15), str(root), is_incomplete=True)
    assert saver.committer.pending == [20]
    saver.save(save_of(30))
    write_rank(root, 30, 1, 2)
    assert saver.poll()[0].saved and saver.committer.committed == [30]


def test_an_exceeded_quota_is_out_of_space(tmp_path):
    full = failing("", "write", number=errno.EDQUOT)
    with pytest.raises(OutOfSpaceError, match="Disk quota exceeded"):
        write_shard(SaveTarget(full, str(tmp_path), RUN, 0, 1), shard(5))
