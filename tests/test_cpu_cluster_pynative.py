"""The parts of the PyNative test bed that need no mindformers: exact kills, and the stand-in for
hyper_parallel."""

import os
import signal
import subprocess
import sys

from st.cpu_cluster.pynative.faults import Place
from st.releases import why_not
from st.training_run import ROOT


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_place_is_due_on_its_rank_once_its_step_is_trained(monkeypatch):
    monkeypatch.setenv("RANK_ID", "1")
    monkeypatch.setattr(Place, "step", 5)
    assert Place("1@5").is_due and Place("all@4:7").is_due
    assert not Place("0@5").is_due and not Place("1@6").is_due


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


def test_every_name_below_hyper_parallel_can_be_imported():
    code = (
        "from st.cpu_cluster import hyper_parallel_standin as standin\n"
        "standin.MEANINGS['answer'] = 42\n"
        "assert standin.install() and standin.install()\n"
        "import sys; assert sum(type(finder).__name__ == '_Finder' for finder in sys.meta_path) == "
        "1\n"
        "from hyper_parallel import DTensor, SkipDTensorDispatch\n"
        "from hyper_parallel.core.dtensor.dtensor import DTensor as Same, distribute_tensor\n"
        "from hyper_parallel.anything import answer, HSDPModule\n"
        "assert DTensor is Same and answer == 42 and not isinstance(3, DTensor) and not "
        "isinstance(3, HSDPModule)\n"
        "@SkipDTensorDispatch()\ndef two(): return 2\n"
        "assert two() == 2\n"
        "with SkipDTensorDispatch(): pass\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_a_release_that_is_not_there_has_a_reason():
    assert "0.0.1" in why_not("0.0.1")
