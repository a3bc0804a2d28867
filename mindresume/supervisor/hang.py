"""Decides from heartbeats whether a job hangs. The silence of a log decides nothing: a long compilation is silent too."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindresume.coordination.rank_heartbeat import ENDED, ENDING, INFERENCE, PHASES, SAVING, TRAINING, Heartbeat
from mindresume.events import FAILED

_GAP = 10.0                     # seconds between two readings of an AwakeClock from which on this process was suspended


class AwakeClock:
    """A monotonic clock that stands still while this process is suspended (SIGSTOP, Slurm's suspend, a paused container or
    machine): nobody could make progress then, or be heard of. It is read several times a second, and a gap between two readings
    shows that nobody could."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._last, self._lock = clock, clock(), threading.Lock()
        self._gaps: list[tuple[float, float]] = []              # (end, seconds)

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            if now - self._last > _GAP:
                self._gaps.append((now, now - self._last))
            self._last = now
        return self.at(now)

    def at(self, moment: float) -> float:
        """Returns the reading at a moment of the monotonic clock."""
        return moment - sum(seconds for end, seconds in self._gaps if end <= moment)


_ALWAYS_AWAKE = AwakeClock()


@dataclass(frozen=True)
class HangLimits:
    """Holds the limits in seconds; 0: no limit. ``step``: without a finished step, once the first step is done. ``start``: from
    the start of the command to the end of the first step of every rank, for the end of the training (last save, uploads), and for
    the end of a process whose training has failed."""
    step: float = 1800.0
    start: float = 7200.0


@dataclass(frozen=True)
class Hang:
    """Describes ranks without progress. ``ranks``: their heartbeats, those that are behind the others first. ``seconds``: without
    progress. ``limit``: the name of the option."""
    ranks: tuple[Heartbeat, ...]
    seconds: float
    limit: str


def find_hang(heartbeats: Sequence[Heartbeat], started: float, now: float, limits: HangLimits,
              clock: AwakeClock = _ALWAYS_AWAKE) -> Hang | None:
    """Returns the ranks that exceed their limit, None if none does. ``started``: when the command was started. Both times are
    those of ``time.monotonic``; ``clock`` tells how much of the time between them counts."""
    stuck: list[tuple[float, Heartbeat, str]] = []
    for heartbeat in heartbeats:
        if heartbeat.phase == INFERENCE or heartbeat.phase == ENDED and heartbeat.outcome != FAILED:
            continue                                # a script can go on after its training for as long as it likes
        if heartbeat.phase in (TRAINING, SAVING):
            since, limit, name = heartbeat.progressed, limits.step, "--hang-timeout"
        else:
            since = heartbeat.changed if heartbeat.phase in (ENDING, ENDED) else started
            limit, name = limits.start, "--start-timeout"
        seconds = clock.at(now) - clock.at(since)
        if limit and seconds > limit:
            stuck.append((seconds, heartbeat, name))
    if not stuck:
        return None
    ranks = sorted((heartbeat for _, heartbeat, _ in stuck), key=lambda it: (it.step, PHASES.index(it.phase), it.rank))
    seconds, _, name = max(stuck, key=lambda row: row[0])
    return Hang(tuple(ranks), seconds, name)
