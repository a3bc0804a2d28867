"""Layouts of every kind that axes can express, for hypothesis."""

import math

from hypothesis import assume
from hypothesis import strategies as st

from mindresume.model.layout import TensorLayout


@st.composite
def cuts(draw):
    """Draws (layout, a non-empty global shape that it divides), with every combination of axes."""
    matrix = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    assume(math.prod(matrix) <= 32)
    axes, maps = draw(st.permutations(range(len(matrix)))), []
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(0, min(2, len(axes))))
        taken, axes = tuple(axes[:count]), axes[count:]
        maps.append(-1 if not taken else taken[0] if count == 1 else taken)
    replicas = TensorLayout(matrix, maps).replicas
    shards = draw(
        st.sampled_from([-1, 0] + [n for n in range(1, replicas + 1) if replicas % n == 0])
    )
    layout = TensorLayout(matrix, maps, shards)
    return layout, tuple(
        draw(st.integers(1, 3)) * count for count in layout.counts([0] * len(maps))
    )


def representable(layout):
    """Returns whether the minor ``optimizer_slices`` of the replicas end within one axis, at a
    divisor of it."""
    if layout.optimizer_slices == 1:
        return True
    left = layout.copies
    for axis in layout.unused_axes:
        size = layout.device_matrix[len(layout.device_matrix) - 1 - axis]
        if left % size and size % left:
            return False
        if left % size:
            return True
        left //= size
    return True
