"""Assigns every piece of every tensor to one of the ranks that hold it, so that replicas are not
written twice.

    mine = shares({name: (layout, shape, itemsize)}, ranks=128)[local_rank]

Every rank computes the same result, without communication, whatever the order of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter

from mindresume.model.layout import TensorLayout, ordinals

Held = tuple[TensorLayout | None, tuple[int, ...], int]


def shares(tensors: Mapping[str, Held], ranks: int) -> list[frozenset[str]]:
    """Returns, for each local rank of a pipeline stage of ``ranks`` ranks, the names that it
    writes; possibly none.

    Pieces with the fewest holders are assigned first, then the largest, then by name, each to the
    holder with the fewest bytes so far: pieces with many holders balance the loads.

    Args:
        tensors: {name: (layout, global shape, bytes of one element)}; layout None: replicated on
            all ranks.
    Raises:
        ValueError: a layout is of another number of ranks, or a shape does not divide.
    """
    if ranks < 1:
        raise ValueError(f"a stage of {ranks} ranks")
    everyone = [list(range(ranks))]
    known: dict[tuple[TensorLayout, tuple[int, ...]], tuple[list[list[int]], int]] = {}
    rows = []
    for name, (layout, shape, itemsize) in tensors.items():
        if layout is None:
            holders, elements = everyone, math.prod(shape)
        else:
            if (layout, shape) not in known:
                known[layout, shape] = _holders(layout, shape, ranks, name)
            holders, elements = known[layout, shape]
        rows += [
            (len(held), -elements * itemsize, name, number, held)
            for number, held in enumerate(holders)
        ]
    rows.sort(key=itemgetter(0, 1, 2, 3))
    loads = [0] * ranks
    found: list[set[str]] = [set() for _ in range(ranks)]
    for _, size, name, _, held in rows:
        rank = min(held, key=loads.__getitem__)  # the first of equal ones
        loads[rank] -= size
        found[rank].add(name)
    return list(map(frozenset, found))


def _holders(
    layout: TensorLayout, shape: tuple[int, ...], ranks: int, name: str
) -> tuple[list[list[int]], int]:
    """Returns (local ranks that hold each piece, ascending; elements of a piece)."""
    if layout.stage_size != ranks:
        raise ValueError(
            f"tensor {name}: its layout is of {layout.stage_size} ranks, the stage has {ranks}: "
            f"{layout}"
        )
    holders: list[list[int]] = [[] for _ in range(math.prod(layout.pieces(shape)))]
    for rank, number in enumerate(ordinals(layout, shape)):
        holders[number].append(rank)
    return holders, math.prod(layout.local_shape(shape))
