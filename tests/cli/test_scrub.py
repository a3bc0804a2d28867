"""``mindresume scrub``: what it prints, its exit status, and what it refuses."""

import pytest
from rank_folders import flip_bit, path_of, save

COMMAND = "scrub"


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "output" / "checkpoint"
    for step in (5, 10):
        save(folder, step)
    return folder


def test_damage_then_repair(call, read, root):
    assert call(root)[0] == 0
    flip_bit(path_of(root, 10, 2))
    status, out, err = call(root, "--rate", "1000")
    assert (status, err) == (1, "") or status == 1 and "scrubbing" in err
    assert str(path_of(root, 10, 2)) in out and "loss_scale" in out
    status, out, _ = call(root.parent, command="ls")
    assert status == 0 and "unusable" in out
    status, found = read(root, "--repair")
    assert status == 0 and (found["damaged"], found["repaired"]) == (False, 1)
    assert {row["step"]: row["state"] for row in found["checkpoints"]} == {
        5: "intact",
        10: "repaired",
    }
    assert "unusable" not in call(root.parent, command="ls")[1]


def test_one_step_and_what_is_recent(read, root):
    assert [row["step"] for row in read(root, "--step", "5")[1]["checkpoints"]] == [5]
    status, found = read(root, "--older-than", "1")
    assert status == 0 and {row["step"]: row["state"] for row in found["checkpoints"]} == {
        5: "skipped",
        10: "intact",
    }


def test_nothing_is_there(call, tmp_path):
    assert call(tmp_path)[0] == 3


@pytest.mark.parametrize(
    "arguments", [("--step", "7"), ("--remote", "s3://bucket/x"), ("--rate", "-1")]
)
def test_wrong_arguments(call, root, arguments):
    assert call(root, *arguments)[0] == 2
