"""Opens the checkpoint that a user names: the newest of a folder, one step of it, consolidated
weights, or a single file; and presents consolidated weights as a saved step.

    source = open_checkpoint(storage, "output/checkpoint", step=200)
    source.weights.tensors, source.state, source.identity

    with closing(ReadHold()) as hold:                            # a read lock: nothing removes it
        source = open_checkpoint(storage, "output/checkpoint", hold=hold)

    source = ConsolidatedSource(group, full=True, resume=True)  # for a job
    choice = source.choose(storage, path)                       # and source.opened
    scan, (row,) = survey_consolidated(storage, path)           # for ls, which and verify
    candidate, problems = verify_consolidated(storage, path, row, progress)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mindresume.coordination.collectives import Group, Watchdog, gather_results
from mindresume.coordination.lease import Lease, acquire_read_lock
from mindresume.errors import (
    ConfigError,
    CorruptFileError,
    MindResumeError,
    MissingCheckpointError,
    NoUsableCheckpointError,
    StrategyError,
    UnreadableFileError,
)
from mindresume.events import Counted
from mindresume.formats import (
    MERGED,
    MINDFORMERS,
    OURS,
    Candidate,
    CheckpointDir,
    Refusal,
    Scan,
    steps_text,
)
from mindresume.formats.consolidated import FILE, ConversionManifest, conversion_manifest_of
from mindresume.formats.rank_folders import FileName, parse_name
from mindresume.formats.scan import CONSOLIDATED, find_candidates, kind_of
from mindresume.formats.strategy import Strategy
from mindresume.formats.weight_files import scalars_of, state_from_scalars
from mindresume.formatting import listed, ranks_count
from mindresume.model.manifest import FileRecord
from mindresume.model.training_state import TrainingState
from mindresume.reshard.checkpoint_view import CheckpointView, depends_on_slices, read_weights
from mindresume.reshard.range_reader import Traffic
from mindresume.reshard.region_load import check_tensors
from mindresume.reshard.step_view import (
    view_of_iteration,
    view_of_own_part,
    view_of_rank_folders,
)
from mindresume.reshard.strategy_store import file_identity, identity_of, strategy_for
from mindresume.resume.candidates import CheckpointStatus
from mindresume.resume.eligible import Choice, SelectionPolicy, eligible
from mindresume.resume.verifier import OnBytesRead, Verifier
from mindresume.storage import Storage, parallel
from mindresume.tensor_files import damaged_tensors, file_checksum, read_header
from mindresume.typed import is_count, is_number

_ANY_WEIGHTS = SelectionPolicy(require_counters=False)
# attempts to open, while a job completes and removes checkpoints in the folder
_TRIES = 10


@dataclass(frozen=True)
class OpenCheckpoint:
    """An opened checkpoint.

    Args:
        weights: view of its tensors.
        state: training state; None if the checkpoint does not say which step it is.
        name: the parts of its file names; None for names of another form.
        identity: a value for JSON, equal for equal bytes as far as that is known without reading
            them.
        what: a description for messages.
        folder: the root, into which nothing is written; None for a single file.
        refused: newer checkpoints that were refused.
        made: the manifest of consolidated weights that mindresume wrote.
    """

    weights: CheckpointView
    state: TrainingState | None
    name: FileName | None
    identity: Any
    what: str
    folder: str | None = None
    candidate: Candidate | None = None
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    made: ConversionManifest | None = None

    @property
    def arrangement(self) -> dict[str, bool]:
        """How the network that wrote the checkpoint orders the elements within its tensors; empty
        if unknown."""
        written = self.state or self.made
        return dict(written.arrangement) if written is not None else {}

    @property
    def is_iteration(self) -> bool:
        """Whether it is an iteration folder of Checkpoint 2.0, whose counters are in
        ``common.json``."""
        return self.candidate is not None and bool(self.candidate.iteration_dir)


class _Gone(MissingCheckpointError):
    """A job removed the checkpoint, or renamed it at its commit: the folder must be scanned
    again."""


class ReadHold:
    """Holds a read lock on at most one checkpoint, the last one whose files were read, so that
    neither a job nor ``prune`` removes it, until ``close``. ``notes``: sentences on checkpoints
    that it could not hold."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._outwaited: set[str] = set()
        self._lease: Lease | None = None

    @property
    def is_taken(self) -> bool:
        return self._lease is not None

    def take(self, directory: CheckpointDir, candidate: Candidate) -> None:
        """Holds ``candidate`` instead of the one before; nothing if nothing removes it, and, with a
        note, if the lock cannot be written. MissingCheckpointError if it was removed already."""
        self.close()
        if candidate.origin != OURS or not candidate.commit_dir:  # mindresume never removes it
            return
        try:
            self._lease = acquire_read_lock(
                directory, candidate.name, candidate.commit_dir, outwaited=self._outwaited
            )
        except OSError as error:
            self.notes.append(
                f"step {candidate.step} of {directory.root} is read without a lock and may be "
                f"removed meanwhile: {error}"
            )
            return
        if self._lease is None:
            raise _Gone(
                f"step {candidate.step} of {directory.root} was removed before it could be read"
            )

    def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def open_checkpoint(
    storage: Storage,
    path: str,
    step: int | None = None,
    strategy: str | None = None,
    hold: ReadHold | None = None,
) -> OpenCheckpoint:
    """Opens a checkpoint. Checks headers and records, and reads no tensor.

    Args:
        step: the step to open; None: the newest that can be used. If several runs saved it, the
            newest save that can be used.
        strategy: file or folder, required for checkpoints that mindformers wrote on several ranks,
            unless the folder ``strategy`` lies beside them.
        hold: takes each checkpoint before its files are read.
    Raises:
        MissingCheckpointError, NoUsableCheckpointError, StrategyError, CorruptFileError, LoadError.
    """
    if kind_of(storage, path) in CONSOLIDATED:
        if strategy is not None:
            raise ConfigError(
                f"{path} holds consolidated weights, which have no layout; remove the strategy "
                f"{strategy}"
            )
        return open_consolidated(storage, path, step)
    for tries_left in reversed(range(_TRIES)):
        try:
            return _open_newest(storage, path, step, strategy, hold)
        except _Gone:
            if not tries_left:
                raise
    raise AssertionError


def _open_newest(
    storage: Storage, path: str, step: int | None, strategy: str | None, hold: ReadHold | None
) -> OpenCheckpoint:
    """Opens the newest candidate that can be used. Raises _Gone if the folder changes meanwhile."""
    found, is_explicit = find_candidates(storage, path)
    if found.fresh_start_refusal:
        raise MissingCheckpointError(found.fresh_start_refusal)
    wanted = [c for c in found.candidates if step is None or c.step == step]
    if not wanted:
        raise MissingCheckpointError(
            f"{path} has no checkpoint"
            if step is None
            else f"{path} has no step {step}; {steps_text(found.candidates)}"
        )
    refused: list[Refusal] = []
    for candidate in wanted:
        try:
            if hold is not None:
                hold.take(found.directory, candidate)
            return replace(
                open_candidate(found.directory, candidate, strategy),
                refused=tuple(refused),
                notes=found.notes,
            )
        except _Gone:
            raise
        except MindResumeError as error:
            if (
                is_explicit
                or len(wanted) == 1
                or step is not None
                and isinstance(error, (ConfigError, StrategyError))
            ):
                raise
            refused.append(candidate.refuse(str(error)))
    what = "checkpoints" if step is None else f"saves of step {step}"
    table = "\n".join(f"  {refusal}" for refusal in refused)
    raise NoUsableCheckpointError(f"{path} holds {what}, but none can be used:\n{table}", refused)


def open_candidate(
    directory: CheckpointDir, candidate: Candidate, strategy: str | None = None
) -> OpenCheckpoint:
    """Opens one saved step.

    Raises:
        MissingCheckpointError: it was removed meanwhile.
        NoUsableCheckpointError: the scan found a problem.
        CorruptFileError, LoadError: a file is damaged, or a slice of a tensor is missing.
        ConfigError, StrategyError: the strategy is missing, superfluous or does not fit.
    """
    try:
        if refusal := eligible(directory, candidate, _ANY_WEIGHTS):
            raise NoUsableCheckpointError(f"{directory.root}: {refusal}", (refusal,))
        identity, layouts = identity_of(directory, candidate), None
        if not candidate.iteration_dir:
            layouts = strategy_for(directory, candidate, strategy)
        elif strategy is not None:
            raise ConfigError(
                f"{directory.path(candidate.iteration_dir)} holds its layouts; remove the strategy "
                f"{strategy}"
            )
        candidate = with_world_size(directory.root, candidate, layouts)
        try:
            source = checkpoint_of(directory, candidate, layouts, identity, split=True)
            source.weights.check()
        except Exception as error:
            # the damage of a file explains more
            _verify(Verifier(directory, candidate, full=False))
            if isinstance(error, OSError) and not isinstance(error, MindResumeError):
                path = str(error.filename or directory.root)
                raise UnreadableFileError(path, f"cannot be read: {error}") from error
            raise
        headers, records = source.weights.headers, source.weights.records
        _verify(Verifier(directory, candidate, full=False, headers=headers, records=records))
        return source
    except Exception as error:
        if candidate.commit_dir and directory.storage.status(candidate.commit_dir) is None:
            raise _Gone(
                f"step {candidate.step} of {directory.root} was removed before it was read"
            ) from error
        raise


def _verify(verifier: Verifier) -> None:
    """Verifies records, headers and sizes of all ranks. Keeps nothing: the details of all ranks
    would fill the memory.

    Raises:
        CorruptFileError: A file is damaged; UnreadableFileError: it could not be read.
    """
    directory = verifier.directory
    ranks = sorted(verifier.candidate.files)
    for refusal in parallel(directory.storage, partial(_refusal, verifier), ranks):
        if refusal is not None:
            kind = UnreadableFileError if refusal.is_unreadable else CorruptFileError
            raise kind(directory.path(refusal.file or ""), str(refusal))


def _refusal(verifier: Verifier, rank: int) -> Refusal | None:
    shard = verifier.verify(rank)
    return shard if isinstance(shard, Refusal) else None


def checkpoint_of(
    directory: CheckpointDir,
    candidate: Candidate,
    strategy: Strategy | None,
    identity: Any,
    scalars: Mapping[str, Any] | None = None,
    split: bool = False,
    rank: int | None = None,
) -> OpenCheckpoint:
    """Opens a candidate whose number of ranks is known (``with_world_size``).

    Args:
        rank: the only one whose part is opened (``view_of_own_part``); None: all.
        scalars: counters of its first file, for a candidate without records; None: they are read.
        split: the optimizer shard of every tensor is needed (``view_of_iteration``), not only of
            those whose elements are ordered within each slice.
    Raises:
        StrategyError, LoadError: see ``view_of_rank_folders``.
    """
    name = parse_name(os.path.basename(candidate.first.path))
    state = candidate.state
    if rank is not None:
        weights = view_of_own_part(directory, candidate, rank)
    elif candidate.iteration_dir:
        split = split or state is not None and depends_on_slices(state.arrangement)
        weights = view_of_iteration(directory, candidate, split)
    else:
        weights = view_of_rank_folders(directory, candidate, strategy)
        if scalars is None and state is None:
            header = weights.header(directory.path(candidate.first.path))
            scalars = scalars_of(directory, candidate.first, header)
    state = state or state_of(scalars or {}, name)
    weights.arrangement = dict(state.arrangement) if state is not None else {}
    what = (
        f"{weights.name}, {'weights only' if state is None else f'step {state.step}'}, "
        f"{ranks_count(weights.world_size)}"
    )
    return OpenCheckpoint(weights, state, name, identity, what, directory.root, candidate)


def with_world_size(root: str, candidate: Candidate, strategy: Strategy | None) -> Candidate:
    """Returns the candidate with the number of ranks of the strategy, if the scan could only count
    files. StrategyError if there are files of more ranks."""
    if candidate.origin == OURS or strategy is None:
        return candidate
    beyond = [rank for rank in candidate.files if rank >= strategy.world_size]
    if beyond:
        raise StrategyError(
            f"{root}, step {candidate.step}: {candidate.files[beyond[0]][0].path} is of rank "
            f"{beyond[0]}, the strategy {strategy.source} is of {ranks_count(strategy.world_size)}"
        )
    return replace(candidate, world_size=strategy.world_size)


def open_consolidated(storage: Storage, path: str, step: int | None = None) -> OpenCheckpoint:
    """Opens consolidated weights of MindSpore or Hugging Face. Raises the errors of
    ``read_weights``."""
    found, weights, made = read_weights(storage, path)
    state = state_of(found.scalars, None)
    if step is not None and (state is None or state.step != step):
        raise MissingCheckpointError(
            f"{path} holds {'no step' if state is None else f'step {state.step}'}, not step {step}"
        )
    paths = [os.path.join(found.root, file) for file in found.files]
    if made is not None and state is not None:
        state = replace(state, arrangement=made.arrangement)
    return OpenCheckpoint(
        weights,
        state,
        None,
        [file_identity(storage, p) for p in paths],
        f"{path}, consolidated weights{'' if state is None else f' of step {state.step}'}",
        None if found.kind == FILE else found.root,
        notes=found.notes,
        made=made,
    )


def state_of(scalars: Mapping[str, Any], name: FileName | None) -> TrainingState | None:
    """Returns the state by the counters in a file of mindformers; None without a step. ``name``
    holds epoch and step of the epoch."""
    step = scalars.get("step_num")
    if not is_count(step, 1):
        return None
    epoch = name.epoch if name else _count(scalars.get("epoch_num"), 1) or 1
    scale = scalars.get("loss_scale")
    return state_from_scalars(
        step,
        epoch,
        _count(scalars.get("global_step"), -1),
        _count(scalars.get("global_batch_size"), 1),
        float(scale) if is_number(scale) else None,
        name.step if name else 0,
    )


def _count(value: Any, least: int = 0) -> int | None:
    """Returns a counter, which may have been saved as a float; None if it is below ``least`` or no
    number."""
    value = int(value) if is_number(value) else None
    return value if is_count(value, least) else None


# ---- consolidated weights as a checkpoint --------------------------------------------------------


def candidate_of(source: OpenCheckpoint, state: TrainingState | None) -> Candidate:
    """Returns consolidated weights as one saved step of one rank."""
    files = (
        source.made.files
        if source.made
        else tuple(
            FileRecord(os.path.basename(path), header.format)
            for path, header in source.weights.headers.items()
        )
    )
    step, epoch = (state.step, state.epoch) if state else (None, None)
    return Candidate(
        step,
        MERGED if source.made else MINDFORMERS,
        files[0].format,
        {0: files},
        1,
        state,
        epoch=epoch,
    )


@dataclass
class ConsolidatedSource:
    """Consolidated weights as a source of a selection (``resume.selection.ConsolidatedWeights``).

    Args:
        full: every rank reads its share of the bytes and compares the recorded checksums, if there
            are any.
        resume: the step of the training is required.
        opened: the weights of the last choice.
    """

    group: Group
    full: bool
    resume: bool
    opened: OpenCheckpoint | None = None

    def choose(self, storage: Storage, path: str) -> Choice:
        """Returns consolidated weights as the choice of a selection.

        Raises:
            CollectiveError: on all ranks, if one finds damage.
            MissingCheckpointError: the weights hold no step, and ``resume`` is set.
        """
        read = Counted()
        state = gather_results(
            self.group,
            partial(self._check, storage, path, read),
            Watchdog(f"checking {path}", read),
        )[0]
        if state is None and self.resume:
            raise MissingCheckpointError(
                f"{path} holds consolidated weights, but no step_num: no training can be resumed "
                "from them. With resume_training: False they are loaded as weights only"
            )
        chosen = candidate_of(self.opened, TrainingState.from_json(state) if state else None)
        return Choice(chosen, (), self.opened.notes, False, (), self.opened.weights.name, self.full)

    def _check(self, storage: Storage, path: str, read: Counted) -> object:
        """Opens the weights, and reads this rank's share. Returns their state as JSON."""
        source = self.opened = open_consolidated(storage, path)
        if self.full and source.made and source.made.shapes:
            check_tensors(
                source.weights,
                sorted(source.weights.tensors)[self.group.rank :: self.group.size],
                traffic=Traffic(progress=read.advance),
            )
        elif self.full and source.made:
            # of an earlier version: only checksums of files cover dtypes and shapes
            for file in source.made.files[self.group.rank :: self.group.size]:
                if problem := _file_problem(
                    storage, source.weights.name, source.made, file, read.advance
                ):
                    raise CorruptFileError(
                        os.path.join(source.weights.name, file.path), problem.reason
                    )
        return source.state.to_json() if source.state else None


def survey_consolidated(storage: Storage, path: str) -> tuple[Scan, tuple[CheckpointStatus, ...]]:
    """Checks names, index, headers and sizes; reads no tensor. Returns for consolidated weights
    what ``resume.candidates.list_checkpoints`` returns for folders with several steps."""
    problem = None
    try:
        source = open_consolidated(storage, path)
        candidate = candidate_of(source, source.state)
    except (MindResumeError, OSError) as error:
        problem = Refusal(None, str(error))
        if isinstance(error, CorruptFileError):
            problem = Refusal(
                None,
                error.reason,
                os.path.relpath(error.path, _folder(path)),
                tensors=(error.tensor,) if error.tensor else (),
            )
        candidate = Candidate(None, MINDFORMERS, "safetensors", {}, 1, problem=problem)
    return Scan(CheckpointDir(storage, _folder(path)), (candidate,)), (
        CheckpointStatus(candidate, problem),
    )


def verify_consolidated(
    storage: Storage,
    path: str,
    row: CheckpointStatus,
    progress: OnBytesRead,
    part: tuple[int, int] = (1, 1),
) -> tuple[Candidate, list[Refusal]]:
    """Reads every byte of the files that have a checksum in ``conversion.json``, of those of
    ``part``. Returns the candidate and the refusals; if it finds none, that of ``row``, the result
    of ``survey_consolidated``."""
    try:
        made = conversion_manifest_of(storage, path)
    except CorruptFileError:
        made = None  # it is the problem that ``survey_consolidated`` found
    found = []
    if made is not None:
        for file in made.files[part[0] - 1 :: part[1]]:
            if bad := _file_problem(storage, _folder(path), made, file, progress):
                found.append(bad)
    return row.candidate, found or ([row.problem] if row.problem else [])


def _file_problem(
    storage: Storage, folder: str, made: ConversionManifest, file: FileRecord, progress: OnBytesRead
) -> Refusal | None:
    path = os.path.join(folder, file.path)
    try:
        status = storage.status(path)
        # before its bytes: it can be sparse, of terabytes
        if status is not None and status.size != file.size:
            return Refusal(
                None, f"{file.path} has {status.size} bytes, {file.size} were written", file.path
            )
        with storage.open(path) as opened:
            checksum, size = file_checksum(opened, progress)
            if (checksum, size) == (file.checksum, file.size):
                return None
            names = read_header(opened, path).tensors
            wrong = damaged_tensors(
                opened, path, {name: made.tensors[name] for name in names if name in made.tensors}
            )
    except FileNotFoundError:
        return Refusal(None, f"{file.path} is missing", file.path)
    except (CorruptFileError, OSError) as error:
        return Refusal(
            None,
            f"{file.path}: {error.reason if isinstance(error, CorruptFileError) else error}",
            file.path,
        )
    damaged = listed(wrong, 3) if wrong else "no tensor, but the header or its padding"
    return Refusal(
        None,
        f"{file.path} is not what was written; damaged: {damaged} (checksum {checksum}, recorded "
        f"{file.checksum})",
        file.path,
        tensors=tuple(wrong),
    )


def _folder(path: str) -> str:
    return os.path.dirname(path) or "." if os.path.isfile(path) else path
