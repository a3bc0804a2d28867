"""Runs any unmodified program on the CPU cluster: the patches of this package are put around it.

    python st/cpu_cluster/run.py program.py args...
    python st/cpu_cluster/run.py -m package args...
    msrun --worker_num=4 --local_worker_num=4 --join=True ... st/cpu_cluster/run.py program.py args...

On a real device (``CPU_CLUSTER_DEVICE=Ascend``) nothing is patched and only the recorder is added,
so that the same system tests can compare the steps there.

What: the program sees its own ``sys.argv`` and ``sys.path[0]``, as if Python had started it; the
working directory may be any. Why: the programs under test must stay as users run them on Ascend.

``CPU_CLUSTER_NODES=2``: of the ranks the first half works in the folder node_0 of the working
directory, the others in node_1, as nodes do that share no disk.

``CPU_CLUSTER_MEMORIES=2``: the same, but nodes share the disk, and each has memory of its own: what its ranks find
in the folder MINDRESUME_MEMORY_TIER_DIR lies in {folder}-node_0 and {folder}-node_1 (needs root).

msrun starts the same command line once more as the scheduler of the job. That process does not run
the program: it joins the communication and waits. It ends soon after the last worker of the job, so
a worker that fails before the cluster is complete does not leave msrun waiting until its time-out:
after ``CPU_CLUSTER_AFTER_LAST`` seconds (3).
"""  # noqa: E501

import ctypes
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SCHEDULER = (
    "import mindspore as ms; ms.set_device('CPU'); from mindspore.communication import init; init()"
)
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Runs in a child, before exec: it gets SIGKILL when the thread that started it ends, so that
    no process is ever left."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def workers_alive(port: str) -> bool:
    """Returns whether a worker of the job with that scheduler port runs on this host. It reads the
    environment of processes, so zombies do not count."""
    for pid in os.listdir("/proc"):
        if not pid.isdigit():
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                environment = f.read().split(b"\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if b"MS_ROLE=MS_WORKER" in environment and f"MS_SCHED_PORT={port}".encode() in environment:
            return True
    return False


class ForkedScheduler(multiprocessing.get_context("fork").Process):
    """The same in a fork of a process that has imported mindspore (``mindresume run --standby``),
    with the part of ``subprocess.Popen`` that is needed here."""

    def __init__(self):
        super().__init__()
        self.start()
        self.wait = self.join

    @property
    def returncode(self) -> int | None:
        return self.exitcode

    def poll(self) -> int | None:
        return self.exitcode

    def run(self) -> None:
        die_with_parent()
        exec(SCHEDULER)


def join_as_scheduler(
    first_worker: float = 60.0, after_last: float = 3.0, poll: float = 0.5
) -> int:
    """Serves as the scheduler until its job is over; returns the exit code.

    MindSpore's scheduler holds the interpreter lock while it waits, so it gets a process of its
    own.

    Args:
        first_worker: seconds until the first worker must run.
        after_last: seconds that the scheduler has to end by itself after the last worker. Then it
            is ended, with exit code 0: whether the job failed is for the workers to say.
        poll: seconds between looks.
    """
    from st import cpu_cluster

    port, started, last_seen = os.environ.get("MS_SCHED_PORT", ""), time.monotonic(), None
    scheduler = (
        ForkedScheduler()
        if "mindspore" in sys.modules
        else subprocess.Popen([sys.executable, "-c", SCHEDULER], preexec_fn=die_with_parent)
    )
    try:
        while scheduler.poll() is None:
            time.sleep(poll)
            if workers_alive(port):
                last_seen = time.monotonic()
            elif time.monotonic() > (
                started + first_worker if last_seen is None else last_seen + after_last
            ):
                return 0
        return scheduler.returncode if scheduler.returncode >= 0 else 128 - scheduler.returncode
    finally:
        scheduler.kill()
        scheduler.wait()
        shutil.rmtree(cpu_cluster.exchange_folder(), ignore_errors=True)


def use_own_memory(folder: str, node: int) -> None:
    """Mounts the memory of a node over ``folder``, for this process alone, which has one thread
    yet."""
    own = f"{folder}-node_{node}"
    os.makedirs(own, exist_ok=True)
    for failed in (
        _LIBC.unshare(0x20000),  # CLONE_NEWNS
        _LIBC.mount(b"none", b"/", None, 0x4000 | 0x40000, None),  # MS_REC | MS_PRIVATE
        _LIBC.mount(own.encode(), folder.encode(), None, 0x1000, None),  # MS_BIND
    ):
        if failed:
            sys.exit(f"run.py: {folder}: {os.strerror(ctypes.get_errno())}")


def on_cpu() -> bool:
    return os.environ.get("CPU_CLUSTER_DEVICE", "CPU") == "CPU"


def record_events_of_every_rank() -> None:
    """Lets this rank write its event file from the first event on, as rank 0 does; else it would
    write one only if it fails. The system tests compare what all ranks selected."""
    from mindresume.events import event_file

    event_file._is_failure = lambda event: True


def run_program(arguments: list[str]) -> None:
    """``arguments``: program.py or -m package, then its own arguments."""
    from st import cpu_cluster
    from st.cpu_cluster import pynative

    if on_cpu():
        cpu_cluster.before_mindformers()
        cpu_cluster.after_mindformers()
    elif pynative.is_chosen():
        pynative.observe()
    else:
        from st.cpu_cluster import model_build

        model_build.install_recorders()
    if os.environ.get("RANK_ID", "0") != "0":
        record_events_of_every_rank()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] == "-m" and len(sys.argv) < 3:
        sys.exit(__doc__)
    # The own folder must not be searched: its modules (kernels, launch, ...) would hide others of
    # these names.
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != HERE] + [ROOT]
    if os.environ.get("MS_ROLE") == "MS_SCHED" and on_cpu():
        sys.exit(join_as_scheduler(after_last=float(os.environ.get("CPU_CLUSTER_AFTER_LAST", "3"))))
    if os.environ.get("MS_WORKER_NUM") and on_cpu():
        # several processes share the cores; the losses are the same
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1] != "-m" and not os.path.isfile(sys.argv[1]):
        sys.exit(f"run.py: no program {sys.argv[1]!r} in {os.getcwd()}")
    nodes, memories, ranks = (
        int(os.environ.get("CPU_CLUSTER_NODES", "1")),
        int(os.environ.get("CPU_CLUSTER_MEMORIES", "1")),
        int(os.environ.get("MS_WORKER_NUM", "1")),
    )
    if memories > 1:
        node_of_memory = int(os.environ["RANK_ID"]) * memories // ranks
        use_own_memory(os.environ["MINDRESUME_MEMORY_TIER_DIR"], node_of_memory)
    if nodes > 1:
        node = f"node_{int(os.environ['RANK_ID']) * nodes // ranks}"
        os.makedirs(node, exist_ok=True)
        os.chdir(node)
    run_program(sys.argv[1:])


if __name__ == "__main__":
    main()
