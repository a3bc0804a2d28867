"""Defines what one rank of a checkpoint reads once it is verified."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindresume.formats import Candidate
from mindresume.model.file_record import FileRecord
from mindresume.model.record_details import Details
from mindresume.model.training_state import TrainingState


@dataclass(frozen=True)
class ShardSource:
    """Tensors to read from one file. ``names`` None: all of them."""
    file: FileRecord
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class VerifiedShard:
    """What one rank of the checkpoint reads.

    Args:
        sources: its own files, or where those are missing replicas of their tensors on other ranks.
        state: None for files without records.
        details: checksums and random state; None for files without records.
        scalars: counters that were read from files without records.
    """
    rank: int
    sources: tuple[ShardSource, ...]
    state: TrainingState | None = None
    details: Details | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def missing_files(self, candidate: Candidate) -> list[tuple[int, str]]:
        """Returns (rank, path) of each of its files that is missing and is replaced by replicas."""
        there = {source.file.path for source in self.sources}
        return [(self.rank, file.path) for file in candidate.files.get(self.rank, ()) if file.path not in there]


def read_size(candidate: Candidate, ranks: Iterator[int] | list[int]) -> int:
    """Returns the bytes that ``verify_rank`` will read for these ranks."""
    return sum(file.size or 0 for rank in ranks for file in candidate.files.get(rank, ()))
