"""The processes of the reference engine: what they do, and how they are started and watched.

``python -m mindresume.reshard.mindspore_worker JOB.json ...`` does one job after the other. A job: {"kind": "ranks", "folder" or
"unified"; "source", "out": folders; "source_strategy", "target_strategy": files or null; "format": of the files; "ranks": those
of the target; "processes": at most so many; "redundant": whether all ranks have all that they should hold}. It reads
``<source>/rank_<R>/weights.<format>`` and writes ``<out>/rank_<R>/weights<R>.<format>``, or complete files into ``out``.
"""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mindresume.errors import EngineError

COMMAND = (sys.executable, "-m", "mindresume.reshard.mindspore_worker")
PAUSE = 0.05                # seconds between two looks at the processes
LAST_LINES = 6              # of what a process said, in an error
LAST_BYTES = 1 << 16        # in which they are looked for


# ---- in the process --------------------------------------------------------------------------------------------------

def main(paths: list[str]) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    from mindspore.parallel import transform_safetensors
    guard(transform_safetensors)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            job = json.load(file)
        {"ranks": by_rank, "folder": by_folder, "unified": unified}[job["kind"]](job)


def end_with_parent() -> None:
    """The parent holds the other end of the pipe and never writes; it is closed when the parent is no more, however that came.
    Ends this process and those it started."""
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def guard(engine: Any) -> None:
    """Two defects of MindSpore. It hands views to ``save_file``, of which safetensors 0.8.0 ignores the strides; arrays without
    dimensions must stay so, which ``ascontiguousarray`` does not do. And after each part ``unified_safetensors`` sleeps as long
    as more than half of the memory of the machine is in use, by whomever."""
    save = engine.save_file

    def save_contiguous(tensors: dict[str, Any], *args: Any, **options: Any) -> Any:
        return save({name: np.asarray(array, order="C") for name, array in tensors.items()}, *args, **options)

    engine.save_file = save_contiguous
    engine.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(percent=0.0))


def by_rank(job: dict[str, Any]) -> None:
    """ckpt only: ``transform_safetensors_by_rank`` of MindSpore 2.9.0 raises AttributeError, whatever it is given."""
    import mindspore
    strategies = job["source_strategy"], job["target_strategy"]
    for rank in job["ranks"]:
        needed = mindspore.rank_list_for_transform(rank, *strategies)
        files = {number: os.path.join(job["source"], f"rank_{number}", f"weights.{job['format']}") for number in needed}
        folder = os.path.join(job["out"], f"rank_{rank}")
        os.makedirs(folder, mode=0o700)
        mindspore.transform_checkpoint_by_rank(rank, files, os.path.join(folder, f"weights{rank}.{job['format']}"), *strategies)


def by_folder(job: dict[str, Any]) -> None:
    """All ranks at once. ``process_num`` 1: with more, what a process fails to write is just not there."""
    import mindspore
    mindspore.transform_checkpoints(job["source"], job["out"], "weights", job["source_strategy"], job["target_strategy"],
                                    process_num=1, output_format=job["format"])


def unified(job: dict[str, Any]) -> None:
    from mindspore.parallel import unified_safetensors
    unified_safetensors(job["source"], job["source_strategy"], job["out"], merge_with_redundancy=job["redundant"],
                        max_process_num=job["processes"])


# ---- outside ---------------------------------------------------------------------------------------------------------

def run(jobs: Sequence[Sequence[str]], work: str, timeout: float, command: Sequence[str] = COMMAND) -> None:
    """One process for each list of jobs; what it says goes into ``work``. EngineError if one fails, or if ``timeout`` seconds
    have passed. No process, and nothing that one of them started, is left when this returns or raises."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, filter(None, sys.path))])
    environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": path}
    deadline = time.monotonic() + timeout
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number, files in enumerate(jobs):
            with open(_log(work, number), "wb") as out:         # MindSpore leaves folders where it works, so: in work
                running[number] = subprocess.Popen([*command, *files], stdin=subprocess.PIPE, stdout=out, stderr=out,
                                                   env=environment, cwd=work, start_new_session=True)
        while running:
            for number, process in list(running.items()):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    _end(running.pop(number))
                    _judge(process.returncode, number, len(jobs), work)
            if running and time.monotonic() > deadline:
                late = next(iter(running))
                raise failure(f"process {late + 1} of {len(jobs)} was not done after {timeout:.0f} s and was ended", work, late)
            if running:
                time.sleep(PAUSE)
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all of its group. It has not been waited for, so its number cannot belong to another."""
    os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.wait()


def _judge(status: int, number: int, count: int, work: str) -> None:
    if not status:
        return
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}" + (" (out of memory?)" if status == -signal.SIGKILL else "")
    raise failure(f"process {number + 1} of {count} {how}", work, number)


def failure(what: str, work: str, number: int = 0) -> EngineError:
    """With the last lines of that process."""
    try:
        with open(_log(work, number), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            said = file.read(LAST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        said = ""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()][-LAST_LINES:]
    return EngineError(f"MindSpore's transform failed: {what}. Use --engine direct, which does without it. Its last lines:\n"
                       + ("\n".join(f"  {line[-400:]}" for line in lines) or "  none"))


def _log(work: str, number: int) -> str:
    return os.path.join(work, f"worker{number}.log")


if __name__ == "__main__":
    main(sys.argv[1:])
