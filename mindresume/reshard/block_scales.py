"""Reads fp8 weights with a scale for each block of rows and columns, as DeepSeek-V3 and Qwen3-FP8 store them.

    tensors = with_scales(weights.tensors, (128, 128), "config.json")       # weights joined with their scales
    scale_blocks(values, scales, range(256, 384), range(7168), (128, 128))   # float32

The value of an element is ``float32(weight) * weight_scale_inv[row // rows, column // columns]``, computed in float32; the name
says "inverse", but it is the factor to multiply with.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mindresume.errors import LoadError
from mindresume.formatting import counted, listed
from mindresume.reshard.checkpoint_view import Tensor

FP8, SCALE = "float8_e4m3fn", "_scale_inv"          # X.weight has its scales in X.weight_scale_inv
SCALED = "bfloat16"                                 # dtype of the values if none is wanted, as in DeepSeek's own conversion
_SCALE_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ScaledTensor(Tensor):
    """Describes an fp8 tensor whose elements are multiplied by those of ``scale``, one for each ``block``."""
    scale: Tensor | None = None
    block: tuple[int, int] = (1, 1)


def with_scales(tensors: Mapping[str, Tensor], block: tuple[int, int] | None, source: str) -> dict[str, Tensor]:
    """Joins fp8 tensors with their scales, which are then no tensors of their own. Returns the tensors as they were if none of
    them is fp8 and none is a scale.

    Args:
        tensors: of a checkpoint, by name.
        block: rows and columns of one scale, as ``source`` says; None: it says nothing.
        source: the config.json.

    Raises:
        LoadError: names each fp8 tensor without scales, each scale without an fp8 tensor, and each scale of another shape or
            dtype.
    """
    found, problems = dict(tensors), []
    for name, tensor in tensors.items():
        if tensor.dtype != FP8:
            if name.endswith(SCALE) and getattr(tensors.get(name.removesuffix(SCALE)), "dtype", None) != FP8:
                problems.append(f"{name} is a scale, but {name.removesuffix(SCALE)} is not {FP8}")
            continue
        scale = found.pop(name + SCALE, None)
        if block is None:
            problems.append(f"{name} is {FP8}, but {source} has no quantization_config with weight_block_size")
        elif scale is None:
            problems.append(f"{name} is {FP8}, and its scales {name + SCALE} are missing")
        elif len(tensor.shape) != 2 or scale.shape != (expected := scales_shape(tensor.shape, block)):
            problems.append(f"{scale.name} is {scale.shape}, expected {expected if len(tensor.shape) == 2 else 'a matrix'}: "
                            f"{tensor.shape} in blocks of weight_block_size {list(block)} ({source})")
        elif scale.dtype not in _SCALE_DTYPES:
            problems.append(f"{scale.name} is {scale.dtype}, expected {' or '.join(_SCALE_DTYPES)}")
        else:
            found[name] = ScaledTensor(name, tensor.dtype, tensor.shape, tensor.layout, tensor.first, tensor.copies,
                                       tensor.other_stages, scale, block)
    if problems:
        raise LoadError(f"the fp8 weights of {source} cannot be read, {counted(len(problems), 'tensor')}: "
                        f"{listed(problems, 5, '; ')}")
    return found


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix."""
    return tuple(-(-size // each) for size, each in zip(shape, block, strict=True))


def scaled_dtype(tensor: Tensor) -> str:
    """Returns the dtype of a tensor's values: that of its bytes, or SCALED."""
    return SCALED if isinstance(tensor, ScaledTensor) else tensor.dtype


def scale_blocks(values: np.ndarray, scales: np.ndarray, rows: range, columns: range, block: tuple[int, int]) -> np.ndarray:
    """Returns ``values`` in float32, each multiplied by the scale of its block.

    Args:
        values: fp8, a part of a matrix.
        scales: float32, of the blocks from that of the first row and column to that of the last ones.
        rows: the rows of ``values`` in the matrix.
        columns: its columns in the matrix.
        block: rows and columns of one scale.
    """
    out = values.astype(np.float32)
    row_blocks, column_blocks = ((np.asarray(indices) // each) - indices[0] // each
                                 for indices, each in zip((rows, columns), block, strict=True))
    edges = [0, *(np.flatnonzero(np.diff(row_blocks)) + 1), len(rows)]
    for start, stop in zip(edges, edges[1:], strict=False):
        out[start:stop] *= scales[row_blocks[start]][column_blocks]
    return out
