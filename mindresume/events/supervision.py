"""Defines the events of a supervisor (``mindresume run``)."""

from __future__ import annotations

from dataclasses import dataclass

from mindresume.events.base import (
    ERROR,
    INFO,
    WARNING,
    Event,
    Measure,
    end_text,
    numbers_text,
)
from mindresume.formatting import counted
from mindresume.typed import Count


@dataclass(frozen=True)
class SupervisorStarted(Event):
    """A supervisor begins. ``command``: what it starts. ``node``, ``nodes``: number of this node,
    and of all nodes of the job."""

    host: str
    process_id: Count
    version: str
    command: tuple[str, ...]
    node: Count = 0
    nodes: Count = 1

    def line(self) -> str:
        where = f" (node {self.node} of {self.nodes})" if self.nodes > 1 else ""
        return f"supervising{where}: {' '.join(self.command)}"


@dataclass(frozen=True)
class NodesJoined(Event):
    """The supervisors of all nodes that take part have agreed on a start. ``missing``: nodes that
    it goes on without. ``wait_seconds``: how long this node waited for the others."""

    generation: Count
    nodes: tuple[Count, ...]
    wait_seconds: Measure
    missing: tuple[Count, ...] = ()

    @property
    def log_level(self) -> str:
        return WARNING if self.missing else INFO

    def line(self) -> str:
        missing = f"; without {numbers_text('node', self.missing)}" if self.missing else ""
        return (
            f"generation {self.generation}: {numbers_text('node', self.nodes)} start together "
            f"after {self.wait_seconds:.0f} s{missing}"
        )


@dataclass(frozen=True)
class JobStarted(Event):
    """The command was started. ``start``: from 1. ``process_id``: of the command."""

    start: Count
    process_id: Count

    template = "start {start}: process {process_id}"


@dataclass(frozen=True)
class OrphansEnded(Event):
    """Processes of the same command were ended, whose supervisor was killed."""

    process_ids: tuple[Count, ...]

    log_level = WARNING

    def line(self) -> str:
        return (
            "ended processes of the same command whose supervisor was killed: "
            f"{', '.join(map(str, self.process_ids))}"
        )


@dataclass(frozen=True)
class StartupMeasured(Event):
    """Every rank of this node has finished its first step. Describes the rank that needed longest.

    Attributes:
        phases: those from the start of the command to the end of the first step, in order:
            ``PHASES`` from "start" on, joined with " + " where the moment between
            them is not known.
        seconds: time in each of them.
        resumed_step: the step that it continues after; None: from the beginning.
    """

    start: Count
    rank: Count
    phases: tuple[str, ...]
    seconds: tuple[Measure, ...]
    resumed_step: Count | None = None

    def line(self) -> str:
        after = "" if self.resumed_step is None else f" after step {self.resumed_step}"
        parts = zip(self.phases, self.seconds, strict=True)
        return (
            f"start {self.start} trains{after}, {sum(self.seconds):.1f} s after the command was "
            "started: "
            + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts if seconds >= 0.05)
            + f" (rank {self.rank})"
        )


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
        is_scheduler: it was no rank, but the scheduler of msrun.
    """

    start: Count
    host: str
    process_id: Count
    rank: Count | None = None
    status: int | None = None
    phase: str = ""
    step: Count | None = None
    log: tuple[str, ...] = ()
    is_scheduler: bool = False

    log_level = ERROR

    def line(self) -> str:
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        if self.is_scheduler:
            who = "the scheduler of msrun"
        step = "" if self.step is None else f" after step {self.step}"
        phase = f" while {self.phase}" if self.phase not in ("", "ended") else ""
        lines = "".join(f"\n    {line}" for line in self.log)
        return (
            f"{who} ({self.host}, process {self.process_id}) "
            f"{end_text(self.status)}{phase}{step}{lines}"
        )


@dataclass(frozen=True)
class HangDetected(Event):
    """Ranks made no progress. ``ranks``: those, the one that is behind first. ``stacks``: files
    with the stacks of all ranks."""

    start: Count
    host: str
    ranks: tuple[Count, ...]
    seconds: Measure
    phase: str
    step: Count | None = None
    stacks: tuple[str, ...] = ()

    log_level = ERROR

    def line(self) -> str:
        stacks = f"; stacks of all ranks: {', '.join(self.stacks)}" if self.stacks else ""
        step = "" if self.step is None else f", last step {self.step}"
        return (
            f"{numbers_text('rank', self.ranks)} on {self.host} made no progress for "
            f"{self.seconds:.0f} s ({self.phase}{step}){stacks}"
        )


@dataclass(frozen=True)
class SlowRank(Event):
    """A rank of this node makes the others wait. ``seconds``: what it needs in a step outside of
    the network, for data and callbacks. ``median``: of the ranks of the node. ``has_ended``: it is
    not slow any more."""

    rank: Count
    seconds: Measure
    median: Measure
    step: Count
    has_ended: bool = False

    @property
    def log_level(self) -> str:
        return INFO if self.has_ended else WARNING

    def line(self) -> str:
        return (
            f"rank {self.rank} is {'not slow any more' if self.has_ended else 'slow'}: outside of "
            f"the network it needs {self.seconds:.3f} s a step, the median is {self.median:.3f} s "
            f"(step {self.step})"
        )


@dataclass(frozen=True)
class SlowSave(Event):
    """A save takes much longer than usual on this node. ``seconds``: so far. ``usual``: the median
    of the last ones. ``has_ended``: this one was as fast as usual again."""

    step: Count
    seconds: Measure
    usual: Measure
    has_ended: bool = False

    @property
    def log_level(self) -> str:
        return INFO if self.has_ended else WARNING

    def line(self) -> str:
        how = "saves are not slow any more" if self.has_ended else "a save is slow"
        return f"{how}: step {self.step} takes {self.seconds:.1f} s, usual are {self.usual:.1f} s"


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

    start: Count
    status: int
    reason: str
    seconds: Measure
    end_seconds: Measure
    resumed_step: Count | None = None
    last_step: Count | None = None
    committed_step: Count | None = None
    left_behind: tuple[Count, ...] = ()

    def line(self) -> str:
        left = (
            ""
            if not self.left_behind
            else (
                f"; processes {', '.join(map(str, self.left_behind))} do not end after SIGKILL and "
                "are left behind: they wait for a device or a disk that does not answer"
            )
        )
        return (
            f"start {self.start} ended with status {self.status} after {self.seconds:.0f} s: "
            f"{self.reason}; no process was left {self.end_seconds:.1f} s later{left}"
        )


@dataclass(frozen=True)
class JobRestarted(Event):
    """The command is about to be started again. ``start``: the next one. ``delay_seconds``: waited
    before. ``fruitless_starts``: starts in a row that left no later checkpoint."""

    start: Count
    delay_seconds: Measure
    reason: str
    fruitless_starts: Count = 0

    def line(self) -> str:
        when = "now" if not self.delay_seconds else f"in {self.delay_seconds:.0f} s"
        count = (
            f" ({counted(self.fruitless_starts, 'start')} in a row without a later checkpoint on "
            "disk)"
            if self.fruitless_starts
            else ""
        )
        return f"start {self.start} follows {when}{count}"


@dataclass(frozen=True)
class LogsKept(Event):
    """The logs of a start were moved, because the next one overwrites them. ``folders``: in which
    they are now."""

    start: Count
    folders: tuple[str, ...]

    def line(self) -> str:
        return f"the logs of start {self.start} are in {', '.join(self.folders)}"


@dataclass(frozen=True)
class SupervisorEnded(Event):
    """The last event of a supervisor. ``status``: its exit status. ``starts``: of the command."""

    status: int
    reason: str
    starts: Count

    def line(self) -> str:
        return (
            f"the job ended with status {self.status} after {counted(self.starts, 'start')}: "
            f"{self.reason}"
        )


@dataclass(frozen=True)
class GaveUp(Event):
    """The job is not started again: a crash loop, or a node that does not come back. ``page``:
    lines for people, what each start did and died of."""

    status: int
    reason: str
    starts: Count
    page: tuple[str, ...] = ()

    log_level = ERROR

    def line(self) -> str:
        return "\n".join([f"giving up: {self.reason}", *self.page])


# ---- the phases of a recovery --------------------------------------------------------------------

# {moment: the phase that it ends}, in order. The supervisor measures them (``StartupMeasured``);
# the report shows them. A moment that nothing recorded leaves its phase together with the next one:
# without a supervisor, "notice", "end" and "start" are one phase.
PHASES = {
    "noticed": "notice",
    "ended": "end",
    "started": "start",
    "imported": "import",
    "joined": "join",
    "selected": "select",
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
