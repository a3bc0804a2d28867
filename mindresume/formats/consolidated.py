"""Reads complete, unsharded weights: a folder of tensor files with or without an index, or one
file.

    part0.safetensors ... hyper_param.safetensors param_name_map.json
        of MindSpore's unified_safetensors
    model-00001-of-00003.safetensors ... model.safetensors.index.json
        of Hugging Face
    conversion.json
        in a folder that mindresume converted: the manifest of the conversion (docs/format.md)

mindformers 1.9.0 needs the following to resume from such a folder (``resume_training: True``,
without a name; ``load_ckpt_format: safetensors``; if parallel ``auto_trans_ckpt: True``): no name
in it that begins with ``rank_``, and ``hyper_param.safetensors`` with ``loss_scale``,
``epoch_num``, ``step_num``, ``global_batch_size`` (``trainer/utils.py:373``; KeyError without one)
and ``global_step`` (without it the optimizer counts from 0). In parallel, ``param_name_map.json``
names the file of every tensor in the target's strategy; a tensor that is not named, or not in its
file, is skipped (mindspore ``transform_safetensors.py:1601``). In a single process, every
``*.safetensors`` in the folder is loaded and the map is not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from mindresume.errors import ConfigError, CorruptFileError, RecordError
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import content_of
from mindresume.formats.scan import (
    MISSING,
    OF_RANKS,
    OTHER_FILE,
    WEIGHT_FILE,
    kind_of,
    tensor_files,
)
from mindresume.formats.weight_files import SCALARS, header_of, scalars_of
from mindresume.formatting import listed
from mindresume.model.layout import MAX_AXES
from mindresume.model.manifest import FORMATS, FileRecord, read_head
from mindresume.storage import Storage, parallel
from mindresume.tensor_files.header import MAX_HEADER, Header, parse_object
from mindresume.typed import Checksum, Count, Limits, RelativePath, decode

HYPER, MAP = "hyper_param.safetensors", "param_name_map.json"
MINDSPORE = "mindspore"
HUGGINGFACE = "huggingface"
CONVERSION = "conversion.json"
MAX_CONVERSION = 256 << 20  # bytes: it holds the checksums of all tensors
FILES = "files"
FILE = "file"
_HF_INDEX = ".safetensors.index.json"
_ACCUMULATED = "accu_grads"  # name prefix of gradient accumulation buffers


@dataclass(frozen=True)
class ConsolidatedWeights:
    """Consolidated weights in a folder, or in one file.

    Attributes:
        root: the folder, also for a single file.
        files: names in it, sorted, HYPER last.
        tensors: {tensor name: file}.
        headers: by file.
        scalars: the counters among SCALARS that exist.
        kind: the index that was read (MINDSPORE, HUGGINGFACE); FILES without an index; FILE if one
            file was given.
        notes: sentences for the log about files and tensors that were ignored.
    """

    root: str
    files: tuple[str, ...]
    tensors: Mapping[str, str]
    headers: Mapping[str, Header]
    scalars: Mapping[str, int | float]
    kind: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Index:
    """An index. ``files``: {tensor: file}; ``flat``: without ``weight_map``, as mindformers writes
    it when it translates names."""

    path: str
    files: Mapping[str, str]
    flat: bool


# ---- reading -------------------------------------------------------------------------------------


def read_consolidated(storage: Storage, path: str) -> ConsolidatedWeights:
    """Reads the index and the headers of consolidated weights. Of the tensors, reads only SCALARS.

    Raises:
        ConfigError: ``path`` is not such a folder or file, or does not tell which of its files
            belong to the weights.
        CorruptFileError: A file is missing or damaged, index and files contradict each other, or a
            tensor occurs twice. Names file and tensor.
    """
    what = kind_of(storage, path)
    if what == MISSING:
        raise ConfigError(
            f"{path}: no such file or folder; give a folder of consolidated weights, or one file"
        )
    if what in OF_RANKS:
        raise ConfigError(
            f"{path}: expected consolidated weights, found files of ranks, which may be sharded; "
            "give the folder that holds the rank folders, to resume from it"
        )
    if what == OTHER_FILE:
        raise ConfigError(
            f"{path}: expected a folder, or a file with extension {' or '.join(FORMATS)}"
        )
    if what == WEIGHT_FILE:
        folder, name = os.path.split(path)
        return _read(CheckpointDir(storage, folder or "."), [name], None, FILE, [])
    names = storage.list(path)
    index, kind, notes = _index_of(CheckpointDir(storage, path), names)
    files = tensor_files(names)
    if index is not None:
        named = {*index.files.values(), *({HYPER} & set(files))}
        if ignored := [name for name in files if name not in named]:
            notes.append(
                f"{path}: {listed(ignored, 1)} not named by {os.path.basename(index.path)}; ignored"
            )
        present = set(names)
        for tensor, file in index.files.items():
            if file not in present:
                raise CorruptFileError(
                    os.path.join(path, file),
                    f"the file is missing; {os.path.basename(index.path)} says that "
                    f"it holds tensor {tensor}",
                    tensor=tensor,
                )
        files = sorted(named)
    if not files:
        raise ConfigError(
            f"{path}: no file with extension {' or '.join(FORMATS)} in this folder; expected "
            "consolidated weights"
        )
    return _read(CheckpointDir(storage, path), files, index, kind, notes)


def _read(
    directory: CheckpointDir, files: list[str], index: _Index | None, kind: str, notes: list[str]
) -> ConsolidatedWeights:
    formats = {os.path.splitext(file)[1]: file for file in reversed(files)}
    if len(formats) > 1:
        raise ConfigError(
            f"{directory.root}: expected files of one format, found "
            f"{' and '.join(sorted(formats.values()))}; move those of one format to another folder"
        )
    files = sorted(files, key=lambda file: (file == HYPER, file))
    records = [FileRecord(file, os.path.splitext(file)[1].removeprefix(".")) for file in files]
    headers = dict(
        zip(files, parallel(directory.storage, partial(header_of, directory), records), strict=True)
    )
    found: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor in found:
                raise CorruptFileError(
                    directory.path(file),
                    f"tensor {tensor} is in {found[tensor]} too, expected in one "
                    f"file only; does this folder mix files of several steps or ranks?",
                    tensor=tensor,
                )
            found[tensor] = file
    if index is not None:
        found, unlisted = _by_index(directory.root, found, index)
        if unlisted:
            notes.append(
                f"{directory.root}: {listed(unlisted, 1)} not named by "
                f"{os.path.basename(index.path)}; ignored"
            )
    if not found:
        raise ConfigError(f"{directory.root}: no tensor in {listed(files, 1)}")
    if cut := [
        tensor
        for tensor, file in found.items()
        if file == HYPER and tensor.startswith(_ACCUMULATED)
    ]:
        notes.append(
            f"{directory.path(HYPER)}: {listed(cut, 1)} hold only rank 0's part: MindSpore does "
            "not merge them"
        )
    scalars: dict[str, int | float] = {}
    for record in records:
        here = [name for name in SCALARS if found.get(name) == record.path]
        if here:
            scalars |= scalars_of(directory, record, headers[record.path], here)
    return ConsolidatedWeights(
        directory.root, tuple(files), found, headers, scalars, kind, tuple(notes)
    )


def _by_index(
    root: str, found: Mapping[str, str], index: _Index
) -> tuple[dict[str, str], list[str]]:
    """Returns {tensor: file} in the order of the index, then the tensors of HYPER, which MindSpore
    does not list; and the other tensors."""
    for tensor, file in index.files.items():
        if found.get(tensor) != file:
            where = (
                f"it is in {found[tensor]}" if tensor in found else "no file of the index holds it"
            )
            raise CorruptFileError(
                os.path.join(root, file),
                f"tensor {tensor} should be in it, says {os.path.basename(index.path)}; {where}",
                tensor=tensor,
            )
    hyper = {tensor: file for tensor, file in found.items() if file == HYPER}
    return {**index.files, **hyper}, [
        tensor for tensor in found if tensor not in index.files and tensor not in hyper
    ]


# ---- the index -----------------------------------------------------------------------------------


def _index_of(directory: CheckpointDir, names: list[str]) -> tuple[_Index | None, str, list[str]]:
    """Returns the index to use, its kind, and notes."""
    hubs = [name for name in names if name.endswith(_HF_INDEX) and not name.startswith(".")]
    if len(hubs) > 1:
        raise ConfigError(
            f"{directory.root}: expected one index, found {' and '.join(hubs)}; move all but one "
            "to another folder"
        )
    ours = (
        _read_index(directory.storage, directory.path(MAP), flat_too=True) if MAP in names else None
    )
    hub = _read_index(directory.storage, directory.path(hubs[0]), flat_too=False) if hubs else None
    if ours is None or hub is None:
        return ours or hub, MINDSPORE if ours else HUGGINGFACE if hub else FILES, []
    for tensor, file in ours.files.items():
        if hub.files.get(tensor, file) != file:
            raise CorruptFileError(
                ours.path,
                f"it says that tensor {tensor} is in {file}, but {hubs[0]} says in "
                f"{hub.files[tensor]}; remove the one that is wrong",
                tensor=tensor,
            )
    if different := [
        tensor
        for tensor in (*ours.files, *hub.files)
        if tensor not in ours.files or tensor not in hub.files
    ]:
        # mindformers writes the map, with the names of its own network, into a Hugging Face folder
        # that it loads (utils/safetensors/convert_safetensors.py:_convert_index_json); the files
        # keep their names.
        if ours.flat and set(ours.files.values()) == set(hub.files.values()):
            return (
                hub,
                HUGGINGFACE,
                [
                    f"{ours.path}: names translated by mindformers; ignored, {hubs[0]} has those "
                    "in the files"
                ],
            )
        raise CorruptFileError(
            ours.path,
            f"it and {hubs[0]} do not name the same tensors: {different[0]} is in one only; remove "
            f"the one that is wrong",
            tensor=different[0],
        )
    return ours, MINDSPORE, []


def _read_index(storage: Storage, path: str, flat_too: bool) -> _Index:
    """Reads an index. Raises CorruptFileError unless it maps tensors to tensor files in the same
    folder. ``flat_too``: a document without ``weight_map`` is the map itself, as MindSpore reads
    it."""
    data = content_of(storage, path, MAX_HEADER)
    if len(data) > MAX_HEADER:
        raise CorruptFileError(path, f"an index has at most {MAX_HEADER} bytes, this one has more")
    document = parse_object(data, path, "the index")
    flat = flat_too and "weight_map" not in document
    files: Any = document if flat else document.get("weight_map")
    if not isinstance(files, dict):
        raise CorruptFileError(
            path, f"weight_map should map tensors to files, found {files!r}"[:400]
        )
    for tensor, file in files.items():
        if not isinstance(file, str) or "/" in file or "\0" in file or not tensor_files([file]):
            raise CorruptFileError(
                path,
                f"tensor {tensor} should be in a file of this folder with extension "
                f"{' or '.join(FORMATS)}, found {file!r}"[:400],
                tensor=tensor,
            )
    return _Index(path, files, flat)


# ---- the manifest of a conversion ----------------------------------------------------------------


@dataclass(frozen=True)
class ConversionManifest:
    """The result of a conversion.

    Args:
        fingerprint: of everything that determined the bytes.
        what: describes the source.
        files: with sizes and checksums; paths relative to the folder.
        tensors: {name: checksum}, for consolidated weights only.
        shapes: {name: (dtype, shape)} of the same.
        arrangement: {key: value} as in ``TrainingState``, for consolidated weights.
    """

    fingerprint: str
    what: str
    files: tuple[FileRecord, ...]
    tensors: Mapping[str, Checksum] = field(default_factory=dict)
    arrangement: Mapping[str, bool] = field(default_factory=dict)
    shapes: Mapping[str, tuple[str, Annotated[tuple[Count, ...], Limits(0, MAX_AXES)]]] = field(
        default_factory=dict
    )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ConversionManifest:
        """Reads the JSON object. RecordError if a field is missing or impossible."""
        rows = decode(
            tuple[tuple[RelativePath, Count, Checksum], ...],
            value.get("files"),
            "conversion: files",
        )
        made = decode(cls, {**value, "files": []}, "conversion")
        return replace(
            made,
            files=tuple(
                FileRecord(path, path.rpartition(".")[2], size, checksum)
                for path, size, checksum in rows
            ),
        )


def read_conversion_manifest(storage: Storage, folder: str) -> ConversionManifest | None:
    """Reads the manifest of a folder. Returns None if mindresume did not convert it.
    CorruptFileError if it cannot be read, because the expected content of the files is then
    unknown."""
    path = os.path.join(folder, CONVERSION)
    try:
        with storage.open(path) as file:
            return ConversionManifest.from_json(read_head(file, "conversion", MAX_CONVERSION)[0])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RecordError) as error:
        raise CorruptFileError(
            path,
            f"it cannot be read, and nothing else says what the files of this folder should be: "
            f"{error}. To go by their headers and sizes alone, remove it",
        ) from error


def conversion_manifest_of(storage: Storage, path: str) -> ConversionManifest | None:
    """Reads the manifest of consolidated weights, a folder or one file of it. Returns None if
    mindresume did not write them. Raises the errors of ``read_conversion_manifest``."""
    status = storage.status(path)
    if status is None or status.is_folder:
        made = read_conversion_manifest(storage, path)
        return made if made and made.tensors else None  # without tensors: rank folders
    folder, name = os.path.split(path)
    made = read_conversion_manifest(storage, folder or ".")
    files = tuple(file for file in made.files if file.path == name) if made and made.tensors else ()
    return replace(made, files=files) if made and files else None


def check_contents(made: ConversionManifest, weights: ConsolidatedWeights) -> None:
    """Raises CorruptFileError unless consolidated weights have the tensors that were written, with
    their dtypes and shapes, in files of the size that was written: an index and a header can be
    altered too, and checksums of tensors cover bytes alone. ``made``: of a single file of them, the
    names in other files are not compared."""
    sizes = {file.path: file.size for file in made.files}
    for name, header in weights.headers.items():
        if sizes.get(name, header.size) != header.size:
            raise CorruptFileError(
                os.path.join(weights.root, name),
                f"it has {header.size} bytes, {sizes[name]} were written",
            )
    for name, file in weights.tensors.items():
        entry = weights.headers[file].tensors[name]
        written = made.shapes.get(name)
        if written not in (None, (entry.dtype, entry.shape)):
            raise CorruptFileError(
                os.path.join(weights.root, file),
                f"{name} is {entry.dtype} of shape {entry.shape}, "
                f"{written[0]} of shape {written[1]} was written: its header was changed",
                tensor=name,
            )
    gone = (
        [name for name in made.tensors if name not in weights.tensors]
        if weights.kind != FILE
        else []
    )
    more = [name for name in weights.tensors if name not in made.tensors]
    if gone or more:
        differing = (
            f"{listed(gone, 3)} {'is' if len(gone) == 1 else 'are'} not found"
            if gone
            else f"{listed(more, 3)} not named"
        )
        raise CorruptFileError(
            os.path.join(weights.root, CONVERSION),
            f"it names {len(made.tensors)} tensors, the files and the "
            f"index {len(weights.tensors)}: {differing}",
            tensor=(gone or more)[0],
        )


# ---- writing: names and contents -----------------------------------------------------------------


def split(sizes: Mapping[str, int], part_bytes: int) -> list[list[str]]:
    """Distributes tensors over parts, in the given order, with up to ``part_bytes`` in each; a
    larger tensor has a part of its own. Raises ValueError unless ``part_bytes`` is positive.

    Args:
        sizes: bytes of each tensor.
        part_bytes: MindSpore uses about 3 GiB.
    """
    if part_bytes < 1:
        raise ValueError(f"part_bytes is {part_bytes}, expected at least 1")
    parts: list[list[str]] = []
    space_left = -1  # -1: even an empty tensor starts the first part
    for name, size in sizes.items():
        if size > space_left:
            parts.append([])
            space_left = part_bytes
        parts[-1].append(name)
        space_left -= size
    return parts


def part_name(index: int, count: int, kind: str) -> str:
    """Returns the name of part ``index`` (from 0) of ``count``: ``part0.safetensors``; or
    ``model-00001-of-00003.safetensors``, and ``model.safetensors`` for a single part."""
    if kind == MINDSPORE:
        return f"part{index}.safetensors"
    return f"model-{index + 1:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"


def index_document(
    kind: str, weight_map: Mapping[str, str], total_size: int
) -> tuple[str, dict[str, Any]]:
    """Returns file name and JSON value of the index. MindSpore indents by 4; Hugging Face has no
    index for a single file.

    Args:
        kind: MINDSPORE or HUGGINGFACE.
        weight_map: {tensor: file}, without the tensors in HYPER.
        total_size: bytes of all tensors in ``weight_map``.
    """
    return MAP if kind == MINDSPORE else f"model{_HF_INDEX}", {
        "metadata": {"total_size": total_size},
        "weight_map": dict(weight_map),
    }


def is_hyper(name: str, layout_known: bool, elements: int) -> bool:
    """Returns whether a tensor belongs into HYPER. MindSpore puts all tensors there that rank 0's
    file holds and the source's strategy does not name, and loads them unsharded on every rank,
    after the parts, overwriting them.

    Args:
        name: of the tensor.
        layout_known: the strategy names it, or the source has one rank and so no strategy: its
            weights must go into parts, else they could not be loaded into another layout.
        elements: a single number is never sharded, so it can always be in HYPER; the counters must
            be.
    """
    return name in SCALARS or not layout_known or elements <= 1
