"""scripts/msrun_launcher.sh with MSRUN_RESTARTS: the supervisor starts the script again, and its
exit status is the job's."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ROOT / "scripts" / "msrun_launcher.sh"


def launch(folder, program, *arguments, **environment):
    (folder / "train.py").write_text(program)
    return subprocess.run(
        ["bash", LAUNCHER, "train.py", "1", *arguments],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )


def test_a_job_is_started_again_until_it_finishes(tmp_path):
    program = (
        "import os, sys\nopen('starts', 'a').write('x')\nsys.exit(0 if "
        "os.path.getsize('starts') == 2 else 9)"
    )
    done = launch(tmp_path, program, MSRUN_RESTARTS="3")
    assert done.returncode == 0 and (tmp_path / "starts").read_text() == "xx", done.stderr


def test_the_status_of_a_job_that_is_given_up(tmp_path):
    done = launch(
        tmp_path,
        "open('starts', 'a').write('x')\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        MSRUN_RESTARTS="1",
    )
    assert done.returncode == 137 and (tmp_path / "starts").read_text() == "xx", done.stderr


# Fails once the supervisor has seen it: it then has a descriptor of this process, and reads the
# table at least once more.
FAILS_WHEN_SEEN = """
import os, pathlib, time
from mindresume.coordination.rank_heartbeat import RankHeartbeat
beat = RankHeartbeat.create(os.environ["MINDRESUME_SUPERVISOR_DIR"], 0)
mine, descriptors = f"Pid:\\t{os.getpid()}\\n", pathlib.Path("/proc", os.environ["MINDRESUME_SUPERVISOR"].split(".")[0], "fdinfo")
def seen():
    try:
        return any(mine in path.read_text() for path in descriptors.iterdir())
    except OSError:
        return False
while not seen():
    time.sleep(0.01)
time.sleep(3)
raise ValueError("the loss is gone")
"""  # noqa: E501


def test_the_error_of_a_job_of_one_worker_is_found_in_its_log(tmp_path):
    done = launch(tmp_path, FAILS_WHEN_SEEN, MSRUN_RESTARTS="0")
    assert done.returncode == 1 and "ValueError: the loss is gone" in done.stderr


def launch_on_host(folder, workers, **environment):
    """Starts the script on the second of several hosts with two workers each. In place of Python a
    program prints its arguments."""
    python = folder / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    return subprocess.run(
        ["bash", LAUNCHER, "train.py", workers, "2", "host0", "8118", "1", "log", "False", "60"],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=600,
        env={**os.environ, "PYTHON": str(python), "MSRUN_RESTARTS": "4", **environment},
    )


def test_the_supervisors_of_several_hosts_start_together(tmp_path):
    done = launch_on_host(tmp_path, "6", MSRUN_RENDEZVOUS="/shared/job 7")
    words = done.stdout.splitlines()
    assert done.returncode == 0 and words[:3] == ["-m", "mindresume", "run"]
    options = dict(zip(words[3:11:2], words[4:11:2], strict=True))
    assert options == {
        "--max-restarts": "4",
        "--nodes": "3",
        "--node-rank": "1",
        "--rendezvous": "/shared/job 7",
    }


def test_several_hosts_need_a_folder_in_which_they_meet(tmp_path):
    """Without one each host would start its part again by itself, and wait for the others in
    vain."""
    done = launch_on_host(tmp_path, "4")
    assert done.returncode == 2 and "MSRUN_RENDEZVOUS" in done.stderr and not done.stdout
    done = launch_on_host(tmp_path, "5", MSRUN_RENDEZVOUS="/shared/job7")
    assert done.returncode == 2 and "--node-rank" in done.stderr and not done.stdout
