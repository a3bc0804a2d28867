"""Worker processes return results, end with the command, and leave nothing behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindresume.fault_injection import runner as module
from mindresume.fault_injection.runner import Workers

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0  # seconds after which a test on a busy machine is given up


def square(number):
    return number * number


def refuse(number):
    raise ValueError(f"no {number}")


def die(number):
    os._exit(3)


def folder_of(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "file").touch()
    return folder


def test_results_errors_and_killed_workers_are_reported(tmp_path):
    folder = folder_of(tmp_path)
    with Workers(2, str(folder)) as workers:
        assert sorted(workers.map(square, range(7))) == [0, 1, 4, 9, 16, 25, 36]
        assert list(workers.map(square, [])) == []
    assert not folder.exists()
    with pytest.raises(ValueError, match="no 5"), Workers(1, str(folder_of(tmp_path))) as workers:
        list(workers.map(refuse, [5]))
    with (
        pytest.raises(ChildProcessError, match="died"),
        Workers(1, str(folder_of(tmp_path))) as workers,
    ):
        list(workers.map(die, [5]))
    assert os.listdir(tmp_path) == []


def test_a_worker_whose_parent_is_gone_ends_without_a_traceback(monkeypatch):
    """The pipe is broken before the thread that waits for the parent has noticed."""
    monkeypatch.setattr(module, "_end_with_parent", lambda: None)
    # the worker reads, or writes, when the parent is gone
    for sent in (), ((square, 3),):
        ours, theirs = multiprocessing.Pipe()
        for message in sent:
            ours.send(message)
        ours.close()
        module._work(theirs)


def processes_of(session):
    """Returns {pid: command} of the live processes in a session."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                state, _, _, own = file.read().rpartition(")")[2].split()[:4]
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == session and state != "Z":
            found[int(pid)] = command
    return found


def until(condition):
    late = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < late, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_drill_and_leaves_nothing(tmp_path, number):
    """Signals the process alone, as ``kill`` does; the drill takes minutes, so it is still
    running. SIGINT: tests/simulation/test_command.py."""
    drill = subprocess.Popen(
        [sys.executable, "-m", "mindresume", "drill", "--full", "--dir", str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until(lambda: list(tmp_path.glob("mindresume-drill-*/cell-*")))
    drill.send_signal(number)
    out, err = drill.communicate(timeout=PATIENCE)
    until(lambda: not processes_of(drill.pid) and os.listdir(tmp_path) == [])
    assert "Traceback" not in err
    if number == signal.SIGKILL:
        assert drill.returncode == -number
    else:
        assert (
            drill.returncode == 128 + number
            and "the drill was stopped" in err
            and out.startswith("| scenario | format |")
        )
