"""Each benchmark starts: a name that has moved is noticed here, not when somebody wants to
measure."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = sorted((Path(__file__).resolve().parents[1] / "benchmarks").glob("[!_]*.py"))
# one after another in one process, which imports mindspore once
PROGRAM = """
import runpy, sys
path = list(sys.path)
for name in sys.argv[1:]:
    sys.argv[1:], sys.path[:] = ["--help"], [name.rpartition("/")[0], *path]
    try:
        runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, name
"""


def test_every_benchmark_explains_itself():
    # as in a fresh clone
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, BENCHMARKS)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0 and done.stdout.count("usage:") == len(BENCHMARKS), done.stderr
