"""``python -m sim``: searches for a schedule of a simulated cluster that breaks a promise, or
replays one."""

from __future__ import annotations

import json as jsons
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from mindresume.cli import run_app
from mindresume.cli.common import (
    CORES,
    AsJson,
    Explain,
    Jobs,
    OnlyFormats,
    OnlyScenarios,
    Stopped,
    print_explanations,
    print_json,
    progress_bar,
    say,
    stopped_by_signals,
)
from mindresume.errors import ConfigError
from mindresume.fault_injection import runner
from mindresume.typed import parse_json
from sim import search
from sim.scenarios import FORMATS, WAYS, Simulation
from sim.schedule import EXPLAINED
from sim.search import SCENARIOS, Counts, Failure, SearchRequest

FOREGROUND = "foreground"  # the way of saving that is "" in the simulation
_REPLAYED = ("scenario", "format", "way", "schedule")


@dataclass(frozen=True)
class SearchOptions:
    """The options of the command."""

    seeds: int = 200
    first_seed: int = 0
    scenarios: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    systematic: int | None = None
    jobs: int = 1
    json: bool = False


app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def simulate(
    context: typer.Context,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=10**9, metavar="N", help="Number of random runs.")
    ] = 200,
    first_seed: Annotated[
        int, typer.Option("--first-seed", min=0, metavar="S", help="Seed of the first run.")
    ] = 0,
    scenario: OnlyScenarios = None,
    fmt: OnlyFormats = None,
    way: Annotated[
        list[str] | None,
        typer.Option("--way", metavar="foreground|thread|process", help="Only this way of saving."),
    ] = None,
    systematic: Annotated[
        int | None,
        typer.Option(
            "--systematic",
            min=0,
            max=5,
            metavar="K",
            help="Run all schedules of these scenarios with at most K switches "
            "between ranks, and no random ones.",
        ),
    ] = None,
    replayed: Annotated[
        str | None,
        typer.Option(
            "--replay", metavar="JSON|@FILE", help="Run this schedule and print every operation."
        ),
    ] = None,
    jobs: Jobs = CORES,
    explain: Explain = False,
    json: AsJson = False,
) -> None:
    """Runs whole jobs on in-memory hosts, disks and clocks, in random orders with random faults,
    checked as if all processes had died before each operation. It shrinks each failure and prints
    the command that replays it. Exit status: 0 nothing was found, 1 something, 130 stopped by
    Ctrl-C.
    """
    if explain:
        print_explanations(
            {
                "scenario": {name: it.about for name, it in SCENARIOS.items()},
                "fault at an operation": EXPLAINED,
            }
        )
        return
    if replayed is None:
        sys.exit(
            run_search(
                SearchOptions(
                    seeds,
                    first_seed,
                    tuple(scenario or ()),
                    tuple(fmt or ()),
                    tuple(way or ()),
                    systematic,
                    jobs,
                    json,
                )
            )
        )
    for name, option in {
        "seeds": "--seeds",
        "first_seed": "--first-seed",
        "scenario": "--scenario",
        "fmt": "--format",
        "way": "--way",
        "systematic": "--systematic",
    }.items():
        if context.get_parameter_source(name).name == "COMMANDLINE":
            raise ConfigError(f"--replay runs one schedule; it does not go with {option}")
    sys.exit(replay(replayed, json))


# ---- searching -----------------------------------------------------------------------------------


def run_search(options: SearchOptions) -> int:
    """Runs the requested schedules in worker processes. Returns the exit status. Raises Stopped
    after Ctrl-C, when it has printed the findings so far."""
    wanted = _search(options)
    work: Callable[[Any], search.Found]
    if options.systematic is None:
        what, work = f"simulating {options.seeds:,} seeds", search.search_random
        parts = search.random_shards(wanted)
    else:
        what, work = f"simulating at most {options.systematic} switches", search.search_switches
        parts = search.systematic_shards(wanted, options.systematic)
    counts = Counts()
    found = {}
    stopped = None
    began = time.monotonic()
    try:
        with (
            stopped_by_signals(),
            runner.Workers(options.jobs) as pool,
            progress_bar(what, options.json, unit="schedules") as meter,
        ):
            for more, rows in pool.map(work, parts):
                counts.add(more)
                meter.advance(more.schedules)
                for row in rows:
                    found.setdefault((row["scenario"], row["findings"][0].partition(":")[0]), row)
    except Stopped as error:
        stopped = error
    _print_found(options, counts, list(found.values()), time.monotonic() - began)
    if stopped is not None:
        raise Stopped(stopped.signal, f"the simulation was stopped after {counts.runs:,} runs")
    return 1 if found else 0


def _search(options: SearchOptions) -> SearchRequest:
    if options.systematic is not None and not options.scenarios:
        raise ConfigError("--systematic needs --scenario: large scenarios have too many schedules")
    ways = tuple("" if way == FOREGROUND else way for way in options.ways)
    for what, names, known in (
        ("scenario", options.scenarios, tuple(SCENARIOS)),
        ("format", options.formats, FORMATS),
        ("way", options.ways, tuple(way or FOREGROUND for way in WAYS)),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {what} {name!r}; choose from: {', '.join(known)}")
    wanted = SearchRequest(
        (options.first_seed, options.seeds), options.scenarios, options.formats, ways
    )
    if not wanted.configurations():
        raise ConfigError(
            f"no scenario of {', '.join(options.scenarios)} exists in "
            f"{', '.join(options.formats + options.ways)}"
        )
    return wanted


def replay_command(row: dict[str, Any]) -> str:
    return f"python -m sim --replay {shlex.quote(_line(row))}"


def _line(row: dict[str, Any]) -> str:
    return jsons.dumps({key: row[key] for key in _REPLAYED}, separators=(",", ":"))


def _print_found(
    options: SearchOptions, counts: Counts, found: Sequence[dict[str, Any]], seconds: float
) -> None:
    rate = counts.schedules / max(seconds, 1e-9)
    if options.json:
        print_json(
            {
                "seeds": options.seeds if options.systematic is None else None,
                "first_seed": options.first_seed if options.systematic is None else None,
                "systematic": options.systematic,
                **asdict(counts),
                "seconds": seconds,
                "found": [{**row, "replay": replay_command(row)} for row in found],
            }
        )
        return
    for row in found:
        kind, _, text = row["findings"][0].partition(": ")
        seed = f", seed {row['seed']}" if row["seed"] is not None else ""
        say(
            f"{kind.upper()}: {row['scenario']}, {row['format']}, {row['way'] or FOREGROUND}{seed}"
            f"{', ' + row['how'] if row['how'] else ''}\n    {text}\n    {_line(row)}\n    "
            f"{replay_command(row)}\n"
        )
    seeds = (
        f"seeds from {options.first_seed}"
        if options.systematic is None
        else f"all with at most {options.systematic} switches"
    )
    say(
        f"{counts.runs:,} runs ({seeds}), {counts.schedules:,} schedules with every moment of "
        f"death, {counts.states:,} different "
        f"disks judged, {len(found)} finding(s), {seconds:.0f} s, {rate:,.0f} schedules a second"
    )


# ---- replay --------------------------------------------------------------------------------------


def replay(text: str, json: bool = False) -> int:
    """Runs the schedule ``text`` (JSON, or @FILE) and prints every operation and event. Returns the
    exit status."""
    failure = _failure(text)
    sim = Simulation(failure.scenario, failure.format, failure.schedule, failure.way)
    sim.cluster.trace.wanted = True
    sim.run()
    findings = [str(finding) for finding in sim.findings()]
    if json:
        print_json(_replay_json(sim, findings))
    else:
        _print_replay(sim, findings)
    return 1 if findings else 0


def _failure(text: str) -> Failure:
    try:
        if text.startswith("@"):
            with open(text[1:], "rb") as file:
                content = file.read()
        else:
            content = text.encode()
        failure = Failure.from_json(parse_json(content))
        unknown = [fault.kind for fault in failure.schedule.faults if fault.kind not in EXPLAINED]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--replay: not a schedule: {type(error).__name__}: {error}") from error
    if unknown:
        raise ConfigError(
            f"--replay: there is no fault {unknown[0]!r}; choose from: {', '.join(EXPLAINED)}"
        )
    return failure


def _replay_json(sim: Simulation, findings: list[str]) -> dict[str, Any]:
    return {
        "operations": [list(row) for row in sim.cluster.trace.rows],
        "faults": [
            {
                **asdict(injected.fault),
                "process": injected.process,
                "operation": injected.name,
                "path": injected.path,
            }
            for injected in sim.cluster.injected
        ],
        "processes": [
            {
                "name": process.name,
                "exit": process.exit,
                "events": [
                    {"time": round(time_s, 3), **event.to_json()}
                    for time_s, event in process.events
                ],
                "error": None
                if process.error is None
                else f"{type(process.error).__name__}: {process.error}",
            }
            for process in sim.cluster.processes
        ],
        "findings": findings,
    }


def _print_replay(sim: Simulation, findings: list[str]) -> None:
    found = _replay_json(sim, findings)
    injected = {
        row["at"]: f"   <- {row['kind']}{' ' + str(row['amount']) if row['amount'] else ''}"
        for row in found["faults"]
    }
    wide = max((len(row[1]) for row in found["operations"]), default=0)
    for number, process, name, path in found["operations"]:
        say(f"{number:5} {process:{wide}} {name:11} {path}{injected.pop(number, '')}")
    for number, fault in injected.items():
        say(f"{number:5} {'':{wide}} the end{fault}")
    for process, ran in zip(found["processes"], sim.cluster.processes, strict=True):
        ended = "runs" if process["exit"] is None else f"exit status {process['exit']}"
        say(f"\n{process['name']}: {ended}{', ' + process['error'] if process['error'] else ''}")
        for time_s, event in ran.events:
            level, text = event.log_level, event.line()
            say(f"    {time_s:8.3f} {level} {text or event}")
    say()
    for finding in findings or ["nothing found"]:
        say(finding)


if __name__ == "__main__":
    run_app(app, "sim")
