"""Every saved step of a folder and what a resume would say of it at first sight: names, records and sizes, no contents."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from mindresume.formats import MINDFORMERS, Candidate, Refusal, Scan
from mindresume.resume.absent import filled
from mindresume.resume.prove import quick
from mindresume.resume.select import candidates_for
from mindresume.store.storage import Storage
from mindresume.strategy import Strategy

COMPLETE, INCOMPLETE, UNUSABLE = "complete", "incomplete", "unusable"


@dataclass(frozen=True)
class Seen:
    """A saved step. ``problem``: why a resume passes it over. ``size``: bytes of its files that are there."""
    candidate: Candidate
    problem: Refusal | None
    size: int

    @property
    def state(self) -> str:
        """COMPLETE, INCOMPLETE (the save never completed, nothing is lost with it) or UNUSABLE."""
        return COMPLETE if self.problem is None else UNUSABLE if self.candidate.existed else INCOMPLETE

    @property
    def kind(self) -> str:
        """"iteration" (Checkpoint 2.0), else the format of the files."""
        return "iteration" if self.candidate.base else self.candidate.format


def survey(storage: Storage, path: str, strategy_of: Callable[[str, Candidate], Strategy | None], world_size: int | None = None
           ) -> tuple[Scan, tuple[Seen, ...]]:
    """What is there, and each step of it in the order in which a resume tries them, newest first. ``path``, ``world_size``,
    ``strategy_of``: as for ``mindresume.resume.select.select``. MissingCheckpointError, ConfigError."""
    found, _ = candidates_for(storage, path)
    seen = []
    for candidate in found.candidates:
        candidate = filled(storage, found.root, candidate, strategy_of, world_size, found.expected_ranks)
        ranks = world_size
        if candidate.origin == MINDFORMERS:
            ranks = world_size or (candidate.world_size if candidate.absent else found.expected_ranks)
        sizes = [storage.status(os.path.join(found.root, file.path)) for file in candidate.every_file]
        seen.append(Seen(candidate, quick(storage, found.root, candidate, ranks),
                         sum(status.size for status in sizes if status)))
    return found, tuple(seen)
