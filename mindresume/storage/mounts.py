"""Tells whether all nodes see the same folder, from SHARED_PATHS and the type of the file system.

mindformers asks this before a conversion and where it saves (utils/file_utils.py,
is_publicly_accessible_path). mindformers compares string prefixes, so ``/data`` also matches
``/data01``, and it knows only NFS. Saving and resuming do not rely on this module: there the ranks
look for a probe file (``coordination.storage_topology``).
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from mindresume import runtime

# Network file systems. A FUSE file system is named fuse.NAME; dpc is the client of OceanStor and
# SFS Turbo.
SHARED_TYPES = frozenset(
    (
        "nfs",
        "nfs4",
        "dpc",
        "lustre",
        "gpfs",
        "mmfs",
        "beegfs",
        "ceph",
        "cephfs",
        "ceph-fuse",
        "glusterfs",
        "sshfs",
        "juicefs",
        "cifs",
        "smb3",
        "smbfs",
        "ocfs2",
        "gfs2",
        "orangefs",
        "pvfs2",
        "panfs",
        "wekafs",
        "quobyte",
        "mfs",
        "afs",
        "curvefs",
        "cubefs",
        "alluxio-fuse",
        "obsfs",
        "s3fs",
    )
)
LOCAL_TYPES = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay")
)
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system.

    Attributes:
        point: the mount point.
        kind: type as the kernel names it, such as nfs4 or fuse.ceph.
    """

    point: str
    kind: str


def mounts(table: str = "/proc/self/mounts") -> list[Mount]:
    """Returns the mounted file systems, in mount order: a later one hides an earlier one at the
    same point. Empty if ``table`` cannot be read."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.split(" ") for line in file]
    except OSError:
        return []
    return [
        Mount(_OCTAL.sub(lambda found: chr(int(found[1], 8)), row[1]), row[2])
        for row in rows
        if len(row) > 2
    ]


def within(path: str, folder: str) -> bool:
    """Returns whether ``path`` is ``folder`` or lies in it. Both must be absolute. Compares whole
    components: /data01 is not in /data."""
    return os.path.commonpath([path, folder]) == folder


def is_shared(path: str, shared_paths: str = "") -> bool:
    """Returns whether all nodes see ``path``.

    Args:
        path: relative paths and symbolic links are resolved.
        shared_paths: the value of SHARED_PATHS: folders separated by commas.
    """
    path = os.path.realpath(path)
    named = [
        os.path.realpath(folder.strip()) for folder in shared_paths.split(",") if folder.strip()
    ]
    if any(within(path, folder) for folder in named):
        return True
    return filesystem_type(path) in SHARED_TYPES


def filesystem_type(path: str) -> str:
    """Returns the type of the file system that holds ``path``, lower case, without "fuse."; empty
    if unknown. The deepest mount point decides. ``path`` must be absolute and resolved."""
    holding = [
        mount
        for mount in mounts()
        if os.path.isabs(mount.point) and within(path, os.path.normpath(mount.point))
    ]
    deepest = max((len(os.path.normpath(mount.point)) for mount in holding), default=0)
    kind = next(
        (
            mount.kind
            for mount in reversed(holding)
            if len(os.path.normpath(mount.point)) == deepest
        ),
        "",
    )
    return kind.lower().removeprefix("fuse.")


@runtime.asks_machine
def is_local(path: str) -> bool:
    """Returns whether ``path`` certainly lies on a disk or in memory of this host, where a change
    is visible at once."""
    return filesystem_type(os.path.realpath(path)) in LOCAL_TYPES
