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
from dataclasses import dataclass
from typing import Any, BinaryIO

from mindresume import runtime
from mindresume.storage import Status, Storage

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

    def strikes(self, number: int, operation: str) -> bool:
        """Returns whether the fault occurs at operation ``number``. A full disk stays full."""
        lasts = self.kind in _ERRORS and _ERRORS[self.kind][1] in (_FULL, READS)
        return self.hits(operation) and (number == self.at or lasts and number > self.at)


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


@dataclass(eq=False)
class _Change:
    """One atomic operation on names, also in two folders. ``survives``: a power loss; None: that is
    not decided yet."""

    survives: bool | None = None


class _Folder:
    """A folder, wherever it is renamed to. ``durable``: what its names stand for after any power
    loss; ``changes``: what came after that, in order."""

    def __init__(self) -> None:
        self.durable: dict[str, Node] = {}
        self.changes: list[tuple[_Change, str, Node]] = []

    def names(self) -> dict[str, Node]:
        """Returns what the names stand for, without the changes that are lost."""
        later = {name: node for change, name, node in self.changes if change.survives is not False}
        return {name: node for name, node in (self.durable | later).items() if node is not None}


Node = bytes | _Folder | None  # what a name stands for; None for nothing


def _read(path: str) -> _Folder:
    """Returns a folder on the disk, all of which is durable."""
    folder = _Folder()
    for name in os.listdir(path):
        below = os.path.join(path, name)
        folder.durable[name] = _read(below) if os.path.isdir(below) else _content(below)
    return folder


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, node: Node, written: set[_Folder]) -> None:
    """Makes the path, which does not exist, stand for ``node``. A folder has one name."""
    if not isinstance(node, _Folder):
        with open(path, "wb") as file:
            file.write(node or b"")
    elif node not in written:
        written.add(node)
        os.makedirs(path, exist_ok=True)
        for name, below in node.names().items():
            _write(os.path.join(path, name), below, written)


class FaultInjector:
    """The state that all ranks share: disk, time, fault. ``operations``: the operations so far.
    ``root``: the folder of which a power loss undoes what is not durable; empty: none."""

    def __init__(
        self,
        inner: Storage,
        scheduler: Scheduler,
        fault: Fault | None = None,
        rng: random.Random | None = None,
        root: str = "",
    ):
        self.inner = inner
        self.root = root
        self.scheduler = scheduler
        self.fault = fault
        self.rng = rng or random.Random(0)
        self.operations: list[Operation] = []
        self.dead: set[int] = set()
        self.now = 0.0
        self.lag = LAG if fault is not None and fault.kind == "late" else 0.0
        self._top: _Folder | None = None  # ``root``
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
            if self._top is None and self.root:
                self._top = _read(self.root)
            self.operations.append(Operation(len(self.operations) + 1, rank, name, path))
            self.now += _TICK
            fault = self.fault
            if fault is None or not fault.strikes(len(self.operations), name):
                yield False
            elif fault.kind in DEATHS:
                if name == "write" and fault.kind in ("torn", "reorder"):
                    yield True
                self._die(fault.kind, rank)
                raise Killed
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

    def node(self, path: str) -> Node:
        """Returns what a path stands for now; None for one outside of ``root``."""
        node: Node = self._top
        for part in os.path.relpath(path, self.root or None).split(os.sep):
            if part != ".":
                node = node.names().get(part) if isinstance(node, _Folder) else None
        return node

    def record_change(self, nodes: Mapping[str, Node]) -> None:
        """Records one atomic change: what these paths stand for now. A rename between folders
        changes both names or none, as journals and servers guarantee."""
        change = _Change()
        for path, node in nodes.items():
            folder = self.node(os.path.dirname(path))
            if isinstance(folder, _Folder):
                folder.changes.append((change, os.path.basename(path), node))

    def make_durable(self, path: str) -> None:
        """Makes all changes of names in a folder durable."""
        folder = self.node(path)
        if isinstance(folder, _Folder):
            for change, name, node in folder.changes:
                change.survives = True
                folder.durable[name] = node
            folder.changes.clear()

    def make_folder(self, path: str) -> None:
        """Records a new folder and its parents. Their names are durable, and with them earlier
        changes beside them."""
        parent = os.path.dirname(path)
        if self.node(path) is None and path != parent:
            self.make_folder(parent)
            self.make_durable(parent)
            folder = self.node(parent)
            if isinstance(folder, _Folder):
                folder.durable[os.path.basename(path)] = _Folder()

    def lose_power(self, chance: float) -> None:
        """Applies a power loss: every change that is not durable stays only by ``chance``. It works
        on the real file system directly: no rank is alive to see it."""
        coming = [self._top]
        while coming:
            folder = coming.pop(0)
            for change, _, _ in folder.changes:
                if change.survives is None:
                    change.survives = self.rng.random() < chance
            coming += [
                node for _, node in sorted(folder.names().items()) if isinstance(node, _Folder)
            ]
        for name in os.listdir(self.root):
            path = os.path.join(self.root, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
        _write(self.root, self._top, set())


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
        with self.operation("write", path) as is_torn:
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
            self.injector.record_change({path: _content(path)})
            self._changed(path)
        return count

    def rename(self, old: str, new: str) -> None:
        with self.operation("rename", old):
            self.inner.rename(old, new)
            self.injector.record_change({old: None, new: self.injector.node(old)})
            self._changed(old, new)

    def copy_owner(self, source: str, path: str) -> None:
        self.inner.copy_owner(source, path)

    def sync(self, folder: str) -> None:
        with self.operation("sync", folder):
            self.inner.sync(folder)
            self.injector.make_durable(folder)

    def remove(self, path: str) -> None:
        with self.operation("remove", path):
            self.inner.remove(path)
            self.injector.record_change({path: None})
            self._changed(path)

    def make_folder(self, path: str) -> None:
        with self.operation("make_folder", path):
            self.inner.make_folder(path)
            self.injector.make_folder(path)
            self._changed(path)
