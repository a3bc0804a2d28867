"""Handles preemption: all ranks of a training that is asked to stop agree on a step, save it, and
end.

    SIGTERM on any rank, or the file of mindformers' graceful exit ─▶ a request of this rank
    at the same steps on all ranks, about every ``preemption_check_interval`` seconds ─▶ has any
        rank a request?
    all ranks: save this step ─▶ the training stops ─▶ committed ─▶ exit status 143 after SIGTERM, 0
        after the file

    SIGTERM that MindSpore sends to its own process ─▶ a failure: ``on_own_signal`` ends this
        process at once

Only a collective can agree on a step. One at every step would cost too much, so with each exchange
rank 0 sets the step of the next one. A single process needs no exchange.

A file with a request from before the training has most likely ended the previous one, and would end
every training after its first step. It counts again as soon as it is written again.

Who has sent SIGTERM, this process itself, another one, or not known, is noticed at the moment when
it arrives (``SignalSenders``). MindSpore sends SIGTERM to its own process after a failure: when a
worker of the data set has died, when the scheduler is gone, when a collective has failed
(HcclWatchDog). A request that came first remains one: a platform that stops all processes stops
the workers of the data set and the scheduler, too. Python hides the sender (``si_pid``), and runs
handlers only between two instructions of the main thread, which can wait for ever in the failed
data set or collective. But

- the kernel writes who sent a signal to the stack on which the handler runs. So Python's handler,
  which is written in C, runs on a stack of ours, where the sender is found. It is the main thread
  that takes a signal, unless it blocks it;
- that handler writes the number of the signal into a pipe, which a thread of ours reads.

So no signal is blocked, in no thread and no child, and no code of ours runs while a signal is being
delivered.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol

from mindresume import runtime
from mindresume.coordination.collectives import Group, gather_results
from mindresume.storage.posix import PosixStorage
from mindresume.typed import parse_json

# exit status of a process that stopped because of the signal
STATUS = 128 + signal.SIGTERM
BY_SIGNAL = "SIGTERM"
BY_FILE = "graceful exit"
BY_UNKNOWN = "SIGTERM of an unknown sender"
BY_GUARD = "bad step"
REASONS = BY_GUARD, BY_SIGNAL, BY_FILE, BY_UNKNOWN  # what counts first
SIGNALS = BY_SIGNAL, BY_UNKNOWN  # the process ends with STATUS
# with MS_ENABLE_GRACEFUL_EXIT=1, where no OnRequestExit names another
FILE = "graceful_exit.json"
_KEY = "GracefulExit"  # mindspore train/callback/_on_request_exit.py
_FILE_CHECK = 1.0  # seconds between two checks of the file
_LIMIT = 1 << 16  # bytes of the file


# (inode, time of the change, size): distinguishes the contents of a file at different times
Version = tuple[int, int, int]


class Peers(Protocol):
    """What the exchanges of a preemption carry besides, from rank to rank."""

    def local_state(self) -> Any:
        """Returns a value, as JSON has it, that an exchange sends to the other ranks."""

    def on_peer_state(self, rows: Sequence[Any]) -> None:
        """Receives these values of all ranks, in order."""


class ExitFile:
    """The file of the graceful exit, as this rank sees it. A request in it from before the training
    does not count.

    Args:
        callbacks: MindSpore's OnRequestExit among the callbacks of the training, which can name the
            file. Its callback reads the file itself, and would stop the training because of a
            request that does not count: that is kept from it.
        before: as of ``requests``, before the network was compiled; other files are read now.
    """

    def __init__(self, callbacks: Sequence[Any], before: Mapping[str, Version | None]):
        self.path = next(
            (str(other.remote_config_file) for other in callbacks if other.remote_config_file),
            FILE if os.environ.get("MS_ENABLE_GRACEFUL_EXIT") == "1" else "",
        )
        self._looked = -_FILE_CHECK
        asks = request(self.path) if self.path else None
        # a request that does not count
        self._stale = asks if asks == before.get(self.path, asks) else None
        self._ignoring = [
            other for other in callbacks if self._stale and other.remote_config_file == self.path
        ]
        for other in self._ignoring:
            other.remote_config_file = None

    @property
    def ignored(self) -> str:
        """Returns a message about a request from before the training; empty if there is none."""
        if self._stale is None:
            return ""
        return (
            f"{os.path.abspath(self.path)} requested a stop ({_KEY}: 1) before this training "
            "began, and most likely ended the previous one: it is ignored until it is written "
            f"again. Set {_KEY} to 0, or remove the file; a 1 after that stops this training"
        )

    def asks(self) -> bool:
        """Returns whether the file requests a stop now. Looks at it once in a second."""
        if runtime.monotonic() - self._looked < _FILE_CHECK:
            return False
        self._looked = runtime.monotonic()
        asks = request(self.path)
        if asks == self._stale:
            return False
        self._stale = None
        while self._ignoring:
            self._ignoring.pop().remote_config_file = self.path
        return asks is not None


class PreemptionHandler:
    """Notices requests to stop on this rank, and agrees with the other ranks on a step.

    Args:
        seconds: approximate time between two exchanges; 0: none, so requests have no effect.
        callbacks: of the training. MindSpore's OnRequestExit names the file of the graceful exit,
            and may handle the signal.
        before: see ``ExitFile``.
        on_own_signal: called once, in any thread, after SIGTERM of this process itself, unless the
            ranks have agreed to stop.

    Attributes:
        finding: a bad step of this rank (``saving.guard``), sent to the others; None: none.
        findings: those of all ranks at the last exchange.
    """

    finding: Any = None
    findings: Sequence[Any] = ()

    def __init__(
        self,
        group: Group,
        seconds: float,
        callbacks: Iterable[Any] = (),
        peers: Peers | None = None,
        before: Mapping[str, Version | None] | None = None,
        on_own_signal: Callable[[], None] | None = None,
    ):
        self.group = group
        self.seconds = seconds
        self.peers = peers
        self.others = [
            callback for callback in callbacks if hasattr(callback, "remote_config_file")
        ]
        self.file = ExitFile(self.others, before or {})
        self.signalled = False
        # the ranks stop, or this one ends by its own signal
        self._is_decided = False
        self._senders, self._on_own_signal = SignalSenders(self._end_by_own_signal), on_own_signal
        self._next, self._interval = 0, 1
        self._asked: tuple[int, float] | None = None  # (step, time) of the last exchange
        self._before: Any = None
        self._pid = os.getpid()

    def install(self) -> None:
        """Installs a handler of SIGTERM, so that the signal does not end the process at once. Only
        in the main thread."""
        if self.seconds and runtime.current_thread() is runtime.main_thread():
            self._before = runtime.signal(signal.SIGTERM, self._note)
            self._senders.begin()

    def close(self) -> None:
        """Restores the former handler of SIGTERM."""
        if self._before is not None:
            self._senders.close()
            runtime.signal(signal.SIGTERM, self._before)
            self._before = None

    def _note(self, *_: Any) -> None:
        # a fork of this process: nobody asks for its signals
        if os.getpid() != self._pid:
            runtime.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.signalled = True

    def _end_by_own_signal(self) -> None:
        if not self._is_decided:
            self._is_decided = True
            if self._on_own_signal is not None:
                self._on_own_signal()

    def local_request(self) -> str:
        """Returns the request of this rank, one of REASONS, or empty."""
        if self.finding is not None:
            return BY_GUARD
        if self._before is not None and self.others:
            # MindSpore's callback has installed a handler of its own
            self._senders.arm()
        if self.signalled or any(other.exit for other in self.others):
            sender = self._senders.look()
            if sender != OWN:
                return BY_SIGNAL if sender == OTHER else BY_UNKNOWN
            self._end_by_own_signal()
        return BY_FILE if self.file.path and self.file.asks() else ""

    def check(self, step: int) -> str:
        """Returns why to stop after ``step``, the same on all ranks; empty: go on. A collective at
        some steps."""
        if not self.seconds or self.group.size > 1 and step < self._next:
            return ""
        self.findings = [self.finding]
        reason = self.local_request() if self.group.size == 1 else self._exchange(step)
        self._is_decided = self._is_decided or bool(reason)
        return reason

    def _exchange(self, step: int) -> str:
        """Returns the request of all ranks that counts first. A collective, which sets the step of
        the next one."""
        rows = gather_results(self.group, partial(self._own_row, step))
        if self.peers:
            self.peers.on_peer_state([row[2] for row in rows])
        self.findings = [row[3] for row in rows]
        self._interval = rows[0][1]
        self._next, self._asked = step + self._interval, (step, runtime.monotonic())
        return next((reason for reason in REASONS for row in rows if row[0] == reason), "")

    def _own_row(self, step: int) -> list[Any]:
        return [
            self.local_request(),
            self._propose(step),
            self.peers.local_state() if self.peers else None,
            self.finding,
        ]

    def _propose(self, step: int) -> int:
        """Returns the steps until the next exchange: as many as take ``seconds``, at most twice as
        many as last time."""
        if self._asked is None:
            return 1
        before, then = self._asked
        each = max(runtime.monotonic() - then, 1e-6) / max(step - before, 1)
        return max(1, min(2 * self._interval, int(self.seconds / each)))


def requests(config: Any) -> dict[str, Version | None]:
    """Returns {path: version, if it requests a stop} of every file that the configuration of a
    training may name."""
    named = [
        callback.get("config_file")
        for callback in config.get("callbacks") or ()
        if isinstance(callback, Mapping)
    ]
    return {str(path): request(str(path)) for path in (FILE, *named) if path}


def request(path: str) -> Version | None:
    """Returns the version of the file if it requests a stop. None: it does not, does not exist, or
    is being written."""
    try:
        with PosixStorage().open(path) as file:
            status, value = os.fstat(file.fileno()), parse_json(file.read(_LIMIT))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get(_KEY) != 1:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


# ---- who has sent SIGTERM ------------------------------------------------------------------------

OWN = "own"
OTHER = "other"
UNKNOWN = "unknown"
# bytes of the stack; a frame of the kernel has up to 12 KiB
_SIZE = 1 << 18
# seconds between two looks while somebody else has the pipe's place
_TICK = 1.0
_SA_SIGINFO, _SA_ONSTACK = 4, 0x0800_0000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.calloc.restype = ctypes.c_void_p
# siginfo_t, 128 bytes: number, 0, code (kill, kernel, sigqueue, tgkill), padding, process, user,
# value, zeros
_SIGINFO = re.compile(
    rb"\x0f\0{7}(?:\0{4}|\x80\0{3}|\xff{4}|\xfa\xff{3})\0{4}(.{4}).{4}.{8}\0{96}", re.DOTALL
)


class _Stack(ctypes.Structure):  # stack_t
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


class _Action(ctypes.Structure):  # struct sigaction of 64-bit Linux
    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_char * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class SignalSenders:
    """Says who has sent the SIGTERMs of this process since ``begin``. ``on_own``: called once, in a
    thread, when all of them came from this process itself."""

    def __init__(self, on_own: Callable[[], None] | None = None):
        self.on_own = on_own
        self._seen = set()
        self._lock = runtime.Lock()
        self._is_closed = False

    @runtime.asks_machine
    def begin(self) -> None:
        """Begins to watch. Only in the main thread, after ``signal.signal``."""
        self.arm()
        _drain(_pipe()[0])
        _take_senders()  # of signals before, which nobody has looked for
        runtime.set_wakeup_fd(_pipe()[1], warn_on_full_buffer=False)
        # the limit of threads is reached: ``look`` notices the signal
        with suppress(RuntimeError):
            runtime.Thread(target=self._watch, name="mindresume-signals", daemon=True).start()

    def arm(self) -> None:
        """Makes the handler of SIGTERM run on the stack. Only in the main thread; again after
        another ``signal.signal``."""
        action = _Action()
        if (
            _LIBC.sigaltstack(ctypes.byref(_Stack(_stack(), 0, _SIZE)), None) == 0
            and _LIBC.sigaction(signal.SIGTERM, None, ctypes.byref(action)) == 0
        ):
            action.flags |= _SA_SIGINFO | _SA_ONSTACK
            _LIBC.sigaction(signal.SIGTERM, ctypes.byref(action), None)

    @runtime.asks_machine
    def close(self) -> None:
        """Ends the watch. The pipe and the stack remain, because a handler may still use them."""
        self._is_closed = True
        with suppress(ValueError):  # not in the main thread
            current = runtime.set_wakeup_fd(-1)
            if current != _pipe()[1]:
                runtime.set_wakeup_fd(current)

    @runtime.asks_machine
    def look(self) -> str:
        """Returns OTHER if any signal came from another process, OWN if all came from this one,
        else UNKNOWN. Of two signals in a row the second one can replace the first one on the stack;
        the pipe has both."""
        with self._lock:
            count = _drain(_pipe()[0])  # first: what it counts has been on the stack
            found = _take_senders()
            self._seen |= {OWN if pid == os.getpid() else OTHER for pid in found}
            if found and count > len(found):
                self._seen.add(UNKNOWN)
        return OTHER if OTHER in self._seen else OWN if self._seen == {OWN} else UNKNOWN

    def _watch(self) -> None:
        signalled = select.poll()  # select() knows no descriptor over 1023
        signalled.register(_pipe()[0], select.POLLIN)
        while not self._is_closed:
            signalled.poll(_TICK * 1000)
            if not self._is_closed and self.look() == OWN:
                if self.on_own is not None:
                    self.on_own()
                return


@cache
def _pipe() -> tuple[int, int]:
    """Returns (reading end, writing end) of a pipe that is never closed."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


@cache
def _stack() -> int:
    """Returns the address of the stack, which is never freed."""
    return _LIBC.calloc(1, _SIZE)


def _drain(end: int) -> int:
    """Returns how many SIGTERMs a pipe has told."""
    with suppress(BlockingIOError):
        return os.read(end, 1 << 16).count(signal.SIGTERM)
    return 0


def _take_senders() -> list[int]:
    """Returns the senders on the stack, each once. A taken one gets another number, which nobody
    reads: the rest of a frame may still be needed."""
    found = list(_SIGINFO.finditer(ctypes.string_at(_stack(), _SIZE)))
    for match in found:
        ctypes.memset(_stack() + match.start(), 0, 4)
    return [int.from_bytes(match[1], "little") for match in found]
