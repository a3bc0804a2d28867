"""``mindresume drill`` on a file system: the operations that get a fault, and the report on the
rest."""

import os
import subprocess
import sys

import pytest

COMMAND = "drill"
SMALL = ("--scenario", "pointers", "--format", "ckpt", "--jobs", "1")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr("mindresume.fault_injection.runner.QUICK", 30)


def test_the_default_is_a_sample_that_reports_what_it_left_out(call, read, tmp_path):
    status, out, err = call("--dir", tmp_path, *SMALL)
    *_, cells, left_out = out.splitlines()
    assert status == 0 and "cells in" in cells
    assert left_out.endswith("--full takes every operation, another --seed takes others")
    status, found = read("--dir", tmp_path, *SMALL)
    assert status == 0 and found["every"] == -(-found["possible"] // 30)
    assert 0 < len(found["cells"]) < found["possible"] and os.listdir(tmp_path) == []
    assert left_out.startswith(
        f"{len(found['cells'])} of {found['possible']} cells, sampled: one of {found['every']} "
        "operations"
    )


def test_full_is_every_operation(call, read):
    some = (*SMALL, "--fault", "torn", "--fault", "ENOSPC", "--fault", "EIO")
    status, found = read(*some, "--full")
    assert status == 0 and found["every"] == 1 and len(found["cells"]) == found["possible"] > 20
    status, out, err = call(*some, "--every", "20")
    assert status == 0 and "sampled: one of 20 operations" in out
    status, out, err = call(*SMALL, "--fault", "torn")
    assert status == 0 and "sampled" not in out


def test_full_and_every(call):
    status, out, err = call("--full", "--every", "3")
    assert (status, out) == (
        2,
        "",
    ) and "--full takes every operation; it does not go with --every" in err


def test_explain_describes_scenarios_and_faults(call):
    status, out, err = call("--explain")
    assert status == 0 and all(f"\n{name} " in out for name in ("first save", "late"))


def test_help_imports_nothing_heavy():
    program = (
        "import sys; sys.argv[1:] = ['--help']\nfrom mindresume.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if "
        "name.startswith(('mindresume.fault_injection.', 'mindspore'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
