"""``mindresume convert``: its result, output and exit status, and the leftovers after an
interruption."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from rank_folders import STORAGE, damage, folder_contents, path_of, save
from reshard.plans import (
    COUNTERS,
    MODEL,
    STEP,
    Plan,
    Spec,
    check_slices,
    complete,
    foreign,
    put,
    random_tensors,
    recorded,
    shard_file,
)

import mindresume

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
NBYTES = sum(array.nbytes for array in (*TENSORS.values(), *COUNTERS.values()))
LITTLE = {
    "embedding.weight": Spec((8, 4), 0, "first"),
    "layers.0.weight": Spec((4, 8), 1, 0),
    "layers.1.weight": Spec((4, 8), 1, 1),
}
FEW = random_tensors(LITTLE)


COMMAND = "convert"


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "run" / "checkpoint"
    recorded(root, Plan.parse("tp2"), TENSORS)
    return root


@pytest.fixture
def little(tmp_path):
    recorded(tmp_path / "little", Plan.parse("tp2", LITTLE), FEW)
    return tmp_path / "little"


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


def strategy_in(folder, text, model=MODEL):
    return Plan.parse(text, model).write(folder)


# ---- results and output --------------------------------------------------------------------------


def test_a_plan(source, tmp_path, read):
    before = folder_contents(source)
    status, found = read(source, tmp_path / "new", "--to", "dp=2,tp=2,pp=2,opt=2")
    assert status == 0 and folder_contents(source) == before
    plan = Plan.parse("dp2tp2pp2opt2")
    check_slices(tmp_path / "new", plan, TENSORS)
    written = sum(
        array.nbytes for rank in range(8) for array in shard_file(plan, TENSORS, rank).values()
    )
    read_ = NBYTES + sum(array.nbytes for array in COUNTERS.values())  # of both stages
    seconds, notes = found.pop("seconds"), found.pop("notes")
    assert found == {
        "source": f"{source}, step 15, 2 ranks",
        "target": str(tmp_path / "new"),
        "engine": "direct",
        "files": 8,
        "tensors": len(TENSORS) + len(COUNTERS),
        "dtypes": found["dtypes"],
        "model_type": None,
        "bytes_needed": NBYTES,
        "bytes_to_read": read_,
        "bytes_to_write": written,
        "over_read": round(read_ / NBYTES, 4),
        "memory_bytes": found["memory_bytes"],
        "dry_run": False,
        "finished": True,
        "bytes_read": read_,
        "bytes_written": written,
        "bytes_verified": read_,
        "refused": [],
    }
    assert len(notes) == 1 and "step 15" in notes[0] and "8 ranks" in notes[0]
    assert 0 <= seconds < 60 and found["memory_bytes"] > 1 << 20


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_a_strategy_folder_and_a_format(source, tmp_path, call, fmt):
    status, out, err = call(
        source, tmp_path / "new", "--to", strategy_in(tmp_path / "to", "dp2tp2"), "--format", fmt
    )
    assert (status, err) == (0, "") and len(list((tmp_path / "new").glob(f"rank_*/*.{fmt}"))) == 4
    check_slices(tmp_path / "new", Plan.parse("dp2tp2"), TENSORS)
    assert f"{source}, step 15, 2 ranks\n  -> {tmp_path}/new" in out and "engine direct" in out
    assert re.search(
        r"\d.* read, .* written in \d+\.\d s \(.*/s\); .* compared with recorded checksums", out
    )


def test_the_source_strategy_is_given_or_found_beside(tmp_path, call):
    foreign(tmp_path / "run" / "output" / "checkpoint", Plan.parse("tp2pp2"), TENSORS)
    strategy_in(tmp_path / "given", "tp2pp2")
    assert (
        call(
            tmp_path / "run", tmp_path / "a", "--to", "dp=4,opt=all", "--from", tmp_path / "given"
        )[0]
        == 0
    )
    strategy_in(tmp_path / "run" / "output" / "strategy", "tp2pp2")
    assert call(tmp_path / "run" / "output", tmp_path / "b", "--to", "dp=4,opt=all")[0] == 0
    for name in "ab":
        check_slices(tmp_path / name, Plan.parse("dp4opt-1"), TENSORS)
        assert mindresume.open(tmp_path / name).latest().state.epoch == 2


@pytest.mark.parametrize("memory, workers", [("192KiB", 1), ("64MiB", 2), ("1.5GB", 3)])
def test_memory_and_workers(source, tmp_path, read, memory, workers):
    status, found = read(
        source, tmp_path / "new", "--to", "tp=4", "--memory-limit", memory, "--workers", workers
    )
    limit = {"192KiB": 192 << 10, "64MiB": 64 << 20, "1.5GB": 1_500_000_000}[memory]
    assert status == 0 and found["memory_bytes"] <= limit
    check_slices(tmp_path / "new", Plan.parse("tp4"), TENSORS)


def test_a_dry_run_writes_nothing(source, tmp_path, call, read):
    before = folder_contents(tmp_path)
    status, found = read(source, tmp_path / "deep" / "new", "--to", "dp=2,tp=2", "--dry-run")
    assert (
        status == 0
        and (found["dry_run"], found["finished"]) == (True, False)
        and folder_contents(tmp_path) == before
    )
    assert (
        found["seconds"] is None
        and found["bytes_read"] == found["bytes_written"] == found["bytes_verified"] == 0
    )
    assert (
        found["files"] == 4
        and found["bytes_needed"] == found["bytes_to_read"] == NBYTES
        and found["over_read"] == 1.0
    )
    status, out, err = call(source, tmp_path / "deep" / "new", "--to", "dp=2,tp=2", "--dry-run")
    assert (
        (status, err) == (0, "")
        and "dry run, nothing was written" in out
        and folder_contents(tmp_path) == before
    )


def test_the_same_conversion_again_does_nothing(source, tmp_path, call, read):
    command = (source, tmp_path / "new", "--to", "dp=2,tp=2")
    assert call(*command)[0] == 0

    # not of folders: what reads the source holds it, and leaves nothing
    def times():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    before, names = times(), folder_contents(tmp_path)
    status, found = read(*command)
    assert status == 0 and found["finished"] is True and found["seconds"] is None
    assert "it exists already, nothing was done" in call(*command)[1]
    assert read(*command, "--dry-run")[1]["finished"] is True
    assert times() == before and folder_contents(tmp_path) == names


def test_a_newer_step_that_cannot_be_used_is_printed(tmp_path, call, read):
    for step in (5, 10):
        save(tmp_path / "a", step, replicas=1)
    path = path_of(tmp_path / "a", 10, 3)
    os.truncate(path, 100)
    status, found = read(tmp_path / "a", tmp_path / "new", "--to", "dp=2")
    (refusal,) = found["refused"]
    assert (
        status == 0
        and "step 5" in found["source"]
        and refusal["step"] == 10
        and str(path) in refusal["reason"]
    )
    assert call(tmp_path / "a", tmp_path / "again", "--to", "dp=2")[1].startswith(
        "not usable: step 10: "
    )
    assert call(tmp_path / "a", tmp_path / "third", "--to", "dp=2", "--step", 10)[0] == 2


def test_consolidated_weights_and_a_single_file(tmp_path, call):
    (tmp_path / "one").mkdir()
    put(tmp_path / "one" / "net.safetensors", {**TENSORS, **COUNTERS})
    strategy_in(tmp_path / "to", "dp2tp2")
    for number, src in enumerate(
        [complete(tmp_path / "a", TENSORS), tmp_path / "one" / "net.safetensors", tmp_path / "one"]
    ):
        assert call(src, tmp_path / str(number), "--to", tmp_path / "to")[0] == 0
        check_slices(tmp_path / str(number), Plan.parse("dp2tp2"), TENSORS)


def test_a_relative_target(source, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("run", "new/", "--to", "tp=4")[0] == 0
    check_slices(tmp_path / "new", Plan.parse("tp4"), TENSORS)
    assert sorted(os.listdir(tmp_path)) == ["new", "run"]


# ---- bad input: one clear line, and nothing is left ----------------------------------------------


def test_a_source_that_does_not_exist(tmp_path, refused):
    assert (
        refused(tmp_path / "missing", "--to", "tp=2")
        == f"mindresume: {tmp_path}/missing does not exist\n"
    )
    (tmp_path / "empty").mkdir()
    assert "empty has no checkpoint\n" in refused(tmp_path / "empty", "--to", "tp=2")


def test_a_missing_step_is_an_error(source, refused):
    assert "checkpoint has no step 7; there are: 15" in refused(source, "--to", "tp=2", "--step", 7)


def test_a_flipped_bit_in_the_source(tmp_path, refused):
    name = "embedding.weight"
    root = tmp_path / "checkpoint"
    recorded(root, Plan.parse("tp2", LITTLE), FEW)
    path = damage(root, STEP, 0, name)
    error = refused(root, "--to", "dp=2,pp=2", "--engine", "direct")
    assert f"{path}: {name} of rank 0 is not what was written: checksum" in error


@pytest.mark.parametrize(
    "plan, message", [("tp=0", "tp is '0'"), ("tp=3", "tp=3"), ("nonsense", "nonsense")]
)
def test_a_bad_plan(little, refused, plan, message):
    assert message in refused(little, "--to", plan)


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--format", "pickle", "format is 'pickle'; choose one of safetensors, ckpt"),
        ("--engine", "turbo", "engine is 'turbo'; choose one of auto, direct, mindspore"),
        (
            "--memory-limit",
            "much",
            "--memory-limit is 'much'; expected a size such as 512MiB or 4GiB",
        ),
        ("--memory-limit", "0", "--memory-limit is '0'"),
        ("--memory-limit", "-1GiB", "--memory-limit is '-1GiB'"),
        ("--memory-limit", "100KiB", "102400 bytes of memory are too little for 2 workers"),
    ],
)
def test_bad_options(little, refused, option, value, message):
    assert message in refused(little, "--to", "tp=4", f"{option}={value}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--to"],
        ["--to", "tp=2", "--workers", "0"],
        ["--to", "tp=2", "--nonsense"],
        ["--to", "tp=2", "--step", "x"],
    ],
)
def test_wrong_arguments(little, tmp_path, call, arguments):
    assert call(little, tmp_path / "new", *arguments)[0] == 2
    assert not (tmp_path / "new").exists()


def test_a_target_that_is_not_empty_is_an_error(source, tmp_path, call, refused):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("precious")
    assert "new is not empty; give a folder that does not exist. Nothing was changed" in refused(
        source, "--to", "tp=4"
    )
    assert "is not empty" in refused(source, "--to", "tp=4", "--dry-run")
    (tmp_path / "file").write_text("precious")
    assert "file is a file; give a folder that does not exist" in refused(
        source, "--to", "tp=4", target="file"
    )
    assert call(source, tmp_path / "made", "--to", "tp=4")[0] == 0
    error = refused(source, "--to", "dp=4", target="made")
    assert f"made is not empty: it was converted from {source}, step 15, 2 ranks" in error
    assert "lies in" in refused(source, "--to", "tp=4", target="run/checkpoint/new")


def test_an_error_of_several_lines(tmp_path, call):
    """Half of the ranks wrote ckpt, the others safetensors: neither is a checkpoint, and each has a
    line of its own."""
    world, plan = 2, Plan.parse("tp2", LITTLE)
    for rank in range(world):
        put(
            path_of(
                tmp_path / "checkpoint",
                STEP,
                rank,
                0,
                "ckpt" if rank < world // 2 else "safetensors",
            ),
            shard_file(plan, FEW, rank),
        )
    strategy_in(tmp_path / "strategy", f"tp{world}", LITTLE)
    status, out, err = call(
        tmp_path / "checkpoint", tmp_path / "new", "--to", "dp=2", "--engine", "direct"
    )
    assert (status, out) == (2, "") and err.startswith("mindresume: ") and "none can be used" in err
    assert (
        err.count("embedding.weight") == 2
        and err.count("\n") == 3
        and not (tmp_path / "new").exists()
    )


def test_too_little_space_is_an_error(source, refused, monkeypatch):
    monkeypatch.setattr(type(STORAGE), "free_space", lambda storage, folder: 1000)
    assert re.search(
        r"new needs 1\.\d MiB, there is room for 0\.0 MiB. Nothing was written",
        refused(source, "--to", "tp=4"),
    )


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
    assert (
        process.returncode == -end
        and not (tmp_path / "new").exists()
        and files_of(source) == before
    )
    work = work_of(tmp_path)
    assert (
        sorted(os.listdir(work / "done")) == ["0.json"]
        and work.with_name(work.name + ".lock").exists()
    )
    kept = {path.name: path.stat().st_ino for path in work.glob("rank_[0-3]/*")}
    status, found = read(*command)
    assert status == 0 and found["notes"][0] == "part 1 of 2 is there already" and not work.exists()
    assert found["bytes_written"] < found["bytes_to_write"]
    check_slices(tmp_path / "new", Plan.parse("dp2tp2pp2"), TENSORS)
    assert {
        name: (tmp_path / "new" / f"rank_{rank}" / name).stat().st_ino
        for rank in range(4)
        for name in kept
        if f"rank_{rank}-" in name
    } == kept
    for path in expected.glob("rank_*/*"):
        assert path.read_bytes() == (tmp_path / "new" / path.relative_to(expected)).read_bytes()


def test_the_same_command_twice_at_once(source, tmp_path, call, halted):
    """The second one is refused, and the first one is left alone."""
    command = (source, tmp_path / "new", "--to", strategy_in(tmp_path / "to", "dp2pp2"))
    running = halted(100, *command, "--workers", 1)
    before = folder_contents(work_of(tmp_path))
    status, out, err = call(*command)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "new is running in another process; wait for it, and then start this one again" in err
    assert folder_contents(work_of(tmp_path)) == before
    running.communicate("go on", timeout=600)
    assert running.returncode == 0
    check_slices(tmp_path / "new", Plan.parse("dp2pp2"), TENSORS)


def test_no_framework_is_imported(source, tmp_path):
    code = (
        "from mindresume import cli; import sys\ntry: cli.main()\nexcept SystemExit as end: "
        "print('ENDED', end.code)\n"
        "print('LOADED', sorted({name.split('.')[0] for name in sys.modules} & {'mindspore', "
        "'mindformers', 'torch', "
        "'transformers', 'safetensors', 'google'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "new"), "--to", "tp=4"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "ENDED 0" in done.stdout and done.stdout.rstrip().endswith("LOADED []"), (
        done.stdout + done.stderr
    )
    shutil.rmtree(tmp_path / "new")


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
    for command, arguments in (
        ("convert", (new, "--to", "tp=2")),
        ("merge", (new,)),
        ("diff", (source,)),
    ):
        status, out, err = call(source, *arguments, command=command)
        assert (status, out) == (2, "") and err.count("\n") == 1, err
        assert (
            "embedding.weight is held by several pipeline stages" in err
            and "rank 1" in err
            and "rank 3" in err
        )
        assert sorted(os.listdir(tmp_path)) == ["run"]
