"""supervisor/members.py: the ends of processes are noticed also where the kernel does not report
them."""

import errno
import os
import subprocess
import sys
import time

import pytest

from mindresume.coordination.liveness import start_ticks
from mindresume.coordination.rank_heartbeat import Heartbeat
from mindresume.supervisor import members as members_module
from mindresume.supervisor.members import Members

# seconds after which the test fails instead of waiting for ever
LIMIT = 120.0


def refused(number):
    def open_handle(pid, flags=0):
        raise OSError(number, os.strerror(number))

    return open_handle


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_an_end_is_noticed_without_pidfd_open(monkeypatch, number):
    """Linux has it since 5.3; older profiles of containers forbid it."""
    monkeypatch.setattr(os, "pidfd_open", refused(number))
    members = Members()
    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input(); exit(7)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        child.stdout.readline()
        members.refresh()
        assert child.pid in {member.pid for member in members.alive()}
        assert child.pid not in {ended.member.pid for ended in members.wait(0)}
        child.stdin.write(b"\n")
        child.stdin.close()
        ended, until = [], time.monotonic() + LIMIT
        while not ended and time.monotonic() < until:
            ended = [row for row in members.wait(0.01) if row.member.pid == child.pid]
        assert [row.status for row in ended] == [7] and child.pid not in {
            member.pid for member in members.alive()
        }
        child.returncode = 7  # it is reaped already
    members.close()


def test_the_log_of_a_rank_is_found_whose_first_heartbeat_comes_late(monkeypatch, tmp_path):
    """A rank without a launcher's marks is one by its heartbeat alone, which comes after its
    imports. They can take long."""
    monkeypatch.setattr(members_module, "_SETTLED", 0.05)
    members, log = Members(), tmp_path / "worker_0.log"
    with (
        open(log, "w") as out,
        subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=out
        ) as child,
    ):
        members.refresh()
        time.sleep(0.1)
        members.refresh()
        assert members.logs == set()
        members.refresh([Heartbeat(child.pid, start_ticks(child.pid), 0)])
        assert members.logs == {str(log)}
        child.stdin.close()
    members.close()


def test_a_rank_that_ended_before_it_was_seen_is_not_missed(tmp_path):
    heartbeat = Heartbeat(2**22 + 1, 5, rank=3)  # beyond the largest process number
    members = Members()
    members.refresh([heartbeat])
    (ended,) = members.wait(60)
    assert (ended.member.pid, ended.member.rank, ended.status) == (heartbeat.pid, 3, None)
    members.refresh([heartbeat])
    assert members.wait(0) == []
