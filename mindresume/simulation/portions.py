"""Portions of a search, for worker processes: each keeps what it has judged, so that no disk is judged twice by one of them.

    with Workers(2) as workers:
        for counts, found in workers.map(at_random, random_portions(Search((0, 1000)))): ...

What is found comes back as JSON, by which it can be replayed anywhere: ``Failure.from_json``.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mindresume.simulation import explore
from mindresume.simulation.explore import SCENARIOS, Counts, Search, search, shrunk, systematic

SEEDS = 4                       # of a portion: about a second, as all that is lost of a portion that is stopped
PARTS = 16                      # into which the schedules of one scenario, format and way are cut
Found = tuple[Counts, list[dict[str, Any]]]

_seen: set[tuple[str, str]] = set()         # kinds that this process has found: making them simple takes long


@dataclass(frozen=True)
class Switches:
    """All schedules of one scenario with at most so many ``switches``. ``part``: as of ``systematic``."""
    scenario: str
    format: str
    way: str
    switches: int
    part: tuple[int, int]


def random_portions(wanted: Search) -> Iterator[Search]:
    first, count = wanted.seeds
    for begin in range(first, first + count, SEEDS):
        yield replace(wanted, seeds=(begin, min(SEEDS, first + count - begin)))


def systematic_portions(wanted: Search, switches: int) -> Iterator[Switches]:
    for scenario, fmt, way in wanted.plays():
        for part in range(PARTS):
            yield Switches(scenario.name, fmt, way, switches, (part, PARTS))


def at_random(wanted: Search) -> Found:
    counts, found = search(wanted, _seen)
    return counts, [{"seed": seed, **failure.to_json()} for seed, failure in found]


def all_switches(wanted: Switches) -> Found:
    counts, found = Counts(), []
    for failure in systematic(SCENARIOS[wanted.scenario], wanted.format, wanted.way, wanted.switches, counts, deaths=True,
                              part=wanted.part, known=explore.known_here):
        if failure.kind not in _seen:
            _seen.add(failure.kind)
            found.append({"seed": None, **shrunk(failure).to_json()})
    return counts, found
