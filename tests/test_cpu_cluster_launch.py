"""st/cpu_cluster/launch.py and run.py with trivial commands: no MindSpore, no training."""

import os
import subprocess
import sys
import time

import pytest

from st.cpu_cluster import launch
from st.cpu_cluster import run as runner
from st.cpu_cluster.launch import Job

LAUNCH = os.path.abspath(launch.__file__)
SLEEP = "import time; time.sleep(3600)"
IDLE = (sys.executable, "-S", "-c", SLEEP)


def python(code):
    return [sys.executable, "-S", "-c", code]


def job(tmp_path, n, code, **options):
    return Job(n, python(code), cwd=str(tmp_path), scheduler=IDLE, **options)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_every_worker_learns_its_rank_and_the_same_scheduler(tmp_path):
    names = [
        "RANK_ID",
        "MS_NODE_ID",
        "MS_ROLE",
        "MS_WORKER_NUM",
        "MS_SCHED_PORT",
        "CPU_CLUSTER_SHM",
        "OWN",
    ]
    with job(
        tmp_path,
        3,
        f"import os; print([os.environ[n] for n in {names}], os.getcwd())",
        env={"OWN": "x"},
    ) as j:
        assert j.wait() == 0
    seen = [
        (tmp_path / "msrun_log" / f"worker_{rank}.log").read_text().strip() for rank in range(3)
    ]
    assert j.codes() == [0, 0, 0]
    port, exchange = seen[0].split("'")[9], j.exchange
    assert seen == [
        f"{[str(r), str(r), 'MS_WORKER', '3', port, exchange, 'x']} {tmp_path}" for r in range(3)
    ]
    assert not os.path.exists(exchange)
    assert not is_running(j.scheduler.pid)


@pytest.mark.parametrize("end, status, code", [("sys.exit(7)", 7, 7), ("os.abort()", 134, -6)])
def test_the_first_failure_ends_the_others_and_is_the_exit_code(tmp_path, end, status, code):
    with job(tmp_path, 3, f"import os, sys\nif os.environ['RANK_ID'] == '1': {end}\n{SLEEP}") as j:
        assert j.wait() == status
    assert j.codes() == [-9, code, -9]


def test_the_workers_end_with_a_launcher_that_is_killed(tmp_path):
    command = python(f"import os; print(os.getpid(), flush=True); {SLEEP}")
    launcher = subprocess.Popen([sys.executable, LAUNCH, "2", "--", *command], cwd=tmp_path)
    deadline, pids = time.monotonic() + 300, []
    while len(pids) < 2 and time.monotonic() < deadline:
        logs = [tmp_path / "msrun_log" / f"worker_{r}.log" for r in range(2)]
        pids = [
            int(log.read_text()) for log in logs if log.exists() and log.read_text().endswith("\n")
        ]
        time.sleep(0.02)
    assert len(pids) == 2
    launcher.kill()
    launcher.wait()
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def worker_of(port, code):
    return subprocess.Popen(
        python(code), env=dict(os.environ, MS_ROLE="MS_WORKER", MS_SCHED_PORT=port)
    )


def test_the_scheduler_sees_workers_of_its_own_job_only():
    with worker_of("17001", SLEEP) as worker:
        try:
            deadline = time.monotonic() + 300
            while not runner.workers_alive("17001") and time.monotonic() < deadline:
                # a process has no environment for a moment after it was started
                time.sleep(0.02)
            assert runner.workers_alive("17001")
            assert not runner.workers_alive("17002")
        finally:
            worker.kill()
    assert not runner.workers_alive("17001")


@pytest.fixture
def scheduler_environment(monkeypatch, tmp_path):
    exchange = tmp_path / "exchange"
    exchange.mkdir()
    (exchange / "piece").write_text("")
    monkeypatch.setenv("MS_SCHED_PORT", "17003")
    monkeypatch.setenv("CPU_CLUSTER_SHM", str(exchange))
    return exchange


def test_the_scheduler_does_not_outlive_the_last_worker(scheduler_environment, monkeypatch):
    monkeypatch.setattr(runner, "SCHEDULER", SLEEP)
    alive = runner.workers_alive
    with worker_of("17003", SLEEP) as worker:

        def look(port):
            found = alive(port)
            if found:
                worker.kill()
            return found

        monkeypatch.setattr(runner, "workers_alive", look)
        assert runner.join_as_scheduler(first_worker=300, after_last=0.1, poll=0.02) == 0
    assert not scheduler_environment.exists()
