"""Names the phases of a recovery, in order, and the moments that end them. The supervisor measures
them (``StartupMeasured``), the report shows them.

    failed attempt |-notice-|-end-|-start-|-import-|-join-|-select-|-build-|-load-|-compile-|-first
    step-|
                 died    noticed ended started imported joined selected loading loaded compiled
                         stepped

Each moment ends one phase. A moment that nothing recorded leaves its phase together with the next
one: without a supervisor, "notice", "end" and "start" are one phase.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = {
    "noticed": "notice",
    "ended": "end",
    "started": "start",
    "imported": "import",
    "joined": "join",
    "selected": "select",
    # ended by each moment
    "loading": "build",
    "loaded": "load",
    "compiled": "compile",
    "stepped": "first step",
}


@dataclass(frozen=True)
class Moments:
    """Holds when each phase of a recovery ended, in seconds since 1970; None: nothing recorded it.

    Attributes:
        noticed: somebody (a supervisor) noticed the failure.
        ended: the last process of the failed attempt was gone.
        started: the process of rank 0 was started.
        imported: its imports were done.
        joined: its job was joined, and the training began.
        selected: all ranks had selected and verified the checkpoint.
        loading: the network was built, and the load began.
        loaded: the tensors were loaded.
        compiled: the first step was compiled.
        stepped: the first step was done.
    """

    noticed: float | None = None
    ended: float | None = None
    started: float | None = None
    imported: float | None = None
    joined: float | None = None
    selected: float | None = None
    loading: float | None = None
    loaded: float | None = None
    compiled: float | None = None
    stepped: float | None = None


@dataclass(frozen=True)
class Phase:
    """Describes a part of a recovery. ``names``: of the phases in it, several where nothing
    recorded the moments between them. ``begin``, ``end``: seconds since 1970."""

    names: tuple[str, ...]
    begin: float
    end: float

    @property
    def name(self) -> str:
        return " + ".join(self.names)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def phases_of(died: float, moments: Moments, first_step: float) -> tuple[Phase, ...]:
    """Returns the phases between ``died`` and ``first_step`` (seconds since 1970). Moments that are
    out of order, by clocks of different hosts, are left out."""
    rows: list[Phase] = []
    names: list[str] = []
    at = died
    for name, phase in PHASES.items():
        names.append(phase)
        moment = first_step if name == "stepped" else getattr(moments, name)
        if moment is not None and at <= moment <= first_step:
            rows.append(Phase(tuple(names), at, moment))
            at, names = moment, []
    return tuple(row for row in rows if row.end > row.begin)
