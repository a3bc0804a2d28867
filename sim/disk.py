"""An in-memory file system: the visible state, and the state after a power loss.

    disk = Disk()
    disk.create("/c/.a.tmp", b"bytes"); disk.rename("/c/.a.tmp", "/c/a"); disk.sync("/c")
    disk.lose_power(lambda: False)              # undoes every change of a name that was not flushed

What survives follows the contract of ``mindresume.storage.Storage``, which is that of
POSIX and NFS: the bytes of a file once its flush returned, a name once its folder was flushed after
the change. Until then each change of a name survives or not, independently of the others; but
changes of one file or one name keep their order, as journals and servers guarantee. A rename
changes two names atomically.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import NoReturn

import xxhash

UNLIMITED = 1 << 60


class File:
    """``whole``: all bytes were flushed. Unflushed content may be lost or torn. ``written``: its
    bytes before they rotted; None: they did not. ``inode``: its number on its disk."""

    __slots__ = ("data", "mtime", "whole", "inode", "moved", "written", "_key")

    def __init__(self, data: bytes, mtime: float, whole: bool, inode: int = 0):
        self.data = data
        self.mtime = mtime
        self.whole = whole
        self.inode = inode
        self.moved: Change | None = None  # the last change of its name
        self.written: bytes | None = None
        self._key: int | None = None

    @property
    def key(self) -> int:
        if self._key is None:
            self._key = xxhash.xxh3_64_intdigest(self.data)
        return self._key

    def rot(self, position: int, bit: int) -> None:
        """Flips one bit. Neither the size nor a time changes."""
        written, data = self.data if self.written is None else self.written, bytearray(self.data)
        data[position] ^= 1 << bit
        self.data, self._key = bytes(data), None
        self.written = written if written != self.data else None


class Change:
    """One atomic operation on names. ``number``: position in the history of the disk. ``after``:
    earlier changes without which it cannot survive; empty once it is durable."""

    __slots__ = ("number", "after", "durable")

    def __init__(self, number: int, after: tuple[Change, ...] = ()):
        self.number = number
        self.after = after
        self.durable = False

    def make_durable(self) -> None:
        """Marks this change and all changes that it depends on as durable: no journal holds a
        rename of a file that has no name."""
        stack = [self]
        while stack:
            change = stack.pop()
            stack += change.after
            change.after, change.durable = (), True


class Folder:
    """``entries``: the visible names. ``base``: the durable state of the names that changed since
    the last flush. ``changes``: those changes, oldest first, each with the name it changed.
    ``latest``: the last change of each name. ``inode``: its number on its disk."""

    __slots__ = ("entries", "base", "changes", "latest", "moved", "mtime", "inode", "version")

    def __init__(self, mtime: float = 0.0, inode: int = 0):
        self.inode = inode
        self.entries: dict[str, Node] = {}
        self.base: dict[str, Node | None] = {}
        self.changes: list[tuple[Change, str, Node | None]] = []
        self.latest: dict[str, Change] = {}
        self.moved: Change | None = None
        self.mtime = mtime
        self.version = 0  # number of changes


Node = File | Folder


def fail(code: int, path: str) -> NoReturn:
    raise OSError(code, os.strerror(code), path)


class Disk:
    """The disk of a file server, or of one host (``local``: it sees every change at once).
    ``room``: bytes that can still be written. Paths are absolute and normalised. Methods raise
    OSError as the system calls do."""

    def __init__(self, room: int = UNLIMITED, local: bool = False):
        self.root = Folder()
        self.room, self.local = room, local
        self.now = 0.0  # seconds since 1970, by the clock of the server
        self.changed = 0  # number of visible changes
        self.rots = 0  # number of times that a bit rotted
        self._changes = self._inodes = 0

    # ---- reading ---------------------------------------------------------------------------------

    def find(self, path: str) -> Node | None:
        """Returns the file or folder at ``path``, or None."""
        node: Node = self.root
        try:
            for name in path.split("/"):
                if name:
                    node = node.entries[name]
        except (KeyError, AttributeError):  # no such name, or a file among the parents
            return None
        return node

    def folder(self, path: str) -> Folder:
        """Returns the folder at ``path``; raises ENOENT or ENOTDIR as a system call does."""
        node = self.find(path)
        if node is None:
            self.raise_missing(path)
        if not isinstance(node, Folder):
            fail(errno.ENOTDIR, path)
        return node

    def raise_missing(self, path: str) -> NoReturn:
        """Raises ENOTDIR if a parent of ``path`` is a file, else ENOENT."""
        above = path
        while above not in ("", "/"):
            above = os.path.dirname(above)
            if isinstance(self.find(above), File):
                fail(errno.ENOTDIR, path)
        fail(errno.ENOENT, path)

    def walk(self, path: str = "") -> Iterator[tuple[str, File]]:
        """Yields (path, file) for all files below ``path``, unordered."""
        node = self.find(path)
        if isinstance(node, File):
            yield path, node
            return
        stack = [(path, node)] if node is not None else []
        while stack:
            where, folder = stack.pop()
            for name, child in folder.entries.items():
                if isinstance(child, Folder):
                    stack.append((f"{where}/{name}", child))
                else:
                    yield f"{where}/{name}", child

    def signature(self, power: bool = True, unread: str = "/") -> int:
        """Returns a hash that is equal only for disks with the same visible content and, with
        ``power``, the same possible states after a power loss. Modification times do not count: no
        decision about our own checkpoints may depend on them. ``unread``: suffix of files whose
        content does not count either."""
        rows: list[str] = []
        seen: dict[int, int] = {id(self.root): 0}
        changes: dict[Change, int] = {}
        stack = [self.root]

        def name_of(name: str, node: Node | None) -> str:
            if node is None:
                return "-"
            if isinstance(node, File):
                return (
                    f"{'' if name.endswith(unread) else node.key}"
                    f"{'' if node.whole or not power else '?'}"
                    f"{'' if node.written is None else '~'}"
                )
            if id(node) not in seen:
                seen[id(node)] = len(seen)
                # also a folder that is invisible now: it may reappear
                stack.append(node)
            return f"d{seen[id(node)]}"

        def number(change: Change) -> str:
            return "!" if change.durable else str(changes.setdefault(change, len(changes)))

        while stack:
            folder = stack.pop()
            rows.append(f"[{seen[id(folder)]}")
            rows += [
                f"{name}={name_of(name, folder.entries[name])}" for name in sorted(folder.entries)
            ]
            if not power:
                continue
            rows += [f"!{name}={name_of(name, folder.base[name])}" for name in sorted(folder.base)]
            rows += [
                f"?{name}={name_of(name, node)} {number(change)} "
                f"{' '.join(map(number, change.after))}"
                for change, name, node in folder.changes
            ]
        return xxhash.xxh3_64_intdigest("\n".join(rows).encode())

    # ---- writing ---------------------------------------------------------------------------------

    def create(self, path: str, data: bytes = b"", whole: bool = True) -> File:
        """Creates a file, or replaces the content of an existing one."""
        folder, name = self._parent(path)
        if isinstance(folder.entries.get(name), Folder):
            fail(errno.EISDIR, path)
        if len(data) > self.room:
            fail(errno.ENOSPC, path)
        old = folder.entries.get(name)
        self.room += -len(data) + (len(old.data) if isinstance(old, File) else 0)
        made = File(data, self.now, whole, self._new_inode())
        self._set([(folder, name, made)])
        return made

    def fill(self, file: File, data: bytes, whole: bool, path: str) -> None:
        """Replaces the content of a file that is being written."""
        if len(data) - len(file.data) > self.room:
            fail(errno.ENOSPC, path)
        self.room -= len(data) - len(file.data)
        file.data = data
        file.whole = whole
        file.mtime = self.now
        file.written = None
        file._key = None
        self.changed += 1

    def rename(self, old: str, new: str) -> None:
        source, before = self._parent(old)
        target, after = self._parent(new)
        node, there = source.entries.get(before), target.entries.get(after)
        if node is None:
            fail(errno.ENOENT, old)
        if there is node:
            return
        if (new + "/").startswith(old + "/"):
            fail(errno.EINVAL, new)
        if isinstance(there, Folder):
            if (old + "/").startswith(new + "/"):
                fail(errno.ENOTEMPTY, new)
            if not isinstance(node, Folder):
                fail(errno.EISDIR, new)
            if there.entries:
                fail(errno.ENOTEMPTY, new)
        elif isinstance(there, File):
            if isinstance(node, Folder):
                fail(errno.ENOTDIR, new)
            self.room += len(there.data)
        self._set([(source, before, None), (target, after, node)])

    def remove(self, path: str) -> None:
        """Removes a file or an empty folder."""
        folder, name = self._parent(path)
        node = folder.entries.get(name)
        if node is None:
            fail(errno.ENOENT, path)
        if isinstance(node, Folder) and node.entries:
            fail(errno.ENOTEMPTY, path)
        if isinstance(node, File):
            self.room += len(node.data)
        self._set([(folder, name, None)])

    def make_folder(self, path: str) -> bool:
        """Creates one folder. Returns False if it exists."""
        folder, name = self._parent(path)
        node = folder.entries.get(name)
        if isinstance(node, Folder):
            return False
        if node is not None:
            fail(errno.EEXIST, path)
        self._set([(folder, name, Folder(self.now, self._new_inode()))])
        return True

    def _new_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def sync(self, path: str) -> None:
        """Makes all changes of the names in a folder durable."""
        node = self.folder(path)
        for change, _, _ in node.changes:
            change.make_durable()
        node.base.clear()
        node.changes.clear()
        node.latest.clear()

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, name = os.path.split(path)
        return self.folder(folder), name

    def _set(self, rows: list[tuple[Folder, str, Node | None]]) -> None:
        before = [folder.latest.get(name) for folder, name, _ in rows] + [
            node.moved for _, _, node in rows if node is not None
        ]
        self._changes += 1
        change = Change(
            self._changes,
            tuple(
                dict.fromkeys(
                    earlier for earlier in before if earlier is not None and not earlier.durable
                )
            ),
        )
        for folder, name, node in rows:
            folder.latest[name] = change
            if node is not None:
                node.moved = change
            folder.base.setdefault(name, folder.entries.get(name))
            folder.changes.append((change, name, node))
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
            folder.version += 1
            folder.mtime = self.now
        self.changed += 1

    def make_unreadable(self, number: int) -> None:
        """Does nothing: only the objects of a bucket can become unreadable."""

    # ---- power loss ------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Returns whether a power loss would change anything."""
        return any(
            not change.durable for folder in self._folders() for change, _, _ in folder.changes
        ) or any(not file.whole for _, file in self.walk())

    def _folders(self) -> Iterator[Folder]:
        stack = [self.root]
        while stack:
            folder = stack.pop()
            yield folder
            stack += [child for child in folder.entries.values() if isinstance(child, Folder)]

    def lose_power(
        self, survives: Callable[[], bool], torn: Callable[[bytes], bytes] = lambda data: b""
    ) -> None:
        """Applies a power loss. ``survives()`` decides for each unflushed change whether it stays;
        ``torn`` returns what is left of unflushed bytes."""
        used = sum(len(file.data) for _, file in self.walk())
        fates: dict[Change, bool] = {}
        for change in self._unflushed_changes():  # oldest first
            fates[change] = all(fates.get(earlier, True) for earlier in change.after) and survives()
        known: set[int] = set()
        stack = [self.root]
        while stack:
            folder = stack.pop()
            if id(folder) in known:
                continue
            known.add(id(folder))
            for name, node in folder.base.items():
                self._put(folder, name, node)
            for change, name, node in folder.changes:
                if change.durable or fates[change]:
                    self._put(folder, name, node)
            folder.base.clear()
            folder.changes.clear()
            folder.latest.clear()
            for node in folder.entries.values():
                node.moved = None
                if isinstance(node, Folder):
                    stack.append(node)
                elif not node.whole:
                    node.data = torn(node.data)
                    node.whole = True
                    node.written = None
                    node._key = None
        self.room += used - sum(len(file.data) for _, file in self.walk())
        self.changed += 1

    def _unflushed_changes(self) -> list[Change]:
        """Returns the changes that are not durable, oldest first, of all folders that are visible
        or may reappear."""
        found: set[Change] = set()
        known: set[int] = set()
        folders, changes = [self.root], []
        while folders:
            folder = folders.pop()
            if id(folder) in known:
                continue
            known.add(id(folder))
            changes += [change for change, _, _ in folder.changes]
            nodes = (
                *folder.entries.values(),
                *folder.base.values(),
                *(node for _, _, node in folder.changes),
            )
            folders += [node for node in nodes if isinstance(node, Folder)]
        while changes:
            change = changes.pop()
            if not change.durable and change not in found:
                found.add(change)
                changes += change.after
        return sorted(found, key=lambda change: change.number)

    @staticmethod
    def _put(folder: Folder, name: str, node: Node | None) -> None:
        if node is None:
            folder.entries.pop(name, None)
        else:
            folder.entries[name] = node
        folder.version += 1

    def copy(self) -> Disk:
        """Returns a copy with the same names and contents, durable and not, that shares no mutable
        state."""
        made = Disk(self.room, self.local)
        made.now = self.now
        made.changed = self.changed
        made.rots = self.rots
        made._changes, made._inodes = self._changes, self._inodes
        nodes: dict[int, Node] = {}
        changes: dict[Change, Change] = {}
        done = Change(0)
        done.durable = True

        def node_of(node: Node | None) -> Node | None:
            if node is None:
                return None
            if id(node) not in nodes:
                if isinstance(node, File):
                    twin = File(node.data, node.mtime, node.whole, node.inode)
                    twin.written, twin._key = node.written, node._key
                    nodes[id(node)] = twin
                    twin.moved = change_of(node.moved)
                else:
                    folder = nodes[id(node)] = Folder(node.mtime, node.inode)
                    folder.version = node.version
                    folder.entries = {name: node_of(child) for name, child in node.entries.items()}
                    folder.base = {name: node_of(child) for name, child in node.base.items()}
                    folder.changes = [
                        (change_of(change), name, node_of(child))
                        for change, name, child in node.changes
                    ]
                    folder.latest = {
                        name: change_of(change) for name, change in node.latest.items()
                    }
                    folder.moved = change_of(node.moved)
            return nodes[id(node)]

        def change_of(change: Change | None) -> Change | None:
            if change is None or change.durable:  # a durable change blocks nothing
                return done if change is not None else None
            stack = [change]
            # a loop, since a name that changes often has a long history
            while stack:
                last = stack[-1]
                missing = [earlier for earlier in last.after if earlier not in changes]
                stack += missing
                if not missing:
                    stack.pop()
                    twin = changes.setdefault(
                        last, Change(last.number, tuple(changes[earlier] for earlier in last.after))
                    )
                    twin.durable = last.durable
            return changes[change]

        made.root = node_of(self.root)
        return made
