"""Checks that tensors that several pipeline stages hold, such as an embedding that is also the head, are alike.

    check_replicas(weights)                 # by the recorded checksums; tensors without are not compared
    check_replicas(weights, read=True)      # tensors without a recorded checksum are read

All other code takes such a tensor from the first stage that holds it.
"""
from __future__ import annotations

from collections.abc import Mapping

from mindresume.errors import LoadError
from mindresume.reshard.checkpoint_view import CheckpointView, PieceLocation, Tensor
from mindresume.reshard.geometry import Region, whole
from mindresume.tensor_files.checksum import tensor_checksum


def check_replicas(weights: CheckpointView, read: bool = False) -> None:
    """Raises LoadError, with tensor and both files, if its copies in two pipeline stages differ in a bit; errors of
    ``CheckpointView.locate`` if a piece of a copy is missing."""
    for tensor in weights.tensors.values():
        if tensor.layout is None:               # a counter, or alike on all ranks by the records
            continue
        first, *others = (_places(weights, tensor, first) for first in (tensor.first, *tensor.other_stages))
        for other in others:
            for piece, place in other.items():
                _compare(weights, tensor.name, first[piece], place, read)


def _places(weights: CheckpointView, tensor: Tensor, first: int) -> Mapping[Region, PieceLocation]:
    """Returns {piece: location} in the stage that begins with rank ``first``; empty for a tensor of one stage."""
    cuts = tensor.cuts(whole(tensor.shape)) if tensor.other_stages else ()
    return {cut.piece: weights.locate(tensor.name, cut, first) for cut in cuts}


def _compare(weights: CheckpointView, name: str, a: PieceLocation, b: PieceLocation, read: bool) -> None:
    sums = [place.checksum for place in (a, b)]
    if None in sums and not read:
        return
    if None in sums:
        sums = [_checksum(weights, place) for place in (a, b)]
    if sums[0] != sums[1]:
        raise LoadError(f"{weights.name}: {name} is held by several pipeline stages and differs: rank {a.rank} has checksum "
                        f"{sums[0]} ({a.path}), rank {b.rank} has {sums[1]} ({b.path}). Which one is right is unknown; take "
                        f"another step")


def _checksum(weights: CheckpointView, place: PieceLocation) -> str:
    with weights.storage.open(place.path) as file:
        return tensor_checksum(file, place.entry)
