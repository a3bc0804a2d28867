"""Numbers as people read them."""
from __future__ import annotations


def size_text(size: float | None) -> str:
    if size is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
