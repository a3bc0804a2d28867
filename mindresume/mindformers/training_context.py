"""The context of one training of this process: the one object that is reachable from inside mindformers' calls.

    with training(config) as context: ...       # begin: event file, TensorBoard, log lines; end: outcome, resources closed
    with inference(PREDICT, config) as context: ...
    current()                                   # within them; else an idle context, for a CheckpointMonitor without Trainer

A process trains one thing at a time, and mindformers passes its functions nothing of ours; so there is one current context. It is
handed on to the functions that need it.
"""
from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mindresume
from mindresume.coordination import preemption
from mindresume.coordination.collectives import Group, SingleProcess
from mindresume.coordination.lease import Lease
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import ConfigError, TrainingCompleteError
from mindresume.events import FAILED, FINISHED, NOTHING_TO_TRAIN, PREEMPTED, TrainingEnded, TrainingStarted
from mindresume.events.emitter import Emitter
from mindresume.events.event_file import EventFile
from mindresume.mindformers import adapter, modelarts
from mindresume.mindformers.process_group import group_of_job
from mindresume.mindformers.tensorboard import MindFormersLog, TensorBoard
from mindresume.model.data_position import DataPosition
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.resume.choice import Choice
from mindresume.resume.job_selection import own_shard
from mindresume.resume.lost_work import LostWork
from mindresume.resume.progress import ResumeProgress
from mindresume.resume.resume_summary import SummaryRow
from mindresume.resume.verified_shard import VerifiedShard
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.settings import Settings
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.storage.read_cache import ReadCache

TRAIN, EVALUATE, PREDICT = "train", "evaluate", "predict"


# ---- decided once ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class LoadRequest:
    """Says what the configuration asks to be loaded, and how.

    ``path``: of the checkpoint, empty: nothing; once it is selected, what mindformers is shown. ``resume``: with optimizer and
    counters, else the weights alone. ``iterations``: by the code for Checkpoint 2.0. ``balanced``: replicas are read once and
    broadcast. ``workers``: threads that read, 0: as many as make sense. ``pretrained``: ``path`` holds Hugging Face weights.
    ``trains``: a training begins with the weights; else they are evaluated, or predict. ``converts``: auto_trans_ckpt, as the
    user wrote it."""
    path: str
    resume: bool = True
    iterations: bool = False
    balanced: bool = False
    workers: int = 0
    pretrained: bool = False
    trains: bool = True
    converts: bool = False


@dataclass(frozen=True)
class ResumePlan:
    """Says what was selected and how it is loaded.

    ``choice``: the checkpoint; after a conversion on disk the converted one. ``selected``: the same before any conversion.
    ``open_source``: opens it as weights in whatever layout; None: each rank loads what it verified itself. ``lost``: on rank 0,
    what a job that died had done after it."""
    request: LoadRequest | None = None
    choice: Choice | None = None
    selected: Choice | None = None
    open_source: Callable[[], OpenCheckpoint] | None = None
    lost: LostWork | None = None

    @property
    def resumes(self) -> bool:
        """Returns whether counters and optimizer are restored; weights alone are no resume."""
        return self.choice is not None and self.choice.chosen is not None and (self.request is None or self.request.resume)

    @property
    def iterations(self) -> LoadRequest | None:
        """Returns the request if it is loaded by the code for Checkpoint 2.0, else None."""
        return self.request if self.request is not None and self.request.iterations else None

    @property
    def weights_only(self) -> LoadRequest | None:
        """Returns the request if weights alone are loaded in Checkpoint 1.0, else None."""
        return self.request if self.request is not None and not (self.request.iterations or self.request.resume) else None


@dataclass(frozen=True)
class RunOrigin:
    """Says where this run begins: its first step follows ``step``. ``consumed``: samples seen before, None: not known."""
    step: int = 0
    position: DataPosition = DataPosition()
    consumed: int | None = 0


# ---- what changes ----------------------------------------------------------------------------------------------------

@dataclass
class RunProgress:
    """Holds the counters of the run.

    ``dataset_size``: steps of one pass over the data. ``sink_size``: None: not in sink mode. ``dataset_identity``: its
    fingerprint, empty: not known. ``restored``: where a resume continues; ``global_step``: of its optimizer, scaled to the global
    batch size of this run; ``summary``: rows for people. ``load_seconds``: spent on selecting, reading and verifying. ``step``:
    the last one that is done. ``stop_reason``: why the training stopped before its end, with its last step saved. ``metrics``:
    the newest value of each that the user reported."""
    origin: RunOrigin = RunOrigin()
    restored: ResumeProgress | None = None
    global_step: int = 0
    summary: list[SummaryRow] = field(default_factory=list)
    dataset_identity: Mapping[str, str] = field(default_factory=dict)
    dataset_size: int | None = None
    sink_size: int | None = None
    load_seconds: float = 0.0
    step: int | None = None
    stop_reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def data_at(self, step: int, batch: int | None) -> tuple[int | None, DataPosition | None]:
        """Returns (samples seen, position in the data) after ``step``; None where it is not known."""
        if not batch or not self.dataset_size:
            return None, None
        done, origin = step - self.origin.step, self.origin
        return (None if origin.consumed is None else origin.consumed + done * batch,
                origin.position.after(done, self.dataset_size, batch))

    @contextmanager
    def timed_load(self) -> Iterator[None]:
        """Adds the time of its block to ``load_seconds``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.load_seconds += time.monotonic() - started


@dataclass
class Resources:
    """Holds what is opened for the run, and closed once at its end.

    ``storage``: verifies the selected checkpoint, and loads it. ``topology``: which ranks see the same folder, by its path.
    ``read_lock``: keeps the selected checkpoint from being removed until all ranks have read it. ``load_attempt``: pending until
    its first step is done. ``remote``: where checkpoints are kept besides."""
    group: Group = field(default_factory=SingleProcess)
    emit: Emitter = field(default_factory=lambda: Emitter(MindFormersLog(), TensorBoard()))
    storage: Storage = field(default_factory=PosixStorage)
    topology: dict[str, SharedGroups] = field(default_factory=dict)
    read_lock: Lease | None = None
    load_attempt: PendingLoadAttempt = field(default_factory=PendingLoadAttempt)
    remote: RemoteCheckpoints | None = None

    def drop_verified_bytes(self) -> None:
        """Frees the verified bytes that were kept in memory for the load."""
        if isinstance(self.storage, ReadCache):
            self.storage.clear()

    def release(self) -> None:
        """Gives up what protects the selected checkpoint: it has been read, or nobody is going to. Idempotent."""
        self.drop_verified_bytes()
        if self.read_lock is not None:
            self.read_lock.release()
            self.read_lock = None


@dataclass
class IterationObjects:
    """Holds what mindformers passes on its way to a load of Checkpoint 2.0. ``common``: what it reads as common.json, once."""
    config: Any = None
    model: Any = None
    common: dict[str, Any] | None = None


@dataclass
class TrainingContext:
    """Holds everything that hooks and CheckpointMonitor share. ``task``: TRAIN, EVALUATE or PREDICT; empty: idle. ``monitor``:
    the CheckpointMonitor that saves in this training. ``requests``: to stop, from before it began
    (``coordination.preemption``)."""
    settings: Settings = field(default_factory=Settings)
    task: str = ""
    resources: Resources = field(default_factory=Resources)
    plan: ResumePlan = ResumePlan()
    progress: RunProgress = field(default_factory=RunProgress)
    objects: IterationObjects = field(default_factory=IterationObjects)
    requests: Mapping[str, Any] = field(default_factory=dict)
    monitor: Any = None

    @property
    def group(self) -> Group:
        return self.resources.group

    @property
    def emit(self) -> Emitter:
        return self.resources.emit

    @property
    def shard(self) -> VerifiedShard | None:
        """Returns what this rank verified and loads; None if the checkpoint is of another number of ranks (it is converted
        then)."""
        return own_shard(self.plan.choice, self.group)


# ---- its life --------------------------------------------------------------------------------------------------------

_current = [TrainingContext()]


def current() -> TrainingContext:
    return _current[0]


def begin(context: TrainingContext) -> TrainingContext:
    """Makes it the current one."""
    _current[0] = context
    return context


@contextmanager
def training(config: Any) -> Iterator[TrainingContext]:
    """Opens the context of a training. Ends quietly on TrainingCompleteError; any other error passes, after it is recorded.

    On every rank, also after an error: the load attempt is told of it, the selected checkpoint is released, the monitor finishes
    the save in flight, and TrainingEnded is the last event."""
    group = group_of_job()
    emit = Emitter(MindFormersLog(), TensorBoard(), EventFile(adapter.output_root(), group.rank))
    context, ended = TrainingContext(task=TRAIN, resources=Resources(group, emit)), TrainingEnded(FAILED)
    with ExitStack() as end:                            # last in, first out
        end.callback(begin, TrainingContext())          # an evaluation or another training after this one loads its own
        end.callback(_close, emit)
        end.callback(lambda: emit(ended))
        end.callback(_settle, context)
        end.callback(context.resources.release)
        begin(context)
        try:
            emit(TrainingStarted(socket.gethostname(), os.getpid(), group.size, mindresume.__version__,
                                 time.localtime().tm_gmtoff))
            context.settings = Settings.load(config.get("mindresume"))
            context.resources.remote = modelarts.remote_of(config, emit)
            context.requests = preemption.requests(config)
            yield context
            reason = context.progress.stop_reason
            ended = TrainingEnded(PREEMPTED if reason else FINISHED, reason, context.progress.step)
        except TrainingCompleteError as error:
            ended = TrainingEnded(NOTHING_TO_TRAIN, str(error))
        except BaseException as error:
            context.resources.load_attempt.end(error)
            ended = TrainingEnded(FAILED, f"{type(error).__name__}: {error}", context.progress.step)
            raise


@contextmanager
def inference(task: str, config: Any) -> Iterator[TrainingContext]:
    """Opens the context of an evaluation or a prediction: it loads weights alone, and saves nothing."""
    before = current()
    context = begin(TrainingContext(Settings.load(config.get("mindresume")), task, Resources(group_of_job())))
    try:
        yield context
    finally:
        try:
            context.resources.release()
        finally:
            begin(before)


def _settle(context: TrainingContext) -> None:
    monitor, context.monitor = context.monitor, None
    if monitor is not None:                             # the training failed
        monitor.settle()


def _close(emit: Emitter) -> None:
    """Closes the event file. Uploads may still end behind the training, at the exit of the process: that is said in the log."""
    emit.close()
    emit.add(MindFormersLog())


def report_metric(name: str, value: Any) -> None:
    """Remembers what was measured, for example the loss of an evaluation: every later save records the newest value, and
    ``mindresume.keep_best`` can go by it (rank 0's value counts). ``value``: a number, or a tensor or array of one element;
    one that is not finite makes the next saves go without this metric. ConfigError for anything else."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"report_metric: the name is {name!r}; expected a text that is not empty")
    array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
    if array.size != 1 or array.dtype.kind in "OSUb":
        raise ConfigError(f"report_metric: {name} is {value!r}; expected one number")
    number, metrics = float(array.reshape(-1)[0]), current().progress.metrics
    if math.isfinite(number):
        metrics[name] = number
    else:
        metrics.pop(name, None)
