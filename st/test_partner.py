"""Two nodes of two ranks, each with memory of its own, and partner copies: a node is lost with its
memory, and the job goes on after the newest save in memory, as if nothing had been lost."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.saving.memory_tier.directory import PARTNER
from mindresume.storage.posix import PosixStorage
from st.run_attempts import (
    ALL_RANKS_END,
    LIMIT,
    PROGRAMS,
    assert_resumed,
    committed_steps,
    events,
    run_beside,
    wrong_steps,
)
from st.training_run import FORMAT_2

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.getuid() != 0, reason="a node's memory is mounted, which needs root"),
]
RESUME = "--load_checkpoint ./output/checkpoint --resume_training True"
EVERY = 2  # steps between two saves in memory; to disk 5


@pytest.fixture
def memories(memory):
    """Returns the memory of each node; both see it as ``memory``."""
    yield [f"{memory}-node_{node}" for node in (0, 1)]
    for node in (0, 1):
        shutil.rmtree(f"{memory}-node_{node}", ignore_errors=True)


def copied(run, rank):
    """Returns the newest step that the partner of the node of this rank has."""
    return max((row["step"] for row in events(run, "partner_copied", rank)), default=0)


def settings_of(memory):
    return {
        "CPU_CLUSTER_MEMORIES": "2",
        "MINDRESUME_MEMORY_TIER_DIR": memory,
        "MINDRESUME_MEMORY_TIER_EVERY_STEPS": str(EVERY),
        "MINDRESUME_MEMORY_TIER_PARTNER": "true",
    }


def lose(run, node, memories, hold=None):
    """Kills the processes of a node, and removes its memory when the job has ended. ``hold``: a
    file for which the others wait after a step, as long as it exists."""
    for rank in (2 * node, 2 * node + 1):
        with suppress(LookupError, ProcessLookupError):
            os.kill(run.worker(rank), signal.SIGKILL)
    if hold is not None:
        hold.unlink()
    run.wait(ALL_RANKS_END + LIMIT)
    shutil.rmtree(memories[node])


def in_memory(memory, suffix=""):
    """Returns the steps that are whole in memory of a node: of its own ranks, or (PARTNER) copies
    of others."""
    return {
        row.step
        for tier in Path(memory).glob("mindresume-*/*")
        if tier.name.partition(".")[2] == suffix.removeprefix(".")
        for row in scan_records(CheckpointDir(PosixStorage(), str(tier)))[0]
        if row.problem is None
    }


@pytest.mark.parametrize(
    "extra, node",
    [
        pytest.param("", 1, id="1.0"),
        pytest.param(FORMAT_2, 0, id="2.0"),
        pytest.param("", 0, marks=pytest.mark.soak, id="1.0, the first node"),
    ],
)
def test_a_lost_node_gets_its_memory_back_from_its_partner(
    whole_four, tmp_path, memory, memories, extra, node
):
    run = run_beside(whole_four, tmp_path / "run", copied=False)
    run.program, hold = PROGRAMS / "held.py", run.folder / "hold_8"
    run.folder.mkdir()
    hold.touch()
    command, settings = f"{RESUME} {extra}", settings_of(memory)
    run.start(command, **settings)
    deadline = time.time() + LIMIT
    while min(copied(run, 0), copied(run, 2)) < 8:
        assert time.time() < deadline and run.process.poll() is None, run.log()[-3000:]
        time.sleep(0.01)
    lose(run, node, memories, hold)
    run.start(command, **settings).wait_for_success(LIMIT)
    (selected,) = events(run, "checkpoint_selected")
    # newer than what is on disk
    assert (selected["source"], selected["step"]) == ("memory", 8)
    (fetched,) = events(run, "partner_fetched")
    assert (fetched["step"], fetched["ranks"], fetched["holder"]) == (
        selected["step"],
        [2 * node, 2 * node + 1],
        2 - 2 * node,
    )
    assert_resumed(run, whole_four, selected["step"])


@pytest.mark.soak
@pytest.mark.parametrize("extra", ["", FORMAT_2], ids=["1.0", "2.0"])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_are_lost_at_random(whole_four, tmp_path, memory, memories, extra, seed, capsys):
    """Twice in each training, ten times for each format: whatever of the lost node its partner has,
    and the other node too, is not trained again."""
    run = run_beside(whole_four, tmp_path / "run", copied=False)
    command, settings, chance = f"{RESUME} {extra}", settings_of(memory), random.Random(seed)
    begin, rows = 0, []
    for _ in range(2):
        run.start(command, **settings)
        run.wait_for_step(chance.randint(begin + 3, begin + 15))
        node = chance.randrange(2)
        lose(run, node, memories)
        on_disk = max(committed_steps(run), default=begin)
        other = memories[1 - node]
        expected = max([on_disk, *(in_memory(other) & in_memory(other, PARTNER))])
        run.start(command, **settings)
        run.wait_for_step(expected + 1)
        (selected,) = events(run, "checkpoint_selected")
        rows.append((node, expected, on_disk, selected["step"], selected["source"]))
        assert selected["step"] >= expected, rows
        assert selected["source"] == "memory" or selected["step"] == on_disk, rows
        begin = selected["step"]
        run.kill()
    run.start(command, **settings).wait_for_success(LIMIT)
    with capsys.disabled():
        print(f"\n(lost node, expected, on disk, taken, from): {rows}")
    assert wrong_steps(run, whole_four) == []
