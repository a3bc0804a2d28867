"""Starts trainings in processes of their own without importing mindformers for each: it imports it
once, and forks.

    python -m tests.judge.training_host

Each line on standard input is a request in JSON: ``folder`` (where the job starts), ``log`` (what
its processes print), ``ranks``, ``environment``, and ``train``, what ``training.run`` takes. The
answer is a line in JSON: a row for each rank with ``status`` (if negative, the signal that ended
it), ``error`` and ``steps``. The job is the real Trainer of mindformers with 20 numbers to train,
on ``st/cpu_cluster``; the plug-in is imported after the fork, so that each process begins as a new
one does.
"""

import atexit
import contextlib
import gc
import hashlib
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 120  # seconds of a job
STOPPED: list[int] = []  # processes that stopped themselves
IN_GRAPHS = (
    "optimizer",
    "lr_schedule",
    "runner_wrapper",
    "runner_config.batch_size",
    "runner_config.sink",
    "parallel",
    "context",
)  # keys of the configuration


def import_mindformers() -> None:
    """Imports what all jobs need, and starts nothing: a process with threads must not fork."""
    os.environ.update(GLOG_v="3", OMP_NUM_THREADS="1")
    from st import cpu_cluster

    cpu_cluster.before_mindformers()
    import mindformers  # noqa: F401
    import mindspore.dataset  # noqa: F401
    from mindformers import Trainer

    from st.cpu_cluster import kernels, model_build

    kernels.install()
    model_build.install_in_mindformers()
    import mindresume

    # what a script may have imported before it trains; not the plug-in
    for name in mindresume.__all__:
        getattr(mindresume, name)
    inspect.getmodule(Trainer.train.__code__)  # it remembers the files of all modules
    gc.collect()
    gc.freeze()


def serve(answers: TextIO) -> dict | None:
    """Answers requests until there are no more. In a process of a job it returns what to do."""
    before = ""
    for line in sys.stdin:
        request = json.loads(line)
        if request["folder"] != before:
            # they play jobs that live on, for the next one in their folder
            kill(STOPPED)
        before = request["folder"]
        rows = job(request)
        if isinstance(rows, dict):
            return rows
        print(json.dumps(rows), file=answers, flush=True)
    return None


def job(request: dict) -> list[dict] | dict:
    """Runs all ranks of one job; returns a row for each. In one of its processes: its part of the
    request."""
    ranks, results, processes, scheduler = request["ranks"], Path(tempfile.mkdtemp()), {}, None
    shared = {
        "MS_COMPILER_CACHE_ENABLE": "1",
        "MS_COMPILER_CACHE_PATH": graphs(request),
        "MS_WORKER_NUM": str(ranks),
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_TOPO_TIMEOUT": "120",
    }
    if ranks > 1:
        from st.cpu_cluster.launch import free_port

        shared["MS_SCHED_PORT"] = str(free_port(19000))
        shared["CPU_CLUSTER_SHM"] = tempfile.mkdtemp(
            prefix=f"cpu_cluster-{os.getpid()}-", dir="/dev/shm"
        )
        if (scheduler := os.fork()) == 0:
            enter(request, {**shared, "MS_ROLE": "MS_SCHED"})
            return {"scheduler": True}
    for rank in range(ranks):
        if (process := os.fork()) == 0:
            own = {
                **shared,
                "MS_ROLE": "MS_WORKER",
                "MS_NODE_ID": str(rank),
                "RANK_ID": str(rank),
                "DEVICE_ID": str(rank),
            }
            alone = {
                name: value for name, value in shared.items() if name.startswith("MS_COMPILER")
            }
            enter(request, {**(own if ranks > 1 else alone), **request["environment"]})
            return {
                **request["train"],
                "result": str(results / str(rank)),
                "rank": rank,
                "ranks": ranks,
            }
        processes[process] = rank
    rows = [{"status": None, "error": "", "steps": []} for _ in range(ranks)]
    deadline = time.monotonic() + LONGEST
    while processes and time.monotonic() < deadline:
        for process in list(processes):
            found, status = os.waitpid(process, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                STOPPED.append(process)
                rows[processes.pop(process)]["status"] = "stopped"
            elif found:
                rows[processes.pop(process)]["status"] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    kill([*processes, *([scheduler] if scheduler else [])])
    for rank, row in enumerate(rows):
        with contextlib.suppress(FileNotFoundError):
            for line in (results / str(rank)).read_text().splitlines():
                found = json.loads(line)
                row.update(found if "error" in found else {"steps": [*row["steps"], found]})
        # a thread of libmindspore_cluster.so seldom follows a null pointer when its process exits
        if row.pop("finished", False) and row["status"] == -signal.SIGSEGV:
            row["status"] = 0
    shutil.rmtree(results)
    if ranks > 1:
        shutil.rmtree(shared["CPU_CLUSTER_SHM"])
    return rows


def kill(processes: list[int]) -> None:
    """Ends processes, and forgets them."""
    while processes:
        os.kill(processes[-1], signal.SIGKILL)
        os.waitpid(processes.pop(), 0)


def graphs(request: dict) -> str:
    """Returns the folder of the compiled graphs of such trainings. MindSpore does not look whether
    one fits."""
    train = request["train"]
    same = {key: value for key, value in train["config"].items() if key.startswith(IN_GRAPHS)}
    key = json.dumps([request["ranks"], train["tp"], same], sort_keys=True)
    return os.path.join(os.environ["JUDGE_GRAPHS"], hashlib.sha256(key.encode()).hexdigest()[:16])


def enter(request: dict, environment: dict[str, str]) -> None:
    """Makes this process one of a job."""
    os.environ.update(environment)
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    import_mindformers()
    os.environ["JUDGE_GRAPHS"] = tempfile.mkdtemp()
    part = serve(answers)
    if part is None:
        kill(STOPPED)
        shutil.rmtree(os.environ["JUDGE_GRAPHS"])
        return
    if part.get("scheduler"):
        import mindspore
        from mindspore.communication import init

        mindspore.set_device("CPU")
        init()
        return
    from tests.judge.training import run

    status = 0
    try:
        run(part)
    except SystemExit as ended:
        status = ended.code
    leave(status)


def leave(status: int) -> None:
    """Ends the process as Python does, but does not free the many objects of mindformers: a quarter
    of a job."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
