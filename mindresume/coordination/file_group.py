"""Lets the processes of a launch exchange messages through files in a shared folder: no MPI library, no address, no port.

    with file_group(storage, folder, process, arguments, timeout) as group:      # a ``collectives.Group``
        run_on_rank0(group, work)

    process 0   new session folder ─▶ FOLDER/JOB.json names it ─▶ all have joined ─▶ ``start``: the nonce of each ─▶ messages
    the others  read JOB.json ─▶ join its session with a nonce of their own ─▶ ``start`` has that nonce ─▶ messages

Files of an earlier launch do no harm: a process takes part in a session only if its ``start`` holds the nonce that this process
has just made, and process 0 makes a new session each time. Each message is published atomically; a process removes its older
messages when all have published later ones.
"""
from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mindresume import runtime
from mindresume.coordination.launched_process import LaunchedProcess
from mindresume.coordination.lease import LeaseHolder, holder_of_this_process, is_alive
from mindresume.errors import ProcessLostError
from mindresume.events import Emit, Notice, ignore
from mindresume.formatting import listed
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_json, remove_tree

TIMEOUT = 1800.0                            # seconds without a sign of a process, as ``collectives.Watchdog``
NOTE_EVERY = 30.0                           # seconds between two notices of what is waited for
FAREWELL = 120.0                            # seconds that process 0 waits for the others to leave, before it removes the session
FAREWELL_AFTER_ERROR = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.5   # seconds between two looks at the folder; doubled each time
_START, _JOINED, _GONE, _SESSION = "start", "joined-", "gone-", "-session-"


@contextmanager
def file_group(storage: Storage, folder: str, process: LaunchedProcess, arguments: Sequence[str], timeout: float = TIMEOUT,
               emit: Emit = ignore, clock: Callable[[], float] = runtime.monotonic, pause: Callable[[float], Any] = runtime.sleep
               ) -> Iterator[FileGroup]:
    """Waits until all processes of the launch have come, and leaves at the end of the block; process 0 then removes the files.

    Args:
        folder: process 0 creates it; the same for all processes of the launch, and for nothing else that runs at the same time.
        arguments: what this process does; it must be the same for all.
        timeout: seconds without a sign of a process that is waited for.
    Raises:
        ProcessLostError: A process did not come in time, ended, or does other work. Inside the block, the methods of the group
            raise it too.
    """
    group = FileGroup(storage, folder, process, arguments, timeout, emit, clock, pause)
    try:
        group.meet()
        yield group
    except BaseException as error:
        group.leave(error)
        raise
    group.leave(None)


def _holder_of(row: dict[str, Any]) -> LeaseHolder:
    return LeaseHolder("processes", "", row["host"], row["machine"], row["pid"], row["started"], 0.0)


class FileGroup:
    """Implements ``collectives.Group``. Every process must call the same methods in the same order."""

    def __init__(self, storage: Storage, folder: str, process: LaunchedProcess, arguments: Sequence[str], timeout: float,
                 emit: Emit, clock: Callable[[], float], pause: Callable[[float], Any]):
        self.storage, self.folder, self.process, self.rank, self.size = storage, folder, process, process.rank, process.size
        self.arguments, self.timeout, self.emit, self.clock, self.pause = list(arguments), timeout, emit, clock, pause
        self._nonce = runtime.token_hex(8)
        self._session, self._round = "", 0
        self._holders: dict[int, LeaseHolder] = {}

    # ---- the meeting -------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Waits until all processes have come. Raises ProcessLostError."""
        if self.rank == 0:
            self.storage.make_folder(self.folder)
            self._open_session()
        else:
            self._join_session()
        self.emit(Notice(f"this is process {self.rank} of {self.size} on host {self._holders[self.rank].host}, as "
                         f"{self.process.source} in the environment say" if self.process.source else
                         f"this is process {self.rank} of {self.size}"))

    @property
    def _pointer(self) -> str:
        return os.path.join(self.folder, f"{self.process.job or 'launch'}.json")

    def _open_session(self) -> None:
        self._remove_sessions()                                 # of an earlier launch whose processes died
        self._remove_dead_launches()
        self._session = os.path.join(self.folder, self._prefix + self._nonce)
        self.storage.make_folder(self._session)
        self._publish(_JOINED + "0", self._own_row())
        publish(self.storage, self._pointer, [json.dumps({"session": self._prefix + self._nonce}).encode()], self._nonce)
        rows = {rank: row for rank, row in self._collect(_JOINED, "to come").items() if isinstance(row, dict)}
        for rank, row in rows.items():
            if row["arguments"] != self.arguments:
                raise ProcessLostError(f"{self._name(rank)} was started with other arguments: {' '.join(row['arguments'])}; "
                                       f"process 0 with {' '.join(self.arguments)}")
        self._publish(_START, {rank: row["nonce"] for rank, row in rows.items()})

    @property
    def _prefix(self) -> str:
        return f"{self.process.job or 'launch'}{_SESSION}"

    def _remove_sessions(self) -> None:
        """Removes all sessions of this job, and half-written files."""
        for name in self.storage.list(self.folder):
            with suppress(OSError):                             # a process of an earlier launch is still writing there
                if name.startswith(self._prefix):
                    remove_tree(self.storage, os.path.join(self.folder, name))
                elif name.startswith(f".{os.path.basename(self._pointer)}."):
                    self.storage.remove(os.path.join(self.folder, name))

    def _remove_dead_launches(self) -> None:
        """Removes sessions with other job ids whose process 0 ran on this machine and is dead."""
        for name in self.storage.list(self.folder):
            job, found, _ = name.rpartition(_SESSION)
            session, pointer = os.path.join(self.folder, name), os.path.join(self.folder, f"{job}.json")
            if found and not name.startswith(self._prefix):
                with suppress(OSError, ValueError, KeyError, TypeError):
                    if is_alive(_holder_of(self._read(os.path.join(session, _JOINED + "0")))) is False:
                        if self._named_session(pointer) == session:
                            self.storage.remove(pointer)
                        remove_tree(self.storage, session)

    def _join_session(self) -> None:
        tried: set[str] = set()
        names: list[str] = []

        def missing() -> Collection[int]:
            session = self._named_session()
            names[:] = self.storage.list(session) if session else []
            if names and session not in tried and _GONE + "0" not in names:
                self._session = session
                with suppress(OSError):                 # process 0 of a later launch has just removed it
                    row = self._read(f"{_JOINED}{self.rank}")
                    if row is None:
                        self._publish(f"{_JOINED}{self.rank}", self._own_row())
                    if row is None or row["nonce"] == self._nonce:          # else of an earlier launch
                        tried.add(session)
            elif session and session in tried:
                if _START in names and (self._read(_START) or {}).get(str(self.rank)) == self._nonce:
                    return ()
                if _GONE + "0" in names:                # it came after this process had joined
                    raise ProcessLostError(f"process 0 of {self.size} has ended: {(self._read(_GONE + '0') or {}).get('error')}")
            return (0,)
        # process 0 waits for the others, each time for ``timeout``: it knows who does not come
        self._wait(missing, "to begin: it must run, and see this folder", lambda: tuple(names), 1.25 * self.timeout)
        self._collect(_JOINED, "to come")

    def _named_session(self, pointer: str = "") -> str:
        """Returns the session that process 0 names, or that of another job; empty if there is none."""
        try:
            path = pointer or self._pointer
            name = read_json(self.storage, path, 1 << 16)["session"]
            prefix = os.path.basename(path).removesuffix(".json") + _SESSION
            return os.path.join(self.folder, os.path.basename(name)) if name.startswith(prefix) else ""
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return ""

    def _own_row(self) -> dict[str, Any]:
        me = self._holders[self.rank] = holder_of_this_process("processes")
        return {"nonce": self._nonce, "host": me.host, "machine": me.machine, "pid": me.pid, "started": me.started,
                "arguments": self.arguments}

    # ---- messages ----------------------------------------------------------------------------------------------------

    def broadcast(self, message: bytes) -> bytes:
        """Returns the message of process 0, on every process. Raises ProcessLostError."""
        self._round += 1
        if self.rank == 0:
            self._publish(f"{self._round}-0", message)
            return message
        return self._collect(f"{self._round}-", "to answer", (0,))[0]

    def gather(self, message: bytes) -> list[bytes]:
        """Returns the messages of all processes in order, on every process. Raises ProcessLostError."""
        self._round += 1
        self._publish(f"{self._round}-{self.rank}", message)
        found = self._collect(f"{self._round}-", "to answer")
        for name in self.storage.list(self._session):           # all have read them: they have published this round
            number, _, rank = name.partition("-")
            if number.isdecimal() and int(number) < self._round and rank == str(self.rank):
                with suppress(OSError):
                    self.storage.remove(os.path.join(self._session, name))
        return [found[rank] for rank in range(self.size)]

    def _collect(self, prefix: str, what: str, ranks: Collection[int] | None = None) -> dict[int, Any]:
        """Waits for the files ``prefix``RANK of ``ranks``, by default of all. Returns their contents."""
        wanted, found = range(self.size) if ranks is None else ranks, {}

        def look() -> tuple[set[str], list[int]]:
            names = set(self.storage.list(self._session))
            for rank in wanted:
                if rank not in found and f"{prefix}{rank}" in names:
                    message = self._read(f"{prefix}{rank}", raw=prefix != _JOINED)
                    if message is not None:
                        found[rank] = message
                        if prefix == _JOINED:
                            self._holders[rank] = _holder_of(message)
            return names, [rank for rank in wanted if rank not in found]

        def missing() -> Collection[int]:
            names, left = look()
            problem = self._problem(names, left) if left else ""
            if problem:
                left = look()[1]                    # it may have published this message after the first look, and then left
            if problem and left:
                raise ProcessLostError(problem)
            return left
        self._wait(missing, what)
        return found

    def _problem(self, names: Collection[str], left: Sequence[int]) -> str:
        """Returns why it is in vain to wait for the processes ``left``; empty if it is not."""
        if f"{_JOINED}{self.rank}" not in names:
            return f"{self._name(0)} has ended, or is there twice: {self._session} was removed"
        for rank in range(self.size):
            if f"{_GONE}{rank}" in names and rank != self.rank:
                error = (self._read(f"{_GONE}{rank}") or {}).get("error")
                if error or rank in left:
                    return f"{self._name(rank)} has ended: {error or 'it has no more to do'}"
        for rank in left:
            if rank in self._holders and is_alive(self._holders[rank]) is False:
                return f"{self._name(rank)} died without a message: it was killed (out of memory?)"
        return ""

    def _wait(self, missing: Callable[[], Collection[int]], what: str, sign: Callable[[], object] = lambda: None,
              timeout: float | None = None) -> None:
        """Waits until ``missing`` returns no process. Raises ProcessLostError after ``timeout`` seconds in which neither these
        processes nor ``sign`` change."""
        pause, before, since, noted = _FIRST_PAUSE, None, self.clock(), self.clock()
        while left := missing():
            now = self.clock()
            if (left, sign()) != before:
                before, since = (left, sign()), now
            text = f"{listed([self._name(rank) for rank in left], 3)} {what}"
            if now - since > (timeout or self.timeout):
                raise ProcessLostError(f"waited {now - since:.0f} s for {text} ({self.folder}). "
                                       + (f"The environment has {self.process.source}: are there that many processes? "
                                          if self.process.source else "") + "The same command, started again, continues")
            if now - noted >= NOTE_EVERY:
                noted = now
                self.emit(Notice(f"waiting for {text}"))
            self.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _name(self, rank: int) -> str:
        known = self._holders.get(rank)
        return f"process {rank} of {self.size}" + (f" (host {known.host}, pid {known.pid})" if known else "")

    def _publish(self, name: str, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        publish(self.storage, os.path.join(self._session, name), [data], self._nonce)

    def _read(self, name: str, raw: bool = False) -> Any:
        """Returns the content of a file; None if it is not there yet: a listing can be newer than a look at one name."""
        try:
            with self.storage.open(os.path.join(self._session, name)) as file:
                data = file.read()
        except FileNotFoundError:
            return None
        return data if raw else json.loads(data)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """Tells the others that this process ends, and why; process 0 removes the session. Raises nothing."""
        if not self._session:
            return
        with suppress(OSError):
            self._publish(f"{_GONE}{self.rank}", {"error": f"{type(error).__name__}: {error}" if error is not None else ""})
        if error is not None and not isinstance(error, Exception):
            return                                              # stopped by a signal: the next launch removes the files
        end = self.clock() + (FAREWELL if error is None else FAREWELL_AFTER_ERROR)
        if self.rank:
            if not isinstance(error, ProcessLostError):
                self._let_process_0_end(end)
            return
        with suppress(OSError):
            while self.clock() < end:
                names = self.storage.list(self._session)
                if all(f"{_GONE}{rank}" in names or f"{_JOINED}{rank}" not in names
                       or rank in self._holders and is_alive(self._holders[rank]) is False for rank in range(self.size)):
                    break
                self.pause(_LONGEST_PAUSE / 10)
            if self._named_session() == self._session:
                self._remove_sessions()
                self.storage.remove(self._pointer)
            else:                                               # a later launch has begun
                remove_tree(self.storage, self._session)
        with suppress(OSError):                                 # another launch is using it
            self.storage.remove(self.folder)

    def _let_process_0_end(self, end: float) -> None:
        """Waits until process 0 has removed the name of the session, its last work. Launchers kill all processes as soon as one
        ends with an error: process 0 could neither print what was found nor remove what was begun."""
        with suppress(OSError):
            while self.clock() < end and self._named_session() == self._session:
                if 0 not in self._holders or is_alive(self._holders[0]) is False:
                    return
                self.pause(_LONGEST_PAUSE / 10)
