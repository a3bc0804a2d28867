"""Defines the result of a selection: the files and tensors that each rank verified and loads, and
what was refused. Rank 0 broadcasts the candidate that all ranks verify as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mindresume.formats import MERGED, MINDFORMERS, Candidate, Refusal, missing_ranks_text
from mindresume.formatting import ranks_count
from mindresume.model.manifest import Details, FileRecord
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
        sources: its own files, or replicas of their tensors on other ranks where its own are
            missing.
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
        """Returns (rank, path) of each of its files that is missing, and whose tensors are read
        from replicas."""
        there = {source.file.path for source in self.sources}
        return [
            (self.rank, file.path)
            for file in candidate.files.get(self.rank, ())
            if file.path not in there
        ]


def read_size(candidate: Candidate, ranks: Iterator[int] | list[int]) -> int:
    """Returns the size of the files that ``Verifier`` reads for these ranks, in bytes."""
    return sum(file.size or 0 for rank in ranks for file in candidate.files.get(rank, ()))


@dataclass(frozen=True)
class Choice:
    """The result of a selection.

    Args:
        chosen: the checkpoint to resume from; None: there is none.
        refused: every newer candidate (every candidate, if none is chosen) with its reason, newest
            first.
        notes: sentences for the log: what was found and ignored.
        is_fresh_start: no save was ever complete there, so a fresh start loses nothing.
        shards: the files that this process verified, by rank of the checkpoint.
        root: the folder to which the paths of ``chosen`` are relative.
        bytes_verified: every byte was verified; False: only sizes and headers.
        warnings: sentences on defects of the chosen checkpoint that do not prevent its use.
        consolidated: these are consolidated weights, which have no layout of their own.
        directory: the checkpoint directory of the training, if ``root`` is its tier in memory; else
            empty.
    """

    chosen: Candidate | None
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    is_fresh_start: bool
    shards: tuple[VerifiedShard, ...] = ()
    root: str = ""
    bytes_verified: bool = True
    warnings: tuple[str, ...] = ()
    consolidated: bool = False
    directory: str = ""

    @property
    def in_memory(self) -> bool:
        """Whether the checkpoint lies in a tier in memory."""
        return bool(self.directory)

    @property
    def checkpoint_dir(self) -> str:
        """The checkpoint directory on disk."""
        return self.directory or self.root


def describe_candidate(candidate: Candidate, bytes_verified: bool = True) -> str:
    """Returns a phrase for people: the first file, who wrote it, and what was verified
    (``bytes_verified``: every byte)."""
    first = candidate.iteration_dir or (candidate.first.path if candidate.first else "no file")
    lost = f"; {text}" if (text := missing_ranks_text(candidate)) else ""
    if candidate.origin == MINDFORMERS:
        return (
            f"{first}, written by mindformers without records: sizes and headers are checked, "
            f"not every byte{lost}"
        )
    checked = "every byte" if bytes_verified else "sizes and headers"
    if candidate.origin == MERGED:
        return (
            f"{first}, consolidated weights that mindresume wrote, {checked} of the tensors checked"
        )
    return (
        f"{first}, run {candidate.run}, {ranks_count(candidate.world_size)}, {checked} "
        f"checked{lost}"
    )


def candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    """Returns the JSON object of a candidate without a problem."""
    # asdict would copy thousands of file rows, which are encoded in another form below
    value = {field.name: getattr(candidate, field.name) for field in fields(candidate)}
    value.update(problem=None, state=candidate.state.to_json() if candidate.state else None)
    value["files"] = [[rank, *files] for rank, files in candidate.files.items()]
    return value


def candidate_from_json(value: dict[str, Any]) -> Candidate:
    """Returns the candidate of ``candidate_to_json``."""
    return Candidate(
        **{
            **value,
            "files": {
                rank: tuple(FileRecord(*row) for row in rows) for rank, *rows in value["files"]
            },
            "metadata_files": tuple(FileRecord(*row) for row in value["metadata_files"]),
            **{
                name: tuple(value[name])
                for name in ("order", "missing_ranks", "local_ranks", "records")
            },
            "state": TrainingState.from_json(value["state"]) if value["state"] else None,
        }
    )
