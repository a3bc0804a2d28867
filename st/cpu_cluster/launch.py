"""Starts N workers and a scheduler on this host, as msrun does, and can kill them at a chosen
moment.

    launch.py [options] N [--] COMMAND...      e.g.  launch.py 4 -- python st/cpu_cluster/run.py
    program.py args...

--port P          of the scheduler; default: a free one >= 18000
--logs DIR        worker_R.log, scheduler.log (default ./msrun_log, emptied first)
--timeout S       kill everything after S seconds (exit code 124)
--kill WHO@WHEN   SIGKILL; WHO = a rank or "all"; WHEN = t:SECONDS since start, log:REGEX once the
                  rank's log (all:
                  rank 0's) matches, file:GLOB once a file matches. May be given several times.
                  Example: --kill 2@file:output/*/rank_2/*-1_5.*
--keep            do not kill the others when one worker fails: see what they do by themselves

What and why: system tests need crashes at chosen moments, exit codes of every rank and a firm time
limit, which msrun does not offer; also nothing waits for the scheduler at the end. For a kill at an
exact step set ``CPU_CLUSTER_KILL`` (``recorder``). Exit code: 0, or that of the first failing
worker (128 + signal number if it was killed). The last line printed is one JSON object: {"rc",
"codes", "pids", "wall_s", "cpu_s", "peak_mb"}; peak_mb is of the largest process.
"""

from __future__ import annotations

import argparse
import glob
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence

if __package__:
    from .run import SCHEDULER, die_with_parent
else:
    # started as a file: its own folder is on the path
    from run import SCHEDULER, die_with_parent

_calls = itertools.count()
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


class Kill:
    """One ``--kill``. Raises argparse.ArgumentTypeError for a text that is not WHO@WHEN."""

    def __init__(self, text: str):
        who, _, when = text.partition("@")
        self.kind, _, argument = when.partition(":")
        self.rank, self.done = (int(who) if who.isdigit() else None), False
        try:
            if (
                self.kind not in ("t", "log", "file")
                or not argument
                or not (who == "all" or who.isdigit())
            ):
                raise ValueError(text)
            self.argument = {"t": float, "log": re.compile, "file": str}[self.kind](argument)
        except (ValueError, re.error) as error:
            expected = "RANK|all @ t:SECONDS | log:REGEX | file:GLOB"
            raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}") from error

    def due(self, seconds: float, logs: str) -> bool:
        """Returns whether its moment has come. ``seconds`` since the start; ``logs``: the folder of
        worker_R.log."""
        if self.kind == "t":
            return seconds >= self.argument
        if self.kind == "file":
            return bool(glob.glob(self.argument, recursive=True))
        log = f"{logs}/worker_{self.rank or 0}.log"
        if not os.path.exists(log):
            return False
        with open(log, encoding="utf-8", errors="replace") as f:
            return self.argument.search(f.read()) is not None


class Job:
    """The processes of one launch; a context manager that ends what is left.

        with Job(4, [sys.executable, "st/cpu_cluster/run.py", "program.py"], cwd=folder) as job:
            code = job.wait(timeout=300, kills=[Kill("2@t:20")])

    ``codes()`` has the exit code of each rank, ``log(rank)`` what it printed.
    """

    def __init__(
        self,
        n: int,
        command: Sequence[str],
        logs: str | None = None,
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        scheduler: Sequence[str] = SCHEDULER_COMMAND,
    ):
        """
        Args:
            n: number of workers.
            command: of a worker.
            logs: emptied first; default: msrun_log in ``cwd``.
            port: of the scheduler; default: a free one.
            env: added to this process' environment.
            cwd: working directory of the processes.
            scheduler: its command.
        """
        self.logs = os.path.abspath(logs or os.path.join(cwd or ".", "msrun_log"))
        shutil.rmtree(self.logs, ignore_errors=True)
        os.makedirs(self.logs)
        self.cwd, self.started, self.workers, self.scheduler = cwd, time.monotonic(), [], None
        remove_abandoned()
        # see collectives.py
        self.exchange = tempfile.mkdtemp(prefix=f"cpu_cluster-{os.getpid()}-", dir="/dev/shm")
        base = dict(
            os.environ,
            **(env or {}),
            MS_WORKER_NUM=str(n),
            MS_SCHED_HOST="127.0.0.1",
            MS_SCHED_PORT=str(port or free_port()),
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

    def log(self, rank: int) -> str:
        """Returns the output of the rank so far."""
        with open(f"{self.logs}/worker_{rank}.log", encoding="utf-8", errors="replace") as f:
            return f.read()

    def kill(self, rank: int | None = None) -> None:
        """Sends SIGKILL to one rank, or to all ranks at once; the scheduler continues."""
        for worker in self.workers if rank is None else [self.workers[rank]]:
            worker.kill()

    def close(self) -> None:
        """Ends whatever is left. May be called again."""
        for process in [*self.workers, *([self.scheduler] if self.scheduler else [])]:
            process.kill()
            process.wait()
        shutil.rmtree(self.exchange, ignore_errors=True)

    def wait(
        self,
        timeout: float | None = None,
        kills: Iterable[Kill] = (),
        keep: bool = False,
        poll: float = 0.05,
    ) -> int:
        """Until all workers ended, or one failed (not with ``keep``), or the time is over; then
        ends the rest.

        Returns the exit code: 0; that of the first failing worker (128 + signal number if it was
        killed); 124 if the time was over.
        """
        first_bad, timed_out = None, False
        try:
            while True:
                codes = self.codes()
                first_bad = first_bad or next((c for c in codes if c), None)
                if None not in codes or (first_bad and not keep):
                    break
                seconds = time.monotonic() - self.started
                if timeout is not None and seconds > timeout:
                    timed_out = True
                    break
                for kill in kills:
                    if not kill.done and kill.due(seconds, self.logs):
                        kill.done = True
                        self.kill(kill.rank)
                        print(
                            f"killed {'all' if kill.rank is None else kill.rank} after "
                            f"{seconds:.1f} s",
                            flush=True,
                        )
                time.sleep(poll)
        finally:
            self.close()
        if timed_out:
            return 124
        code = first_bad or 0
        return code if code >= 0 else 128 - code


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int)
    parser.add_argument("--logs", default="msrun_log")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--kill", action="append", type=Kill, default=[])
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("n", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no command given")
    # the workers end with this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Job(args.n, command, args.logs, args.port) as job:
        rc = job.wait(args.timeout, args.kill, args.keep)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        json.dumps(
            {
                "rc": rc,
                "codes": job.codes(),
                "pids": [w.pid for w in job.workers],
                "wall_s": round(time.monotonic() - job.started, 1),
                "cpu_s": round(used.ru_utime + used.ru_stime, 1),
                "peak_mb": used.ru_maxrss // 1024,
            }
        ),
        flush=True,
    )
    sys.exit(rc)


if __name__ == "__main__":
    main()
