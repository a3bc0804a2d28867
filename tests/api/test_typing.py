"""The types of the Python API reach a program that uses an installed mindresume (``py.typed``):
mypy finds wrong uses of it."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import mindresume

RIGHT = """
import mindresume

catalog = mindresume.open("output/checkpoint", world_size=8)
steps: tuple[int, ...] = catalog.steps()
newest = catalog.latest()
if newest is not None:
    step: int | None = newest.step
for row in catalog.list():
    print(row.problem)
with catalog[500] as checkpoint:
    names: list[str] = [tensor.name for tensor in checkpoint.tensors.values()]
    print(checkpoint.read("embedding.weight", region=(slice(0, 8), slice(None))).shape)
written: int = mindresume.convert("output/checkpoint", "new", to="dp=4,tp=2").bytes_written
policy = mindresume.KeepAny((mindresume.KeepLast(3), mindresume.KeepEverySteps(1000)))
removed = mindresume.prune("output/checkpoint", policy=policy)
try:
    print(catalog.verify(step=500).damaged, removed.to_json()["removed"])
except mindresume.MindResumeError as error:
    print(error)
"""
WRONG = {  # a use, and mypy's code of the error
    'mindresume.open("a", world_size="8")': "arg-type",
    'mindresume.open("a").latest().step': "union-attr",
    'mindresume.open("a").step()': "attr-defined",
    'mindresume.open("a")["500"]': "index",
    'mindresume.open("a").select().chosen.read("w", region=8)': "arg-type",
    'mindresume.convert("a")': "call-arg",
    'mindresume.convert("a", "b", dp=4)': "call-arg",
    'mindresume.prune("a", policy=3)': "arg-type",
    "mindresume.no_such_name": "attr-defined",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Returns the path of a Python in whose environment only mindresume is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.EnvBuilder(symlinks=True).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "mindresume").symlink_to(Path(mindresume.__file__).parent)
    return folder / "bin" / "python"


def test_a_right_program_passes_and_each_wrong_use_is_found(environment, tmp_path):
    (tmp_path / "program.py").write_text("\n".join([RIGHT.strip(), *WRONG]))
    options = ["--config-file=", "--strict", "--no-incremental", "--cache-dir=/dev/null"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", *options),
            *("--python-executable", str(environment), "program.py"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^program\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    first = len(RIGHT.strip().splitlines()) + 1
    assert min(int(line) for line, _ in found) == first, done.stdout + done.stderr
    assert set(enumerate(WRONG.values(), first)) <= {(int(line), code) for line, code in found}
