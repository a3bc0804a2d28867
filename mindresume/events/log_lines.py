"""Words the log lines of events: the only place with the text of the training's log. No program reads these lines."""
from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from mindresume import events as ev
from mindresume.events import Event
from mindresume.formatting import counted, size_text

PREFIX = "mindresume: "
_Kind = TypeVar("_Kind", bound=Event)
_LINES: dict[type[Event], tuple[str | Callable[[Any], str], Callable[[Any], str]]] = {}


class LogLines:
    """Writes each event that has a log line to ``logger``: a ``logging.Logger``, or an object with its methods."""

    def __init__(self, logger: Any):
        self.logger = logger

    def handle(self, event: Event, time_s: float) -> None:
        level, text = line_of(event)
        if text:
            getattr(self.logger, level)("%s%s", PREFIX, text)

    def close(self) -> None:
        pass


def texts_into(texts: list[str]) -> ev.Emit:
    """Returns an emitter that appends the log line of each event to ``texts``, unless the event has none."""
    def emit(event: Event) -> None:
        if text := line_of(event)[1]:
            texts.append(text)
    return emit


def line_of(event: Event) -> tuple[str, str]:
    """Returns (level, text): "info", "warning" or "error", and an empty text for an event without a log line."""
    level, make = _LINES.get(type(event), (ev.INFO, lambda _: ""))
    return level(event) if callable(level) else level, make(event)


def _line(kind: type[_Kind], level: str | Callable[[_Kind], str] = ev.INFO
          ) -> Callable[[Callable[[_Kind], str]], Callable[[_Kind], str]]:
    def register(make: Callable[[_Kind], str]) -> Callable[[_Kind], str]:
        _LINES[kind] = (level, make)
        return make
    return register


@_line(ev.RunOpened)
def _(event: ev.RunOpened) -> str:
    return f"run {event.run_id} saves to {event.checkpoint_dir} as {event.file_prefix}-..."


@_line(ev.LeaseWatched)
def _(event: ev.LeaseWatched) -> str:
    whose = f"run {event.run_id} on host {event.host} did not release its lease" if event.host else \
        f"the lease of run {event.run_id} cannot be read"
    return f"{whose} ({event.path}); watching its heartbeat for {event.seconds:.0f} s"


@_line(ev.StaleLeaseRemoved)
def _(event: ev.StaleLeaseRemoved) -> str:
    return (f"removed the stale lease of run {event.run_id}: process {event.process_id} on host {event.host} does not save here "
            f"any more")


@_line(ev.PreemptionRequested, ev.WARNING)
def _(event: ev.PreemptionRequested) -> str:
    return f"{event.reason}: all ranks save step {event.step}, then the training stops"


@_line(ev.TrainingEnded)
def _(event: ev.TrainingEnded) -> str:
    if event.outcome == ev.PREEMPTED:
        return f"stopped because of {event.reason}; start the same command again to continue"
    return event.reason if event.outcome == ev.NOTHING_TO_TRAIN else ""       # the error of a failure is logged itself


@_line(ev.CandidateRefused, ev.WARNING)
def _(event: ev.CandidateRefused) -> str:
    step = "?" if event.step is None else event.step
    file = f" ({event.file})" if event.file else ""
    return f"not {'taking the weights of' if event.weights_only else 'resuming from'} step {step}: {event.reason}{file}"


@_line(ev.CheckpointSelected)
def _(event: ev.CheckpointSelected) -> str:
    counters = "" if event.step is None else f" step {event.step}, epoch {event.epoch},"
    return f"{'weights of' if event.weights_only else 'resume from'}{counters} {event.description}"


@_line(ev.VisibilityWaited, lambda event: ev.WARNING if event.missing else ev.INFO)
def _(event: ev.VisibilityWaited) -> str:
    if event.missing:
        return f"selecting without checkpoints that this host does not list: {'; '.join(event.missing)}"
    return f"waited {event.wait_seconds:.0f} s until this host lists every checkpoint that the others see"


@_line(ev.VerifiedBytesKept)
def _(event: ev.VerifiedBytesKept) -> str:
    texts = []
    if event.kept_bytes:
        texts.append(f"{size_text(event.kept_bytes)} of the verified files stay in memory until they are loaded")
    if event.reread_bytes:
        texts.append(f"{size_text(event.reread_bytes)} of the verified files are read again when they are loaded: this rank may "
                     f"keep {size_text(event.budget_bytes)} (half of its share of the free memory; mindresume.staging_gib)")
    return "; ".join(texts)


@_line(ev.FreshStart, lambda event: ev.INFO if event.is_expected else ev.WARNING)
def _(event: ev.FreshStart) -> str:
    return f"fresh start: {event.checkpoint_dir} {event.reason}; weights {event.weights}"


@_line(ev.WeightsLoaded)
def _(event: ev.WeightsLoaded) -> str:
    source = f", of {event.source}" if event.source else ""
    read = "" if event.read_bytes is None else f": {size_text(event.read_bytes)} read"
    return f"rank {event.rank} loaded {counted(event.tensors, 'tensor')}, {size_text(event.size_bytes)}{source}{read}"


@_line(ev.ProgressRestored)
def _(event: ev.ProgressRestored) -> str:
    scaled = "" if event.step_scale == 1 else f"; steps scaled by {event.step_scale:g} from {event.saved_step}"
    return (f"continues after step {event.step} ({counted(event.epochs_done, 'epoch')} done), global batch size "
            f"{event.global_batch_size}, loss scale {event.loss_scale}{scaled}")


@_line(ev.Resumed)
def _(event: ev.Resumed) -> str:
    lines = [f"resumed after step {event.step}{_lost(event)}"]
    width = max((len(name) for name, _, _ in event.summary), default=0)
    return "\n".join(lines + [f"  {name:<{width}}  {how:<10}  {details}" for name, how, details in event.summary])


def _lost(event: ev.Resumed) -> str:
    if event.lost_steps is None:
        return ""
    lost = (f"at least {counted(event.lost_steps, 'step')} of the previous job lost" if event.lost_steps else
            "how many steps the previous job lost is not known")
    since = "" if event.lost_seconds is None else f", {event.lost_seconds:.0f} s after the checkpoint was saved"
    return f": {lost}{since}"


@_line(ev.SaveStaged)
def _(event: ev.SaveStaged) -> str:
    return f"step {event.step} is being saved as {event.name}; training stopped for {event.stall_seconds:.3f} s"


@_line(ev.SaveNotStaged)
def _(event: ev.SaveNotStaged) -> str:
    return f"step {event.step} is saved in the training thread: {event.reason}"


@_line(ev.SaveWritten)
def _(event: ev.SaveWritten) -> str:
    return f"saved step {event.step}, {size_text(event.size_bytes)} in {event.write_seconds:.2f} s"


@_line(ev.SaveCommitted)
def _(event: ev.SaveCommitted) -> str:
    earlier = f" of run {event.run_id}, which ended before it could commit it" if event.run_id else ""
    return f"step {event.step}{earlier} committed: {counted(event.ranks, 'rank')}, {size_text(event.size_bytes)}"


@_line(ev.CommitDelayed, ev.WARNING)
def _(event: ev.CommitDelayed) -> str:
    return f"step {event.step}{f' of run {event.run_id}' if event.run_id else ''} cannot be committed now: {event.reason}"


@_line(ev.WriterDied, ev.WARNING)
def _(event: ev.WriterDied) -> str:
    return f"the background {event.writer} died ({event.reason}); another one takes over step {event.step}"


@_line(ev.SaveFailed, ev.ERROR)
def _(event: ev.SaveFailed) -> str:
    return f"{event.reason} ({event.failures_in_a_row} failed in a row)"


@_line(ev.SaveSkipped, ev.WARNING)
def _(event: ev.SaveSkipped) -> str:
    return f"step {event.step} is not saved: {event.reason} ({event.skipped_in_total} skipped so far)"


@_line(ev.SaveAbandoned, ev.WARNING)
def _(event: ev.SaveAbandoned) -> str:
    return f"step {event.step} is not committed: {event.reason}"


@_line(ev.TierRefused, ev.WARNING)
def _(event: ev.TierRefused) -> str:
    if event.step is None:
        return f"no saves into memory of this node (memory_tier) in this run: {event.reason}"
    return (f"step {event.step} was not saved into memory of this node (failure {event.failures_in_total}): {event.reason}; the "
            f"training goes on, and saves on disk are not concerned")


@_line(ev.CheckpointsRemoved)
def _(event: ev.CheckpointsRemoved) -> str:
    if event.is_incomplete:
        return f"the disk is full: removed incomplete saves from {event.where}: {_steps(event.steps)}"
    return f"removed {_steps(event.steps)} from {event.where}" + (f": kept {event.kept}" if event.kept else "")


@_line(ev.CheckpointScrubbed, lambda event: ev.INFO if event.state in ("intact", "removed") else ev.WARNING)
def _(event: ev.CheckpointScrubbed) -> str:
    text = {"intact": "every byte is as it was written", "removed": "it was removed meanwhile",
            "repaired": f"{', '.join(event.files)} had rotted, and is repaired",
            "damaged": f"{event.reason}; it is refused from now on"}.get(event.state, event.state)
    return f"scrubbed step {event.step}, {size_text(event.size_bytes)} in {event.seconds:.1f} s: {text}"


@_line(ev.RemovalPostponed)
def _(event: ev.RemovalPostponed) -> str:
    return f"{event.path} is not removed now: {event.reason}"


@_line(ev.UploadFinished)
def _(event: ev.UploadFinished) -> str:
    seconds = "" if event.seconds is None else f" in {event.seconds:.1f} s"
    what = f"step {event.step} is" if event.is_whole else f"this rank's part of step {event.step} is"
    return f"{what} in {event.url}: {size_text(event.size_bytes)} uploaded by this rank{seconds}"


@_line(ev.UploadFailed, ev.WARNING)
def _(event: ev.UploadFailed) -> str:
    return f"{event.reason} ({event.failed_in_total} failed so far)"


@_line(ev.UploadsSkipped, ev.WARNING)
def _(event: ev.UploadsSkipped) -> str:
    return f"{_steps(event.steps)} not uploaded: uploads are slower than saves ({event.skipped_in_total} skipped so far)"


@_line(ev.CheckpointFetched)
def _(event: ev.CheckpointFetched) -> str:
    total = "" if event.total_bytes is None else f", {size_text(event.total_bytes)} in total"
    seconds = "" if event.seconds is None else f", {event.seconds:.1f} s"
    return f"step {event.step} fetched from {event.url}: {size_text(event.size_bytes)} by this rank{total}{seconds}"


@_line(ev.SupervisorStarted)
def _(event: ev.SupervisorStarted) -> str:
    where = f" (node {event.node} of {event.nodes})" if event.nodes > 1 else ""
    return f"supervising{where}: {' '.join(event.command)}"


@_line(ev.NodesJoined, lambda event: ev.WARNING if event.missing else ev.INFO)
def _(event: ev.NodesJoined) -> str:
    missing = f"; without {_numbers('node', event.missing)}" if event.missing else ""
    return (f"generation {event.generation}: {_numbers('node', event.nodes)} start together after {event.wait_seconds:.0f} s"
            f"{missing}")


@_line(ev.JobStarted)
def _(event: ev.JobStarted) -> str:
    return f"start {event.start}: process {event.process_id}"


@_line(ev.OrphansEnded, ev.WARNING)
def _(event: ev.OrphansEnded) -> str:
    return f"ended processes of the same command whose supervisor was killed: {', '.join(map(str, event.process_ids))}"


@_line(ev.StartupMeasured)
def _(event: ev.StartupMeasured) -> str:
    after = "" if event.resumed_step is None else f" after step {event.resumed_step}"
    parts = zip(event.phases, event.seconds, strict=True)
    return (f"start {event.start} trains{after}, {sum(event.seconds):.1f} s after the command was started: "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts if seconds >= 0.05) + f" (rank {event.rank})")


@_line(ev.RankDied, ev.ERROR)
def _(event: ev.RankDied) -> str:
    who = "a rank" if event.rank is None else f"rank {event.rank}"
    step = "" if event.step is None else f" after step {event.step}"
    phase = f" while {event.phase}" if event.phase not in ("", "ended") else ""
    lines = "".join(f"\n    {line}" for line in event.log)
    return f"{who} ({event.host}, process {event.process_id}) {end_text(event.status)}{phase}{step}{lines}"


def end_text(status: int | None) -> str:
    """Returns how a process ended. ``status``: negative for a signal, None if it is not known."""
    if status is None:
        return "ended, its status is not known"
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


@_line(ev.HangDetected, ev.ERROR)
def _(event: ev.HangDetected) -> str:
    stacks = f"; stacks of all ranks: {', '.join(event.stacks)}" if event.stacks else ""
    step = "" if event.step is None else f", last step {event.step}"
    return (f"{_numbers('rank', event.ranks)} on {event.host} made no progress for {event.seconds:.0f} s "
            f"({event.phase}{step}){stacks}")


@_line(ev.JobEnded)
def _(event: ev.JobEnded) -> str:
    left = "" if not event.left_behind else (
        f"; processes {', '.join(map(str, event.left_behind))} do not end after SIGKILL and are left behind: they wait for a "
        f"device or a disk that does not answer")
    return (f"start {event.start} ended with status {event.status} after {event.seconds:.0f} s: {event.reason}; no process was "
            f"left {event.end_seconds:.1f} s later{left}")


@_line(ev.JobRestarted)
def _(event: ev.JobRestarted) -> str:
    when = "now" if not event.delay_seconds else f"in {event.delay_seconds:.0f} s"
    count = (f" ({counted(event.fruitless_starts, 'start')} in a row without a later checkpoint on disk)"
             if event.fruitless_starts else "")
    return f"start {event.start} follows {when}{count}"


@_line(ev.LogsKept)
def _(event: ev.LogsKept) -> str:
    return f"the logs of start {event.start} are in {', '.join(event.folders)}"


@_line(ev.SupervisorEnded)
def _(event: ev.SupervisorEnded) -> str:
    return f"the job ended with status {event.status} after {counted(event.starts, 'start')}: {event.reason}"


@_line(ev.GaveUp, ev.ERROR)
def _(event: ev.GaveUp) -> str:
    return "\n".join([f"giving up: {event.reason}", *event.page])


def _numbers(noun: str, numbers: Iterable[int]) -> str:
    found = list(map(str, numbers))
    return f"{noun}{'' if len(found) == 1 else 's'} {', '.join(found)}"


@_line(ev.Notice, lambda event: event.level)
def _(event: ev.Notice) -> str:
    return event.text


@_line(ev.WorkProgress)
def progress_text(event: ev.WorkProgress) -> str:
    """Returns for example ``saving step 500: 12.3 GiB of 80.0 GiB (15 %), 1.9 GiB/s, 36 s left``."""
    def amount(count: float) -> str:
        return size_text(count) if event.unit == "bytes" else f"{count:,.0f} {event.unit}"
    rate = event.done / max(event.seconds, 1e-9)
    text = f"{event.what}: {amount(event.done)}"
    if event.total:
        text += f" of {amount(event.total)} ({min(100, 100 * event.done // event.total)} %)"
    text += f", {amount(rate)}/s"
    return text + (f", {max(event.total - event.done, 0) / rate:.0f} s left" if event.total and rate else "")


def _steps(steps: Iterable[int]) -> str:
    numbers = list(map(str, steps))
    return f"{'step' if len(numbers) == 1 else 'steps'} {', '.join(numbers)}"
