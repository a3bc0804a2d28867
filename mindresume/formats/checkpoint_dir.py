"""Defines the place of checkpoints: a file system, and the folder in it that a job saves to."""
from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.storage.interface import Storage


@dataclass(frozen=True)
class CheckpointDir:
    """A checkpoint directory: ``root`` holds rank folders or iteration folders, and the folder of records.

    Paths in records, candidates and refusals are relative to ``root``.
    """
    storage: Storage
    root: str

    def path(self, *names: str) -> str:
        """Returns the path of what lies at ``names`` in the directory."""
        return os.path.join(self.root, *names)
