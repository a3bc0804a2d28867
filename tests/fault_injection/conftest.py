import os
import shutil
import tempfile

import pytest


@pytest.fixture
def folder(tmp_path):
    """An empty folder in memory where there is one: what a loss of power leaves is simulated, so no disk need be waited for."""
    if not os.access("/dev/shm", os.W_OK):
        yield str(tmp_path)
        return
    path = tempfile.mkdtemp(prefix="mindresume-", dir="/dev/shm")
    yield path
    shutil.rmtree(path)
