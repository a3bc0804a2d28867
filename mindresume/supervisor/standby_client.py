"""Is found as ``msrun`` by the command of ``mindresume run --standby``: asks the standby process to
fork the real msrun, and stands for it: signals, end, exit status. If there is none, or it cannot
take this start over, it becomes the real msrun.

Only the standard library is imported: this is the path of each start.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import sys
from typing import Any

SOCKET, CALL = "standby.sock", "call.json"
PREFIX = "MINDRESUME_STANDBY"  # of the variables by which the supervisor speaks to this process
_ANSWER = 10.0  # seconds
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_STATUS = "Uid Gid Groups Umask NoNewPrivs Seccomp SigBlk SigIgn CapEff Cpus_allowed"


def inherited() -> dict[str, Any]:
    """Returns what this process has from its parent and gives to its children, besides environment,
    folder and descriptors: a fork of another process has that one's."""
    found: dict[str, Any] = {
        "priority": [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in sorted(dir(resource))
            if name.startswith("RLIMIT_")
        },
    }
    with open("/proc/self/status", encoding="utf-8") as file:
        lines = (line.split(":", 1) for line in file)
        found |= {name: value.split() for name, value in lines if name in _STATUS.split()}
    for name in ("cgroup", "oom_score_adj"):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", encoding="utf-8") as file:
            found[name] = file.read()
    for name in os.listdir("/proc/self/ns"):
        found[f"namespace {name}"] = os.readlink(f"/proc/self/ns/{name}")
    return found


def main(argv: list[str]) -> int:
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")
    folder = os.environ.get(PREFIX, "")
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[name]
    folders = [part for part in os.environ.get("PATH", "").split(os.pathsep) if part != here]
    os.environ["PATH"] = os.pathsep.join(folders)
    msrun = shutil.which("msrun")
    if msrun is None:
        print("mindresume: no msrun on PATH; it comes with mindspore", file=sys.stderr)
        return 127
    argv = [msrun, *argv]
    call = {
        "argv": argv,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "inherited": inherited(),
    }
    # the real msrun ends with the other end of this pipe
    end, mine = os.pipe()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER)
            # of any length: the path of a socket has at most 107 bytes
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
            connection.connect(f"/proc/self/fd/{place}/{SOCKET}")
            os.close(place)
            socket.send_fds(connection, [b" "], [0, 1, 2, end])
            connection.sendall(json.dumps(call).encode() + b"\n")
            os.close(end)
            answers = connection.makefile("rb")
            answer = json.loads(answers.readline())
            if "pid" in answer:
                connection.settimeout(None)
                return follow(answers, answer["pid"])
            print(f"mindresume: ordinary start: {answer['refused']}", file=sys.stderr)
    except (OSError, ValueError, KeyError) as error:
        # there is none before the first step
        if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
            print(f"mindresume: ordinary start: the standby process: {error}", file=sys.stderr)
    os.close(mine)
    leave(folder, call)
    return os.execv(msrun, argv)


def follow(answers: Any, pid: int) -> int:
    """Waits for the end of the real msrun. Returns its exit status."""

    forwarded = [signal.SIGKILL]

    def forward(number: int, frame: Any) -> None:
        forwarded.append(signal.Signals(number))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    print("mindresume: the standby process forks this start", file=sys.stderr, flush=True)
    status = answers.readline()
    answers.read()  # until it has ended
    if status:
        return int(json.loads(status)["status"])
    # it was killed
    if forwarded[-1] != signal.SIGKILL:
        signal.signal(forwarded[-1], signal.SIG_DFL)
    os.kill(os.getpid(), forwarded[-1])
    return 1


def leave(folder: str, call: dict[str, Any]) -> None:
    """Leaves the call for the supervisor, which makes a standby process for it."""
    path = os.path.join(folder, CALL)
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump(call, file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
