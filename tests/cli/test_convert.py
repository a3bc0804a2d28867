"""``mindresume convert``: its result, output and exit status, and the leftovers after an
interruption."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rank_folders import STORAGE, folder_contents
from reshard.plans import (
    MODEL,
    Plan,
    Spec,
    check_slices,
    foreign,
    put,
    random_tensors,
    recorded,
    shard_file,
)

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (
    "bfloat16",
    "bool",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int16",
    "int32",
    "int64",
    "int8",
    "uint16",
    "uint32",
    "uint64",
    "uint8",
)
TENSORS = random_tensors(MODEL)
LITTLE = {
    "embedding.weight": Spec((8, 4), 0, "first"),
    "layers.0.weight": Spec((4, 8), 1, 0),
    "layers.1.weight": Spec((4, 8), 1, 1),
}


COMMAND = "convert"


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "run" / "checkpoint"
    recorded(root, Plan.parse("tp2"), TENSORS)
    return root


def files_of(source):
    """Returns the files of a source without leases: a killed reader leaves one, which the next
    removal deletes."""
    return {
        path: data
        for path, data in folder_contents(source).items()
        if not path.name.startswith("claim-")
    }


def work_of(folder):
    """Returns the folder of a conversion that has not ended."""
    (found,) = [path for path in folder.iterdir() if path.name.endswith(".mindresume-tmp")]
    return found


# ---- results and output --------------------------------------------------------------------------


@pytest.mark.parametrize("memory, workers", [("192KiB", 1), ("64MiB", 2), ("1.5GB", 3)])
def test_memory_and_workers(source, tmp_path, read, memory, workers):
    status, found = read(
        source, tmp_path / "new", "--to", "tp=4", "--memory-limit", memory, "--workers", workers
    )
    limit = {"192KiB": 192 << 10, "64MiB": 64 << 20, "1.5GB": 1_500_000_000}[memory]
    assert status == 0 and found["memory_bytes"] <= limit
    check_slices(tmp_path / "new", Plan.parse("tp4"), TENSORS)


# ---- bad input: one clear line, and nothing is left ----------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_that_ckpt_may_not_have(tmp_path, call, dtype):
    """It is written, or one line names the tensor that cannot be."""
    put(
        tmp_path / "a" / "net.safetensors",
        {"some.weight": np.zeros((4, 4), getattr(ml_dtypes, dtype, dtype))},
    )
    status, _, err = call(tmp_path / "a", tmp_path / "new", "--to", "dp=2", "--format", "ckpt")
    assert (
        (status, err) == (0, "")
        or status == 2
        and "some.weight" in err
        and dtype in err
        and err.count("\n") == 1
    )


# ---- stopped, killed, twice at once --------------------------------------------------------------

# Reports its write number AT before it writes, and goes on once it is told.
CHILD = """
import os, sys
from mindresume import cli
from mindresume.storage import posix
os.fsync = lambda handle: None
write, count, at = posix._PosixFile.write_at, [], int(sys.argv[1])
def write_at(self, position, data):
    count.append(1)
    if len(count) == at:
        print("there", flush=True)
        sys.stdin.readline()
    write(self, position, data)
posix._PosixFile.write_at = write_at
sys.argv = ["mindresume", "convert", *sys.argv[2:]]
cli.main()
"""


@pytest.fixture
def halted(tmp_path):
    """Starts the command in a process that halts at one of its writes; yields the process when it
    has halted."""
    started = []

    def run(at, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(at), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        started.append(process)
        assert process.stdout.readline() == "there\n", process.stderr.read()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_leaves_nothing(source, tmp_path, call, halted):
    before, command = (
        folder_contents(tmp_path),
        (source, tmp_path / "new", "--to", "dp=2,tp=2,pp=2"),
    )
    process = halted(200, *command, "--workers", 1)
    assert os.listdir(work_of(tmp_path) / "done") == ["0.json"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode not in (0, -signal.SIGINT) and "Traceback" not in err
    assert folder_contents(tmp_path) == before
    assert call(*command)[0] == 0
    check_slices(tmp_path / "new", Plan.parse("dp2tp2pp2"), TENSORS)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_in_the_middle_and_the_same_command_again(source, tmp_path, read, halted, end):
    command = (source, tmp_path / "new", "--to", "dp=2,tp=2,pp=2")
    expected, before = tmp_path / "expected", files_of(source)
    assert read(source, expected, *command[2:])[0] == 0
    # writes of the first of two stages
    first = 4 * (1 + len(shard_file(Plan.parse("dp2tp2pp2"), TENSORS, 0)))
    process = halted(first + 10, *command, "--workers", 1)
    process.send_signal(end)
    process.communicate(timeout=600)
    assert process.returncode == -end and not (tmp_path / "new").exists()
    work = work_of(tmp_path)
    assert files_of(source) == before and os.listdir(work / "done") == ["0.json"]
    assert work.with_name(work.name + ".lock").exists()
    kept = {path.relative_to(work): path.stat().st_ino for path in work.glob("rank_[0-3]/*")}
    status, found = read(*command)
    assert status == 0 and found["notes"][0] == "part 1 of 2 is there already" and not work.exists()
    assert found["bytes_written"] < found["bytes_to_write"]
    check_slices(tmp_path / "new", Plan.parse("dp2tp2pp2"), TENSORS)
    assert {path: (tmp_path / "new" / path).stat().st_ino for path in kept} == kept
    for path in expected.glob("rank_*/*"):
        assert path.read_bytes() == (tmp_path / "new" / path.relative_to(expected)).read_bytes()


def test_the_same_command_twice_at_once(source, tmp_path, call, halted):
    """The second one is refused, and the first one is left alone."""
    command = (source, tmp_path / "new", "--to", "dp=2,pp=2")
    running = halted(100, *command, "--workers", 1)
    before = folder_contents(work_of(tmp_path))
    status, out, err = call(*command)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "new is running in another process; wait for it, and then start this one again" in err
    assert folder_contents(work_of(tmp_path)) == before
    running.communicate("go on", timeout=600)
    assert running.returncode == 0
    check_slices(tmp_path / "new", Plan.parse("dp2pp2"), TENSORS)


# ---- several pipeline stages ---------------------------------------------------------------------

TIED = {
    **LITTLE,
    "embedding.weight": Spec((8, 4), 0, "ends"),
    "adam_m.embedding.weight": Spec((8, 4), 0, "ends"),
}


def tied(root, origin, spoil=False):
    """Returns a checkpoint of 4 ranks in 2 stages. ``spoil``: the last rank has another embedding
    than the second one, and its record matches."""
    plan, tensors = Plan.parse("tp2pp2", TIED), random_tensors(TIED)
    other = {**tensors, "embedding.weight": tensors["embedding.weight"].copy()}
    other["embedding.weight"].view(np.uint32)[7, 1] ^= 1
    write = foreign if origin == "mindformers" else recorded
    write(root / "checkpoint", plan, tensors, others={3: other} if spoil else {})
    if origin == "mindformers":
        plan.write(root / "strategy")
    return root / "checkpoint", tensors


@pytest.mark.parametrize("origin", ["mindresume", "mindformers", "iteration"])
def test_a_tied_embedding_is_in_all_its_stages(tmp_path, origin, call, read):
    source, tensors = tied(tmp_path / "run", "mindresume" if origin == "iteration" else origin)
    if origin == "iteration":
        assert call(source, tmp_path / "iterations", "--format", "iteration")[0] == 0
        source = tmp_path / "iterations"
    found = json.loads(call(source, "--json", command="inspect")[1])["tensors"]
    assert {row["name"]: row["stages"] for row in found if row["name"] in TIED} == {
        "embedding.weight": [0, 1],
        "adam_m.embedding.weight": [0, 1],
        "layers.0.weight": [0],
        "layers.1.weight": [1],
    }
    for text, plan in (("dp=2,pp=2", "dp2pp2"), ("tp=2", "tp2"), ("same", "tp2pp2")):
        assert call(source, tmp_path / text, "--to", text, "--format", "safetensors")[0] == 0
        check_slices(tmp_path / text, Plan.parse(plan, TIED), tensors)


@pytest.mark.parametrize("origin", ["mindresume", "mindformers"])
def test_copies_in_two_stages_that_differ_are_refused_by_name(tmp_path, origin, call):
    source, _ = tied(tmp_path / "run", origin, spoil=True)
    new = tmp_path / "new"
    for command, *arguments in (("convert", new, "--to", "tp=2"), ("merge", new), ("diff", source)):
        status, out, err = call(source, *arguments, command=command)
        assert (status, out) == (2, "") and err.count("\n") == 1, err
        assert "embedding.weight is held by several pipeline stages" in err
        assert "rank 1" in err and "rank 3" in err and os.listdir(tmp_path) == ["run"]
    # an open compares what the records know, and reads nothing for it
    assert call(source, command="inspect")[0] == (2 if origin == "mindresume" else 0)


def test_too_little_space_or_memory_is_an_error(source, refused, monkeypatch):
    little = "102400 bytes of memory are too little for 2 workers"
    assert little in refused(source, "--to", "tp=4", "--memory-limit=100KiB")
    monkeypatch.setattr(type(STORAGE), "free_space", lambda storage, folder: 1000)
    assert re.search(
        r"new needs 1\.\d MiB, there is room for 0\.0 MiB. Nothing was written",
        refused(source, "--to", "tp=4"),
    )
