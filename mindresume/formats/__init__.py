"""Defines a checkpoint directory and the result of scanning it: candidates, newest first.

A candidate looks like one saved step of one run; ``mindresume.resume`` decides whether it can be
used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindresume.errors import UnreadableFileError
from mindresume.formatting import listed
from mindresume.model.manifest import FileRecord
from mindresume.model.training_state import TrainingState
from mindresume.storage import Storage

OURS = "mindresume"
MINDFORMERS = "mindformers"
MERGED = "merged"
# order of a candidate that may be the newest one, so that its refusal is reported
FIRST = (float("inf"),)


@dataclass(frozen=True)
class CheckpointDir:
    """A checkpoint directory: ``root`` holds rank folders or iteration folders, and the folder of
    records.

    Paths in records, candidates and refusals are relative to ``root``.
    """

    storage: Storage
    root: str

    def path(self, *names: str) -> str:
        """Returns the path of what lies at ``names`` in the directory."""
        return os.path.join(self.root, *names)


@dataclass(frozen=True)
class Refusal:
    """Explains why a candidate is not used.

    Attributes:
        step: None if unknown.
        reason: for people.
        file: relative to the root; None if no single file is the reason.
        rank: None if no single rank is concerned.
        tensors: names of the tensors in ``file`` whose checksums differ.
        is_unreadable: the file system reported an error, so nothing is known of the content: this
            is no damage, and may pass.
        is_weights_only: the weights can be loaded, but no training can resume from it.
        is_harmless: a resume takes the candidate nevertheless: replicas or records replace what is
            damaged.
        is_last_resort: a resume takes the candidate if there is no other.
    """

    step: int | None
    reason: str
    file: str | None = None
    rank: int | None = None
    tensors: tuple[str, ...] = ()
    is_unreadable: bool = False
    is_weights_only: bool = False
    is_harmless: bool = False
    is_last_resort: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", tuple(self.tensors))  # JSON has lists

    def __str__(self) -> str:
        where = f" [{self.file}]" if self.file and self.file not in self.reason else ""
        return f"step {'?' if self.step is None else self.step}: {self.reason}{where}"


@dataclass(frozen=True)
class SavedStep:
    """Describes what one saved step is: its names, files and ranks.

    Attributes:
        step: None if unknown.
        origin: OURS (mindresume), MINDFORMERS (written without records) or MERGED (consolidated
            weights that mindresume wrote).
        format: of the weight files; empty if unknown.
        files: of each rank; paths relative to the root of the scan.
        world_size: ranks that saved it; for rank folders of MINDFORMERS, the number of ranks that
            have a file.
        state: None if no record tells it.
        run: id of the run; None unless OURS.
        records_dir: path of the folder of records; None without records.
        saved_at: seconds since 1970; None if unknown.
        epoch: None if unknown.
        iteration_dir: the iteration folder relative to the root, empty for rank folders; paths in
            records are relative to it.
        metadata_files: the metadata files that the manifest names beside the weights.
        deduplicated: according to the records, some rank wrote only its share of the slices that
            several ranks hold.
        local_ranks: where nodes share no disk, the ranks of the node whose files these are; else
            empty.
        lineage: the run that began its training; empty if its records do not tell.
    """

    step: int | None
    origin: str
    format: str
    files: Mapping[int, tuple[FileRecord, ...]]
    world_size: int
    state: TrainingState | None = None
    run: str | None = None
    records_dir: str | None = None
    saved_at: float | None = None
    epoch: int | None = None
    iteration_dir: str = ""
    metadata_files: tuple[FileRecord, ...] = ()
    deduplicated: bool = False
    local_ranks: tuple[int, ...] = ()
    lineage: str = ""

    @property
    def name(self) -> str:
        """Returns the name of its folder of records, which identifies a save of mindresume wherever
        the folder lies."""
        return os.path.basename(self.records_dir or "")

    def in_records(self, name: str) -> str:
        """Returns the path of a file in its folder of records."""
        return os.path.join(self.records_dir or "", name)

    @property
    def commit_dir(self) -> str:
        """Returns the folder whose renaming revokes the commit: the iteration folder, else the
        folder of records. Empty without records."""
        if self.records_dir is None:
            return ""
        return (
            os.path.dirname(os.path.dirname(self.records_dir))
            if self.iteration_dir
            else self.records_dir
        )

    @property
    def all_files(self) -> list[FileRecord]:
        """Returns the weight files of all ranks, in order of rank."""
        return [file for files in self.files.values() for file in files]

    @property
    def first(self) -> FileRecord | None:
        """Returns one of its files, for messages; None if it has none."""
        return next(iter(self.all_files), None)

    @property
    def health(self) -> int | None:
        """Returns the result of mindformers' health monitor at the save: 0 healthy, 1 not; None if
        no record has it."""
        return self.state.health if self.state else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """Returns the metrics at the save; empty if no record has any."""
        return self.state.metrics if self.state else {}


@dataclass(frozen=True)
class Candidate(SavedStep):
    """A saved step as a scan found it: whether it is complete, and its place among the others.

    Attributes:
        order: larger is newer; comparable within one scan only.
        committed: a valid manifest exists.
        maybe_completed: False only if the save provably never completed; a fresh start then loses
            nothing.
        problem: the reason for refusal that the scan already found.
        records: checksums of the records, in order of rank, if the save is complete.
        missing_ranks: ranks without files, lost before the last save; the other ranks provably hold
            all of their slices.
        manifest_problem: why the manifest cannot be used; the records, which are the commit, then
            decide.
        manifest_unreadable: the reason is an error of the file system, which may pass.
        listing_error: why its folder cannot be listed, also given in ``problem``. Its content is
            unknown, so it is never removed, and it prevents a fresh start.
        has_scrub_result: there is a file ``scrub.json`` beside its records
            (``formats.weight_files``).
    """

    order: tuple[float, ...] = (0.0,)
    committed: bool = False
    maybe_completed: bool = True
    problem: Refusal | None = None
    records: tuple[str, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    manifest_problem: str = ""
    manifest_unreadable: bool = False
    listing_error: str = ""
    has_scrub_result: bool = False

    def refuse(
        self,
        reason: str,
        file: str | None = None,
        rank: int | None = None,
        tensors: Sequence[str] = (),
        error: Exception | None = None,
    ) -> Refusal:
        """Returns a refusal of this candidate. ``error``: from which it follows."""
        return Refusal(self.step, reason, file, rank, tuple(tensors), may_pass(error))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Candidate:
        """Returns a candidate without a problem of its attributes as JSON values."""
        lists = ("order", "missing_ranks", "local_ranks", "records")
        files = {
            int(rank): tuple(FileRecord(*row) for row in rows)
            for rank, rows in value["files"].items()
        }
        return cls(
            **{
                **value,
                **{name: tuple(value[name]) for name in lists},
                "files": files,
                "metadata_files": tuple(FileRecord(*row) for row in value["metadata_files"]),
                "state": value["state"] and TrainingState.from_json(value["state"]),
            }
        )


def may_pass(error: Exception | None) -> bool:
    """Returns whether an error of reading says nothing about the content: the file system failed. A
    missing file is missing."""
    return isinstance(error, (OSError, UnreadableFileError)) and not isinstance(
        error, (FileNotFoundError, NotADirectoryError)
    )


def unlisted_candidate(
    error: OSError, place: str, rank: int | None = None, **known: Any
) -> Candidate:
    """Returns a refused candidate for ``place`` (relative to the root), which cannot be listed.
    ``known``: its other fields."""
    reason = f"{place} cannot be listed: {error.strerror or error}"
    step = known.setdefault("step", None)
    return Candidate(
        **{
            "origin": MINDFORMERS,
            "format": "",
            "files": {},
            "world_size": 0,
            "order": FIRST,
            **known,
        },
        listing_error=reason,
        problem=Refusal(step, reason, place, rank, is_unreadable=True),
    )


@dataclass(frozen=True)
class Scan:
    """Holds the candidates of a directory.

    Attributes:
        directory: the directory.
        candidates: newest first.
        notes: for the log: what was found and ignored.
        exists: whether the directory exists.
        expected_ranks: if mindformers saved in rank folders, an estimate of the ranks of the job,
            from the strategy folder beside it or the rank folders; None if unknown.
        expected_source: the source of that estimate.
        has_load_attempts: there are files of load attempts beside the records
            (``saving.crash_loop``).
        fresh_start_refusal: if no candidate was ever complete, why no training may begin in this
            directory nevertheless; empty if one may.
        bad_steps: the rows of the note of bad steps (``formats.bad_steps``), oldest first.
    """

    directory: CheckpointDir
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    exists: bool = True
    expected_ranks: int | None = None
    expected_source: str = ""
    has_load_attempts: bool = False
    fresh_start_refusal: str = ""
    bad_steps: tuple[Any, ...] = ()

    @property
    def has_checkpoint(self) -> bool:
        """Whether a save was complete, or may have been."""
        return any(candidate.maybe_completed for candidate in self.candidates)

    @property
    def root(self) -> str:
        """The path of the directory."""
        return self.directory.root


def missing_ranks_text(candidate: Candidate) -> str:
    """Returns a phrase for a last save that some ranks of a failing job did not take part in; empty
    if all ranks wrote."""
    if not candidate.missing_ranks:
        return ""
    return f"rank {listed(candidate.missing_ranks)} wrote nothing, the other ranks hold all slices"


def steps_text(candidates: Iterable[Candidate]) -> str:
    """Returns a phrase that lists the steps of the candidates."""
    found = {candidate.step for candidate in candidates}
    texts = [str(step) for step in sorted(step for step in found if step is not None)]
    if None in found:
        texts.append("weights without a step")
    return f"there are: {', '.join(texts)}" if texts else "there is no checkpoint"
