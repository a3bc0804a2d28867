"""Starts trainings, waits for them and returns their results. Facts come from event files, recorded
steps and exit statuses; ``log_has`` is for facts (a path, a number, the name of an error) that only
a log contains."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from st.training_run import ROOT, SIZES, Run, differences

Result = TypeVar("Result")
PROGRAMS = ROOT / "st" / "programs"
FIXTURES = ROOT / "st" / "fixtures"
# trainings at a time; a short one is mostly a single thread that imports and compiles
CORES = 2
LIMIT = 300.0  # seconds one training may take
ALL_RANKS_END = 120.0  # seconds until the loss of one rank has ended the whole job


# ---- runs in other folders -----------------------------------------------------------------------


def run_beside(run: Run, folder: Path, copied: bool = True, config: str | None = None) -> Run:
    """Returns a run like ``run`` in another folder; ``copied``: with its checkpoints as they are
    now, half-written files included."""
    if copied:
        shutil.copytree(run.checkpoints, folder / "output" / "checkpoint")
    return run.like(folder, config=config or run.config)


def run_from_fixture(
    name: str, folder: Path, data: Path, device: str, workers: int = 1, graphs: Path | None = None
) -> Run:
    """Returns a run that finds in its folder what mindformers alone left there (st/fixtures).
    ``data``: of ``sequences``."""
    shutil.copytree(FIXTURES / name / "output", folder / "output")
    return Run(
        folder,
        str(FIXTURES / name / "config.yaml"),
        data,
        workers,
        device=device,
        legacy="ckpt" in name,
        graphs=graphs,
    )


def use_program(run: Run, name: str, changes: Mapping[str, Any] | None = None) -> Run:
    """Makes ``run`` one of a program in PROGRAMS that takes no options: ONE_LAYER and ``changes``
    are in its configuration."""
    run.program, run.options = PROGRAMS / name, ""
    return run.configure({**SIZES, **(changes or {})})


def use_register_path(run: Run, changes: Mapping[str, Any] | None = None) -> str:
    """Makes ``run`` one of a start script without mindresume, with one line in its configuration
    that adds it, and ``changes``. Returns the argument that its command line needs."""
    use_program(
        run,
        "upstream_style.py",
        {**(changes or {}), "trainer.auto_register": "mindresume_plugin.MindResume"},
    )
    return f"--register_path {run.mindresume('plugin-path').stdout.strip()}"


# ---- start and wait ------------------------------------------------------------------------------


def in_parallel(*jobs: Callable[[], Result]) -> list[Result]:
    """Returns the results of all jobs in order; two run at a time."""
    with ThreadPoolExecutor(CORES) as pool:
        return list(pool.map(lambda job: job(), jobs))


def train(run: Run, *extra: str, **environment: str) -> Run:
    """Starts the run and waits for its end, whatever it is: ``run.process.returncode``,
    ``run.steps(-1)``, ``events(run)``."""
    run.start(" ".join(extra), **environment).wait(LIMIT)
    return run


def train_well(run: Run, *extra: str, **environment: str) -> Run:
    """``train``; AssertionError with the end of the log if the exit status is not 0."""
    return run.start(" ".join(extra), **environment).wait_for_success(LIMIT)


def processes_by_environment(run: Run) -> list[int]:
    """Returns processes started by ``run`` in any of its attempts, also orphaned ones. Zombies have
    no environment."""
    mark, found = f"CPU_CLUSTER_STEPS={run.losses}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:
                # it has ended in the meantime, or belongs to somebody else
                continue
            if mark in environment:
                found.append(int(entry))
    return found


def assert_no_process_left(run: Run, seconds: float = 10.0) -> None:
    """A killed process ends shortly after the signal; within ``seconds`` every process of the job
    must have ended."""
    deadline = time.monotonic() + seconds
    while (left := processes_by_environment(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"still running after the job ended: {left}"


# ---- recorded steps ------------------------------------------------------------------------------


def known_steps(name: str, kind: str = "uninterrupted") -> list[dict[str, Any]]:
    """The steps that mindformers alone did for a fixture."""
    return json.loads((FIXTURES / name / "losses.json").read_text(encoding="utf-8"))[kind]


def steps_of(run: Run) -> list[int]:
    """The numbers of the steps that the last attempt recorded."""
    return [row["step"] for row in run.steps(-1)]


def not_identical(whole: Run, steps: list[dict]) -> list[str]:
    """``differences``, without the steps that a killed attempt did not reach."""
    return [text for text in differences(whole.steps(), steps) if not text.endswith("is missing")]


def wrong_steps(run: Run, whole: Run) -> list[int]:
    """The steps of any attempt whose loss, samples or learning rate are not those of the
    uninterrupted run."""
    known, found = (
        [(row["step"], row["hex"], row["samples"], row["lr"]) for row in each.steps()]
        for each in (whole, run)
    )
    return [row[0] for row in found if row not in known]


def assert_resumed(run: Run, whole: Run, step: int) -> None:
    """The last attempt resumed from ``step``, and from there to step 40 it is the uninterrupted run
    bit by bit and sample by sample."""
    assert selected_step(run) == step
    assert steps_of(run) == list(range(step + 1, 41))
    assert differences(whole.steps(), run.steps(-1)) == []


def assert_not_trained(run: Run, status: int | None = None) -> None:
    """The last attempt ended with an error (``status``) before its first step."""
    found = run.process.returncode
    assert found not in (0, None) if status is None else found == status, (
        f"exit status {found}: {run.log()[-3000:]}"
    )
    assert steps_of(run) == []


# ---- events --------------------------------------------------------------------------------------


def recorded(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The events in these files, in order; a torn last line is left out."""
    return [
        json.loads(line)
        for path in sorted(files)
        for line in path.read_text(encoding="ascii").splitlines()
        if line.endswith("}")
    ]


def events(
    run: Run, kind: str | None = None, rank: int = 0, attempt: int = -1
) -> list[dict[str, Any]]:
    """The events of this kind (None: of all) that a rank has recorded in an attempt so far."""
    return [row for row in recorded(run.event_files(rank, attempt)) if kind in (None, row["event"])]


def contains(*facts: str) -> Callable[[Any], bool]:
    """Returns, for ``assert_event``, a matcher of texts with all of these facts, such as paths,
    numbers, or names of errors and settings."""
    return lambda value: all(fact in str(value) for fact in facts)


def assert_event(
    run: Run, kind: str, rank: int = 0, attempt: int = -1, **values: Any
) -> dict[str, Any]:
    """Returns the first event of this kind with these values (or for which these functions of the
    values hold). AssertionError if there is none."""
    found = events(run, kind, rank, attempt)
    for row in found:
        if all(
            value(row.get(name)) if callable(value) else row.get(name) == value
            for name, value in values.items()
        ):
            return row
    raise AssertionError(f"no {kind} with {values}: {found}")


def notices(run: Run, *facts: str, level: str | None = None) -> list[str]:
    """The texts of the notices (of this level) in which all of these facts are."""
    return [
        row["text"]
        for row in events(run, "notice")
        if level in (None, row["level"]) and all(fact in row["text"] for fact in facts)
    ]


def selected_step(run: Run, rank: int = 0, attempt: int = -1) -> int | None:
    """The step from which a rank resumed, None for a fresh start. AssertionError if it recorded
    neither, or both."""
    found = [
        row.get("step")
        for kind in ("checkpoint_selected", "fresh_start")
        for row in events(run, kind, rank, attempt)
    ]
    assert len(found) == 1, f"rank {rank} recorded {len(found)} selections: {found}"
    return found[0]


def refused_steps(run: Run, attempt: int = -1) -> list[int]:
    """The steps that were refused, in order."""
    return [row["step"] for row in events(run, "candidate_refused", attempt=attempt)]


def committed_steps(run: Run, attempt: int = -1) -> list[int]:
    """The steps that an attempt saved and rank 0 committed."""
    return [
        row["step"]
        for row in events(run, "save_committed", attempt=attempt)
        if row.get("run_id") is None
    ]


def resume_summary(run: Run) -> dict[str, tuple[str, str]]:
    """{part of the state: (how it was restored, details)} of the last attempt."""
    (resumed,) = events(run, "resumed")
    return {name: (how, details) for name, how, details in resumed["summary"]}


def failure(run: Run) -> str:
    """The error with which the last attempt ended, with its type in front. AssertionError if it did
    not fail."""
    ended = [row for row in events(run, "training_ended") if row["outcome"] == "failed"]
    assert len(ended) == 1, (
        "the training did not end with one error: "
        f"{events(run, 'training_ended')}\n{run.log()[-3000:]}"
    )
    return ended[0]["reason"]


def log_has(run: Run, *facts: str) -> bool:
    """Returns whether a line of the last attempt's log has all of these facts, for which there is
    no event."""
    return any(all(fact in line for fact in facts) for line in run.log().splitlines())


# ---- one attempt after its end -------------------------------------------------------------------


@dataclass
class RunAttempt:
    """The results of one attempt after its end. ``status``: of the launcher, as the shell sees it.
    ``selected``: by rank, the step that it resumed from, None for a fresh start. ``committed``: by
    rank 0. ``events``: by rank."""

    status: int
    selected: list[int | None]
    committed: list[int]
    steps: list[dict]
    events: list[list[dict]]
    # `mindresume which --json` right before the start
    predicted: dict = field(default_factory=dict)

    def trained(self) -> list[int]:
        return [row["step"] for row in self.steps]


def finished_attempt(run: Run, predicted: dict | None = None) -> RunAttempt:
    """Returns the facts of the attempt that just ended. AssertionError if a process of the job is
    still there."""
    status = run.process.wait()
    assert_no_process_left(run)
    ranks = range(run.workers)
    return RunAttempt(
        status,
        [selected_step(run, rank) for rank in ranks],
        committed_steps(run),
        run.steps(-1),
        [events(run, None, rank) for rank in ranks],
        predicted or {},
    )
