"""A case: steps that a user could do in a folder, and the transcript of what comes out."""

import hashlib
import io
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import tomllib

import mindresume
from tests.judge import jobs
from tests.judge.normalise import ROOT, content_of, json_of, text_of, value_of

WEIGHTS = (".safetensors", ".ckpt")
Change = Callable[[Path], str]  # alters the folder of a case, and says what it did


@dataclass(frozen=True)
class Train:
    """A training, or the next start of it, by the real Trainer in processes of their own.

    Attributes:
        config: changes of the configuration, {keys with dots between them: value}; ``monitor.KEY``:
            of the CheckpointMonitor.
        ranks, tp: processes, and how many of them cut the matrix.
        actions: what happens after a step: [{"step": 7, "do": "kill", ...}], see
            ``training.DEEDS``.
        environment: variables.
        ordered: whether events come in the same order each time; background saves do not.
        plain: mindformers alone, without mindresume.
    """

    config: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    tp: int = 1
    actions: tuple[dict, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    ordered: bool = True
    plain: bool = False


Step = str | Train | Change


@dataclass(frozen=True)
class Case:
    """``steps``: a text is a command line of mindresume, or with ``>>> `` in front an expression of
    Python; the others are trainings and changes of the folder."""

    name: str
    steps: tuple[Step, ...]

    def __init__(self, name: str, *steps: Step):
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "steps", steps)


def play(case: Case, folder: Path) -> str:
    """Does the steps of a case in the empty ``folder``; returns the transcript."""
    rows: list[str] = []
    hashed = not any(
        isinstance(step, Train) or getattr(step, "is_trained", False) for step in case.steps
    )
    with ExitStack() as end:
        end.enter_context(chdir(folder))
        end.enter_context(_environment(COLUMNS="130", NO_COLOR="1", TERM="dumb"))
        for step in case.steps:
            before = tree(folder)
            if isinstance(step, str):
                rows += (
                    _expression(step[4:], folder)
                    if step.startswith(">>> ")
                    else _command(step, folder)
                )
            elif isinstance(step, Train):
                rows += train(step, folder)
            else:
                rows += step(folder).splitlines()
                continue
            rows += changes(folder, before, hashed)
    return "".join(f"{row.rstrip()}\n" for row in text_of("\n".join(rows), folder).splitlines())


class _environment:
    """Sets variables, and removes those of mindresume."""

    def __init__(self, **variables: str):
        self.variables = variables

    def __enter__(self) -> None:
        self.before = dict(os.environ)
        for name in list(os.environ):
            if name.startswith("MINDRESUME_"):
                del os.environ[name]
        os.environ.update(self.variables)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self.before)


# ---- the command line and Python -----------------------------------------------------------------


@cache
def console_script() -> Callable[[], None]:
    """Returns what the installed command ``mindresume`` calls."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]["mindresume"]
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def _command(line: str, folder: Path) -> list[str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    arguments, sys.argv = (
        sys.argv,
        ["mindresume", *shlex.split(line.replace("REPOSITORY", str(ROOT)))],
    )
    # its messages name the program
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    status: object = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            console_script()()
    except SystemExit as ended:
        status = ended.code or 0
    finally:
        sys.argv, sys.modules["__main__"] = arguments, main
    rows = [f"$ mindresume {line}"]
    for name, stream in (("", out), ("stderr: ", err)):
        stream.flush()
        text = stream.buffer.getvalue().decode()
        rows += [
            name + row
            for row in _printed(text, folder, "REPOSITORY/st/data/recorded" in line).splitlines()
        ]
    return [*rows, *([f"status {status}"] if status else [])]


def _printed(text: str, folder: Path, recorded: bool) -> str:
    try:
        return json_of(json.loads(text), folder, recorded)
    except ValueError:
        return text_of(text, folder)


def _expression(text: str, folder: Path) -> list[str]:
    try:
        value = eval(text, {"mindresume": mindresume, "os": os})  # noqa: S307  the cases are ours
    except Exception as error:
        return [f">>> {text}", *text_of(f"{type(error).__name__}: {error}", folder).splitlines()]
    if hasattr(value, "to_json"):
        return [f">>> {text}", *json_of(value.to_json(), folder).splitlines()]
    return [f">>> {text}", *text_of(repr(value), folder).splitlines()]


# ---- trainings -----------------------------------------------------------------------------------


def train(step: Train, folder: Path) -> list[str]:
    """Trains in ``folder``; returns the rows of the transcript."""
    # before the job: a job in another folder ends those that were stopped
    reference = uninterrupted(step.ranks // step.tp)
    events = set(folder.glob("output/mindresume_events/*.jsonl"))
    rows = [
        ("mindformers alone" if step.plain else "train")
        + "".join(f" {key}={json.dumps(value)}" for key, value in step.config.items())
        + (f" ranks={step.ranks} tp={step.tp}" if step.ranks > 1 else "")
        + "".join(f" {name}={value}" for name, value in step.environment.items())
    ]
    rows += [
        f"  after step {action['step']}: "
        + " ".join(str(value) for key, value in action.items() if key != "step")
        for action in step.actions
    ]
    config = json.loads(json.dumps(step.config).replace("TMP", str(folder)))
    log = Path(f"{folder}.log")
    for rank, row in enumerate(
        jobs.train(
            folder,
            log,
            step.ranks,
            step.environment,
            config=config,
            tp=step.tp,
            plain=step.plain,
            actions=list(step.actions),
        )
    ):
        who = f"rank {rank}: " if step.ranks > 1 else ""
        rows.append(f"{who}status {row['status']}" + (f", {row['error']}" if row["error"] else ""))
        if rank == 0 and row["steps"]:
            rows.append(_losses(row["steps"], reference))
    found = sorted(set(folder.glob("output/mindresume_events/*.jsonl")) - events)
    lines = [
        json.loads(line) for path in found for line in path.read_text(encoding="utf-8").splitlines()
    ]
    shown = [_event(line, folder) for line in lines if line["event"] not in ("work_progress",)]
    return [text_of(row, folder) for row in rows] + (shown if step.ordered else sorted(shown))


def _losses(steps: list[dict], reference: dict[int, str]) -> str:
    first, last = steps[0]["step"], steps[-1]["step"]
    if all(reference.get(it["step"]) == it["bits"] for it in steps):
        return f"trained steps {first} to {last}: each loss bit for bit as without a stop"
    return f"trained steps {first} to {last}: losses " + " ".join(it["loss"] for it in steps)


@cache
def uninterrupted(parts: int) -> dict[int, str]:
    """Returns the bits of the losses of a training without a stop by mindformers alone, on so many
    ``parts`` of the data."""
    with tempfile.TemporaryDirectory() as folder:
        rows = jobs.train(
            Path(folder),
            Path(folder) / "log",
            parts,
            {},
            config={"runner_config.epochs": 4},
            tp=1,
            plain=True,
            actions=[],
        )
    return {it["step"]: it["bits"] for it in rows[0]["steps"]}


def _event(line: dict, folder: Path) -> str:
    fields = {key: value for key, value in line.items() if key not in ("time", "rank", "event")}
    rank = f"rank {line['rank']} " if line["rank"] else ""
    return f"  {rank}{line['event']} {text_of(json.dumps(value_of(fields)), folder)}"


# ---- files ---------------------------------------------------------------------------------------

# Logs, and the strategy files of MindSpore, which it writes only where it compiles anew.
IGNORED = ("output/log/", "output/mindresume_events/", "output/strategy/", "config_", "./")


def tree(folder: Path) -> dict[str, tuple]:
    """Returns {path: what changes if the file does}; a folder counts only if it is empty."""
    found = {}
    for base, folders, files in os.walk(folder):
        for name in files:
            path = os.path.join(base, name)
            relative, status = os.path.relpath(path, folder), os.lstat(path)
            if not relative.startswith(IGNORED):
                found[relative] = (status.st_size, status.st_mtime_ns, status.st_ino)
        empty = os.path.relpath(base, folder) + "/"
        if not folders and not files and not empty.startswith(IGNORED):
            found[empty] = ()
    return found


def changes(folder: Path, before: dict[str, tuple], hashed: bool) -> list[str]:
    """Returns a row for each file that is new, gone or another one. ``hashed``: bytes of weights
    are the same on each machine."""
    after, rows = tree(folder), []
    for path in sorted({*before, *after}):
        if before.get(path) == after.get(path):
            continue
        sign = "+" if path not in before else "-" if path not in after else "*"
        about = ""
        if sign != "-" and path.endswith(WEIGHTS):
            content = content_of((folder / path).read_bytes())
            about = f" {len(content)}" + (
                f" {hashlib.sha256(content).hexdigest()[:12]}" if hashed else ""
            )
        rows.append(f"{sign} {text_of(path, folder)}{about}")
    return sorted(rows, key=lambda row: (row[2:], row[0]))
