"""scripts/ascend_report.sh from its first step to its last one, with two processes on CPUs."""

import os
import re
import subprocess
import sys
import tarfile

import pytest

from st.training_run import ROOT

pytestmark = pytest.mark.timeout(3600)


def test_all_steps_pass_and_one_file_has_what_an_issue_needs(memory, tmp_path, device):
    if device != "CPU":
        pytest.skip("the script itself runs on devices: bash scripts/ascend_report.sh")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "ascend_report.sh"), "--device", "CPU", "--cards", "2"]
        + ["--shared", memory, "--out", "result", "--epochs", "5", "--every", "2000"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(r"(?m)^(\d)\. (.{22}) (\w+) ", done.stdout)
    assert [row[0] for row in results] == ["1", "2", "3", "4", "5", "5", "6"]
    assert {row[2] for row in results} == {"passed"}
    (file,) = (tmp_path / "result").glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = archive.getnames()
        summary = archive.extractfile("summary.md").read().decode()
    assert {"report.html", "supervised.log", "doctor.log"} <= set(names)
    assert any("mindresume_events" in name for name in names)
    assert "all steps passed" in summary and "was killed by SIGKILL" in summary
    assert "start 2 trains after step" in summary and "mindspore" in summary
    assert os.listdir(memory) == []
