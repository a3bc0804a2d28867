import os
import shutil
import tempfile

import pytest


@pytest.fixture
def folder(tmp_path):
    """Returns an empty folder in memory if possible: power losses are simulated, so no real disk is
    needed."""
    if not os.access("/dev/shm", os.W_OK):
        yield str(tmp_path)
        return
    path = tempfile.mkdtemp(prefix="mindresume-", dir="/dev/shm")
    yield path
    shutil.rmtree(path)
