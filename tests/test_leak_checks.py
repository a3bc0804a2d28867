"""tests/rank_folders.py: the check for leftovers can fail, and is not disturbed by others."""

import threading

import pytest
from rank_folders import leaves_nothing


def test_a_leaked_thread_or_file_is_found(tmp_path):
    (tmp_path / "file").touch()
    over = threading.Event()
    with pytest.raises(AssertionError, match="threads .*forgotten"), leaves_nothing(tmp_path):
        child = threading.Thread(target=over.wait, name="forgotten", daemon=True)
        parent = threading.Thread(target=child.start)
        parent.start()
        parent.join()
    over.set()
    child.join()
    left = pytest.raises(AssertionError, match="open files .*file")
    with open(tmp_path / "file", encoding="utf-8"), left, leaves_nothing(tmp_path):
        pass
