"""Asks ``training_host`` for trainings. One host serves all cases of this process; it starts with
the first training."""

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_HOST: list[subprocess.Popen] = []


def _host() -> subprocess.Popen:
    if not _HOST:
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("MINDRESUME_")
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".pytest_cache" / "bytecode"))
        _HOST.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.judge.training_host"],
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        atexit.register(end)
    return _HOST[0]


def end() -> None:
    """Ends the host, if there is one."""
    while _HOST:
        host = _HOST.pop()
        host.stdin.close()
        host.wait()


def train(
    folder: Path, log: Path, ranks: int, environment: dict[str, str], **train: Any
) -> list[dict]:
    """Runs one job in ``folder``; returns for each rank its ``status``, ``error`` and ``steps``.
    ``train``: what ``training.run`` takes."""
    host = _host()
    request = {
        "folder": str(folder),
        "log": str(log),
        "ranks": ranks,
        "environment": environment,
        "train": train,
    }
    host.stdin.write(json.dumps(request) + "\n")
    host.stdin.flush()
    answer = host.stdout.readline()
    if not answer:
        raise RuntimeError(f"the host of the trainings ended with status {host.wait()}")
    return json.loads(answer)
