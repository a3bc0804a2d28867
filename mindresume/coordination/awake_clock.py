"""A clock for those who watch others: what is silent while the watcher itself is suspended is not dead."""
from __future__ import annotations

from collections.abc import Callable

from mindresume import runtime

_GAP = 10.0                     # seconds between two readings; of a longer gap no more count


class AwakeClock:
    """A monotonic clock that stands still while this process is suspended (SIGSTOP, Slurm's suspend, a paused container or
    machine): nobody could make progress then, or be heard of. It is read several times a second, and a gap between two readings
    shows that nobody could."""

    def __init__(self, clock: Callable[[], float] = runtime.monotonic):
        self._clock, self._last, self._lock = clock, clock(), runtime.Lock()
        self._gaps: list[tuple[float, float]] = []              # (end, seconds that do not count)

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            if now - self._last > _GAP:                         # a slow disk counts a little, so that no watch is endless
                self._gaps.append((now, now - self._last - _GAP))
            self._last = now
        return self.at(now)

    def at(self, moment: float) -> float:
        """Returns the reading at a moment of the monotonic clock."""
        return moment - sum(seconds for end, seconds in self._gaps if end <= moment)
