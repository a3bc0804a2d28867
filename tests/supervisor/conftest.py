"""A fixture that supervises tiny programs in place of a training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from memory_tiers import memory  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
# seconds after which a test fails instead of waiting for ever
LIMIT = 120

# Stands in for msrun: starts ranks in sessions of their own, and ends badly when one of them does.
# It leaves the ends of ranks to the supervisor for a minute, and their exit statuses for ever: a
# busy machine must not decide who sees them first.
FAKE_MSRUN = """
import os, subprocess, sys, time
count = int(sys.argv[1])
ranks = [subprocess.Popen([sys.executable, sys.argv[2]], start_new_session=True, stdout=open(f"worker_{rank}.log", "w"),
                          stderr=subprocess.STDOUT, env={**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": str(rank)})
         for rank in range(count)]
end_of = lambda rank: os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
left, failed = list(ranks), False  # a Popen that nothing names any more reaps its process
while left and not failed:
    time.sleep(0.05)
    for rank in list(left):
        end = end_of(rank)
        if end is not None:
            left.remove(rank)
            failed = failed or end.si_code != os.CLD_EXITED or end.si_status != 0
until = time.monotonic() + 60
while failed and time.monotonic() < until and any(end_of(rank) is None for rank in left):
    time.sleep(0.05)
for rank in left:
    rank.kill()
os._exit(int(failed))             # without the destructors of subprocess, which reap
"""  # noqa: E501
# What every rank of a test begins with.
PREAMBLE = """
import os, signal, subprocess, sys, time
rank, folder = int(os.environ.get("RANK_ID", "0")), os.getcwd()
from mindresume.coordination import rank_heartbeat as hb
beat = hb.RankHeartbeat.create(os.environ["MINDRESUME_SUPERVISOR_DIR"], rank)
start = int(os.path.basename(os.environ.pop("MINDRESUME_SUPERVISOR_DIR")).removeprefix("start_"))
beat.set_output(os.path.join(folder, "output"))
def mark(name):
    open(os.path.join(folder, f"{name}.new"), "w").write(str(os.getpid()))
    os.rename(os.path.join(folder, f"{name}.new"), os.path.join(folder, name))
def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.01)
def finish():
    beat.set(outcome=1)
    beat.enter(hb.ENDED)
    sys.exit(0)
"""


class Supervised:
    """Runs ``mindresume run`` in a folder of its own."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.folder, self.process = folder, None
        (folder / "msrun.py").write_text(FAKE_MSRUN)

    def start(
        self,
        program,
        *options,
        ranks=2,
        command=None,
        supervisor=("-m", "mindresume"),
        pipe=None,
        **environment,
    ):
        """Starts ``program``, text of Python, on ``ranks`` ranks; or ``command``. ``supervisor``:
        arguments of Python. ``pipe``: what it prints to."""
        (self.folder / "rank.py").write_text(PREAMBLE + program)
        out, errors = (open(self.folder / name, "w") for name in ("stdout", "stderr"))  # noqa: SIM115  the command keeps them
        command = command or [sys.executable, "msrun.py", str(ranks), "rank.py"]
        self.process = subprocess.Popen(
            [sys.executable, *supervisor, "run", "--json", *options, "--", *command],
            cwd=self.folder,
            text=True,
            stdout=pipe or out,
            stderr=pipe or errors,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )
        return self

    def wait(self):
        """Returns (exit status, events); nothing of the job is left."""
        self.process.wait(timeout=LIMIT)
        self.wait_until(lambda: not self.processes())
        return self.process.returncode, self.events()

    def run(self, program, *options, **more):
        return self.start(program, *options, **more).wait()

    def pid(self, name):
        """Returns the process that wrote the mark ``name``."""
        self.wait_until((self.folder / name).exists)
        return int((self.folder / name).read_text())

    def mark(self, name):
        (self.folder / name).touch()

    def wait_until(self, condition):
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, (
                f"in vain; processes: {self.processes()}, {self.errors()}"
            )
            time.sleep(0.02)

    def events(self):
        """Returns the events so far."""
        lines = (self.folder / "stdout").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def errors(self):
        return (self.folder / "stderr").read_text()

    def processes(self):
        """Returns the processes in this folder that run, without the supervisor."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and (entry / "cwd").resolve() == self.folder
                    and int(entry.name) != self.process.pid
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def close(self):
        for pid in [*self.processes(), self.process.pid] if self.process else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process:
            self.process.wait()


@pytest.fixture
def supervised():
    """Returns a function that makes a Supervised in a folder."""
    made = []

    def make(folder):
        made.append(Supervised(folder))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def job(tmp_path, supervised):
    return supervised(tmp_path)
