"""One file of tensors, safetensors or MindSpore's ckpt: what is in it, where, and the bytes of a new one.

    with open(path, "rb") as file:
        header = read_header(file, path)                              # every name, dtype, shape and byte range, checked
        weight = read_tensor(file, header.tensors["embedding.weight"])
        step = read_scalar(file, header, "step_num")
    for name, piece in encode("ckpt", {"embedding.weight": weight}, {"run": "7"}):
        out.write(piece)

dtypes go by numpy's names (``float32``, ``bfloat16``, ``bool``); ckpt has ``str`` besides, a text.
"""
from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import BinaryIO

import numpy as np

from mindresume.errors import CorruptFileError
from mindresume.model.file_record import FORMATS
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

__all__ = ["CHUNK", "FilePart", "FilePlan", "Header", "TensorEntry", "TensorSpec", "encode", "encoded_size", "format_of",
           "plan_file",
           "read_header", "read_scalar", "read_tensor", "tensor_spec"]

_MAX_SCALAR = 1 << 20       # bytes of a text that stands for one value; a file of terabytes may claim to be one


def format_of(path: str | os.PathLike[str]) -> str:
    """``"safetensors"`` or ``"ckpt"`` by the extension; ValueError for any other."""
    extension = os.path.splitext(os.fspath(path))[1].removeprefix(".")
    _module(extension, path)
    return extension


def read_header(file: BinaryIO, path: str) -> Header:
    """Names, dtypes, shapes and byte ranges of all tensors, in the order of the file; no tensor is read.

    ``file``: opened in binary mode, seekable; ``path`` decides the format and is what errors name. CorruptFileError
    unless the file is complete and consistent. What this cannot see: altered tensor bytes, and a ckpt written by
    MindSpore that was cut exactly between two tensors (one written by ``encode`` then lacks its metadata).
    """
    return _module(format_of(path), path).read_header(file, path)


def read_tensor(file: BinaryIO, entry: TensorEntry) -> np.ndarray:
    """A fresh C-contiguous array of the entry's shape and dtype, 0-d included; a ``str`` entry comes as a 0-d text
    array. CorruptFileError if the file ends before the tensor does."""
    raw = np.empty(entry.nbytes, np.uint8)
    read_ranges(file, entry.ranges, memoryview(raw))
    if entry.dtype == "str":
        return np.array(_text(raw.tobytes(), file_name(file)))
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def read_scalar(file: BinaryIO, header: Header, name: str) -> int | float | str | None:
    """The value of a tensor of one element (any number of dimensions) or of a text; None if there is none of that name.
    CorruptFileError if it has more or fewer elements, or the text more than 1 MiB: then nothing of it is read."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if math.prod(entry.shape) != 1 or entry.nbytes > _MAX_SCALAR:
        raise CorruptFileError(file_name(file), f"{name} should be one number, found shape {entry.shape}, {entry.nbytes} bytes",
                               tensor=name)
    return read_tensor(file, entry).item()


def encode(fmt: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]
           ) -> Iterator[tuple[str | None, memoryview]]:
    """The pieces of the file in order, each with the name of the tensor whose bytes it holds (None: header bytes).

    Pieces have at most ``CHUNK`` bytes, so that a piece is still in the cache when it is hashed and then written. They
    are views of the arrays: contiguous arrays are not copied, others one at a time. An empty tensor has one empty
    piece. Arrays must not change until the last piece is consumed. ValueError, at the call and before the first piece,
    for a format, dtype, byte order, name or metadata that cannot be written.
    """
    return _pieces(plan_file(fmt, {name: tensor_spec(name, array) for name, array in tensors.items()}, metadata), tensors)


def encoded_size(fmt: str, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> int:
    """Bytes of the file that ``encode`` makes of the same arguments; ValueError as there."""
    return plan_file(fmt, {name: tensor_spec(name, array) for name, array in tensors.items()}, metadata).size


def plan_file(fmt: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FilePlan:
    """The file that ``encode`` makes of tensors like these, without any of their bytes. ValueError as there. In a safetensors
    file wide dtypes come first, then names in order; a ckpt keeps the order of ``specs``."""
    return _module(fmt).plan_file(specs, metadata)


def _pieces(plan: FilePlan, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str | None, memoryview]]:
    name, data = None, memoryview(b"")
    for part in plan.parts:
        if part.name is not None and part.name != name:         # one at a time: an array may have to be copied for it
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
