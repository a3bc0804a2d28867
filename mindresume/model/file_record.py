"""Defines the entry of one file in a record or manifest: path, format, size and checksum."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from mindresume.errors import RecordError
from mindresume.model.record_codec import expect_checksum, expect_list
from mindresume.model.training_state import is_count

FORMATS = ("safetensors", "ckpt")      # formats of weight files, which are also the extensions of their names
MAX_FILES = 16                         # weight files of one rank
MAX_NAME = 255                         # bytes of a file name: the limit of all known file systems
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+")       # a file name: no folders, no control characters, UTF-8


@dataclass(frozen=True)
class FileRecord:
    """One weight file.

    Attributes:
        path: relative to the checkpoint root, with ``/``.
        format: one of FORMATS; ``json`` for a metadata file.
        size: in bytes; None for a file that mindformers wrote without mindresume.
        checksum: xxh3_128 of all bytes, in hex; None like ``size``.
    """
    path: str
    format: str
    size: int | None = None
    checksum: str | None = None

    def to_json(self) -> list[Any]:
        return [self.path, self.format, self.size, self.checksum]

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Reads the entry of any file below the root, recorded by mindresume or not. Raises RecordError if the path leaves the
        root."""
        path, fmt, size, checksum = expect_list(value, "file", 4)
        if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise RecordError(f"file path {path!r}"[:200] + " leaves the checkpoint folder")
        return cls(path, fmt, size, checksum)

    @classmethod
    def of_rank(cls, value: Any, rank: int) -> FileRecord:
        """Reads the entry of a weight file of ``rank``. Raises RecordError unless the file lies in the folder of that rank or
        beside the records: so no reader opens, and no removal deletes, anything else."""
        file = cls.from_json(value)
        folder, _, name = file.path.rpartition("/")
        if folder not in (f"rank_{rank}", "") or not _NAME.fullmatch(name):
            raise RecordError(f"file path {file.path!r}"[:200] + f" is neither a file in the folder rank_{rank} nor one "
                              f"without a folder")
        if len(name.encode()) > MAX_NAME:
            raise RecordError(f"file path {file.path!r}"[:200] + f" has a name of more than {MAX_NAME} bytes")
        if file.format not in FORMATS or not name.endswith(f".{file.format}"):
            raise RecordError(f"file path {file.path!r}"[:200] + f" has the format {file.format!r}"[:200] + f", expected "
                              f"{' or '.join(FORMATS)} and a name with that extension")
        return file._checked()

    @classmethod
    def metadata_file(cls, value: Any) -> FileRecord:
        """Reads the entry of a JSON file in a manifest. Raises RecordError unless the file lies beside the records."""
        file = cls.from_json(value)
        if not _NAME.fullmatch(file.path) or file.format != "json":
            raise RecordError(f"file path {file.path!r}"[:200] + " is not a metadata file: expected JSON beside the records")
        return file._checked()

    def _checked(self) -> FileRecord:
        """Returns this entry. Raises RecordError unless it has a size and a checksum."""
        if not is_count(self.size):
            raise RecordError(f"the size of {self.path} is {self.size!r}"[:400] + ", expected a number of bytes")
        expect_checksum(self.checksum, self.path)
        return self

    def below(self, folder: str) -> FileRecord:
        """Returns this entry with its path relative to the parent of ``folder``."""
        return replace(self, path=f"{folder}/{self.path}") if folder else self


def files_of_rank(value: Any, rank: int) -> tuple[FileRecord, ...]:
    """Reads the entries of one rank's files. Raises RecordError unless there are 1 to MAX_FILES with different paths."""
    files = tuple(FileRecord.of_rank(row, rank) for row in expect_list(value, "files"))
    if not 1 <= len({file.path for file in files}) == len(files) <= MAX_FILES:
        raise RecordError(f"rank {rank} has {len(files)} files: {', '.join(file.path for file in files)}"[:400] + f"; expected "
                          f"1 to {MAX_FILES} different ones")
    return files
