"""The command line on folders of both origins: what it prints for programs, and its exit status."""

import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from coordination.test_storage_topology import save_part
from iteration_folders import folder_of
from iteration_folders import save as save_iterations
from memory_tiers import make_owned_tier
from rank_folders import flip_bit, path_of, save, write_foreign
from saving.memory_tier.test_tier import Training

import mindresume
from mindresume import cli
from scripts.make_docs.commands import commands

ROOT = Path(__file__).resolve().parents[2]


HEAVY = {
    *("mindspore", "mindformers", "torch", "transformers", "tensorflow", "safetensors"),
    *("jinja2", "mindresume.report", "mindresume.fault_injection.runner"),
}


@pytest.fixture(params=["mindresume", "mindformers"])
def origin(request):
    return request.param


@pytest.fixture
def saved(tmp_path, origin):
    """Saves steps 5, 10, 15 of 4 ranks, below ``run/output/checkpoint``."""
    root = tmp_path / "run" / "output" / "checkpoint"
    for step in (5, 10, 15):
        save(root, step) if origin == "mindresume" else write_foreign(root, step)
    return root


# ---- which ---------------------------------------------------------------------------------------


def test_which_refuses_a_torn_file_outside_rank_folders(tmp_path, call):
    (tmp_path / "single.safetensors").write_bytes(b"x" * 20)
    status, out, _ = call("which", tmp_path / "single.safetensors")
    assert status == 3 and "truncated, or not a safetensors file" in out


def said_of(step, read, call, root):
    """Returns the output of `ls`, `which` and `verify`: (warnings, warnings of the selected one,
    problems), and all printed text."""
    (listed,) = [row for row in read("ls", root)[1]["checkpoints"] if row["step"] == step]
    chosen = read("which", root)[1]["chosen"]
    status, found = read("verify", root)
    (verified,) = [row for row in found["checkpoints"] if row["step"] == step]
    problems = [problem["reason"] for problem in verified["problems"]]
    assert chosen["step"] == step and status == found["damaged"] == bool(problems)
    printed = [call(command, root)[1].replace("\n", "") for command in ("ls", "which", "verify")]
    return (listed["warnings"], chosen["warnings"], problems), printed


@pytest.mark.parametrize("ranks", [(2,), (0, 3)])
def test_all_commands_report_ranks_rebuilt_from_replicas(tmp_path, read, call, ranks):
    save(tmp_path, 5)
    for rank in ranks:
        path_of(tmp_path, 5, rank).unlink()
    (listed, chosen, problems), printed = said_of(5, read, call, tmp_path)
    (warning,) = chosen
    assert listed == chosen and len(problems) == len(ranks)
    missing = f"the file of rank {', '.join(map(str, ranks))} is missing (rank_{ranks[0]}/"
    assert missing in warning
    assert all("other ranks hold every tensor of it" in text for text in printed)


@pytest.mark.parametrize(
    "manifest, name, change",
    [
        (True, "common.json", lambda data: data.replace(b'"step_num": 5', b'"step_num": 6')),
        (False, "common.json", lambda data: data[:-9]),
        (True, "metadata.json", lambda data: data.replace(b"float32", b"int32")),
        (False, "metadata.json", lambda data: b""),
    ],
)
def test_changed_metadata_files_are_found_by_all_commands(
    tmp_path, read, call, manifest, name, change
):
    save_iterations(tmp_path, 5)
    path = folder_of(tmp_path, 5) / name
    path.write_bytes(change(path.read_bytes()))
    if not manifest:
        next(tmp_path.rglob("manifest.json")).write_bytes(b"torn")
    (_, chosen, problems), _ = said_of(5, read, call, tmp_path)
    assert chosen == problems and len(problems) == (1 if manifest else 2) and name in problems[-1]


# ---- errors and imports --------------------------------------------------------------------------


COMMANDS = [
    "drill --help",
    "ls . --json",
    "which .",
    "verify .",
    "inspect .",
    "diff . .",
    "prune . --keep-last 2",
    "convert . new",
]


def test_which_selects_the_emergency_save_of_a_mindformers_job(tmp_path, read):
    """Proven by the strategy folder beside, as a training does it."""
    from resume.test_missing_ranks import COVERING, WORLD, foreign, strategy_in

    root = tmp_path / "checkpoint"
    foreign(root, 5, range(WORLD))
    foreign(root, 7, COVERING)
    assert read("which", root)[1]["chosen"]["step"] == 5
    strategy_in(tmp_path / "strategy")
    assert read("which", root)[1]["chosen"]["step"] == 7


def test_commands_report_the_part_of_one_node(tmp_path, call):
    """Without shared storage each command reports the part of this node, and that the job asks all
    nodes."""
    for step in (5, 10):
        save_part(tmp_path, step, (2, 3))
    status, out, _ = call("which", tmp_path)
    assert status == 0 and out.startswith("part     step 10, epoch 1: rank 2, 3 of 4")
    assert "refused" not in out
    local = json.loads(call("which", tmp_path, "--json")[1])["local"]
    assert (local["step"], local["local_ranks"]) == (10, [2, 3])
    assert call("ls", tmp_path)[1].count("node-local") == 2
    status, out, _ = call("verify", tmp_path)
    assert status == 0 and out.count("every byte of rank 2, 3 of 4") == 2
    path_of(tmp_path, 10, 3).unlink()
    status, out, _ = call("verify", tmp_path)
    assert status == 1 and "the file of rank 3 is missing, and" in out
    assert "Errno" not in out and "rank_00000" not in out
    assert call("which", tmp_path)[1].splitlines()[-1].startswith("part     step 5, epoch 1")
    assert "unusable" in call("ls", tmp_path)[1]
    flip_bit(path_of(tmp_path, 5, 2))
    assert call("which", tmp_path)[0] == 3


def test_the_version_names_what_a_report_of_a_defect_needs(call):
    status, out, err = call("--version")
    assert (status, err) == (0, "")
    assert out == (
        f"mindresume {mindresume.__version__} (mindformers {version('mindformers')}, "
        f"mindspore {version('mindspore')}, Python {platform.python_version()})\n"
    )


@pytest.mark.parametrize("columns", ["40", "80"])
def test_nothing_is_cut_in_a_file_or_a_pipe(saved, call, monkeypatch, columns):
    """A program, or a grep, reads the state behind all other columns."""
    commands = [["ls", saved], ["prune", saved, "--keep-last", 1, "--dry-run"]]
    before = [call(*command) for command in commands]
    monkeypatch.setenv("COLUMNS", columns)
    after = [call(*command) for command in commands]
    assert after == before and all(status == 0 for status, _, _ in after)
    assert "…" not in str(after) and after[0][1].count("complete") >= 3


@pytest.mark.parametrize(
    "columns, left_out",
    [
        (100, set()),
        (74, {"run"}),
        (65, {"run", "format"}),
        (55, {"run", "format", "ranks"}),
        (40, {"run", "format", "ranks", "epoch", "saved"}),
    ],
)
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_none(tmp_path, columns, left_out):
    save(tmp_path, 1234)
    terminal, end = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "mindresume", "ls", tmp_path],
        stdout=end,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm"},
        timeout=600,
    )
    shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(terminal, 1 << 16).decode())
    os.close(end), os.close(terminal)
    head, row = shown.splitlines()[1:3]
    names = {"step", "epoch", "ranks", "size", "format", "run", "saved", "state"}
    assert done.returncode == 0 and set(head.split()) == names - left_out
    assert row.split()[0] == "1234" and row.split()[-1] == "complete"


def test_a_step_in_memory_that_is_on_disk_too_is_not_lost_with_the_node(tmp_path, memory, call):
    """And there is nothing to flush."""
    root = tmp_path / "checkpoint"
    Training(make_owned_tier(memory, root), 1).steps(8).stop()
    assert "is lost with it" in call("which", root)[1]
    assert call("flush", root)[0] == 0
    _, out, _ = call("which", root)
    assert "is lost with it" not in out


def test_what_a_command_does_not_need_is_not_imported(tmp_path):
    save(tmp_path, 5, world=2, replicas=1)
    code = f"""
import sys
from mindresume import cli
for words in {COMMANDS}:
    sys.argv = ["mindresume", *words.split()]
    try:
        cli.main()
    except SystemExit as ended:
        assert not ended.code, words
print("LOADED", sorted(set(sys.modules) & {HEAVY}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code.replace(" new", f" {tmp_path}-new")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stdout.rstrip().endswith("LOADED []"), (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize("arguments", [("--remote", "s3://bucket/x"), ("--rate", "-1"), ()])
def test_a_scrub_that_is_refused_or_finds_nothing(tmp_path, call, arguments):
    assert call("scrub", tmp_path, *arguments)[0] == (2 if arguments else 3)


# ---- help ----------------------------------------------------------------------------------------


def test_the_help_lists_every_command_in_one_group(call):
    grouped = [name for names in cli.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(name for name, _ in commands())
    out = call("--help")[1]
    assert [*map(out.index, cli.GROUPS)] == sorted(map(out.index, cli.GROUPS))


@pytest.mark.parametrize("name", [name for names in cli.GROUPS.values() for name in names])
def test_a_help_fills_its_lines_and_gives_flags_no_value(call, monkeypatch, name):
    """The breaks of a docstring are those of the source."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 2000)
    out = call(name, "--help")[1]
    paragraphs = dict(commands())[name].__doc__.split("\n\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for paragraph in paragraphs:
        text = re.sub(r"\[/?bold\]", "", " ".join(paragraph.split()))
        assert text in lines or not text
    assert "<bool>" not in out
