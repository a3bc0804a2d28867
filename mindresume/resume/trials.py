"""Checkpoints on trial: loaded by a job that has not finished a step since.

    {root}/.mindresume/trial-{name}          2 /output          so many jobs in a row, of this output folder, loaded it and died
                                                                before their first step was done

A platform starts a job again whenever it dies, and a checkpoint on which every job dies would be loaded for ever. After
``poison_limit`` jobs it is suspected, and taken only if no other can be. The first step that a job finishes clears it. What is
not there was never loaded, or is cleared. Jobs of several outputs that begin with the same checkpoint, at the same time, are not
in a row.
"""
from __future__ import annotations

import os
from dataclasses import dataclass

from mindresume.formats import Candidate
from mindresume.manifest import FOLDER
from mindresume.store.storage import Storage, publish, read_bytes

_PREFIX = "trial-"
_DIGITS = 6                     # of a number of jobs; a longer one was not written by us
_LIMIT = 8 << 10                # bytes of a note: a number and a path


def key_of(candidate: Candidate) -> str:
    """What identifies it within its root: its folder of records, or of mindformers' the iteration folder or first file."""
    return candidate.name or candidate.base or os.path.basename(candidate.first.path if candidate.first else "")


def trials(storage: Storage, root: str) -> dict[str, int]:
    """{key: jobs that died}. What cannot be read counts as nothing: a damaged note must not cost a checkpoint."""
    found = {}
    try:
        names = storage.list(os.path.join(root, FOLDER))
    except OSError:
        return {}
    for name in names:
        if name.startswith(_PREFIX):                        # a half-written one begins with a dot
            found[name.removeprefix(_PREFIX)] = _read(storage, os.path.join(root, FOLDER, name))[0]
    return {key: count for key, count in found.items() if count}


def _read(storage: Storage, path: str) -> tuple[int, bytes]:
    """(jobs, output they work in)."""
    try:
        count, _, output = read_bytes(storage, path, _LIMIT).partition(b" ")
    except OSError:
        return 0, b""
    return (int(count), output) if count.isdigit() and len(count) <= _DIGITS else (0, b"")


@dataclass(frozen=True)
class Trial:
    """Of one job. Rank 0 alone."""
    storage: Storage
    path: str
    before: int
    output: bytes

    @classmethod
    def begin(cls, storage: Storage, root: str, candidate: Candidate, output: str) -> Trial:
        """Counts this job, which works in the folder ``output``, as one that died, until it says otherwise. OSError."""
        path, own = os.path.join(root, FOLDER, _PREFIX + key_of(candidate)), os.fsencode(output)
        before, other = _read(storage, path)
        trial = cls(storage, path, before if other == own else 0, own)
        storage.make_folder(os.path.dirname(path))
        trial._write(trial.before + 1)
        return trial

    def _write(self, count: int) -> None:
        publish(self.storage, self.path, [b"%d %s" % (count, self.output)], "trial")

    def passed(self) -> None:
        """A step is done. OSError."""
        self.storage.remove(self.path)

    def withdraw(self) -> None:
        """The job ends for a reason that is not the checkpoint's. OSError."""
        if self.before:
            self._write(self.before)
        else:
            self.passed()
