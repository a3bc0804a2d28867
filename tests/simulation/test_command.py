"""``python -m sim``: what is asked, what is printed, and that what it finds can be shown again."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.conftest import read  # noqa: F401  a fixture

from mindresume.cli import run_app
from mindresume.fault_injection import runner
from sim import search
from sim.__main__ import app
from sim.mount import Mount

ROOT = Path(__file__).resolve().parents[2]
# ruff: noqa: F811  read is a fixture
SMALL = ("--scenario", "save", "--format", "ckpt", "--way", "foreground")
PATIENCE = 600.0


class InThisProcess:
    """Replaces the worker processes, so that patches of a test apply there, too."""

    def __init__(self, count, folder=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, arguments):
        return map(function, arguments)


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command; returns (exit status, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["sim", *arguments])
        with pytest.raises(SystemExit) as ended:
            run_app(app, "sim")
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def unflushed(monkeypatch):
    """Makes the product flush no folder. States that were checked before do not count."""
    monkeypatch.setattr(Mount, "sync", lambda self, folder: None)
    monkeypatch.setattr(runner, "Workers", InThisProcess)
    monkeypatch.setattr(search, "known_states", search.KnownStates())
    monkeypatch.setattr(search, "_sizes", {})
    monkeypatch.setattr(search, "_seen", set())


def test_several_processes_find_nothing(read):
    status, found = read(*SMALL, "--seeds", "6", "--first-seed", "3", "--jobs", "2")
    assert (
        status == 0
        and found["found"] == []
        and (found["seeds"], found["first_seed"], found["runs"]) == (6, 3, 6)
    )
    assert found["schedules"] > found["states"] > 6


def test_a_finding_is_printed_and_can_be_replayed(call, unflushed, monkeypatch, tmp_path):
    status, out, err = call(*SMALL, "--seeds", "3")
    assert status == 1 and "1 finding(s)" in out
    head, text, line, command = out.splitlines()[:4]
    assert (
        re.fullmatch(r"LOST: save, ckpt, foreground, seed \d+", head)
        and "all ranks were told" in text
    )
    found = json.loads(line)["schedule"]
    assert [fault["kind"] for fault in found["faults"]] == ["power"] and not found["switches"]
    *program, option, schedule = shlex.split(command)
    assert program == ["python", "-m", "sim"] and schedule == line.strip()
    status, out, err = call(option, schedule)
    assert status == 1 and out.splitlines()[-1].startswith("lost: ")
    assert re.search(r"^ +1 rank0 +list +/out/checkpoint", out, re.MULTILINE)
    assert re.search(r"<- power( \d+)?$", out, re.MULTILINE)
    assert "rank0: exit status -9" in out
    monkeypatch.undo()
    (tmp_path / "schedule").write_text(line)
    status, out, err = call("--replay", f"@{tmp_path / 'schedule'}")
    assert status == 0 and out.splitlines()[-1] == "nothing found"


def test_all_schedules_with_few_switches(call, unflushed):
    status, out, err = call(*SMALL, "--systematic", "0")
    assert status == 1 and out.startswith("LOST: save, ckpt, foreground, power before operation")
    assert out.splitlines()[-1].startswith("1 runs (all with at most 0 switches)")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--systematic", "1"), "--systematic needs --scenario"),
        (("--scenario", "x"), "there is no scenario 'x'; choose from: save, prune"),
        (
            ("--scenario", "nodes", "--format", "iteration"),
            "no scenario of nodes exists in iteration",
        ),
        (("--replay", "{}", "--seeds", "2"), "it does not go with --seeds"),
        *(
            (("--replay", text), "not a schedule")
            for text in (
                "",
                "[" * 10_000,
                '{"scenario":"save","format":"x","way":"","schedule":{}}',
                '{"scenario":"save","format":"ckpt","way":"","schedule":{"faults":[{"at":"x"}]}}',
            )
        ),
        (
            (
                "--replay",
                '{"scenario":"save","format":"ckpt","way":"","schedule":{"faults":[{"at":1,"kind":"x"}]}}',
            ),
            "there is no fault 'x'",
        ),
    ],
)
def test_invalid_options_are_errors(call, arguments, says):
    status, out, err = call(*arguments)
    assert (status, out) == (2, "") and says in err and err.count("\n") == 1


def test_explain_describes_scenarios_and_faults(call):
    status, out, err = call("--explain")
    assert status == 0 and all(
        f"\n{name} " in out for name in ("two hosts", "kill host", "ESTALE after")
    )


def test_a_signal_ends_it_with_the_findings_so_far():
    """SIGTERM: tests/fault_injection/test_workers.py."""
    program = subprocess.Popen(
        [sys.executable, "-m", "sim", *SMALL, "--seeds", "1000000", "--jobs", "2"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children, late = (
        Path(f"/proc/{program.pid}/task/{program.pid}/children"),
        time.monotonic() + PATIENCE,
    )
    while len(children.read_text().split()) < 2:
        assert time.monotonic() < late and program.poll() is None
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=PATIENCE)
    assert program.returncode == 128 + signal.SIGINT and "Traceback" not in err
    assert (
        "schedules a second" in out.splitlines()[-1] and "the simulation was stopped after" in err
    )
