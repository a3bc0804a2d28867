"""Balances a load: a slice that several ranks need is read from disk by one of them, which
broadcasts it.

    # the same plan on all ranks, no message
    mine, exchanges = plan_reads(regions, layouts, itemsizes, rank)
    arrays = read_regions(weights, mine)
    # collective: all ranks, in one order
    exchange_slices(arrays, exchanges, regions, dtypes, rank, broadcast)

Every rank of a pipeline stage knows the layouts of the whole stage. The reader of a slice is
assigned as its writer is with redundancy removal (``model.layout.shares``): the bytes are
spread evenly over the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mindresume.model.layout import Layouts, Region, elements, holders, ordinals, shape_of, shares
from mindresume.tensor_files.header import DTYPES

MAX_EXCHANGE_BYTES = 64 << 20  # bytes in one exchange

# (ranks, owner, bytes on the owner and None on the others, number of bytes) -> bytes, on each of
#     the ranks
Broadcast = Callable[[tuple[int, ...], int, np.ndarray | None, int], np.ndarray]


@dataclass(frozen=True)
class Exchange:
    """One broadcast from ``owner`` to ``ranks`` (ascending, with the owner): ``parts`` (name, first
    byte, end), together at most MAX_EXCHANGE_BYTES."""

    ranks: tuple[int, ...]
    owner: int
    parts: tuple[tuple[str, int, int], ...]

    @property
    def size(self) -> int:
        return sum(stop - start for _, start, stop in self.parts)


def plan_reads(
    regions: Mapping[str, Region],
    layouts: Layouts,
    itemsizes: Mapping[str, int],
    rank: int,
) -> tuple[dict[str, Region], list[Exchange]]:
    """Returns the regions that this rank reads, and the exchanges in which it takes part, in the
    order in which all ranks run them. Every rank reads a counter that is stored with another number
    of dimensions than its layout has.

    Args:
        regions: {name: region} that this rank needs.
        layouts: {name: (layout, global shape)} of this job.
        itemsizes: {name: bytes of an element}.
    """
    held = {
        name: (*layouts[name], itemsizes[name])
        for name, region in regions.items()
        if name in layouts
        and layouts[name][0].copies > 1
        and len(region) == len(layouts[name][1])
        and elements(region)
    }
    if not held:
        return dict(regions), []
    size = next(iter(held.values()))[0].stage_size
    first, table = rank - rank % size, shares(held, size)
    groups: dict[tuple[tuple[int, ...], int], list[str]] = {}
    mine = {name: region for name, region in regions.items() if name not in held}
    for name in sorted(held):
        layout, full, _ = held[name]
        local = holders(layout, full)[ordinals(layout, full)[rank - first]]
        owner = first + next(holder for holder in local if name in table[holder])
        groups.setdefault((tuple(first + holder for holder in local), owner), []).append(name)
        if owner == rank:
            mine[name] = regions[name]
    return mine, [
        exchange
        for (ranks, owner), names in sorted(groups.items())
        for exchange in _portions(ranks, owner, names, regions, itemsizes)
    ]


def _portions(
    ranks: tuple[int, ...],
    owner: int,
    names: list[str],
    regions: Mapping[str, Region],
    itemsizes: Mapping[str, int],
) -> Iterator[Exchange]:
    parts: list[tuple[str, int, int]] = []
    left = MAX_EXCHANGE_BYTES
    for name in names:
        start, end = 0, elements(regions[name]) * itemsizes[name]
        while start < end:
            stop = min(end, start + left)
            parts.append((name, start, stop))
            start, left = stop, left - (stop - start)
            if not left:
                yield Exchange(ranks, owner, tuple(parts))
                parts, left = [], MAX_EXCHANGE_BYTES
    if parts:
        yield Exchange(ranks, owner, tuple(parts))


def exchange_slices(
    arrays: dict[str, np.ndarray],
    exchanges: list[Exchange],
    regions: Mapping[str, Region],
    dtypes: Mapping[str, str],
    rank: int,
    broadcast: Broadcast,
) -> int:
    """Adds to ``arrays`` the slices that other ranks read. Returns the bytes received. This is a
    collective: all ranks must call it, so they must agree on earlier failures before."""
    received, flat = 0, {}
    for exchange in exchanges:
        own = exchange.owner == rank
        for name, start, _ in exchange.parts:
            if not start:
                size = elements(regions[name]) * DTYPES[dtypes[name]].itemsize
                flat[name] = (
                    arrays[name].reshape(-1).view(np.uint8) if own else np.empty(size, np.uint8)
                )
        views = [flat[name][start:stop] for name, start, stop in exchange.parts]
        found = broadcast(
            exchange.ranks, exchange.owner, np.concatenate(views) if own else None, exchange.size
        )
        if own:
            continue
        position = 0
        for view in views:
            view[:] = found[position : position + len(view)]
            position += len(view)
        received += position
    for name in flat.keys() - arrays.keys():
        arrays[name] = flat[name].view(DTYPES[dtypes[name]]).reshape(shape_of(regions[name]))
    return received
