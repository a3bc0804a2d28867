"""The quickstart as README shows it: st/quickstart.py, with one process, and with --soak with
four."""

import re
import subprocess
import sys

import pytest

from st.quickstart import STEPS
from st.training_run import ROOT

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("extra", [["--quick"], []], ids=["one process", "four processes"])
def test_the_resumed_run_equals_the_uninterrupted_one(extra, tmp_path, device, soak):
    if not extra and not soak:
        pytest.skip("takes three minutes: --soak; what it shows is tested in st/test_cluster.py")
    if device != "CPU":
        pytest.skip("the quickstart runs on the CPU cluster")
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "st" / "quickstart.py"),
            *extra,
            "--folder",
            str(tmp_path / "quickstart"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout
    assert done.returncode == 0, text + done.stderr
    assert re.search(r"^  largest difference: 0$", text, re.MULTILINE)
    assert "WRONG" not in text and "the resumed training is the uninterrupted one" in text
    chosen = int(re.search(r"chosen:  step (\d+), ", text).group(1))
    assert re.search(rf"refused: step {chosen + 5}: the save never completed", text)
    rows = re.findall(r"^ +(\d+)  +([\d.]+)  +([\d.]+)  +(\S+)  (\S+)$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(chosen + 1, STEPS + 1))
    assert all(row[1] == row[2] and row[3:] == ("0", "yes") for row in rows)
    assert '"kind":"failed"' in (tmp_path / "quickstart" / "report.html").read_text(
        encoding="utf-8"
    )
