"""The advised interval between saves against the best fixed one: replays of random schedules of failures.

    python benchmarks/advice.py [--schedules 200] [--seed 1] [--json FILE]

A schedule has costs (a step, the stall of a save, its write in the background, a restart), drawn log-uniformly around those that
the other benchmarks and the quickstart measured, a mean time between failures, and random failures of that mean, of which 20 to
400 happen. A replay trains through it with one interval and counts what is lost: stalls, restarts, repeated steps. The best fixed
interval is the one of a grid of 2 % that loses least in hindsight. Judged by the same schedule, it also fits the chance of these
very failures, which no advice can know; judged by 2,000 further failures of the same mean, it is the interval that is right.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindresume.report.advice import DISK, Measured, advice_from
from mindresume.report.failure_rate import FailureRate
from mindresume.report.save_interval import Tier

TARGET = 1.05
FIRST, FURTHER = (1, 3, 10), 2000
SAME = "the same schedule"


@dataclass(frozen=True)
class Schedule:
    """One training: ``gaps``: seconds of training (steps and stalls) from one start to the next failure. ``work``: seconds of
    steps to do."""
    step: float
    tier: Tier
    gaps: tuple[float, ...]
    work: float

    def measured(self, failures: int) -> Measured:
        """Returns what is known after so many failures."""
        return Measured(self.step, (self.tier,), 10, self.tier.write_seconds > 0, None, failures,
                        FailureRate(failures, math.fsum(self.gaps[:failures])), 0, {DISK: 100})


def random_schedule(rnd: random.Random) -> tuple[Schedule, float]:
    """Returns a schedule, and the mean time between its failures in seconds."""
    def between(low: float, high: float) -> float:
        return math.exp(rnd.uniform(math.log(low), math.log(high)))
    stall = between(0.07, 60)
    tier = Tier(DISK, stall, stall * between(1, 30) if rnd.random() < 0.7 else 0.0, between(20, 1200))
    mean, count = between(3600, 3 * 86400), round(between(20, 400))
    gaps = tuple(rnd.expovariate(1 / mean) for _ in range(count))
    return Schedule(between(0.2, 30), tier, gaps, 0.5 * math.fsum(gaps)), mean


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


def ratios(schedule: Schedule, judge: Schedule) -> dict[str, tuple[float, float]]:
    """Returns {what the advice knows: (lost with the advice, lost with the best fixed interval)}, in seconds of ``judge``."""
    best = min(lost(judge, steps) for steps in grid(judge))
    found = {}
    for name, count in [("all", len(schedule.gaps)), *((f"first {number}", number) for number in FIRST)]:
        steps = advice_from(schedule.measured(count)).tiers[0].steps_advised
        found[name] = lost(judge, steps), best
    return found


def replay(schedules: int, seed: int) -> dict[str, list[tuple[float, float]]]:
    """Returns {what the advice knows, and who judges: [(lost, lost with the best fixed interval)]}."""
    rnd, rows = random.Random(seed), {}
    for _ in range(schedules):
        schedule, mean = random_schedule(rnd)
        gaps = tuple(rnd.expovariate(1 / mean) for _ in range(FURTHER))
        further = replace(schedule, gaps=gaps, work=0.5 * math.fsum(gaps))
        for judge, name in ((schedule, SAME), (further, "further failures")):
            for known, pair in ratios(schedule, judge).items():
                rows.setdefault(f"{known}; {name}", []).append(pair)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    found, result = replay(asked.schedules, asked.seed), {}
    print(f"{asked.schedules} schedules, seed {asked.seed}: lost with the advised interval, as a multiple of the best fixed "
          "one\n")
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
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    return 0 if all(row["together"] <= TARGET for name, row in result.items() if name.startswith("all")) else 1


if __name__ == "__main__":
    sys.exit(main())
