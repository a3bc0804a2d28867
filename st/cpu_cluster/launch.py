"""Starts N workers and a scheduler on this host, as msrun does.

    launch.py [--logs DIR] N [--] COMMAND...   e.g.  launch.py 4 -- python st/cpu_cluster/run.py
    program.py args...

--logs DIR        worker_R.log, scheduler.log (default ./msrun_log, emptied first)

Unlike msrun, it does not wait for the scheduler at the end. Once a worker fails, the others are
ended. Exit code: 0, or that of the first failing worker (128 + signal number if it was killed).
"""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

if __package__:
    from .run import SCHEDULER, die_with_parent
else:
    # started as a file: its own folder is on the path
    from run import SCHEDULER, die_with_parent

_calls = itertools.count()
POLL = 0.05  # seconds
SCHEDULER_COMMAND = (sys.executable, "-c", SCHEDULER)


def free_port(first: int = 18000) -> int:
    """A free TCP port of this host from ``first`` on, another one at each call: the job binds it
    later. Raises OSError if none is free."""
    for _ in range(8000):
        port = first + (os.getpid() * 131 + next(_calls)) % 8000
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:  # taken
                continue
    raise OSError(f"no free port in {first}..{first + 7999}")


def remove_abandoned(shared_memory: str = "/dev/shm") -> None:
    """Removes the exchange folders of jobs whose launcher was killed; the number in the name is its
    process id."""
    for folder in glob.glob(f"{shared_memory}/cpu_cluster-*-*"):
        owner = os.path.basename(folder).split("-")[1]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(folder, ignore_errors=True)


class Job:
    """The processes of one launch; a context manager that ends what is left.

        with Job(4, [sys.executable, "st/cpu_cluster/run.py", "program.py"], cwd=folder) as job:
            code = job.wait()

    ``codes()`` has the exit code of each rank.
    """

    def __init__(
        self,
        n: int,
        command: Sequence[str],
        logs: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        scheduler: Sequence[str] = SCHEDULER_COMMAND,
    ):
        """
        Args:
            n: number of workers.
            command: of a worker.
            logs: emptied first; default: msrun_log in ``cwd``.
            env: added to this process' environment.
            cwd: working directory of the processes.
            scheduler: its command.
        """
        self.logs = os.path.abspath(logs or os.path.join(cwd or ".", "msrun_log"))
        shutil.rmtree(self.logs, ignore_errors=True)
        os.makedirs(self.logs)
        self.cwd, self.workers, self.scheduler = cwd, [], None
        remove_abandoned()
        # see collectives.py
        self.exchange = tempfile.mkdtemp(prefix=f"cpu_cluster-{os.getpid()}-", dir="/dev/shm")
        base = dict(
            os.environ,
            **(env or {}),
            MS_WORKER_NUM=str(n),
            MS_SCHED_HOST="127.0.0.1",
            MS_SCHED_PORT=str(free_port()),
            CPU_CLUSTER_SHM=self.exchange,
        )
        base.setdefault("MS_TOPO_TIMEOUT", "60")  # seconds in which all workers must join
        try:
            self.scheduler = self._start(scheduler, "scheduler", dict(base, MS_ROLE="MS_SCHED"))
            for rank in range(n):
                number = str(rank)
                of_rank = dict(
                    base, MS_ROLE="MS_WORKER", MS_NODE_ID=number, RANK_ID=number, DEVICE_ID=number
                )
                self.workers.append(self._start(command, f"worker_{rank}", of_rank))
        except OSError:
            self.close()
            raise

    def _start(self, command, name, env):
        with open(f"{self.logs}/{name}.log", "w", encoding="utf-8") as log:
            return subprocess.Popen(
                command,
                env=env,
                cwd=self.cwd,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def codes(self) -> list[int | None]:
        """Exit code per rank, None while it runs, negative: ended by that signal."""
        return [w.poll() for w in self.workers]

    def close(self) -> None:
        """Ends whatever is left. May be called again."""
        for process in [*self.workers, *([self.scheduler] if self.scheduler else [])]:
            process.kill()
            process.wait()
        shutil.rmtree(self.exchange, ignore_errors=True)

    def wait(self) -> int:
        """Until all workers ended, or one failed; then ends the rest. Returns the exit code: 0, or
        that of the first failing worker (128 + signal number if it was killed)."""
        failed = None
        try:
            while failed is None and None in (codes := self.codes()):
                failed = next((code for code in codes if code), None)
                time.sleep(POLL)
            failed = failed or next((code for code in self.codes() if code), 0)
        finally:
            self.close()
        return failed if failed >= 0 else 128 - failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", default="msrun_log")
    parser.add_argument("n", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given")
    # the workers end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Job(args.n, command, args.logs) as job:
        sys.exit(job.wait())


if __name__ == "__main__":
    main()
