"""A ``Storage`` in front of the real one for every simulated rank: counts operations, and strikes at one of them.

    machine = Machine(PosixStorage(), Turns(2, random), Fault("power", at=17), random)
    machine.view(rank=0).rename(a, b)          # operation number 17 dies here, and what was not flushed is gone

What survives a loss of power follows the contract of ``Storage``: a file's bytes once ``write`` has returned, a name once its
folder was synced after the change. Until then every change of a name may be there or not, independently of the others: that is
what POSIX allows, and what journals, write caches and NFS servers make of it. A write under way leaves any part of itself.
"""
from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mindresume.fault_injection.ranks import Turns
from mindresume.storage.interface import Status, Storage

LAG = 30.0                          # seconds an NFS client may believe its listing of a folder (acdirmax is 60, acdirmin 30)
_TICK = 0.1                         # seconds of simulated time per operation
_FULL = ("write", "rename", "make_folder")

# name -> (errno, operations it can hit; () = all)
ERRORS: dict[str, tuple[int, tuple[str, ...]]] = {
    "EIO": (errno.EIO, ()), "ESTALE": (errno.ESTALE, ()), "ENOSPC": (errno.ENOSPC, _FULL), "EDQUOT": (errno.EDQUOT, _FULL),
    "EIO after": (errno.EIO, ("write", "rename", "sync", "remove", "make_folder"))}
DEATHS = ("kill one", "kill some", "kill all", "torn", "power", "reorder", "late")
FAULTS = (*ERRORS, *DEATHS)
EXPLAINED = {
    "EIO": "the operation fails once", "ESTALE": "it fails once, as on NFS after the server forgot a file",
    "ENOSPC": "the disk is full from here on", "EDQUOT": "the quota is exhausted from here on",
    "EIO after": "it takes effect and reports an error all the same", "kill one": "this rank is killed right before it",
    "kill some": "this rank and some others are killed", "kill all": "all ranks are killed",
    "torn": "all are killed in the middle of a write", "power": "power fails: nothing that was not flushed is left",
    "reorder": "power fails: any part of what was not flushed is left, torn and out of order",
    "late": "all are killed; each host had seen names of others only 30 s late"}


class Killed(BaseException):
    """The process is gone. No except clause of the product can catch it, as none can catch SIGKILL."""


@dataclass(frozen=True)
class Fault:
    """``at``: number of the operation it strikes, counted over all ranks from 1."""
    kind: str
    at: int

    def hits(self, operation: str) -> bool:
        """Whether the combination exists: a listing cannot run out of space."""
        if self.kind in ERRORS:
            return not ERRORS[self.kind][1] or operation in ERRORS[self.kind][1]
        return self.kind != "torn" or operation == "write"


@dataclass(frozen=True)
class Operation:
    number: int
    rank: int
    name: str
    path: str


class _Folder:
    """Stands for a folder, wherever it is renamed to."""

    def __init__(self, path: str):
        self.path = path


Node = bytes | _Folder | None       # what a name of a folder stands for; None: nothing


@dataclass(eq=False)
class _Change:
    """One operation on names: all of it happened or nothing, also if it is of two folders. ``durable``: for certain."""
    durable: bool = False


@dataclass
class _Names:
    """Changes of names in one folder that are not durable yet. ``base``: what the names changed stood for before."""
    base: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[_Change, dict[str, Node]]] = field(default_factory=list)

    def now(self, name: str) -> Node:
        return next((nodes[name] for _, nodes in reversed(self.changes) if name in nodes), self.base[name])


class Machine:
    """Everything the ranks share: the disk, the time, the fault. ``operations``: what was done so far."""

    def __init__(self, inner: Storage, turns: Turns, fault: Fault | None = None, chance: random.Random | None = None):
        self.inner, self.turns, self.fault, self.chance = inner, turns, fault, chance or random.Random(0)
        self.operations: list[Operation] = []
        self.dead: set[int] = set()
        self.now = 0.0
        self.lag = LAG if fault is not None and fault.kind == "late" else 0.0
        self._pending: dict[str, _Names] = {}
        self._views = {rank: View(self, rank) for rank in range(turns.size)}

    def view(self, rank: int) -> View:
        return self._views[rank]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # ---- striking --------------------------------------------------------------------------------------------------

    def operate(self, rank: int, name: str, path: str, act: Callable[[], Any], half: Callable[[], None]) -> Any:
        """``half``: leaves what a write would leave that was cut in the middle."""
        self.turns.take(rank)
        try:
            if rank in self.dead:
                raise Killed
            self.operations.append(Operation(len(self.operations) + 1, rank, name, path))
            self.now += _TICK
            if self.fault is None or not self.fault.hits(name):
                return act()
            number, fault = len(self.operations), self.fault
            if number == fault.at and fault.kind in DEATHS:
                self._strike(rank, half if name == "write" else lambda: None)
                raise Killed
            if fault.kind in ERRORS:
                full = ERRORS[fault.kind][1] == _FULL
                if number == fault.at or (full and number > fault.at):
                    if fault.kind == "EIO after":
                        act()
                    code = ERRORS[fault.kind][0]
                    raise OSError(code, os.strerror(code), path)
            return act()
        finally:
            self.turns.give(rank)

    def _strike(self, rank: int, half: Callable[[], None]) -> None:
        kind, everybody = self.fault.kind, set(range(self.turns.size))
        self.dead |= {rank} if kind == "kill one" else everybody
        if kind == "kill some":
            self.dead = {rank, *self.chance.sample(sorted(everybody), self.chance.randrange(self.turns.size))}
        if kind in ("torn", "reorder"):
            half()
        if kind == "power":
            self.lose_power(lambda: False)
        elif kind == "reorder":
            self.lose_power(lambda: self.chance.random() < 0.5)

    # ---- what is durable -------------------------------------------------------------------------------------------

    def changing(self, folder: str, *names: str) -> None:
        """To be called before names change."""
        base = self._pending.setdefault(folder, _Names()).base
        for name in names:
            if name not in base:
                base[name] = self.node(os.path.join(folder, name))

    def changed(self, nodes: Mapping[str, dict[str, Node]]) -> None:
        """By folder, what the names stand for now. Of a rename from one folder to another either both names change or none does:
        journals and servers see one operation."""
        change = _Change()
        for folder, names in nodes.items():
            self._pending[folder].changes.append((change, names))

    def folder_node(self, folder: str, name: str) -> Node:
        """What ``name`` stands for; for a folder always the same object, however often it is renamed."""
        now = self._pending[folder].now(name)
        return now if isinstance(now, _Folder) else self.node(os.path.join(folder, name))

    def synced(self, folder: str) -> None:
        names = self._pending.pop(folder, None)
        for change, _ in names.changes if names else ():
            change.durable = True

    def moved(self, old: str, new: str) -> None:
        """Changes inside a folder that was renamed belong to the folder."""
        for path in [path for path in self._pending if path == old or path.startswith(old + os.sep)]:
            self._pending[new + path[len(old):]] = self._pending.pop(path)

    def node(self, path: str) -> Node:
        status = self.inner.status(path)
        if status is None:
            return None
        if status.is_folder:
            return _Folder(path)
        with self.inner.open(path) as file:
            return file.read()

    def lose_power(self, survives: Callable[[], bool]) -> None:
        """Every change that is not durable stays only if ``survives()``."""
        pending, self._pending = self._pending, {}
        fates: dict[_Change, bool] = {}
        moves: list[tuple[str, str]] = []                               # of folders, since we began
        final = {folder: self._final(pending[folder], fates, survives) for folder in sorted(pending)}       # parents first
        folders = [node for names in final.values() for node in names.values() if isinstance(node, _Folder)]
        for number, node in enumerate(dict.fromkeys(folders)):          # their names may have to be exchanged
            at = _after(node.path, moves)
            if os.path.isdir(at):
                _move(at, f"{at}.{number}", moves)
        for former, names in final.items():
            folder = _after(former, moves)
            if not os.path.isdir(folder):                               # its own removal is durable: nothing in it matters
                continue
            for name, node in sorted(names.items(), key=lambda item: item[1] is None, reverse=True):
                self._put(os.path.join(folder, name), node, moves)

    @staticmethod
    def _final(names: _Names, fates: dict[_Change, bool], survives: Callable[[], bool]) -> dict[str, Node]:
        final = dict(names.base)
        for change, nodes in names.changes:
            if change not in fates:
                fates[change] = change.durable or survives()
            if fates[change]:
                final.update(nodes)
        return final

    def _put(self, path: str, node: Node, moves: list[tuple[str, str]]) -> None:
        """Makes ``path`` stand for ``node``, on the real file system, past the seam: nobody is left to see it happen."""
        if isinstance(node, _Folder):
            at = _after(node.path, moves)
            if os.path.isdir(at):
                _move(at, path, moves)
            else:
                os.makedirs(path)
                moves.append((at, path))
        elif node is None:
            if os.path.isdir(path):
                if not os.listdir(path):
                    os.rmdir(path)
            elif os.path.lexists(path):
                os.remove(path)
        else:
            with open(path, "wb") as file:
                file.write(node)


def _move(old: str, new: str, moves: list[tuple[str, str]]) -> None:
    os.rename(old, new)
    moves.append((old, new))


def _after(path: str, moves: Iterable[tuple[str, str]]) -> str:
    """Where ``path`` is after folders were renamed, one after the other."""
    for old, new in moves:
        if path == old or path.startswith(old + os.sep):
            path = new + path[len(old):]
    return path


class View:
    """The file system as one rank sees it. With ``lag`` it believes its own listing of a folder for so long, unless it changed
    the folder itself: a host's cache of names on NFS."""
    width = 1                       # one operation at a time, so that a number means the same operation every time

    def __init__(self, machine: Machine, rank: int):
        self.machine, self.rank = machine, rank
        self._listed: dict[str, tuple[float, list[str]]] = {}

    def _do(self, name: str, path: str, act: Callable[[], Any], half: Callable[[], None] = lambda: None) -> Any:
        return self.machine.operate(self.rank, name, path, act, half)

    def _names(self, folder: str) -> list[str]:
        at, names = self._listed.get(folder, (float("-inf"), []))
        if self.machine.now - at >= self.machine.lag:
            names = self.machine.inner.list(folder)
            self._listed[folder] = (self.machine.now, names)
        return list(names)

    def _touch(self, *paths: str) -> None:
        for path in paths:
            self._listed.pop(os.path.dirname(path), None)
            self._listed.pop(path, None)

    def _hidden(self, path: str) -> bool:
        return bool(self.machine.lag) and os.path.basename(path) not in self._names(os.path.dirname(path))

    def list(self, folder: str) -> list[str]:
        return self._do("list", folder, lambda: self._names(folder))

    def status(self, path: str) -> Status | None:
        return self._do("status", path, lambda: None if self._hidden(path) else self.machine.inner.status(path))

    def open(self, path: str) -> BinaryIO:
        def act() -> BinaryIO:
            if self._hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self.machine.inner.open(path)
        return self._do("open", path, act)

    def free_space(self, folder: str) -> int:
        return self._do("free_space", folder, lambda: self.machine.inner.free_space(folder))

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        folder, name = os.path.split(path)

        def act() -> int:
            self.machine.changing(folder, name)
            count = self.machine.inner.write(path, pieces, size)
            self.machine.changed({folder: {name: self.machine.node(path)}})
            self._touch(path)
            return count

        def half() -> None:
            content = b"".join(map(bytes, pieces))
            cut = len(content) // 2
            torn = content[:cut]
            if self.machine.fault.kind == "reorder":                 # a later part is there and an earlier one is not
                torn = content[:cut // 2] + bytes(cut - cut // 2) + content[cut:cut + cut // 2]
            self.machine.changing(folder, name)
            with open(path, "wb") as file:
                file.write(torn)
            self.machine.changed({folder: {name: torn}})
        return self._do("write", path, act, half)

    def rename(self, old: str, new: str) -> None:
        def act() -> None:
            source, before = os.path.split(old)
            target, after = os.path.split(new)
            self.machine.changing(source, before)
            self.machine.changing(target, after)
            node = self.machine.folder_node(source, before)
            self.machine.inner.rename(old, new)
            if isinstance(node, _Folder):
                node.path = new
                self.machine.moved(old, new)
            names: dict[str, dict[str, Node]] = {source: {before: None}}
            names.setdefault(target, {})[after] = node
            self.machine.changed(names)
            self._touch(old, new)
        self._do("rename", old, act)

    def sync(self, folder: str) -> None:
        def act() -> None:
            self.machine.inner.sync(folder)
            self.machine.synced(folder)
        self._do("sync", folder, act)

    def remove(self, path: str) -> None:
        def act() -> None:
            folder, name = os.path.split(path)
            self.machine.changing(folder, name)
            self.machine.inner.remove(path)
            self.machine.changed({folder: {name: None}})
            self._touch(path)
        self._do("remove", path, act)

    def make_folder(self, path: str) -> None:
        def act() -> None:
            parent = os.path.dirname(path)
            new = not self.machine.inner.status(path)
            self.machine.inner.make_folder(path)
            if new:                                 # with its name every change before it in that folder becomes durable
                self.machine.synced(parent)
            self._touch(path)
        self._do("make_folder", path, act)
