"""Replaces Huawei's moxing, which only images of ModelArts have: ``import moxing as mox``,
``mox.file``."""

from . import file  # noqa: F401
