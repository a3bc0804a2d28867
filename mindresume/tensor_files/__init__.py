"""Reads and writes one file of tensors, in safetensors or MindSpore's ckpt format.

    with open(path, "rb") as file:
        header = read_header(file, path)                              # every name, dtype, shape and byte range, checked
        weight = read_tensor(file, header.tensors["embedding.weight"])
        step = read_scalar(file, header, "step_num")
    for name, piece in encode("ckpt", {"embedding.weight": weight}, {"run": "7"}):
        out.write(piece)

dtypes have numpy's names (``float32``, ``bfloat16``, ``bool``); ckpt also has ``str``, a text.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import BinaryIO

import numpy as np

from mindresume.errors import CorruptFileError
from mindresume.model.manifest import FORMATS
from mindresume.tensor_files import ckpt, safetensors
from mindresume.tensor_files.header import (
    CHUNK,
    DTYPES,
    FilePart,
    FilePlan,
    Header,
    TensorEntry,
    TensorSpec,
    chunks,
    file_name,
    read_ranges,
    tensor_bytes,
    tensor_spec,
)

__all__ = ["CHUNK", "FilePart", "FilePlan", "Header", "TensorEntry", "TensorSpec", "encode", "encode_plan", "format_of",
           "plan_arrays", "plan_file", "read_header", "read_scalar", "read_tensor", "tensor_spec"]

_MAX_SCALAR = 1 << 20       # bytes of a text; a tensor of terabytes may claim to be one


def format_of(path: str | os.PathLike[str]) -> str:
    """Returns ``"safetensors"`` or ``"ckpt"`` by the extension. Raises ValueError for any other extension."""
    extension = os.path.splitext(os.fspath(path))[1].removeprefix(".")
    _module(extension, path)
    return extension


def read_header(file: BinaryIO, path: str) -> Header:
    """Reads names, dtypes, shapes and byte ranges of all tensors, in the order of the file, but no tensor.

    Args:
        file: opened in binary mode, seekable.
        path: decides the format, and is named in errors.

    Raises:
        CorruptFileError: The file is incomplete or inconsistent. Not detected: altered tensor bytes, and a ckpt written by
            MindSpore that was truncated exactly between two tensors (one written by ``encode`` then lacks its metadata).
    """
    return _module(format_of(path), path).read_header(file, path)


def read_tensor(file: BinaryIO, entry: TensorEntry) -> np.ndarray:
    """Returns a new C-contiguous array of the entry's shape and dtype (0-d if the shape is empty); a 0-d text array for a ``str``
    entry. Raises CorruptFileError if the file ends before the tensor does."""
    raw = np.empty(entry.nbytes, np.uint8)
    read_ranges(file, entry.ranges, memoryview(raw))
    if entry.dtype == "str":
        return np.array(_text(raw.tobytes(), file_name(file)))
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def read_scalar(file: BinaryIO, header: Header, name: str) -> int | float | str | None:
    """Returns the value of a text, or of a tensor with one element (of any number of dimensions); None if there is no tensor
    of that name. Raises CorruptFileError, before reading the tensor, if it has another number of elements, or a text has more
    than 1 MiB."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if math.prod(entry.shape) != 1 or entry.nbytes > _MAX_SCALAR:
        raise CorruptFileError(file_name(file), f"expected one number in {name}, found shape {entry.shape}, {entry.nbytes} bytes",
                               tensor=name)
    return read_tensor(file, entry).item()


def encode(fmt: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
           ) -> Iterator[tuple[str | None, memoryview]]:
    """Yields the pieces of the file in order, each with the name of the tensor whose bytes it holds (None: header bytes).

    Pieces have at most ``CHUNK`` bytes, so that a piece is still in the CPU cache when it is hashed and then written. They are
    views of the arrays: contiguous arrays are not copied, others are copied one at a time. An empty tensor has one empty piece.
    Arrays must not change until the last piece is consumed. Raises ValueError, at the call and before the first piece, for a
    format, dtype, byte order, name or metadata that cannot be written.
    """
    return encode_plan(plan_arrays(fmt, tensors, metadata), tensors)


def plan_arrays(fmt: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> FilePlan:
    """Returns the layout of the file that ``encode`` makes of these arguments. Raises ValueError like ``encode``."""
    return plan_file(fmt, {name: tensor_spec(name, array) for name, array in tensors.items()}, metadata)


def plan_file(fmt: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FilePlan:
    """Returns the layout of the file that ``encode`` makes of such tensors, without their bytes. A safetensors file has wide
    dtypes first, then names in order; a ckpt keeps the order of ``specs``. Raises ValueError like ``encode``."""
    return _module(fmt).plan_file(specs, metadata)


def encode_plan(plan: FilePlan, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str | None, memoryview]]:
    """Yields the pieces of the file of ``plan``, see ``encode``."""
    name, data = None, memoryview(b"")
    for part in plan.parts:
        if part.name is not None and part.name != name:         # at most one array is copied at a time
            name, data = part.name, tensor_bytes(tensors[part.name])
        whole = memoryview(part.data) if part.name is None else data[part.start:part.start + part.count]
        for piece in chunks(whole):
            yield part.name, piece


def _module(fmt: str, path: str | os.PathLike[str] | None = None) -> ModuleType:
    if fmt not in FORMATS:
        where = f"{os.fspath(path)}: extension" if path is not None else "format"
        raise ValueError(f"{where} {fmt!r} is not one of {', '.join(FORMATS)}")
    return {"safetensors": safetensors, "ckpt": ckpt}[fmt]


def _text(raw: bytes, path: str) -> str:
    try:
        return raw.decode("utf-32-le")
    except UnicodeDecodeError as error:
        raise CorruptFileError(path, f"a text is not UTF-32: {error}") from error
