"""The command line on damaged folders, files, logs and arguments: each command ends with one of its
exit statuses, in one clear line and never in a traceback, and what it prints is text. The damage is
another one each time: seeds are fresh.

    MINDRESUME_HOSTILE_SEED=123 pytest tests/test_hostile_commands.py         one case again
    MINDRESUME_HOSTILE_SECONDS=600 pytest tests/test_hostile_commands.py      more cases: CPU
    seconds
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import iteration_folders
import numpy as np
import pytest
from huggingface_folders import GROUPED, document
from mutations import damage
from rank_folders import path_of, save, write_foreign
from reshard.plans import COUNTERS, MODEL, Plan, put, random_tensors
from reshard.plans import foreign as foreign_of_plan
from training_logs import INFO, RUNS, ZERO, Log, Training

from mindresume import cli
from mindresume.events.event_file import FOLDER

SECONDS = os.environ.get("MINDRESUME_HOSTILE_SECONDS")  # of CPU
SEED = os.environ.get("MINDRESUME_HOSTILE_SEED")
# seconds after which a command is taken to hang: none needs a twentieth of it
HANGS = 600
STATUSES = {0, 1, 2, 3}
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


STEPS = ["5", "10", "-1", "0", "9" * 30, "9" * 5000, "x", ""]


COUNTS = ["1", "2", "4", "0", "-1", "100000", "9" * 30, "nan"]


def run(*arguments):
    """Returns (status, stdout, stderr) of a command in this process. Exceptions propagate, and text
    that is not UTF-8 is one."""
    streams = [
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
    ]

    def late(*_):
        pytest.fail(f"mindresume {arguments} hangs")

    before, handler = sys.argv, signal.signal(signal.SIGALRM, late)
    sys.argv = ["mindresume", *map(str, arguments)]
    signal.alarm(HANGS)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            cli.main()
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        sys.argv = before
    return status, *(stream.buffer.getvalue().decode() for stream in streams)


def checked(*arguments):
    """Calls ``run`` and checks what every command must fulfil."""
    status, out, err = run(*arguments)
    assert status in STATUSES, (status, err)
    assert "Traceback" not in out + err
    assert not CONTROL.search(out + err), repr(CONTROL.search(out + err))
    if "--json" in arguments and out:
        json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return status, out, err


def refused(*arguments, says=""):
    """Checks that the command prints one clear line, and nothing else."""
    status, out, err = checked(*arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and len(err) < 1200, (status, out, err)
    assert re.search(says, err), err
    return err


# ---- one at a time -------------------------------------------------------------------------------


@pytest.fixture
def merged(tmp_path):
    save(tmp_path / "source", 5, 1)
    assert run("merge", tmp_path / "source", tmp_path / "merged")[0] == 0
    return tmp_path / "merged"


@pytest.mark.parametrize(
    "field, value",
    [
        ("fingerprint", 3),
        ("files", [["a"]]),
        ("files", [["/etc/passwd", 1, "x"]]),
        ("files", [["../source", 1, "x"]]),
        ("tensors", {"embedding.weight": 5}),
    ],
)
def test_a_sealed_conversion_with_an_odd_field(merged, field, value):
    from test_hostile import resealed, setting

    path = merged / "conversion.json"
    path.write_bytes(resealed(path.read_bytes(), setting(field, value=value)))
    err = refused("merge", merged.parent / "source", merged, says="not empty")
    # nothing outside was looked at
    assert "bytes" not in err
    checked("verify", merged)
    checked("inspect", merged, "--json")


@pytest.mark.parametrize(
    "name, value", [("epoch_num", np.nan), ("step_num", np.inf), ("epoch_num", -5)]
)
def test_counters_that_are_not_numbers_cause_no_traceback(tmp_path, name, value):
    root = tmp_path / "checkpoint"
    write_foreign(root, 20, 1)
    counters = {**COUNTERS, "step_num": np.array(20), name: np.array(value)}
    put(path_of(root, 20, 0), counters, {"format": "ms"})
    for command in ("which", "ls", "verify", "inspect"):
        for arguments in ((root, "--json"), (path_of(root, 20, 0),)):
            checked(command, *arguments)


FORGED = [
    {"event": "save_committed", "step": 2**63, "ranks": 1, "size_bytes": 1},
    {"event": "save_begun", "step": 10**400},
    {"event": "save_staged", "step": 5, "name": "x", "stall_seconds": 1e17},
    {
        "event": "save_written",
        "step": 5,
        "size_bytes": 1,
        "write_seconds": -1e9,
        "stall_seconds": -1e9,
    },
    {
        "event": "checkpoint_selected",
        "step": 2**59,
        "epoch": 1,
        "run_id": "\x1b]0;",
        "checkpoint_dir": "/",
        "description": "x" * 9000,
    },
    {
        "event": "progress_restored",
        "step": 2**59,
        "epochs_done": 0,
        "saved_step": 0,
        "step_scale": 1e17,
    },
    {
        "event": "training_ended",
        "outcome": "preempted",
        "reason": "\x1b]0;\ud800" + "x" * 9000,
        "step": 2**59,
    },
    {
        "event": "training_started",
        "host": "",
        "process_id": 1,
        "world_size": 2**59,
        "version": "",
        "utc_offset_seconds": 10**18,
    },
    {
        "event": "run_opened",
        "run_id": "x" * 9000,
        "checkpoint_dir": "",
        "file_prefix": "",
        "world_size": 1,
        "time": 4e11,
    },
    {"event": "candidate_refused", "step": 5, "reason": "<script>", "file": "\0"},
]


def test_forged_events_are_ignored(tmp_path):
    Training().start(0).run(1, RUNS[0]).steps(10, 1, 20).write_all(tmp_path)
    (path,) = (tmp_path / FOLDER).iterdir()
    with open(path, "a") as file:
        for values in FORGED:
            file.write(json.dumps({"time": ZERO + 40, "rank": 0, **values}) + "\n")
    assert checked("report", tmp_path, "--json")[0] == 0
    assert checked("report", tmp_path, "-o", tmp_path / "page.html")[0] == 0


def test_a_log_that_is_a_pipe(tmp_path):
    Log().start(0).steps(10, 1, 20).write(tmp_path / INFO)
    os.mkfifo((tmp_path / INFO).parent / "info.log.1")
    (tmp_path / "msrun_log").mkdir()
    os.mkfifo(tmp_path / "msrun_log" / "worker_0.log")
    assert json.loads(checked("report", tmp_path, "--json")[1])["steps"]["done"] == 20


NO_TEXT = [
    b"net\xff_rank_0-1_5.safetensors",
    b"\x1b[2J\x1b[31m.ckpt",
    b"x\xe2\x80\xaegnp.ckpt",
    b"a\nb.safetensors",
]


@pytest.mark.parametrize("command", ["ls", "which", "verify", "report", "inspect"])
def test_names_that_are_not_text_are_printed_as_text(tmp_path, command):
    root = tmp_path / os.fsdecode(b"[/b] \xff\x1b[2J") / "checkpoint"
    write_foreign(root, 5, 1)
    for name in NO_TEXT:
        (root / "rank_0" / os.fsdecode(name)).write_bytes(b"x")
    out = tmp_path / "page.html"
    for more in (["--json"], ["-o", out] if command == "report" else []):
        checked(command, root.parent if command == "report" else root, *more)
    assert command != "report" or out.read_bytes().decode()


def test_a_path_is_not_markup(tmp_path):
    root = tmp_path / "[b]x[/b] [/nothing] :smile:"
    save(root, 5, 1)
    # in one piece, however narrow the terminal
    assert checked("ls", root)[1].splitlines()[0] == str(root)


def test_invalid_sizes_are_refused(tmp_path):
    save(tmp_path / "checkpoint", 5, 1)
    sizes = ["9" * 310, "1" * 19 + "GiB", "1e9", "-1", "0", "nan", "1.", "", "²", "1" + "0" * 4400]
    for option in ("--part-size", "--memory-limit"):
        for size in sizes:
            refused(
                "merge", tmp_path / "checkpoint", tmp_path / "n", f"{option}={size}", says=option
            )


def test_configurations_without_a_model_are_refused(tmp_path):
    save(tmp_path / "checkpoint", 5, 1)
    config = tmp_path / "config.json"
    for key, value in (
        ("model_type", []),
        ("num_hidden_layers", 10**7),
        ("vocab_size", 2**63),
        ("architectures", ["x" * 5000]),
        ("quantization_config", "x" * 5000),
    ):
        config.write_text(json.dumps({**document(GROUPED), key: value}))
        paths = (tmp_path / "checkpoint", tmp_path / "hf")
        refused("export-hf", *paths, "--config", config, says=key)
    checked("which", tmp_path)


def test_many_counters_are_merged_in_time(tmp_path):
    """20,000 single numbers: with a new set for each of them 40,000 took minutes."""
    tensors = {f"counter_{index}": np.array(index) for index in range(20_000)}
    path = tmp_path / "net_rank_0-1_5.safetensors"
    put(path, {**tensors, "layer.weight": np.zeros((2, 2), np.float32)}, {"format": "ms"})
    started = time.process_time()
    status, out, _ = checked("merge", path, tmp_path / "new", "--dry-run", "--json")
    assert status == 0 and json.loads(out)["tensors"] == 20_001
    assert time.process_time() - started < 8  # of CPU; it takes half a second


# ---- random damage -------------------------------------------------------------------------------

TENSORS = random_tensors(MODEL)


def logs(root):
    save(root / "checkpoint", 10, 1)
    training = Training().start(0).fresh(1).run(2, RUNS[0]).steps(10, 1, 12).save(25, 10)
    training.start(100).resume(101, 10, RUNS[0]).run(102, RUNS[1]).steps(110, 11, 20)
    training.save(125, 20).over(130).write_all(root)


def save_rank_folders(root):
    save(root / "checkpoint", 5, 2)
    save(root / "checkpoint", 10, 2)
    write_foreign(root / "checkpoint", 20, 2, suffix=1)


def with_strategy(root):
    plan = Plan.parse("dp2tp2", MODEL)
    foreign_of_plan(root / "checkpoint", plan, TENSORS)
    plan.write(root / "strategy")
    plan.write(root / "strategy_0123abcd")
    (root / "strategy_0123abcd" / "used_for.json").write_text("[[1, 2]]")


def save_iteration_folders(root):
    (root / "checkpoint").mkdir(parents=True)
    iteration_folders.save(root / "checkpoint", 5, 10)
    iteration_folders.foreign(root / "checkpoint", steps=(15,))
    iteration_folders.write_all(root / "checkpoint", 20)


def complete(root):
    (root / "one").mkdir(parents=True)
    save(root / "one", 5, 1)
    assert run("merge", root / "one", root / "checkpoint")[0] == 0
    shutil.rmtree(root / "one")
    (root / "checkpoint" / "config.json").write_text(json.dumps(document(GROUPED)))


KINDS = (save_rank_folders, with_strategy, save_iteration_folders, complete, logs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a folder of each kind."""
    folder = tmp_path_factory.mktemp("whole")
    for fill in KINDS:
        fill(folder / fill.__name__)
    return folder


SIZES = ["1kB", "3GiB", "0", "-1", "9" * 310, "nan", "1e5", "", "x"]
NAMED = ["5", "9" * 5000, "²", "x.ckpt", "../x", "net_rank_0-1_5"]
PLANS = ["dp=2", "dp=2,tp=2", "dp=99999999999", "tp=0", "x", "", "dp=" + "9" * 5000]
PATTERNS = ["*", "adam_*", "[", ""]
OPTIONS = {  # of each command: {option: values, None: it has none}
    "ls": {"--world-size": COUNTS},
    "which": {"--world-size": COUNTS, "--name": NAMED, "--quick": None},
    "verify": {"--world-size": COUNTS, "--step": STEPS},
    "inspect": {"--step": STEPS, "--rank": COUNTS, "--tensor": PATTERNS, "--all": None},
    "prune": {
        "--keep-last": COUNTS,
        "--keep-every-steps": COUNTS,
        "--keep-minutes": [*COUNTS, "1e400"],
        "--keep-best": COUNTS,
    },
    "merge": {
        "--part-size": SIZES,
        "--workers": COUNTS,
        "--memory-limit": SIZES,
        "--drop": PATTERNS,
        "--hf-index": None,
        "--step": STEPS,
    },
    "convert": {"--to": PLANS, "--step": STEPS, "--format": ["ckpt", "iteration", "x"]},
    "export-hf": {"--max-shard-size": SIZES, "--dtype": ["bfloat16", "x"], "--step": STEPS},
    "diff": {"--tolerance": ["0", "nan", "1e400", "-1"]},
    "report": {},
}


def command_for(folder, draw):
    """Returns the arguments of one command on ``folder``."""
    command = draw.choice(list(OPTIONS))
    root, new = folder / "checkpoint", folder / "new"
    places = [root, root, root, folder]
    if draw.random() < 0.3:
        places += sorted(folder.rglob("*"), key=os.fsencode)[:40]
    arguments = [command, draw.choice(places)]
    if command in ("merge", "convert", "export-hf"):
        arguments += [new, *["--dry-run"] * draw.randint(0, 1)]
    if command == "diff":
        arguments.append(draw.choice(places))
    if command == "export-hf":
        arguments += ["--config", root / "config.json"]
    for option, values in OPTIONS[command].items():
        if draw.random() < 0.25:
            arguments.append(option if values is None else f"{option}={draw.choice(values)}")
    if command == "report" or draw.random() < 0.5:
        arguments.append("--json")
    return [*map(str, arguments)]


def one_case(whole, folder, seed):
    """Applies the damage of ``seed``, and runs three commands on the result."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS).__name__
    shutil.copytree(whole / kind, folder, symlinks=True)
    done = [damage(folder, draw) for _ in range(draw.choice([1, 1, 2, 3, 5]))]
    for _ in range(3):
        arguments = command_for(folder, draw)
        try:
            checked(*arguments)
        except BaseException as error:
            error.add_note(
                f"MINDRESUME_HOSTILE_SEED={seed}: {kind}, {done}, mindresume "
                f"{[text[:200] for text in arguments]}"
            )
            raise


def test_any_damage_ends_a_command_in_one_line(whole, tmp_path, soak):
    limit = float(SECONDS or (60 if soak else 2))
    seeds = iter([int(SEED)]) if SEED else iter(lambda: random.SystemRandom().getrandbits(48), None)
    begun, started, cases = time.process_time(), time.monotonic(), 0
    for seed in seeds:
        one_case(whole, Path(tmp_path, f"case{cases}"), seed)
        shutil.rmtree(tmp_path / f"case{cases}", ignore_errors=True)
        cases += 1
        # the machine has other work
        if time.process_time() - begun > limit or time.monotonic() - started > 4 * limit:
            break
    assert cases
