"""The standby process and the msrun that hands over to it: with a small msrun and framework, which
mimic what mindspore's do (mindspore/parallel/cluster/process_entity/_api.py)."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindresume.supervisor import standby
from mindresume.supervisor.members import environment_of
from mindresume.supervisor.standby_client import SOCKET

ROOT, PYTHON = Path(__file__).resolve().parents[2], Path(sys.executable).parent
SUPERVISOR = "supervisor" * 11  # a socket cannot be bound by so long a path
MSRUN = """
# mindspore.parallel.cluster.run
import os, subprocess, sys
from mindspore.parallel.cluster.process_entity import _api
def main():
    script = sys.argv.index(next(word for word in sys.argv if word.endswith(".py")))
    ranks = []
    for rank in range(2):
        os.environ["RANK_ID"], os.environ["MS_ROLE"] = str(rank), "MS_WORKER"
        os.environ["RANK_SIZE"] = "2"
        with open(f"worker_{rank}.log", "w") as log:
            ranks.append(_api.subprocess.Popen(["python", *sys.argv[script:]],
                                               preexec_fn=os.setsid, stdout=log,
                                               stderr=subprocess.STDOUT))
    for rank in ranks:
        rank.wait(timeout=600)
        print(f"Worker process {rank.pid} ended: {rank.returncode}", flush=True)
    return max(abs(rank.returncode) for rank in ranks)
"""
SCRIPT = """
import json, os, sys, time
import framework_state
from mindformers.trainer.training_args import TrainingArguments
descriptors = sorted(name for name in os.listdir("/proc/self/fd")
                     if os.path.exists(f"/proc/self/fd/{name}"))
with open(f"/proc/{os.getpid()}/cmdline") as file:
    shown = file.read().rstrip("\\0").split("\\0")
print(json.dumps({"rank": os.environ["RANK_ID"], "argv": sys.argv, "path": sys.path[0],
                  "main": __name__, "shown": shown, "imported": framework_state.pid,
                  "pid": os.getpid(), "color": os.environ.get("COLOR"), "file": __file__,
                  "noted": framework_state.noted,
                  "main module": sys.modules["__main__"].__file__, "descriptors": descriptors,
                  "limits": open("/proc/self/limits").read(), "umask": os.umask(0),
                  "signals": [line for line in open("/proc/self/status") if "SigIgn" in line],
                  "killed first": open("/proc/self/oom_score_adj").read(),
                  "read": [vars(TrainingArguments)[name] for name in ("rank_id", "device_num")],
                  "parameter": TrainingArguments().rank_id}), flush=True)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(int(os.environ["RANK_ID"]) * 3)
"""
TRAINING_ARGS = """
import os
class TrainingArguments:
    device_num, rank_id = int(os.getenv("RANK_SIZE", "1")), int(os.getenv("RANK_ID", "0"))
    def __init__(self, rank_id=rank_id, last=None):
        self.rank_id = rank_id
"""


@pytest.fixture
def place(tmp_path):
    """The folder of a supervisor, a framework, and a program."""
    packages = tmp_path / "packages"
    for name in ("mindspore/parallel/cluster/process_entity", "mindformers/trainer"):
        folder = packages / name
        folder.mkdir(parents=True)
        while folder != packages:
            (folder / "__init__.py").touch()
            folder = folder.parent
    cluster = packages / "mindspore" / "parallel" / "cluster"
    (cluster / "run.py").write_text(MSRUN)
    (cluster / "process_entity" / "_api.py").write_text("import subprocess\n")
    (packages / "framework_state.py").write_text(
        "import os, sys\npid = os.getpid()\nnoted = [*sys.argv, *sys.path]\n"
    )
    (packages / "mindformers" / "trainer" / "training_args.py").write_text(TRAINING_ARGS)
    (packages / "mindformers" / "trainer" / "__init__.py").write_text("from . import training_args")
    (packages / "mindformers" / "__init__.py").write_text("import framework_state\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "msrun").write_text(
        f"#!{sys.executable}\nimport sys\nfrom mindspore.parallel.cluster.run import main\n"
        "sys.exit(main())\n"
    )
    (tools / "msrun").chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / SUPERVISOR).mkdir()
    return Place(tmp_path)


def job() -> SimpleNamespace:
    """Returns a job that trains."""
    return SimpleNamespace(
        heartbeats=SimpleNamespace(known={1: SimpleNamespace(has_trained=True)}),
        members=SimpleNamespace(ignore=lambda pid: None),
    )


class Place:
    def __init__(self, folder: Path):
        self.folder, self.server = folder, None
        self.standby = standby.Standby(str(folder / SUPERVISOR), lambda event: None)

    def call(self, *words: str, prefix: str = "", **environment: str) -> subprocess.Popen:
        """``prefix``: commands of a shell."""
        for log in self.folder.glob("worker_*.log"):
            log.unlink()
        own = {
            "PATH": f"{self.folder}/tools:{PYTHON}:/usr/bin:/bin",
            "PYTHONPATH": f"{self.folder}/packages",
        }
        variables = self.standby.variables()
        variables["PATH"] = f"{variables['MINDRESUME_STANDBY_BIN']}:{own['PATH']}"
        return subprocess.Popen(
            ["sh", "-c", f'{prefix} exec msrun "$@"', "", "--worker_num=2", "train.py", *words],
            cwd=self.folder,
            env={**own, **variables, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ranks(self) -> list[dict]:
        return [json.loads((self.folder / f"worker_{rank}.log").read_text()) for rank in range(2)]

    def wait_for_ranks(self) -> list[dict]:
        while True:
            try:
                return self.ranks()
            except (OSError, ValueError):
                time.sleep(0.01)

    def make(self) -> int:
        """Makes the standby process as beside a job that trains. Returns its number."""
        self.watch_until("forks its ranks")
        return self.standby._command.pid

    def watch_until(self, said: str) -> str:
        """Lets the supervisor watch a job that trains until it says so. Returns this line."""
        lines = []
        self.standby.emit = lambda event: lines.append(event.line())
        while not any(said in line for line in lines):
            self.standby.make_if_due(job())
            # else it would never be said
            ended = [line for line in lines if "imports everything again" in line]
            assert not ended or said in ended[0], ended
            time.sleep(0.01)
        return lines[-1]


WATCHED = """
import framework_state
if os.path.exists("second"): finish()
beat.enter(hb.TRAINING)
mark(f"up_{start}_{rank}")
wait_for(f"go_{start}_{rank}")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_supervisor_forks_the_ranks_of_a_restart_and_takes_all_with_it(place, supervised):
    job = supervised(place.folder)
    command = {
        "command": ["msrun", "--worker_num=2", "rank.py"],
        "PATH": f"{place.folder}/tools:{PYTHON}:/usr/bin:/bin",
        "PYTHONPATH": f"{place.folder}/packages:{ROOT}",
    }
    job.start(WATCHED, "--standby", **command)
    job.wait_until(lambda: any("forks its ranks" in str(event) for event in job.events()))
    said = next(event["text"] for event in job.events() if "forks its ranks" in str(event))
    job.mark("go_1_1")
    ranks = [job.pid(f"up_2_{rank}") for rank in range(2)]
    (msrun,) = {parent_of(rank) for rank in ranks}
    assert parent_of(msrun) == int(said.split()[2])
    job.process.kill()
    job.process.wait()
    # as with an msrun that is not forked: its ranks are ended by the next one
    job.wait_until(lambda: set(job.processes()) == set(ranks))
    job.mark("second")
    status, events = job.start(WATCHED, "--leave", "0.2", **command).wait()
    (ended,) = (event for event in events if event["event"] == "orphans_ended")
    assert status == 0 and set(ranks) <= set(ended["process_ids"])


@pytest.fixture
def standing(place):
    """A place whose standby process waits."""
    assert place.call().wait() == 3
    place.server = place.make()
    yield place
    place.standby.close()


def test_ranks_are_forked_and_look_like_others(place):
    first = place.call("--config", "a b.yaml")
    assert first.wait() == 3
    ordinary = place.ranks()
    assert [rank["imported"] for rank in ordinary] == [rank["pid"] for rank in ordinary]
    server = place.make()
    second = place.call("--config", "a b.yaml")
    printed = second.communicate()[0]
    assert second.returncode == 3 and "ended: 3" in printed
    forked = place.ranks()
    assert [rank.pop("imported") for rank in forked] == [server, server]
    for rank, other in zip(forked, ordinary, strict=True):
        del other["imported"], other["pid"], rank["pid"]
        assert rank == other
    place.standby.close()


def test_a_fork_shows_the_environment_of_its_rank(standing):
    msrun = standing.call("wait", MSRUN_LAUNCHER_JOB="7.7")
    for number, rank in enumerate(standing.wait_for_ranks()):
        shown = environment_of(rank["pid"])
        assert shown["RANK_ID"] == str(number) and shown["MSRUN_LAUNCHER_JOB"] == "7.7"
        assert "MINDRESUME_STANDBY_ROOM" not in shown
        assert "MSRUN_LAUNCHER_JOB" not in environment_of(standing.server)
        os.kill(rank["pid"], signal.SIGTERM)
    assert msrun.wait() == signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_msrun_gets_the_signals_of_the_client_and_dies_with_it(standing, number):
    client = standing.call("wait")
    ranks = standing.wait_for_ranks()
    (msrun,) = {parent_of(rank["pid"]) for rank in ranks}
    assert parent_of(msrun) == standing.server
    # the standby process does nothing for that: the kernel does it
    if number == signal.SIGKILL:
        os.kill(standing.server, signal.SIGSTOP)
    client.send_signal(number)
    assert client.wait() == -number
    while is_alive(msrun):
        time.sleep(0.01)
    os.kill(standing.server, signal.SIGCONT)
    # the ranks are left, as of an msrun that is killed
    for rank in ranks:
        assert is_alive(rank["pid"])
        os.kill(rank["pid"], signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_msrun_needs_the_standby_process_no_more(standing):
    """Which is what is killed first when memory is short."""
    client = standing.call("wait", "--also")
    ranks = standing.wait_for_ranks()
    os.kill(standing.server, signal.SIGKILL)
    standing.watch_until("imports everything again")
    for rank in ranks:
        os.kill(rank["pid"], signal.SIGTERM)
    printed = client.communicate()[0]
    assert client.returncode == signal.SIGTERM and printed.count("ended: -15") == 2
    # the next start is an ordinary one, those after it are taken over again
    assert standing.call().wait() == 3
    assert all(rank["imported"] == rank["pid"] for rank in standing.ranks())
    server = standing.make()
    for _ in range(2):
        assert standing.call().wait() == 3
        assert {rank["imported"] for rank in standing.ranks()} == {server}


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"COLOR": "red"}, "variables than the standby process: COLOR"),
        ({"MINDRESUME_SUPERVISOR_X": "y" * (1 << 15)}, "longer"),
        ({"prefix": "umask 0027;"}, "Umask"),
        ({"prefix": "ulimit -n 100;"}, "limits"),
        ({"prefix": "cp train.py tools; cd tools;"}, "another script or folder"),
        ({"prefix": "set -- other.py; cp train.py other.py;"}, "another script or folder"),
    ],
)
def test_a_start_that_cannot_be_taken_over_is_an_ordinary_one(standing, changed, says):
    call = standing.call(**changed)
    printed = call.communicate()[0]
    assert call.returncode == 3 and says in printed
    assert "ordinary start: " in printed
    assert (standing.folder / SUPERVISOR / "call.json").exists()


def test_a_changed_source_is_imported_again(standing):
    module = standing.folder / "packages" / "framework_state.py"
    module.write_text(module.read_text() + "changed = True\n")
    assert "a module was changed" in standing.call().communicate()[0]
    assert standing.server not in [rank["imported"] for rank in standing.ranks()]


def test_a_client_that_goes_in_the_middle_of_its_call_costs_nothing(standing):
    with socket.socket(socket.AF_UNIX) as client:
        folder = os.open(standing.folder / SUPERVISOR, os.O_PATH)
        client.connect(f"/proc/self/fd/{folder}/{SOCKET}")
        os.close(folder)
        client.send(b"\0\0")
    assert standing.call().wait() == 3
    assert {rank["imported"] for rank in standing.ranks()} == {standing.server}


@pytest.mark.parametrize(
    "module, says",
    [
        ("raise ImportError('no driver')", "no driver"),
        ("os.getenv('RANK_ID')", "mindformers.trainer read a rank's variables"),
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
            "threads run after the imports",
        ),
    ],
)
def test_a_standby_process_that_ends_is_said_and_made_again(place, module, says):
    trainer = place.folder / "packages" / "mindformers" / "trainer" / "__init__.py"
    whole = trainer.read_text()
    trainer.write_text(
        f"{whole}\nimport os\nif 'MINDRESUME_STANDBY_ROOM' in os.environ: {module}\n"
    )
    assert place.call().wait() == 3
    assert says in place.watch_until("imports everything again")
    assert place.call().wait() == 3
    trainer.write_text(whole)
    assert place.make() > 0
    place.standby.close()


def test_what_opens_the_log_of_a_rank_while_it_is_imported_is_not_forked(place):
    assert place.call(GLOG_log_dir="logs").wait() == 3
    assert "GLOG_log_dir is set" in place.watch_until("imports everything again")


def test_a_command_that_does_not_call_msrun_is_said_once(place):
    place.watch_until("no effect")
    place.standby.emit = lambda event: pytest.fail("again")
    place.standby.make_if_due(job())
