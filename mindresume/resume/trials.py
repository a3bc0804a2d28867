"""Checkpoints on trial: loaded by a job that has not finished a step since.

    {root}/.mindresume/trial-{name}          2          so many jobs in a row loaded it and died before their first step was done

A platform starts a job again whenever it dies, and a checkpoint on which every job dies would be loaded for ever. After
``poison_limit`` jobs it is suspected, and taken only if no other can be. The first step that a job finishes clears it. What is
not there was never loaded, or is cleared.
"""
from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.formats import Candidate
from mindresume.manifest import FOLDER
from mindresume.store.storage import Storage, publish, read_bytes

_PREFIX = "trial-"
_MOST = 1_000_000               # jobs; a larger number was not written by us


def key_of(candidate: Candidate) -> str:
    """What identifies it within its root: its folder of records, or of mindformers' the iteration folder or first file."""
    return candidate.name or candidate.base or os.path.basename(candidate.first.path if candidate.first else "")


def trials(storage: Storage, root: str) -> dict[str, int]:
    """{key: jobs that died}. What cannot be read counts as nothing: a damaged note must not cost a checkpoint."""
    found = {}
    for name in storage.list(os.path.join(root, FOLDER)):
        if name.startswith(_PREFIX):                        # a half-written one begins with a dot
            found[name.removeprefix(_PREFIX)] = _read(storage, os.path.join(root, FOLDER, name))
    return {key: count for key, count in found.items() if count}


def _read(storage: Storage, path: str) -> int:
    try:
        text = read_bytes(storage, path)[:32].decode().strip()
        return int(text) if text.isascii() and text.isdigit() and int(text) <= _MOST else 0
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True)
class Trial:
    """Of one job. Rank 0 alone."""
    storage: Storage
    path: str
    before: int

    @classmethod
    def begin(cls, storage: Storage, root: str, candidate: Candidate) -> Trial:
        """Counts this job as one that died, until it says otherwise. OSError."""
        path = os.path.join(root, FOLDER, _PREFIX + key_of(candidate))
        trial = cls(storage, path, _read(storage, path))
        storage.make_folder(os.path.dirname(path))
        publish(storage, path, [str(trial.before + 1).encode()], "trial")
        return trial

    def passed(self) -> None:
        """A step is done. OSError."""
        self.storage.remove(self.path)

    def withdraw(self) -> None:
        """The job ends for a reason that is not the checkpoint's. OSError."""
        if self.before:
            publish(self.storage, self.path, [str(self.before).encode()], "trial")
        else:
            self.passed()
