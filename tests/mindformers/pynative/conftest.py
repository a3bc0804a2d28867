"""For all tests of the PyNative front end: a folder of their own for events, and random numbers
that begin at the same place."""

import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("mindformers.tools")

from mindresume.mindformers import adapter  # noqa: E402
from mindresume.mindformers.upstream import PYNATIVE_TRAINER  # noqa: E402

with suppress(Exception):  # it needs more packages than these tests
    import_module(PYNATIVE_TRAINER)


@pytest.fixture(autouse=True)
def own_output(tmp_path, monkeypatch):
    monkeypatch.setattr(adapter, "output_root", lambda: str(tmp_path / "output"))
    if PYNATIVE_TRAINER not in sys.modules:
        monkeypatch.setitem(sys.modules, PYNATIVE_TRAINER, ModuleType(PYNATIVE_TRAINER))
    np.random.seed(7)
