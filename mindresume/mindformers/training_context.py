"""Holds the context of the training in this process: the object that wrappers of mindformers'
functions get their state from.

    # begin: event file, TensorBoard, log lines; end: outcome, resources closed
    with training(config) as context: ...
    with inference(PREDICT, config) as context: ...
    current()  # inside: this context; else an idle one, for a CheckpointMonitor without Trainer

mindformers calls the wrappers and passes them nothing of mindresume, and a process runs one
training at a time, so one context is the current one. Functions below the wrappers receive it as an
argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mindresume
from mindresume import runtime
from mindresume.coordination import preemption
from mindresume.coordination.collectives import (
    Group,
    SingleProcess,
    Watchdog,
    gather_results,
    run_on_rank0,
)
from mindresume.coordination.lease import Lease
from mindresume.coordination.lease_acquisition import check_no_live_job
from mindresume.coordination.rank_heartbeat import ENDING, INFERENCE
from mindresume.coordination.storage_topology import SharedGroups, single_group
from mindresume.errors import (
    AlteredWeightsError,
    BadStepError,
    ConfigError,
    RemoteError,
    TrainingCompleteError,
)
from mindresume.events import (
    ERROR,
    FAILED,
    FINISHED,
    NOTHING_TO_TRAIN,
    PREEMPTED,
    Emitter,
    Notice,
    TrainingEnded,
    TrainingStarted,
    warning,
)
from mindresume.events.event_file import EventFile
from mindresume.events.metrics import Metrics
from mindresume.formats import CheckpointDir
from mindresume.formats.bad_steps import BadStep
from mindresume.formatting import listed
from mindresume.mindformers import adapter, heartbeat
from mindresume.mindformers.adapter import MindFormersLog, TensorBoard
from mindresume.mindformers.configuration import (
    TRAIN,
    LoadRequest,
    checkpoint_roots,
    remote_of,
    with_publishing,
)
from mindresume.mindformers.kept_graphs import KeptGraph
from mindresume.mindformers.network_state import LoadedWeights, as_numpy
from mindresume.mindformers.process_group import check_launch, group_of_job
from mindresume.mindformers.step_proof import Computation, SeenValues, StepProof
from mindresume.model.training_state import DataPosition, TrainingState
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.resume.eligible import Choice
from mindresume.resume.job_selection import own_shard
from mindresume.resume.memory_source import write_selected
from mindresume.resume.progress import START, ResumeProgress, SummaryRow
from mindresume.resume.verifier import VerifiedShard
from mindresume.saving.crash_loop import PendingLoadAttempt
from mindresume.saving.guard import GO_ON, WINDOW
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.save_session import publish_completed, upload_completed
from mindresume.settings import Settings
from mindresume.storage import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.storage.read_cache import ReadCache, uncached

# ---- decided once --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumePlan:
    """Describes what was selected and how it is loaded.

    Attributes:
        choice: the checkpoint; after a conversion on disk, the converted one.
        selected: the checkpoint before any conversion.
        open_source: opens the checkpoint to read regions in any layout; None: each rank loads the
            files that it verified.
    """

    request: LoadRequest | None = None
    choice: Choice | None = None
    selected: Choice | None = None
    open_source: Callable[[], OpenCheckpoint] | None = None

    @property
    def resumes(self) -> bool:
        """Returns whether counters and optimizer are restored. A load of weights alone is no
        resume."""
        return (
            self.choice is not None
            and self.choice.chosen is not None
            and (self.request is None or self.request.resume)
        )

    @property
    def origin(self) -> Choice | None:
        """Returns the checkpoint before any conversion, if one was selected."""
        return self.selected or self.choice

    @property
    def iterations(self) -> LoadRequest | None:
        """Returns the request if the code for Checkpoint 2.0 loads, else None."""
        return self.request if self.request is not None and self.request.iterations else None

    @property
    def weights_only(self) -> LoadRequest | None:
        """Returns the request if only weights are loaded, in Checkpoint 1.0; else None."""
        return (
            self.request
            if self.request is not None and not (self.request.iterations or self.request.resume)
            else None
        )


# ---- what changes --------------------------------------------------------------------------------


@dataclass
class RunProgress:
    """Holds the counters of the run.

    Attributes:
        origin: where the run begins.
        summary: rows of the resume's table.
        dataset_identity: fingerprint of the data set; empty: unknown.
        dataset_size: steps of one pass over the data; None: unknown.
        sink_size: steps of a sink; None: no sink mode.
        load_seconds: time of selecting, verifying and loading.
        timed_since: when the latest part of that time began (``time.monotonic``); None: it has not
            begun.
        step: the last finished step; None: none yet.
        stop_reason: why the training stopped early, after its last step was saved; empty: it did
            not.
        metrics: newest value of each reported metric.
        bad_steps: those of earlier runs, oldest first; their samples are skipped.
    """

    origin: ResumeProgress = START
    summary: list[SummaryRow] = field(default_factory=list)
    dataset_identity: Mapping[str, str] = field(default_factory=dict)
    dataset_size: int | None = None
    sink_size: int | None = None
    load_seconds: float = 0.0
    timed_since: float | None = None
    step: int | None = None
    stop_reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    bad_steps: tuple[BadStep, ...] = ()

    def data_at(self, step: int, batch: int | None) -> tuple[int | None, DataPosition | None]:
        """Returns (samples seen, position in the data) after ``step``; None where it is unknown."""
        if not batch or not self.dataset_size:
            return None, None
        done = step - self.origin.initial_step
        position = self.origin.position.after(done, self.dataset_size, batch)
        return self.samples_at(step, batch), position

    def samples_at(self, step: int, batch: int | None) -> int | None:
        """Returns the samples seen after ``step``; None: not known."""
        origin = self.origin
        if origin.consumed is None or not batch or not self.dataset_size:
            return None
        return origin.consumed + (step - origin.initial_step) * batch

    @contextmanager
    def timed_load(self) -> Iterator[None]:
        """Adds the time of its block to ``load_seconds``."""
        started = self.timed_since = runtime.monotonic()
        try:
            yield
        finally:
            self.load_seconds += runtime.monotonic() - started

    def timed_seconds(self) -> float | None:
        """Returns the seconds since the latest part of ``load_seconds`` began; None: it has not
        begun."""
        return None if self.timed_since is None else runtime.monotonic() - self.timed_since


@dataclass
class Resources:
    """Holds what is opened for the run and closed at its end.

    Attributes:
        group: the ranks of the job.
        emit: receives the events of the run.
        storage: storage through which the selected checkpoint is verified and loaded.
        topology: {path of a folder: which ranks share it}.
        read_lock: prevents the removal of the selected checkpoint until all ranks have read it.
        pending_load: the load attempt, until the first step after the load is done.
        remote: checkpoints in the object store that this run uploads to; None: no uploads.
        loaded: what was loaded, until the first step has been compared with it; None: nothing, or
            it was.
        proved: what was compared, as fields of ``ResumeProved``.
    """

    group: Group = field(default_factory=SingleProcess)
    emit: Emitter = field(default_factory=lambda: Emitter(MindFormersLog(), TensorBoard()))
    storage: Storage = field(default_factory=PosixStorage)
    topology: dict[str, SharedGroups] = field(default_factory=dict)
    read_lock: Lease | None = None
    pending_load: PendingLoadAttempt = field(default_factory=PendingLoadAttempt)
    remote: RemoteCheckpoints | None = None
    loaded: LoadedWeights | None = None
    proved: Mapping[str, int] = field(default_factory=lambda: {"tensors": 0})

    def check_loaded(
        self, parameters: Iterable[tuple[str, Any]], callbacks: Iterable[object], resumes: bool
    ) -> None:
        """Compares the parameters with what was loaded, on all ranks, at the first call after a
        load. If one has others, a resume raises AlteredWeightsError on all ranks. Where weights
        alone were loaded it is a warning: a callback of the user may have reasons to put others on
        top of them."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        found = gather_results(
            self.group, lambda: (loaded.difference(parameters, callbacks), *loaded.counts)
        )
        sampled, compared, size = (
            sum(column) for column in zip(*(row[1:] for row in found), strict=True)
        )
        self.proved = {
            "tensors": len(loaded.digests),
            "sampled_tensors": sampled,
            "compared_bytes": compared,
            "weight_bytes": size,
        }
        altered = [rank for rank, (difference, *_) in enumerate(found) if difference]
        ranks = f"rank{'s' if altered[1:] else ''} {listed(altered)}"
        problem = f"{ranks}: {found[altered[0]][0]}" if altered else ""
        if problem and resumes:
            raise AlteredWeightsError(problem)
        if problem and self.group.rank == 0:
            self.emit(warning(problem))

    def drop_verified_bytes(self) -> None:
        """Frees the verified bytes that were kept in memory for the load."""
        if isinstance(self.storage, ReadCache):
            self.storage.clear()

    def release(self) -> None:
        """Releases the read lock and the kept bytes, once the checkpoint was read or will not be
        read. Idempotent."""
        self.drop_verified_bytes()
        if self.read_lock is not None:
            self.read_lock.release()
            self.read_lock = None


@dataclass
class IterationObjects:
    """Holds objects that mindformers passes to wrappers before it loads a checkpoint of Checkpoint
    2.0. ``common``: the content that it will get once instead of common.json."""

    config: Any = None
    model: Any = None
    common: dict[str, Any] | None = None


@dataclass
class TrainingContext:
    """Holds everything that the wrappers and CheckpointMonitor share.

    Attributes:
        task: TRAIN, EVALUATE or PREDICT; empty: idle.
        requests: the files that may request a stop, as they were before the training began
            (``coordination.preemption``).
        saves: the ``training_saves.TrainingSaves`` of the training, while it can save.
        run: the ``pynative.training_run.TrainingRun`` of a PyNative training.
        computation: what its losses depend on besides its state.
        seen: what the host sees of the current step.
        proof: on rank 0, the step ledger and the proof of the resume, while it can save.
        graph: the folder of its compiled graph; None: none is kept.
    """

    settings: Settings = field(default_factory=Settings)
    task: str = ""
    resources: Resources = field(default_factory=Resources)
    plan: ResumePlan = ResumePlan()
    progress: RunProgress = field(default_factory=RunProgress)
    objects: IterationObjects = field(default_factory=IterationObjects)
    requests: Mapping[str, Any] = field(default_factory=dict)
    saves: Any = None
    run: Any = None
    computation: Computation = Computation()
    seen: SeenValues = field(default_factory=SeenValues)
    proof: StepProof | None = None
    graph: KeptGraph | None = None

    @property
    def group(self) -> Group:
        return self.resources.group

    @property
    def emit(self) -> Emitter:
        return self.resources.emit

    @property
    def shard(self) -> VerifiedShard | None:
        """Returns the shard that this rank verified and loads; None if the checkpoint has another
        number of ranks: it is converted."""
        return own_shard(self.plan.choice, self.group)

    @property
    def samples_in_common(self) -> bool:
        """See ``SaveTarget``."""
        return self.run is not None and self.run.samples_in_common

    def ledger(self, epoch: int, state: TrainingState) -> bytes:
        """Returns the step ledger as it belongs to the save of ``state``; empty: this rank has
        none."""
        if self.proof is None:
            return b""
        return self.proof.copy(self.seen.row(state.step, epoch, state.consumed))


# ---- begin and end -------------------------------------------------------------------------------

_current = [TrainingContext()]


def current() -> TrainingContext:
    """Returns the current context; an idle one outside of a training."""
    return _current[0]


def set_current(context: TrainingContext) -> TrainingContext:
    """Makes ``context`` the current one, and returns it."""
    _current[0] = context
    return context


@contextmanager
def training(config: Any) -> Iterator[TrainingContext]:
    """Opens the context of a training. Suppresses TrainingCompleteError; records any other error
    and raises it again. A training that SIGTERM has stopped ends the process, with the status of
    that.

    At the end, on every rank and also after an error: the load attempt receives the error, the read
    lock is released, the save in flight is finished, and TrainingEnded is the last event.
    """
    group = group_of_job()
    emit = Emitter(MindFormersLog(), TensorBoard())
    emit.add(EventFile(adapter.output_root(), group.rank, emit=emit))
    emit.add(heartbeat.FromEvents(group.rank, adapter.output_root()))
    context = TrainingContext(task=TRAIN, resources=Resources(group, emit))
    ended = TrainingEnded(FAILED)
    with ExitStack() as end:  # callbacks run in the reverse order
        # later code of this process gets a new, idle context
        end.callback(set_current, TrainingContext())
        end.callback(_close_events, emit)
        end.callback(lambda: emit(ended))
        end.callback(_close_proof, context)
        end.callback(_settle_saves, context)
        end.callback(context.resources.release)
        set_current(context)
        try:
            emit(
                TrainingStarted(
                    runtime.gethostname(),
                    os.getpid(),
                    group.size,
                    mindresume.__version__,
                    runtime.localtime().tm_gmtoff,
                    heartbeat.process_started(),
                    heartbeat.imported(),
                )
            )
            check_launch(os.environ)
            context.settings = with_publishing(Settings.load(config.get("mindresume")), config)
            metrics = context.settings.metrics
            if metrics.textfile and group.rank == 0:
                name = metrics.training or adapter.output_root()
                step = partial(getattr, context.progress, "step")
                emit.add(Metrics(metrics.textfile, name, "rank_0", emit, step))
            context.computation = Computation.of(config)
            context.resources.remote = remote_of(config, emit)
            context.requests = preemption.requests(config)
            try:
                yield context
                if context.progress.stop_reason == WINDOW:
                    raise BadStepError(
                        f"the samples of a bad step come after step {context.progress.step}, which "
                        "is saved: start the same command again, which skips them",
                        GO_ON,
                    )
                ended = _ended(context.progress)
            except TrainingCompleteError as error:
                heartbeat.enter(ENDING)
                _keep_last_step(context, checkpoint_roots(config))
                ended = TrainingEnded(NOTHING_TO_TRAIN, str(error))
        except BaseException as error:
            heartbeat.enter(ENDING)
            context.resources.pending_load.end(error)
            ended = _ended(context.progress, error)
            if isinstance(error, BadStepError):
                context.emit(Notice(f"[{error.code}] {error}", ERROR))
                raise SystemExit(error.status) from error
            raise
    if context.progress.stop_reason in preemption.SIGNALS:
        raise SystemExit(preemption.STATUS)


def _keep_last_step(context: TrainingContext, own_roots: Container[str]) -> None:
    """Writes the last step to disk, on all ranks together, if it lies in memory; publishes and
    uploads it, if an earlier run died before that: nothing is trained, so nothing saves it.
    ``own_roots``: the checkpoint directories of this training.

    Raises:
        CollectiveError: it cannot be written to disk.
        RemoteError: it cannot be uploaded, and ``on_save_error`` is ``raise``.
    """
    choice, resources = context.plan.selected, context.resources
    if choice is None or choice.chosen is None:
        return
    storage = uncached(resources.storage)
    if choice.in_memory:
        write_to_disk(context, "the training is complete with it")
    else:
        resources.release()  # its read lock: nobody loads it
        publish_completed(
            storage,
            choice,
            context.group,
            resources.topology,
            context.settings.heartbeat,
            context.emit,
            context.samples_in_common,
        )
    if resources.remote is not None and os.path.realpath(choice.checkpoint_dir) in own_roots:
        try:
            upload_completed(storage, choice, context.group, resources.remote, context.emit)
        except RemoteError:
            if context.settings.on_save_error == "raise":
                raise


def write_to_disk(context: TrainingContext, reason: str) -> None:
    """Writes the selected save in memory to disk, on all ranks together.

    Raises:
        CollectiveError: on all ranks, if one node fails.
    """
    choice, resources = context.plan.selected, context.resources
    storage = uncached(resources.storage)
    # this job has no lease yet
    look = partial(check_no_live_job, CheckpointDir(storage, choice.checkpoint_dir), context.emit)
    run_on_rank0(context.group, look, Watchdog("looking for a job that saves there"))
    context.emit(Notice(f"step {choice.chosen.step} is written to disk from memory: {reason}"))
    shared = resources.topology.get(os.path.realpath(choice.root), single_group(context.group.size))
    write_selected(storage, choice, context.group, shared, context.samples_in_common)


def _ended(progress: RunProgress, error: BaseException | None = None) -> TrainingEnded:
    """Returns how a training ended. SystemExit is no failure if its status means success (0 or
    None) or an end by SIGTERM."""
    reason = progress.stop_reason
    if isinstance(error, SystemExit) and error.code == preemption.STATUS:
        return TrainingEnded(PREEMPTED, reason or preemption.BY_SIGNAL, progress.step)
    if error is None or isinstance(error, SystemExit) and error.code in (None, 0):
        return TrainingEnded(PREEMPTED if reason else FINISHED, reason, progress.step)
    return TrainingEnded(FAILED, f"{type(error).__name__}: {error}", progress.step)


@contextmanager
def inference(task: str, config: Any) -> Iterator[TrainingContext]:
    """Opens the context of an evaluation or a prediction, which loads only weights and saves
    nothing."""
    before = current()
    heartbeat.enter(INFERENCE)
    context = set_current(
        TrainingContext(Settings.load(config.get("mindresume")), task, Resources(group_of_job()))
    )
    try:
        yield context
    finally:
        try:
            context.resources.release()
        finally:
            set_current(before)


def _settle_saves(context: TrainingContext) -> None:
    """Finishes the save in flight, if the training failed."""
    saves, context.saves = context.saves, None
    if saves is not None:
        saves.manager.finish_after_error()


def _close_proof(context: TrainingContext) -> None:
    if context.proof is not None:
        context.proof.close()


def _close_events(emit: Emitter) -> None:
    """Closes the event file. An upload may end later, at the exit of the process; its events are
    only logged."""
    emit.close()
    emit.add(MindFormersLog())


def report_metric(name: str, value: Any) -> None:
    """Records a measurement, such as the loss of an evaluation. Every later save stores the newest
    value, and the setting ``keep_best`` can rank checkpoints by it; rank 0's value counts.

    Args:
        name: Name of the metric.
        value: A number, or a tensor or array of one element. If it is not finite, later saves do
            not store this metric.

    Raises:
        ConfigError: The name is empty, or the value is no number.
    """
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"report_metric: the name is {name!r}; expected a non-empty text")
    array = as_numpy(value)
    if array.size != 1 or array.dtype.kind in "OSUb":
        raise ConfigError(f"report_metric: {name} is {value!r}; expected one number")
    number, metrics = float(array.reshape(-1)[0]), current().progress.metrics
    if math.isfinite(number):
        metrics[name] = number
    else:
        metrics.pop(name, None)
