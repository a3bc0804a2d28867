"""Defines what a scan of a folder returns: each format scans a folder into candidates, newest first.

A candidate looks like one saved step of one run; ``mindresume.resume`` decides whether it can be used.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindresume.formatting import listed
from mindresume.model.file_record import FileRecord
from mindresume.model.training_state import TrainingState

OURS, MINDFORMERS, MERGED = "mindresume", "mindformers", "merged"
FIRST = (float("inf"),)                 # order of what may be newer than everything, so that its refusal is reported


@dataclass(frozen=True)
class Refusal:
    """Says why one candidate is not used. ``file`` (relative to the root) and ``rank``: where they are known. ``tensors``: names
    of the tensors in ``file`` whose checksums differ."""
    step: int | None
    reason: str
    file: str | None = None
    rank: int | None = None
    tensors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))        # JSON has lists

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "reason": self.reason, "file": self.file, "rank": self.rank, "tensors": list(self.tensors)}

    def __str__(self) -> str:
        where = f" [{self.file}]" if self.file and self.file not in self.reason else ""
        return f"step {'?' if self.step is None else self.step}: {self.reason}{where}"


@dataclass(frozen=True)
class Candidate:
    """Describes one saved step as a scan found it.

    Attributes:
        origin: OURS, MINDFORMERS (written without records) or MERGED (complete weights that mindresume wrote).
        files: of each rank; paths relative to the root of the scan.
        world_size: ranks that saved it; of MINDFORMERS in rank folders, the ranks that have its file.
        order: larger is newer; comparable within one scan.
        run: None unless OURS.
        records_dir: path of the folder of records.
        maybe_completed: False only if the save provably never completed; a fresh start loses nothing then.
        problem: what the scan already found wrong.
        iteration_dir: the iteration folder relative to the root, empty for rank folders; paths in records are relative to it.
        metadata_files: the metadata files that the manifest names beside the weights.
        deduplicated: by the records, some rank wrote only its share of what several ranks hold.
        missing_ranks: ranks without files, lost before the last save; the other ranks provably hold all that they held.
        local_ranks: where nodes share no disk, the ranks of the node whose files these are; else empty.
        manifest_problem: why the manifest cannot be used; the records, which are the commit, decide then.
        listing_error: why it cannot be listed; ``problem`` says so too. Its content is unknown, so it is never removed, and no
        fresh
            start happens beside it.
        lineage: the run that began its training; empty if its records do not say.
    """
    step: int | None
    origin: str
    format: str
    files: Mapping[int, tuple[FileRecord, ...]]
    world_size: int
    order: tuple[float, ...]
    state: TrainingState | None = None
    run: str | None = None
    records_dir: str | None = None
    committed: bool = False
    maybe_completed: bool = True
    problem: Refusal | None = None
    saved_at: float | None = None
    epoch: int | None = None
    records: tuple[str, ...] = ()
    iteration_dir: str = ""
    metadata_files: tuple[FileRecord, ...] = ()
    deduplicated: bool = False
    missing_ranks: tuple[int, ...] = ()
    local_ranks: tuple[int, ...] = ()
    manifest_problem: str = ""
    listing_error: str = ""
    lineage: str = ""

    @property
    def name(self) -> str:
        """Name of its folder of records: the identity of a save of ours, wherever that folder lies."""
        return os.path.basename(self.records_dir or "")

    @property
    def commit_dir(self) -> str:
        """The folder whose rename un-commits it: the iteration folder, else the folder of records. Empty without records."""
        if self.records_dir is None:
            return ""
        return os.path.dirname(os.path.dirname(self.records_dir)) if self.iteration_dir else self.records_dir

    @property
    def all_files(self) -> list[FileRecord]:
        """Files of weights of all ranks, in order of rank."""
        return [file for files in self.files.values() for file in files]

    @property
    def first(self) -> FileRecord | None:
        """One of its files, for messages; None if it has none."""
        return next(iter(self.all_files), None)

    @property
    def health(self) -> int | None:
        """Result of mindformers' health monitor at the save: 0 healthy, 1 not; None if no record says so."""
        return self.state.health if self.state else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics at the save; empty if no record has any."""
        return dict(self.state.metrics) if self.state else {}

    def refuse(self, reason: str, file: str | None = None, rank: int | None = None, tensors: Sequence[str] = ()) -> Refusal:
        return Refusal(self.step, reason, file, rank, tuple(tensors))


def unlisted_candidate(error: OSError, place: str, rank: int | None = None, **known: Any) -> Candidate:
    """Returns a candidate for ``place``, relative to the root, which cannot be listed. ``known``: its other fields."""
    reason = f"{place} cannot be listed: {error.strerror or error}"
    step = known.setdefault("step", None)
    return Candidate(**{"origin": MINDFORMERS, "format": "", "files": {}, "world_size": 0, "order": FIRST, **known},
                     listing_error=reason, problem=Refusal(step, reason, place, rank))


@dataclass(frozen=True)
class Scan:
    """Holds the ``candidates`` of a folder, newest first, and ``notes`` for the log about what was ignored.
    ``fresh_start_refusal``: where no candidate was ever complete, why no training may begin in this folder all the same; empty if
    one may."""
    root: str
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    exists: bool = True
    expected_ranks: int | None = None            # by the strategy folder beside, or the rank folders: an estimate
    expected_source: str = ""
    fresh_start_refusal: str = ""


def missing_ranks_text(candidate: Candidate) -> str:
    """Says which ranks wrote nothing in the last save of a dying job, and why the rest suffices; empty if all wrote."""
    if not candidate.missing_ranks:
        return ""
    return f"rank {listed(candidate.missing_ranks)} wrote nothing, the others hold all that was there"


def steps_text(candidates: Iterable[Candidate]) -> str:
    """Says which steps the candidates are of."""
    found = {candidate.step for candidate in candidates}
    texts = [*map(str, sorted(found - {None})), *(["weights without a step"] if None in found else [])]
    return f"there are: {', '.join(texts)}" if texts else "there is no checkpoint"
