"""``mindresume report``: the page, the JSON document, and what is refused."""

import errno
import importlib.util
import os
import subprocess
import sys

import pytest
from rank_folders import save
from training_logs import Log, two_attempts

COMMAND = "report"


@pytest.fixture
def output(tmp_path):
    folder = tmp_path / "run" / "output"
    two_attempts().write_all(folder)
    save(folder / "checkpoint", 5)
    save(folder / "checkpoint", 10)
    return folder


def test_a_page(call, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(output)
    assert (status, err) == (0, "") and out.splitlines()[-1:] == ["report.html"]
    assert (
        "3 of 13 steps lost" in out
        and "1 recovery: 1 from disk" in out
        and "at least 5 failures" in out
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and '"curves":[{' in text
    assert sorted(os.listdir(tmp_path)) == ["report.html", "run"]


def test_json_alone_writes_nothing(read, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, found = read(output)
    assert status == 0 and found["files"] == [] and sorted(os.listdir(tmp_path)) == ["run"]
    assert found["steps"] == {"reached": 10, "done": 13, "lost": 3, "at_risk": None}
    assert [(row["outcome"], row["steps_lost"]) for row in found["attempts"]] == [
        ("failed", 3),
        ("finished", 0),
    ]
    assert (found["restarts"], found["failures"], found["goodput"]) == (
        1,
        1,
        pytest.approx(10 / 55, abs=1e-3),
    )
    assert [row["step"] for row in found["checkpoints"]] == [10, 5]


def test_json_and_a_page(read, output, tmp_path):
    _, found = read(output, "-o", tmp_path / "new.html")
    assert found["files"] == [str(tmp_path / "new.html")]
    assert (tmp_path / "new.html").exists()


@pytest.mark.parametrize("inner", ["..", ".", "checkpoint"])
def test_any_folder_of_the_run_is_accepted(read, output, inner):
    _, found = read(output / inner)
    assert len(found["attempts"]) == 2 and len(found["checkpoints"]) == 2


def test_a_run_before_its_first_save(read, tmp_path):
    two_attempts().write_all(tmp_path / "output")
    for folder in (tmp_path, tmp_path / "output"):
        _, found = read(folder)
        assert len(found["attempts"]) == 2 and found["root"] == str(
            tmp_path / "output" / "checkpoint"
        )


def test_only_checkpoints(call, tmp_path):
    save(tmp_path / "checkpoint", 5)
    status, out, _ = call(tmp_path, "-o", tmp_path / "r.html")
    assert status == 0 and "no logs of a training" in out
    assert "Looked for" in (tmp_path / "r.html").read_text()


def test_logs_in_another_folder(read, tmp_path, output):
    Log().start(900).over(905).write(tmp_path / "elsewhere" / "rank_0" / "info.log")
    _, found = read(output, "--logs", tmp_path / "elsewhere")
    assert len(found["attempts"]) == 3


def test_wrong_arguments(call, output, tmp_path):
    status, _, err = call(output, "-o", tmp_path / "x.pdf")
    assert status == 2 and err.endswith(
        "x.pdf: the page is an HTML file; give a name that ends in .html\n"
    )
    assert call(tmp_path / "gone")[0] == 2
    assert call(output, "--logs", tmp_path / "gone")[0] == 2
    assert call(output, "-o", tmp_path / "no" / "such" / "x.html")[0] == 2


def test_without_jinja2_only_the_page_is_refused(call, read, output, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = call(output, "-o", tmp_path / "x.html")
    assert status == 2 and "needs jinja2" in err and not (tmp_path / "x.html").exists()
    assert read(output)[0] == 0


def test_other_commands_do_not_import_it(output):
    code = (
        "import sys\nfrom mindresume import cli\nsys.argv = ['mindresume', 'ls', sys.argv[1], "
        "'--json']\n"
        "try:\n    cli.main()\nfinally:\n    print([name for name in sys.modules if "
        "name.split('.')[0] in ("
        "'jinja2', 'mindspore', 'mindformers') or name.startswith('mindresume.report')], "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(output)], capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"


def test_a_page_that_cannot_be_written(call, output, tmp_path, monkeypatch):
    status, _, err = call(output, "-o", tmp_path / "missing" / "folder" / "x.html")
    assert (
        status == 2
        and f"there is no folder {tmp_path / 'missing' / 'folder'}" in err
        and len(err.splitlines()) == 1
    )
    monkeypatch.setattr("mindresume.storage.posix.PosixStorage.write", full)
    status, _, err = call(output, "-o", tmp_path / "x.html")
    assert (status, err) == (2, f"mindresume: {tmp_path / 'x.html'}: No space left on device\n")


def full(self, path, pieces, size=0):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
