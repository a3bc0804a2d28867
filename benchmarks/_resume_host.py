"""Starts trainings of the real Trainer without importing mindformers for each: it imports it once,
and forks.

    python benchmarks/_resume_host.py graph|pynative

Each line on standard input is a request in JSON: ``folder`` (where the job starts), ``log``,
``ranks``, ``environment``, ``arguments`` (the program and its own; or a dictionary, what
``tests.judge.training.run`` takes), ``steps`` (the file of the recorded steps of rank 0), and
``end``: null, or [step, milliseconds, signal], which all ranks get
so long after that step was recorded. The answer is a line in JSON: the exit status of each rank; if
negative, the signal that ended it.
"""

import contextlib
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.judge.training_host import enter, import_mindformers, kill, leave  # noqa: E402

LONGEST = 900  # seconds of a job


def recorded(path: str) -> list[dict[str, Any]]:
    """Returns the steps in this file."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if "step" in row]
    return []


def environments(ranks: int) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Returns the variables of all processes of a job, and those of each rank."""
    if ranks == 1:
        return {}, [{}]
    from st.cpu_cluster.launch import free_port

    shared = {
        "MS_WORKER_NUM": str(ranks),
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": str(free_port(27000)),
        "MS_TOPO_TIMEOUT": "120",
        "OMP_NUM_THREADS": "1",
        "CPU_CLUSTER_SHM": tempfile.mkdtemp(prefix=f"cpu_cluster-{os.getpid()}-", dir="/dev/shm"),
    }
    return shared, [
        {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": number, "RANK_ID": number, "DEVICE_ID": number}
        for number in map(str, range(ranks))
    ]


def job(request: dict[str, Any]) -> list[int] | dict[str, Any]:
    """Runs all ranks of one job; returns their exit statuses. In one of its processes: the
    request."""
    shared, of_ranks = environments(request["ranks"])
    shared |= request["environment"]
    scheduler, processes = [], {}
    if request["ranks"] > 1:
        if (process := os.fork()) == 0:
            enter(request, {**shared, "MS_ROLE": "MS_SCHED"})
            return {"scheduler": True}
        scheduler.append(process)
    for rank, own in enumerate(of_ranks):
        if (process := os.fork()) == 0:
            enter(request, {**shared, **own})
            return request
        processes[process] = rank
    statuses = wait(processes, request)
    kill(scheduler)
    if exchange := shared.get("CPU_CLUSTER_SHM"):
        shutil.rmtree(exchange, ignore_errors=True)
    return statuses


def wait(processes: dict[int, int], request: dict[str, Any]) -> list[int]:
    """Sends the signal of the request when it is time; returns the exit statuses. ``processes``:
    {number: rank}."""
    end, statuses, due = request["end"], [0] * len(processes), None
    running, deadline = dict(processes), time.monotonic() + LONGEST
    while running and time.monotonic() < deadline:
        if end and due is None and any(row["step"] >= end[0] for row in recorded(request["steps"])):
            due = time.monotonic() + end[1] / 1000
        if due is not None and time.monotonic() >= due:
            for process in running:
                os.kill(process, end[2])
            end = due = None
        for process in list(running):
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                statuses[running.pop(process)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    for rank in running.values():
        statuses[rank] = -99
    kill(list(running))
    return statuses


def train(arguments: list[str] | dict[str, Any]) -> int:
    """Runs the program as Python does; returns the exit status."""
    from st import cpu_cluster

    if isinstance(arguments, dict):
        from tests.judge.training import run

        rank = int(os.environ.get("RANK_ID", "0"))
        arguments |= {"rank": rank, "result": f"{arguments['result']}{rank or ''}"}
        return ended(lambda: run(arguments))
    if cpu_cluster.is_distributed():
        from st.cpu_cluster import collectives, semi_auto

        semi_auto.install()
        collectives.install_when_connected()
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    return ended(lambda: runpy.run_path(arguments[0], run_name="__main__"))


def ended(work: Callable[[], Any]) -> int:
    """Does it, and returns the exit status that Python would have."""
    try:
        work()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    if sys.argv[1] == "pynative":
        os.environ.update(CPU_CLUSTER_TRAINER="pynative", GLOG_v="3")
        from st import cpu_cluster

        cpu_cluster.before_mindformers()
        import mindformers.pynative.trainer  # noqa: F401
        import mindspore.dataset  # noqa: F401
    else:
        import_mindformers()
    for line in sys.stdin:
        found = job(json.loads(line))
        if isinstance(found, list):
            print(json.dumps(found), file=answers, flush=True)
            continue
        if found.get("scheduler"):
            import mindspore
            from mindspore.communication import init

            mindspore.set_device("CPU")
            init()
            os._exit(0)
        if sys.argv[1] == "pynative":
            cpu_cluster.after_mindformers()
        leave(train(found["arguments"]))


if __name__ == "__main__":
    main()
