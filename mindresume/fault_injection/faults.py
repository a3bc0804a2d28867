"""The faults of both harnesses, and the backend of the drill: a real folder, on which each rank is
a thread.

    scheduler = Scheduler(2, random.Random(7))
    injector = FaultInjector(PosixStorage(), scheduler, Fault(17, "power"), rng)
    # the same order of their operations for the same seed
    scheduler.run([work_of_rank_0, work_of_rank_1])
    # if this is operation 17, the rank dies and unflushed changes are gone
    injector.storage_of(0).rename(a, b)

What survives a power loss follows the contract of ``Storage``: a file's bytes once ``write`` has
returned, a name once its folder was synced after the change. Until then every change of a name
survives or not, independently of the others: POSIX allows that, and journals, write caches and NFS
servers do it. An interrupted write leaves any part of itself.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mindresume import runtime
from mindresume.storage.interface import Status, Storage

# seconds for which an NFS client caches a listing (acdirmin is 30, acdirmax 60)
LAG = 30.0
PATIENCE = 120.0  # real seconds after which waiting ranks are an error
_TICK = 0.1  # seconds of simulated time per operation
_FULL = ("write", "create", "flush", "rename", "make_folder")
_EFFECTS = ("write", "create", "flush", "rename", "sync", "remove", "make_folder", "put", "delete")
READS = ("open", "list", "status")

# name -> (errno, operations it can hit; () = all), in both harnesses
ERRORS: dict[str, tuple[int, tuple[str, ...]]] = {
    "EIO": (errno.EIO, ()),
    "ESTALE": (errno.ESTALE, ()),
    "ENOSPC": (errno.ENOSPC, _FULL),
    "EDQUOT": (errno.EDQUOT, _FULL),
    "EIO after": (errno.EIO, _EFFECTS),
}
_ERRORS = {**ERRORS, "unreadable": (errno.ESTALE, READS)}  # of the drill
DEATHS = ("kill one", "kill some", "kill all", "torn", "power", "reorder", "late")
FAULTS = (*_ERRORS, *DEATHS)
EXPLAINED = {
    "EIO": "the operation fails once",
    "ESTALE": "it fails once, as on NFS after the server forgot a file",
    "ENOSPC": "the disk is full from here on",
    "EDQUOT": "the quota is exhausted from here on",
    "EIO after": "the operation takes effect and reports an error nevertheless",
    "unreadable": "nothing can be read from here on; after the run it can",
    "kill one": "this rank is killed right before the operation",
    "kill some": "this rank and some others are killed",
    "kill all": "all ranks are killed",
    "torn": "all ranks are killed in the middle of a write",
    "power": "power loss: all unflushed data is lost",
    "reorder": "power loss: any part of the unflushed data is left, torn and out of order",
    "late": "all ranks are killed; each host saw new names of others 30 s late",
}


class Killed(BaseException):
    """The process is gone. It is no Exception, so that no except clause of the product catches it:
    none can catch SIGKILL."""


class Hang(Exception):
    """Ranks wait for each other. It is no OSError, which the product would handle as an error of
    the file system."""


@dataclass(frozen=True)
class Fault:
    """A fault at operation ``at``, counted over all ranks or processes from 1. ``amount``: what the
    kind says it is."""

    at: int
    kind: str
    amount: int = 0

    def hits(self, operation: str) -> bool:
        """Returns whether this kind of fault can occur at ``operation``: a listing cannot run out
        of space."""
        if self.kind in _ERRORS:
            return not _ERRORS[self.kind][1] or operation in _ERRORS[self.kind][1]
        return self.kind != "torn" or operation == "write"


# ---- order ---------------------------------------------------------------------------------------


class Scheduler:
    """Orders the operations of ranks: ``acquire_turn`` before an operation, ``release_turn`` after
    it. The next rank is drawn when every rank that still works waits for its turn. Operations of
    one rank may come from several threads, one at a time."""

    def __init__(self, size: int, rng: random.Random):
        self.size, self.rng = size, rng
        self._condition = runtime.Condition()
        self._working: set[int] = set()
        self._waiting: set[int] = set()
        self._current_rank: int | None = None

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs all works concurrently. Returns their results; an exception is a result too."""
        results: list[Any] = [None] * len(works)
        self._working = set(range(len(works)))
        threads = [
            runtime.Thread(target=self._call, args=(rank, works[rank], results), daemon=True)
            for rank in range(len(works))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if any(thread.is_alive() for thread in threads):
            raise Hang(
                f"ranks {sorted(self._working)} hang: they wait for more than {PATIENCE:.0f} s"
            )
        return results

    def _call(self, rank: int, work: Callable[[], Any], results: list[Any]) -> None:
        try:
            results[rank] = work()
        except BaseException as error:  # noqa: B036  a killed rank is a result
            results[rank] = error
        finally:
            with self._condition:
                self._working.discard(rank)
                self._waiting.discard(rank)
                self._choose()

    def acquire_turn(self, rank: int) -> None:
        with self._condition:
            if rank not in self._working:  # outside of ``run``: no other rank
                return
            self._waiting.add(rank)
            self._choose()
            if not self._condition.wait_for(lambda: self._current_rank == rank, PATIENCE):
                raise Hang(
                    f"rank {rank} was not scheduled within {PATIENCE:.0f} s; working: "
                    f"{sorted(self._working)}"
                )
            self._waiting.discard(rank)

    def release_turn(self, rank: int) -> None:
        with self._condition:
            if self._current_rank == rank:
                self._current_rank = None
                self._choose()

    def _choose(self) -> None:
        if self._current_rank is None and self._waiting and self._waiting >= self._working:
            self._current_rank = self.rng.choice(sorted(self._waiting))
            self._condition.notify_all()


# ---- injecting -----------------------------------------------------------------------------------


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


Node = bytes | _Folder | None  # what a name stands for; None for nothing


@dataclass(eq=False)
class _Change:
    """One atomic operation on names, also in two folders. ``survives``: a power loss; None: that is
    not decided yet."""

    survives: bool | None = None


@dataclass
class _Names:
    """Changes of names in one folder that are not durable yet. ``base``: what the changed names
    stood for before."""

    base: dict[str, Node] = field(default_factory=dict)
    changes: list[tuple[_Change, dict[str, Node]]] = field(default_factory=list)


class FaultInjector:
    """The state that all ranks share: disk, time, fault. ``operations``: the operations so far."""

    def __init__(
        self,
        inner: Storage,
        scheduler: Scheduler,
        fault: Fault | None = None,
        rng: random.Random | None = None,
    ):
        self.inner = inner
        self.scheduler = scheduler
        self.fault = fault
        self.rng = rng or random.Random(0)
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

    def clock(self) -> AbstractContextManager[None]:
        """Lets simulated time pass in this process."""
        return runtime.answers({runtime.monotonic: self.monotonic, runtime.sleep: self.sleep})

    @contextmanager
    def operation(self, rank: int, name: str, path: str) -> Iterator[bool]:
        """Counts an operation of ``rank``, which the block carries out when it is its turn, and
        injects the fault. Yields whether the block must leave what an interrupted write leaves,
        because the ranks die in it."""
        self.scheduler.acquire_turn(rank)
        try:
            if rank in self.dead:
                raise Killed
            self.operations.append(Operation(len(self.operations) + 1, rank, name, path))
            self.now += _TICK
            number, fault = len(self.operations), self.fault
            if fault is None or not fault.hits(name) or number < fault.at:
                yield False
            elif fault.kind in DEATHS and number == fault.at:
                is_torn = name == "write" and fault.kind in ("torn", "reorder")
                if is_torn:
                    yield True
                self._die(fault.kind, rank)
                raise Killed
            elif (
                fault.kind in DEATHS
                or number > fault.at
                and _ERRORS[fault.kind][1] not in (_FULL, READS)
            ):
                yield False  # it has struck, and does not last
            else:
                if fault.kind == "EIO after":
                    yield False
                code = _ERRORS[fault.kind][0]
                raise OSError(code, os.strerror(code), path)
        finally:
            self.scheduler.release_turn(rank)

    def _die(self, kind: str, rank: int) -> None:
        all_ranks = set(range(self.scheduler.size))
        self.dead |= {rank} if kind == "kill one" else all_ranks
        if kind == "kill some":
            self.dead = {
                rank,
                *self.rng.sample(sorted(all_ranks), self.rng.randrange(self.scheduler.size)),
            }
        if kind in ("power", "reorder"):
            self.lose_power(0.0 if kind == "power" else 0.5)

    # ---- what is durable -------------------------------------------------------------------------

    def before_change(self, folder: str, *names: str) -> None:
        """Records what ``names`` stand for, before they change."""
        base = self._pending.setdefault(folder, _Names()).base
        for name in names:
            if name not in base:
                base[name] = self.node(os.path.join(folder, name))

    def record_change(self, nodes: Mapping[str, dict[str, Node]]) -> None:
        """Records one atomic change: by folder, what the names stand for now. A rename between
        folders changes both names or none, as journals and servers guarantee."""
        change = _Change()
        for folder, names in nodes.items():
            self._pending[folder].changes.append((change, names))

    def folder_node(self, folder: str, name: str) -> Node:
        """Returns what ``name`` stands for; for a folder always the same object, however often it
        is renamed."""
        pending = self._pending[folder]
        now = next(
            (nodes[name] for _, nodes in reversed(pending.changes) if name in nodes),
            pending.base[name],
        )
        return now if isinstance(now, _Folder) else self.node(os.path.join(folder, name))

    def make_durable(self, folder: str) -> None:
        """Makes all changes of names in ``folder`` durable."""
        names = self._pending.pop(folder, None)
        for change, _ in names.changes if names else ():
            change.survives = True

    def folder_renamed(self, old: str, new: str) -> None:
        """Moves the pending changes inside a renamed folder to its new path."""
        for path in [
            path for path in self._pending if path == old or path.startswith(old + os.sep)
        ]:
            self._pending[new + path[len(old) :]] = self._pending.pop(path)

    def node(self, path: str) -> Node:
        status = self.inner.status(path)
        if status is None:
            return None
        if status.is_folder:
            return _Folder(path)
        with self.inner.open(path) as file:
            return file.read()

    def lose_power(self, chance: float) -> None:
        """Applies a power loss: every change that is not durable stays only by ``chance``. It works
        on the real file system directly: no rank is alive to see it."""
        pending, self._pending = self._pending, {}
        top = os.path.commonpath([*pending]) if pending else ""
        if not os.path.isdir(top):  # its removal is durable
            return
        trees: dict[str, Tree] = {}
        _read(top, trees)
        for former in sorted(pending):  # parents first
            names = dict(pending[former].base)
            for change, nodes in pending[former].changes:
                if change.survives is None:
                    change.survives = self.rng.random() < chance
                names |= nodes if change.survives else {}
            # else its removal is durable: its content does not matter
            for name, node in names.items() if former in trees else ():
                trees[former].pop(name, None)
                if isinstance(node, _Folder):
                    node = trees.setdefault(node.path, {})
                    for tree in trees.values():  # it has one name
                        for other in [other for other, found in tree.items() if found is node]:
                            del tree[other]
                if node is not None:
                    trees[former][name] = node
        for name in os.listdir(top):
            path = os.path.join(top, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        _write(top, trees[top])


Tree = dict[str, Any]  # {name: content of a file, or the tree of a folder}


def _read(folder: str, trees: dict[str, Tree]) -> Tree:
    """Returns the tree of ``folder``, and adds it and those below it to ``trees``, by path."""
    tree = trees[folder] = {}
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            tree[name] = _read(path, trees)
        else:
            with open(path, "rb") as file:
                tree[name] = file.read()
    return tree


def _write(folder: str, tree: Tree) -> None:
    for name, node in tree.items():
        path = os.path.join(folder, name)
        if isinstance(node, dict):
            os.mkdir(path)
            _write(path, node)
        else:
            with open(path, "wb") as file:
                file.write(node)


class RankStorage:
    """The file system as one rank sees it. It caches listings for the ``lag`` of the injector,
    unless it changed the folder itself, as a host's name cache on NFS does."""

    # one operation at a time, so that operation numbers are reproducible
    width = 1

    def __init__(self, injector: FaultInjector, rank: int):
        self.injector = injector
        self.rank = rank
        self.inner = injector.inner
        self._listed: dict[str, tuple[float, list[str]]] = {}

    def operation(self, name: str, path: str) -> AbstractContextManager[bool]:
        return self.injector.operation(self.rank, name, path)

    def _names(self, folder: str) -> list[str]:
        at, names = self._listed.get(folder, (float("-inf"), []))
        if self.injector.now - at >= self.injector.lag:
            names = self.inner.list(folder)
            self._listed[folder] = (self.injector.now, names)
        return list(names)

    def _changed(self, *paths: str) -> None:
        for path in paths:
            self._listed.pop(os.path.dirname(path), None)
            self._listed.pop(path, None)

    def _is_hidden(self, path: str) -> bool:
        return bool(self.injector.lag) and os.path.basename(path) not in self._names(
            os.path.dirname(path)
        )

    def list(self, folder: str) -> list[str]:
        with self.operation("list", folder):
            return self._names(folder)

    def status(self, path: str) -> Status | None:
        with self.operation("status", path):
            return None if self._is_hidden(path) else self.inner.status(path)

    def open(self, path: str) -> BinaryIO:
        with self.operation("open", path):
            if self._is_hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self.inner.open(path)

    def free_space(self, folder: str) -> int:
        with self.operation("free_space", folder):
            return self.inner.free_space(folder)

    def write(self, path: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> int:
        folder, name = os.path.split(path)
        with self.operation("write", path) as is_torn:
            self.injector.before_change(folder, name)
            if is_torn:
                content, count = b"".join(map(bytes, pieces)), 0
                cut = len(content) // 2
                torn = content[:cut]
                # a later part survives and an earlier one does not
                if self.injector.fault.kind == "reorder":
                    torn = (
                        content[: cut // 2] + bytes(cut - cut // 2) + content[cut : cut + cut // 2]
                    )
                with open(path, "wb") as file:
                    file.write(torn)
            else:
                count = self.inner.write(path, pieces, size)
            self.injector.record_change({folder: {name: self.injector.node(path)}})
            self._changed(path)
        return count

    def rename(self, old: str, new: str) -> None:
        source, before = os.path.split(old)
        target, after = os.path.split(new)
        with self.operation("rename", old):
            self.injector.before_change(source, before)
            self.injector.before_change(target, after)
            node = self.injector.folder_node(source, before)
            self.inner.rename(old, new)
            if isinstance(node, _Folder):
                node.path = new
                self.injector.folder_renamed(old, new)
            names: dict[str, dict[str, Node]] = {source: {before: None}}
            names.setdefault(target, {})[after] = node
            self.injector.record_change(names)
            self._changed(old, new)

    def copy_owner(self, source: str, path: str) -> None:
        self.inner.copy_owner(source, path)

    def sync(self, folder: str) -> None:
        with self.operation("sync", folder):
            self.inner.sync(folder)
            self.injector.make_durable(folder)

    def remove(self, path: str) -> None:
        folder, name = os.path.split(path)
        with self.operation("remove", path):
            self.injector.before_change(folder, name)
            self.inner.remove(path)
            self.injector.record_change({folder: {name: None}})
            self._changed(path)

    def make_folder(self, path: str) -> None:
        with self.operation("make_folder", path):
            is_new = not self.inner.status(path)
            self.inner.make_folder(path)
            # its sync of the parent makes earlier changes there durable
            if is_new:
                self.injector.make_durable(os.path.dirname(path))
            self._changed(path)
