"""What several pipeline stages hold alike, such as an embedding that is the head too: that it is alike.

    check_copies(weights)                   # by the checksums that were recorded; what has none is not judged
    check_copies(weights, read=True)        # what has none is read

Everything else takes such a tensor from the first stage that has it.
"""
from __future__ import annotations

from collections.abc import Mapping

from mindresume.errors import LoadError
from mindresume.files.checksum import tensor_checksum
from mindresume.reshard.geometry import Region, whole
from mindresume.reshard.weights import Place, Tensor, Weights


def check_copies(weights: Weights, read: bool = False) -> None:
    """LoadError that names a tensor whose copies in two pipeline stages are not the same, bit for bit, with both files; errors of
    ``Weights.place`` if a piece of a copy is nowhere."""
    for tensor in weights.tensors.values():
        if tensor.layout is None:               # a counter, or alike on all ranks by the records
            continue
        first, *others = (_places(weights, tensor, first) for first in (tensor.first, *tensor.also))
        for other in others:
            for piece, place in other.items():
                _compare(weights, tensor.name, first[piece], place, read)


def _places(weights: Weights, tensor: Tensor, first: int) -> Mapping[Region, Place]:
    """{piece: where it lies} in the stage that begins with rank ``first``; nothing is looked up of what one stage alone has."""
    cuts = tensor.cuts(whole(tensor.shape)) if tensor.also else ()
    return {cut.piece: weights.place(tensor.name, cut, first) for cut in cuts}


def _compare(weights: Weights, name: str, a: Place, b: Place, read: bool) -> None:
    sums = [place.checksum for place in (a, b)]
    if None in sums and not read:
        return
    if None in sums:
        sums = [_checksum(weights, place) for place in (a, b)]
    if sums[0] != sums[1]:
        raise LoadError(f"{weights.name}: {name} is held by several pipeline stages, and not alike: what rank {a.rank} has "
                        f"({a.path}, checksum {sums[0]}) is not what rank {b.rank} has ({b.path}, checksum {sums[1]}). Nobody "
                        f"knows which one is right; take another step")


def _checksum(weights: Weights, place: Place) -> str:
    with weights.storage.open(place.path) as file:
        return tensor_checksum(file, place.entry)
