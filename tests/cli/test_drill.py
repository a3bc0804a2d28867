"""``mindresume drill`` on a file system: the operations that get a fault, and the report on the
rest."""

import os

import pytest

COMMAND = "drill"
SMALL = ("--scenario", "pointers", "--format", "ckpt", "--jobs", "1")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr("mindresume.fault_injection.runner.QUICK", 10)


def test_the_default_is_a_sample_that_reports_what_it_left_out(call, read, tmp_path):
    some = ("--dir", tmp_path, *SMALL, "--fault", "torn", "--fault", "ENOSPC", "--fault", "EIO")
    status, found = read(*some)
    possible = found["possible"]
    assert status == 0 and found["every"] == -(-possible // 10) and os.listdir(tmp_path) == []
    assert 0 < len(found["cells"]) < possible > 20
    status, out, _ = call(*some, "--every", "20")
    *_, cells, left_out = out.splitlines()
    assert status == 0 and "cells in" in cells
    assert f" of {possible:,} cells, sampled: one of 20 operations for each scenario" in left_out
    assert left_out.endswith("--full takes every operation, another --seed takes others")


def test_full_is_every_operation(call):
    status, out, _ = call(*SMALL, "--fault", "torn", "--full")
    assert status == 0 and "cells in" in out and "sampled" not in out


def test_full_and_every(call):
    status, out, err = call("--full", "--every", "3")
    assert (status, out) == (
        2,
        "",
    ) and "--full takes every operation; it does not go with --every" in err


def test_explain_describes_scenarios_and_faults(call):
    status, out, err = call("--explain")
    assert status == 0 and all(f"\n{name} " in out for name in ("first save", "late"))
