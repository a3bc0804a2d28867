"""``mindresume advise``: its lines, its JSON, and what it refuses."""
from training_logs import Training, history

COMMAND = "advise"


def test_lines(call, tmp_path):
    history().write_all(tmp_path / "output")
    status, out, err = call(tmp_path / "output")
    assert (status, err) == (0, "") and [line.split()[0] for line in out.splitlines()][:5] == [
        "save", "failure", "now", "advised", "goodput"]
    assert "Nothing to change yet: 2 of at least 5 failures" in out


def test_json(read, tmp_path):
    history().write_all(tmp_path / "output")
    status, found = read(tmp_path / "output")
    assert (status, found["failures"], found["tiers"][0]["steps_now"]) == (0, 2, 20)


def test_too_little(call, tmp_path):
    Training().start(0).steps(10, 1, 9).write_all(tmp_path / "output")
    status, out, err = call(tmp_path / "output")
    assert (status, out) == (2, "") and str(tmp_path / "output") in err


def test_a_wrong_folder_of_logs(call, tmp_path):
    assert call(tmp_path, "--logs", tmp_path / "gone")[0] == 2
