"""Computes the phases of a start from the heartbeat of a rank: those of the report (``events.recovery_phases``)."""
from __future__ import annotations

from mindresume.coordination.process_identity import start_time
from mindresume.coordination.rank_heartbeat import (
    BUILDING,
    COMPILING,
    FIRST_STEP,
    JOINING,
    LOADING,
    SAVING,
    SELECTING,
    TRAINING,
    Heartbeat,
)
from mindresume.events.recovery_phases import Moments, Phase, phases_of


def startup_phases(heartbeat: Heartbeat, started: float) -> tuple[Phase, ...]:
    """Returns the phases from the start of the command to the end of the first step.

    Args:
        heartbeat: of a rank that has trained. A graph that is compiled before the load belongs to "build", as in the report.
        started: when the command was started, in seconds since 1970.
    """
    entered, spent = heartbeat.entered, heartbeat.seconds
    process = start_time(heartbeat.ticks)
    moments = Moments(
        started, started, None if process is None else max(process, started),       # ticks are hundredths of a second
        entered.get(JOINING), entered.get(SELECTING), entered.get(BUILDING), entered.get(LOADING),
        entered[LOADING] + spent[LOADING] if LOADING in entered and LOADING in spent else None,
        entered.get(FIRST_STEP) if COMPILING in spent else None)
    stepped = min(entered[phase] for phase in (SAVING, TRAINING) if phase in entered)       # the first step may be saved
    return phases_of(started, moments, max(stepped, started))
