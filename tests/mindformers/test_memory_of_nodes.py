"""Checkpoint 2.0 from memory of two nodes: in the layout of the save each rank takes what it saved
itself; else the save goes to the disk that the nodes share, and is loaded from there."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from memory_tiers import make_owned_tier
from plan_networks import NET, TENSORS, Network, assert_compared, contents, device  # noqa: F401  device: a fixture
from rank_folders import RUN, STORAGE, Threads, dir_at, state_of
from reshard.plans import COUNTERS, STEP, Plan, shard_file

pytest.importorskip("mindformers.tools")

from mindformers import MindFormerConfig  # noqa: E402

from mindresume.errors import CollectiveError, LeaseHeldError  # noqa: E402
from mindresume.formats.records import scan_records  # noqa: E402
from mindresume.mindformers import (  # noqa: E402
    adapter,
    auto_transform,
    configuration,
    job_start,
    loading,
    training_context,
)
from mindresume.mindformers.graph_load import GraphNetwork  # noqa: E402
from mindresume.resume import memory_source  # noqa: E402
from mindresume.resume.progress import START  # noqa: E402
from mindresume.saving.committer import Committer  # noqa: E402
from mindresume.saving.shard_writer import (  # noqa: E402
    SaveTarget,
    iteration_shard,
    write_shard,
)
from mindresume.settings import MemoryTierSettings, Settings  # noqa: E402

COUNTER = {"global_step": COUNTERS["global_step"]}
SHAPES = {name: (array.shape, "int32") for name, array in COUNTER.items()}
SETTINGS = Settings(memory_tier=MemoryTierSettings(every_steps=2))
SAVED = Plan.parse("dp2tp2opt2", NET)
LATER = STEP + 2
thread = threading.local()


def save(root, step, ranks, plan=SAVED, local_ranks=(), dedup=False):
    """Saves the parts of ``ranks``."""
    for rank in ranks:
        held = shard_file(plan, TENSORS, rank, dedup, COUNTER)
        model = {name: array for name, array in held.items() if not name.startswith("adam_")}
        target = SaveTarget(STORAGE, str(root), RUN, rank, plan.world_size, True, local_ranks)
        shard = iteration_shard(
            "net",
            target,
            state_of(step),
            model,
            {name: array for name, array in held.items() if name not in model},
            {name: (cut, TENSORS[name].shape) for name, cut in plan.layouts(rank).items()},
            deduplicated=dedup,
        )
        write_shard(target, shard, saved_at=1000.0)


@pytest.fixture
def root(tmp_path):
    """Makes a checkpoint directory that has the step before."""
    root = tmp_path / "output" / "checkpoint"
    save(root, STEP, range(4))
    committer = Committer(SaveTarget(STORAGE, str(root), RUN, 0, 4, True))
    committer.poll(STEP)
    assert not committer.pending
    return root


@pytest.fixture
def nodes(memory, root, monkeypatch):
    """Returns the tiers of two nodes, with ranks 0 and 1, and 2 and 3."""
    tiers = []
    for node in range(2):
        os.mkdir(os.path.join(memory, str(node)))
        tiers.append(make_owned_tier(os.path.join(memory, str(node)), root))

    def find(directory):
        tier = tiers[thread.rank // 2]
        return (str(tier), "") if tier.exists() else ("", "")

    def look(source):
        thread.rank = source.job.group.rank
        return real(source)

    real = memory_source.MemorySource._look
    monkeypatch.setattr(memory_source.MemorySource, "_look", look)
    monkeypatch.setattr(memory_source, "find_tier", find)
    return tiers


def save_in_memory(nodes, step=LATER, dedup=False):
    for node, tier in enumerate(nodes):
        ranks = (2 * node, 2 * node + 1)
        save(tier, step, ranks, local_ranks=ranks, dedup=dedup)


def loads(root, plan, settings=SETTINGS, changed=SHAPES):
    """Returns for each rank (its arrays, its context, its network), or its error."""

    def load(group):
        config = MindFormerConfig(
            load_checkpoint=str(root),
            resume_training=True,
            use_legacy_format=False,
            output_dir=str(root.parent),
            callbacks=[{"type": adapter.ALIAS, "directory": str(root)}],
        )
        context = training_context.TrainingContext(
            settings, configuration.TRAIN, training_context.Resources(group)
        )
        network = Network(plan, group.rank, changed)
        optimizer = SimpleNamespace(
            parameters_dict=lambda: [n for n in network.wanted if n.startswith("adam_")]
        )
        try:
            job_start.select_checkpoint(config, context)
            context.progress.origin = replace(START, global_step=LATER)
            graph = GraphNetwork(context, config, network, network, optimizer)
            loading.load(graph, context)
            assert_compared(context, network)
            return network.loaded, context
        except Exception:
            assert network.loaded is None
            raise
        finally:
            context.resources.release()

    return Threads(plan.world_size).run(load)


def all_right(plan, found, step=LATER, in_memory=False):
    for rank, each in enumerate(found):
        assert not isinstance(each, Exception), each
        arrays, context = each
        counters = {"global_step": COUNTER["global_step"] * 0 + LATER}
        assert contents(arrays) == contents({**plan.shard(TENSORS, rank), **counters})
        choice = context.plan.choice
        assert (choice.chosen.step, choice.in_memory) == (step, in_memory)


def steps_on_disk(root):
    return [c.step for c in scan_records(dir_at(root))[0] if c.problem is None]


def test_the_layout_of_the_save_takes_what_each_rank_has_in_memory(root, nodes):
    save_in_memory(nodes)
    all_right(SAVED, loads(root, SAVED), in_memory=True)
    assert steps_on_disk(root) == [STEP]


@pytest.mark.parametrize("target", ["dp4opt4", "tp2pp2", "dp2tp2", "dp2tp2axes10"])
def test_another_layout_takes_the_same_step_from_the_disk(root, nodes, target):
    save_in_memory(nodes)
    plan = Plan.parse(target, NET)
    all_right(plan, loads(root, plan))
    assert steps_on_disk(root) == [LATER, STEP]
    # the next start needs no copy
    all_right(plan, loads(root, plan))


def test_a_rank_whose_copies_another_one_has_saved_takes_the_disk(root, nodes):
    save_in_memory(nodes, dedup=True)
    all_right(SAVED, loads(root, SAVED))


@pytest.mark.parametrize("target, in_memory", [("dp2tp2opt2", True), ("dp4opt4", False)])
def test_one_node_may_have_all_parts(root, nodes, target, in_memory):
    """Copies of its partner are among its own saves, and the setting is off now."""
    save_in_memory(nodes)
    save(nodes[0], LATER, (2, 3), local_ranks=(2, 3))
    plan = Plan.parse(target, NET)
    all_right(plan, loads(root, plan), in_memory=in_memory)


def test_a_node_that_has_lost_its_part_leaves_the_disk(root, nodes):
    save_in_memory(nodes)
    nodes[1].rename(nodes[1].with_suffix(".lost"))
    all_right(SAVED, loads(root, SAVED), STEP)


def test_another_number_of_ranks_takes_the_disk(root, nodes):
    save_in_memory(nodes)
    plan = Plan.parse("tp2", NET)
    all_right(plan, loads(root, plan), STEP)


def test_a_parameter_that_no_rank_has_saved_ends_all_ranks_with_its_name(root, nodes):
    save_in_memory(nodes)
    changed = {**SHAPES, "new.weight": ((3,), "float32")}
    for error in loads(root, SAVED, changed=changed):
        assert isinstance(error, CollectiveError)
        assert "new.weight is not in the checkpoint" in str(error)


def test_what_may_be_missing_is_looked_for_on_all_ranks(root, nodes):
    """Layers that a rank takes over from another one are not left as they are initialised."""
    save_in_memory(nodes)
    plan, allowed = Plan.parse("tp2pp2", NET), replace(SETTINGS, allow_missing=("*",))
    all_right(plan, loads(root, plan, allowed))
    changed = {**SHAPES, "new.weight": ((3,), "float32")}
    for arrays, _ in loads(root, SAVED, allowed, changed):
        assert "new.weight" not in arrays and "embedding.weight" in arrays


def test_a_copy_that_cannot_be_written_ends_all_ranks(root, nodes, monkeypatch):
    save_in_memory(nodes)

    def fails(*arguments):
        raise CollectiveError("rank 2: no space")

    monkeypatch.setattr(training_context, "write_selected", fails)
    plan = Plan.parse("dp4opt4", NET)
    for _ in range(SETTINGS.max_failed_loads):
        for error in loads(root, plan):
            assert isinstance(error, CollectiveError) and "no space" in str(error)
    # or no start would ever take what is on disk
    all_right(plan, loads(root, plan), STEP)


def test_a_job_that_saves_there_is_not_disturbed(root, nodes, monkeypatch):
    save_in_memory(nodes)

    def is_alive(directory, emit):
        raise LeaseHeldError(f"{directory.root} is in use")

    monkeypatch.setattr(training_context, "check_no_live_job", is_alive)
    for error in loads(root, Plan.parse("dp4opt4", NET)):
        assert isinstance(error, CollectiveError) and f"{root} is in use" in str(error)
    assert steps_on_disk(root) == [STEP]


def test_a_part_that_two_nodes_have_is_written_by_one(root, nodes, monkeypatch):
    save_in_memory(nodes)
    shutil.copytree(nodes[0], nodes[1], dirs_exist_ok=True)
    put, real = [], memory_source.DiskCopy.put_file

    def put_file(self, attempt, file, storage, path):
        put.append(file.path)
        real(self, attempt, file, storage, path)

    monkeypatch.setattr(memory_source.DiskCopy, "put_file", put_file)
    plan = Plan.parse("dp4opt4", NET)
    all_right(plan, loads(root, plan))
    assert sorted(put) == sorted(set(put)) != []


def test_a_copy_that_is_not_the_save_is_not_loaded(root, nodes, monkeypatch):
    save_in_memory(nodes)
    monkeypatch.setattr(auto_transform, "select_checkpoint", lambda *a: other_choice(root))
    for error in loads(root, Plan.parse("dp4opt4", NET)):
        assert "expected step-" in str(error) and str(Path(root)) in str(error)


def other_choice(root):
    chosen = scan_records(dir_at(root))[0][-1]
    return memory_source.Choice(chosen, root=str(root))
