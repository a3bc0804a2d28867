"""Defines the events of a run as small frozen values. Code that acts emits an event; handlers turn it into a log line
(``log_lines``), TensorBoard scalars, and a line of the event file (``event_file``).

    emit(SaveCommitted(step=500, ranks=8, size_bytes=1 << 30))

    saving, resume, reshard ─▶ emit ─▶ Emitter ─▶ log line, event file, TensorBoard
    event file ─▶ ``event_from_json`` ─▶ report

No part of mindresume parses the text in an event: ``reason`` and ``text`` are for people alone. Sizes are in bytes, durations in
seconds. Every field is a JSON value or a tuple of them, so an event can be sent to another process and written to a file.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from mindresume.errors import ConfigError, RecordError
from mindresume.typed import decode, finite

INFO, WARNING, ERROR = "info", "warning", "error"
DISK, MEMORY = "disk", "memory"
FINISHED, PREEMPTED, NOTHING_TO_TRAIN, FAILED = "finished", "preempted", "nothing_to_train", "failed"

_KINDS: dict[str, type[Event]] = {}
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True)
class Event:
    """Base class of all events. ``kind``: the class name in snake_case, which names the event in the event file."""
    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        cls.kind = _WORD.sub("_", cls.__name__).lower()
        _KINDS[cls.kind] = cls

    def to_json(self) -> dict[str, Any]:
        """Returns {"event": kind, field: value, ...} without fields that are None. NaN and infinity, which JSON does not have,
        become None."""
        values = {field.name: finite(getattr(self, field.name)) for field in fields(self)}
        return {"event": self.kind, **{name: value for name, value in values.items() if value is not None}}


Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Discards an event: an emitter for callers that need none."""


def event_from_json(value: Mapping[str, Any]) -> Event | None:
    """Returns the event that ``value`` describes; ignores unknown fields. Returns None for an unknown kind, and if a field
    without default is missing, or a value has the wrong type or is not allowed."""
    known = _KINDS.get(value["event"]) if isinstance(value.get("event"), str) else None
    if known is None:
        return None
    try:
        return decode(known, {name: found for name, found in value.items() if found is not None}, known.kind)
    except (ConfigError, RecordError):
        return None


# ---- the run ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class TrainingStarted(Event):
    """A training of this process begins; nothing is selected or loaded yet.

    Attributes:
        host: name of the host.
        process_id: of this process.
        world_size: ranks of the job.
        version: of mindresume.
        utc_offset_seconds: of the local time in this process's log, east of UTC.
        process_started: when the kernel started this process, in seconds since 1970.
        imported: when its imports of MindSpore and mindformers were done, in seconds since 1970.
    """
    host: str
    process_id: int
    world_size: int
    version: str
    utc_offset_seconds: int | None = None
    process_started: float | None = None
    imported: float | None = None


@dataclass(frozen=True)
class RunOpened(Event):
    """This run has acquired the checkpoint directory.

    Attributes:
        run_id: of this run.
        checkpoint_dir: the directory.
        file_prefix: prefix of the names of its files.
        world_size: ranks of the job.
        save_steps: configured steps between two saves to disk; None: saves do not follow a number of steps.
        memory_steps: the same of the tier in memory; None: there is none.
    """
    run_id: str
    checkpoint_dir: str
    file_prefix: str
    world_size: int
    save_steps: int | None = None
    memory_steps: int | None = None


@dataclass(frozen=True)
class LeaseWatched(Event):
    """The checkpoint directory has the lease of another job. It is watched for ``seconds``: a heartbeat in that time proves
    the job alive. ``host``: of that job; None: the lease cannot be read."""
    path: str
    run_id: str
    host: str | None
    seconds: float


@dataclass(frozen=True)
class StaleLeaseRemoved(Event):
    """The lease of another job was removed: its process is gone, or no heartbeat came while it was watched, as in a copy."""
    run_id: str
    host: str
    process_id: int


@dataclass(frozen=True)
class PreemptionRequested(Event):
    """All ranks save ``step`` and stop. ``reason``: SIGTERM or graceful exit."""
    step: int
    reason: str


@dataclass(frozen=True)
class TrainingEnded(Event):
    """The last event of a training.

    Attributes:
        outcome: FINISHED, PREEMPTED, NOTHING_TO_TRAIN or FAILED.
        reason: empty for FINISHED.
        step: the last completed one.
    """
    outcome: str
    reason: str = ""
    step: int | None = None

    def __post_init__(self) -> None:
        if self.outcome not in (FINISHED, PREEMPTED, NOTHING_TO_TRAIN, FAILED):
            raise ConfigError(f"{self.outcome!r} is not an outcome of a training")


# ---- resume ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class CandidateRefused(Event):
    """A checkpoint is refused. ``file``: the damaged or missing file, if there is one. ``weights_only``: only weights were to be
    loaded."""
    step: int | None
    reason: str
    file: str | None = None
    weights_only: bool = False


@dataclass(frozen=True)
class CheckpointSelected(Event):
    """All ranks will load this checkpoint.

    Attributes:
        step: None for weights without counters.
        epoch: None for weights without counters.
        run_id: the run that saved it; None: mindformers saved it.
        checkpoint_dir: the directory it lies in.
        description: format, ranks and verification, for people.
        weights_only: counters and optimizer are not loaded.
        source: DISK, or MEMORY: a tier in memory of the nodes; ``checkpoint_dir`` is then a folder of one node.
    """
    step: int | None
    epoch: int | None
    run_id: str | None
    checkpoint_dir: str
    description: str
    weights_only: bool = False
    source: str = "disk"


@dataclass(frozen=True)
class VisibilityWaited(Event):
    """The ranks waited until the selecting rank listed every checkpoint that another rank sees (NFS). ``missing``:
    descriptions of those that it still does not list; the selection continues without them."""
    wait_seconds: float
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerifiedBytesKept(Event):
    """This rank keeps ``kept_bytes`` of verified files in memory until they are loaded. It will read ``reread_bytes`` a second
    time, as its memory ``budget_bytes`` is exhausted."""
    kept_bytes: int
    reread_bytes: int
    budget_bytes: int


@dataclass(frozen=True)
class FreshStart(Event):
    """There is no checkpoint to resume from. ``is_expected``: the directory exists and no save in it ever completed; else the
    directory does not exist, and its name may be wrong."""
    checkpoint_dir: str
    reason: str
    weights: str
    is_expected: bool = True


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """One rank has loaded its tensors. ``read_bytes``: read from files; ``size_bytes``: of the tensors; ``source``: for
    people; ``seconds``: since the network was built, or since the load began."""
    rank: int
    tensors: int
    size_bytes: int
    read_bytes: int | None = None
    source: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class ProgressRestored(Event):
    """The counters of the new run are restored.

    Attributes:
        step: the last completed step, in steps of this run.
        epochs_done: completed epochs.
        saved_step: the same step, in steps of the run that saved.
        step_scale: steps of this run per step of that run (differs from 1 after a change of the global batch size).
        global_batch_size: samples per step.
        loss_scale: None if loss scaling is off.
    """
    step: int
    epochs_done: int
    saved_step: int
    step_scale: float = 1.0
    global_batch_size: int | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class Resumed(Event):
    """The resume is complete.

    Attributes:
        step: the last completed step.
        summary: rows of (part of the state, how it was restored, details).
        load_seconds: None if unknown.
        lost_steps: least number of steps after the checkpoint that a failed job had completed; None: no job failed; 0: unknown.
        lost_seconds: from the save of the checkpoint to this resume.
    """
    step: int
    summary: tuple[tuple[str, str, str], ...] = ()
    load_seconds: float | None = None
    lost_steps: int | None = None
    lost_seconds: float | None = None


@dataclass(frozen=True)
class NetworkCompiled(Event):
    """The first step after a load is compiled, and is about to be computed."""


@dataclass(frozen=True)
class FirstStepDone(Event):
    """The first step of this process is done; in sink mode the first sink. ``step``: its number."""
    step: int


# ---- saving ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class SaveBegun(Event):
    """This rank starts to collect the tensors of a step."""
    step: int


@dataclass(frozen=True)
class SaveStaged(Event):
    """The step is handed to the background writer, and the training continues. ``name``: of the file, or of the iteration
    folder."""
    step: int
    name: str
    stall_seconds: float


@dataclass(frozen=True)
class SaveNotStaged(Event):
    """The training waits while the step is written, although a background save was configured: there is no memory for a copy."""
    step: int
    reason: str


@dataclass(frozen=True)
class SaveWritten(Event):
    """This rank's part is durable and recorded. ``stall_seconds``: time that the training waited for it; None if unknown."""
    step: int
    size_bytes: int
    write_seconds: float
    stall_seconds: float | None = None


@dataclass(frozen=True)
class SaveCommitted(Event):
    """All ranks are complete: a resume can use this step. ``run_id``: the earlier run that had saved it; None: this run."""
    step: int
    ranks: int
    size_bytes: int
    run_id: str | None = None


@dataclass(frozen=True)
class CommitDelayed(Event):
    """All ranks have recorded the step, but the commit failed; it is retried after each later step. ``run_id``: the earlier
    run that had saved it; None: this run."""
    step: int
    reason: str
    run_id: str | None = None


@dataclass(frozen=True)
class WriterDied(Event):
    """The background writer of this rank died. ``writer``: "thread" or "process". ``step``: the newest save that it may not have
    committed; another writer takes it over."""
    writer: str
    reason: str
    step: int


@dataclass(frozen=True)
class SaveFailed(Event):
    """This rank failed to save. ``step``: None if unknown or more than one. ``failures_in_a_row``: consecutive failures,
    including this one."""
    step: int | None
    reason: str
    failures_in_a_row: int = 1


@dataclass(frozen=True)
class SaveSkipped(Event):
    """The step was due and is skipped on all ranks. ``skipped_in_total``: since the training began."""
    step: int
    reason: str
    skipped_in_total: int


@dataclass(frozen=True)
class SaveAbandoned(Event):
    """The step was not complete on all ranks at the last check; a resume cannot use it. ``missing_ranks``: those without a
    record, if that is the reason."""
    step: int
    reason: str
    missing_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class TierSaved(Event):
    """This rank's part of the step lies in memory of its node, recorded. ``stall_seconds``: time that the training waited for the
    copy. ``background_seconds``: of the checksums."""
    step: int
    size_bytes: int
    stall_seconds: float
    background_seconds: float


@dataclass(frozen=True)
class TierRefused(Event):
    """The tier in memory is not used: this save failed, or ``step`` is None and there is no tier in this run. The training goes
    on. ``failures_in_total``: saves of this rank that failed."""
    step: int | None
    reason: str
    failures_in_total: int = 0


@dataclass(frozen=True)
class CheckpointsRemoved(Event):
    """Retention or a full disk caused a removal.

    Attributes:
        steps: the removed ones.
        where: directory or URL.
        kept: the remaining ones, for people.
        is_incomplete: they were saves that never completed, removed because the disk is full; else checkpoints.
    """
    steps: tuple[int, ...]
    where: str
    kept: str = ""
    is_incomplete: bool = False


@dataclass(frozen=True)
class RemovalPostponed(Event):
    """A removal is postponed to the next one: the checkpoint is being read, or an operation failed. ``step``: None if unknown."""
    path: str
    reason: str
    step: int | None = None


@dataclass(frozen=True)
class CheckpointScrubbed(Event):
    """The scrub in the background has read a checkpoint again.

    Attributes:
        state: "intact", "repaired", "damaged" (it is refused from now on) or "removed".
        size_bytes: read from the disk.
        files: those that were damaged or missing, relative to the checkpoint directory.
        reason: what is damaged, and why it was not repaired; empty if nothing is.
    """
    step: int
    state: str
    size_bytes: int
    seconds: float
    files: tuple[str, ...] = ()
    reason: str = ""


# ---- object store ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class UploadFinished(Event):
    """An upload is complete. ``is_whole``: all ranks' parts are there, so the checkpoint can be fetched; else only this rank's
    part. ``size_bytes``: uploaded by this rank."""
    step: int
    url: str
    size_bytes: int
    seconds: float | None = None
    is_whole: bool = True


@dataclass(frozen=True)
class UploadFailed(Event):
    """An upload, or a removal from the object store, failed; it is retried unless ``reason`` says otherwise. ``step``: None for a
    removal."""
    step: int | None
    reason: str
    failed_in_total: int = 1


@dataclass(frozen=True)
class UploadsSkipped(Event):
    """Uploads are slower than saves: these steps are not uploaded."""
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


# ---- the supervisor (mindresume run) -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class SupervisorStarted(Event):
    """A supervisor begins. ``command``: what it starts. ``node``, ``nodes``: number of this node, and of all nodes of the job."""
    host: str
    process_id: int
    version: str
    command: tuple[str, ...]
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True)
class NodesJoined(Event):
    """The supervisors of all nodes that take part have agreed on a start. ``missing``: nodes that it goes on without.
    ``wait_seconds``: how long this node waited for the others."""
    generation: int
    nodes: tuple[int, ...]
    wait_seconds: float
    missing: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobStarted(Event):
    """The command was started. ``start``: from 1. ``process_id``: of the command."""
    start: int
    process_id: int


@dataclass(frozen=True)
class OrphansEnded(Event):
    """Processes of the same command were ended, whose supervisor was killed."""
    process_ids: tuple[int, ...]


@dataclass(frozen=True)
class StartupMeasured(Event):
    """Every rank of this node has finished its first step. Describes the rank that needed longest.

    Attributes:
        phases: those from the start of the command to the end of the first step, in order: ``recovery_phases.PHASES`` from
            "start" on, joined with " + " where the moment between them is not known.
        seconds: time in each of them.
        resumed_step: the step that it continues after; None: from the beginning.
    """
    start: int
    rank: int
    phases: tuple[str, ...]
    seconds: tuple[float, ...]
    resumed_step: int | None = None


@dataclass(frozen=True)
class RankDied(Event):
    """A rank ended and had not finished its training.

    Attributes:
        start: the start of the command.
        rank: None: not known.
        status: exit status, negative: the signal that killed it; None: not known.
        phase: the phase that it was in; empty: not known.
        step: its last finished step.
        log: the last lines of its log that look like an error.
    """
    start: int
    host: str
    process_id: int
    rank: int | None = None
    status: int | None = None
    phase: str = ""
    step: int | None = None
    log: tuple[str, ...] = ()


@dataclass(frozen=True)
class HangDetected(Event):
    """Ranks made no progress. ``ranks``: those, the one that is behind first. ``stacks``: files with the stacks of all ranks."""
    start: int
    host: str
    ranks: tuple[int, ...]
    seconds: float
    phase: str
    step: int | None = None
    stacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobEnded(Event):
    """No process of this start is left on this node.

    Attributes:
        start: the start of the command.
        status: exit status, as of a shell.
        reason: for people.
        seconds: how long the start lasted.
        end_seconds: from the moment in which its end was noticed until no process was left.
        resumed_step: the step that it continued after; None: from the beginning, or not known.
        last_step: the last finished step of any rank of this node.
        committed_step: the newest step that it committed, as rank 0 knew.
        left_behind: processes that do not end even after SIGKILL.
    """
    start: int
    status: int
    reason: str
    seconds: float
    end_seconds: float
    resumed_step: int | None = None
    last_step: int | None = None
    committed_step: int | None = None
    left_behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class JobRestarted(Event):
    """The command is about to be started again. ``start``: the next one. ``delay_seconds``: waited before. ``fruitless_starts``:
    starts in a row that left no later checkpoint."""
    start: int
    delay_seconds: float
    reason: str
    fruitless_starts: int = 0


@dataclass(frozen=True)
class LogsKept(Event):
    """The logs of a start were moved, because the next one overwrites them. ``folders``: in which they are now."""
    start: int
    folders: tuple[str, ...]


@dataclass(frozen=True)
class SupervisorEnded(Event):
    """The last event of a supervisor. ``status``: its exit status. ``starts``: of the command."""
    status: int
    reason: str
    starts: int


@dataclass(frozen=True)
class GaveUp(Event):
    """The job is not started again: a crash loop, or a node that does not come back. ``page``: lines for people, what each start
    did and died of."""
    status: int
    reason: str
    starts: int
    page: tuple[str, ...] = ()


# ---- everything else -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class WorkProgress(Event):
    """Progress of long work, every few seconds. ``total``: 0 if unknown. ``unit``: "bytes", or the name of what is counted."""
    what: str
    done: int
    total: int
    seconds: float
    unit: str = "bytes"


@dataclass(frozen=True)
class Notice(Event):
    """A message for people that no program needs. ``level``: INFO, WARNING or ERROR."""
    text: str
    level: str = INFO


def warning(text: object) -> Notice:
    """Returns a Notice of level WARNING."""
    return Notice(str(text), WARNING)
