"""Automatic recovery: something outside starts the same command again whenever the job ends, until
it ends well.

With --soak only: ten deaths of four processes, of all of them or of one: in the first save, in
later saves, while a checkpoint is loaded, at the start and in the middle of nothing. (By default
st/test_supervised_recovery.py, st/test_cookbook.py and st/test_syscalls.py.)
"""

import glob
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from mindresume.storage import TEMPORARY
from st.run_attempts import (
    LIMIT,
    assert_no_process_left,
    committed_steps,
    events,
    run_beside,
    wrong_steps,
)
from st.training_run import Run, differences

pytestmark = pytest.mark.timeout(3000)
LAST = 40
Moment = Callable[[Run, random.Random], None]


# ---- moments of kills: wait until the job reaches them -------------------------------------------


def half_written(run: Run) -> bool:
    """Returns the half-written files of this attempt; those of the previous one may still exist."""
    paths = [
        path
        for folder in ("rank_*", ".mindresume/step-*")
        for path in glob.glob(f"{run.checkpoints}/{folder}/.*.safetensors.*{TEMPORARY}")
    ]
    with suppress(FileNotFoundError):  # renamed in between
        return any(os.stat(path).st_mtime > run.started for path in paths)
    return False


def in_a_save(run: Run, chance: random.Random) -> None:
    """Kills as soon as a half-written file of the next save exists."""
    while run.process.poll() is None and not half_written(run):
        time.sleep(0.0005)


def in_a_later_save(run: Run, chance: random.Random) -> None:
    """The one behind a save that was committed, so that the next attempt has five steps less to
    do."""
    while run.process.poll() is None and not (len(run.steps(-1)) >= 9 and committed_steps(run)):
        time.sleep(0.005)
    in_a_save(run, chance)


def at_the_start(run: Run, chance: random.Random) -> None:
    time.sleep(chance.uniform(0.5, 6))


def while_it_loads(run: Run, chance: random.Random) -> None:
    """Or, where nothing was ever complete, begins."""
    while run.process.poll() is None and not any(
        events(run, kind) for kind in ("checkpoint_selected", "fresh_start")
    ):
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 1))


def in_between(run: Run, chance: random.Random) -> None:
    """After the first to sixth step of this attempt."""
    steps = chance.randint(1, 6)
    while run.process.poll() is None and len(run.steps(-1)) < steps:
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 0.3))


def to_the_end(run: Run, chance: random.Random) -> None:
    """Kills nothing."""


def trained(run: Run, attempt: int) -> str:
    steps = [row["step"] for row in run.steps(attempt)]
    return f"steps {steps[0]} to {steps[-1]}" if steps else "no step"


def supervised(
    run: Run, command: str, deaths: list[tuple[Moment, bool]], chance: random.Random
) -> int:
    """Starts ``command`` until it ends with success; the first attempts are killed at these
    moments, the whole job or (False) one rank of it. Returns the number of starts. AssertionError
    if an attempt fails by itself."""
    for moment, everything in deaths:
        run.start(command, MSRUN_GRACE="1")
        moment(run, chance)
        if everything or run.workers == 1:
            run.kill()
        else:
            os.kill(run.worker(chance.randrange(run.workers)), signal.SIGKILL)
            assert run.wait(LIMIT) != 0
        assert_no_process_left(run)
    run.start(command).wait_for_success(LIMIT)
    return len(run.attempts)


def assert_uninterrupted(run: Run, whole: Run) -> None:
    """Checks that every step of any attempt equals that of the uninterrupted run, and none is
    missing.

    A kill between a save and the recorded line of its step leaves that line out. The next attempt
    resumes from this save then.
    """
    steps = set(range(1, LAST + 1))
    resumed = {
        first[0]["step"] - 1
        for attempt in range(1, len(run.attempts))
        if (first := run.steps(attempt))
    }
    assert steps - resumed <= {row["step"] for row in run.steps()} <= steps
    assert wrong_steps(run, whole) == []
    assert differences(whole.steps(), run.steps(-1)) == []


@pytest.mark.soak
@pytest.mark.parametrize("fmt", ["", "--use_legacy_format False"])
def test_four_processes_recover_from_ten_kills(whole_four, tmp_path, fmt, capsys):
    run, chance = run_beside(whole_four, tmp_path / "run", copied=False), random.Random(7)
    moments = [
        at_the_start,
        in_a_save,
        while_it_loads,
        in_between,
        in_a_later_save,
        in_between,
        at_the_start,
        in_a_later_save,
        while_it_loads,
        in_between,
    ]
    deaths = [(moment, number % 2 == 0) for number, moment in enumerate(moments)]
    assert supervised(run, fmt, deaths, chance) == 11
    with capsys.disabled():
        print(
            f"\n{fmt or 'Checkpoint 1.0'}: "
            + "; ".join(
                f"{moment.__name__} ({'all ranks' if everything else 'one rank'}): "
                f"{trained(run, attempt)}"
                for attempt, (moment, everything) in enumerate([*deaths, (to_the_end, True)])
            )
        )
    assert_uninterrupted(run, whole_four)
