"""A failure is reproduced in any process, and shrunk."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from mindresume.fault_injection.faults import Fault
from sim.catalogue import SCENARIOS
from sim.disk import Disk
from sim.scenarios import Simulation
from sim.schedule import Schedule, random_schedule
from sim.search import (
    SHARE,
    BranchRecorder,
    Counts,
    Failure,
    KnownStates,
    SearchRequest,
    apply_death,
    count_operations,
    ending_with,
    replay,
    run,
    search_seeds,
    shrink,
    state_signature,
    systematic,
)


@pytest.fixture
def no_folder_is_flushed(monkeypatch):
    """Makes the product lose names, so that a search finds failures."""
    monkeypatch.setattr(Disk, "sync", lambda self, path: self.folder(path))


def found(seeds, name="save", fmt="ckpt", way="", deaths=True):
    """Returns the failures of random schedules, not shrunk."""
    scenario = SCENARIOS[name]
    size = count_operations(scenario, fmt, way)
    for seed in range(*seeds):
        failure = run(
            scenario,
            fmt,
            way,
            random_schedule(random.Random(seed), size, scenario.kinds),
            KnownStates(),
            Counts(),
            deaths,
        )
        if failure is not None:
            yield failure


# ---- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fmt", "way"),
    [
        ("save", "ckpt", ""),
        ("prune", "iteration", "thread"),
        ("save", "safetensors", "process"),
        ("job", "iteration", ""),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_a_kill_in_the_middle_equals_the_end_of_a_schedule_with_the_same_disk(name, fmt, way, seed):
    """Includes kills while a process waits before its operation, and after other faults."""
    scenario, rng, moments = SCENARIOS[name], random.Random(seed), []
    size = count_operations(scenario, fmt, way)
    drawn = random_schedule(
        rng, size, kinds=("EIO", "ENOSPC", "EIO after", "kill", "slow", "pause"), max_faults=4
    )
    switches = {at: 1 for at in rng.sample(range(1, size), min(size - 1, 12))}
    schedule = replace(drawn, switches=tuple(sorted(switches.items())))

    def collect(sim, at):
        begun = sim.cluster.scheduler.operations
        kind, amount = rng.choice((("kill all", 0), ("power", 0), ("power", at))[at > begun :])
        disks = {name: disk.copy() for name, disk in sim.cluster.disks.items()}
        apply_death(disks, kind, amount)
        moments.append((Fault(at, kind, amount), begun, state_signature(sim, disks, sim.history)))

    Simulation(scenario, fmt, schedule, way).run(collect)
    for death, begun, signature in (
        rng.sample(moments[:-1], min(len(moments) - 1, 11)) + moments[-1:]
    ):
        sim = Simulation(scenario, fmt, ending_with(schedule, death, begun), way).run()
        apply_death(sim.cluster.disks, "kill all", 0)
        assert sim.cluster.injected[-1].fault == death
        assert state_signature(sim, sim.cluster.disks, sim.history) == signature, death


def test_a_found_failure_replayed_gives_the_same_findings(no_folder_is_flushed):
    failures = [
        *found((0, 3)),
        *found((0, 1), "prune", "iteration", "thread"),
        *found((0, 1), "job", "safetensors", "process"),
    ]
    assert len(failures) > 2
    for failure in failures:
        again = Failure(
            failure.scenario,
            failure.format,
            failure.way,
            Schedule.from_json(json.loads(json.dumps(failure.schedule.to_json()))),
            (),
        )
        assert tuple(replay(again)) == failure.findings and failure.findings


def test_a_shrunk_failure_still_breaks_the_same_promise_and_nothing_can_be_left_out(
    no_folder_is_flushed,
):
    for failure in list(found((0, 8)))[:3]:
        simple = shrink(failure)
        kinds = {finding.kind for finding in failure.findings}
        assert (
            kinds & {finding.kind for finding in replay(simple)}
            and tuple(replay(simple)) == simple.findings
        )
        assert simple.schedule.size <= failure.schedule.size and simple.schedule.faults
        assert not any(
            kinds
            & {
                finding.kind
                for finding in replay(Failure(simple.scenario, simple.format, simple.way, less, ()))
            }
            for less in simple.schedule.shrink_candidates()
        )


# ---- search --------------------------------------------------------------------------------------


def traced(name, fmt, way, switches, chooser=None):
    """Returns the operations in order, without their numbers."""
    sim = Simulation(SCENARIOS[name], fmt, Schedule(switches=switches), way)
    sim.cluster.trace.wanted = True
    sim.cluster.scheduler.chooser = chooser or sim.cluster.scheduler.chooser
    sim.run()
    return tuple(row[1:] for row in sim.cluster.trace.rows)


@pytest.mark.parametrize(("way", "switches"), [("", 1), ("thread", 1)])
def test_no_order_is_omitted_for_lack_of_ready_tasks(way, switches):
    """Compares with all schedules, most of which are equal."""
    size = count_operations(SCENARIOS["save"], "ckpt", way)
    every = {
        traced("save", "ckpt", way, ((at, further),))
        for at in range(1, size + 9)
        for further in (1, 2, 3)
    }
    ran, stack = set(), [()]
    while stack:
        options = BranchRecorder(chosen := stack.pop())
        trace = traced("save", "ckpt", way, chosen, options)
        # to look who could go on changes nothing
        assert trace == traced("save", "ckpt", way, chosen)
        ran.add(trace)
        stack += options.further(1) if len(chosen) < switches else []
    counts = Counts()
    assert not list(systematic(SCENARIOS["save"], "ckpt", way, switches, counts))
    assert every <= ran and 10 < counts.runs < size * 3


@pytest.mark.parametrize("name", ["save", "bucket"])
def test_an_already_checked_state_is_neither_copied_nor_checked_again(name):
    """A second equal run gives no new state, and a disk has the signature of its copy after all
    processes were killed."""
    known, first, again = KnownStates(), Counts(), Counts()
    wanted = SCENARIOS[name], "ckpt", "", Schedule(switches=((20, 1),))
    assert run(*wanted, known, first, share=32) is None and first.states > 10
    assert run(*wanted, known, again, share=32) is None and (again.states, again.schedules) == (
        0,
        first.schedules,
    )
    for disk in Simulation(wanted[0], "ckpt", wanted[3]).run().cluster.disks.values():
        copy = disk.copy()
        copy.lose_power(lambda: True, lambda data: data)
        assert copy.signature() == copy.signature(power=False) == disk.signature(power=False)


@pytest.mark.parametrize("name", ["wrong", "stale_choices", "lease_losses"])
def test_violations_of_a_run_are_reported_although_its_disk_was_seen(name):
    sim = Simulation(SCENARIOS["save"], "ckpt", Schedule())
    before = state_signature(sim, sim.cluster.disks, sim.history)
    getattr(sim.history, name).append("job1 did what it must not")
    assert state_signature(sim, sim.cluster.disks, sim.history) != before


# ---- the same in every process -------------------------------------------------------------------

_PROGRAM = """
import gc, hashlib, sys
from sim.search import Counts, KnownStates, SearchRequest, count_operations, run
from sim.scenarios import Simulation
from sim.schedule import random_schedule
import random
if sys.argv[1] == "other":  # memory addresses, and when garbage is collected
    ballast = [object() for _ in range(100_000)]
    gc.set_threshold(50)
digest, counts = hashlib.sha256(), Counts()
for number, (scenario, fmt, way) in enumerate(SearchRequest((0, 0)).configurations()[int(sys.argv[2])::int(sys.argv[3])]):
    size = count_operations(scenario, fmt, way)
    sim = Simulation(scenario, fmt, random_schedule(random.Random(number), size), way)
    sim.cluster.trace.wanted = True
    sim.run()
    digest.update(repr((size, sim.cluster.trace.rows, sim.cluster.scheduler.now, sorted(sim.history.began),
                        sorted(sim.history.failed.items()), sim.history.reported, sim.history.chosen,
                        [process.events for process in sim.cluster.processes],
                        [disk.signature() for disk in sim.cluster.disks.values()])).encode())
    if not number % 4:
        run(scenario, fmt, way, random_schedule(random.Random(number), size), KnownStates(), counts, share=6)
print(digest.hexdigest(), counts)
"""  # noqa: E501


def test_hashes_of_strings_and_memory_addresses_decide_nothing(soak):
    """The same schedules in two processes: every operation, event and disk is the same."""
    outputs = []
    for seed, memory in (("0", "one"), ("1", "other")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
        outputs.append(
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, memory, "0", "47" if soak else "97"],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert outputs[0] == outputs[1] and outputs[0].strip()


def test_a_run_does_not_depend_on_earlier_runs():
    scenario, schedule = SCENARIOS["job"], random_schedule(random.Random(3), 200)

    def traced():
        sim = Simulation(scenario, "iteration", schedule, "thread")
        sim.cluster.trace.wanted = True
        sim.run()
        return sim.cluster.trace.rows, [process.events for process in sim.cluster.processes]

    first = traced()
    for name in ("twice", "lost ranks", "save"):
        Simulation(SCENARIOS[name], "ckpt", random_schedule(random.Random(4), 100), "process").run()
    assert traced() == first
    # with its own fakes, not those of a search
    assert traced() == first


# ---- the search itself ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def share(soak):
    """Returns on one of how many states the command is restarted; all are inspected. A restart
    takes most of the time."""
    return SHARE if soak else 4 * SHARE


def check(share, seeds, *scenarios):
    _, failures = search_seeds(SearchRequest(seeds, scenarios, share=share))
    assert not failures, "\n".join(
        f"seed {seed}: {json.dumps(failure.to_json())}" for seed, failure in failures
    )


def test_nothing_is_found_in_schedules_that_are_always_the_same(share):
    check(share, (0, 4))


@pytest.mark.parametrize("part", range(4))
def test_nothing_is_found_in_schedules_of_today(part, share, soak):
    """Runs new schedules each time, in one format and way of each third scenario, with --soak of
    each; ``scripts/test.sh`` prints the first seed, and ``python -m sim`` runs any number."""
    first = int(os.environ.get("MINDRESUME_FIRST_SEED") or time.time_ns() // 1000 % 10**9)
    for index, name in enumerate(SCENARIOS):
        if index % 4 == part and (soak or (first + index) % 3 == 0):
            check(share, (first + index, 4 if soak else 1), name)
