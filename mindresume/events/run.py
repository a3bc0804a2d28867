"""Defines the events of a run: its begin, its end, the resume, and what is for people alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mindresume.errors import ConfigError
from mindresume.events.base import (
    FAILED,
    FINISHED,
    INFO,
    NOTHING_TO_TRAIN,
    PREEMPTED,
    WARNING,
    Event,
    Measure,
)
from mindresume.formatting import counted, size_text
from mindresume.typed import Count, Limits


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
    process_id: Count
    world_size: Count
    version: str
    utc_offset_seconds: Annotated[int, Limits(-86400, 86400)] | None = None
    process_started: Measure | None = None
    imported: Measure | None = None


@dataclass(frozen=True)
class RunOpened(Event):
    """This run has acquired the checkpoint directory.

    Attributes:
        run_id: of this run.
        checkpoint_dir: the directory.
        file_prefix: prefix of the names of its files.
        world_size: ranks of the job.
        save_steps: configured steps between two saves to disk; None: saves do not follow a number
            of steps.
        memory_steps: the same of the tier in memory; None: there is none.
    """

    run_id: str
    checkpoint_dir: str
    file_prefix: str
    world_size: Count
    save_steps: Count | None = None
    memory_steps: Count | None = None

    template = "run {run_id} saves to {checkpoint_dir} as {file_prefix}-..."


@dataclass(frozen=True)
class LeaseWatched(Event):
    """The checkpoint directory has the lease of another job. It is watched for ``seconds``: a
    heartbeat in that time proves the job alive. ``host``: of that job; None: the lease cannot be
    read."""

    path: str
    run_id: str
    host: str | None
    seconds: Measure

    def line(self) -> str:
        whose = (
            f"run {self.run_id} on host {self.host} did not release its lease"
            if self.host
            else f"the lease of run {self.run_id} cannot be read"
        )
        return f"{whose} ({self.path}); watching its heartbeat for {self.seconds:.0f} s"


@dataclass(frozen=True)
class StaleLeaseRemoved(Event):
    """The lease of another job was removed: its process is gone, or no heartbeat came while it was
    watched, as in a copy."""

    run_id: str
    host: str
    process_id: Count

    template = (
        "removed the stale lease of run {run_id}: process {process_id} on host {host} does not "
        "save here any more"
    )


@dataclass(frozen=True)
class PreemptionRequested(Event):
    """All ranks save ``step`` and stop. ``reason``: SIGTERM or graceful exit."""

    step: Count
    reason: str

    log_level = WARNING
    template = "{reason}: all ranks save step {step}, then the training stops"


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
    step: Count | None = None

    def line(self) -> str:
        if self.outcome == PREEMPTED:
            return f"stopped because of {self.reason}; start the same command again to continue"
        # the error of a failure is logged itself
        return self.reason if self.outcome == NOTHING_TO_TRAIN else ""

    def __post_init__(self) -> None:
        if self.outcome not in (FINISHED, PREEMPTED, NOTHING_TO_TRAIN, FAILED):
            raise ConfigError(f"{self.outcome!r} is not an outcome of a training")


@dataclass(frozen=True)
class CandidateRefused(Event):
    """A checkpoint is refused. ``file``: the damaged or missing file, if there is one.
    ``weights_only``: only weights were to be loaded."""

    step: Count | None
    reason: str
    file: str | None = None
    weights_only: bool = False

    log_level = WARNING

    def line(self) -> str:
        step = "?" if self.step is None else self.step
        file = f" ({self.file})" if self.file else ""
        return (
            f"not {'taking the weights of' if self.weights_only else 'resuming from'} step "
            f"{step}: {self.reason}{file}"
        )


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
        source: DISK, or MEMORY: a tier in memory of the nodes; ``checkpoint_dir`` is then a folder
            of one node.
    """

    step: Count | None
    epoch: Count | None
    run_id: str | None
    checkpoint_dir: str
    description: str
    weights_only: bool = False
    source: str = "disk"

    def line(self) -> str:
        counters = "" if self.step is None else f" step {self.step}, epoch {self.epoch},"
        return (
            f"{'weights of' if self.weights_only else 'resume from'}{counters} {self.description}"
        )


@dataclass(frozen=True)
class VisibilityWaited(Event):
    """The ranks waited until the selecting rank listed every checkpoint that another rank sees
    (NFS). ``missing``: descriptions of those that it still does not list; the selection continues
    without them."""

    wait_seconds: Measure
    missing: tuple[str, ...] = ()

    @property
    def log_level(self) -> str:
        return WARNING if self.missing else INFO

    def line(self) -> str:
        if self.missing:
            return (
                "selecting without checkpoints that this host does not list: "
                f"{'; '.join(self.missing)}"
            )
        return (
            f"waited {self.wait_seconds:.0f} s until this host lists every checkpoint that the "
            "others see"
        )


@dataclass(frozen=True)
class VerifiedBytesKept(Event):
    """This rank keeps ``kept_bytes`` of verified files in memory until they are loaded. It will
    read ``reread_bytes`` a second time, as its memory ``budget_bytes`` is exhausted."""

    kept_bytes: Count
    reread_bytes: Count
    budget_bytes: Count

    def line(self) -> str:
        texts = []
        if self.kept_bytes:
            texts.append(
                f"{size_text(self.kept_bytes)} of the verified files stay in memory until they are "
                "loaded"
            )
        if self.reread_bytes:
            texts.append(
                f"{size_text(self.reread_bytes)} of the verified files are read again when they "
                f"are loaded: this rank may keep {size_text(self.budget_bytes)} (half of its share "
                "of the free memory; mindresume.staging_gib)"
            )
        return "; ".join(texts)


@dataclass(frozen=True)
class FreshStart(Event):
    """There is no checkpoint to resume from. ``is_expected``: the directory exists and no save in
    it ever completed; else the directory does not exist, and its name may be wrong."""

    checkpoint_dir: str
    reason: str
    weights: str
    is_expected: bool = True

    template = "fresh start: {checkpoint_dir} {reason}; weights {weights}"

    @property
    def log_level(self) -> str:
        return INFO if self.is_expected else WARNING


@dataclass(frozen=True)
class WeightsLoaded(Event):
    """One rank has loaded its tensors. ``read_bytes``: read from files; ``size_bytes``: of the
    tensors; ``source``: for people; ``seconds``: since the network was built, or since the load
    began."""

    rank: Count
    tensors: Count
    size_bytes: Count
    read_bytes: Count | None = None
    source: str = ""
    seconds: Measure | None = None

    def line(self) -> str:
        source = f", of {self.source}" if self.source else ""
        read = "" if self.read_bytes is None else f": {size_text(self.read_bytes)} read"
        return (
            f"rank {self.rank} loaded {counted(self.tensors, 'tensor')}, "
            f"{size_text(self.size_bytes)}{source}{read}"
        )


@dataclass(frozen=True)
class ProgressRestored(Event):
    """The counters of the new run are restored.

    Attributes:
        step: the last completed step, in steps of this run.
        epochs_done: completed epochs.
        saved_step: the same step, in steps of the run that saved.
        step_scale: steps of this run per step of that run (differs from 1 after a change of the
            global batch size).
        global_batch_size: samples per step.
        loss_scale: None if loss scaling is off.
    """

    step: Count
    epochs_done: Count
    saved_step: Count
    step_scale: Measure = 1.0
    global_batch_size: Count | None = None
    loss_scale: Measure | None = None

    def line(self) -> str:
        scaled = (
            ""
            if self.step_scale == 1
            else f"; steps scaled by {self.step_scale:g} from {self.saved_step}"
        )
        return (
            f"continues after step {self.step} ({counted(self.epochs_done, 'epoch')} done), global "
            f"batch size {self.global_batch_size}, loss scale {self.loss_scale}{scaled}"
        )


@dataclass(frozen=True)
class Resumed(Event):
    """The resume is complete.

    Attributes:
        step: the last completed step.
        summary: rows of (part of the state, how it was restored, details).
        load_seconds: None if unknown.
        lost_steps: steps after the checkpoint that earlier runs had trained, by their step
            ledgers; None: there are none.
        lost_seconds: from the save of the checkpoint to this resume.
    """

    step: Count
    summary: tuple[tuple[str, str, str], ...] = ()
    load_seconds: Measure | None = None
    lost_steps: Count | None = None
    lost_seconds: Measure | None = None

    def line(self) -> str:
        lines = [f"resumed after step {self.step}{self._lost()}"]
        width = max((len(name) for name, _, _ in self.summary), default=0)
        return "\n".join(
            lines
            + [f"  {name:<{width}}  {how:<10}  {details}" for name, how, details in self.summary]
        )

    def _lost(self) -> str:
        if self.lost_steps is None:
            return ""
        lost = f"{counted(self.lost_steps, 'step')} of the previous job lost"
        since = (
            ""
            if self.lost_seconds is None
            else f", {self.lost_seconds:.0f} s after the checkpoint was saved"
        )
        return f": {lost}{since}"


@dataclass(frozen=True)
class ResumeProved(Event):
    """The steps that the run before had trained after the checkpoint are trained again, and were
    compared; or it is known why not.

    Attributes:
        step: the step after which this run began.
        tensors: how many parameters of rank 0 were compared with what was loaded; 0: with ``proof:
            off``, none.
        steps: how many steps were compared; 0: none could be.
        expected_steps: how many the run before had recorded.
        differences: how many of ``steps`` differ.
        largest_loss_difference: relative; None: no loss was compared.
        compared: what was compared: batch, epoch, learning_rate, loss, loss_scale, samples.
        unproved: why no step, or not every step, or no weight was compared; empty: all were.
        sampled_tensors: how many parameters of all ranks were compared by samples.
        compared_bytes: how many bytes of the parameters of all ranks were compared.
        weight_bytes: how many they have.
    """

    step: Count
    tensors: Count
    steps: Count = 0
    expected_steps: Count = 0
    differences: Count = 0
    largest_loss_difference: Measure | None = None
    compared: tuple[str, ...] = ()
    unproved: str = ""
    sampled_tensors: Count = 0
    compared_bytes: Count = 0
    weight_bytes: Count = 0

    @property
    def log_level(self) -> str:
        return WARNING if self.differences else INFO

    def line(self) -> str:
        parts = [f"weights of {counted(self.tensors, 'tensor')}"] if self.tensors else []
        if self.tensors and self.sampled_tensors:
            sizes = size_text(self.compared_bytes), size_text(self.weight_bytes)
            parts.append(f"by samples of {sizes[0]} of {sizes[1]}")
        if self.steps:
            steps = f"{self.steps} of {counted(self.expected_steps, 'step')} done again: "
            if self.differences:
                parts.append(f"{steps}{self.differences} not as before")
            else:
                names = [name.replace("_", " ") for name in self.compared if name != "loss"]
                parts.append(f"{steps}same {', '.join(names) or 'loss'}")
            if self.largest_loss_difference is not None:
                parts.append(f"largest difference of the loss {self.largest_loss_difference:.2g}")
        if self.unproved:
            parts.append(self.unproved)
        word = (
            "differs"
            if self.differences
            else "proved"
            if self.steps and self.tensors
            else "compared"
        )
        return f"resume {word}: {', '.join(parts)}"


@dataclass(frozen=True)
class ResumeDiffers(Event):
    """A step that an earlier run had trained gave something else when it was trained again. Only
    the first one of a resume is emitted.

    Attributes:
        step: its number.
        what: what differs: epoch, samples, batch, learning_rate, loss_scale or loss.
        first_run: the run that trained the step first.
        first, again: what each of the two runs recorded of the step, for people.
    """

    step: Count
    what: str
    first_run: str
    first: str
    again: str

    log_level = WARNING

    def line(self) -> str:
        return (
            f"step {self.step} differs from what run {self.first_run} trained: another "
            f"{self.what.replace('_', ' ')}. A setting has changed, or one of the two is wrong\n"
            f"  first  {self.first}\n"
            f"  again  {self.again}"
        )


@dataclass(frozen=True)
class BadStepFound(Event):
    """A step is bad on this rank. With the response ``warn`` only the first of several in a row is
    emitted.

    Attributes:
        step: its number; in sink mode the last one of its sink.
        reason: what is bad.
        response: warn, stop or rollback, as ``guard`` says.
    """

    step: Count
    reason: str
    response: str

    log_level = WARNING
    template = "step {step} is bad: {reason} (guard: {response})"


@dataclass(frozen=True)
class GuardEnded(Event):
    """All ranks have agreed on the first bad step, and the job ends.

    Attributes:
        step: the last step that was trained.
        bad_step: the first bad one.
        rank: that found it.
        reason: what is bad.
        rollbacks: in a row without a good checkpoint between them; 0: the guard stops the job.
        samples: that the next start skips.
    """

    step: Count
    bad_step: Count
    rank: Count
    reason: str
    rollbacks: Count
    samples: Count

    log_level = WARNING

    def line(self) -> str:
        what = (
            f"rollback {self.rollbacks}, the next start skips {counted(self.samples, 'sample')}"
            if self.rollbacks
            else "the guard stops it"
        )
        return (
            f"the job ends after step {self.step}: step {self.bad_step} is bad on rank "
            f"{self.rank}, {self.reason}; {what}"
        )


@dataclass(frozen=True)
class WindowSkipped(Event):
    """The samples of bad steps are skipped at this start. ``step``: after which."""

    step: Count
    samples: Count

    log_level = WARNING
    template = "{samples} samples after step {step} are skipped, because a step with them was bad"


@dataclass(frozen=True)
class NetworkCompiled(Event):
    """The first step after a load is compiled, and is about to be computed."""


@dataclass(frozen=True)
class FirstStepDone(Event):
    """The first step of this process is done; in sink mode the first sink. ``step``: its number."""

    step: Count


@dataclass(frozen=True)
class WorkProgress(Event):
    """Progress of long work, every few seconds. ``total``: 0 if unknown. ``unit``: "bytes", or the
    name of what is counted."""

    what: str
    done: Count
    total: Count
    seconds: Measure
    unit: str = "bytes"

    def line(self) -> str:
        """Returns for example ``saving step 500: 12.3 GiB of 80.0 GiB (15 %), 1.9 GiB/s, 36 s
        left``."""

        def amount(count: float) -> str:
            return size_text(count) if self.unit == "bytes" else f"{count:,.0f} {self.unit}"

        rate = self.done / max(self.seconds, 1e-9)
        text = f"{self.what}: {amount(self.done)}"
        if self.total:
            text += f" of {amount(self.total)} ({min(100, 100 * self.done // self.total)} %)"
        text += f", {amount(rate)}/s"
        return text + (
            f", {max(self.total - self.done, 0) / rate:.0f} s left" if self.total and rate else ""
        )


@dataclass(frozen=True)
class Notice(Event):
    """A message for people that no program needs. ``level``: INFO, WARNING or ERROR."""

    text: str
    level: str = INFO

    template = "{text}"

    @property
    def log_level(self) -> str:
        return self.level


def warning(text: object) -> Notice:
    """Returns a Notice of level WARNING."""
    return Notice(str(text), WARNING)
