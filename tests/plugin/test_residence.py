"""A training moves into its folder."""
import errno
from dataclasses import replace

import pytest

pytest.importorskip("mindformers")

from folders import RUN, STORAGE, place_of  # noqa: E402

from mindresume.plugin import session  # noqa: E402
from mindresume.plugin.residence import Residence  # noqa: E402
from mindresume.store.common import COMMON, note, spared  # noqa: E402
from mindresume.store.exchange import Exchange  # noqa: E402
from mindresume.store.islands import together  # noqa: E402
from mindresume.store.storage import PosixStorage  # noqa: E402


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
        home = Residence(replace(place_of(tmp_path, 0, 2), storage=storage), 0, together(2), None, exchange)
        home.begin(session.Session())
        assert [path.name for path in (tmp_path / ".mindresume").iterdir()] == there
    assert spared(STORAGE, str(tmp_path)) == {}
