"""Decides from heartbeats whether a job hangs. The silence of a log decides nothing: a long compilation is silent too."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindresume.coordination.awake_clock import AwakeClock
from mindresume.coordination.rank_heartbeat import ENDED, ENDING, INFERENCE, PHASES, SAVING, TRAINING, Heartbeat
from mindresume.events import FAILED


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
              clock: AwakeClock | None = None) -> Hang | None:
    """Returns the ranks that exceed their limit, None if none does. ``started``: when the command was started. Both times are
    those of ``time.monotonic``; ``clock`` tells how much of the time between them counts, None: all of it."""
    stuck: list[tuple[float, Heartbeat, str]] = []
    for heartbeat in heartbeats:
        if heartbeat.phase == INFERENCE or heartbeat.phase == ENDED and heartbeat.outcome != FAILED:
            continue                                # a script can go on after its training for as long as it likes
        if heartbeat.phase in (TRAINING, SAVING):
            since, limit, name = heartbeat.progressed, limits.step, "--hang-timeout"
        else:
            since = heartbeat.changed if heartbeat.phase in (ENDING, ENDED) else started
            limit, name = limits.start, "--start-timeout"
        seconds = clock.at(now) - clock.at(since) if clock is not None else now - since
        if limit and seconds > limit:
            stuck.append((seconds, heartbeat, name))
    if not stuck:
        return None
    ranks = sorted((heartbeat for _, heartbeat, _ in stuck), key=lambda it: (it.step, PHASES.index(it.phase), it.rank))
    seconds, _, name = max(stuck, key=lambda row: row[0])
    return Hang(tuple(ranks), seconds, name)
