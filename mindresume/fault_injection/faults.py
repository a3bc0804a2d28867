"""A ``Storage`` in front of the real one for every simulated rank: counts operations and injects a fault at one of them.

    injector = FaultInjector(PosixStorage(), Scheduler(2, rng), Fault("power", at=17), rng)
    injector.storage_of(0).rename(a, b)     # if this is operation 17, the rank dies and unflushed changes are gone

What survives a power loss follows the contract of ``Storage``: a file's bytes once ``write`` has returned, a name once its folder
was synced after the change. Until then every change of a name survives or not, independently of the others: POSIX allows that,
and journals, write caches and NFS servers do it. An interrupted write leaves any part of itself.
"""
from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mindresume.fault_injection.scheduler import Scheduler
from mindresume.storage.interface import Status, Storage

LAG = 30.0                          # seconds for which an NFS client caches a listing (acdirmin is 30, acdirmax 60)
_TICK = 0.1                         # seconds of simulated time per operation
_FULL = ("write", "rename", "make_folder")
_READS = ("list", "status", "open")

# name -> (errno, operations it can hit; () = all)
ERRORS: dict[str, tuple[int, tuple[str, ...]]] = {
    "EIO": (errno.EIO, ()), "ESTALE": (errno.ESTALE, ()), "ENOSPC": (errno.ENOSPC, _FULL), "EDQUOT": (errno.EDQUOT, _FULL),
    "EIO after": (errno.EIO, ("write", "rename", "sync", "remove", "make_folder")),
    "unreadable": (errno.ESTALE, _READS)}
DEATHS = ("kill one", "kill some", "kill all", "torn", "power", "reorder", "late")
FAULTS = (*ERRORS, *DEATHS)
EXPLAINED = {
    "EIO": "the operation fails once", "ESTALE": "it fails once, as on NFS after the server forgot a file",
    "ENOSPC": "the disk is full from here on", "EDQUOT": "the quota is exhausted from here on",
    "EIO after": "the operation takes effect and reports an error nevertheless",
    "unreadable": "nothing can be read from here on; after the run it can",
    "kill one": "this rank is killed right before the operation",
    "kill some": "this rank and some others are killed", "kill all": "all ranks are killed",
    "torn": "all ranks are killed in the middle of a write", "power": "power loss: all unflushed data is lost",
    "reorder": "power loss: any part of the unflushed data is left, torn and out of order",
    "late": "all ranks are killed; each host saw new names of others 30 s late"}


class Killed(BaseException):
    """The process is gone. It is no Exception, so that no except clause of the product catches it: none can catch SIGKILL."""


@dataclass(frozen=True)
class Fault:
    """A fault at operation ``at``, counted over all ranks from 1."""
    kind: str
    at: int

    def hits(self, operation: str) -> bool:
        """Returns whether this kind of fault can occur at ``operation``: a listing cannot run out of space."""
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
    """Identifies a folder, wherever it is renamed to."""

    def __init__(self, path: str):
        self.path = path


Node = bytes | _Folder | None       # what a name stands for; None for nothing


@dataclass(eq=False)
class _Change:
    """One atomic operation on names, also in two folders. ``durable``: it survives any power loss."""
    durable: bool = False


@dataclass
class _Names:
    """Changes of names in one folder that are not durable yet. ``base``: what the changed names stood for before."""
    base: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[_Change, dict[str, Node]]] = field(default_factory=list)

    def now(self, name: str) -> Node:
        return next((nodes[name] for _, nodes in reversed(self.changes) if name in nodes), self.base[name])


class FaultInjector:
    """The state that all ranks share: disk, time, fault. ``operations``: the operations so far."""

    def __init__(self, inner: Storage, scheduler: Scheduler, fault: Fault | None = None, rng: random.Random | None = None):
        self.inner, self.scheduler, self.fault, self.rng = inner, scheduler, fault, rng or random.Random(0)
        self.operations: list[Operation] = []
        self.dead: set[int] = set()
        self.now = 0.0
        self.lag = LAG if fault is not None and fault.kind == "late" else 0.0
        self._pending: dict[str, _Names] = {}
        self._views = {rank: RankStorage(self, rank) for rank in range(scheduler.size)}

    def storage_of(self, rank: int) -> RankStorage:
        """Returns the file system as ``rank`` sees it."""
        return self._views[rank]

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    # ---- injecting -------------------------------------------------------------------------------------------------

    def operate(self, rank: int, name: str, path: str, act: Callable[[], Any], half: Callable[[], None]) -> Any:
        """Runs ``act`` as an operation of ``rank``, or injects the fault. ``half``: leaves what an interrupted write would leave.
        """
        self.scheduler.acquire_turn(rank)
        try:
            if rank in self.dead:
                raise Killed
            self.operations.append(Operation(len(self.operations) + 1, rank, name, path))
            self.now += _TICK
            if self.fault is None or not self.fault.hits(name):
                return act()
            number, fault = len(self.operations), self.fault
            if number == fault.at and fault.kind in DEATHS:
                self._inject(rank, half if name == "write" else lambda: None)
                raise Killed
            if fault.kind in ERRORS:
                lasts = ERRORS[fault.kind][1] in (_FULL, _READS)
                if number == fault.at or (lasts and number > fault.at):
                    if fault.kind == "EIO after":
                        act()
                    code = ERRORS[fault.kind][0]
                    raise OSError(code, os.strerror(code), path)
            return act()
        finally:
            self.scheduler.release_turn(rank)

    def _inject(self, rank: int, half: Callable[[], None]) -> None:
        kind, all_ranks = self.fault.kind, set(range(self.scheduler.size))
        self.dead |= {rank} if kind == "kill one" else all_ranks
        if kind == "kill some":
            self.dead = {rank, *self.rng.sample(sorted(all_ranks), self.rng.randrange(self.scheduler.size))}
        if kind in ("torn", "reorder"):
            half()
        if kind == "power":
            self.lose_power(lambda: False)
        elif kind == "reorder":
            self.lose_power(lambda: self.rng.random() < 0.5)

    # ---- what is durable -------------------------------------------------------------------------------------------

    def before_change(self, folder: str, *names: str) -> None:
        """Records what ``names`` stand for, before they change."""
        base = self._pending.setdefault(folder, _Names()).base
        for name in names:
            if name not in base:
                base[name] = self.node(os.path.join(folder, name))

    def record_change(self, nodes: Mapping[str, dict[str, Node]]) -> None:
        """Records one atomic change: by folder, what the names stand for now. A rename between folders changes both names or
        none, as journals and servers guarantee."""
        change = _Change()
        for folder, names in nodes.items():
            self._pending[folder].changes.append((change, names))

    def folder_node(self, folder: str, name: str) -> Node:
        """Returns what ``name`` stands for; for a folder always the same object, however often it is renamed."""
        now = self._pending[folder].now(name)
        return now if isinstance(now, _Folder) else self.node(os.path.join(folder, name))

    def make_durable(self, folder: str) -> None:
        """Makes all changes of names in ``folder`` durable."""
        names = self._pending.pop(folder, None)
        for change, _ in names.changes if names else ():
            change.durable = True

    def folder_renamed(self, old: str, new: str) -> None:
        """Moves the pending changes inside a renamed folder to its new path."""
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
        """Applies a power loss: every change that is not durable stays only if ``survives()``."""
        pending, self._pending = self._pending, {}
        fates: dict[_Change, bool] = {}
        moves: list[tuple[str, str]] = []                               # renames of folders done here
        final = {folder: self._final(pending[folder], fates, survives) for folder in sorted(pending)}       # parents first
        folders = [node for names in final.values() for node in names.values() if isinstance(node, _Folder)]
        for number, node in enumerate(dict.fromkeys(folders)):          # two folders may have to swap names
            at = _current_path(node.path, moves)
            if os.path.isdir(at):
                _move(at, f"{at}.{number}", moves)
        for former, names in final.items():
            folder = _current_path(former, moves)
            if not os.path.isdir(folder):                               # its removal is durable: its content does not matter
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
        """Makes ``path`` stand for ``node`` on the real file system directly: no rank is alive to see it."""
        if isinstance(node, _Folder):
            at = _current_path(node.path, moves)
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


def _current_path(path: str, moves: Iterable[tuple[str, str]]) -> str:
    """Returns where ``path`` is after the ``moves`` of folders, in order."""
    for old, new in moves:
        if path == old or path.startswith(old + os.sep):
            path = new + path[len(old):]
    return path


class RankStorage:
    """The file system as one rank sees it. It caches listings for the ``lag`` of the injector, unless it changed the folder
    itself, as a host's name cache on NFS does."""
    width = 1                       # one operation at a time, so that operation numbers are reproducible

    def __init__(self, injector: FaultInjector, rank: int):
        self.injector, self.rank = injector, rank
        self._listed: dict[str, tuple[float, list[str]]] = {}

    def _do(self, name: str, path: str, act: Callable[[], Any], half: Callable[[], None] = lambda: None) -> Any:
        return self.injector.operate(self.rank, name, path, act, half)

    def _names(self, folder: str) -> list[str]:
        at, names = self._listed.get(folder, (float("-inf"), []))
        if self.injector.now - at >= self.injector.lag:
            names = self.injector.inner.list(folder)
            self._listed[folder] = (self.injector.now, names)
        return list(names)

    def _invalidate(self, *paths: str) -> None:
        for path in paths:
            self._listed.pop(os.path.dirname(path), None)
            self._listed.pop(path, None)

    def _hidden(self, path: str) -> bool:
        return bool(self.injector.lag) and os.path.basename(path) not in self._names(os.path.dirname(path))

    def list(self, folder: str) -> list[str]:
        return self._do("list", folder, lambda: self._names(folder))

    def status(self, path: str) -> Status | None:
        return self._do("status", path, lambda: None if self._hidden(path) else self.injector.inner.status(path))

    def open(self, path: str) -> BinaryIO:
        def act() -> BinaryIO:
            if self._hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self.injector.inner.open(path)
        return self._do("open", path, act)

    def free_space(self, folder: str) -> int:
        return self._do("free_space", folder, lambda: self.injector.inner.free_space(folder))

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        folder, name = os.path.split(path)

        def act() -> int:
            self.injector.before_change(folder, name)
            count = self.injector.inner.write(path, pieces, size)
            self.injector.record_change({folder: {name: self.injector.node(path)}})
            self._invalidate(path)
            return count

        def half() -> None:
            content = b"".join(map(bytes, pieces))
            cut = len(content) // 2
            torn = content[:cut]
            if self.injector.fault.kind == "reorder":                # a later part survives and an earlier one does not
                torn = content[:cut // 2] + bytes(cut - cut // 2) + content[cut:cut + cut // 2]
            self.injector.before_change(folder, name)
            with open(path, "wb") as file:
                file.write(torn)
            self.injector.record_change({folder: {name: torn}})
        return self._do("write", path, act, half)

    def rename(self, old: str, new: str) -> None:
        def act() -> None:
            source, before = os.path.split(old)
            target, after = os.path.split(new)
            self.injector.before_change(source, before)
            self.injector.before_change(target, after)
            node = self.injector.folder_node(source, before)
            self.injector.inner.rename(old, new)
            if isinstance(node, _Folder):
                node.path = new
                self.injector.folder_renamed(old, new)
            names: dict[str, dict[str, Node]] = {source: {before: None}}
            names.setdefault(target, {})[after] = node
            self.injector.record_change(names)
            self._invalidate(old, new)
        self._do("rename", old, act)

    def copy_owner(self, source: str, path: str) -> None:
        self.injector.inner.copy_owner(source, path)

    def sync(self, folder: str) -> None:
        def act() -> None:
            self.injector.inner.sync(folder)
            self.injector.make_durable(folder)
        self._do("sync", folder, act)

    def remove(self, path: str) -> None:
        def act() -> None:
            folder, name = os.path.split(path)
            self.injector.before_change(folder, name)
            self.injector.inner.remove(path)
            self.injector.record_change({folder: {name: None}})
            self._invalidate(path)
        self._do("remove", path, act)

    def make_folder(self, path: str) -> None:
        def act() -> None:
            parent = os.path.dirname(path)
            new = not self.injector.inner.status(path)
            self.injector.inner.make_folder(path)
            if new:                                 # its sync of the parent makes earlier changes there durable
                self.injector.make_durable(parent)
            self._invalidate(path)
        self._do("make_folder", path, act)
