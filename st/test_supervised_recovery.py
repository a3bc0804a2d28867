"""Random deaths under ``mindresume run`` with the tier in memory: no command is typed again, and
every loss of every start is that of the uninterrupted run.

With --soak ten deaths of four processes in either format, of one rank, of all processes, or of the
node with its memory. Without it three deaths of two processes.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mindresume.storage import TEMPORARY
from st.run_attempts import LIMIT, assert_no_process_left, wrong_steps
from st.supervised_run import Start, number_of_starts, supervised, supervisor_events
from st.training_run import FORMAT_2, Run

pytestmark = pytest.mark.timeout(3000)
LAST, EVERY = 40, 5  # steps; those between two saves to disk
Moment = Callable[[Run, int, random.Random], object]


# ---- moments: each waits until start ``number`` reaches it, or the job has ended -----------------


def until(run: Run, number: int, reached: Callable[[Start], object]) -> None:
    """Waits; a start that fails by itself before is an error."""
    while run.process.poll() is None and not (
        number_of_starts(run) >= number and reached(Start(run, number))
    ):
        assert number_of_starts(run) <= number, run.launcher_log()[-3000:]
        time.sleep(0.005)


def at_the_start(run: Run, number: int, chance: random.Random) -> None:
    wait = chance.uniform(0.5, 6)
    until(run, number, lambda start: time.time() > start.began + wait)


def while_it_loads(run: Run, number: int, chance: random.Random) -> None:
    """Or, where nothing was ever complete, begins."""
    until(run, number, Start.source)
    time.sleep(chance.uniform(0, 1))


def in_between(run: Run, number: int, chance: random.Random) -> None:
    """After the second to fourth step of this start. The first one only reserves memory."""
    steps = chance.randint(2, 4)
    until(run, number, lambda start: len(start.steps()) >= steps)
    time.sleep(chance.uniform(0, 0.2))


def after_a_save_to_disk(run: Run, number: int, chance: random.Random) -> None:
    until(run, number, lambda start: start.events("save_committed"))


def in_a_save_to_disk(run: Run, number: int, chance: random.Random) -> None:
    def half_written(start: Start) -> bool:
        for path in run.checkpoints.glob(f"**/.*.safetensors.*{TEMPORARY}"):
            with suppress(FileNotFoundError):  # renamed in between
                if path.stat().st_mtime > start.began:
                    return True
        return False

    until(run, number, half_written)


# ---- deaths --------------------------------------------------------------------------------------


def one_rank(run: Run, memory: str, chance: random.Random) -> None:
    rank = chance.randrange(run.workers)
    while run.process.poll() is None:
        with suppress(LookupError, ProcessLookupError):  # it has not started yet
            os.kill(run.worker(rank), signal.SIGKILL)
            return


def all_processes(run: Run, memory: str, chance: random.Random) -> None:
    """Kills the ranks, the scheduler, msrun and the launcher, but not the supervisor."""
    for pid in run.processes():
        if pid != run.process.pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def the_node(run: Run, memory: str, chance: random.Random) -> None:
    """Kills the same, and memory is lost, as by a power failure. (The supervisor stands for that of
    the new node.)"""
    all_processes(run, memory, chance)
    for path in Path(memory).iterdir():
        shutil.rmtree(path.rename(f"{memory}-lost"))


def play(
    run: Run,
    memory: str,
    deaths: list[tuple[Moment, Callable]],
    chance: random.Random,
    extra: str = "",
) -> list[str]:
    """Runs the training to its end through all deaths. Returns a row of a table for each start."""
    resume = "--load_checkpoint ./output/checkpoint --resume_training True"
    supervised(
        run,
        "--max-restarts",
        "20",
        extra=f"{resume} {extra}",
        MINDRESUME_MEMORY_TIER_EVERY_STEPS="1",
        MINDRESUME_MEMORY_TIER_DIR=memory,
    )
    killed = []
    for number, (moment, die) in enumerate(deaths, 1):
        moment(run, number, chance)
        killed.append(time.time())
        die(run, memory, chance)
        while number_of_starts(run) == number and run.process.poll() is None:
            time.sleep(0.02)
    run.wait_for_success(LIMIT)
    assert_no_process_left(run)
    assert number_of_starts(run) == len(deaths) + 1, "the training ended before all deaths"
    rows = []
    for number in range(1, len(deaths) + 2):
        start = Start(run, number)
        steps = [row["step"] for row in start.steps()]
        death = (
            [f"{deaths[number - 1][0].__name__}, {deaths[number - 1][1].__name__}"]
            if number <= len(deaths)
            else ["the end"]
        )
        death[0] = death[0].replace("_", " ")
        noticed = [
            f"{event['time'] - killed[number - 1]:.2f} s"
            for event in supervisor_events(run, "job_ended")
            if event["start"] == number and number <= len(deaths)
        ]
        rows.append(
            " | ".join(
                [
                    "",
                    str(number),
                    start.source() or "died before",
                    f"{steps[0]} to {steps[-1]}" if steps else "none",
                    *death,
                    *(noticed or [""]),
                    "",
                ]
            ).strip()
        )
    return rows


def assert_uninterrupted(run: Run, whole: Run) -> None:
    """Checks that every step of every start equals that of the uninterrupted run, and none is
    missing, except one that was saved and not recorded before a death, from which the next start
    resumed."""
    starts = [Start(run, number).steps() for number in range(1, number_of_starts(run) + 1)]
    assert wrong_steps(run, whole) == []
    saved_unrecorded = {steps[0]["step"] - 1 for steps in starts if steps}
    assert (
        set(range(1, LAST + 1)) - saved_unrecorded
        <= {row["step"] for row in run.steps()}
        <= set(range(1, LAST + 1))
    )
    assert all(
        [row["step"] for row in steps]
        == list(range(steps[0]["step"], steps[0]["step"] + len(steps)))
        for steps in starts
        if steps
    )


def assert_newest_was_resumed(run: Run, deaths: list[tuple[Moment, Callable]]) -> None:
    """Checks that each start after one that trained resumed from the newest step that was complete
    before, in memory or on disk. (After one that did not train, an older step can be tried.) Which
    of both is newer depends on when a death struck."""
    starts, memory, disk = [Start(run, number) for number in range(1, len(deaths) + 2)], 0, 0
    for before, start, (_, die) in zip(starts[:-1], starts[1:], deaths, strict=True):
        memory = 0 if die is the_node else max({memory, *before.in_memory()})
        disk = max({disk, *(row["step"] for row in before.events("save_committed"))})
        source, step = start.source(), start.resumed()
        found = (
            f"start {start.number} resumed after step {step} of {source}; memory has "
            f"{memory}, disk {disk}"
        )
        if source is not None and before.steps():
            assert step >= max(memory, disk), found
            assert (
                source != "memory" if die is the_node else source == "memory" or step % EVERY == 0
            ), found
    assert starts[-1].in_memory()


def test_two_processes_recover_from_three_deaths(whole_two, tmp_path, memory, capsys):
    run, chance = whole_two.like(tmp_path / "run"), random.Random(20)
    deaths: list[tuple[Moment, Callable]] = [
        (after_a_save_to_disk, the_node),
        (in_between, one_rank),
        (in_a_save_to_disk, all_processes),
    ]
    rows = play(run, memory, deaths, chance)
    with capsys.disabled():
        print("", *rows, sep="\n")
    assert_uninterrupted(run, whole_two)
    assert_newest_was_resumed(run, deaths)


@pytest.mark.soak
@pytest.mark.parametrize("extra", ["", FORMAT_2], ids=["Checkpoint 1.0", "Checkpoint 2.0"])
@pytest.mark.parametrize("seed", [1, 2])
def test_four_processes_recover_from_ten_random_deaths(
    whole_four, tmp_path, memory, extra, seed, capsys
):
    run, chance = whole_four.like(tmp_path / "run"), random.Random(seed)
    moments = [at_the_start] * 2 + [while_it_loads] * 2 + [in_between] * 4 + [in_a_save_to_disk] * 2
    deaths = [
        (moment, chance.choice([one_rank, one_rank, all_processes]))
        for moment in chance.sample(moments, 10)
    ]
    deaths[chance.randrange(4, 8)] = (after_a_save_to_disk, the_node)
    rows = play(run, memory, deaths, chance, extra)
    with capsys.disabled():
        print(f"\n{extra or 'Checkpoint 1.0'}, seed {seed}", *rows, sep="\n")
    assert_uninterrupted(run, whole_four)
    assert_newest_was_resumed(run, deaths)
