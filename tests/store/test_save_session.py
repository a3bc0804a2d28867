"""A training acquires its folder."""
import errno
import logging
from dataclasses import replace

from folders import RUN, STORAGE, place_of

from mindresume.store.common import COMMON, note, spared
from mindresume.store.exchange import Exchange
from mindresume.store.islands import together
from mindresume.store.save_session import SaveSession
from mindresume.store.storage import PosixStorage


class Stuck(PosixStorage):
    def remove(self, path):
        if path.endswith(COMMON):
            raise OSError(errno.EIO, "Input/output error", path)
        super().remove(path)


def test_an_old_note_that_cannot_be_removed_ends_no_rank_alone(tmp_path):
    (tmp_path / ".mindresume").mkdir()
    note(STORAGE, str(tmp_path), "", RUN)
    for storage, there in ((Stuck(), [COMMON]), (STORAGE, [])):
        exchange = Exchange(storage, str(tmp_path), RUN, together(2), 0)
        home = SaveSession(replace(place_of(tmp_path, 0, 2), storage=storage), 0, together(2), None, exchange,
                           logging.getLogger("mindresume"))
        home.begin(None)
        assert [path.name for path in (tmp_path / ".mindresume").iterdir()] == there
    assert spared(STORAGE, str(tmp_path)) == {}
