"""Stores the logged loss of each step in few bytes, and thins it for a drawing."""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


def _none() -> np.ndarray:
    return np.empty(0)


@dataclass(frozen=True, eq=False)
class Losses:
    """Holds the losses of one attempt, in ascending order of steps. ``times``: when the line was written; ``seconds``: duration
    of the step."""
    steps: np.ndarray = field(default_factory=_none)
    values: np.ndarray = field(default_factory=_none)
    times: np.ndarray = field(default_factory=_none)
    seconds: np.ndarray = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def interval(self) -> int:
        """Steps between two lines: 1, unless the monitor prints less often, or a line is one sink."""
        return int(np.median(np.diff(self.steps))) if len(self) > 1 else 1

    @property
    def typical(self) -> float:
        """Seconds of an ordinary step: the median, because the first step includes the compilation."""
        return float(np.median(self.seconds)) if len(self) else 0.0

    @property
    def not_finite(self) -> int:
        """The number of losses that are nan or infinite."""
        return int(np.count_nonzero(~np.isfinite(self.values)))


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Returns ascending indices of at most ``most`` (at least 4) values: the first, the last, and the smallest and largest of
    each interval, so that no peak is lost. Values that are not finite are no extremes; an interval without finite values keeps
    its first."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(count), (most - 2) // 2):
        finite = stretch[np.isfinite(values[stretch])]
        kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])} if len(finite) else {int(stretch[0])}
    return np.array(sorted(kept))
