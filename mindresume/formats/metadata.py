"""Reads and writes ``metadata.json`` of Checkpoint 2.0: the parameters, how each is sharded, and
which files hold each slice.

    {"state_dict_metadata": {name:
        {"properties": {"dtype", "replica_id", "allow_shape_mismatch", "allow_to_save"},
         "global_shape", "axis_fragmentations", "layout": {"device_matrix", "tensor_map",
         "interleaved_parallel", "alias_name", "rank_list"}, "chunk": [{"global_offset": [ordinal],
         "local_shape"}, one for each slice]}},
     "storage_data": {"('name', (ordinal,))": [{"file_name", "storage_rank", "rank_group"}, one for
     each file with the slice]}}

``global_offset`` is an ordinal (``model.layout``). mindformers 1.8.0 writes no ``rank_group``;
2.1.0 may write null as layout.

The file has no version. Additional keys of a later version are ignored; a required key that it
lacks or changes is refused by name.

``metadata_from_records`` derives the content from the records of a checkpoint; ``missing_slices``
tells, if ranks are missing, a slice that no other rank holds.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats.iterations import METADATA, content_of
from mindresume.model.layout import (
    MAX_AXES,
    MAX_RANKS,
    Slices,
    TensorLayout,
    fold_optimizer_shards,
    holders,
    is_scalar,
    ordinals,
)
from mindresume.model.manifest import MAX_NAME, Details, TensorRecord
from mindresume.storage import Storage
from mindresume.tensor_files.header import DTYPES, parse_object
from mindresume.typed import is_count

MAX_METADATA = 1 << 30  # bytes; mindformers writes one line per rank of each group
MAX_VALUES = 1 << 27  # and of keys: it describes each slice of each rank
# mindformers uses str(type).lower(): "Float32" equals "float32", and its names of 8-bit floats have
# no "_".
_DTYPES = {name.replace("_", ""): name for name in DTYPES}
_ALIASES = "abcdefghijklmnopqrstuvwxyz"
_FILE = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+\.safetensors")
_KEY = re.compile(
    r"\((?P<name>(?P<quote>['\"]).*(?P=quote)), \((?P<number>0|[1-9][0-9]{0,5}),\)\)", re.DOTALL
)
_MAX_KEY = 1 << 16  # characters


class StoredSlice(NamedTuple):
    """One stored copy of a slice. ``rank``: its writer; ``group``: all ranks that hold the slice,
    () if unknown."""

    file: str
    rank: int
    group: tuple[int, ...] = ()


@dataclass(frozen=True)
class TensorMetadata:
    """Describes one parameter.

    Attributes:
        name: of the parameter.
        dtype: numpy name.
        shape: global.
        layout: None: not sharded, every rank holds all of it.
        first: first rank of the pipeline stage that ``layout`` belongs to (``rank_list[0]``); 0
            without layout. A parameter of several stages, such as a shared embedding, occurs once,
            with the layout of one stage and the copies of all.
        stored: by ordinal, at least one copy of every slice.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: TensorLayout | None
    first: int
    stored: Mapping[int, tuple[StoredSlice, ...]]


# ---- reading -------------------------------------------------------------------------------------


def read_metadata(data: bytes, path: str) -> dict[str, TensorMetadata]:
    """Returns {name: parameter} in the order of the file. Ignores unknown keys.

    Raises:
        CorruptFileError: For any bytes unless every parameter is described once and without
            contradiction, and every slice of it is stored. Storage of a parameter that is not
            described is refused too.
    """
    if not 0 < len(data) <= MAX_METADATA:
        raise CorruptFileError(
            path, f"it has {len(data)} bytes, expected a JSON object of 2 to {MAX_METADATA}"
        )
    return _Reader(path).read(parse_object(data, path, "the metadata", MAX_VALUES, MAX_VALUES))


class _Reader:
    """Reads one document; shares equal values between parameters."""

    def __init__(self, path: str):
        self.path = path
        self.cuts: dict[tuple[Any, ...], Slices] = {}
        self.files: set[str] = set()
        self.groups: dict[tuple[int, ...], tuple[int, ...]] = {}

    def read(self, value: Mapping[str, Any]) -> dict[str, TensorMetadata]:
        for key in ("state_dict_metadata", "storage_data"):
            if not isinstance(value.get(key), dict):
                raise CorruptFileError(
                    self.path, f"{key} is {_short(value.get(key))}, expected a JSON object"
                )
        rows: dict[str, Any] = value["state_dict_metadata"]
        # by name and ordinal the unchecked list of files
        copies: dict[str, dict[int, Any]] = {}
        for key, files in value["storage_data"].items():
            parsed = parse_slice_key(key)
            if parsed is None:
                raise CorruptFileError(
                    self.path,
                    f"storage_data has the key {_short(key)}, expected \"('name', (ordinal,))\"",
                )
            copies.setdefault(parsed[0], {})[parsed[1]] = files
        if lost := next((name for name in copies if name not in rows), None):
            raise CorruptFileError(
                self.path,
                f"storage_data has {_short(lost)}, not in state_dict_metadata",
                tensor=lost,
            )
        described = {}
        for name, row in rows.items():
            try:
                described[name] = self.described(name, row, copies.get(name, {}))
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                reason = (
                    str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                )
                raise CorruptFileError(
                    self.path, f"parameter {_short(name)}: {reason}"[:1000], tensor=name
                ) from error
        return described

    def described(self, name: str, row: Any, copies: Mapping[int, Any]) -> TensorMetadata:
        dtype = _needed(_needed(row, "properties"), "dtype")
        shape = _needed(row, "global_shape")
        if not isinstance(dtype, str) or dtype.lower().replace("_", "") not in _DTYPES:
            raise ValueError(f"dtype is {_short(dtype)}, expected one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype.lower().replace("_", "")]
        if (
            not isinstance(shape, list)
            or len(shape) > MAX_AXES
            or not all(map(is_count, shape))
            or math.prod(size for size in shape if size) * DTYPES[dtype].itemsize >= 2**63
        ):
            raise ValueError(
                f"global_shape is {_short(shape)}, expected the sizes of up to {MAX_AXES} "
                "dimensions"
            )
        layout, first = _layout(_needed(row, "layout"))
        key = layout, tuple(shape)
        cut = self.cuts[key] = self.cuts.get(key) or Slices(*key)
        if (parts := row.get("axis_fragmentations", list(cut.counts))) != list(cut.counts):
            raise ValueError(
                f"axis_fragmentations is {_short(parts)}, expected {list(cut.counts)}, by its "
                "layout"
            )
        _check_chunks(_needed(row, "chunk"), cut)
        if odd := next((number for number in copies if number >= cut.slices), None):
            raise ValueError(f"slice {odd} is stored, expected slices from 0 to {cut.slices - 1}")
        if absent := [number for number in range(cut.slices) if not copies.get(number)]:
            raise ValueError(
                f"slice {absent[0]} of {cut.slices} is stored nowhere, expected a file in "
                "storage_data"
            )
        stored = {
            number: self.stored(copies[number], number, cut, first) for number in range(cut.slices)
        }
        return TensorMetadata(name, dtype, tuple(shape), layout, first, stored)

    def stored(self, rows: Any, number: int, cut: Slices, first: int) -> tuple[StoredSlice, ...]:
        if not isinstance(rows, list):
            raise ValueError(
                f"slice {number} is stored in {_short(rows)}, expected a list of files"
            )
        copies, checked = [], None
        for row in rows:
            file = _needed(row, "file_name")
            rank = _needed(row, "storage_rank")
            group = self.group(row.get("rank_group"))
            if type(file) is not str or file not in self.files:
                _check_file(file)
                self.files.add(file)
            _check_rank(rank)
            odd = cut.rank_with_other_slice(
                number, first, (rank,) if group is checked else (rank, *group)
            )
            if odd is not None:
                raise ValueError(
                    f"slice {number} is assigned to rank {odd}, which has slice "
                    f"{cut.ordinals[odd - first]} by its layout"
                )
            checked = group
            copies.append(StoredSlice(file, rank, group))
        return tuple(copies)

    def group(self, value: Any) -> tuple[int, ...]:
        if value is None:
            return ()
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise ValueError(f"rank_group is {_short(value)}, expected a list of ranks")
        group = tuple(value)
        if group not in self.groups:
            for rank in group:
                _check_rank(rank)
            self.groups[group] = group
        return self.groups[group]


def _layout(value: Any) -> tuple[TensorLayout | None, int]:
    """Returns (layout, first rank). Raises ValueError, which names an unsupported feature."""
    if value is None:
        return None, 0
    matrix, cuts, ranks = (
        _needed(value, key) for key in ("device_matrix", "tensor_map", "rank_list")
    )
    aliases = value.get("alias_name")
    if (
        value.get("interleaved_parallel", False) is not False
        or isinstance(aliases, list)
        and "interleaved_parallel" in aliases
    ):
        raise ValueError(
            "interleaved_parallel is set: it is unknown which rank holds which part, this layout "
            "is not supported"
        )
    layout = TensorLayout.from_json(
        {"device_matrix": matrix, "tensor_map": cuts, "optimizer_shards": 0}
    ).normalized()
    if not isinstance(ranks, list) or len(ranks) != layout.stage_size:
        found = f"{len(ranks)} ranks" if isinstance(ranks, list) else _short(ranks)
        raise ValueError(
            f"rank_list is {found}, expected {layout.stage_size} for device_matrix "
            f"{list(layout.device_matrix)}"
        )
    for rank in ranks:
        _check_rank(rank)
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise ValueError(
            f"rank_list is {_short(ranks)}, expected ranks that follow each other: another order "
            "is not supported"
        )
    return layout, ranks[0]


def _check_chunks(chunks: Any, cut: Slices) -> None:
    if not isinstance(chunks, list) or len(chunks) != cut.slices:
        found = f"{len(chunks)} slices" if isinstance(chunks, list) else _short(chunks)
        raise ValueError(f"chunk is {found}, expected {cut.slices} by the layout")
    seen = set()
    for chunk in chunks:
        offset, shape = _needed(chunk, "global_offset"), _needed(chunk, "local_shape")
        if (
            not isinstance(offset, list)
            or len(offset) != 1
            or not is_count(offset[0], 0, cut.slices - 1)
            or shape != list(cut.lengths)
            or not all(map(is_count, shape))
        ):
            raise ValueError(
                f"global_offset is {_short(offset)}, local_shape {_short(shape)}, expected a list "
                f"of one number from 0 to {cut.slices - 1}, and {list(cut.lengths)} by the layout"
            )
        seen.add(offset[0])
    if len(seen) < cut.slices:
        raise ValueError(
            f"chunk has only the slices {_short(sorted(seen))}, expected {cut.slices} different "
            "ones"
        )


def _needed(row: Any, key: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(f"{_short(row)} where a JSON object with {key} was expected")
    if key not in row:
        raise ValueError(f"{key} is missing; found the keys {_short(list(row))}")
    return row[key]


def _check_file(name: Any) -> None:
    if not is_file_name(name):
        raise ValueError(
            f"file_name is {_short(name)}, expected the name of a .safetensors file in the same "
            "folder"
        )


def _check_rank(rank: Any) -> None:
    if not is_count(rank, 0, MAX_RANKS - 1):
        raise ValueError(
            f"a rank is {_short(rank)}, expected a whole number from 0 to {MAX_RANKS - 1}"
        )


def _short(value: Any) -> str:
    return repr(value)[:200]


# ---- writing -------------------------------------------------------------------------------------


def encode_metadata(tensors: Iterable[TensorMetadata]) -> list[bytes]:
    """Returns the file, in pieces, in the form that mindformers 1.8.0 and later read: their keys in
    their order, as they take the layout apart by position; one parameter per line. A parameter
    without layout is described as whole on a rank that stored it, as they do not accept null.

    Raises:
        ValueError: The result could not be read back, or mindformers would not find a slice: it
            looks for the first rank that holds it among the ranks that stored it and their groups
            (checkpoint/reshard.py:_find_file_for_rank).
    """
    writer = _Writer()
    heads = {}
    storage = []
    for tensor in tensors:
        if tensor.name in heads:
            raise ValueError(f"parameter {tensor.name!r} occurs twice")
        try:
            heads[tensor.name] = f"{_dump(tensor.name)}:{writer.head(tensor)}".encode()
            storage.append(writer.storage(tensor).encode())
        except ValueError as error:
            raise ValueError(f"parameter {tensor.name!r}: {error}") from error
    pieces = [
        b'{"state_dict_metadata":{\n',
        b",\n".join(heads.values()),
        b'\n},\n"storage_data":{\n',
        b",\n".join(storage),
    ]
    if (size := sum(map(len, pieces))) > MAX_METADATA - 9:
        raise ValueError(f"{size} bytes of metadata; at most {MAX_METADATA} can be read back")
    return [*pieces, b"\n}}\n"]


class _Writer:
    """Writes one document; encodes equal values only once."""

    def __init__(self) -> None:
        self.heads: dict[tuple[Any, ...], str] = {}
        self.cuts: dict[tuple[Any, ...], Slices] = {}
        self.files: dict[str, str] = {}
        self.groups: dict[tuple[int, ...], str] = {}

    def cut(self, tensor: TensorMetadata) -> Slices:
        key = tensor.layout, tensor.shape
        if key not in self.cuts:
            layout = tensor.layout and fold_optimizer_shards(tensor.layout)
            self.cuts[key] = Slices(layout, tensor.shape)
        return self.cuts[key]

    def head(self, tensor: TensorMetadata) -> str:
        first = (
            tensor.first
            if tensor.layout
            else min((copy.rank for copy in tensor.stored.get(0, ())), default=0)
        )
        key = tensor.layout, tensor.shape, tensor.dtype, first
        if key not in self.heads:
            if tensor.dtype not in DTYPES:
                raise ValueError(f"dtype {tensor.dtype!r}, expected one of {', '.join(DTYPES)}")
            cut = self.cut(tensor)
            layout = cut.layout or TensorLayout((1,), (-1,) * len(tensor.shape))
            _check_rank(first)
            _check_rank(first + layout.stage_size - 1)
            seen = [itertools.count() for _ in range(cut.slices)]
            replicas = [next(seen[number]) for number in cut.ordinals or (0,)]
            aliases = [
                _ALIASES[axis : axis + 1] or f"axis{axis}"
                for axis in range(len(layout.device_matrix))
            ]
            self.heads[key] = _dump(
                {
                    "properties": {
                        "dtype": tensor.dtype.replace("_", ""),
                        "replica_id": replicas,
                        "allow_shape_mismatch": False,
                        "allow_to_save": True,
                    },
                    "global_shape": tensor.shape,
                    "axis_fragmentations": cut.counts,
                    "layout": {
                        "device_matrix": layout.device_matrix,
                        "tensor_map": layout.tensor_map,
                        "interleaved_parallel": False,
                        "alias_name": aliases,
                        "rank_list": list(range(first, first + layout.stage_size)),
                    },
                    "chunk": [
                        {"global_offset": [number], "local_shape": cut.lengths}
                        for number in range(cut.slices)
                    ],
                }
            )
        return self.heads[key]

    def storage(self, tensor: TensorMetadata) -> str:
        cut = self.cut(tensor)
        ranks = cut.layout and holders(cut.layout, tensor.shape)
        if set(tensor.stored) != set(range(cut.slices)) or not all(tensor.stored.values()):
            raise ValueError(
                f"stored are the slices {_short(sorted(tensor.stored))}, expected all of "
                f"{cut.slices}"
            )
        slices = []
        for number in range(cut.slices):
            copies = tensor.stored[number]
            known = set(
                itertools.chain((copy.rank for copy in copies), *{copy.group for copy in copies})
            )
            odd = cut.rank_with_other_slice(number, tensor.first, known)
            if odd is not None:
                raise ValueError(f"rank {odd} holds another slice than {number}: {tensor.layout}")
            if ranks and tensor.first + ranks[number][0] not in known:
                raise ValueError(
                    f"slice {number}: rank {tensor.first + ranks[number][0]} is in no group of a "
                    "file that has it"
                )
            slices.append(
                f"{_dump(slice_key(tensor.name, number))}:[{','.join(map(self.entry, copies))}]"
            )
        return ",".join(slices)

    def entry(self, copy: StoredSlice) -> str:
        file, rank, group = copy
        if file not in self.files:
            _check_file(file)
            self.files[file] = _dump(file)
        if group not in self.groups:
            for other in group:
                _check_rank(other)
            self.groups[group] = _dump(group)
        _check_rank(rank)
        return (
            f'{{"file_name":{self.files[file]},"storage_rank":{rank},'
            f'"rank_group":{self.groups[group]}}}'
        )


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---- keys and files ------------------------------------------------------------------------------


def is_file_name(name: Any) -> bool:
    """Returns whether ``name`` can be a weight file in the same folder: a string without folders
    and control characters, in UTF-8."""
    return (
        isinstance(name, str)
        and _FILE.fullmatch(name) is not None
        and len(name.encode()) <= MAX_NAME
    )


def slice_key(name: str, ordinal: int) -> str:
    """Returns the key of a slice in ``storage_data`` of metadata.json (mindformers
    checkpoint/utils.py:get_sharded_tensor_shard_id)."""
    return str((name, (ordinal,)))


def parse_slice_key(key: str) -> tuple[str, int] | None:
    """Returns (name, ordinal) of a result of ``slice_key``, whatever quotes and commas the name
    has; None for any other text."""
    found = _KEY.fullmatch(key) if len(key) <= _MAX_KEY else None
    if not found:
        return None
    name = found["name"][1:-1]
    if "\\" in name:
        try:
            name = ast.literal_eval(found["name"])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    # Accepts only Python's own representation, so that a slice has exactly one key.
    return (
        (name, int(found["number"]))
        if isinstance(name, str) and repr(name) == found["name"]
        else None
    )


def load_metadata(storage: Storage, folder: str) -> dict[str, TensorMetadata]:
    """Reads ``metadata.json`` in ``folder``. Raises CorruptFileError if it is missing or
    damaged."""
    return read_metadata(load_metadata_bytes(storage, folder), os.path.join(folder, METADATA))


def load_metadata_bytes(storage: Storage, folder: str) -> bytes:
    """Reads the bytes of ``metadata.json``, up to its size limit. Raises CorruptFileError if it is
    missing, UnreadableFileError if that is not known."""
    return content_of(storage, os.path.join(folder, METADATA), MAX_METADATA)


# ---- from records --------------------------------------------------------------------------------


class HasDetails(Protocol):
    def details(self, rank: int) -> Details:
        """Returns the details of a rank's record."""


def metadata_from_records(
    files: Sequence[Sequence[str]], deduplicated: bool, records: HasDetails
) -> list[TensorMetadata]:
    """Describes every tensor that has a layout. The others are counters, which mindformers does not
    list either.

    All ranks of a stage hold the same tensors, so the details of one rank are read; those of all
    ranks if replicas were deduplicated. A tensor of several stages (a shared embedding) takes the
    layout of the first one, and the copies of those that shard it alike.

    Args:
        files: names of the files of each rank; a rank without files wrote nothing.
        deduplicated: some rank wrote only its share.
        records: of the ranks.

    Raises:
        RecordError: The stages differ in size, or no rank of a stage wrote anything.
    """
    anchor = next((rank for rank, names in enumerate(files) if names), 0)
    known = records.details(anchor)
    size = stage_size(known.tensors.values(), len(files))
    found: dict[str, TensorMetadata] = {}
    for first in range(0, len(files), size):
        ranks = [rank for rank in range(first, first + size) if files[rank]]
        if not ranks:
            raise RecordError(
                f"ranks {first} to {first + size - 1}, a whole pipeline stage, wrote nothing"
            )
        rows = {
            rank: known.tensors if rank == anchor else records.details(rank).tensors
            for rank in (ranks if deduplicated else ranks[:1])
        }
        for name in dict.fromkeys(name for table in rows.values() for name in table):
            writers = [rank for rank, table in rows.items() if name in table]
            row, before = rows[writers[0]][name], found.get(name)
            if row.layout is None or row.global_shape is None:
                continue
            if before is None and row.layout.stage_size != size:
                raise RecordError(
                    f"{name} is sharded over {row.layout.stage_size} ranks, other tensors over "
                    f"{size}"
                )
            if before is not None and (row.layout, row.global_shape, row.dtype) != (
                before.layout,
                before.shape,
                before.dtype,
            ):
                continue
            stored = _stored(files, rows, name, row, writers if deduplicated else ranks, first)
            if before is not None:
                stored = {
                    number: (*copies, *stored.get(number, ()))
                    for number, copies in before.stored.items()
                }
            found[name] = TensorMetadata(
                name,
                row.dtype,
                row.global_shape,
                row.layout,
                before.first if before else first,
                stored,
            )
    return list(found.values())


def missing_slices(files: Sequence[Sequence[str]], deduplicated: bool, records: HasDetails) -> str:
    """Returns a phrase for the data that a checkpoint of only some ranks lacks; empty if they wrote
    every slice of every tensor. A tensor with more than one element needs a layout: else the data
    of the other ranks is unknown. Arguments as for ``metadata_from_records``."""
    try:
        rows = metadata_from_records(files, deduplicated, records)
    except RecordError as error:
        return str(error)
    for row in rows:
        for number, ranks in enumerate(_groups(row.layout, row.shape, row.first)):
            if number not in row.stored:
                return f"a part of {row.name} was held by rank {', '.join(map(str, ranks))} alone"
    there = next(rank for rank, names in enumerate(files) if names)
    named = {row.name for row in rows}
    return next(
        (
            f"{name} {row.shape} has no layout"
            for name, row in records.details(there).tensors.items()
            if name not in named and not is_scalar(row.shape)
        ),
        "",
    )


def stage_size(rows: Iterable[TensorRecord], world_size: int) -> int:
    """Returns the number of ranks in a stage. Raises RecordError if it does not divide
    ``world_size``."""
    size = next((row.layout.stage_size for row in rows if row.layout), world_size)
    if world_size % size:
        raise RecordError(
            f"tensors are sharded over {size} ranks, which does not divide {world_size} ranks"
        )
    return size


def _stored(
    files: Sequence[Sequence[str]],
    rows: Mapping[int, Mapping[str, TensorRecord]],
    name: str,
    row: TensorRecord,
    writers: Iterable[int],
    first: int,
) -> dict[int, tuple[StoredSlice, ...]]:
    """Returns the stored slices of one tensor of a stage, by ordinal."""
    held = ordinals(row.layout, row.global_shape)
    groups = _groups(row.layout, row.global_shape, first)
    found: dict[int, tuple[StoredSlice, ...]] = {}
    for rank in writers:
        file = files[rank][rows[rank][name].file if rank in rows else row.file]
        number = held[rank - first]
        before = found.get(number, ())
        # readers need the group once
        found[number] = (*before, StoredSlice(file, rank, () if before else groups[number]))
    return found


@lru_cache(maxsize=1 << 12)
def _groups(
    layout: TensorLayout, shape: tuple[int, ...], first: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the ranks that hold each slice, by ordinal."""
    return tuple(tuple(first + local for local in ranks) for ranks in holders(layout, shape))
