"""``mindresume drill --simulate``: looks for a schedule of a simulated cluster that breaks a promise, or runs one again."""
from __future__ import annotations

import json as jsons
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mindresume.cli.common import Stopped, print_json, progress_bar, say, stopped_by_signals
from mindresume.errors import ConfigError

if TYPE_CHECKING:
    from mindresume.simulation.explore import Counts, Failure, Search
    from mindresume.simulation.scenarios import Play

FOREGROUND = "foreground"                   # the way of saving that has no name in the simulation
_REPLAYED = ("scenario", "format", "way", "schedule")


@dataclass(frozen=True)
class Asked:
    """The options of the command."""
    seeds: int = 200
    first_seed: int = 0
    scenarios: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    systematic: int | None = None
    jobs: int = 1
    json: bool = False


def needs_greenlet() -> None:
    """ConfigError if the simulation cannot run here."""
    try:
        import greenlet  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'--simulate needs the package greenlet ({error}); install it: pip install "mindresume[simulate]"'
                          ) from error


def explained() -> dict[str, dict[str, str]]:
    """Returns {title: {name: what it is}} of the simulation."""
    try:
        needs_greenlet()
    except ConfigError as error:
        return {"--simulate": {"": str(error)}}
    from mindresume.simulation.explore import SCENARIOS
    from mindresume.simulation.schedule import EXPLAINED
    return {"scenario (--simulate)": {name: it.about for name, it in SCENARIOS.items()},
            "strike at an operation (--simulate)": EXPLAINED}


# ---- searching -------------------------------------------------------------------------------------------------------

def hunt(asked: Asked) -> int:
    """Runs all schedules that were asked for, by processes. Returns the exit status; Stopped after Ctrl-C, when what was found
    until then is printed."""
    needs_greenlet()
    from mindresume.fault_injection.workers import Workers
    from mindresume.simulation import portions
    from mindresume.simulation.explore import Counts
    wanted = _search(asked)
    work: Callable[[Any], portions.Found]
    if asked.systematic is None:
        what, work, parts = f"simulating {asked.seeds:,} seeds", portions.at_random, portions.random_portions(wanted)
    else:
        what, work = f"simulating at most {asked.systematic} switches", portions.all_switches
        parts = portions.systematic_portions(wanted, asked.systematic)
    counts, found, stopped, began = Counts(), {}, None, time.monotonic()
    try:
        with stopped_by_signals(), Workers(asked.jobs) as workers, progress_bar(what, asked.json, unit="schedules") as meter:
            for more, rows in workers.map(work, parts):
                counts.add(more)
                meter.advance(more.schedules)
                for row in rows:
                    found.setdefault((row["scenario"], row["findings"][0].partition(":")[0]), row)
    except Stopped as error:
        stopped = error
    _print_found(asked, counts, list(found.values()), time.monotonic() - began)
    if stopped is not None:
        raise Stopped(stopped.signal, f"the simulation was stopped after {counts.runs:,} runs")
    return 1 if found else 0


def _search(asked: Asked) -> Search:
    from mindresume.simulation.explore import SCENARIOS, Search
    from mindresume.simulation.scenarios import FORMATS, WAYS
    if asked.systematic is not None and not asked.scenarios:
        raise ConfigError("--systematic needs --scenario: of large ones there are too many schedules")
    ways = tuple("" if way == FOREGROUND else way for way in asked.ways)
    for what, names, known in (("scenario", asked.scenarios, tuple(SCENARIOS)), ("format", asked.formats, FORMATS),
                               ("way", asked.ways, tuple(way or FOREGROUND for way in WAYS))):
        for name in names:
            if name not in known:
                raise ConfigError(f"there is no {what} {name!r}; choose from: {', '.join(known)}")
    wanted = Search((asked.first_seed, asked.seeds), asked.scenarios, asked.formats, ways)
    if not wanted.plays():
        raise ConfigError(f"no scenario of {', '.join(asked.scenarios)} exists in {', '.join(asked.formats + asked.ways)}")
    return wanted


def replay_command(row: dict[str, Any]) -> str:
    return f"mindresume drill --simulate --replay {shlex.quote(_line(row))}"


def _line(row: dict[str, Any]) -> str:
    return jsons.dumps({key: row[key] for key in _REPLAYED}, separators=(",", ":"))


def _print_found(asked: Asked, counts: Counts, found: Sequence[dict[str, Any]], seconds: float) -> None:
    rate = counts.schedules / max(seconds, 1e-9)
    if asked.json:
        print_json({"seeds": asked.seeds if asked.systematic is None else None,
                    "first_seed": asked.first_seed if asked.systematic is None else None, "systematic": asked.systematic,
                    **asdict(counts), "seconds": seconds, "found": [{**row, "replay": replay_command(row)} for row in found]})
        return
    for row in found:
        kind, _, text = row["findings"][0].partition(": ")
        seed = f", seed {row['seed']}" if row["seed"] is not None else ""
        say(f"{kind.upper()}: {row['scenario']}, {row['format']}, {row['way'] or FOREGROUND}{seed}"
            f"{', ' + row['how'] if row['how'] else ''}\n    {text}\n    {_line(row)}\n    {replay_command(row)}\n")
    seeds = f"seeds from {asked.first_seed}" if asked.systematic is None else f"all with at most {asked.systematic} switches"
    say(f"{counts.runs:,} runs ({seeds}), {counts.schedules:,} schedules with every moment of death, {counts.states:,} different "
        f"disks judged, {len(found)} finding(s), {seconds:.0f} s, {rate:,.0f} schedules a second")


# ---- once more -------------------------------------------------------------------------------------------------------

def replay(text: str, json: bool = False) -> int:
    """Runs the one schedule ``text`` (JSON, or @ and a file of it), and prints all that happens. Returns the exit status."""
    needs_greenlet()
    from mindresume.simulation.scenarios import Play
    failure = _failure(text)
    play = Play(failure.scenario, failure.format, failure.schedule, failure.way)
    play.cluster.trace.wanted = True
    play.run()
    findings = [str(finding) for finding in play.findings()]
    if json:
        print_json(_replayed(play, findings))
    else:
        _print_replayed(play, findings)
    return 1 if findings else 0


def _failure(text: str) -> Failure:
    from mindresume.bounded_json import parse_json
    from mindresume.simulation.explore import Failure
    from mindresume.simulation.schedule import EXPLAINED
    try:
        if text.startswith("@"):
            with open(text[1:], "rb") as file:
                content = file.read()
        else:
            content = text.encode()
        failure = Failure.from_json(parse_json(content))
        unknown = [strike.kind for strike in failure.schedule.strikes if strike.kind not in EXPLAINED]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--replay: this is no schedule: {type(error).__name__}: {error}") from error
    if unknown:
        raise ConfigError(f"--replay: there is no strike {unknown[0]!r}; choose from: {', '.join(EXPLAINED)}")
    return failure


def _replayed(play: Play, findings: list[str]) -> dict[str, Any]:
    return {"operations": [list(row) for row in play.cluster.trace.rows],
            "struck": [{**asdict(struck.strike), "process": struck.process, "operation": struck.name, "path": struck.path}
                       for struck in play.cluster.struck],
            "processes": [{"name": process.name, "exit": process.exit,
                           "events": [{"time": round(time_s, 3), **event.to_json()} for time_s, event in process.events],
                           "error": None if process.error is None else f"{type(process.error).__name__}: {process.error}"}
                          for process in play.cluster.processes],
            "findings": findings}


def _print_replayed(play: Play, findings: list[str]) -> None:
    from mindresume.events.log_lines import line_of
    found = _replayed(play, findings)
    struck = {row["at"]: f"   <- {row['kind']}{' ' + str(row['amount']) if row['amount'] else ''}" for row in found["struck"]}
    wide = max((len(row[1]) for row in found["operations"]), default=0)
    for number, process, name, path in found["operations"]:
        say(f"{number:5} {process:{wide}} {name:11} {path}{struck.pop(number, '')}")
    for number, strike in struck.items():
        say(f"{number:5} {'':{wide}} the end{strike}")
    for process, ran in zip(found["processes"], play.cluster.processes, strict=True):
        ended = "runs" if process["exit"] is None else f"exit status {process['exit']}"
        say(f"\n{process['name']}: {ended}{', ' + process['error'] if process['error'] else ''}")
        for time_s, event in ran.events:
            level, text = line_of(event)
            say(f"    {time_s:8.3f} {level} {text or event}")
    say()
    for finding in findings or ["nothing found"]:
        say(finding)
