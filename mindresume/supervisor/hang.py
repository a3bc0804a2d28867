"""Decides from heartbeats whether a job hangs, and writes the stacks of its ranks. The silence of a
log decides nothing: a long compilation is silent too.

py-spy sees every thread of a process without its help, so it is preferred. Else the rank writes the
stacks itself: it has registered a signal handler in C (``mindformers.heartbeat``), which runs also
while a thread holds the interpreter lock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from mindresume import runtime
from mindresume.coordination.liveness import AwakeClock, namespace, read_process, start_time
from mindresume.coordination.rank_heartbeat import (
    BUILDING,
    COMPILING,
    ENDED,
    ENDING,
    FIRST_STEP,
    INFERENCE,
    JOINING,
    LOADING,
    NONE,
    PHASES,
    SAVING,
    SELECTING,
    STACKS,
    SUFFIX,
    TRAINING,
    Heartbeat,
    read_heartbeat,
    read_heartbeats,
)
from mindresume.events import (
    FAILED,
    FINISHED,
    NOTHING_TO_TRAIN,
    PREEMPTED,
    Moments,
    Phase,
    phases_of,
)
from mindresume.supervisor.members import send

_TIMEOUT = 10.0  # seconds for py-spy and one rank
_SETTLED = 0.3  # seconds without growth after which a file of stacks is complete
_WAIT = 5.0  # seconds for all ranks to write their stacks


class Heartbeats:
    """Holds the heartbeats of the ranks of one start, in ``folder``.

    Attributes:
        known: by process, the last of each rank, also of one that has ended.
        readable: processes whose heartbeats could be read just now.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.known: dict[int, Heartbeat] = {}
        self.readable: set[int] = set()
        self._namespace = namespace("pid")  # in another one a process has another number

    def refresh(self) -> None:
        beats = {
            beat.pid: beat
            for beat in read_heartbeats(self.folder)
            if beat.namespace == self._namespace
        }
        self.readable = set(beats)
        self.known.update(beats)

    def of(self, pid: int) -> Heartbeat | None:
        """Returns the last heartbeat of a process, as it is now."""
        beat = read_heartbeat(os.path.join(self.folder, f"process_{pid}{SUFFIX}"))
        if beat is not None and beat.namespace == self._namespace:
            self.known[pid] = beat
        return self.known.get(pid)

    def newest_steps(self) -> tuple[int, int, int]:
        """Returns the greatest step that a rank has resumed, finished and committed; NONE: none is
        known."""
        rows = [(beat.resumed, beat.step, beat.saves.committed) for beat in self.known.values()]
        resumed, finished, committed = map(max, zip((NONE,) * 3, *rows, strict=True))
        return resumed, finished, committed

    def failed_saves(self) -> tuple[int, int]:
        """Returns how many of the last saves to disk of a rank failed in a row, and 1 if the last
        of them found no space."""
        return max(((it.saves.failed, it.saves.full) for it in self.known.values()), default=(0, 0))

    @property
    def output(self) -> str:
        """Returns the output folder of the training; empty if no rank has told it."""
        return next((beat.output for beat in self.known.values() if beat.output), "")

    @property
    def is_preempted(self) -> bool:
        """Returns whether the ranks were asked to stop, and have saved. A signal of an unknown
        sender is no request: it may come from a failure, and who stops a job signals the
        supervisor, too."""
        return any(beat.outcome == PREEMPTED and not beat.unasked for beat in self.known.values())

    @property
    def has_finished(self) -> bool:
        """Returns whether all ranks have finished the training, and the last save that they began
        is complete."""
        return bool(self.known) and all(
            beat.phase == ENDED
            and beat.outcome in (FINISHED, NOTHING_TO_TRAIN)
            and (beat.rank != 0 or beat.saves.committed >= beat.saves.begun)
            for beat in self.known.values()
        )


@dataclass(frozen=True)
class JobSettings:
    """Holds the seconds of one start, as the options of ``mindresume run`` have them.

    Attributes:
        hang_timeout: without a finished step, once the first step is done; 0: no limit.
        start_timeout: from the start of the command to the end of the first step of every rank, for
            the end of the training (last save, uploads), and for the end of a process whose
            training has failed; 0: no limit.
        kill_after: between SIGTERM and SIGKILL after a failure.
        save: the same for a rank or a process that is saving.
        leave: the same after a signal to this process, in which the ranks save.
        stuck: after SIGKILL, until a process is left behind.
    """

    hang_timeout: float = 1800.0
    start_timeout: float = 7200.0
    kill_after: float = 1.0
    save: float = 20.0
    leave: float = 60.0
    stuck: float = 60.0


@dataclass(frozen=True)
class Hang:
    """Describes ranks without progress. ``ranks``: their heartbeats, those that are behind the
    others first. ``seconds``: without progress. ``limit``: the name of the option."""

    ranks: tuple[Heartbeat, ...]
    seconds: float
    limit: str


def find_hang(
    heartbeats: Sequence[Heartbeat],
    started: float,
    now: float,
    settings: JobSettings,
    clock: AwakeClock,
) -> Hang | None:
    """Returns the ranks that exceed their limit, None if none does. ``started``: when the command
    was started. Both times are those of ``time.monotonic``; ``clock`` tells how much of the time
    between them counts."""
    stuck: list[tuple[float, Heartbeat, str]] = []
    for heartbeat in heartbeats:
        if heartbeat.phase == INFERENCE or heartbeat.phase == ENDED and heartbeat.outcome != FAILED:
            # a script can go on after its training for as long as it likes
            continue
        if heartbeat.phase in (TRAINING, SAVING):
            since = heartbeat.times.progressed
            limit = settings.hang_timeout
            name = "--hang-timeout"
        else:
            since = heartbeat.times.changed if heartbeat.phase in (ENDING, ENDED) else started
            limit, name = settings.start_timeout, "--start-timeout"
        seconds = clock.at(now) - clock.at(since)
        if limit and seconds > limit:
            stuck.append((seconds, heartbeat, name))
    if not stuck:
        return None
    ranks = sorted(
        (heartbeat for _, heartbeat, _ in stuck),
        key=lambda it: (it.step, PHASES.index(it.phase), it.rank),
    )
    seconds, _, name = max(stuck, key=lambda row: row[0])
    return Hang(tuple(ranks), seconds, name)


def startup_phases(heartbeat: Heartbeat, started: float) -> tuple[Phase, ...]:
    """Returns the phases from the start of the command to the end of the first step, those of the
    report.

    Args:
        heartbeat: of a rank that has trained. A graph that is compiled before the load belongs to
            "build", as in the report.
        started: when the command was started, in seconds since 1970.
    """
    entered, spent = heartbeat.times.entered, heartbeat.times.spent
    process = start_time(heartbeat.ticks)
    moments = Moments(
        # ticks are hundredths of a second
        started,
        started,
        None if process is None else max(process, started),
        entered.get(JOINING),
        entered.get(SELECTING),
        entered.get(BUILDING),
        entered.get(LOADING),
        entered[LOADING] + spent[LOADING] if LOADING in entered and LOADING in spent else None,
        entered.get(FIRST_STEP) if COMPILING in spent else None,
    )
    # the first step may be saved
    stepped = min(entered[phase] for phase in (SAVING, TRAINING) if phase in entered)
    return phases_of(started, moments, max(stepped, started))


# ---- stacks --------------------------------------------------------------------------------------


def write_stacks(heartbeats: Sequence[Heartbeat], source: str, target: str) -> tuple[str, ...]:
    """Writes the stacks of the ranks into files.

    Args:
        heartbeats: of the ranks.
        source: folder with the heartbeats, in which a rank writes its stacks.
        target: prefix of the paths of the files; its folder exists.
    Returns:
        The paths of the files that have content.
    """
    tool, paths = shutil.which("py-spy"), []
    asked = []
    for heartbeat in heartbeats:
        path = f"{target}-rank_{heartbeat.rank}-{heartbeat.pid}.txt"
        if tool is not None and _dump(tool, heartbeat.pid, path):
            paths.append(path)
        elif heartbeat.signal:
            asked.append(
                (heartbeat, os.path.join(source, f"process_{heartbeat.pid}{STACKS}"), path)
            )
            send(heartbeat.pid, heartbeat.signal)
    _wait_until_written([written for _, written, _ in asked])
    for _, written, path in asked:
        with suppress(OSError):
            if os.path.getsize(written):
                shutil.copyfile(written, path)
                paths.append(path)
    return tuple(paths)


def without_stacks(heartbeats: Sequence[Heartbeat], paths: Sequence[str]) -> str:
    """Returns the ranks of which ``write_stacks`` has no file, each with the reason as far as it is
    known; empty: none."""
    states = {
        "T": "it is stopped",
        "t": "a debugger has stopped it",
        "D": "it waits in the kernel",
    }
    found = []
    for heartbeat in heartbeats:
        if not any(path.endswith(f"-rank_{heartbeat.rank}-{heartbeat.pid}.txt") for path in paths):
            process = read_process(heartbeat.pid)
            why = (
                "it cannot be looked at"
                if process is None
                else states.get(
                    process.state,
                    "it did not answer, and py-spy is not installed or may not trace it",
                )
            )
            found.append(f"rank {max(heartbeat.rank, 0)} (process {heartbeat.pid}): {why}")
    return "; ".join(found)


def _dump(tool: str, pid: int, path: str) -> bool:
    """Lets py-spy write the stacks of a process. Returns False if it cannot, for example without
    permission to trace."""
    try:
        with open(path, "wb") as file:
            done = subprocess.run(
                [tool, "dump", "--pid", str(pid)],
                stdout=file,
                stderr=subprocess.DEVNULL,
                timeout=_TIMEOUT,
                check=False,
            )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _wait_until_written(paths: Sequence[str]) -> None:
    """Waits until all files have content and none has grown for a moment. A process in state D
    writes none."""
    until = runtime.monotonic() + _WAIT
    sizes = [-1] * len(paths)
    since = runtime.monotonic()
    while paths and runtime.monotonic() < until:
        now = [os.path.getsize(path) if os.path.exists(path) else 0 for path in paths]
        if now != sizes:
            sizes, since = now, runtime.monotonic()
        elif all(sizes) and runtime.monotonic() - since >= _SETTLED:
            return
        runtime.sleep(0.05)
