"""What a folder that mindresume converted says of itself: ``conversion.json`` (docs/format.md)."""
from __future__ import annotations

import os
from typing import Any

from mindresume.errors import RecordError
from mindresume.manifest import FileRecord, field_errors, unseal
from mindresume.state import is_count
from mindresume.store.storage import Storage

CONVERSION = "conversion.json"
LIMIT = 256 << 20                   # bytes of it: checksums of all tensors
MAX_TEXT = 1 << 16                  # characters


def read_conversion(storage: Storage, folder: str) -> dict[str, Any] | None:
    """What a folder was converted from: fingerprint, what, files [path, size, checksum], of complete weights tensors {name:
    checksum}. None if it was not, or no conversion can have written this file: nobody then looks at the paths in it."""
    try:
        with storage.open(os.path.join(folder, CONVERSION)) as file:
            return checked(unseal(file, "conversion", LIMIT)[0])
    except (OSError, RecordError):
        return None


def checked(value: dict[str, Any]) -> dict[str, Any]:
    """The head of a conversion. RecordError if a field is missing or wrong, or a path leaves the folder."""
    with field_errors("conversion"):
        texts, sums = [value["fingerprint"], value["what"]], value.get("tensors") or {}
        if not all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts) or not isinstance(sums, dict):
            raise RecordError("conversion: fingerprint and what are texts, tensors is an object")
        for path, size, checksum in value["files"]:
            FileRecord.from_json([path, "", size, checksum])
            if not is_count(size) or not isinstance(checksum, str):
                raise RecordError(f"conversion: {path!r}"[:200] + " has no size and checksum")
        if not all(isinstance(checksum, str) for checksum in sums.values()):
            raise RecordError("conversion: tensors maps names to checksums")
    return value


def checksums(storage: Storage, folder: str) -> dict[str, str]:
    """Of the tensors of complete weights that mindresume merged; empty for others."""
    found = (read_conversion(storage, folder) or {}).get("tensors")
    return found if isinstance(found, dict) else {}
