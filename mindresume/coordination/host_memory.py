"""Computes how much host memory one rank may use: the memory left on the host and in the containers
of this process, divided by the ranks that share it.

    share_of_rank(group)        # on all ranks together, at the start: bytes for this rank
    left()  # at any time: bytes that this process could take now if it were alone

The limit of a container is the lowest of its control group (version 1 or 2) and of all visible ones
above it. File cache counts as left, as in MemAvailable: the kernel reclaims it before it kills a
process.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results

UNKNOWN = sys.maxsize
_NO_LIMIT = 1 << 60  # version 1 writes a number near 2^63
# one part in so many of what is left is for everything else that grows
RESERVE = 10


@dataclass(frozen=True)
class Level:
    """The host, or a control group. ``key``: the same on all ranks that are in it, and on no other;
    ``left`` in bytes."""

    key: str
    left: int


def share_of_rank(group: Group, root: str = "/") -> int:
    """Returns the bytes for this rank if every rank takes its share; ``UNKNOWN`` if the kernel
    gives no numbers. A collective."""
    rows = gather_results(group, lambda: {level.key: level.left for level in levels(root)})
    found = UNKNOWN
    for key in rows[group.rank]:
        sharing = [row[key] for row in rows if key in row]
        left = min(sharing)  # the ranks read it at slightly different moments
        found = min(found, (left - left // RESERVE) // len(sharing))
    return found


def left(root: str = "/") -> int:
    """Returns the bytes left now; ``UNKNOWN`` if the kernel gives no numbers."""
    return min((level.left for level in levels(root)), default=UNKNOWN)


@runtime.asks_machine
def levels(root: str = "/") -> list[Level]:
    """Returns the host and every control group of this process that has a limit, as far as they can
    be read. ``root``: the folder of ``proc`` and ``sys``."""
    available = _table(os.path.join(root, "proc/meminfo")).get("MemAvailable")
    host = [] if available is None else [Level(f"host {_kernel(root)}", available << 10)]
    return [*host, *(level for version in _VERSIONS for level in _control_groups(root, version))]


@dataclass(frozen=True)
class _Version:
    """A version of control groups: type of its file system, controller; names of its files; prefix
    of the rows of the cache."""

    kind: str
    controller: str
    limits: tuple[str, ...]
    usage: str
    prefix: str


_VERSIONS = (
    _Version("cgroup2", "", ("memory.max", "memory.high"), "memory.current", ""),
    _Version("cgroup", "memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
)


def _control_groups(root: str, version: _Version) -> Iterator[Level]:
    for folder in _folders(root, version):
        table = _table(os.path.join(folder, "memory.stat"))
        limits = [_number(os.path.join(folder, name)) for name in version.limits]
        # of version 1: groups above, too
        limits.append(table.get("hierarchical_memory_limit"))
        limit = min((limit for limit in limits if limit is not None), default=_NO_LIMIT)
        used = _number(os.path.join(folder, version.usage))
        if used is None or limit >= _NO_LIMIT:
            continue
        used -= sum(table.get(f"{version.prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        with suppress(OSError):
            # the same in every container of one kernel
            found = os.stat(folder)
            yield Level(
                f"control group {found.st_dev}:{found.st_ino} of {_kernel(root)}",
                max(0, limit - max(0, used)),
            )


def _kernel(root: str) -> str:
    """Returns the identity of one boot of one kernel; its containers have other host names."""
    return _text(os.path.join(root, "proc/sys/kernel/random/boot_id")) or runtime.gethostname()


def _folders(root: str, version: _Version) -> Iterator[str]:
    """Yields the control groups of this process in the hierarchy of a version, up to its mount
    point."""
    controller = version.controller
    groups = [
        line.split(":", 2)
        for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines()
        if line.count(":") >= 2
    ]
    own = next(
        (path for _, controllers, path in groups if controller in controllers.split(",")), None
    )
    if own is None:
        return
    for line in _text(os.path.join(root, "proc/self/mountinfo")).splitlines():
        mount, _, system = line.partition(" - ")
        fields, options = mount.split(" "), system.split(" ")
        if len(fields) < 6 or len(options) < 3 or options[0] != version.kind:
            continue
        if controller and controller not in options[2].split(","):
            continue
        top = os.path.normpath(os.path.join(root, _unescaped(fields[4]).lstrip("/")))
        above = _unescaped(fields[3])
        below = os.path.relpath(own, above)
        folder = os.path.normpath(os.path.join(top, "" if below.startswith("..") else below))
        # the paths are of another namespace
        if not os.path.isdir(folder):
            folder = top
        yield folder
        while len(folder) > len(top):
            folder = os.path.dirname(folder)
            yield folder
        return


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _number(path: str) -> int | None:
    """Returns a number; None: no such file, or "max"."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _table(path: str) -> dict[str, int]:
    """Returns {name: number} of lines "name number" or "name: number kB"."""
    rows = [line.replace(":", " ").split() for line in _text(path).splitlines()]
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


def _text(path: str) -> str:
    """Returns the content of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""
