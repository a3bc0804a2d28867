"""Tells whether all nodes see the same folder, by the configuration: SHARED_PATHS, and the kind of file system it lies on.

mindformers asks this before a conversion and where it saves (utils/file_utils.py, is_publicly_accessible_path). It compares
beginnings of texts, so that ``/data`` stands for ``/data01`` too, and knows NFS alone. For saving and resuming nothing is taken
for granted: there a file that all ranks look for decides.
"""
from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

# What many hosts mount at once. A FUSE file system is named fuse.NAME; dpc is the client of OceanStor and SFS Turbo.
SHARED_TYPES = frozenset((
    "nfs", "nfs4", "dpc", "lustre", "gpfs", "mmfs", "beegfs", "ceph", "cephfs", "ceph-fuse", "glusterfs", "sshfs", "juicefs",
    "cifs", "smb3", "smbfs", "ocfs2", "gfs2", "orangefs", "pvfs2", "panfs", "wekafs", "quobyte", "mfs", "afs", "curvefs",
    "cubefs", "alluxio-fuse", "obsfs", "s3fs"))
LOCAL_TYPES = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "ramfs", "overlay"))
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system. ``kind``: as the kernel names it, such as nfs4 or fuse.ceph."""
    point: str
    kind: str


def mounts(table: str = "/proc/self/mounts") -> list[Mount]:
    """Returns what is mounted, later ones over earlier ones. Empty where the system does not say."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.split(" ") for line in file]
    except OSError:
        return []
    return [Mount(_OCTAL.sub(lambda found: chr(int(found[1], 8)), row[1]), row[2]) for row in rows if len(row) > 2]


def within(path: str, folder: str) -> bool:
    """Returns whether ``path`` is ``folder`` or lies in it. Both absolute; whole components count: /data01 is not in /data."""
    return os.path.commonpath([path, folder]) == folder


def is_shared(path: str, shared_paths: str = "", mounted: Iterable[Mount] | None = None) -> bool:
    """Returns whether all nodes see ``path``. ``shared_paths``: the value of SHARED_PATHS, folders separated by commas. Relative
    and linked paths are resolved."""
    path = os.path.realpath(path)
    named = [os.path.realpath(folder.strip()) for folder in shared_paths.split(",") if folder.strip()]
    if any(within(path, folder) for folder in named):
        return True
    return filesystem_type(path, mounted) in SHARED_TYPES


def filesystem_type(path: str, mounted: Iterable[Mount] | None = None) -> str:
    """Returns the kind of the file system that holds ``path``, which is absolute and no link: of mounts the deepest decides.
    Empty: not known."""
    holding = [mount for mount in (mounts() if mounted is None else mounted) if os.path.isabs(mount.point) and
               within(path, os.path.normpath(mount.point))]
    deepest = max((len(os.path.normpath(mount.point)) for mount in holding), default=0)
    kind = next((mount.kind for mount in reversed(holding) if len(os.path.normpath(mount.point)) == deepest), "")
    return kind.lower().removeprefix("fuse.")


def is_local(path: str, mounted: Iterable[Mount] | None = None) -> bool:
    """Returns whether ``path`` is certain to lie on a disk or in memory of this host: what is written there is seen at once or
    never."""
    return filesystem_type(os.path.realpath(path), mounted) in LOCAL_TYPES
