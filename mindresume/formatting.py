"""Formats numbers, lists and names for people."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters, marks that change the direction of text or have no width, and lone surrogates
# (Python keeps bytes of a name that are not UTF-8 as U+DC80 to U+DCFF).
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

# 32 digits that are no part of a path: folders are named like that, too
_CHECKSUM = re.compile(r"(?<![\w/.-])([0-9a-f]{8})[0-9a-f]{24}(?![\w/-]|\.\w)")


def shown(text: object, keep: str = "") -> str:
    r"""Returns ``text`` in a form that is safe to print: hidden characters, except those in
    ``keep``, become escapes such as ``\x1b``. Names and file contents are untrusted: they must
    neither control a terminal nor cause an encoding error."""
    return _HIDDEN.sub(
        lambda found: found[0] if found[0] in keep else _escape(ord(found[0])), str(text)
    )


def _escape(code: int) -> str:
    byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code
    return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{byte:04x}"


def size_text(size: float | None) -> str:
    """Returns a size in bytes as text, such as '1.5 GiB'; '?' for None."""
    if size is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def with_short_checksums(text: str) -> str:
    """Returns ``text`` with the first 8 digits of each checksum of 32: two that differ differ there
    almost surely. Paths stay whole."""
    return _CHECKSUM.sub(r"\1...", text)


def shortened(text: str, most: int) -> str:
    """Returns ``text``, or the first ``most`` characters of it and ' ...'."""
    return text if len(text) <= most else text[:most] + " ..."


def listed(items: Sequence[object], most: int = 8, separator: str = ", ") -> str:
    """Returns the first ``most`` of ``items`` as text, such as '1, 2, 5 and 3 more'."""
    text = separator.join(map(str, items[:most]))
    return text + (f" and {len(items) - most} more" if len(items) > most else "")


def counted(count: int, noun: str) -> str:
    """Returns '1 file' or '4 files'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def ranks_count(count: int) -> str:
    """Returns '1 rank' or '4 ranks'."""
    return counted(count, "rank")


def span_text(seconds: float) -> str:
    """Returns '0.32 s', '47 s', '12 min 05 s', '3 h 20 min' or '2 d 4 h'."""
    if seconds < 10:
        return f"{max(seconds, 0):.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def stall_text(seconds: float) -> str:
    """Returns how long a save stops the training: '0.39 s', or '4.2 ms'."""
    return span_text(seconds) if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"
