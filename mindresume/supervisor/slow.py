"""Notices ranks and saves that are slow, from heartbeats.

Of a step a rank spends some time outside of the network: it waits for its data, and callbacks run.
Only that time is its own. In the network all ranks wait for the slowest in the collectives, so
their times are the same, and what is slow there cannot be told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median, median_low

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import Heartbeat
from mindresume.events import Emit, SlowRank, SlowSave

_STEPS = 3  # of which the times are averaged
_IN_A_ROW = 3  # so many averages in a row make a slow rank
_SHARE = 0.2  # of a step, which a slow rank costs at least
_SAVES = 8  # whose median is usual; less than _IN_A_ROW tell nothing
_LEAST = 5.0  # seconds that a slow save takes longer than usual


class Slowness:
    """Emits SlowRank and SlowSave, once when it begins and once when it ends. ``factor``: how many
    times the median is slow."""

    def __init__(self, factor: float, emit: Emit):
        self.factor, self.emit = factor, emit
        self._before: dict[int, Heartbeat] = {}  # at the begin of an average
        self._began = 0.0
        self._in_a_row: Counter[int] = Counter()  # by rank
        self._saves: deque[float] = deque(maxlen=_SAVES)
        self._begun = 0  # the newest step whose save began
        self._saving, self._since = 0, 0.0  # the step that is being saved; 0: none
        self._is_slow = False

    def watch(self, beats: Mapping[int, Heartbeat]) -> None:
        """Takes the heartbeats of the ranks of this node, by process. Called several times a
        second."""
        if not beats:
            return
        now = runtime.monotonic()
        if beats.keys() != self._before.keys():  # another start
            self._before, self._began = dict(beats), now
            self._in_a_row.clear()
            self._saving = 0
            self._begun = max(beat.saves.begun for beat in beats.values())
        self._watch_ranks(beats, now)
        self._watch_save(beats, now)

    def _watch_ranks(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        before = self._before
        steps = {pid: beat.step - before[pid].step for pid, beat in beats.items()}
        if min(steps.values()) < _STEPS:
            return
        own = {pid: (beat.waited - before[pid].waited) / steps[pid] for pid, beat in beats.items()}
        usual = median_low(own.values())
        least = max(self.factor * usual, usual + _SHARE * (now - self._began) / min(steps.values()))
        self._before, self._began = dict(beats), now
        for pid, beat in beats.items():
            was_slow = self._in_a_row[beat.rank] >= _IN_A_ROW
            self._in_a_row[beat.rank] = self._in_a_row[beat.rank] + 1 if own[pid] > least else 0
            if was_slow != (self._in_a_row[beat.rank] >= _IN_A_ROW):
                self.emit(SlowRank(beat.rank, own[pid], usual, beat.step, was_slow))

    def _watch_save(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        step = max(beat.saves.begun for beat in beats.values())
        if step > self._begun:
            self._begun = self._saving = step
            self._since = now
        if not self._saving:
            return
        seconds = now - self._since
        usual = median(self._saves) if len(self._saves) >= _IN_A_ROW else seconds
        is_slow = seconds > max(self.factor * usual, usual + _LEAST)
        is_written = all(beat.saves.written >= step for beat in beats.values())
        if is_slow != self._is_slow and (is_slow or is_written):
            self._is_slow = is_slow
            self.emit(SlowSave(step, seconds, usual, not is_slow))
        if is_written:
            self._saves.append(seconds)
        if is_written or any(beat.saves.failed for beat in beats.values()):
            self._saving = 0
