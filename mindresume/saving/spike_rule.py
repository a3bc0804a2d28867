"""Judges whether a value of a step lies far above those of the steps before it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

FLOOR = 0.005  # of the median: the least deviation, since a flat curve has none


class SpikeRule:
    """Judges the values of one curve, step by step.

    A value is a spike if it exceeds the median of the last ``window`` values by more than
    ``factor`` deviations: their median absolute deviation (MAD), or half of the distance from the
    median to the 95th percentile if that is more, as with data of several kinds. Spikes are not
    among these values, so one does not hide the next. The rule is silent for the first
    ``min_steps`` values, and about low values. ``min_steps`` spikes in a row are a new level: the
    rule begins anew with them.
    """

    def __init__(self, window: int, factor: float, min_steps: int):
        self.factor, self.min_steps = factor, min(min_steps, window)
        self._values: deque[float] = deque(maxlen=window)
        self._spikes: list[float] = []

    def judge(self, value: float) -> str:
        """Returns why the value is a spike; empty: it is none, or it is NaN or infinite."""
        if not math.isfinite(value):
            return ""
        if len(self._values) >= self.min_steps:
            known = sorted(self._values)
            middle, size = median(known), len(known)
            deviation = max(
                median(abs(each - middle) for each in known),
                (known[size * 95 // 100] - middle) / 2,
                FLOOR * abs(middle),
            )
            if deviation and value - middle > self.factor * deviation:
                self._spikes.append(value)
                if len(self._spikes) >= self.min_steps:
                    self._values.clear()
                    self._values.extend(self._spikes)
                    self._spikes.clear()
                return (
                    f"{value:.6g} is {(value - middle) / deviation:.3g} deviations of "
                    f"{deviation:.3g} above {middle:.6g}, the median of {size} steps"
                )
        self._spikes.clear()
        self._values.append(value)
        return ""
