"""supervisor/job_end.py: what a killed supervisor left behind is found, and nothing of a living one
in another container."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from mindresume.coordination.liveness import namespace
from mindresume.supervisor import job_end

COMMAND = ["msrun", "train.py"]
GONE = f"{2**22 - 3}.1"  # a process that cannot exist with this start


@contextmanager
def process_with(mark):
    """Runs a process with a mark in its environment. Yields its number."""
    program = "print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, job_end.MARK: mark},
    ) as process:
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


@pytest.mark.parametrize(
    ("supervisor", "namespace", "is_orphan"),
    [
        (GONE, namespace("pid"), True),
        (
            GONE,
            namespace("pid") + 1,
            False,
        ),  # of a container: its supervisor has another number here
        ("own", namespace("pid"), False),
        ("x.y", namespace("pid"), False),
    ],
)
def test_a_process_is_an_orphan_if_its_supervisor_of_the_same_namespace_is_gone(
    supervisor, namespace, is_orphan
):
    if supervisor == "own":
        supervisor = job_end.marks(COMMAND)[job_end.JOB_MARK]
    with process_with(f"{supervisor}.{namespace}.{job_end.job_key(COMMAND)}") as pid:
        assert (pid in {process.pid for process in job_end.find_orphans(COMMAND)}) == is_orphan
        assert pid not in {process.pid for process in job_end.find_orphans(["another"])}


def test_the_mark_of_this_process_is_the_one_that_is_looked_for(monkeypatch):
    mark = job_end.marks(COMMAND)[job_end.MARK]
    with process_with(mark) as pid:
        assert pid not in {process.pid for process in job_end.find_orphans(COMMAND)}
        # it cannot be looked at
        monkeypatch.setattr(job_end, "is_running", lambda pid, ticks: None)
        assert pid not in {process.pid for process in job_end.find_orphans(COMMAND)}
        # it is gone
        monkeypatch.setattr(job_end, "is_running", lambda pid, ticks: False)
        assert pid in {process.pid for process in job_end.find_orphans(COMMAND)}


def test_folders_of_supervisors_that_are_gone_are_removed_and_those_of_living_ones_stay(
    monkeypatch, tmp_path
):
    """Containers that share the memory do not see the processes of each other: a lock tells that a
    supervisor runs."""
    monkeypatch.setattr(job_end, "_MEMORY", str(tmp_path))
    monkeypatch.setattr(job_end, "_locks", [])
    first = job_end.make_folder()
    os.mkdir(os.path.join(first, "start_1"))
    gone = tmp_path / os.path.basename(first).replace(str(os.getpid()), "1")
    gone.mkdir()
    (tmp_path / "another").mkdir()
    (tmp_path / f"mindresume-supervisor-{os.getuid()}-link").symlink_to(tmp_path / "another")
    second = job_end.make_folder()
    assert os.path.isdir(os.path.join(first, "start_1")) and second != first and not gone.exists()
    assert (tmp_path / "another").is_dir()
    os.close(job_end._locks[0])  # the first supervisor is killed
    os.close(job_end._locks[1])
    assert sorted(os.listdir(tmp_path)) != [] and job_end.make_folder() not in (first, second)
    assert not os.path.exists(first) and not os.path.exists(second)
    os.close(job_end._locks[2])


def test_a_supervisor_that_was_started_by_what_a_dead_one_had_started_does_not_end_itself(
    monkeypatch,
):
    program = (
        "from mindresume.supervisor import job_end; import os, sys; "
        "print([p.pid for p in job_end.find_orphans(sys.argv[1:])], os.getpid(), os.getppid())"
    )
    mark = f"{GONE}.{namespace('pid')}.{job_end.job_key(COMMAND)}"
    # the shell has inherited the mark, too
    shell = f"{sys.executable} -c '{program}' {' '.join(COMMAND)}; true"
    out = subprocess.run(
        ["sh", "-c", shell],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, job_end.MARK: mark},
    )
    found, me, parent = out.stdout.strip().rsplit(" ", 2)
    assert found == "[]" and me != parent


def test_another_command_in_the_same_folder_is_no_orphan(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    keys = {job_end.job_key(command) for command in (["a"], ["a", "b"], ["ab"])}
    monkeypatch.chdir("/")
    assert len(keys | {job_end.job_key(["a"])}) == 4
