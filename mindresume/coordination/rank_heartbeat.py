"""Holds the heartbeat of one rank: a small mapped file that the rank writes and the supervisor of
its node reads.

    {MINDRESUME_SUPERVISOR_DIR}/process_4711.heartbeat      one file for each rank, in memory or on
                                                            the local disk

    heartbeat = RankHeartbeat.create(folder)    # the rank, once
    heartbeat.enter(LOADING); heartbeat.reach(500)
    read_heartbeats(folder)                     # the supervisor

A write is one store of 8 aligned bytes, a microsecond without a system call, so a rank writes in
each step. A reader can see some fields of one moment and some of the next, but never half of a
number. Times of the monotonic clock are comparable, because both processes run on one host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from mindresume import runtime
from mindresume.coordination.liveness import namespace, start_ticks
from mindresume.events import FAILED, FINISHED, NOTHING_TO_TRAIN, PREEMPTED

# environment: the folder for heartbeats; absent: there is no supervisor
VARIABLE = "MINDRESUME_SUPERVISOR_DIR"
# environment: the supervisor has ended the start before, after a failure
ENDED_BY_US = "MINDRESUME_SUPERVISOR_ENDED"
SUFFIX, STACKS = ".heartbeat", ".stacks"  # of the files of one process
NONE = -1  # a number that is not known yet

# A rank enters the phases in this order; TRAINING, SAVING and COMPILING more than once.
# INFERENCE is an evaluation or a prediction without training.
(
    STARTING,
    JOINING,
    SELECTING,
    BUILDING,
    COMPILING,
    LOADING,
    FIRST_STEP,
    TRAINING,
    SAVING,
    INFERENCE,
    ENDING,
    ENDED,
) = PHASES = (
    "starting",
    "joining",
    "selecting",
    "building",
    "compiling",
    "loading",
    "first step",
    "training",
    "saving",
    "inference",
    "ending",
    "ended",
)
OUTCOMES = ("", FINISHED, PREEMPTED, NOTHING_TO_TRAIN, FAILED)

_VERSION = 0x6D72_6862_0001  # the first field; 0 while the file is being made
_NUMBERS = [
    "version",
    "pid",
    "ticks",
    "rank",
    "world_size",
    "phase",
    "step",
    "resumed",
    "begun",
    "written",
    "committed",
    "outcome",
    "signal",
    "namespace",
    "writing",
    "unasked",
    "failed",
    "full",
]


class _Page(ctypes.Structure):
    """The content of the file. ``seconds``, ``entered``: by phase, as in ``PhaseTimes``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("_free", ctypes.c_int64 * 14),
        ("progressed", ctypes.c_double),
        ("changed", ctypes.c_double),
        ("waited", ctypes.c_double),
        ("_free_too", ctypes.c_double * 5),
        ("seconds", ctypes.c_double * 20),
        ("entered", ctypes.c_double * 68),
        ("output", ctypes.c_char * 3072),
    ]


_SIZE = ctypes.sizeof(_Page)


@dataclass(frozen=True)
class Saves:
    """Describes the saves of one rank.

    Attributes:
        begun: the newest step whose save has begun; NONE: none.
        written: the newest step that this rank has written; NONE: none.
        committed: the newest step that is complete on all ranks, as rank 0 knows; NONE: none, or
            another rank.
        writing: the step that a thread in the background is writing; 0: none.
        failed: saves that failed since the last one that this rank has written.
        full: 1 if the last of them found no space.
    """

    begun: int = NONE
    written: int = NONE
    committed: int = NONE
    writing: int = 0
    failed: int = 0
    full: int = 0


@dataclass(frozen=True)
class PhaseTimes:
    """Says when a rank was in which phase.

    Attributes:
        progressed: when the phase or the step last changed, ``time.monotonic``.
        changed: when the phase last changed, ``time.monotonic``.
        spent: {phase: seconds spent in it}, without the current phase.
        entered: {phase: when it was first entered, seconds since 1970}.
    """

    progressed: float = 0.0
    changed: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    entered: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Heartbeat:
    """Describes one rank as it was last seen.

    Attributes:
        pid: of the process.
        ticks: when that process was started, in clock ticks since boot: another process can have
            its number later.
        rank: NONE until it is known.
        world_size: ranks of the job; NONE: not known.
        phase: one of PHASES.
        step: the last finished step; NONE: none.
        resumed: the step that the training continues after; NONE: not known, or from the beginning.
        outcome: how the training ended, one of OUTCOMES; empty: not yet.
        unasked: 1 if the training was preempted by a signal whose sender is not known.
        namespace: of the numbers of processes (a container can have its own); 0: not known.
        signal: makes the process write the stacks of its threads into a file; 0: none.
        output: output folder of the training; empty: not known.
        waited: seconds between the ends of steps and the begins of the next ones, all together.
    """

    pid: int
    ticks: int
    rank: int = NONE
    world_size: int = NONE
    phase: str = STARTING
    step: int = NONE
    resumed: int = NONE
    outcome: str = ""
    signal: int = 0
    namespace: int = 0
    unasked: int = 0
    output: str = ""
    saves: Saves = Saves()
    times: PhaseTimes = PhaseTimes()
    waited: float = 0.0

    @property
    def has_trained(self) -> bool:
        """Returns whether the first step is done."""
        return TRAINING in self.times.entered


class RankHeartbeat:
    """Writes the heartbeat of this process. ``path``: the file. Use ``create``."""

    def __init__(self, path: str):
        self.path = path
        with open(path, "xb+") as file:
            # a write to a page that a full tmpfs cannot provide would kill the process (SIGBUS)
            try:
                os.posix_fallocate(file.fileno(), 0, _SIZE)
                self._page = _Page.from_buffer(mmap.mmap(file.fileno(), _SIZE))
            except OSError:
                os.remove(path)
                raise
        page = self._page
        page.rank = page.world_size = page.step = page.resumed = NONE
        page.begun = page.written = page.committed = NONE
        self._left = 0.0  # when the last step was finished
        page.pid, page.ticks = os.getpid(), start_ticks(os.getpid())
        page.namespace = namespace("pid")
        page.progressed = page.changed = runtime.monotonic()
        page.entered[0] = runtime.time()
        page.version = _VERSION

    @classmethod
    def create(cls, folder: str, rank: int = NONE) -> RankHeartbeat:
        """Begins the heartbeat of this process in ``folder``. Raises OSError."""
        made = cls(os.path.join(folder, f"process_{os.getpid()}{SUFFIX}"))
        made.set(rank=rank)
        return made

    def set(self, **values: int) -> None:
        """Sets numbers by the names of their fields; ``outcome`` is an index of OUTCOMES."""
        for name, value in values.items():
            setattr(self._page, name, value)

    @property
    def phase(self) -> str:
        return PHASES[self._page.phase]

    def enter(self, phase: str) -> None:
        """Begins a phase. Does nothing if it is the current one, or the training has ended."""
        page, index = self._page, PHASES.index(phase)
        if self.phase in (phase, ENDED):
            return
        now = runtime.monotonic()
        page.seconds[page.phase] += now - page.changed
        page.entered[index] = page.entered[index] or runtime.time()
        page.phase = index
        page.changed = page.progressed = now

    def reach(self, step: int) -> None:
        """Records that ``step`` is finished."""
        self._page.step = step
        self._page.progressed = self._left = runtime.monotonic()
        self.enter(TRAINING)

    def begin_step(self) -> None:
        """Records that the data of a step is there, and the network begins."""
        if self._left:
            self._page.waited += runtime.monotonic() - self._left
            self._left = 0.0  # a step can fetch several batches

    def set_output(self, folder: str) -> None:
        """Records the output folder of the training; one that is too long is not recorded."""
        with suppress(ValueError):
            self._page.output = os.fsencode(os.path.abspath(folder))


def read_heartbeat(path: str) -> Heartbeat | None:
    """Returns the heartbeat in a file; None if it is being made, is not of this version, or cannot
    be read."""
    try:
        page = _Page.from_buffer_copy(Path(path).read_bytes())
    except (OSError, ValueError):
        return None
    if (
        page.version != _VERSION
        or not 0 <= page.phase < len(PHASES)
        or not 0 <= page.outcome < len(OUTCOMES)
    ):
        return None
    spent, entered = (
        {phase: seconds for phase, seconds in zip(PHASES, times, strict=False) if seconds}
        for times in (page.seconds, page.entered)
    )
    return Heartbeat(
        page.pid,
        page.ticks,
        page.rank,
        page.world_size,
        PHASES[page.phase],
        page.step,
        page.resumed,
        OUTCOMES[page.outcome],
        page.signal,
        page.namespace,
        page.unasked,
        os.fsdecode(page.output),
        Saves(page.begun, page.written, page.committed, page.writing, page.failed, page.full),
        PhaseTimes(page.progressed, page.changed, spent, entered),
        page.waited,
    )


def read_heartbeats(folder: str) -> list[Heartbeat]:
    """Returns the heartbeats in ``folder``, by rank and process; empty if there is no such
    folder."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = [read_heartbeat(os.path.join(folder, name)) for name in names if name.endswith(SUFFIX)]
    return sorted(filter(None, found), key=attrgetter("rank", "pid"))
