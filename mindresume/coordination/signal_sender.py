"""Notices SIGTERM at the moment when it arrives, and says who has sent it: this process itself,
another one, or not known.

MindSpore sends SIGTERM to its own process after a failure: when a worker of the data set has died,
when the scheduler is gone, when a collective has failed (HcclWatchDog). Python hides the sender
(``si_pid``), and runs handlers only between two instructions of the main thread, which can wait for
ever in the failed data set or collective. But

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
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from mindresume import runtime

OWN, OTHER, UNKNOWN = "own", "other", "unknown"
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
        self.on_own, self._seen, self._lock, self._is_closed = on_own, set(), runtime.Lock(), False

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
        while not self._is_closed:
            select.select([_pipe()[0]], [], [], _TICK)
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
