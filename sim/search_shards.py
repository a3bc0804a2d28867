"""Shards of a search for worker processes. Each process keeps its known states, so that it checks no state twice.

    with Workers(2) as workers:
        for counts, found in workers.map(search_random, random_shards(SearchRequest((0, 1000)))): ...

Failures are returned as JSON, which ``Failure.from_json`` replays anywhere.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sim import search
from sim.search import SCENARIOS, Counts, SearchRequest, search_seeds, shrink, systematic

SEEDS = 4                       # seeds of a shard: about a second, which is lost if the search is stopped
PARTS = 16                      # number of shards of one scenario, format and way
Found = tuple[Counts, list[dict[str, Any]]]

_seen: set[tuple[str, str]] = set()         # kinds that this process has found: shrinking takes long


@dataclass(frozen=True)
class Switches:
    """A shard of all schedules of one scenario with at most ``switches`` switches. ``part``: as for ``systematic``."""
    scenario: str
    format: str
    way: str
    switches: int
    part: tuple[int, int]


def random_shards(wanted: SearchRequest) -> Iterator[SearchRequest]:
    """Yields requests for a few seeds each."""
    first, count = wanted.seeds
    for begin in range(first, first + count, SEEDS):
        yield replace(wanted, seeds=(begin, min(SEEDS, first + count - begin)))


def systematic_shards(wanted: SearchRequest, switches: int) -> Iterator[Switches]:
    """Yields the shards of a systematic search."""
    for scenario, fmt, way in wanted.configurations():
        for part in range(PARTS):
            yield Switches(scenario.name, fmt, way, switches, (part, PARTS))


def search_random(wanted: SearchRequest) -> Found:
    """Runs a shard of seeds. Returns the counts and the failures as JSON."""
    counts, found = search_seeds(wanted, _seen)
    return counts, [{"seed": seed, **failure.to_json()} for seed, failure in found]


def search_switches(wanted: Switches) -> Found:
    """Runs a shard of a systematic search. Returns the counts and the failures as JSON."""
    counts, found = Counts(), []
    for failure in systematic(SCENARIOS[wanted.scenario], wanted.format, wanted.way, wanted.switches, counts, deaths=True,
                              part=wanted.part, known=search.known_states):
        if failure.kind not in _seen:
            _seen.add(failure.kind)
            found.append({"seed": None, **shrink(failure).to_json()})
    return counts, found
