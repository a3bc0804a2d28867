"""What all tests of this folder share."""
import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_flush():
    """Flushes are half of the time of so many small files; tests of a loss of power look for them with a patch of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
