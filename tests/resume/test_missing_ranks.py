"""The last save of a job that had lost ranks: taken if those that were left hold every slice of
every tensor, else refused."""

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_folders import (
    EVERY_RUN,
    RUN,
    STORAGE,
    Ranks,
    counters,
    dir_at,
    flip_bit,
    name_of,
    start_of,
    state_of,
    target_of,
)

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import NoUsableCheckpointError
from mindresume.formats import CheckpointDir
from mindresume.formats.metadata import missing_slices
from mindresume.formats.scan import scan
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout, held
from mindresume.model.manifest import Details, TensorRecord, run_name
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.range_reader import view
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.replicas import replica_sources
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KEEP_ALL, plan
from mindresume.saving.shard_writer import (
    SaveTarget,
    iteration_shard,
    mark_emergency,
    rank_shard,
    write_shard,
)
from mindresume.tensor_files import encode
from tests.strategy_files import write_strategy

WORLD = 8
# data parallel 4 x model parallel 2, the optimizer cut in 2 of 4: what rank 0 holds, 4 has as well
LAYOUTS = {
    "embedding.weight": TensorLayout((4, 2), (0, -1)),
    "adam_m.embedding.weight": TensorLayout((4, 2), (0, -1), 2),
    "layer.bias": TensorLayout((4, 2), (-1,)),
}
SHAPES = {"embedding.weight": (16, 4), "adam_m.embedding.weight": (16, 4), "layer.bias": (6,)}
COVERING, LACKING = (0, 2, 3, 5), (0, 2, 4, 6)


def whole(name, step):
    return np.random.default_rng([len(name), step]).standard_normal(SHAPES[name]).astype(np.float32)


def slices_held(rank, step):
    return {
        name: np.ascontiguousarray(view(whole(name, step), held(LAYOUTS[name], rank, SHAPES[name])))
        for name in SHAPES
    }


def write(root, step, rank, iterations=False, mark=False, local_ranks=()):
    target = SaveTarget(STORAGE, str(root), RUN, rank, WORLD, iterations, local_ranks)
    if mark:
        mark_emergency(target, step)
    tables = {name: (LAYOUTS[name], SHAPES[name]) for name in SHAPES}
    random = {"python": f"of rank {rank}"}
    tensors = {**slices_held(rank, step), **counters(step)}
    if iterations:
        model = {name: tensors[name] for name in ("embedding.weight", "layer.bias")}
        optimizer = {name: tensors[name] for name in ("adam_m.embedding.weight", "global_step")}
        shard = iteration_shard("net", target, state_of(step), model, optimizer, tables, random)
    else:
        metadata = {"format": "ms", "remove_redundancy": "False"}
        name = name_of(rank, step)
        shard = rank_shard(name, state_of(step), tensors, tables, random, metadata)
    write_shard(target, shard)


def save(root, step, iterations=False):
    for rank in range(WORLD):
        write(root, step, rank, iterations)
    Committer(SaveTarget(STORAGE, str(root), RUN, 0, WORLD, iterations)).poll(step)


def last_save(root, step, ranks, iterations=False, mark=True, local_ranks=()):
    for rank in ranks:
        write(root, step, rank, iterations, mark, local_ranks)


def strategy_in(folder):
    write_strategy(STRATEGY, str(folder))


def choose(root, world=WORLD, ranks=None, **options):
    """Selects in one process that verifies ``ranks``; None: all, also those that wrote nothing."""

    class Policy(SelectionPolicy):
        def ranks_to_verify(self, group, candidate):
            return range(candidate.world_size) if ranks is None else ranks

    return select_checkpoint(STORAGE, str(root), SingleProcess(), Policy(world), **options)


def falls_back(root, *said, **options):
    """Asserts that step 7 is refused with ``said``, and step 5 taken."""
    choice = choose(root, **options)
    assert choice.chosen.step == 5
    assert all(text in choice.refused[0].reason for text in said)


def check_loaded(choice):
    """Asserts that all ranks load what they held at step 7."""
    from mindresume.mindformers.loading import read_shard

    chosen = choice.chosen
    assert (chosen.step, chosen.missing_ranks, chosen.world_size) == (7, (1, 4, 6, 7), WORLD)
    for shard in choice.shards:
        arrays = read_shard(CheckpointDir(STORAGE, choice.root), shard)
        for name, array in slices_held(shard.rank, 7).items():
            np.testing.assert_array_equal(arrays[name], array)


@pytest.mark.parametrize("iterations", [False, True])
def test_a_subset_of_ranks_that_covers_all_slices_is_a_checkpoint(tmp_path, iterations):
    save(tmp_path, 5, iterations)
    last_save(tmp_path, 7, COVERING, iterations)
    choice = choose(tmp_path)
    assert choice.refused == ()
    check_loaded(choice)
    for rank in range(WORLD):
        assert choice.shards[rank].state.step == 7
        assert choice.shards[rank].details.random == (
            {"python": f"of rank {rank}"} if rank in COVERING else {}
        )


@pytest.mark.parametrize("iterations", [False, True])
def test_a_subset_of_ranks_that_lacks_a_slice_is_not_a_checkpoint(tmp_path, iterations):
    save(tmp_path, 5, iterations)
    last_save(tmp_path, 7, LACKING, iterations)
    assert choose(tmp_path).chosen.step == 5
    reason = next(c.problem.reason for c in scan(dir_at(tmp_path)).candidates if c.step == 7)
    assert "4 of 8 ranks recorded what they wrote, missing: rank 1, 3, 5, 7; a part of " in reason
    assert "was held by rank 1, 3, 5, 7 alone" in reason or "was held by rank 1, 5 alone" in reason


@pytest.mark.parametrize(
    "part, saved, said",
    [
        (COVERING, COVERING, None),  # as where all share a disk
        (LACKING, LACKING, None),  # all of this node have saved
        ((0, 1, 2, 3), (0, 2, 3), "3 of 4 ranks recorded what they wrote, missing: rank 1; a part"),
    ],
)
def test_a_node_local_part_is_complete_without_the_ranks_of_other_nodes(
    tmp_path, part, saved, said
):
    last_save(tmp_path, 7, saved, local_ranks=part)
    (found,) = scan(dir_at(tmp_path)).candidates
    assert found.maybe_completed is (said is None)
    if said is None:
        is_covering = part == COVERING
        assert found.local_ranks == (() if is_covering else part) and found.problem is None
        assert found.missing_ranks == ((1, 4, 6, 7) if is_covering else ())
    else:
        assert said in found.problem.reason


def test_a_subset_of_ranks_without_the_marker_is_an_incomplete_save(tmp_path):
    save(tmp_path, 5)
    last_save(tmp_path, 7, COVERING, mark=False)
    falls_back(tmp_path, "never completed")


@pytest.mark.parametrize("iterations", [False, True])
def test_a_damaged_copy_is_noticed_by_the_rank_that_would_read_it(tmp_path, iterations):
    save(tmp_path, 5, iterations)
    last_save(tmp_path, 7, COVERING, iterations)
    file = scan(dir_at(tmp_path)).candidates[0].files[3][0].path
    flip_bit(tmp_path / file, start_of(tmp_path / file, "embedding.weight") + 3)
    falls_back(tmp_path, "damaged", ranks=[1])


def test_all_ranks_of_a_group_select_it(tmp_path):
    save(tmp_path, 5)
    last_save(tmp_path, 7, COVERING)
    choices = Ranks(WORLD).run(
        lambda group: select_checkpoint(STORAGE, str(tmp_path), group, SelectionPolicy(WORLD))
    )
    assert [choice.chosen.step for choice in choices] == [7] * WORLD
    for rank, choice in enumerate(choices):
        assert [shard.rank for shard in choice.shards] == [rank]


@pytest.mark.parametrize("iterations", [False, True])
def test_in_another_layout(tmp_path, iterations):
    last_save(tmp_path, 7, COVERING, iterations)
    source = open_checkpoint(STORAGE, str(tmp_path), 7)
    for name, shape in SHAPES.items():
        tensor = source.weights.tensors[name]
        assert tensor.shape == shape
        for cut in tensor.cuts(tuple((0, length) for length in shape)):
            assert source.weights.locate(name, cut).rank in COVERING


def test_the_next_job_does_not_commit_it_and_keeps_it_until_it_has_saved_itself(tmp_path):
    save(tmp_path, 5)
    last_save(tmp_path, 7, COVERING)
    logged = []
    later = Committer(target_of(tmp_path, 0, WORLD, run_name(2, "0000bbbb")), emit=logged.append)
    assert later.recover() == [] and logged == []
    made = plan(dir_at(tmp_path), KEEP_ALL, ended=EVERY_RUN)
    assert [candidate.step for candidate in made.kept] == [7, 5] and made.orphans == ()


def test_a_single_incomplete_emergency_save_is_a_fresh_start(tmp_path):
    """No save was ever complete there."""
    last_save(tmp_path, 7, LACKING)
    assert choose(tmp_path).is_fresh_start


def test_an_unreadable_record_does_not_count_as_lost(tmp_path):
    last_save(tmp_path, 7, COVERING)
    attempt = scan(dir_at(tmp_path)).candidates[0].records_dir
    with open(os.path.join(attempt, "rank_00003.json"), "r+b") as file:
        file.truncate(100)
    with pytest.raises(NoUsableCheckpointError, match="rank 3 cannot be read"):
        choose(tmp_path)


# ---- checkpoints of mindformers ------------------------------------------------------------------


def foreign(root, step, ranks, fmt="ckpt"):
    """Writes files of some ranks without records, as MindIO TTP does with the built-in."""
    for rank in ranks:
        path = root / f"rank_{rank}" / str(name_of(rank, step, fmt=fmt))
        path.parent.mkdir(parents=True, exist_ok=True)
        pieces = encode(
            fmt,
            {**slices_held(rank, step), **counters(step)},
            {"format": "ms"} if fmt == "safetensors" else {},
        )
        path.write_bytes(b"".join(bytes(piece) for _, piece in pieces))


STRATEGY = Strategy((LAYOUTS,), "strategy")


@pytest.mark.parametrize("fmt, world", [("ckpt", WORLD), ("safetensors", None)])
def test_a_mindformers_checkpoint_is_completed_with_its_strategy(tmp_path, fmt, world):
    foreign(tmp_path, 5, range(WORLD), fmt)
    foreign(tmp_path, 7, COVERING, fmt)
    choice = choose(tmp_path, world, sources=CheckpointSources(lambda root, candidate: STRATEGY))
    check_loaded(choice)
    assert all(shard.scalars["step_num"] == 7 for shard in choice.shards)


@pytest.mark.parametrize(
    "strategy, said",
    [
        (STRATEGY, "by strategy a part of "),
        (None, "without strategy files of that job"),
        (
            Strategy(({"layer.bias": TensorLayout((4, 2), (-1,))},), "poor"),
            "embedding.weight (8, 4) has no layout",
        ),
        (
            Strategy(({name: TensorLayout((4, 2), (-1, -1, -1)) for name in LAYOUTS},), "alien"),
            "dimensions, the strategy has 3",
        ),
        (
            Strategy(
                ({name: TensorLayout((2, 2), LAYOUTS[name].tensor_map) for name in LAYOUTS},),
                "small",
            ),
            "no file of rank 1",
        ),
    ],
)
def test_a_mindformers_checkpoint_without_proof_is_refused(tmp_path, strategy, said):
    foreign(tmp_path, 5, range(WORLD))
    foreign(tmp_path, 7, LACKING if strategy is STRATEGY else COVERING)
    falls_back(tmp_path, said, sources=CheckpointSources(lambda root, candidate: strategy))


@pytest.mark.parametrize("fmt, matrix, cut", [("ckpt", (8, 1), -1), ("safetensors", (2, 4), 1)])
def test_the_strategy_of_another_job_proves_nothing(tmp_path, fmt, matrix, cut):
    """It has as many ranks and covers everything, but its replicas differ between the ranks that
    wrote."""
    cuts = {name: (cut, -1) if len(SHAPES[name]) == 2 else (-1,) for name in SHAPES}
    alien = Strategy(
        ({name: TensorLayout(matrix, cuts[name]) for name in SHAPES},), "another/strategy"
    )
    foreign(tmp_path, 5, range(WORLD), fmt)
    foreign(tmp_path, 7, COVERING, fmt)
    said = "copies of each other by another/strategy; is that the strategy of another job?"
    for ranks in (None, [3]):
        sources = CheckpointSources(lambda root, candidate: alien)
        falls_back(tmp_path, said, ranks=ranks, sources=sources)


def test_the_strategy_folder_beside_is_found_by_the_trainer(tmp_path):
    from mindresume.reshard.strategy_store import StrategyLookup

    foreign(tmp_path / "checkpoint", 7, COVERING)
    strategy_in(tmp_path / "strategy")
    choice = choose(tmp_path / "checkpoint", sources=CheckpointSources(StrategyLookup(STORAGE)))
    assert choice.chosen.missing_ranks == (1, 4, 6, 7)


# ---- the proof itself ----------------------------------------------------------------------------


@st.composite
def jobs(draw):
    """(stage size, stages, {name: (layout, shape)}), and a part of the ranks."""
    matrix = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)))
    size, stages = int(np.prod(matrix)), draw(st.integers(1, 2))
    tables = {}
    for index in range(draw(st.integers(1, 3))):
        axes = draw(st.permutations(range(len(matrix))))
        cuts = tuple(
            axis if draw(st.booleans()) else -1 for axis in axes[: draw(st.integers(1, 2))]
        )
        layout = TensorLayout(matrix, cuts, draw(st.sampled_from([0, -1])))
        shape = tuple(pieces * draw(st.integers(1, 2)) for pieces in layout.counts([0] * len(cuts)))
        tables[f"w{index}"] = layout, shape
    return size, stages, tables, draw(st.sets(st.integers(0, size * stages - 1), min_size=1))


class Records:
    def __init__(self, details):
        self.details = details


@given(jobs())
def test_the_proof_is_that_of_counting_elements(job):
    size, stages, tables, there = job
    world = size * stages

    def details_of(rank):
        stage = rank // size
        rows = {
            f"{stage}.{name}": TensorRecord("float32", layout.local_shape(shape), "", layout, shape)
            for name, (layout, shape) in tables.items()
        }
        return Details({**rows, "global_step": TensorRecord("int32", (1,), "")})

    def lacking():
        for stage in range(stages):
            for layout, shape in tables.values():
                seen = np.zeros(shape, bool)
                for rank in there:
                    if rank // size == stage:
                        view(seen, held(layout, rank % size, shape))[...] = True
                if not seen.all():
                    return True
        return any(not any(rank // size == stage for rank in there) for stage in range(stages))

    files, records = (
        [["file"] if rank in there else [] for rank in range(world)],
        Records(details_of),
    )
    said = missing_slices(files, False, records)
    assert bool(said) is lacking()
    if not said:
        for rank in range(world):
            found = replica_sources(rank, there, world, records)
            stage = rank // size
            assert set(found) == {"global_step", *(f"{stage}.{name}" for name in tables)}
            for name, (layout, shape) in tables.items():
                holder = found[f"{stage}.{name}"][0]
                assert holder in there and holder // size == stage
                assert held(layout, holder % size, shape) == held(layout, rank % size, shape)


def test_shares_of_several_ranks_are_looked_at_one_by_one():
    """With remove_redundancy a slice can be in the file of one rank only, although other ranks have
    it."""
    layout, shape = TensorLayout((2,), (-1,)), (4,)
    row = TensorRecord("float32", (4,), "", layout, shape)
    rows = {0: Details({"a": row}), 1: Details({"a": row, "b": row})}
    records = Records(rows.get)
    assert missing_slices([["f"], ["f"]], True, records) == ""
    assert missing_slices([[], ["f"]], True, records) == ""
    assert replica_sources(0, [1], 2, records)["b"][0] == 1
    rows[1] = Details({"b": row})
    assert replica_sources(0, [1], 2, Records(lambda rank: replace(rows[1]))).keys() == {"b"}
