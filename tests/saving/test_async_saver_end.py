"""How a save in flight ends when its training does: at an error, at the exit of the interpreter, at
a signal."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from iteration_folders import TRACKER
from rank_folders import committed_steps

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 600.0

COMMON = (
    "import atexit, os, signal, sys, time\nfrom background_saves import save_of, saver_of, "
    "writer_of\n"
)


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}


def python(folder, text, *arguments, **how):
    (folder / "training.py").write_text(COMMON + text)
    return subprocess.Popen(
        [sys.executable, "training.py", *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **how,
    )


def committed(folder):
    return committed_steps(folder / "checkpoint") if (folder / "checkpoint").exists() else []


def pointer(folder, version):
    return folder / "checkpoint" / (TRACKER if version == "2.0" else "rank_0/meta.json")


@pytest.mark.parametrize("kind, version", [("thread", "1.0"), ("process", "2.0")])
def test_a_save_in_flight_is_committed_when_the_interpreter_ends_with_an_error(
    tmp_path, kind, version
):
    """The weights arrive when the interpreter is already ending and thread pools accept no more
    work."""
    training = python(
        tmp_path,
        """
saver = saver_of(*sys.argv[1:])
atexit.register(saver.finish, 600)
atexit.register(lambda: open("go", "w").close())        # runs before
saver.save(save_of(saver.target, 5))
raise ValueError("the training failed")
""",
        kind,
        version,
    )
    _, errors = training.communicate(timeout=PATIENCE)
    assert training.returncode == 1 and "the training failed" in errors and "futures" not in errors
    assert committed(tmp_path) == [5] and pointer(tmp_path, version).exists()


# ---- a writer of its own process -----------------------------------------------------------------

BEGUN = """
saver = saver_of("process", "1.0")
saver.save(save_of(saver.target, 5))
"""


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_writer_is_not_a_process_of_the_launcher(tmp_path, monkeypatch):
    """It has its own session, and the launcher's marker under another name: the launcher waits for
    it and does not end it."""
    monkeypatch.setenv("MSRUN_LAUNCHER_JOB", "17.4711")
    training = python(
        tmp_path,
        f"{BEGUN}print(writer_of(saver), flush=True); sys.stdin.read()",
        stdin=subprocess.PIPE,
    )
    writer = int(training.stdout.readline())
    # empty in the middle of its exec
    while not (environment := Path(f"/proc/{writer}/environ").read_bytes()):
        pass
    variables = environment.split(b"\0")
    assert os.getsid(writer) == writer != os.getsid(training.pid)
    assert (
        b"MSRUN_LAUNCHER_WRITER=17.4711" in variables
        and b"MSRUN_LAUNCHER_JOB=17.4711" not in variables
    )
    (tmp_path / "go").touch()
    training.communicate(timeout=PATIENCE)


def test_a_signal_does_not_end_a_writer(tmp_path):
    """A signal during its start does not end it either."""
    training = python(
        tmp_path,
        f"""{BEGUN}
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    os.kill(writer_of(saver), number)
open("go", "w").close()
print(saver.finish(600))
""",
    )
    output, errors = training.communicate(timeout=PATIENCE)
    assert "saved=True, error=None" in output, errors
    assert committed(tmp_path) == [5]


def test_a_writer_finishes_and_ends_when_the_training_is_killed(tmp_path):
    """A child of the training survives and has the other end of the pipe open, as workers of a data
    set can."""
    training = python(
        tmp_path,
        f"""{BEGUN}
child = os.fork()
if child == 0:
    while not os.path.exists("end"):
        time.sleep(0.01)
    os._exit(0)
print(writer_of(saver), child, flush=True)
time.sleep(600)
""",
    )
    writer, child = map(int, training.stdout.readline().split())
    training.kill()
    training.wait(PATIENCE)
    (tmp_path / "go").touch()
    wait_for(lambda: not is_alive(writer))
    assert committed(tmp_path) == [5] and is_alive(child)
    (tmp_path / "end").touch()
    training.communicate()


def test_a_writer_that_cannot_finish_ends_after_its_timeout(tmp_path):
    """The training has ended: on a disk that never answers the writer would remain forever."""
    training = python(
        tmp_path,
        """
saver = saver_of("process", "1.0")
saver.timeout = 0.1
saver.save(save_of(saver.target, 5))
print(writer_of(saver), flush=True)
time.sleep(600)
""",
    )
    writer = int(training.stdout.readline())
    training.kill()
    wait_for(lambda: not is_alive(writer))
    assert committed(tmp_path) == []
    training.communicate()


def launched(folder, text, **settings):
    """Starts the program under our launcher with one worker."""
    (folder / "training.py").write_text(COMMON + text)
    return subprocess.Popen(
        ["bash", str(TESTS.parent / "scripts" / "msrun_launcher.sh"), "training.py", "1"],
        cwd=folder,
        env={**environment(), "PYTHON": sys.executable, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_save_in_flight_is_committed_after_sigterm(tmp_path):
    launcher = launched(
        tmp_path,
        f"""
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
{BEGUN}
open("up", "w").close()
while not os.path.exists("asked"):
    time.sleep(0.01)
open("go", "w").close()
print(saver.finish(600), flush=True)
""",
    )
    wait_for((tmp_path / "up").exists)
    launcher.terminate()
    output, _ = launcher.communicate(timeout=PATIENCE)
    assert "saved=True, error=None" in output and launcher.returncode == 143
    assert committed(tmp_path) == [5]


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)",
    ],
)
def test_the_launcher_waits_for_a_writer(tmp_path, end):
    """Whatever ends the training. If the launcher is the first process of a container, its end ends
    every process."""
    launcher = launched(
        tmp_path, f"{BEGUN}print('writer', writer_of(saver), os.getpid(), flush=True)\n{end}"
    )
    words = next(line for line in launcher.stdout if line.startswith("writer ")).split()
    wait_for(lambda: not is_alive(int(words[2])))
    (tmp_path / "go").touch()
    launcher.communicate(timeout=PATIENCE)
    assert committed(tmp_path) == [5]


def test_the_launcher_waits_for_a_limited_time(tmp_path):
    launcher = launched(
        tmp_path,
        f"{BEGUN}print('writer', writer_of(saver), flush=True)\nos._exit(1)",
        MSRUN_LEAVE="1",
    )
    writer = int(next(line for line in launcher.stdout if line.startswith("writer ")).split()[1])
    launcher.communicate(timeout=PATIENCE)
    assert not is_alive(writer) and committed(tmp_path) == []
