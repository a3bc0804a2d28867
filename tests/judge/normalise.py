"""Replaces what differs between two runs of the same case: paths, times, processes, random tokens,
speeds. All else stays."""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Keys of JSON documents and fields of events whose values are of this machine and moment. None and
# False stay.
KEYS = frozenset(
    {
        "time",
        "saved_at",
        "since",
        "started",
        "pid",
        "process_id",
        "host",
        "machine",
        "folder",
        "beat",
        "process_started",
        "imported",
        "utc_offset_seconds",
        "budget_bytes",
        "cached_bytes",
        "kept_bytes",
        "memory_bytes",
        "read_at",
        "changed",
        "mtime",
        "seconds",
    }
)
SECONDS = re.compile(r"(^|_)seconds(_|$)")
# a JSON list or object that fits into one line is written in one
WIDTH = 150

BOX = re.compile(r"^│ | *│$")  # typer draws boxes, other versions of it other ones
TEXT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b(\d{4})-[0-9a-f]{8}\b", r"\1-<run>"),
        (r"\b\d{8}T\d{6}\.\d{3}-(rank|supervisor)_(\d+)-\d+\b", r"<start>-\1_\2-<pid>"),
        (r"\.[0-9a-f]{16}\.mindresume-tmp", ".<fingerprint>.mindresume-tmp"),
        (r"(\.kept-|trash-\S+?\.)[0-9a-f]{8}\b", r"\1<digits>"),
        (r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\.\d+)?Z?", "<time>"),
        (r"\b(process|pid) \d+\b", r"\1 <pid>"),
        (r"\b[\d.]+ ([KMGT]i?)?B/s", "<rate>"),
        (r"\b\d+\.\d+ s\b", "<seconds> s"),
        (r"\bin \d+ (s|ms)\b", r"in <number> \1"),
        (r"\b[0-9a-f]{32}\b|\b[0-9a-f]{8}\.\.\.", "<checksum>"),
        (r"mindresume-\d+/[0-9a-f]{16,32}", "mindresume-<uid>/<token>"),
    )
]


def text_of(text: str, folder: Path) -> str:
    """Returns ``text`` without what is of this run. ``folder``: where the case runs, written as
    TMP."""
    for path in {str(folder), os.path.realpath(folder)}:
        text = text.replace(path, "TMP")
    text = re.sub(
        r"REPOSITORY/mindresume/\S+",
        "REPOSITORY/mindresume/...",
        text.replace(str(ROOT), "REPOSITORY"),
    )
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "<host>", text)
    for pattern, replacement in TEXT:
        text = pattern.sub(replacement, text)
    lines = [
        BOX.sub("", line).rstrip() for line in text.splitlines() if not line.startswith(("╭", "╰"))
    ]
    return "\n".join(lines)


def value_of(value: Any, key: str = "") -> Any:
    """Returns a JSON value with placeholders in place of what is of this run."""
    if isinstance(value, dict):
        return {name: value_of(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [value_of(item, key) for item in value]
    if value in (None, False, "") or isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9+/=]{80,}", value):
        return f"{len(value)} characters"
    return (
        "_"
        if key in KEYS or key == "version" and isinstance(value, str) or SECONDS.search(key)
        else value
    )


def json_of(value: Any, folder: Path, recorded: bool = False) -> str:
    """Returns a JSON value as text, several lines only where one would be too long. ``recorded``:
    its times are the same each time."""
    return text_of(_lines(value if recorded else value_of(value), "", folder), folder)


def _lines(value: Any, indent: str, folder: Path) -> str:
    flat = json.dumps(value)
    if (
        len(indent) + len(text_of(flat, folder)) <= WIDTH
        or not isinstance(value, (dict, list))
        or not value
    ):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        rows = [
            f"{inner}{json.dumps(name)}: {_lines(item, inner, folder)}"
            for name, item in value.items()
        ]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return (
        "[\n" + ",\n".join(inner + _lines(item, inner, folder) for item in value) + f"\n{indent}]"
    )


def content_of(content: bytes) -> bytes:
    """Returns the bytes of a weight file without the run that its label names."""
    return re.sub(rb"\b(\d{4})-[0-9a-f]{8}\b", rb"\1-00000000", content)
