"""Keeps a standby process beside a job: it has imported mindspore and mindformers, so that the next
start forks its ranks instead of importing them again (``standby_process``).

    first start   the command finds our msrun in PATH, which leaves here how it was called and
                  becomes the real one  ─▶  all ranks train  ─▶  the standby process is made
    next starts   our msrun hands its call over to the standby process

A start that it cannot take over is an ordinary one; our msrun says why, and a new standby process
is made for the next one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from mindresume.events import Emit, Notice, end_text, warning
from mindresume.supervisor.evidence import tail
from mindresume.supervisor.job import Command, Job
from mindresume.supervisor.members import send
from mindresume.supervisor.standby_client import CALL, PREFIX, SOCKET

_HERE = Path(__file__).resolve().parent
_TAKEN, _LOG = "taken.json", "standby.log"  # in the same folder, see standby_process
# The kernel shows arguments and environment of a rank in the place of those of the standby process.
_ROOM = "x" * (1 << 14)


class Standby:
    """Makes the standby process, and ends it.

    Args:
        folder: of this supervisor, in memory or on the local disk.
    """

    def __init__(self, folder: str, emit: Emit):
        self.folder = folder
        self.emit = emit
        self._command: Command | None = None
        self._is_said = False  # that it is ready, or that there will be none

    def variables(self) -> dict[str, str]:
        """Returns the variables with which the command finds our msrun."""
        own = str(_HERE / "bin")
        with suppress(OSError):  # what unpacks a wheel can forget it
            os.chmod(_HERE / "bin" / "msrun", 0o755)
        return {
            "PATH": f"{own}:{os.environ.get('PATH', os.defpath)}",
            PREFIX: self.folder,
            f"{PREFIX}_PYTHON": sys.executable,
            f"{PREFIX}_BIN": own,
        }

    def make_if_due(self, job: Job) -> None:
        """Makes a standby process once all ranks of this node train, if the running start was an
        ordinary one. Says when it is ready, and if it has ended."""
        self._look(job)
        beats = job.heartbeats.known.values()
        if not beats or not all(beat.has_trained for beat in beats):
            return
        taken = os.path.join(self.folder, _TAKEN)
        try:
            os.replace(os.path.join(self.folder, CALL), taken)
            with open(taken, encoding="utf-8") as file:
                call = json.load(file)
        except FileNotFoundError:
            if self._command is None and not self._is_said:
                self._is_said = True
                self.emit(
                    warning(
                        "--standby has no effect: the command does not start msrun by its name, so "
                        "the next start imports everything again"
                    )
                )
            return
        except (OSError, ValueError) as error:
            self.emit(warning(f"no standby process: {error}"))
            return
        self.close()
        environment = {
            # the launcher ends all processes that have its mark
            name: value
            for name, value in call["environment"].items()
            if not name.startswith("MSRUN_LAUNCHER_")
        }
        environment[f"{PREFIX}_ROOM"] = _ROOM
        words = [str(_HERE / "standby_process.py"), self.folder, _ROOM]
        # python makes relative parts of its path absolute when it begins
        shell = ["sh", "-c", 'cd "$0" && exec python "$@"', call["cwd"]]
        self._command = Command([*shell, *words], environment, to_stderr=True)
        self._command.start("")

    def _look(self, job: Job) -> None:
        """Looks after the standby process."""
        command = self._command
        if command is None:
            return
        if command.error is not None:
            self._say_end(f"cannot be started: {command.error}")
        elif command.pid:
            job.members.ignore(command.pid)
            with suppress(ChildProcessError):
                ended, status = os.waitpid(command.pid, os.WNOHANG)
                if ended:
                    status = os.waitstatus_to_exitcode(status)
                    lines = tail(os.path.join(self.folder, _LOG)).strip().splitlines()[-1:]
                    self._say_end(": ".join([end_text(status), *(lines if status > 0 else [])]))
            if not self._is_said and os.path.exists(os.path.join(self.folder, SOCKET)):
                self._is_said = True
                self.emit(
                    Notice(
                        f"standby process {command.pid} has imported mindspore and mindformers: "
                        "the next start forks its ranks"
                    )
                )

    def _say_end(self, how: str) -> None:
        self.close()
        self._is_said = True
        text = f"the standby process {how}; the next start imports everything again"
        self.emit(warning(text))

    def close(self) -> None:
        """Ends the standby process."""
        if self._command is not None:
            if self._command.pid:
                send(self._command.pid, signal.SIGKILL)
            self._command.close()
            self._command = None
        self._is_said = False
        with suppress(FileNotFoundError):
            os.remove(os.path.join(self.folder, SOCKET))
