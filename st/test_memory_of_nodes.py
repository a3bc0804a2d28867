"""Saves in memory of two nodes: each half of the ranks has a tmpfs folder of its own, and all work
on one disk. Checkpoint 2.0 of the graph trainer and of the PyNative trainer."""

import os
import shutil
from pathlib import Path

import pytest

from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.saving.memory_tier.directory import parent_of_tiers, read_mark
from mindresume.storage.posix import PosixStorage
from st.layout_runs import TOLERANCE
from st.run_attempts import LIMIT, assert_event, events, notices, run_beside, selected_step
from st.training_run import FORMAT_2, Run, differences

pytestmark = pytest.mark.timeout(1200)
NODES = 2
EVERY = 3
# memory of the node whose folder is the working directory
MEMORY = "/proc/self/cwd/memory"


class Nodes:
    """A training on two nodes with a disk in common. ``memory``: a folder in memory."""

    def __init__(self, run: Run, memory: str, *options: str):
        self.run, self.memory = run, [Path(memory) / str(node) for node in range(NODES)]
        for node, place in enumerate(self.memory):
            place.mkdir()
            folder = run.folder / f"node_{node}"
            folder.mkdir(parents=True)
            (folder / "memory").symlink_to(place)
        output = run.folder.resolve() / "output"
        self.options = " ".join(
            (f"--output_dir {output} --load_checkpoint {output}/checkpoint", *options)
        )

    def start(self, *options: str) -> None:
        self.run.start(
            " ".join((self.options, *options)),
            CPU_CLUSTER_NODES=str(NODES),
            MINDRESUME_MEMORY_TIER_EVERY_STEPS=str(EVERY),
            MINDRESUME_MEMORY_TIER_DIR=MEMORY,
            MSRUN_GRACE="1",
        )

    def kill_after(self, step: int) -> int:
        """Kills all processes once ``step`` is done. Returns the newest step in memory."""
        self.run.wait_for_step(step)
        self.run.kill()
        return max(set.intersection(*(self.steps(node) for node in range(NODES))))

    def steps(self, node: int) -> set[int]:
        """Returns the steps that are whole in memory of a node."""
        return {row.step for row in scan_records(self.tier(node))[0] if row.problem is None}

    def tier(self, node: int) -> CheckpointDir:
        mark = read_mark(CheckpointDir(PosixStorage(), str(self.run.checkpoints)))
        parent = os.path.basename(parent_of_tiers(mark.dir))
        return CheckpointDir(PosixStorage(), str(self.memory[node] / parent / mark.token))

    def lose(self, node: int) -> None:
        shutil.rmtree(self.tier(node).root)

    def sources(self) -> list[str]:
        """Returns where each rank of the last attempt resumed from."""
        return [
            row["source"]
            for rank in range(self.run.workers)
            for row in events(self.run, "checkpoint_selected", rank)
        ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("whole_two", id="2 ranks"),
        pytest.param("whole_four", id="4 ranks", marks=pytest.mark.soak),
    ],
)
def test_each_node_takes_its_part_from_memory(request, name, tmp_path, memory):
    """Saves on disk are at 20 and 40, saves in memory at multiples of 3."""
    whole = request.getfixturevalue(name)
    run = run_beside(whole, tmp_path / "run", copied=False)
    nodes = Nodes(run, memory, FORMAT_2, "--callbacks.1.save_checkpoint_steps 20")
    nodes.start()
    newest = nodes.kill_after(26)
    nodes.start()
    again = nodes.kill_after(34)
    assert nodes.sources() == ["memory"] * run.workers and not events(run, "tier_refused")
    assert selected_step(run) == newest >= 21 and again > newest
    assert differences(whole.steps()[: run.steps(-1)[-1]["step"]], run.steps(-1)) == []
    nodes.lose(1)
    nodes.start()
    run.wait_for_success(LIMIT)
    assert nodes.sources() == ["disk"] * run.workers and selected_step(run) == 20
    assert differences(whole.steps(), run.steps(-1)) == []


def test_another_layout_takes_the_save_in_memory_from_the_disk(whole_two, tmp_path, memory):
    """Of the halves that tensor parallelism gave the ranks, data parallelism needs both."""
    run = run_beside(whole_two, tmp_path / "run", copied=False)
    nodes = Nodes(run, memory, FORMAT_2, "--callbacks.1.save_checkpoint_steps 20")
    nodes.start(
        "--parallel_config.data_parallel 1 --parallel_config.model_parallel 2 --batch_size 8 "
        "--parallel.dataset_strategy [[1,1],[1,1],[1,1],[1,1]]"
    )
    newest = nodes.kill_after(28)
    nodes.start()
    run.wait_for_success(LIMIT)
    assert selected_step(run) == newest and notices(run, "is written to disk from memory")
    assert_event(run, "resumed", step=newest)
    before, after = (
        {row["step"]: row["loss"] for row in run.steps(attempt) if row["step"] > newest}
        for attempt in (0, 1)
    )
    assert before and set(after) == set(range(newest + 1, 41))
    assert all(abs(loss - after[step]) < TOLERANCE for step, loss in before.items())
