"""The drill, by the command that a user calls: every scenario and fault with 2 ranks, at many
operations of each format."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter

import pytest

from st.training_run import ROOT

pytestmark = pytest.mark.timeout(3700)
# flushing costs nothing there; what is durable is the drill's own bookkeeping
MEMORY = "/dev/shm"


@pytest.fixture(name="folder")
def a_folder_of_its_own(tmp_path):
    """Another drill runs at the same time, and must not be seen as left behind."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path
    folder = tempfile.mkdtemp(prefix="mindresume-test-", dir=parent)
    yield folder
    shutil.rmtree(folder)


# all: docs/reliability.md
@pytest.mark.parametrize("fmt, every", [("safetensors", 25), ("ckpt", 40), ("iteration", 40)])
def test_every_cell_passes_and_nothing_is_left_behind(folder, fmt, every, soak):
    every = 1 if soak else every
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mindresume",
            "drill",
            "--dir",
            folder,
            "--json",
            "--format",
            fmt,
            "--every",
            str(every),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        timeout=3600,
        check=False,
    )
    found = json.loads(done.stdout)
    cells = found["cells"]
    bad = [cell for cell in cells if cell["verdict"] != "PASS" or cell["left"]]
    assert not bad, bad[:5]
    assert done.returncode == 0 and (found["every"], found["possible"] - len(cells) > 0) == (
        every,
        every > 1,
    )
    assert not os.listdir(folder)
    counts = Counter(cell["scenario"] for cell in cells)
    assert len(counts) == 7 and min(counts.values()) > 100 / every, counts
    assert {cell["format"] for cell in cells} == {fmt}
    assert {cell["fault"] for cell in cells} >= {
        "EIO",
        "ENOSPC",
        "EDQUOT",
        "ESTALE",
        "torn",
        "power",
        "reorder",
        "late",
    }


def test_drill_finds_a_file_system_that_does_not_flush(tmp_path):
    """Checks the exit status, the table and the reason of a failure: here nothing that was synced
    is durable."""
    program = tmp_path / "drill.py"
    program.write_text(
        "import sys\n"
        "from mindresume.fault_injection import faults\n"
        "faults.FaultInjector.make_durable = lambda self, folder: None\n"
        "from mindresume.cli import main\n"
        "if __name__ == '__main__':              # its worker processes import this file, too\n"
        "    sys.argv[0] = 'mindresume'\n"
        "    main()\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            "drill",
            "--dir",
            str(tmp_path),
            "--scenario",
            "save",
            "--format",
            "ckpt",
            "--fault",
            "power",
            "--every",
            "5",
            "--jobs",
            "1",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "LOST_WORK: save, ckpt: power at operation" in done.stdout
        and "| save | ckpt |" in done.stdout
    )
