"""Folders of checkpoints. A format scans a folder into candidates, newest first, and names the files a save writes.

Candidate: something that looks like one saved step, of one run. Whether it can be used is decided by ``mindresume.resume``.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindresume.file_record import FileRecord
from mindresume.formatting import listed
from mindresume.state import TrainingState

OURS, MINDFORMERS, MERGED = "mindresume", "mindformers", "merged"
FIRST = (float("inf"),)                 # order of what may be newer than everything: it is refused first, and so is said


@dataclass(frozen=True)
class Refusal:
    """Why one candidate is not used. ``file`` and ``rank`` where they are known; ``file`` relative to the root. ``tensors``:
    names of those in ``file`` whose checksums differ."""
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
    """One saved step as a scan found it.

    ``origin``: OURS, MINDFORMERS (written without records) or MERGED (complete weights that mindresume put together). ``run``:
    None but for OURS. ``files``: those of each rank, paths relative to the root of the scan. ``world_size``: ranks that saved it;
    for MINDFORMERS in rank folders the number of ranks that have its file. ``attempt``: path of the folder of records. ``base``:
    the iteration folder relative to the root, empty for rank folders; paths in records are relative to it. ``deduplicated``: by
    its records some rank wrote only its share of what several hold. ``absent``: ranks without files, which were
    lost before the others saved for the last time; what they held is proven to be with the others. ``part``: where nodes share
    no disk, the ranks of the node whose files these are. ``small``: files beside the weights that the manifest names.
    ``manifest_problem``: why the manifest that should be there cannot be used; then the records count, which are the commit.
    ``unseen``: why it could not be looked into (a folder that cannot be listed); then ``problem`` says so too. Nothing is known
    of what is in it: it is never removed, and no training begins afresh beside it. ``lineage``: the run that began its training;
    empty: its records do not say.
    ``maybe_completed``: False if it is certain that this save never completed, so that nothing is lost by starting afresh.
    ``problem``: what the scan already found wrong. ``order``: larger is newer; comparable within one scan.
    """
    step: int | None
    origin: str
    format: str
    files: Mapping[int, tuple[FileRecord, ...]]
    world_size: int
    order: tuple[float, ...]
    state: TrainingState | None = None
    run: str | None = None
    attempt: str | None = None
    committed: bool = False
    maybe_completed: bool = True
    problem: Refusal | None = None
    saved_at: float | None = None
    epoch: int | None = None
    records: tuple[str, ...] = ()
    base: str = ""
    small: tuple[FileRecord, ...] = ()
    deduplicated: bool = False
    absent: tuple[int, ...] = ()
    part: tuple[int, ...] = ()
    manifest_problem: str = ""
    unseen: str = ""
    lineage: str = ""

    @property
    def name(self) -> str:
        """Of its folder of records: the identity of a save of ours, wherever that folder lies."""
        return os.path.basename(self.attempt or "")

    @property
    def commit_dir(self) -> str:
        """The folder whose renaming makes it no checkpoint any more: the iteration folder, else the folder of records. Empty for
        what has no records."""
        if self.attempt is None:
            return ""
        return os.path.dirname(os.path.dirname(self.attempt)) if self.base else self.attempt

    @property
    def every_file(self) -> list[FileRecord]:
        """Weights of all ranks, in order of rank."""
        return [file for files in self.files.values() for file in files]

    @property
    def first(self) -> FileRecord | None:
        """One of its files, to call it by."""
        return next(iter(self.every_file), None)

    @property
    def health(self) -> int | None:
        """What mindformers' health monitor found when it was saved: 0 healthy, 1 not; None where no record says so."""
        return self.state.health if self.state else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """What was measured when it was saved; empty where no record says so."""
        return dict(self.state.metrics) if self.state else {}

    def refuse(self, reason: str, file: str | None = None, rank: int | None = None, tensors: Sequence[str] = ()) -> Refusal:
        return Refusal(self.step, reason, file, rank, tuple(tensors))


def unseen(error: OSError, place: str, rank: int | None = None, **known: Any) -> Candidate:
    """What may lie in ``place``, relative to the root of the scan, which cannot be listed. ``known``: fields of the candidate."""
    reason = f"{place} cannot be listed: {error.strerror or error}"
    step = known.setdefault("step", None)
    return Candidate(**{"origin": MINDFORMERS, "format": "", "files": {}, "world_size": 0, "order": FIRST, **known},
                     unseen=reason, problem=Refusal(step, reason, place, rank))


@dataclass(frozen=True)
class Scan:
    """``candidates`` newest first; ``notes``: sentences about what was found and ignored, for the log. ``strange``: where none of
    the candidates was ever complete, why this is all the same no folder in which a training may begin; empty: it is one."""
    root: str
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    exists: bool = True
    expected_ranks: int | None = None            # of the strategy folder beside, or the rank folders: a guess
    expected_source: str = ""
    strange: str = ""


def absent_text(candidate: Candidate) -> str:
    """What is missing of the last save of a dying job, and why that is enough; empty if nothing is missing."""
    return f"rank {listed(candidate.absent)} wrote nothing, the others hold all that was there" if candidate.absent else ""


def steps_text(candidates: Iterable[Candidate]) -> str:
    """Says which steps there are."""
    found = {candidate.step for candidate in candidates}
    texts = [*map(str, sorted(found - {None})), *(["weights without a step"] if None in found else [])]
    return f"there are: {', '.join(texts)}" if texts else "there is no checkpoint"
