"""coordination/rank_heartbeat.py: what a rank writes is what the supervisor reads, and a broken
file is no heartbeat."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mindresume.coordination import rank_heartbeat as hb
from mindresume.coordination.liveness import namespace, start_ticks
from mindresume.coordination.rank_heartbeat import RankHeartbeat, read_heartbeat, read_heartbeats


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def heartbeat(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(
        hb, "runtime", SimpleNamespace(monotonic=clock, time=lambda: 1e9 + clock.now)
    )
    return RankHeartbeat(str(tmp_path / f"process_1{hb.SUFFIX}"))


def test_a_new_heartbeat_names_this_process_and_nothing_else(heartbeat):
    found = read_heartbeat(heartbeat.path)
    assert found.namespace == namespace("pid") > 0
    assert (found.pid, found.ticks, found.phase) == (
        os.getpid(),
        start_ticks(os.getpid()),
        hb.STARTING,
    )
    assert {
        found.rank,
        found.step,
        found.resumed,
        found.saves.begun,
        found.saves.written,
        found.saves.committed,
    } == {hb.NONE}
    assert (found.outcome, found.output, found.has_trained) == ("", "", False)


def test_a_full_tmpfs_is_an_error_and_kills_no_rank(tmp_path, monkeypatch):
    """A page that is only mapped would be a SIGBUS at the first write."""

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        RankHeartbeat.create(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_phases_steps_and_their_times(heartbeat, clock):
    for phase, seconds in (
        (hb.JOINING, 2),
        (hb.COMPILING, 3),
        (hb.LOADING, 4),
        (hb.COMPILING, 5),
        (hb.FIRST_STEP, 6),
    ):
        clock.now += seconds
        heartbeat.enter(phase)
    clock.now += 7
    heartbeat.reach(11)
    clock.now += 8
    heartbeat.reach(12)
    found = read_heartbeat(heartbeat.path)
    assert found.times.spent == {
        hb.STARTING: 2,
        hb.JOINING: 3,
        hb.COMPILING: 4 + 6,
        hb.LOADING: 5,
        hb.FIRST_STEP: 7,
    }
    assert (found.phase, found.step, found.times.changed, found.times.progressed) == (
        hb.TRAINING,
        12,
        127,
        135,
    )
    assert found.times.entered[hb.COMPILING] == 1e9 + 105 and found.has_trained


def test_the_end_stays_the_last_phase(heartbeat):
    heartbeat.set(outcome=1)
    heartbeat.enter(hb.ENDED)
    heartbeat.reach(5)
    found = read_heartbeat(heartbeat.path)
    assert (found.phase, found.outcome) == (hb.ENDED, "finished")


def test_numbers_and_the_output_folder(heartbeat, tmp_path):
    heartbeat.set(rank=3, world_size=8, resumed=40, begun=50, written=50, committed=45, signal=41)
    heartbeat.set_output(str(tmp_path / "output"))
    found = read_heartbeat(heartbeat.path)
    assert (found.rank, found.world_size, found.resumed, found.saves, found.signal) == (
        3,
        8,
        40,
        hb.Saves(50, 50, 45),
        41,
    )
    assert found.output == str(tmp_path / "output")
    heartbeat.set_output("x" * 5000)
    assert read_heartbeat(heartbeat.path).output == str(tmp_path / "output")


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b"x" * 4096, b"\1" * 100])
def test_another_file_is_no_heartbeat(tmp_path, data):
    (tmp_path / f"process_7{hb.SUFFIX}").write_bytes(data)
    assert read_heartbeats(str(tmp_path)) == [] == read_heartbeats(str(tmp_path / "absent"))


def test_a_reader_sees_what_another_process_wrote_before_it_was_killed(tmp_path):
    program = (
        "import os, signal, sys; from mindresume.coordination.rank_heartbeat import *\n"
        "beat = RankHeartbeat.create(sys.argv[1], 2); beat.reach(7); os.kill(os.getpid(), "
        "signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    (found,) = read_heartbeats(str(tmp_path))
    assert (found.rank, found.step, found.phase) == (2, 7, hb.TRAINING)
