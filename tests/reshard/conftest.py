"""Fixtures of all tests in this folder."""
import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_flush():
    """Skips flushes, which take half of the time with many small files; power loss tests patch them themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
