"""Tells which members of a shared folder are alive: each has a small file with a number, and is
alive while the number grows.

    watch = Watch(clock)
    seen = watch.see("run 3", number)           # each time that the file was read
    clock() - seen.since                        # seconds of silence

Leases (``lease``) and the states of supervisors (``supervisor.rendezvous``) are such files. Clocks
of hosts are never compared: a number is as old as the time since this process first saw it. The
caches of a network file system can show it late.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from mindresume import runtime

# seconds between two readings of a clock; of a longer gap no more count
_GAP = 10.0


@dataclass(frozen=True)
class Sighting:
    """Holds what was last seen of a member. Times are of the clock of the watch.

    Attributes:
        number: the newest; None: its file cannot be read.
        first: when the member was first seen.
        since: when this number was first seen.
        advances: how often the number was seen to change.
        content: of the file with this number.
    """

    number: int | None
    first: float
    since: float
    advances: int = 0
    content: Any = None


class Watch:
    """Remembers the numbers of members. ``clock``: monotonic; an ``AwakeClock`` where the watcher
    can be suspended."""

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.members: dict[Hashable, Sighting] = {}

    def see(self, member: Hashable, number: int | None, content: Any = None) -> Sighting:
        """Notes the number of a member. Returns what is known of it, with the ``content`` of its
        newest file."""
        before, now = self.members.get(member), self.clock()
        if before is not None and before.number == number:
            return before
        seen = (
            Sighting(number, now, now, 0, content)
            if before is None
            else Sighting(number, before.first, now, before.advances + 1, content)
        )
        self.members = {**self.members, member: seen}  # others iterate over it
        return seen


class AwakeClock:
    """A monotonic clock that stands still while this process is suspended (SIGSTOP, Slurm's
    suspend, a paused container or machine): nobody could make progress then, or be heard of. It is
    read several times a second, and a gap between two readings shows that nobody could."""

    def __init__(self, time: runtime.Clock = runtime):
        self._time, self._last, self._lock = time, time.monotonic(), runtime.Lock()
        self._gaps: list[tuple[float, float]] = []  # (end, seconds that do not count)

    def __call__(self) -> float:
        with self._lock:
            now = self._time.monotonic()
            # a slow disk counts a little, so that no watch is endless
            if now - self._last > _GAP:
                self._gaps.append((now, now - self._last - _GAP))
            self._last = now
        return self.at(now)

    def at(self, moment: float) -> float:
        """Returns the reading at a moment of the monotonic clock."""
        return moment - sum(seconds for end, seconds in self._gaps if end <= moment)
