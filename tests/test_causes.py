"""Mutation test of rules of docs/design_rules.md that the simulation cannot see: a test fails if
their cause is put back."""

import os
import subprocess
import sys
from pathlib import Path

from cause_mutants import MUTANTS


def test_each_cause_that_is_put_back_is_found():
    root = Path(__file__).parent.parent
    tests = [f"tests/{name}" for name in MUTANTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rxX",
        "-p",
        "cause_mutants",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and f"{len(MUTANTS)} xfailed" in done.stdout.splitlines()[-1], (
        done.stdout
    )
