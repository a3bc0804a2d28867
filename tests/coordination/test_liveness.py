"""coordination/liveness.py: the identity of a process, and a clock that stands still while nobody
reads it."""

import errno
import io
import os
import resource
import subprocess
import sys
import time

import pytest

from mindresume import runtime
from mindresume.coordination import liveness
from mindresume.coordination.liveness import (
    AwakeClock,
    boot_id,
    host_identity,
    is_running,
    namespace,
    read_process,
    start_ticks,
    start_time,
)


def test_a_process_that_has_ended_is_no_longer_there_although_nobody_has_reaped_it():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    assert ticks >= start_ticks(os.getpid()) > 0 and is_running(process.pid, ticks)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert read_process(process.pid).state == "Z" and start_ticks(process.pid) == 0
    assert is_running(process.pid, ticks) is False
    process.communicate()
    assert read_process(process.pid) is None and start_ticks(process.pid) == 0


def test_the_namespace_is_that_of_the_kernel():
    assert f"pid:[{namespace('pid')}]" == os.readlink("/proc/self/ns/pid")
    assert f"mnt:[{namespace('mnt')}]" == os.readlink("/proc/self/ns/mnt")


def test_ticks_since_boot_as_a_time():
    assert 0 < start_time(start_ticks(os.getpid())) <= time.time() + 0.1 and start_time(0) is None


def test_the_answer_about_a_process_has_three_values(monkeypatch):
    me = os.getpid(), start_ticks(os.getpid())
    assert is_running(*me) is True and is_running(me[0], me[1] + 1) is False
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert is_running(ended.pid, 1) is False
    assert (
        is_running(me[0], 0)
        is is_running(0, 1)
        is is_running(-1, 1)
        is is_running(2**80, 1)
        is None
    )


def test_a_process_that_has_ended_is_dead_also_without_a_descriptor_to_look_at_it():
    lowest, limit = os.open(os.devnull, os.O_RDONLY), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limit[1]))
    try:
        found = is_running(os.getpid(), 1), is_running(2**22 - 3, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert found == (None, False)


def test_nodes_with_one_name_are_told_apart(monkeypatch):
    def boots(boot):
        monkeypatch.setattr(liveness, "boot_id", lambda: boot)
        return host_identity()

    monkeypatch.setattr(runtime, "gethostname", lambda: "localhost")
    assert boot_id() and boots("one") != boots("two")


@pytest.mark.parametrize(
    "error", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ESTALE, errno.EIO]
)
def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch, error):
    def fail(path, *args):
        raise OSError(error, os.strerror(error), path)

    monkeypatch.setattr("builtins.open", fail)
    assert is_running(os.getpid(), 1) is None


@pytest.mark.parametrize(
    "answer, expected", [(None, None), (PermissionError, None), (ProcessLookupError, False)]
)
def test_a_hidden_process_is_not_dead(monkeypatch, answer, expected):
    """With hidepid=2, /proc does not show the processes of other users; the kernel still knows
    their numbers."""

    def fail(path, *args):
        raise FileNotFoundError(errno.ENOENT, "hidden", path)

    def kill(pid, number):
        assert number == 0
        if answer:
            raise answer

    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr(os, "kill", kill)
    assert is_running(4711, 1) is expected


@pytest.mark.parametrize(
    "pending, expected", [("0000000000000100", None), ("0000000000004000", True)]
)
@pytest.mark.parametrize("field", ["SigPnd", "ShdPnd"])
def test_a_process_with_sigkill_pending_is_neither_alive_nor_dead(
    monkeypatch, field, pending, expected
):
    """It waits in the kernel (state D) and will run no code: its heartbeats have to tell."""
    stat = b"4711 (python) D " + b" ".join(b"%d" % number for number in range(4, 53))
    status = f"Name:\tpython\n{field}:\t{pending}\n".encode()
    monkeypatch.setattr(
        "builtins.open", lambda path, mode: io.BytesIO(stat if path.endswith("/stat") else status)
    )
    assert is_running(4711, 22) is expected


def test_of_a_gap_between_two_readings_ten_seconds_count(clock):
    awake = AwakeClock()
    readings = []
    for moment in (1.0, 9.0, 5009.0, 5010.0):
        clock.now = moment
        readings.append(awake())
    assert readings == [1.0, 9.0, 19.0, 20.0] and awake.at(8.0) == 8.0 and awake.at(5009.5) == 19.5


def test_who_reads_it_rarely_waits_longer_and_not_for_ever(clock):
    awake = AwakeClock()
    for _ in range(5):
        clock.now += 60.0
        awake()
    assert awake() == 50.0
