"""scripts/msrun_launcher.sh: what it passes on, what it returns, what it leaves running.

The tests put a fake ``msrun`` first on PATH; st/test_cluster.py has the real one. It mimics the
options that the launcher uses, its way of starting workers (a session of their own, MS_ROLE and
RANK_ID set), its words about a failed worker and its exit status 1.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).resolve().parents[1] / "scripts" / "msrun_launcher.sh"

FAKE_MSRUN = """#!{python}
import argparse, json, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("worker_num", "local_worker_num", "master_port", "node_rank", "cluster_time_out"):
    parser.add_argument("--" + name, type=int)
for name in ("master_addr", "log_dir", "join", "tail_worker_log"):
    parser.add_argument("--" + name)
parser.add_argument("script")
parser.add_argument("args", nargs=argparse.REMAINDER)
a = parser.parse_args()
with open("msrun.json", "w") as f:
    json.dump(dict(vars(a), env=dict(os.environ)), f)
print("Start scheduler process, log file:logs/scheduler.log. Execute command: python train.py", flush=True)
print("[WARNING] ME(1): The '--tail_worker_log' is:2, which doesn't contain this worker 0.", file=sys.stderr, flush=True)
workers = []
for rank in range(a.local_worker_num if os.path.exists(a.script) else 0):
    log = open(os.path.join(a.log_dir, "worker_%d.log" % rank), "w")
    workers.append(subprocess.Popen(["python", a.script, *a.args], stdout=log, stderr=log, start_new_session=True,
                                    env=dict(os.environ, MS_ROLE="MS_WORKER", RANK_ID=str(rank))))
if a.join != "True":
    sys.exit(0)
failed = False
while not failed:
    codes = [w.poll() for w in workers]
    for w, code in zip(workers, codes):
        if code:
            print("Worker process %d exit with exception. Error code: %d." % (w.pid, code), file=sys.stderr, flush=True)
            failed = True
            break
    if None not in codes:
        break
    time.sleep(0.02)
if failed:
    for w in workers:
        w.poll() is None and os.killpg(w.pid, signal.SIGKILL)
    if os.environ.get("FAKE_SCHEDULER_STAYS"):
        time.sleep(3600)
    raise SystemExit(1)
sys.exit(int(os.environ.get("FAKE_STATUS", 0)))
"""  # noqa: E501


@pytest.fixture
def job(tmp_path):
    """Runs the launcher in tmp_path; ``msrun`` and ``python`` are found in tmp_path/bin."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "msrun").write_text(FAKE_MSRUN.format(python=sys.executable))
    (tools / "msrun").chmod(0o755)
    (tools / "python").symlink_to(sys.executable)
    return Job(tmp_path, f"{tools}:/usr/bin:/bin")


class Job:
    def __init__(self, folder, path):
        self.folder, self.path = folder, path

    def environment(self, **env):
        ours = ("MSRUN", "MS_", "MF_", "LOG_MF", "PLOG", "PYTHON", "GLOG")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        return {**clean, "PATH": self.path, **env}

    def start(self, *args, **env):
        return subprocess.Popen(
            ["bash", LAUNCHER, *args],
            cwd=self.folder,
            env=self.environment(**env),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *args, **env):
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def program(self, text, name="train.py"):
        (self.folder / name).write_text(
            f"import os, signal, sys, time\nrank = os.environ.get('RANK_ID')\n{text}\n"
        )

    def seen(self):
        return json.loads((self.folder / "msrun.json").read_text())

    def processes(self):
        """Returns running processes whose working directory is that of the job."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "cwd").resolve() == self.folder:
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found

    def wait_for(self, condition, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited {seconds} s in vain; processes: {self.processes()}"
            )
            time.sleep(0.02)


DEFAULTS = {
    "worker_num": 8,
    "local_worker_num": 8,
    "master_port": 8118,
    "log_dir": "output/msrun_log",
    "join": "True",
    "tail_worker_log": "8",
    "cluster_time_out": 7200,
    "master_addr": None,
    "node_rank": None,
}


@pytest.mark.parametrize(
    ("args", "changed"),
    [
        ([], {}),
        (["4"], {"worker_num": 4, "local_worker_num": 4, "tail_worker_log": "4"}),
        (
            ["4", "9000", "logs", "True", "60"],
            {
                "worker_num": 4,
                "local_worker_num": 4,
                "master_port": 9000,
                "log_dir": "logs",
                "tail_worker_log": None,
                "cluster_time_out": 60,
            },
        ),
        (
            ["16", "8", "10.0.0.1", "9000", "1", "logs", "false", "60"],
            {
                "worker_num": 16,
                "master_addr": "10.0.0.1",
                "master_port": 9000,
                "node_rank": 1,
                "log_dir": "logs",
                "tail_worker_log": "16",
                "cluster_time_out": 60,
            },
        ),
        (
            ["8", "8", "10.0.0.1", "9000", "0", "logs", "True", "60"],
            {
                "master_port": 9000,
                "log_dir": "logs",
                "tail_worker_log": None,
                "cluster_time_out": 60,
            },
        ),
    ],
    ids=["1", "2", "6", "9", "9-one-host"],
)
def test_argument_forms(job, args, changed):
    done = job.run("nothing --a 1", *args)
    assert done.returncode == 0, done.stderr
    seen = job.seen()
    assert {key: seen[key] for key in DEFAULTS} == {**DEFAULTS, **changed}
    assert [seen["script"], *seen["args"]] == ["nothing", "--a", "1"]


@pytest.mark.parametrize(
    "command",
    [
        "run.py --config  X.yaml --options a=[1,2] (b) *",
        "run.py --config X.yaml \\  \n\t--options 'a=[1,2]' \"(b)\" *\n",
    ],
)
def test_command_is_split_but_not_expanded(job, command):
    (job.folder / "run.py").write_text("")
    assert job.run(command, "2").returncode == 0
    assert job.seen()["args"] == ["--config", "X.yaml", "--options", "a=[1,2]", "(b)", "*"]


def test_environment(job):
    job.run("x", "2", MF_LOG_SUFFIX="night", PLOG_REDIRECT_TO_OUTPUT="True", PYTHONPATH="/mine")
    seen = job.seen()
    assert seen["log_dir"] == "output/msrun_log_night"
    assert seen["env"]["LOG_MF_PATH"] == f"{job.folder}/output/log_night"
    assert seen["env"]["ASCEND_PROCESS_LOG_PATH"] == f"{job.folder}/output/plog_night"
    assert seen["env"]["PYTHONPATH"] == f"{LAUNCHER.parents[1]}:/mine"
    job.run("x", "2", LOG_MF_PATH="/elsewhere", PLOG_REDIRECT_TO_OUTPUT="False")
    seen = job.seen()
    assert (seen["env"]["LOG_MF_PATH"], seen["log_dir"]) == ("/elsewhere", "output/msrun_log")
    assert "ASCEND_PROCESS_LOG_PATH" not in seen["env"]
    # no empty entry, which would be the working directory
    assert seen["env"]["PYTHONPATH"] == str(LAUNCHER.parents[1])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "expected 1, 2, 6 or 9 arguments, got 0"),
        (["x", "2", "8118"], "expected 1, 2, 6 or 9 arguments, got 3"),
        (["x", "two"], "WORKER_NUM must be a number from 1 on, got 'two'"),
        (["x", "0"], "WORKER_NUM must be a number from 1 on, got '0'"),
        (["x", "2", "8118", "logs", "maybe", "60"], "JOIN must be True or False, got 'maybe'"),
        (
            ["x", "2", "4", "h", "8118", "0", "logs", "True", "60"],
            "LOCAL_WORKER is 4, more than WORKER_NUM, 2",
        ),
        (["x 'y", "2"], "quotes are not closed"),
        (["", "2"], "CMD is empty"),
        (["gone.py --config x", "2"], "gone.py: no such file"),
    ],
)
def test_wrong_arguments(job, args, words):
    done = job.run(*args)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert not (job.folder / "msrun.json").exists()
    assert ("usage:" in done.stderr) == ("expected 1, 2" in words)


# --------------------------------------------------------------------------------------------------


def test_one_worker_runs_and_is_logged(job):
    job.program(
        "print('trained', sys.argv[1:], os.environ.get('MS_ROLE'), flush=True); print('oh', "
        "file=sys.stderr)"
    )
    for command in ("train.py --a 'b c'", "python train.py --a 'b c'"):
        done = job.run(command, "1")
        assert done.returncode == 0
        assert "trained ['--a', 'b c'] None" in done.stdout
        log = (job.folder / "output/msrun_log/worker_0.log").read_text()
        assert log.splitlines() == ["trained ['--a', 'b c'] None", "oh"]
    assert not (job.folder / "msrun.json").exists()


def test_an_update_of_the_script_changes_no_job_that_runs(job):
    """bash reads a script piece by piece: it went on in the middle of the new one."""
    copy = job.folder / "launcher.sh"
    copy.write_bytes(LAUNCHER.read_bytes())
    job.program(f"open({str(copy)!r}, 'w').write('exit 7\\n' * 10000)")
    process = subprocess.Popen(
        ["bash", copy, "train.py", "2"], cwd=job.folder, env=job.environment()
    )
    assert process.wait(timeout=300) == 0


def test_one_worker_may_end_gracefully_on_sigterm(job):
    job.program(
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('up', flush=True); time.sleep(3600)"
    )
    process = job.start("train.py", "1")
    log = job.folder / "output/msrun_log/worker_0.log"
    job.wait_for(lambda: log.exists() and "up" in log.read_text())
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 143
    assert "saved" in out and "saved" in log.read_text()
    assert job.processes() == []


# --------------------------------------------------------------------------------------------------


def test_status_of_the_failed_worker(job):
    job.program("time.sleep(3600) if rank == '0' else sys.exit(3)")
    done = job.run("train.py", "2", "8118", "logs", "False", "60")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith(
        "msrun_launcher.sh: the job failed with exit status 3; logs: logs/"
    )
    assert job.processes() == []


def test_status_of_a_killed_worker(job):
    job.program("rank == '1' and os.kill(os.getpid(), signal.SIGKILL)")
    assert job.run("train.py", "2").returncode == 128 + signal.SIGKILL


def test_scheduler_that_waits_for_dead_workers_is_ended(job):
    job.program("sys.exit(4)")
    assert job.run("train.py", "2", MSRUN_GRACE="0", FAKE_SCHEDULER_STAYS="1").returncode == 4
    assert job.processes() == []


def test_join_false_waits_unless_detached(job):
    job.program(
        "while not os.path.exists('go'): time.sleep(0.02)\ntime.sleep(0.3); open(f'done_{rank}', "
        "'w').close()"
    )
    (job.folder / "go").touch()
    assert job.run("train.py", "2").returncode == 0
    assert (job.folder / "done_0").exists() and (job.folder / "done_1").exists()
    for name in ("go", "done_0", "done_1"):
        (job.folder / name).unlink()
    assert job.run("train.py", "2", MSRUN_DETACH="1").returncode == 0
    assert job.seen()["join"] == "False"
    assert not (job.folder / "done_0").exists() and len(job.processes()) == 2
    (job.folder / "go").touch()
    job.wait_for(
        lambda: (
            (job.folder / "done_0").exists()
            and (job.folder / "done_1").exists()
            and not job.processes()
        )
    )
    assert job.run("train.py", "2", "8118", "logs", "True", "60", MSRUN_DETACH="1").returncode == 0
    assert job.seen()["join"] == "True"


def test_what_msrun_says_of_each_worker_is_short_where_no_log_is_shown(job):
    """Ten lines of 250 characters for four workers hid those of the launcher and the supervisor."""
    job.program("")
    done = job.run("train.py", "2")
    assert "Start scheduler process, log file:logs/scheduler.log\n" in done.stdout
    assert "tail_worker_log' is:" not in done.stderr
    assert "tail_worker_log' is:" in (job.folder / "output/msrun_log/msrun_stderr.log").read_text()
    shown = job.run("train.py", "2", "8118", "logs", "True", "60")
    assert "Execute command: python train.py\n" in shown.stdout


def test_ctrl_c_ends_every_worker(job):
    """Rank 1 ignores SIGTERM and has a child in a session of its own."""
    job.program("""
if rank == '1':
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import subprocess
    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)
print('up', flush=True)
time.sleep(3600)""")  # noqa: E501
    process = job.start("train.py", "2", "8118", "logs", "True", "60", MSRUN_GRACE="1")
    logs = [job.folder / f"logs/worker_{rank}.log" for rank in range(2)]
    job.wait_for(lambda: all(log.exists() and "up" in log.read_text() for log in logs))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err.strip() == "msrun_launcher.sh: SIGINT: ending the job (up to 1 s)"
    assert job.processes() == []


def test_the_scheduler_runs_until_the_workers_have_saved(job):
    job.program("""
def note(text):
    with open('order.txt', 'a') as file:
        print(text, file=file)
if os.environ.get('MS_ROLE') == 'MS_SCHED':
    signal.signal(signal.SIGTERM, lambda *_: (note('scheduler ends'), sys.exit(0)))
else:
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), note('saved'), sys.exit(143)))
    if rank == '0':
        import subprocess
        subprocess.Popen([sys.executable, __file__], env=dict(os.environ, MS_ROLE='MS_SCHED'), start_new_session=True)
note('up')
time.sleep(3600)""")  # noqa: E501
    process, order = (
        job.start("train.py", "2", "8118", "logs", "True", "60"),
        job.folder / "order.txt",
    )
    job.wait_for(lambda: order.exists() and order.read_text().count("up") == 3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert (
        process.returncode == 143
        and err.strip() == "msrun_launcher.sh: SIGTERM: ending the job (up to 60 s)"
    )
    assert order.read_text().splitlines()[3:] == ["saved", "saved", "scheduler ends"]
    assert job.processes() == []


def test_second_signal_does_not_wait(job):
    job.program(
        "signal.signal(signal.SIGTERM, lambda *_: print('not yet', flush=True)); print('up', "
        "flush=True)\n"
        "while True: time.sleep(3600)"
    )
    process = job.start("train.py", "1", MSRUN_GRACE="60")
    log = job.folder / "output/msrun_log/worker_0.log"
    for word in ("up", "not yet"):
        job.wait_for(lambda word=word: log.exists() and word in log.read_text())
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert process.returncode == 143
    assert job.processes() == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_process_that_does_not_end_after_sigkill_is_named_and_left(job, workers):
    """A process cannot be put into state D here: ``grep``, by which the launcher finds its
    processes, always finds one more."""
    # no process has this number
    stuck = Path("/proc/sys/kernel/pid_max").read_text().strip()
    (job.folder / "bin" / "grep").write_text(
        f'#!/bin/bash\n[[ $1 == -lsaF ]] && echo /proc/{stuck}/environ\nexec /usr/bin/grep "$@"\n'
    )
    (job.folder / "bin" / "grep").chmod(0o755)
    job.program("print('up', flush=True); time.sleep(3600)")
    process = job.start(
        "train.py", workers, "8118", "logs", "True", "60", MSRUN_GRACE="0", MSRUN_STUCK="1"
    )
    job.wait_for(
        lambda: "up" in "".join(log.read_text() for log in job.folder.glob("logs/worker_*.log"))
    )
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert (
        process.returncode == 143
        and f"process {stuck} (state not known) does not end after SIGKILL and is left" in err
    )
    assert err.count("left behind") == 1 and job.processes() == []
