"""The identity of a process: its number and its start."""
import os
import subprocess
import sys
import time

from mindresume.coordination.process_identity import process_namespace, start_ticks, start_time, stat_fields


def test_a_process_that_has_ended_is_no_longer_there_although_nobody_has_reaped_it():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_ticks(process.pid) >= start_ticks(os.getpid()) > 0
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)           # it stays a zombie
    assert stat_fields(process.pid)[0] == b"Z" and start_ticks(process.pid) is None
    process.communicate()
    assert stat_fields(process.pid) is None and start_ticks(process.pid) is None


def test_the_namespace_is_that_of_the_kernel():
    assert f"pid:[{process_namespace()}]" == os.readlink("/proc/self/ns/pid")


def test_ticks_since_boot_as_a_time():
    assert 0 < start_time(start_ticks(os.getpid())) <= time.time() + 0.1 and start_time(0) is None
