"""Examines the place where a training shall run: what is installed, what mindresume will do with a
configuration, where saves go, and what else on the machine takes part in a recovery.

    examine("my.yaml").checks

Nothing is left behind; the folder for saves gets one small file, which is removed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import glob
from typing import Any

from mindresume import runtime
from mindresume.coordination.neighbours import PAGE, neighbours
from mindresume.formatting import size_text
from mindresume.storage.posix import SHARED_TYPES, PosixStorage, filesystem_type, is_shared

OK, NOTE, WRONG = "ok", "note", "wrong"
_IMPORT_SECONDS = 300.0
_LITTLE = 1 << 30  # bytes of a tmpfs, of which containers often have 64 MiB
_PORT = 8118  # of msrun's scheduler, if MS_SCHED_PORT does not name another
_LISTENS = "0A"  # state of a socket in /proc/net/tcp


@dataclass(frozen=True)
class Check:
    """Describes one thing that was examined.

    Attributes:
        about: what it is.
        state: ``ok``; ``note``: to be known; ``wrong``: a training would not start or not save.
        found: what was found.
        remedy: what to do; empty: nothing.
    """

    about: str
    state: str
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Examination:
    """Holds the checks, in the order of a start."""

    checks: tuple[Check, ...]

    @property
    def is_fit(self) -> bool:
        """Whether nothing is wrong."""
        return all(check.state != WRONG for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary of JSON values."""
        return {"fit": self.is_fit, "checks": [asdict(check) for check in self.checks]}


def examine(config: str = "", folder: str = "") -> Examination:
    """Returns what is found out here, in this environment.

    Args:
        config: path of the training's YAML; empty: only the machine is examined.
        folder: where the training would save; empty: ``output_dir`` of the configuration, else
            ``./output``.
    """
    checks, found = _framework(config)
    checks += _output_folder(folder or str(found.get("output_dir", "./output")))
    memory = found.get("memory_dir")
    checks.append(_memory(str(memory or "/dev/shm"), memory is not None))
    checks += [_port(), _devices(), *_neighbours(os.environ)]
    return Examination(tuple(checks))


def _framework(config: str) -> tuple[list[Check], Mapping[str, Any]]:
    """Returns the checks of mindformers and the configuration, and the folders that it names. A
    process of its own makes them: an import of mindspore can end a process."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "mindresume.mindformers.examination", config]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_IMPORT_SECONDS,
                env={**os.environ, "LOG_MF_PATH": logs},
            )
            what = f"its import ended with status {done.returncode}"
            last = (done.stderr.strip().splitlines() or [""])[-1]
            output = done.stdout
        except subprocess.TimeoutExpired:
            what, last, output = f"its import did not end within {_IMPORT_SECONDS:.0f} s", "", ""
    with suppress(ValueError, LookupError):
        found = json.loads(output.strip().splitlines()[-1])
        return [Check(*row) for row in found["checks"]], found
    text = f"{what}: {last}" if last else what
    remedy = "python -c 'import mindformers' shows the whole error"
    return [Check("installation", WRONG, text, remedy)], {}


def _output_folder(path: str) -> list[Check]:
    storage = PosixStorage()
    there = os.path.abspath(path)
    while not os.path.isdir(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    probe = os.path.join(there, f".mindresume-doctor-{runtime.token_hex(4)}")
    try:
        storage.write(f"{probe}.tmp", [b"probe"])
        storage.rename(f"{probe}.tmp", probe)
        storage.remove(probe)
        free = storage.free_space(there)
    except OSError as error:
        with suppress(OSError):
            storage.remove(f"{probe}.tmp")
        return [
            Check(
                "output folder",
                WRONG,
                f"{there} cannot be written: {error.strerror or error}",
                "name a folder that this user can write to as output_dir",
            )
        ]
    kind = filesystem_type(os.path.realpath(there)) or "unknown file system"
    shared = is_shared(there, os.environ.get("SHARED_PATHS", ""))
    return [
        Check("output folder", OK, f"{there} can be written, {size_text(free)} free ({kind})"),
        Check(
            "shared by all nodes",
            OK if shared else NOTE,
            f"yes, {'a network file system' if kind in SHARED_TYPES else 'SHARED_PATHS names it'}"
            if shared
            else f"{kind} is not known as a network file system",
            ""
            if shared
            else "with several nodes: a job finds out by itself whether they share it; without a "
            "shared folder a resume needs the same nodes (docs/several_nodes.md)",
        ),
    ]


def _memory(path: str, is_used: bool) -> Check:
    wrong = WRONG if is_used else NOTE
    kind = filesystem_type(os.path.realpath(path)) if os.path.isdir(path) else ""
    if kind != "tmpfs":
        return Check(
            "memory for saves",
            wrong,
            f"{path} is no tmpfs but {kind or 'missing'}",
            "name a tmpfs as mindresume.memory_tier.dir, or set every_steps: 0",
        )
    size = PosixStorage().free_space(path)
    return Check(
        "memory for saves",
        OK if size >= _LITTLE else NOTE,
        f"{path} has {size_text(size)} free",
        ""
        if size >= _LITTLE
        else "give the container more: docker run --shm-size, or an emptyDir of medium Memory",
    )


def _port() -> Check:
    """Looks whether the scheduler's port is taken, in the kernel's table of sockets."""
    text = os.environ.get("MS_SCHED_PORT", str(_PORT))
    taken = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table, encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
            taken |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENS}
    if text.isdigit() and int(text) in taken:
        return Check(
            "scheduler's port",
            NOTE,
            f"port {text} of this host is in use, perhaps by a job that runs",
            "end that job, or give msrun another --master_port",
        )
    return Check("scheduler's port", OK, f"port {text} of this host is free")


def _devices() -> Check:
    cards = len(glob("/dev/davinci[0-9]*"))
    toolkit = os.environ.get("ASCEND_TOOLKIT_HOME") or os.environ.get("ASCEND_HOME_PATH")
    if not cards:
        return Check("NPUs", NOTE, "none on this host: trainings run on CPUs")
    return Check(
        "NPUs",
        OK if toolkit else NOTE,
        f"{cards} on this host" + (f", CANN in {toolkit}" if toolkit else ""),
        "" if toolkit else "source set_env.sh of CANN before a training: it sets ASCEND_HOME_PATH",
    )


def _neighbours(environment: Mapping[str, str]) -> Iterator[Check]:
    """Yields what of Huawei's stack and of a platform is found here."""
    for found in neighbours(environment):
        yield Check(found.name, NOTE if found.remedy else OK, found.text, found.remedy or PAGE)
    if environment.get("KUBERNETES_SERVICE_HOST"):
        yield Check("Kubernetes", OK, "this process runs in a pod", "docs/kubernetes.md")
