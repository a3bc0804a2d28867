"""Defines what a record or a manifest says of one file: path, format, size and checksum."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from mindresume.errors import RecordError
from mindresume.model.record_codec import expect_checksum, expect_list
from mindresume.model.training_state import is_count

FORMATS = ("safetensors", "ckpt")      # of a file of weights, and the extension of its name
MAX_FILES = 16                         # files of weights of one rank
MAX_NAME = 255                         # bytes of a file name, on every file system we know
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+")       # of a file: no folders, no control characters, UTF-8


@dataclass(frozen=True)
class FileRecord:
    """One file of weights. ``path``: relative to the checkpoint root, with ``/``. ``size`` in bytes and ``checksum``
    (xxh3_128 of all bytes, hex) are None for a file that mindformers wrote without us."""
    path: str
    format: str
    size: int | None = None
    checksum: str | None = None

    def to_json(self) -> list[Any]:
        return [self.path, self.format, self.size, self.checksum]

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Reads any file below the root, recorded by mindresume or not. RecordError if the path leaves the root."""
        path, fmt, size, checksum = expect_list(value, "file", 4)
        if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise RecordError(f"file path {path!r}"[:200] + " leaves the checkpoint folder")
        return cls(path, fmt, size, checksum)

    @classmethod
    def of_rank(cls, value: Any, rank: int) -> FileRecord:
        """Reads a file of weights of ``rank``. RecordError unless it lies in the folder of that rank or beside the records, so
        that no reader looks elsewhere and no removal deletes anything else."""
        file = cls.from_json(value)
        folder, _, name = file.path.rpartition("/")
        if folder not in (f"rank_{rank}", "") or not _NAME.fullmatch(name):
            raise RecordError(f"file path {file.path!r}"[:200] + f" is not that of a file in the folder rank_{rank}, or of one "
                              f"without a folder")
        if len(name.encode()) > MAX_NAME:
            raise RecordError(f"file path {file.path!r}"[:200] + f" has a name of more than {MAX_NAME} bytes")
        if file.format not in FORMATS or not name.endswith(f".{file.format}"):
            raise RecordError(f"file path {file.path!r}"[:200] + f" has the format {file.format!r}"[:200] + f", expected "
                              f"{' or '.join(FORMATS)} and a name that ends so")
        return file._checked()

    @classmethod
    def metadata_file(cls, value: Any) -> FileRecord:
        """Reads a JSON file that a manifest names beside the weights. RecordError unless it lies beside the records."""
        file = cls.from_json(value)
        if not _NAME.fullmatch(file.path) or file.format != "json":
            raise RecordError(f"file path {file.path!r}"[:200] + " is not that of a metadata file: JSON, beside the records")
        return file._checked()

    def _checked(self) -> FileRecord:
        if not is_count(self.size):
            raise RecordError(f"the size of {self.path} is {self.size!r}"[:400] + ", expected a number of bytes")
        expect_checksum(self.checksum, self.path)
        return self

    def below(self, folder: str) -> FileRecord:
        """Returns this record with its path relative to the parent of ``folder``."""
        return replace(self, path=f"{folder}/{self.path}") if folder else self


def files_of_rank(value: Any, rank: int) -> tuple[FileRecord, ...]:
    """Reads the files of one rank. RecordError unless there are 1 to MAX_FILES, with different paths."""
    files = tuple(FileRecord.of_rank(row, rank) for row in expect_list(value, "files"))
    if not 1 <= len({file.path for file in files}) == len(files) <= MAX_FILES:
        raise RecordError(f"rank {rank} has {len(files)} files: {', '.join(file.path for file in files)}"[:400] + f"; expected "
                          f"1 to {MAX_FILES} different ones")
    return files
