"""Defines the results of the API: frozen values. ``to_json()`` returns plain JSON values whose keys
are the names of the fields.

In JSON a tuple becomes a list, a path a text, and a number that JSON lacks one of the texts "nan",
"inf", "-inf". Field names contain the unit: ``..._bytes`` or ``bytes_...`` in bytes, ``seconds`` in
seconds, ``..._at`` and ``since`` in seconds since 1970.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from mindresume.coordination.lease import LeaseHolder
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.weight_files import existing
from mindresume.resume.candidates import CheckpointStatus
from mindresume.saving.memory_tier.directory import PARTNER
from mindresume.typed import json_value

VERIFIED = "verified"
UNVERIFIABLE = "unverifiable"
DAMAGED = "damaged"
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Result:
    """Base class of the results: dataclasses with all fields in ``to_json()``."""

    def to_json(self) -> dict[str, Any]:
        """Returns {name of a field: its value as plain JSON values}."""
        return {
            field.name: json_value(getattr(self, field.name), is_text=True)
            for field in fields(self)
        }


@dataclass(frozen=True)
class Problem(Result):
    """Says why a checkpoint is not used, or what is damaged or missing in it.

    Attributes:
        step: The step of the checkpoint; None if it is unknown.
        reason: What was expected and found, as a sentence.
        file: Path of the file; None if it is not one file.
        rank: The rank; None if it is not one rank.
        tensors: Names of the damaged tensors in ``file``; empty if the damage is outside the
            tensors, or its tensors are unknown.
    """

    step: int | None
    reason: str
    file: str | None = None
    rank: int | None = None
    tensors: tuple[str, ...] = ()


def problem_of(root: str, refusal: Refusal) -> Problem:
    """Returns ``refusal`` as a Problem, with its file as a path below ``root``."""
    return Problem(
        refusal.step,
        refusal.reason,
        os.path.join(root, refusal.file) if refusal.file else None,
        refusal.rank,
        refusal.tensors,
    )


@dataclass(frozen=True)
class CheckpointInfo(Result):
    """Describes one saved step, as a listing shows it: names, records and sizes were checked,
    contents were not.

    ``to_json()`` has these fields and ``usable``.

    Attributes:
        step: Absolute optimizer step since the training began; None for weights without a step.
        epoch: Epoch of that step, from 1; None if it is unknown.
        state: "complete"; "incomplete" (the save never completed, so nothing is lost with it);
            "unusable" (damaged, or not for a job of ``world_size`` ranks); "node-local" (nodes
            share no disk, and this node's part is here).
        problem: Why a resume skips it; None if it can be used.
        warnings: What is wrong with it although it can be used, as sentences.
        format: Format of its files, "safetensors" or "ckpt".
        iteration_dir: Name of its iteration folder (Checkpoint 2.0); None for rank folders and
            consolidated weights.
        origin: "mindresume", "mindformers" (written without records) or "merged" (consolidated
            weights that mindresume wrote).
        run_id: The run that saved it; None unless ``origin`` is "mindresume".
        committed: Whether its manifest was written.
        world_size: Number of ranks that saved it; 1 for consolidated weights.
        missing_ranks: Ranks that wrote nothing to it; the others wrote everything that they held.
        local_ranks: Where nodes share no disk, the ranks whose files are on this node; empty
            otherwise.
        saved_at: Seconds since 1970; None if no record says.
        size_bytes: Bytes of its existing files.
        files: Paths of its weight files, in the order of the ranks.
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
    def is_partner_copy(self) -> bool:
        """Whether it lies in memory of this node, which keeps it for another one."""
        return bool(self.files) and f"{PARTNER}/" in self.files[0]

    @property
    def usable(self) -> bool:
        """Whether a resume could take it, as far as is known without reading its contents."""
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "usable": self.usable}


def info_of(directory: CheckpointDir, status: CheckpointStatus) -> CheckpointInfo:
    """Returns the listing of one step below ``root``; looks up the size of each file."""
    found: Candidate = status.candidate
    return CheckpointInfo(
        found.step,
        found.epoch,
        status.state,
        problem_of(directory.root, status.problem) if status.problem else None,
        status.warnings,
        found.format,
        found.iteration_dir or None,
        found.origin,
        found.run,
        found.committed,
        found.world_size,
        found.missing_ranks,
        found.local_ranks,
        found.saved_at,
        sum(status.size for status in existing(directory, found.all_files)),
        tuple(directory.path(file.path) for file in found.all_files),
    )


@dataclass(frozen=True)
class DirectoryUser(Result):
    """Describes a process that saves into the folder, or reads one of its checkpoints.

    Attributes:
        holder: The process: ``purpose`` ("saving", "loading", "scrubbing"), ``run``, ``host``,
            ``pid``, ``world_size``, ``since`` (seconds since 1970), ``holds`` (names of what it
            reads), ``step`` (the last one known), ``every`` (seconds between heartbeats).
        alive: Whether the process runs; None if it is on another machine, where only its heartbeat
            shows that.
    """

    holder: LeaseHolder
    alive: bool | None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of ``holder``, and ``alive``."""
        found: dict[str, Any] = json_value(
            {**asdict(self.holder), "alive": self.alive}, is_text=True
        )
        return found


@dataclass(frozen=True)
class Listing(Result):
    """Lists everything in a folder that looks like a saved step. Iteration yields the checkpoints.

    Attributes:
        root: The checkpoint folder, at or below the path that was opened.
        checkpoints: In the order in which a resume tries them, newest first.
        notes: What was assumed or ignored, as sentences.
        in_use_by: The processes that save there, or read.
        memory: Saves of this training in memory of this node, newest first, then the copies that
            it keeps for another node. They are lost with the node.
    """

    root: str
    checkpoints: tuple[CheckpointInfo, ...]
    notes: tuple[str, ...] = ()
    in_use_by: tuple[DirectoryUser, ...] = ()
    memory: tuple[CheckpointInfo, ...] = ()

    def __iter__(self) -> Iterator[CheckpointInfo]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)


@dataclass(frozen=True)
class CheckpointVerification(Result):
    """Holds the result of reading every byte of one checkpoint.

    Attributes:
        step: None for weights without a step.
        run_id: None unless mindresume saved it.
        origin: "mindresume", "mindformers" or "merged".
        state: "verified" (every byte is as written), "unverifiable" (mindformers wrote no
            checksums; headers, sizes and counters are right), "damaged", "unreadable" (no damage is
            known, and some files could not be read now), or "incomplete" (the save never
            completed).
        world_size: Number of ranks that saved it.
        missing_ranks: Ranks that wrote nothing to it.
        local_ranks: Where nodes share no disk, the ranks that were read; empty: all.
        problems: What is damaged, missing or cannot be read, each with its file and, where
            checksums show them, its tensors.
        notes: What is unusual about it but no damage, as sentences.
        is_usable: Whether a resume takes it: nothing is damaged, or replicas or records replace all
            that is.
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
    is_usable: bool = True


@dataclass(frozen=True)
class VerificationReport(Result):
    """Holds the result of reading every byte of the checkpoints of a folder.

    Attributes:
        root: The checkpoint folder.
        damaged: Whether a checkpoint that was complete once is damaged.
        checkpoints: Newest first.
        removed_steps: Steps that were removed while they were read; that is no damage.
        bytes_read: Number of bytes read.
        seconds: Duration.
        notes: What was assumed or ignored, as sentences.
        memory: Saves of this training in memory of this node, newest first, then the copies that
            it keeps for another node. ``damaged`` does not refer to them.
        unreadable: Whether a checkpoint that was complete once, without known damage, has files
            that could not be read now.
    """

    root: str
    damaged: bool
    checkpoints: tuple[CheckpointVerification, ...]
    removed_steps: tuple[int, ...]
    bytes_read: int
    seconds: float
    notes: tuple[str, ...] = ()
    memory: tuple[CheckpointVerification, ...] = ()
    unreadable: bool = False

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is damaged or missing in all checkpoints."""
        return tuple(problem for found in self.checkpoints for problem in found.problems)
