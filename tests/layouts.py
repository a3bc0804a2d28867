"""Layouts of every kind that axes can express, for hypothesis."""

import math

from hypothesis import strategies as st

from mindresume.model.layout import TensorLayout

MATRICES = st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(
    lambda matrix: math.prod(matrix) <= 32
)


@st.composite
def tensor_layouts(draw, matrices=MATRICES, tuples=False):
    """Draws unused, single and nested axes, and any optimizer shard. ``tuples``: single axes in a
    tuple, too."""
    matrix = draw(matrices)
    axes, maps = draw(st.permutations(range(len(matrix)))), []
    for _ in range(draw(st.integers(0, 3))):
        count = draw(st.integers(0, min(2, len(axes))))
        taken, axes = tuple(axes[:count]), axes[count:]
        is_single = count == 1 and not (tuples and draw(st.booleans()))
        maps.append(-1 if not taken else taken[0] if is_single else taken)
    replicas = TensorLayout(matrix, maps).replicas
    divisors = [n for n in range(1, replicas + 1) if replicas % n == 0]
    return TensorLayout(matrix, maps, draw(st.sampled_from([-1, 0, *divisors])))


@st.composite
def cuts(draw, matrices=MATRICES, least=1, tuples=False):
    """Draws (layout, a global shape that it divides); ``least``: 0 for empty tensors, too."""
    layout = draw(tensor_layouts(matrices, tuples))
    counts = layout.counts([0] * len(layout.tensor_map))
    return layout, tuple(draw(st.integers(least, 3)) * count for count in counts)


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
