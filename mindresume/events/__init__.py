"""What happens in a run, as small frozen values. Whoever does something emits an event; handlers make log lines (``log_lines``),
scalars for TensorBoard and the event file (``event_file``) of it.

    emit(SaveCommitted(step=500, ranks=8, size_bytes=1 << 30))

    saving, resume, reshard ─▶ emit ─▶ Emitter ─▶ log line, event file, TensorBoard
    event file ─▶ ``event_from_json`` ─▶ report

No event holds a sentence that another part of mindresume reads: ``reason`` and ``text`` are for people alone. Sizes are in bytes,
spans in seconds. Every field is a JSON value or a tuple of them, so an event can be passed between processes and written to a
file.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from mindresume.errors import ConfigError

INFO, WARNING, ERROR = "info", "warning", "error"
FINISHED, PREEMPTED, NOTHING_TO_TRAIN, FAILED = "finished", "preempted", "nothing_to_train", "failed"

_KINDS: dict[str, type[Event]] = {}
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True)
class Event:
    """Base of all events. ``kind``: the class name in snake_case, which names the event in the event file."""
    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.kind = _WORD.sub("_", cls.__name__).lower()
        _KINDS[cls.kind] = cls

    def to_json(self) -> dict[str, Any]:
        """Returns {"event": kind, field: value, ...}, without fields that are None; a float that JSON has no number for is
        None."""
        values = {field.name: _json(getattr(self, field.name)) for field in fields(self)}
        return {"event": self.kind, **{name: value for name, value in values.items() if value is not None}}


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Does nothing: the emitter of whoever has nobody to tell."""


def event_from_json(value: Mapping[str, Any]) -> Event | None:
    """Returns the event that ``value`` describes. None for a kind that this version does not know, and where a field that has no
    default is missing, of another type, or without a meaning here. Fields that this version does not know are left out."""
    known = _KINDS.get(value["event"]) if isinstance(value.get("event"), str) else None
    if known is None:
        return None
    given: dict[str, Any] = {}
    for field in fields(known):
        if value.get(field.name) is None:
            if field.default is MISSING and "None" not in str(field.type):
                return None
            given[field.name] = None if field.default is MISSING else field.default
            continue
        accepted, found = _value(str(field.type), value[field.name])
        if not accepted:
            return None
        given[field.name] = found
    try:
        return known(**given)
    except ConfigError:
        return None


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(declared: str, value: Any) -> tuple[bool, Any]:
    """Returns whether ``value`` fits the annotation ``declared``, and the value as the field holds it."""
    kind = declared.removesuffix(" | None")
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool), value
    if kind == "float":
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
        return fits, float(value) if fits else None
    if kind in ("str", "bool"):
        return isinstance(value, str if kind == "str" else bool), value
    if not isinstance(value, list):
        return False, ()
    if kind in ("tuple[int, ...]", "tuple[str, ...]"):
        inner = kind.removeprefix("tuple[").partition(",")[0]
        return all(_value(inner, row)[0] for row in value), tuple(value)
    if kind == "tuple[tuple[str, str, str], ...]":
        fits = all(isinstance(row, list) and len(row) == 3 and all(isinstance(cell, str) for cell in row) for row in value)
        return fits, tuple(map(tuple, value)) if fits else ()
    raise AssertionError(declared)


# ---- the run ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TrainingStarted(Event):
    """A training of this process begins, before anything is chosen or loaded. ``version``: of mindresume. ``utc_offset_seconds``:
    of the local time in which this process logs, east of UTC."""
    host: str
    process_id: int
    world_size: int
    version: str
    utc_offset_seconds: int | None = None


@dataclass(frozen=True)
class RunOpened(Event):
    """The checkpoint directory is acquired for this run. ``file_prefix``: with which the names of its files begin."""
    run_id: str
    checkpoint_dir: str
    file_prefix: str
    world_size: int


@dataclass(frozen=True)
class LeaseWatched(Event):
    """The checkpoint directory has the lease of another job. It is watched for ``seconds``: a heartbeat in this time means that
    the job is alive. ``host``: of that job; None: the lease cannot be read."""
    path: str
    run_id: str
    host: str | None
    seconds: float


@dataclass(frozen=True)
class StaleLeaseRemoved(Event):
    """The lease of a job whose process is gone, or that had no heartbeat while it was watched, is removed."""
    run_id: str
    host: str
    process_id: int


@dataclass(frozen=True)
class PreemptionRequested(Event):
    """All ranks save ``step`` and stop. ``reason``: SIGTERM, or a graceful exit."""
    step: int
    reason: str


@dataclass(frozen=True)
class TrainingEnded(Event):
    """The last event of a training. ``outcome``: FINISHED, PREEMPTED, NOTHING_TO_TRAIN or FAILED; ``reason``: of the last
    three; ``step``: the last that was completed."""
    outcome: str
    reason: str = ""
    step: int | None = None

    def __post_init__(self) -> None:
        if self.outcome not in (FINISHED, PREEMPTED, NOTHING_TO_TRAIN, FAILED):
            raise ConfigError(f"{self.outcome!r} is no outcome of a training")


# ---- resume ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class CandidateRefused(Event):
    """A checkpoint is not taken. ``file``: which is damaged or missing, as far as it is one. ``weights_only``: no counters and no
    optimizer were wanted."""
    step: int | None
    reason: str
    file: str | None = None
    weights_only: bool = False


@dataclass(frozen=True)
class CheckpointSelected(Event):
    """All ranks take this checkpoint. ``step``, ``epoch``: None for weights without counters. ``run_id``: of the run that saved
    it; None: mindformers did. ``description``: format, ranks and how it was verified, for people."""
    step: int | None
    epoch: int | None
    run_id: str | None
    checkpoint_dir: str
    description: str
    weights_only: bool = False


@dataclass(frozen=True)
class VisibilityWaited(Event):
    """The ranks waited until the rank that selects lists every checkpoint that another rank sees (NFS). ``missing``: what it does
    not list even then, in words; the selection goes on without it."""
    wait_seconds: float
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifiedBytesKept(Event):
    """``kept_bytes`` of what this rank verified stay in memory until they are loaded; ``reread_bytes`` are read a second time,
    because this rank may keep ``budget_bytes`` more at most."""
    kept_bytes: int
    reread_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class FreshStart(Event):
    """There is no checkpoint to resume from. ``is_expected``: the directory is there, and no save in it ever completed; else it
    does not exist, which can be a mistake in its name."""
    checkpoint_dir: str
    reason: str
    weights: str
    is_expected: bool = True


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """One rank has read its tensors. ``read_bytes``: from files, ``size_bytes``: of the tensors. ``source``: for people."""
    rank: int
    tensors: int
    size_bytes: int
    read_bytes: int | None = None
    source: str = ""


@dataclass(frozen=True)
class ProgressRestored(Event):
    """Counters of the new run. ``step``: after which it goes on, in its own count; ``saved_step``: the same in the count of the
    run that saved; ``step_scale``: steps of this run for one of that run (another global batch size)."""
    step: int
    epochs_done: int
    saved_step: int
    step_scale: float = 1.0
    global_batch_size: int | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class Resumed(Event):
    """The resume is complete. ``summary``: rows of (part of the state, how it was restored, details). ``lost_steps``: at least so
    many of a job that died, behind the checkpoint; None: no job died. ``lost_seconds``: since the checkpoint was saved."""
    step: int
    summary: tuple[tuple[str, str, str], ...] = ()
    load_seconds: float | None = None
    lost_steps: int | None = None
    lost_seconds: float | None = None


# ---- saving ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SaveBegun(Event):
    """This rank starts to collect the tensors of a step."""
    step: int


@dataclass(frozen=True)
class SaveStaged(Event):
    """The step is handed to the writer in the background; the training goes on. ``name``: of the file, or of the iteration
    folder."""
    step: int
    name: str
    stall_seconds: float


@dataclass(frozen=True)
class SaveNotStaged(Event):
    """The step is written while the training waits, though it was to be written in the background: there is no memory for a
    copy."""
    step: int
    reason: str


@dataclass(frozen=True)
class SaveWritten(Event):
    """This rank's part is durable and recorded. ``stall_seconds``: so long the training stood still for it; None: not known."""
    step: int
    size_bytes: int
    write_seconds: float
    stall_seconds: float | None = None


@dataclass(frozen=True)
class SaveCommitted(Event):
    """All ranks are complete: a resume takes this step. ``run_id``: of an earlier run, whose save this run has committed; else
    None."""
    step: int
    ranks: int
    size_bytes: int
    run_id: str | None = None


@dataclass(frozen=True)
class CommitDelayed(Event):
    """All ranks have recorded the step, and it could not be committed. That is tried again after each later step. ``run_id``: of
    an earlier run, whose save it is; else None."""
    step: int
    reason: str
    run_id: str | None = None


@dataclass(frozen=True)
class WriterDied(Event):
    """The background writer of this rank died. ``writer``: "thread" or "process". ``step``: the newest save that it may not have
    committed; another writer takes that over."""
    writer: str
    reason: str
    step: int


@dataclass(frozen=True)
class SaveFailed(Event):
    """This rank could not save. ``step`` None: more than one, or not known. ``failures_in_a_row``: of saves, this one
    included."""
    step: int | None
    reason: str
    failures_in_a_row: int = 1


@dataclass(frozen=True)
class SaveSkipped(Event):
    """The step was due and is left out on all ranks. ``skipped_in_total``: since the training began."""
    step: int
    reason: str
    skipped_in_total: int


@dataclass(frozen=True)
class SaveAbandoned(Event):
    """The step was not complete on all ranks when that was last asked; a resume takes another one. ``missing_ranks``: have
    recorded nothing of it, as far as that is why."""
    step: int
    reason: str
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class CheckpointsRemoved(Event):
    """Retention, or a full disk, removed these. ``where``: the directory or url; ``kept``: what stays, for people.
    ``is_incomplete``: saves that never completed, removed because the disk is full; else they were checkpoints."""
    steps: tuple[int, ...]
    where: str
    kept: str = ""
    is_incomplete: bool = False


@dataclass(frozen=True)
class RemovalPostponed(Event):
    """Something that was to be removed stays until the next removal: it is being read, or an operation failed. ``step``: None if
    it is not known."""
    path: str
    reason: str
    step: int | None = None


# ---- object store ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class UploadFinished(Event):
    """``is_whole``: all ranks are there, so it can be fetched; else this rank's part. ``size_bytes``: of this rank."""
    step: int
    url: str
    size_bytes: int
    seconds: float | None = None
    is_whole: bool = True


@dataclass(frozen=True)
class UploadFailed(Event):
    """An upload, or the removal of old checkpoints from the store, failed; it is tried again unless ``reason`` says that it
    will not be. ``step``: of an upload."""
    step: int | None
    reason: str
    failed_in_total: int = 1


@dataclass(frozen=True)
class UploadsSkipped(Event):
    """Uploads are slower than saves: these steps stay on the disk alone."""
    steps: tuple[int, ...]
    skipped_in_total: int


@dataclass(frozen=True)
class CheckpointFetched(Event):
    """This rank's part of a checkpoint was downloaded. ``total_bytes``: of the parts of all ranks."""
    step: int
    url: str
    size_bytes: int
    total_bytes: int | None = None
    seconds: float | None = None


# ---- everything else -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class WorkProgress(Event):
    """How far long work is, every few seconds. ``total`` 0: not known. ``unit``: "bytes", or the name of what is counted."""
    what: str
    done: int
    total: int
    seconds: float
    unit: str = "bytes"


@dataclass(frozen=True)
class Notice(Event):
    """A sentence for people that no program needs. ``level``: INFO, WARNING or ERROR."""
    text: str
    level: str = INFO


def warning(text: object) -> Notice:
    """Returns a Notice of level WARNING."""
    return Notice(str(text), WARNING)
