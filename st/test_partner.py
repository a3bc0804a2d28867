"""Two nodes of two ranks, each with memory of its own, and partner copies: a node is lost with its
memory, and the job goes on after the newest save in memory, as if nothing had been lost."""

import os
import shutil
import signal
import time
from contextlib import suppress

import pytest

from st.run_attempts import ALL_RANKS_END, LIMIT, assert_resumed, events, run_beside

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


@pytest.mark.parametrize("node", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_lost_node_gets_its_memory_back_from_its_partner(
    whole_four, tmp_path, memory, memories, node
):
    run = run_beside(whole_four, tmp_path / "run", copied=False)
    settings = {
        "CPU_CLUSTER_MEMORIES": "2",
        "MINDRESUME_MEMORY_TIER_DIR": memory,
        "MINDRESUME_MEMORY_TIER_EVERY_STEPS": str(EVERY),
        "MINDRESUME_MEMORY_TIER_PARTNER": "true",
    }
    run.start(RESUME, **settings)
    run.wait_for_step(8)
    deadline = time.time() + LIMIT
    # 8, 14, 18: newer than what is on disk
    while (newest := min(copied(run, 0), copied(run, 2))) % 5 not in (3, 4):
        assert time.time() < deadline and run.process.poll() is None, run.log()[-3000:]
        time.sleep(0.01)
    for rank in (2 * node, 2 * node + 1):
        with suppress(LookupError, ProcessLookupError):
            os.kill(run.worker(rank), signal.SIGKILL)
    run.wait(ALL_RANKS_END + LIMIT)
    shutil.rmtree(memories[node])
    run.start(RESUME, **settings).wait_for_success(LIMIT)
    (selected,) = events(run, "checkpoint_selected")
    assert selected["source"] == "memory" and selected["step"] % EVERY == 0
    assert selected["step"] >= newest
    (fetched,) = events(run, "partner_fetched")
    assert (fetched["step"], fetched["ranks"], fetched["holder"]) == (
        selected["step"],
        [2 * node, 2 * node + 1],
        2 - 2 * node,
    )
    assert_resumed(run, whole_four, selected["step"])
