"""What a folder that mindresume converted says of itself: ``conversion.json`` (docs/format.md)."""
from __future__ import annotations

import os
from typing import Any

from mindresume.errors import RecordError
from mindresume.manifest import unseal
from mindresume.store.storage import Storage

CONVERSION = "conversion.json"
LIMIT = 256 << 20                   # bytes of it: checksums of all tensors


def read_conversion(storage: Storage, folder: str) -> dict[str, Any] | None:
    """What a folder was converted from: fingerprint, what, files [path, size, checksum], of complete weights tensors {name:
    checksum}. None if it was not, or the file is damaged."""
    try:
        with storage.open(os.path.join(folder, CONVERSION)) as file:
            return unseal(file, "conversion", LIMIT)[0]
    except (OSError, RecordError):
        return None


def checksums(storage: Storage, folder: str) -> dict[str, str]:
    """Of the tensors of complete weights that mindresume merged; empty for others."""
    found = (read_conversion(storage, folder) or {}).get("tensors")
    return found if isinstance(found, dict) else {}
