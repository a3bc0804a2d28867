"""Selects the checkpoint of a resume in a folder that all ranks see; all ranks of the job take the same one.

    rank 0        scan ─▶ the newest candidate that passes the cheap checks ─▶ broadcast
    each rank     verifies its own files completely ─▶ all verdicts to all ranks
    all ranks     every verdict good: take it; one bad: rank 0 offers the next older candidate

All exchanges go through ``mindresume.coordination.collectives``; an error on one rank reaches all of them.
"""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from mindresume.coordination.collectives import Group, Waiting, decide, report
from mindresume.errors import ConfigError, CorruptFileError, MissingCheckpointError, NoUsableCheckpointError
from mindresume.events.progress import ProgressReporter
from mindresume.formats import MERGED, MINDFORMERS, Candidate, Refusal, Scan, missing_ranks_text
from mindresume.formats.iteration_naming import parse_iteration, parse_weight_file
from mindresume.formats.iteration_scan import is_iteration
from mindresume.formats.location import below, fresh_start_refusal
from mindresume.formats.rank_folder_naming import folder_name, folder_rank, name_for_rank
from mindresume.formats.scalar_state import is_without_step, no_step, scalars_of
from mindresume.formats.scan import scan, scan_one
from mindresume.formats.weight_files import header_of
from mindresume.formatting import ranks_count
from mindresume.model.file_record import FORMATS, FileRecord
from mindresume.model.training_state import TrainingState, is_count
from mindresume.resume.advisories import damaged_metadata_files, replica_text
from mindresume.resume.health import NONE_HEALTHY, is_unhealthy
from mindresume.resume.iteration_checks import IterationMetadata
from mindresume.resume.missing_ranks import StrategyOf, complete_missing_ranks, unknown_strategy
from mindresume.resume.selection_policy import SelectionPolicy
from mindresume.resume.verifier import OnBytesRead, VerifiedShard, check_files, read_size, verify_rank
from mindresume.saving.crash_loop import FailedLoad, failed_loads_by_key, key_of, suspicion, warning
from mindresume.storage.interface import Storage
from mindresume.storage.read_cache import ReadCache
from mindresume.tensor_files import format_of


@dataclass(frozen=True)
class Choice:
    """The result of a selection.

    Args:
        chosen: None: there is nothing to resume from.
        refused: every newer candidate (every candidate, if none is chosen) with its reason, newest first.
        notes: sentences for the log on what was found and ignored.
        fresh: no save was ever complete there, so a fresh start loses nothing.
        shards: what this process verified, by rank of the checkpoint.
        root: the folder to which the paths of ``chosen`` are relative.
        complete: every byte was verified; else sizes and headers.
        remarks: sentences on what is wrong with the chosen checkpoint, though it can be used.
        consolidated: these are consolidated weights, which have no layout of their own.
    """
    chosen: Candidate | None
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    fresh: bool
    shards: tuple[VerifiedShard, ...] = ()
    root: str = ""
    complete: bool = True
    remarks: tuple[str, ...] = ()
    consolidated: bool = False


class ProgressMeter(Protocol):
    """Receives the progress of a verification."""

    def expect(self, total: int) -> None:
        """Resets the count; ``total`` bytes will be read."""

    def advance(self, count: int) -> None:
        """Adds ``count`` bytes that were read."""


def describe(candidate: Candidate, complete: bool = True) -> str:
    """Returns a phrase for people: the first file, who wrote it and what was verified (``complete``: every byte)."""
    first = candidate.iteration_dir or (candidate.first.path if candidate.first else "no file")
    lost = f"; {text}" if (text := missing_ranks_text(candidate)) else ""
    if candidate.origin == MINDFORMERS:
        return f"{first}, written by mindformers without records: sizes and headers are checked, not every byte{lost}"
    checked = "every byte" if complete else "sizes and headers"
    if candidate.origin == MERGED:
        return f"{first}, complete weights that mindresume wrote, {checked} of the tensors checked"
    return f"{first}, run {candidate.run}, {ranks_count(candidate.world_size)}, {checked} checked{lost}"


def candidates_for(storage: Storage, path: str, requested: str | None = None, world_size: int | None = None
                   ) -> tuple[Scan, bool]:
    """Returns the candidates that ``path`` offers, and whether the user asked for a single one explicitly.

    Args:
        path: ``load_checkpoint``: a root folder, a folder above one, a rank folder, an iteration folder or a file.
        requested: ``resume_training``: the name of a file, an iteration folder or a step.
        world_size: how many ranks read a file that lies outside of rank folders.
    Raises:
        MissingCheckpointError: the requested checkpoint is not there, or several folders below ``path`` hold checkpoints.
        ConfigError: ``path`` is a file of another kind.
    """
    status = storage.status(path)
    if status is not None and not status.is_folder:
        return _of_file(storage, path, world_size), True
    path = path.rstrip("/") or path
    if is_iteration(storage, path):
        return scan_one(storage, path), True
    root = os.path.dirname(os.path.abspath(path)) if folder_rank(os.path.basename(path)) is not None else path
    found = scan(storage, root)
    if found.exists and not any(candidate.maybe_completed for candidate in found.candidates):
        inner = below(storage, path)
        if inner:
            found, is_explicit = candidates_for(storage, inner, requested, world_size)
            notes = (f"{path} holds no checkpoints itself; those in {inner} count", *found.notes)
            return replace(found, notes=notes), is_explicit
        found = replace(found, fresh_start_refusal=fresh_start_refusal(storage, root, bool(found.candidates)))
    if requested is None:
        return found, False
    matching = [c for c in found.candidates if _is_requested(c, requested)]
    if not matching:
        offered = sorted({c.iteration_dir or os.path.basename(c.first.path) for c in found.candidates if c.first})
        where = os.path.join(root, folder_name(0)) + " has no such file, nor has the folder of any other rank" if any(
            not c.iteration_dir for c in found.candidates) or not found.candidates else f"{root} has no such iteration"
        there = f"There are: {', '.join(offered)}" if offered else "There is no checkpoint"
        raise MissingCheckpointError(f"resume_training names {requested!r}: {where}. {there}")
    return Scan(found.root, tuple(matching[:1]), (), True, found.expected_ranks, found.expected_source), True


def _is_requested(candidate: Candidate, requested: str) -> bool:
    if candidate.iteration_dir:
        step = int(requested) if requested.isascii() and requested.isdigit() else parse_iteration(requested.rstrip("/"))
        return candidate.step == step is not None
    return any(os.path.basename(file.path) == name_for_rank(requested, rank, candidate.format)
               for rank, (file, *_) in candidate.files.items())


def _of_file(storage: Storage, path: str, world_size: int | None) -> Scan:
    """Returns the candidate that a single file means: in a rank folder the files of all ranks with its name, in an iteration
    folder the iteration, else this file, which every rank reads."""
    folder, name = os.path.split(os.path.abspath(path))
    if folder_rank(os.path.basename(folder)) is not None:
        return candidates_for(storage, os.path.dirname(folder), name)[0]
    if parse_weight_file(name) is not None and is_iteration(storage, folder):
        return scan_one(storage, folder)
    if not name.endswith(tuple(f".{fmt}" for fmt in FORMATS)):
        raise ConfigError(f"{path} is no checkpoint: expected a folder, or a file ending in .{' or .'.join(FORMATS)}")
    file = FileRecord(name, format_of(name))
    ranks = world_size or 1
    candidate = Candidate(None, MINDFORMERS, file.format, dict.fromkeys(range(ranks), (file,)), ranks, (0.0,))
    try:
        scalars = scalars_of(storage, folder, file, header_of(storage, folder, file))
    except CorruptFileError as error:
        return Scan(folder, (replace(candidate, problem=Refusal(None, error.reason, name)),))
    except OSError as error:
        return Scan(folder, (replace(candidate, problem=Refusal(None, f"cannot be read: {error.strerror or error}", name)),))
    step, epoch = scalars.get("step_num"), scalars.get("epoch_num")
    if not is_count(step):
        return Scan(folder, (replace(candidate, problem=no_step(name)),))
    return Scan(folder, (replace(candidate, step=step, epoch=epoch if is_count(epoch) else None),))


def world_size_notes(found: Scan, world_size: int | None) -> list[str]:
    """Returns one sentence on the number of ranks that is assumed; none if the user or the manifests give it."""
    foreign = any(candidate.origin == MINDFORMERS and not candidate.iteration_dir for candidate in found.candidates)
    if world_size is not None or not foreign or found.expected_ranks is None:
        return []
    return [f"{ranks_count(found.expected_ranks)} assumed from {found.expected_source}, for what mindformers wrote without a "
            f"manifest"]


def select(storage: Storage, path: str, group: Group, policy: SelectionPolicy | None = None,
           strategy_of: StrategyOf = unknown_strategy, progress: ProgressMeter | None = None) -> Choice:
    """Selects the newest checkpoint in ``path`` that every rank has verified; the same on all ranks of ``group``.

    Args:
        path: as of ``candidates_for``.
        policy: what is accepted and how it is verified; None: the default.
        strategy_of: returns the strategy of a job that left no manifest, from which the number of its ranks and the tensors of
            missing ranks follow.
        progress: receives the bytes of each candidate.
    Raises:
        MissingCheckpointError: the requested checkpoint cannot be used, or ``path`` is a folder of something else.
        NoUsableCheckpointError: there are checkpoints, and none can be used.
        CollectiveError: a rank failed in another way.
    """
    policy, progress = policy or SelectionPolicy(), progress or ProgressReporter.silent()
    chooser = _CandidateQueue(storage, path, policy, strategy_of) if group.rank == 0 else None
    verdicts: list[Refusal] = []
    while True:
        message = decide(group, lambda verdicts=verdicts: chooser.next(verdicts), Waiting("looking at the checkpoints"))
        if message["end"]:
            return _conclude(message, (), policy.verifies_bytes)
        candidate, root = candidate_from_json(message["candidate"]), message["root"]
        ranks = policy.ranks_to_verify(group, candidate)
        progress.expect(read_size(candidate, ranks))
        forget_kept(storage)
        verdicts, shards, lost = verify_on_all_ranks(storage, root, candidate, ranks, group, progress.advance,
                                                     policy.verifies_bytes, strategy_of)
        if not verdicts:
            choice = _conclude({**message, "end": "chosen"}, shards, policy.verifies_bytes)
            return replace(choice, remarks=advisories_of(storage, root, candidate, lost, group))


def forget_kept(storage: Storage) -> None:
    """Drops the files that ``storage`` keeps in memory: their candidate was refused, or they were replaced on disk."""
    if isinstance(storage, ReadCache):
        storage.clear()


def verify_on_all_ranks(storage: Storage, root: str, candidate: Candidate, ranks: Sequence[int], group: Group,
                        progress: OnBytesRead | None, complete: bool, strategy_of: StrategyOf = unknown_strategy
                        ) -> tuple[list[Refusal], tuple[VerifiedShard, ...], list[tuple[int, str]]]:
    """Verifies ``candidate`` on all ranks of the job together, in this process the files of ``ranks`` of the checkpoint.

    Returns:
        The refusals of all ranks, the same on all; what this process verified; and (rank, path) of missing files whose tensors
        are read from replicas, the same on all.
    """
    shards: list[VerifiedShard] = []
    layouts, read = IterationMetadata(storage, root, candidate), [0]

    def counted(count: int) -> None:
        read[0] += count
        if progress:
            progress(count)

    def check() -> Any:
        for rank in ranks:
            strategy = strategy_of(root, candidate) if candidate.missing_ranks and candidate.records_dir is None else None
            result = verify_rank(storage, root, candidate, rank, counted, complete, strategy, layouts)
            if isinstance(result, Refusal):
                return {"refusal": result.to_json()}
            shards.append(result)
        return {"lost": [row for shard in shards for row in shard.missing_files(candidate)]}
    rows = report(group, check, Waiting(f"checking step {candidate.step}", lambda: read[0]))
    return ([Refusal(**row["refusal"]) for row in rows if "refusal" in row], tuple(shards),
            sorted({(rank, path) for row in rows for rank, path in row.get("lost", ())}))


def advisories_of(storage: Storage, root: str, candidate: Candidate, lost: list[tuple[int, str]], group: Group
                  ) -> tuple[str, ...]:
    """Returns sentences on what is wrong with a usable candidate, the same on all ranks. ``lost``: missing files that replicas
    replace (``verify_on_all_ranks``)."""
    beside = decide(group, lambda: [refusal.reason for refusal in damaged_metadata_files(storage, root, candidate)],
                    Waiting("looking at the files beside the weights"))
    return (*replica_text(lost), *beside)


class _CandidateQueue:
    """The candidates on rank 0, offered one after the other as messages to all ranks; the last message is the outcome."""

    def __init__(self, storage: Storage, path: str, policy: SelectionPolicy, strategy_of: StrategyOf = unknown_strategy):
        self.storage, self.path, self.policy, self.strategy_of = storage, path, policy, strategy_of
        self.failed_loads: Mapping[str, tuple[FailedLoad, ...]] = {}
        self.notes: list[str] = []
        self.suspected: list[Candidate] = []
        self.refused_unhealthy = False
        self.refused: list[Refusal] = []
        self.found: Scan | None = None
        self.queue: list[Candidate] = []
        self.is_explicit = False

    def next(self, verdicts: list[Refusal]) -> dict[str, Any]:
        try:
            return self._next(verdicts)
        except MissingCheckpointError as error:
            return {"end": "missing", "text": str(error)}

    def _next(self, verdicts: list[Refusal]) -> dict[str, Any]:
        policy = self.policy
        if self.found is None:
            self.found, self.is_explicit = candidates_for(self.storage, self.path, policy.requested, policy.world_size)
            self.queue = list(self.found.candidates)
            counts = policy.max_failed_loads and not self.is_explicit
            self.failed_loads = failed_loads_by_key(self.storage, self.found.root) if counts else {}
        self.refused += verdicts[:1]
        while self.queue or self.suspected:
            if not self.queue:                                  # a suspected checkpoint is better than none
                self.queue, self.suspected, self.failed_loads = self.suspected, [], {}
            candidate = self.queue.pop(0)
            if not policy.require_counters and is_without_step(candidate):
                candidate = replace(candidate, problem=None)
            ranks = policy.world_size
            if not (self.is_explicit and len(candidate.files) == 1):
                candidate, ranks = complete_missing_ranks(self.storage, self.found.root, candidate, self.strategy_of,
                                                          policy.world_size, self.found.expected_ranks)
            failures = self.failed_loads.get(key_of(candidate), ())
            if reason := suspicion(failures, policy.max_failed_loads):
                self.suspected.append(candidate)
                self.refused.append(candidate.refuse(reason))
                continue
            refusal = check_files(self.storage, self.found.root, candidate, policy.world_size if self.is_explicit else ranks,
                                  not candidate.committed) or self._unhealthy(candidate)
            if refusal is None:
                self.notes += [f"step {candidate.step}: {text}" for text in [warning(failures, policy.max_failed_loads)] if text]
                return {"end": "", "candidate": candidate_to_json(candidate), "root": self.found.root,
                        "refused": [r.to_json() for r in self.refused], "notes": self._all_notes()}
            self.refused.append(refusal)
        fresh = not any(candidate.maybe_completed for candidate in self.found.candidates)
        end = "missing" if self.is_explicit or self.found.fresh_start_refusal else "fresh" if fresh else "none"
        return {"end": end, "root": self.found.root, "refused": [r.to_json() for r in self.refused],
                "notes": self._all_notes(), "text": self._text(end, self.found.root)}

    def _unhealthy(self, candidate: Candidate) -> Refusal | None:
        names = self.policy.unhealthy
        if names is None or self.is_explicit or not is_unhealthy(candidate, names):
            return None
        self.refused_unhealthy = True
        return candidate.refuse(f"it was unhealthy when it was saved (the embedding's local norm was above "
                                f"embedding_local_norm_threshold); to take it all the "
                                f"same, request it by the name of its {'folder' if candidate.iteration_dir else 'file'}")

    def _all_notes(self) -> list[str]:
        return [*self.found.notes, *world_size_notes(self.found, self.policy.world_size), *self.notes] if self.found else []

    def _text(self, end: str, root: str) -> str:
        table = "\n".join(f"  {refusal}" for refusal in self.refused)
        if self.found.fresh_start_refusal:
            return self.found.fresh_start_refusal
        if end == "missing":
            return f"the requested checkpoint cannot be used:\n{table}"
        if end == "none":
            return (f"{NONE_HEALTHY + '. ' if self.refused_unhealthy else ''}{root} holds checkpoints, but none can be used:\n"
                    f"{table}\nRepair or restore one of them, or give another load_checkpoint"
                    + ("; or, to start afresh, set resume_training: False" if self.policy.require_counters else ""))
        return ""


def _conclude(message: dict[str, Any], shards: tuple[VerifiedShard, ...], complete: bool) -> Choice:
    end = message["end"]
    refused = tuple(Refusal(**refusal) for refusal in message.get("refused", ()))
    if end == "missing":
        raise MissingCheckpointError(message["text"], refused)
    if end == "none":
        raise NoUsableCheckpointError(message["text"], refused)
    chosen = candidate_from_json(message["candidate"]) if end == "chosen" else None
    return Choice(chosen, refused, tuple(message.get("notes", ())), end == "fresh", shards, message["root"],
                  complete)


def candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    # asdict would copy thousands of file rows, which are encoded in another form below
    value = {field.name: getattr(candidate, field.name) for field in fields(candidate)}
    value.update(problem=None, state=candidate.state.to_json() if candidate.state else None)
    value["files"] = [[rank, *(file.to_json() for file in files)] for rank, files in candidate.files.items()]
    value["metadata_files"] = [file.to_json() for file in candidate.metadata_files]
    return value


def candidate_from_json(value: dict[str, Any]) -> Candidate:
    return Candidate(**{**value, "files": {rank: tuple(map(FileRecord.from_json, rows)) for rank, *rows in value["files"]},
                        "metadata_files": tuple(map(FileRecord.from_json, value["metadata_files"])),
                        **{name: tuple(value[name]) for name in ("order", "missing_ranks", "local_ranks", "records")},
                        "state": TrainingState.from_json(value["state"]) if value["state"] else None})
