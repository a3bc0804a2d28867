"""The advised intervals between saves against the best fixed ones: replays of random schedules of failures.

    python benchmarks/advice.py [--schedules 200] [--seed 1] [--only {disk,memory}] [--json FILE]

A schedule has costs (a step, the stall of a save, its write in the background, a restart), drawn log-uniformly around those that
the other benchmarks and the quickstart measured, a mean time between failures, and random failures of that mean, of which 20 to
400 happen. A replay trains through it with one interval and counts what is lost: stalls, restarts, repeated steps. The best fixed
interval is the one of a grid of 2 % that loses least in hindsight. Judged by the same schedule, it also fits the chance of these
very failures, which no advice can know; judged by 2,000 further failures of the same mean, it is the interval that is right.

With a tier in memory, each failure leaves the memory intact with a probability of 0.3 to 0.97 of the schedule, and the best fixed
intervals are a pair; a save to disk falls on a save in memory.

all         the advice knows all failures of the schedule, as `mindresume advise` does at its end
first N     the advice knows the first N failures alone
"""
from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindresume.events import DISK, MEMORY
from mindresume.report.advice import advice_from
from mindresume.report.measurement import Measured, TierCosts
from mindresume.report.save_interval import FailureRate, Tier, best_interval

TARGET = 1.05
FIRST, FURTHER = (1, 3, 10), 2000
SAME = "the same schedule"


@dataclass(frozen=True)
class Schedule:
    """One training: ``gaps``: seconds of training (steps and stalls) from one start to the next failure. ``work``: seconds of
    steps to do. ``memory``: the tier in memory, with the probability that a failure leaves it intact; ``intact``: whether each
    failure does."""
    step: float
    tier: Tier
    gaps: tuple[float, ...]
    work: float
    memory: Tier | None = None
    intact: tuple[bool, ...] = ()

    def measured(self, failures: int) -> Measured:
        """Returns what is known after so many failures."""
        found = Measured(self.step, TierCosts(self.tier, 10, 1, steps_now=100), self.tier.write_seconds > 0,
                         FailureRate(failures, math.fsum(self.gaps[:failures])))
        if self.memory is None:
            return found
        intact = sum(self.intact[:failures])
        found = replace(found, intact=intact, lost=failures - intact)
        return replace(found, memory=TierCosts(replace(self.memory, survival=found.rate_of_memory.share), 10, 1, steps_now=10))


def random_schedule(rnd: random.Random) -> tuple[Schedule, float]:
    """Returns a schedule, and the mean time between its failures in seconds."""
    def between(low: float, high: float) -> float:
        return math.exp(rnd.uniform(math.log(low), math.log(high)))
    stall = between(0.07, 60)
    tier = Tier(DISK, stall, stall * between(1, 30) if rnd.random() < 0.7 else 0.0, between(20, 1200))
    mean, count = between(3600, 3 * 86400), round(between(20, 400))
    gaps = tuple(rnd.expovariate(1 / mean) for _ in range(count))
    return Schedule(between(0.2, 30), tier, gaps, 0.5 * math.fsum(gaps)), mean


def with_memory(schedule: Schedule, rnd: random.Random) -> Schedule:
    """Returns the schedule with a tier in memory: a save costs at most what one to disk costs, a restart too."""
    disk = schedule.tier
    stall = disk.stall_seconds * (rnd.uniform(0.5, 1) if disk.write_seconds else math.exp(rnd.uniform(math.log(0.05), 0)))
    behind = stall * rnd.uniform(0.5, 3)
    memory = Tier(MEMORY, stall + max(behind - schedule.step, 0), behind, disk.restart_seconds * rnd.uniform(0.3, 1),
                  rnd.uniform(0.3, 0.97))
    return with_kinds(replace(schedule, memory=memory), rnd)


def with_kinds(schedule: Schedule, rnd: random.Random) -> Schedule:
    """Returns the schedule with a random kind for each failure, if it has a tier in memory."""
    if schedule.memory is None:
        return schedule
    return replace(schedule, intact=tuple(rnd.random() < schedule.memory.survival for _ in schedule.gaps))


def lost(schedule: Schedule, steps: int) -> float:
    """Returns the seconds that a training with ``steps`` between two saves loses until its work is done: stalls, restarts, and
    steps that are repeated."""
    tier, cycle = schedule.tier, steps * schedule.step
    done = total = 0.0
    for gap in (*schedule.gaps, math.inf):
        whole = int(min(gap, schedule.work * 10) // (cycle + tier.stall_seconds))   # cycles until the failure
        left = schedule.work - done
        if left <= gap - min(whole, int(left // cycle)) * tier.stall_seconds:
            saves = int(left // cycle)
            return total + left + saves * tier.stall_seconds - schedule.work
        # A save counts if its write had ended, too.
        durable = int(max(gap - tier.write_seconds, 0) // (cycle + tier.stall_seconds))
        done += durable * cycle
        total += gap + tier.restart_seconds
    raise AssertionError("the last gap is infinite")


def grid(schedule: Schedule) -> Sequence[int]:
    """Returns all intervals in steps, 2 % apart, that a save may have: at least the write, at most the work."""
    least = max(math.ceil(schedule.tier.write_seconds / schedule.step), 1)
    most = max(int(schedule.work / schedule.step), least)
    found, at = [], float(least)
    while at <= most:
        found.append(round(at))
        at = max(at * 1.02, at + 1)
    return found


def lost_in_two(schedule: Schedule, copies: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Returns the seconds that a training with a tier in memory loses until its work is done, for each pair of intervals:
    ``copies``: steps between two saves in memory; ``every``: each so many of them has a save to disk, too.

    It replays all failures, and scales what is lost by then to the work. A position is a number of intervals of ``copies``.
    """
    memory, disk = schedule.memory, schedule.tier
    cycle = copies * schedule.step + memory.stall_seconds
    period = every * cycle + disk.stall_seconds
    at = saved = np.zeros(len(copies))                  # where the attempt begins; the newest save on disk
    restarts = 0.0
    for gap, intact in zip(schedule.gaps, schedule.intact, strict=True):
        phase = at % every
        begin, into = at - phase, phase * cycle + gap   # the last multiple of ``every``; seconds since then
        full = np.floor(np.maximum(into - disk.write_seconds, 0) / period)
        saved = np.where(full > 0, begin + full * every, saved)
        if intact:
            whole, rest = np.divmod(np.maximum(into - memory.write_seconds, 0), period)
            at = np.maximum(at, begin + whole * every + np.minimum(np.floor(rest / cycle), every))
        else:
            at = saved
        restarts += (memory if intact else disk).restart_seconds
    done = np.maximum(at, saved) * copies * schedule.step
    spent = math.fsum(schedule.gaps) + restarts
    return np.where(done > 0, (spent - done) / np.maximum(done, 1e-9), math.inf) * schedule.work


def lost_without_memory(schedule: Schedule, steps: np.ndarray) -> np.ndarray:
    """Returns the same as ``lost_in_two`` for a training that does not use its tier in memory. ``steps``: between two saves."""
    none = replace(schedule, memory=Tier(MEMORY, 0.0, 0.0, 0.0), intact=(False,) * len(schedule.gaps))
    return lost_in_two(none, steps, np.ones(len(steps)))


def best_pair(schedule: Schedule) -> float:
    """Returns the seconds that the best pair of fixed intervals loses, of a grid of 2 % around the best of one of 15 %; or what
    the best interval of the disk alone loses, if that is less."""
    rate = len(schedule.gaps) / math.fsum(schedule.gaps)
    centres = [best_interval(tier, rate * share) / schedule.step for tier, share in
               ((schedule.memory, schedule.memory.survival), (schedule.tier, 1 - schedule.memory.survival))]
    ranges = (np.geomspace(1 / 8, 20, 37), np.geomspace(1 / 8, 100, 48))
    least = max(math.ceil(schedule.memory.write_seconds / schedule.step), 1)
    for _ in range(2):
        copies, disk = (each.ravel() for each in np.meshgrid(*(centre * each for centre, each in zip(
            centres, ranges, strict=True))))
        copies = np.maximum(np.round(copies), least)
        every = np.maximum(np.round(disk / copies), np.ceil(max(schedule.tier.write_seconds, 1e-9) / (copies * schedule.step)))
        found = lost_in_two(schedule, copies, every)
        place = int(found.argmin())
        centres, ranges = (copies[place], copies[place] * every[place]), (np.geomspace(0.87, 1.15, 15),) * 2
    return min(float(found[place]), float(lost_without_memory(schedule, np.array(grid(schedule), float)).min()))


def ratios(schedule: Schedule, judge: Schedule) -> dict[str, tuple[float, float]]:
    """Returns {what the advice knows: (lost with the advice, lost with the best fixed intervals)}, in seconds of ``judge``."""
    best = min(lost(judge, steps) for steps in grid(judge)) if judge.memory is None else best_pair(judge)
    found = {}
    for name, count in [("all", len(schedule.gaps)), *((f"first {number}", number) for number in FIRST)]:
        *copies, disk = (tier.steps_advised for tier in advice_from(schedule.measured(count)).tiers)
        if copies == [0]:
            loss = float(lost_without_memory(judge, np.array([float(disk)]))[0])
        elif copies:
            loss = float(lost_in_two(judge, np.array(copies, float), np.array([max(round(disk / copies[0]), 1.0)]))[0])
        else:
            loss = lost(judge, disk)
        found[name] = loss, best
    return found


def replay(schedules: int, seed: int, change: Callable[[Schedule, random.Random], Schedule] = lambda schedule, rnd: schedule
           ) -> dict[str, list[tuple[float, float]]]:
    """Returns {what the advice knows, and who judges: [(lost, lost with the best fixed interval)]}. ``change``: of each
    schedule."""
    rnd, rows = random.Random(seed), {}
    for _ in range(schedules):
        schedule, mean = random_schedule(rnd)
        schedule = change(schedule, rnd)
        gaps = tuple(rnd.expovariate(1 / mean) for _ in range(FURTHER))
        further = with_kinds(replace(schedule, gaps=gaps, work=0.5 * math.fsum(gaps)), rnd)
        for judge, name in ((schedule, SAME), (further, "further failures")):
            for known, pair in ratios(schedule, judge).items():
                rows.setdefault(f"{known}; {name}", []).append(pair)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=(DISK, MEMORY), help="disk: without a tier in memory; memory: with one")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    results = {}
    if asked.only != MEMORY:
        print(f"{asked.schedules} schedules, seed {asked.seed}: lost with the advised interval, as a multiple of the best fixed "
              "one\n")
        results[DISK] = table(replay(asked.schedules, asked.seed))
    if asked.only != DISK:
        print(f"\n{asked.schedules} schedules with a tier in memory, seed {asked.seed}: lost with both advised intervals, as a "
              "multiple of the best fixed pair\n")
        results[MEMORY] = table(replay(asked.schedules, asked.seed, with_memory))
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
    return 0 if all(row["together"] <= TARGET for result in results.values() for name, row in result.items()
                    if name.startswith("all")) else 1


def table(found: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, object]]:
    """Prints a table of what ``replay`` found, and returns its numbers."""
    result = {}
    print("| the advice knows; judged by | median | 90 % | 95 % | largest | all together | at most 1.05 | target 1.05 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, pairs in found.items():
        each = sorted(ours / best for ours, best in pairs)
        together = math.fsum(ours for ours, _ in pairs) / math.fsum(best for _, best in pairs)
        within = sum(ratio <= TARGET for ratio in each) / len(each)
        row = {"median": statistics.median(each), "p90": each[int(0.9 * len(each))], "p95": each[int(0.95 * len(each))],
               "largest": each[-1], "together": together, "within": within}
        result[name] = {**row, "ratios": each}
        verdict = "" if not name.startswith("all") else "met" if together <= TARGET else "missed"
        print(f"| {name} | " + " | ".join(f"{row[key]:.3f}" for key in ("median", "p90", "p95", "largest", "together"))
              + f" | {within:.0%} | {verdict} |")
    return result


if __name__ == "__main__":
    sys.exit(main())
