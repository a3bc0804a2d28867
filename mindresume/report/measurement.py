"""Measures what an advice on the interval between saves needs: steps, saves to each tier, failures, restarts.

    accounts of the attempts ─▶ measure ─▶ Measured ─▶ advice.advice_from

Stalls, writes and restarts are medians, so that one save on a busy disk, or a restart that waited for a person, does not
decide.

Which failures leave the memory of the nodes intact follows from what the next start took: a save in memory, or one on disk
although memory had had a newer one on all ranks. A start that took a newer one from the disk tells nothing.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindresume.errors import MindResumeError
from mindresume.events import DISK, FAILED, MEMORY
from mindresume.report.accounting import AttemptAccount, recoveries_of
from mindresume.report.phrases import phrase
from mindresume.report.runs import RunAttempt
from mindresume.report.save_interval import FailureRate, PartRate, Tier

RECENT = 50                     # newest saves that count: the disk and the settings of today
COPIED = 1 << 30                # bytes a second that one rank copies, where nothing measured it


class TooLittleMeasuredError(MindResumeError):
    """The event files and logs of a training do not tell what an advice needs."""


@dataclass(frozen=True)
class TierCosts:
    """Holds what one tier costs.

    Attributes:
        tier: stall, write, restart, survival.
        saves: number of saves that were measured; 0: none, the costs are assumed.
        restarts: number of restarts from this tier that were measured; 0: the restart is that of the other tier, or of a start.
        load_seconds: of selecting, verifying and loading from it; None: not measured.
        steps_now: present steps between two saves; None: no attempt tells.
    """
    tier: Tier
    saves: int
    restarts: int = 0
    load_seconds: float | None = None
    steps_now: int | None = None


@dataclass(frozen=True)
class Measured:
    """Holds what an advice is computed from.

    Attributes:
        step_seconds: of an ordinary step.
        disk: saves to disk.
        is_background: the disk is written while the training continues.
        rate: failures after a first step, and the time of training in which they happened.
        failed_starts: starts that failed before their first step; they lengthen restarts, and count there.
        memory: saves into the tier in memory; None: the training has none.
        intact: failures that left the memory of the nodes intact.
        lost: failures that did not. Other failures do not tell.
        possible: what a tier in memory would cost; None if there is one.
        assumed: what ``possible`` assumes, as sentences.
    """
    step_seconds: float
    disk: TierCosts
    is_background: bool
    rate: FailureRate
    failed_starts: int = 0
    memory: TierCosts | None = None
    intact: int = 0
    lost: int = 0
    possible: TierCosts | None = None
    assumed: tuple[str, ...] = ()

    @property
    def rate_of_memory(self) -> PartRate:
        """The failures that leave the memory of the nodes intact."""
        return PartRate(self.rate, self.intact, self.lost)

    @property
    def rate_of_disk(self) -> PartRate:
        """The failures that need the disk, if there is a tier in memory."""
        return PartRate(self.rate, self.lost, self.intact)


def measure(rows: Sequence[AttemptAccount], where: str) -> Measured:
    """Returns what the attempts of a training tell. ``where``: its output folder, for messages. Raises
    TooLittleMeasuredError."""
    if not rows:
        raise TooLittleMeasuredError(f"{where}: no logs and no event files of a training were found (mindresume_events/*.jsonl "
                                     f"and log*/rank_*/info.log*); give the output folder, and other folders with --logs")
    step = next((row.attempt.losses.typical for row in reversed(rows) if len(row.attempt.losses)), 0.0)
    if step <= 0:
        raise TooLittleMeasuredError(f"{where}: the logs hold no time of a step, so the costs of a failure are unknown; give the "
                                     f"folder of mindformers' logs (log*/rank_*/info.log*) with --logs")
    saves = [save for row in rows for save in row.attempt.saves.disk if save.write_seconds is not None][-RECENT:]
    if not saves:
        raise TooLittleMeasuredError(f"{where}: no event file tells how long a save took; an advice needs at least one save to "
                                     f"disk of a training with mindresume")
    background = saves[-1].is_background
    saves = [save for save in saves if save.is_background == background]
    trained = [row for row in rows if _trained_seconds(row) > 0]
    rate = FailureRate(sum(row.attempt.outcome == FAILED for row in trained), math.fsum(map(_trained_seconds, trained)))
    if rate.seconds <= 0:
        raise TooLittleMeasuredError(f"{where}: no attempt has two logged steps, so the time of training is unknown")
    restarts, attempts = _Restarts(rows, trained, step), [row.attempt for row in rows]
    stall = statistics.median(save.stall_seconds for save in saves)
    write = statistics.median(save.write_seconds for save in saves) if background else 0.0
    steps_now = _present_interval([(attempt.saves.disk_steps, [save.step for save in attempt.saves.disk if save.is_staged])
                                   for attempt in attempts])
    disk = restarts.costs(Tier(DISK, stall, write, 0.0), len(saves), steps_now)
    intact, lost = _survivals(attempts)
    survival = PartRate(rate, intact, lost).share
    copies = [save for attempt in attempts for save in attempt.saves.memory][-RECENT:]
    assumed = []
    if copies:
        # The end of the next step waits until the checksums are done.
        behind = statistics.median(save.background_seconds for save in copies)
        copy = statistics.median(save.stall_seconds for save in copies) + max(behind - step, 0.0)
        steps_now = _present_interval([(attempt.saves.memory_steps, [save.step for save in attempt.saves.memory])
                                       for attempt in attempts])
        memory = restarts.costs(Tier(MEMORY, copy, behind, 0.0, survival), len(copies), steps_now)
    else:
        copy = stall if background else max(save.size_bytes or 0 for save in saves) / COPIED
        memory = restarts.costs(Tier(MEMORY, copy, copy, 0.0, survival), 0, None)
        assumed += [phrase("assumed.one_copy" if background else "assumed.copy_rate"), phrase("assumed.checksums")]
    if not memory.restarts and disk.load_seconds is None:
        assumed.append(phrase("assumed.restart"))
    elif not memory.restarts:
        faster = max(disk.load_seconds - 2 * copy, 0.0)
        memory = replace(memory, tier=replace(memory.tier, restart_seconds=max(disk.tier.restart_seconds - faster, 0.0)))
        assumed.append(phrase("assumed.load"))
    if not intact + lost:
        assumed.append(phrase("assumed.survival"))
    is_on = bool(next(saves.memory for attempt in reversed(attempts) if (saves := attempt.saves).disk or saves.memory))
    return Measured(step, disk, background, rate,
                    sum(attempt.outcome == FAILED and attempt.last_step is None for attempt in attempts),
                    memory if is_on else None, intact, lost, None if is_on else memory, () if is_on else tuple(assumed))


class _Restarts:
    """Knows how long restarts and loads took. ``step``: seconds of one; ``trained``: the rows with steps."""

    def __init__(self, rows: Sequence[AttemptAccount], trained: Sequence[AttemptAccount], step: float):
        self.rows, self.found = rows, recoveries_of(rows)
        self.seconds = {recovery: max(recovery.restart_seconds - step, 0.0) for recovery in self.found}
        self.startup = [row.seconds.startup for row in trained if not row.attempt.is_cut][-1:] or [0.0]

    def costs(self, tier: Tier, saves: int, steps_now: int | None) -> TierCosts:
        """Returns the costs of a tier, with the restart from it: else any restart, else the time of a start."""
        own = [recovery for recovery in self.found if (recovery.source == MEMORY) == (tier.name == MEMORY)]
        restart = [self.seconds[recovery] for recovery in own or self.found] or self.startup
        loads = [row.attempt.origin.load_seconds for row in self.rows if row.attempt.origin.load_seconds is not None
                 and (row.attempt.origin.source == MEMORY) == (tier.name == MEMORY)]
        return TierCosts(replace(tier, restart_seconds=statistics.median(restart)), saves, len(own),
                         statistics.median(loads) if loads else None, steps_now)


def _trained_seconds(row: AttemptAccount) -> float:
    """Returns the seconds from the begin of the first step to the last one."""
    return math.fsum(span.end - span.begin for span in row.timeline if span.kind in ("productive", "lost"))


def _present_interval(saves: Sequence[tuple[int | None, list[int]]]) -> int | None:
    """Returns the number of steps between two saves of the latest attempt that tells; None if none does. ``saves``: for each
    attempt the configured number, and the steps that it saved.

    It is the configured one, or in sink mode with longer sinks the least one that occurred; in event files of earlier versions
    the usual one, if there are two saves. The save at the end of a training is not counted, which falls on any step.
    """
    for configured, steps in reversed(saves):
        apart = np.diff(steps)
        if configured:
            return max(configured, int(min(apart[:-1], default=0)))
        if len(apart):
            return int(np.median(apart[:-1] if len(apart) > 1 else apart)) or None
    return None


def _survivals(attempts: Sequence[RunAttempt]) -> tuple[int, int]:
    """Returns the number of failures that left the memory of the nodes intact, and of those that did not."""
    intact = lost = 0
    for index, attempt in enumerate(attempts):
        if attempt.outcome != FAILED or attempt.last_step is None:
            continue
        later = next((row for row in attempts[index + 1:] if row.origin.source or row.origin.is_fresh), None)
        if later is None:
            continue
        # The end of a step waits for a save of an earlier end; all ranks have begun a step that one of them has done.
        sure = attempt.last_step - 2 * attempt.losses.interval
        whole = next((save.step for save in reversed(attempt.saves.memory) if save.step <= sure), None)
        origin = later.origin
        if origin.source == MEMORY:
            intact += 1
        elif whole is not None and (origin.step is None or origin.step < whole or origin.run_id not in (None, attempt.run_id)):
            lost += 1               # all ranks had a newer save in memory than the one from which the next attempt resumed
    return intact, lost
