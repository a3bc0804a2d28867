"""The parts of the PyNative test bed that need no mindformers: exact kills, and the stand-in for
hyper_parallel."""

import os
import signal
import subprocess
import sys

from st.training_run import ROOT


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_process_ends_before_the_operation(tmp_path):
    code = (
        "import sys, os; from st.cpu_cluster.pynative.faults import Place, SaveKill\n"
        "kill = SaveKill(Place('0@1:2')); sys.addaudithook(kill.audit); kill.folder = sys.argv[1] "
        "+ '/'\n"
        "os.mkdir(sys.argv[1] + '/before'); Place.step = 1\n"
        "os.mkdir(sys.argv[1] + '/first'); os.mkdir(sys.argv[1] + '/second')\n"
    )
    done = python(code, str(tmp_path))
    assert done.returncode == -signal.SIGKILL and "os.mkdir" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "first"]
