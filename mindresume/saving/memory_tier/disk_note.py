"""Notes in a tier which checkpoint its training is known to have on disk, so that a start finds out if a person has removed it.

    notes = DiskNotes(storage, tier, run, key)      # on the first rank of a node; ``key``: of the checkpoint that was loaded
    notes.loaded();  notes.committed(100)           # the training
    DiskNote.read(storage, tier)                    # the next start

A person who removes the newest checkpoints wants to go back. The saves in memory that followed them must not bring them back.
"""
from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mindresume.errors import RecordError
from mindresume.model.manifest import attempt_name, run_sequence
from mindresume.storage.atomic_publish import publish_json
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_json
from mindresume.typed import is_count

NOTE = "on-disk.json"
_LIMIT = 1 << 16                # bytes


@dataclass(frozen=True)
class DiskNote:
    """Names the newest checkpoint that the training of a tier is known to have on disk. Retention never removes the newest one.

    Attributes:
        key: name of its folder of records; of a checkpoint of mindformers its iteration folder or first file.
        run: the run that wrote the note.
        step: the step that was committed then; 0: ``run`` has loaded it.
    """
    key: str
    run: str
    step: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Returns the sort key of notes."""
        return run_sequence(self.run), self.step

    @classmethod
    def read(cls, storage: Storage, tier: str) -> DiskNote | None:
        """Returns the note in a tier; None if there is none that can be read."""
        try:
            return cls.from_json(read_json(storage, os.path.join(tier, NOTE), _LIMIT))
        except (OSError, ValueError):
            return None

    @classmethod
    def from_json(cls, value: Any) -> DiskNote | None:
        """Returns the note of a JSON value; None if it is none."""
        with suppress(LookupError, TypeError, RecordError):
            run_sequence(value["run"])
            if isinstance(value["key"], str) and value["key"] and is_count(value["step"]):
                return cls(value["key"], value["run"], value["step"])
        return None

    def write(self, storage: Storage, tier: str) -> None:
        """Publishes the note. Raises OSError."""
        publish_json(storage, os.path.join(tier, NOTE), asdict(self), self.run)


class DiskNotes:
    """Writes the notes of one run. No error is raised: without a note memory is used as if nothing had been removed.

    Args:
        key: of the checkpoint in the checkpoint directory that the training has loaded; empty: none.
    """

    def __init__(self, storage: Storage, tier: str, run: str, key: str = ""):
        self.storage, self.tier, self.run, self.key = storage, tier, run, key
        self._has_committed = False

    def committed(self, step: int) -> None:
        """Notes that this rank has committed ``step``. Called in any thread."""
        self._has_committed = True
        with suppress(OSError):
            DiskNote(attempt_name(step, self.run), self.run, step).write(self.storage, self.tier)

    def loaded(self) -> None:
        """Notes what the training has loaded. Not to be called before the saves of earlier runs are set aside: the former note
        may say that they do not count."""
        if self._has_committed:
            return
        with suppress(OSError):
            if self.key:
                DiskNote(self.key, self.run).write(self.storage, self.tier)
            else:
                self.storage.remove(os.path.join(self.tier, NOTE))
