"""What a save leaves behind when its last operations fail, and what the log then says."""
import os

import pytest
from folders import RUN, STORAGE, name_of, path_of, place_of, state_of, tensors_of, write_rank

from mindresume.errors import SaveError
from mindresume.formats.scan import scan
from mindresume.manifest import record_name
from mindresume.store.commit import Committer
from mindresume.store.shard import Place, rank_shard, write_shard
from mindresume.store.storage import PosixStorage


class NoRoomForRecords(PosixStorage):
    """``where``: the operation on a record that fails, as on a disk that the weights just filled."""

    def __init__(self, where: str):
        self.where = where

    def _fail(self, operation: str, path: str) -> None:
        if operation == self.where and ".mindresume/step-" in path:
            raise OSError(28, os.strerror(28), path)

    def write(self, path, pieces, size=0):
        self._fail("write", path)
        return super().write(path, pieces)

    def rename(self, old, new):
        self._fail("rename", new)
        super().rename(old, new)

    def sync(self, folder):
        if os.path.exists(os.path.join(folder, record_name(0))):
            self._fail("sync", folder)
        super().sync(folder)


@pytest.mark.parametrize("where", ["write", "rename", "sync"])
def test_a_file_whose_record_cannot_be_written_goes_and_can_be_written_again(tmp_path, where):
    shard = rank_shard(name_of(0, 5), state_of(5), tensors_of(0, 5))
    with pytest.raises(SaveError, match="step 5 was not saved on rank 0: No space left"):
        write_shard(Place(NoRoomForRecords(where), str(tmp_path), RUN, 0, 1), shard)
    assert os.listdir(tmp_path / "rank_0") == []                       # the disk has its room back
    assert [c.existed for c in scan(STORAGE, str(tmp_path)).candidates] == [False]
    write_shard(place_of(tmp_path, 0, 1), shard)                       # at the end of the training, say
    assert [c.problem for c in scan(STORAGE, str(tmp_path)).candidates] == [None]


def test_the_reason_is_logged_once_and_told_at_the_end(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, 5, rank, 2)
    path_of(tmp_path, 5, 1).write_bytes(b"short")
    now, log = [0.0], []
    committer = Committer(place_of(tmp_path, 0, 2), log=log.append, clock=lambda: now[0],
                          sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    committer.saved(5)
    assert committer.finish(deadline=60.0) == {5: []}
    assert len(log) == 2
    assert "step 5 is not committed: rank_1/net_rank_1-1_5.safetensors: recorded" in log[1] and "within 60 s" in log[1]
