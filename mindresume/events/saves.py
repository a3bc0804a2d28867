"""Defines the events of saves, of their removal, and of uploads."""

from __future__ import annotations

from dataclasses import dataclass

from mindresume.errors import RemoteError, SaveError
from mindresume.events.base import (
    ERROR,
    WARNING,
    Event,
    Measure,
    numbers_text,
)
from mindresume.formatting import counted, size_text
from mindresume.typed import Count


@dataclass(frozen=True)
class SaveBegun(Event):
    """This rank starts to collect the tensors of a step."""

    step: Count


@dataclass(frozen=True)
class SaveStaged(Event):
    """The step is handed to the background writer, and the training continues. ``name``: of the
    file, or of the iteration folder."""

    step: Count
    name: str
    stall_seconds: Measure

    template = "step {step} is being saved as {name}; training stopped for {stall_seconds:.3f} s"


@dataclass(frozen=True)
class SaveNotStaged(Event):
    """The training waits while the step is written, although a background save was configured:
    there is no memory for a copy."""

    step: Count
    reason: str

    template = "step {step} is saved in the training thread: {reason}"


@dataclass(frozen=True)
class SaveWritten(Event):
    """This rank's part is durable and recorded. ``stall_seconds``: time that the training waited
    for it; None if unknown."""

    step: Count
    size_bytes: Count
    write_seconds: Measure
    stall_seconds: Measure | None = None

    def line(self) -> str:
        return f"saved step {self.step}, {size_text(self.size_bytes)} in {self.write_seconds:.2f} s"


@dataclass(frozen=True)
class SaveCommitted(Event):
    """All ranks are complete: a resume can use this step. ``run_id``: the earlier run that had
    saved it; None: this run."""

    step: Count
    ranks: Count
    size_bytes: Count
    run_id: str | None = None

    def line(self) -> str:
        earlier = (
            f" of run {self.run_id}, which ended before it could commit it" if self.run_id else ""
        )
        return (
            f"step {self.step}{earlier} committed: {counted(self.ranks, 'rank')}, "
            f"{size_text(self.size_bytes)}"
        )


@dataclass(frozen=True)
class CommitDelayed(Event):
    """All ranks have recorded the step, but the commit failed; it is retried after each later step.
    ``run_id``: the earlier run that had saved it; None: this run."""

    step: Count
    reason: str
    run_id: str | None = None

    log_level = WARNING

    def line(self) -> str:
        return (
            f"step {self.step}{f' of run {self.run_id}' if self.run_id else ''} cannot be "
            f"committed now: {self.reason}"
        )


@dataclass(frozen=True)
class WriterDied(Event):
    """The background writer of this rank died. ``writer``: "thread" or "process". ``step``: the
    newest save that it may not have committed; another writer takes it over."""

    writer: str
    reason: str
    step: Count

    log_level = WARNING
    template = "the background {writer} died ({reason}); another one takes over step {step}"


@dataclass(frozen=True)
class SaveFailed(Event):
    """This rank failed to save. ``step``: None if unknown or more than one. ``failures_in_a_row``:
    consecutive failures, including this one. ``code``: of the error."""

    step: Count | None
    reason: str
    failures_in_a_row: Count = 1
    code: str = SaveError.code

    log_level = ERROR
    template = "[{code}] {reason} ({failures_in_a_row} failed in a row)"


@dataclass(frozen=True)
class SaveSkipped(Event):
    """The step was due and is skipped on all ranks. ``skipped_in_total``: since the training
    began."""

    step: Count
    reason: str
    skipped_in_total: Count

    log_level = WARNING
    template = "step {step} is not saved: {reason} ({skipped_in_total} skipped so far)"


@dataclass(frozen=True)
class SaveAbandoned(Event):
    """The step was not complete on all ranks at the last check; a resume cannot use it.
    ``missing_ranks``: those without a record, if that is the reason."""

    step: Count
    reason: str
    missing_ranks: tuple[Count, ...] = ()

    log_level = WARNING
    template = "step {step} is not committed: {reason}"


@dataclass(frozen=True)
class TierSaved(Event):
    """This rank's part of the step lies in memory of its node, recorded. ``stall_seconds``: time
    that the training waited for the copy. ``background_seconds``: of the checksums."""

    step: Count
    size_bytes: Count
    stall_seconds: Measure
    background_seconds: Measure


@dataclass(frozen=True)
class TierRefused(Event):
    """The tier in memory is not used: this save failed, or ``step`` is None and there is no tier in
    this run. The training goes on. ``failures_in_total``: saves of this rank that failed."""

    step: Count | None
    reason: str
    failures_in_total: Count = 0

    log_level = WARNING

    def line(self) -> str:
        if self.step is None:
            return f"no saves into memory of this node (memory_tier) in this run: {self.reason}"
        return (
            f"step {self.step} was not saved into memory of this node (failure "
            f"{self.failures_in_total}): {self.reason}; the "
            f"training goes on, and saves on disk are not concerned"
        )


@dataclass(frozen=True)
class PartnerCopied(Event):
    """The saves of all ranks of this node lie in memory of its partner, too, compared with their
    checksums there. ``size_bytes``: sent."""

    step: Count
    size_bytes: Count
    seconds: Measure


@dataclass(frozen=True)
class PartnerCopyFailed(Event):
    """Memory of the partner does not have this step; or ``step`` is None and there are no partner
    copies in this run. The training goes on, and a later step is sent. A reason is reported
    once."""

    step: Count | None
    reason: str

    log_level = WARNING

    def line(self) -> str:
        if self.step is None:
            return f"no partner copies (memory_tier) in this run: {self.reason}"
        return f"step {self.step} was not copied to memory of the partner node: {self.reason}"


@dataclass(frozen=True)
class PartnerFetched(Event):
    """At the start, the parts of ``ranks`` of a save were sent to the memory of their node, which
    lacked them, by the node whose first rank is ``holder``."""

    step: Count
    ranks: tuple[Count, ...]
    holder: Count
    size_bytes: Count
    seconds: Measure

    def line(self) -> str:
        return (
            f"step {self.step}: the part of {numbers_text('rank', self.ranks)} was fetched from "
            f"memory of the node of rank {self.holder}: {size_text(self.size_bytes)} in "
            f"{self.seconds:.2f} s"
        )


@dataclass(frozen=True)
class CheckpointsRemoved(Event):
    """Retention or a full disk caused a removal.

    Attributes:
        steps: the removed ones.
        where: directory or URL.
        kept: the remaining ones, for people.
        is_incomplete: they were saves that never completed, removed because the disk is full; else
            checkpoints.
    """

    steps: tuple[Count, ...]
    where: str
    kept: str = ""
    is_incomplete: bool = False

    def line(self) -> str:
        if self.is_incomplete:
            return (
                f"the disk is full: removed incomplete saves from {self.where}: "
                f"{numbers_text('step', self.steps)}"
            )
        return f"removed {numbers_text('step', self.steps)} from {self.where}" + (
            f": kept {self.kept}" if self.kept else ""
        )


@dataclass(frozen=True)
class RemovalPostponed(Event):
    """A removal is postponed to the next one: the checkpoint is being read, or an operation failed.
    ``step``: None if unknown."""

    path: str
    reason: str
    step: Count | None = None

    template = "{path} is not removed now: {reason}"


@dataclass(frozen=True)
class UploadFinished(Event):
    """An upload is complete. ``is_whole``: all ranks' parts are there, so the checkpoint can be
    fetched; else only this rank's part. ``size_bytes``: uploaded by this rank."""

    step: Count
    url: str
    size_bytes: Count
    seconds: Measure | None = None
    is_whole: bool = True

    def line(self) -> str:
        seconds = "" if self.seconds is None else f" in {self.seconds:.1f} s"
        what = (
            f"step {self.step} is" if self.is_whole else f"this rank's part of step {self.step} is"
        )
        return f"{what} in {self.url}: {size_text(self.size_bytes)} uploaded by this rank{seconds}"


@dataclass(frozen=True)
class UploadFailed(Event):
    """An upload, or a removal from the object store, failed; it is retried unless ``reason`` says
    otherwise. ``step``: None for a removal."""

    step: Count | None
    reason: str
    failed_in_total: Count = 1

    log_level = WARNING
    template = f"[{RemoteError.code}] {{reason}} ({{failed_in_total}} failed so far)"


@dataclass(frozen=True)
class UploadsSkipped(Event):
    """Uploads are slower than saves: these steps are not uploaded."""

    steps: tuple[Count, ...]
    skipped_in_total: Count

    log_level = WARNING

    def line(self) -> str:
        return (
            f"{numbers_text('step', self.steps)} not uploaded: uploads are slower than saves "
            f"({self.skipped_in_total} skipped so far)"
        )


@dataclass(frozen=True)
class CheckpointFetched(Event):
    """This rank's part of a checkpoint was downloaded. ``total_bytes``: of the parts of all
    ranks."""

    step: Count
    url: str
    size_bytes: Count
    total_bytes: Count | None = None
    seconds: Measure | None = None

    def line(self) -> str:
        total = "" if self.total_bytes is None else f", {size_text(self.total_bytes)} in total"
        seconds = "" if self.seconds is None else f", {self.seconds:.1f} s"
        return (
            f"step {self.step} fetched from {self.url}: {size_text(self.size_bytes)} by this "
            f"rank{total}{seconds}"
        )


@dataclass(frozen=True)
class WeightsPublished(Event):
    """The weights of the step are in ``path`` for others, and LATEST names them."""

    step: Count
    path: str
    size_bytes: Count
    seconds: Measure

    def line(self) -> str:
        return (
            f"the weights of step {self.step} are published in {self.path}: "
            f"{size_text(self.size_bytes)} in {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class PublishFailed(Event):
    """The weights of the step are not published. The training goes on, and so do later
    publications. A kind of failure is reported once until one succeeds."""

    step: Count
    reason: str

    log_level = WARNING
    template = "the weights of step {step} are not published: {reason}"
