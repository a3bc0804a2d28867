"""``mindresume advise``: its lines, its JSON, and what it refuses."""

import pytest
from training_logs import Training, history

import mindresume

COMMAND = "advise"


def test_lines_and_json(call, read, tmp_path):
    history(attempts=7, memory=3, sources="mmmmmd").write_all(tmp_path / "output")
    status, out, err = call(tmp_path / "output")
    assert (status, err) == (0, "") and [line.split()[0] for line in out.splitlines()] == [
        "memory",
        "disk",
        "failure",
        "now",
        "advised",
        "now",
        "advised",
        "change",
        "hang",
    ]
    assert "--hang-timeout 300" in out
    assert read(tmp_path) == (0, mindresume.advise(tmp_path).to_json())


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_too_few_failures_are_one_sentence(call, tmp_path, attempts):
    """Also in the report."""
    history(attempts=attempts, memory=3).write_all(tmp_path / "output")
    status, out, err = call(tmp_path / "output")
    sentence, hang = out.splitlines()
    assert (status, err) == (0, "") and hang.startswith("hang       --hang-timeout 300")
    assert sentence.startswith(f"Nothing to change yet: {attempts - 1} failure")
    assert "needed to tell; a save stops the training for" in sentence
    page = tmp_path / "report.html"
    assert (
        f"how often to save: {sentence}\n"
        in call(tmp_path / "output", "-o", page, command="report")[1]
    )


def test_what_is_refused(call, tmp_path):
    assert call(tmp_path, "--logs", tmp_path / "gone")[0] == call(tmp_path / "gone")[0] == 2
    Training().start(0).steps(10, 1, 9).write_all(tmp_path / "output")
    status, out, err = call(tmp_path / "output")
    assert (status, out) == (2, "") and str(tmp_path / "output") in err
