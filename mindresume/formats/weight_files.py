"""Reads headers, sizes and times of weight files."""
from __future__ import annotations

import os
from collections.abc import Iterable

from mindresume.errors import CorruptFileError, UnreadableFileError
from mindresume.model.file_record import FileRecord
from mindresume.storage.interface import Status, Storage
from mindresume.storage.operations import parallel
from mindresume.tensor_files import Header, read_header
from mindresume.tensor_files.checksum import file_checksum


def header_of(storage: Storage, root: str, file: FileRecord) -> Header:
    """Returns the header of a file. Raises CorruptFileError if it is missing, truncated or malformed; UnreadableFileError if that
    is not known."""
    path = os.path.join(root, file.path)
    try:
        with storage.open(path) as opened:
            return read_header(opened, path)
    except FileNotFoundError as error:
        raise CorruptFileError(path, "the file is missing") from error
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read: {error}") from error


def status_of(storage: Storage, root: str, file: FileRecord) -> Status | None:
    """Returns the status of a file, for display; None if it is missing or cannot be read."""
    try:
        return storage.status(os.path.join(root, file.path))
    except OSError:
        return None


def is_as_recorded(storage: Storage, path: str, file: FileRecord) -> bool:
    """Returns whether the file at ``path`` has the size and the checksum of ``file``. Its bytes are read only if its size is
    right: it can be sparse, of terabytes. Raises OSError, if it is missing, too."""
    with storage.open(path) as opened:
        return opened.seek(0, 2) == file.size and file_checksum(opened) == (file.checksum, file.size)


def file_sizes(storage: Storage, root: str, files: Iterable[FileRecord]) -> list[int | None]:
    """Returns the size of each file in bytes; None for a missing one."""
    found = parallel(storage, lambda file: storage.status(os.path.join(root, file.path)), files)
    return [status.size if status else None for status in found]


def sizes_match(storage: Storage, root: str, files: Iterable[FileRecord]) -> bool:
    """Returns whether all files exist with their recorded sizes (any size but 0 if none was recorded), without opening them."""
    files = list(files)
    return all(size and file.size in (None, size) for file, size in zip(files, file_sizes(storage, root, files), strict=True))
