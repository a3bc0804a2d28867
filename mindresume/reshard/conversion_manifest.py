"""Reads the manifest of a conversion, ``conversion.json`` in a folder that mindresume converted
(docs/format.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats.consolidated import FILE, ConsolidatedWeights, read_consolidated
from mindresume.formatting import listed
from mindresume.model.layout import MAX_AXES
from mindresume.model.manifest import FileRecord, read_head
from mindresume.reshard.checkpoint_view import CheckpointView, view_of_consolidated
from mindresume.storage.interface import Storage
from mindresume.typed import Checksum, Count, Limits, RelativePath, decode

CONVERSION = "conversion.json"
LIMIT = 256 << 20  # bytes: it holds the checksums of all tensors


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
            return ConversionManifest.from_json(read_head(file, "conversion", LIMIT)[0])
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


def read_weights(
    storage: Storage, path: str
) -> tuple[ConsolidatedWeights, CheckpointView, ConversionManifest | None]:
    """Reads consolidated weights of MindSpore or Hugging Face, a folder or a file. Returns them, a
    view of them, which compares what it reads with the checksums of the manifest, and the manifest;
    None if mindresume did not write them. Raises the errors of ``read_consolidated``, and
    CorruptFileError if other tensors were written."""
    found = read_consolidated(storage, path)
    view, made = view_of_consolidated(storage, found), conversion_manifest_of(storage, path)
    if made is not None:
        check_contents(made, found)
        view = replace(view, checksums=made.tensors)
        view.arrangement = dict(made.arrangement)
    return found, view, made


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
