"""Counts the file operations of one save in this process and kills the process at one of them, for
builtin_drill.py.

Operations are seen through CPython's audit events (open for writing, rename, remove, mkdir, rmdir)
and, for native writers that raise none, through wrappers around the functions that call them
(safetensors' ``save_file``). Only operations below ``folder`` between ``begin`` and ``finish``
count, in all threads of the process.

Faults, each ended by SIGKILL:

before   right before the operation empty    the file is open for writing and nothing has been
         flushed into it: what a kill leaves of a buffered write torn     the file is complete and
         closed, then cut in half
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EVENTS = {
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
    "os.link": "link",
    "os.symlink": "link",
}


@dataclass(frozen=True)
class Fault:
    """A kill at operation ``number``, from 1; 0 for none, to count the operations."""

    number: int
    kind: str


class Watch:
    """Counts operations below ``folder``. ``log``: a file outside of ``folder`` for one JSON line
    an operation."""

    def __init__(self, folder: str, log: str, fault: Fault):
        self.folder, self.fault = os.path.abspath(folder), fault
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._count = 0
        self._active = False
        self._lock = threading.RLock()
        self._before = set()
        self._touched: set[str] = set()

    def install(self) -> None:
        """Installs the hooks for the rest of this process: an audit hook cannot be removed."""
        import mindspore.train.serialization as serialization
        import safetensors.numpy

        for module in (serialization, safetensors.numpy):
            module.save_file = self._native(module.save_file)
        sys.addaudithook(self._hook)

    def begin(self) -> None:
        self._before, self._active = set(self._files()), True

    def finish(self) -> None:
        """Ends counting, and logs the new files that no counted operation made: then the count is
        incomplete."""
        self._active = False
        self.say(missed=sorted(set(self._files()) - self._before - self._touched))

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def say(self, **line: Any) -> None:
        os.write(self._log, (json.dumps(line) + "\n").encode())

    def _files(self) -> list[str]:
        return [
            os.path.join(place, name) for place, _, names in os.walk(self.folder) for name in names
        ]

    def _inside(self, path: Any, handle: Any = -1) -> str | None:
        """Returns the absolute path, or None if it is not below the folder. ``handle``: the dir_fd
        of the call, -1 for none."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        base = (
            os.readlink(f"/proc/self/fd/{handle}")
            if isinstance(handle, int) and handle >= 0
            else os.getcwd()
        )
        path = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        return path if path.startswith(self.folder + os.sep) else None

    def _hook(self, event: str, arguments: tuple) -> None:
        if not self._active:
            return
        if event == "open":
            path = self._inside(arguments[0])
            if path and (arguments[2] or 0) & WRITING and not os.path.isdir(path):
                self._operation("create", path)
        elif event in EVENTS:
            handle = {"os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.rename": 2}.get(event)
            path = self._inside(arguments[0], arguments[handle] if handle else -1)
            target = self._inside(arguments[1]) if event in ("os.rename", "os.link") else None
            if path or target:
                self._operation(EVENTS[event], path or os.fsdecode(arguments[0]), target)

    def _operation(self, kind: str, path: str, target: str | None = None) -> int:
        """Counts and logs an operation; returns its number."""
        with self._lock:
            self._count += 1
            number = self._count
        self._touched.update({path, target} - {None})
        line = {
            "operation": number,
            "kind": kind,
            "path": os.path.relpath(path, self.folder),
            "thread": threading.current_thread().name,
        }
        if target:
            line["to"] = os.path.relpath(target, self.folder)
        self.say(**line)
        if number == self.fault.number and self.fault.kind == "before":
            self.die()
        elif number == self.fault.number and kind == "create":
            self._wait_in_this_thread(path)
        return number

    def _wait_in_this_thread(self, path: str) -> None:
        """Watches the calls of this thread until the file is open (empty) or closed (torn)."""

        def profile(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code.co_filename == __file__ or not os.path.exists(path):
                return
            if self.fault.kind == "empty":
                self.die()
            elif (
                event == "c_return"
                and getattr(argument, "__name__", "") in ("close", "__exit__")
                and self._inside(getattr(getattr(argument, "__self__", None), "name", None)) == path
            ):
                self._tear(path)

        sys.setprofile(profile)

    def _tear(self, path: str) -> None:
        os.chmod(path, 0o600)
        os.truncate(path, os.path.getsize(path) // 2)
        self.die()

    def _native(self, original: Any) -> Any:
        def save_file(tensors: Any, filename: Any, *arguments: Any, **named: Any) -> Any:
            path = self._inside(filename)
            if not self._active or path is None:
                return original(tensors, filename, *arguments, **named)
            number = self._operation("write", path)
            original(tensors, filename, *arguments, **named)
            if (number, "torn") == (self.fault.number, self.fault.kind):
                self._tear(path)
            return None

        return save_file
