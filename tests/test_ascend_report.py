"""scripts/ascend_report.sh where nothing works, and what its page says of it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "ascend_report.sh"


def call(folder, *arguments, **environment):
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((), "--shared must name a folder"),
        (("--shared", ".", "--cards", "3"), "--cards must be"),
        (("--shared", ".", "--device", "GPU"), "--device must be"),
        (("--shared", ".", "--config", "absent.yaml"), "there is no absent.yaml"),
        (("--frobnicate", "1"), "unknown option"),
        (("--cards",), "needs a value"),
    ],
)
def test_a_wrong_argument(tmp_path, arguments, text):
    done = call(tmp_path, *arguments)
    assert done.returncode == 2 and text in done.stderr
    assert list(tmp_path.glob("mindresume-report-*")) == []


def test_where_nothing_works_each_step_fails_and_the_file_is_written_all_the_same(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/bash\necho broken >&2\nexit 1\n")
    broken.chmod(0o755)
    (tmp_path / "shared").mkdir()
    done = call(tmp_path, "--shared", "shared", "--out", "out", PYTHON=str(broken))
    assert done.returncode == 1
    rows = re.findall(r"(?m)^\d\. .{22} (\w+) ", done.stdout)
    assert len(rows) == 7 and set(rows) == {"FAILED"}
    assert len(list((tmp_path / "out").glob("*.tar.gz"))) == 1
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("name", ["first_ascend_run.md", "first_ascend_run.zh.md"])
def test_the_page_shows_the_lines_that_the_script_looks_for(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    expected = re.findall(r"(?m)^result \d .*\.log (['\"])(.*)\1$", SCRIPT.read_text())
    assert len(expected) == 7
    for _, pattern in expected[:-1]:  # the last line is the script's own
        pattern = pattern.replace("$CARDS", "8")
        assert any(re.search(pattern, line.strip()) for line in page.splitlines()), pattern
