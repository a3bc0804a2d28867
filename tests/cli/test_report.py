"""``mindresume report``: the page, the JSON document, and what is refused."""

import errno
import importlib.util
import os

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
        and "5 are needed to tell" in out
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and '"curves":[{' in text
    assert sorted(os.listdir(tmp_path)) == ["report.html", "run"]


def test_a_checkpoint_folder_of_any_name_is_given(read, tmp_path):
    save(tmp_path / "kept", 5)
    document = read(tmp_path / "kept")[1]
    assert [row["step"] for row in document["checkpoints"]] == [5]


def test_json_alone_writes_nothing(read, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, found = read(output)
    assert status == 0 and found["files"] == [] and sorted(os.listdir(tmp_path)) == ["run"]
    assert found["steps"] == {"reached": 10, "done": 13, "lost": 3, "at_risk": None}
    assert (found["restarts"], found["failures"]) == (1, 1)
    assert [row["step"] for row in found["checkpoints"]] == [10, 5]
    assert read(output, "-o", "new.html")[1]["files"] == ["new.html"]
    assert sorted(os.listdir(tmp_path)) == ["new.html", "run"]


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
    for page in ("x.pdf", tmp_path / "no" / "such" / "x.html"):
        status, _, err = call(output, "-o", page)
        assert status == 2 and str(page) in err and err.count("\n") == 1
    assert call(tmp_path / "gone")[0] == call(output, "--logs", tmp_path / "gone")[0] == 2


def test_without_jinja2_only_the_page_is_refused(call, read, output, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, _, err = call(output, "-o", tmp_path / "x.html")
    assert status == 2 and "needs jinja2" in err and not (tmp_path / "x.html").exists()
    assert read(output)[0] == 0


def test_a_page_that_cannot_be_written(call, output, tmp_path, monkeypatch):
    monkeypatch.setattr("mindresume.storage.posix.PosixStorage.write", full)
    status, _, err = call(output, "-o", tmp_path / "x.html")
    assert (status, err) == (2, f"mindresume: {tmp_path / 'x.html'}: No space left on device\n")


def full(self, path, pieces, size=0):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
