"""Finds the recoveries of a training: what passed between the end of an attempt that failed and the first new step, in phases
(``events.recovery_phases``). After these come the *redone* steps: those that the failed attempt had done after the checkpoint,
until the training is where it was.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from mindresume.events.recovery_phases import Moments, Phase, phases_of
from mindresume.report.accounting import AttemptAccount
from mindresume.report.runs import NORMAL

REDONE = "redone"


@dataclass(frozen=True)
class Recovery:
    """Describes one recovery.

    Attributes:
        failed: number of the attempt that failed.
        resumed: number of the attempt that did the first new step; attempts between them failed before theirs.
        source: where its checkpoint lay, "disk" or "memory"; empty: not known, or it began without one.
        died: the last record of the failed attempt, in seconds since 1970.
        first_step: when the first new step was done, as far as is known; ``phases`` end there.
        phases: in order, without gaps.
        steps_redone: steps of the failed attempt that were done again.
        seconds_redone: time that the failed attempt had spent on them.
    """
    failed: int
    resumed: int
    source: str
    died: float
    first_step: float
    phases: tuple[Phase, ...]
    steps_redone: int
    seconds_redone: float

    @property
    def restart_seconds(self) -> float:
        """From the end of the failed attempt to the end of the first new step."""
        return self.first_step - self.died


def recoveries_of(accounts: Sequence[AttemptAccount], moments: Mapping[int, Moments] | None = None) -> tuple[Recovery, ...]:
    """Returns the recoveries, in order of time. ``moments``: those of a supervisor, by the number of the attempt that it started;
    they count where the attempt itself recorded none."""
    found = []
    for index, row in enumerate(accounts):
        if row.attempt.last_step is None or row.attempt.outcome in NORMAL:
            continue
        until = next((other for other in range(index + 1, len(accounts)) if accounts[other].attempt.last_step is not None), None)
        if until is None or any(other.attempt.outcome in NORMAL for other in accounts[index + 1:until]):
            continue
        later = accounts[until]
        known = _joined(later.attempt.moments, (moments or {}).get(later.attempt.number))
        first = (moments or {}).get(accounts[index + 1].attempt.number, Moments())          # the start after the failure itself
        known = replace(known, noticed=first.noticed, ended=first.ended)
        died, end = row.attempt.ended, _first_step(later, known)
        if end is not None and end >= died:
            found.append(Recovery(row.attempt.number, later.attempt.number, later.attempt.resumed_source, died, end,
                                  phases_of(died, known, end), row.steps_lost, row.seconds.lost))
    return tuple(found)


def totals_of(recoveries: Sequence[Recovery]) -> dict[str, float]:
    """Returns {phases, joined with " + ": seconds} over all recoveries, and the redone steps."""
    found: dict[str, float] = {}
    for recovery in recoveries:
        for phase in recovery.phases:
            found[phase.name] = found.get(phase.name, 0.0) + phase.seconds
    redone = sum(recovery.seconds_redone for recovery in recoveries)
    return {**found, **({REDONE: redone} if redone else {})}


def _joined(own: Moments, other: Moments | None) -> Moments:
    if other is None:
        return own
    return Moments(**{field.name: getattr(other, field.name) if getattr(own, field.name) is None else getattr(own, field.name)
                      for field in fields(Moments)})


def _first_step(row: AttemptAccount, moments: Moments) -> float | None:
    """Returns when the first step of an attempt was done: as recorded, else by the log; None if neither tells."""
    if moments.stepped is not None:
        return moments.stepped
    losses = row.attempt.losses
    return float(losses.times[0]) if len(losses) else None
