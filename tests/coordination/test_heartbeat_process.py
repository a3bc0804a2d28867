"""Heartbeats of a job that saves: they come while the training holds the interpreter lock, and end
with it."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lease_holders import ME, acquire_lease
from rank_folders import dir_at

from mindresume.coordination import lease as lease_module
from mindresume.coordination.lease import LOADING, acquire_read_lock, lease_holders, lease_path
from mindresume.coordination.lease_acquisition import acquire
from mindresume.coordination.liveness import HeartbeatProcess
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER
from mindresume.storage.posix import PosixStorage

EVERY, LONGEST = 0.05, 60.0  # seconds between two heartbeats; after which a test fails

# Waits until the lease in the folder $1 was replaced, then writes "beat" into the pipe $2; "none"
# after a minute.
WATCHER = r"""
first=$(cat "$1"/claim-*); word=none
for look in $(seq 600); do
    [ "$(cat "$1"/claim-* 2>/dev/null || echo "$first")" = "$first" ] || { word=beat; break; }
    sleep 0.1
done
echo $word > "$2"
"""


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """Lets processes send heartbeats, and returns them. None outlives its test."""
    started = []

    def start(*arguments):
        started.append(HeartbeatProcess.start(*arguments))
        return started[-1]

    monkeypatch.setattr(lease_module, "start_process", start)
    yield started
    for process in started:
        process._process.kill()
        process._process.wait()


def holder_of(root):
    (found,) = lease_holders(dir_at(root))
    return found


def wait_for(condition):
    """Returns once ``condition()`` holds."""
    until = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < until, "it never happens"
        time.sleep(0.01)


def watch(root, pipe):
    os.mkfifo(pipe)
    return subprocess.Popen(["bash", "-c", WATCHER, "watcher", str(root / FOLDER), str(pipe)])


def test_heartbeats_come_while_the_interpreter_lock_is_held(tmp_path):
    """MindSpore holds it while it compiles a graph. A call through PyDLL holds it, too: this one
    until a heartbeat was seen."""
    lease = acquire(dir_at(tmp_path), ME, beat=EVERY).start()
    watcher = watch(tmp_path, tmp_path / "pipe")
    libc, text = ctypes.PyDLL(None), ctypes.create_string_buffer(16)
    handle = libc.open(os.fsencode(tmp_path / "pipe"), os.O_RDONLY)
    assert libc.read(handle, text, 16) == 5 and text.value == b"beat\n"
    os.close(handle)
    watcher.wait()
    lease.release()


def test_the_lease_that_the_process_writes_is_that_of_the_job(tmp_path, processes):
    lease = acquire(dir_at(tmp_path), ME, beat=EVERY).start()
    lease.step = 12
    wait_for(lambda: holder_of(tmp_path).step == 12)
    found = holder_of(tmp_path)
    assert found.beat > lease.holder.beat == 1
    assert (found.run, found.pid, found.folder) == (lease.run, os.getpid(), lease.holder.folder)
    with pytest.raises(lease_module.LeaseHeldError):
        acquire_lease(tmp_path)
    (process,) = processes
    lease.release()
    assert not process.is_alive() and os.listdir(tmp_path / FOLDER) == []


def test_signals_that_ask_to_end_leave_the_process(tmp_path, processes):
    lease = acquire(dir_at(tmp_path), ME, beat=EVERY).start()
    (process,) = processes
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(process.pid, number)
    before = holder_of(tmp_path).beat
    wait_for(lambda: holder_of(tmp_path).beat > before + 1)
    assert process.is_alive() and os.getsid(process.pid) == process.pid
    lease.release()


def test_a_process_that_was_killed_is_replaced_and_the_lease_can_always_be_released(
    tmp_path, processes
):
    lease = acquire(dir_at(tmp_path), ME, beat=EVERY).start()
    for count in range(1, lease_module._TRIES + 1):
        wait_for(lambda count=count: len(processes) == count)
        os.kill(processes[-1].pid, signal.SIGKILL)
    before = holder_of(tmp_path).beat
    # a thread sends them now
    wait_for(lambda: holder_of(tmp_path).beat not in (before, before + 1))
    assert len(processes) == lease_module._TRIES
    lease.release()
    assert os.listdir(tmp_path / FOLDER) == []


@pytest.mark.parametrize(
    "error", [OSError(11, "Resource temporarily unavailable"), ValueError("embedded null byte")]
)
def test_a_thread_sends_the_heartbeats_where_no_process_can_be_started(
    tmp_path, monkeypatch, error
):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(subprocess, "Popen", fail)
    lease = acquire(dir_at(tmp_path), ME, beat=EVERY)
    monkeypatch.setattr(lease_module, "start_process", HeartbeatProcess.start)
    lease.start()
    wait_for(lambda: holder_of(tmp_path).beat > 2)
    lease.release()


class Other(PosixStorage):
    """Another storage, which the process does not know."""


def test_readers_and_other_storages_have_no_process(tmp_path, processes):
    acquire(CheckpointDir(Other(), str(tmp_path / "a")), ME, beat=EVERY).start().release()
    (tmp_path / "b" / FOLDER / "x").mkdir(parents=True)
    acquire_read_lock(
        dir_at(tmp_path / "b"), "x", str(tmp_path / "b" / FOLDER / "x"), purpose=LOADING
    ).release()
    acquire(dir_at(tmp_path / "c"), ME, beat=0).start().release()
    assert processes == []


# A training whose heartbeat process is its child: prints the number of that process, then waits.
TRAINING = """
import sys
from mindresume.coordination import lease
from mindresume.coordination.lease_acquisition import acquire
from mindresume.formats import CheckpointDir
from mindresume.storage.posix import PosixStorage
held = acquire(CheckpointDir(PosixStorage(), sys.argv[1]), lease.holder_of_this_process("saving"), beat=0.05).start()
print(held._beating.pid, flush=True)
input()
"""  # noqa: E501


@pytest.fixture
def training(tmp_path):
    """Returns a training process and the number of the process that sends its heartbeats."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    beating = int(process.stdout.readline())
    yield process, beating
    process.kill()
    process.communicate()
    wait_for(lambda: not Path(f"/proc/{beating}").exists())


def test_the_process_ends_with_its_training_and_imports_no_framework(training):
    """SIGKILL of the training: nothing ends the process but itself. The fixture waits for its
    end."""
    process, beating = training
    mapped = Path(f"/proc/{beating}/maps").read_text()
    assert "numpy" not in mapped and "mindspore" not in mapped
    process.kill()


def test_no_heartbeat_comes_from_a_stopped_training(training, tmp_path):
    process, beating = training
    wait_for(lambda: holder_of(tmp_path).beat > 2)
    process.send_signal(signal.SIGSTOP)
    wait_for(
        lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    )
    seen = []

    # the heartbeat that had begun has ended, and the process looks at it again
    def is_silent():
        seen.append(holder_of(tmp_path).beat)
        time.sleep(0.2)
        return seen[-3:] == seen[-1:] * 3

    wait_for(is_silent)
    before = holder_of(tmp_path).beat
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: holder_of(tmp_path).beat > before)


def test_a_lease_path_that_is_not_utf8(tmp_path):
    root = tmp_path / "checkpoint\udcff"
    lease = acquire(dir_at(root), ME, beat=EVERY).start()
    wait_for(lambda: holder_of(root).beat > 2)
    assert lease_path(dir_at(root), lease.run).endswith(os.listdir(root / FOLDER)[0])
    lease.release()
