"""What the calls of the API return: frozen values. ``to_json()`` gives plain JSON values whose keys are the names of the fields.

In JSON a tuple is a list, a path is a text, and a number that JSON does not have is one of the texts "nan", "inf", "-inf".
Names of fields tell the unit: ``..._bytes`` or ``bytes_...`` in bytes, ``seconds`` in seconds, ``..._at`` and ``since`` in
seconds since 1970.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from mindresume.coordination.lease import LeaseHolder
from mindresume.formats import Candidate, Refusal
from mindresume.resume.listing import COMPLETE, INCOMPLETE, NODE_LOCAL, UNUSABLE, CheckpointStatus, size_of
from mindresume.storage.interface import Storage

VERIFIED, UNVERIFIABLE, DAMAGED = "verified", "unverifiable", "damaged"

__all__ = ["COMPLETE", "DAMAGED", "INCOMPLETE", "NODE_LOCAL", "UNUSABLE", "UNVERIFIABLE", "VERIFIED", "CheckpointInfo",
           "CheckpointVerification", "DirectoryUser", "Listing", "Problem", "Result", "VerificationReport"]


def json_value(value: Any) -> Any:
    """Returns ``value`` as plain JSON values."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Result:
    """Base of the results: dataclasses whose fields are all in ``to_json()``."""

    def to_json(self) -> dict[str, Any]:
        """Returns {name of a field: its value as plain JSON values}."""
        return {field.name: json_value(getattr(self, field.name)) for field in fields(self)}      # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem(Result):
    """Why a checkpoint is not used, or what of it is damaged or missing.

    Attributes:
        step: The step of the checkpoint; None if it is unknown.
        reason: What was expected and found, as a sentence.
        file: Path of the file concerned; None if it is not one file.
        rank: The rank concerned; None if it is not one rank.
        tensors: Names of the damaged tensors in ``file``; empty if the damage is not in a tensor, or not known by tensor.
    """
    step: int | None
    reason: str
    file: str | None = None
    rank: int | None = None
    tensors: tuple[str, ...] = ()


def problem_of(root: str, refusal: Refusal) -> Problem:
    """Returns ``refusal``, whose file is relative to ``root``, with the path of that file."""
    return Problem(refusal.step, refusal.reason, os.path.join(root, refusal.file) if refusal.file else None, refusal.rank,
                   refusal.tensors)


@dataclass(frozen=True)
class CheckpointInfo(Result):
    """One saved step, as a listing shows it: names, records and sizes were checked, contents were not.

    ``to_json()`` has these fields and ``usable``.

    Attributes:
        step: Absolute optimizer step, counted since the training began; None for weights without a step.
        epoch: Epoch of that step, from 1; None if it is unknown.
        state: "complete"; "incomplete" (the save never completed, nothing is lost with it); "unusable" (damaged, or not for
            ``world_size`` ranks of the job asked about); "of this node" (where nodes share no disk: this node's part is here).
        problem: Why a resume passes it over; None if it can be used.
        warnings: What is wrong with it although it can be used, as sentences.
        format: Format of its files, "safetensors" or "ckpt".
        iteration_dir: Name of its iteration folder (Checkpoint 2.0); None for rank folders and complete weights.
        origin: "mindresume", "mindformers" (written without records) or "merged" (complete weights that mindresume wrote).
        run_id: The run that saved it; None unless ``origin`` is "mindresume".
        committed: Whether its manifest was written.
        world_size: Number of ranks that saved it; 1 for complete weights.
        missing_ranks: Ranks that wrote nothing to it; the others hold all that they held.
        local_ranks: Where nodes share no disk, the ranks whose files are on this node; empty otherwise.
        saved_at: Seconds since 1970; None if no record tells.
        size_bytes: Bytes of its files that are there.
        files: Paths of its files of weights, in the order of the ranks.
    """
    step: int | None
    epoch: int | None
    state: str
    problem: Problem | None
    warnings: tuple[str, ...]
    format: str
    iteration_dir: str | None
    origin: str
    run_id: str | None
    committed: bool
    world_size: int
    missing_ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    saved_at: float | None
    size_bytes: int
    files: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether a resume could take it, as far as is known without reading its contents."""
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "usable": self.usable}


def info_of(storage: Storage, root: str, seen: CheckpointStatus) -> CheckpointInfo:
    """Returns the listing of one row of a survey of ``root``; looks up the size of each file."""
    found: Candidate = seen.candidate
    return CheckpointInfo(
        found.step, found.epoch, seen.state, problem_of(root,
                                                        seen.problem) if seen.problem else None, seen.warnings, found.format,
        found.iteration_dir or None, found.origin, found.run, found.committed, found.world_size,
        found.missing_ranks, found.local_ranks, found.saved_at,
        size_of(storage, root, found), tuple(os.path.join(root, file.path) for file in found.all_files))


@dataclass(frozen=True)
class DirectoryUser(Result):
    """A process that saves into the folder, or reads a checkpoint of it.

    Attributes:
        holder: Who it is: ``purpose`` ("saving", "loading"), ``run``, ``host``, ``pid``, ``world_size``, ``since`` (seconds since
            1970), ``holds`` (names of what it reads), ``step`` (the last one known), ``every`` (seconds between heartbeats).
        alive: Whether the process lives; None if it runs on another machine, where only its heartbeat tells.
    """
    holder: LeaseHolder
    alive: bool | None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of ``holder``, and ``alive``."""
        return json_value({**asdict(self.holder), "alive": self.alive})


@dataclass(frozen=True)
class Listing(Result):
    """Everything in a folder that looks like a saved step. Iterating gives the checkpoints.

    Attributes:
        root: The folder of checkpoints that was found at, or below, the path that was opened.
        checkpoints: In the order in which a resume tries them, newest first.
        notes: What was assumed or ignored, as sentences.
        in_use_by: Who saves there, or reads.
    """
    root: str
    checkpoints: tuple[CheckpointInfo, ...]
    notes: tuple[str, ...] = ()
    in_use_by: tuple[DirectoryUser, ...] = ()

    def __iter__(self) -> Iterator[CheckpointInfo]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)


@dataclass(frozen=True)
class CheckpointVerification(Result):
    """What reading every byte of one checkpoint has shown.

    Attributes:
        step: None for weights without a step.
        run_id: None unless mindresume saved it.
        origin: "mindresume", "mindformers" or "merged".
        state: "verified" (every byte is as it was written), "unverifiable" (mindformers wrote no checksums; headers, sizes and
            counters are right), "damaged", or "incomplete" (the save never completed).
        world_size: Number of ranks that saved it.
        missing_ranks: Ranks that wrote nothing to it.
        local_ranks: Where nodes share no disk, the ranks that were read; empty: all.
        problems: What is damaged or missing, each with its file and, where checksums tell, its tensors.
        notes: What is unusual about it and no damage, as sentences.
    """
    step: int | None
    run_id: str | None
    origin: str
    state: str
    world_size: int
    missing_ranks: tuple[int, ...]
    local_ranks: tuple[int, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerificationReport(Result):
    """What reading every byte of the checkpoints of a folder has shown.

    Attributes:
        root: The folder of checkpoints.
        damaged: Whether any checkpoint that was complete once is damaged.
        checkpoints: Newest first.
        removed_steps: Steps that a job, or somebody, removed while they were read; that is no damage.
        bytes_read: Bytes that were read.
        seconds: How long it took.
        notes: What was assumed or ignored, as sentences.
    """
    root: str
    damaged: bool
    checkpoints: tuple[CheckpointVerification, ...]
    removed_steps: tuple[int, ...]
    bytes_read: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is damaged or missing, of all checkpoints."""
        return tuple(problem for found in self.checkpoints for problem in found.problems)
