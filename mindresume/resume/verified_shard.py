"""Defines the files and tensors that one rank loads, after they were verified."""
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
    """The verified files of one rank of the checkpoint.

    Args:
        sources: its own files, or replicas of their tensors on other ranks where its own are missing.
        state: training state; None for files without records.
        details: checksums and random state; None for files without records.
        scalars: counters that were read from files without records.
    """
    rank: int
    sources: tuple[ShardSource, ...]
    state: TrainingState | None = None
    details: Details | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def missing_files(self, candidate: Candidate) -> list[tuple[int, str]]:
        """Returns (rank, path) of each of its files that is missing, and whose tensors are read from replicas."""
        there = {source.file.path for source in self.sources}
        return [(self.rank, file.path) for file in candidate.files.get(self.rank, ()) if file.path not in there]


def read_size(candidate: Candidate, ranks: Iterator[int] | list[int]) -> int:
    """Returns the size of the files that ``verify_rank`` reads for these ranks, in bytes."""
    return sum(file.size or 0 for rank in ranks for file in candidate.files.get(rank, ()))
