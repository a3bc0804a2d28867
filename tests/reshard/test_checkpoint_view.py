"""Where the slices of a checkpoint are stored: layouts from records or a strategy, replicas,
counters, and refusals."""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from rank_folders import dir_at, path_of
from reshard.plans import (
    COUNTERS,
    STEP,
    Plan,
    foreign,
    lose,
    newest,
    put,
    random_tensors,
    recorded,
    shard_file,
    transformer,
)

from mindresume.errors import CorruptFileError, LoadError, StrategyError
from mindresume.formats import CheckpointDir
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout, shape_of, whole, within
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.range_reader import view
from mindresume.reshard.step_view import view_of_rank_folders
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import array_checksum, read_tensor

LITTLE = {name: spec for name, spec in transformer(layers=2).items() if not name.startswith("a")}
TENSORS = random_tensors(LITTLE)


def plan_of(text, model=LITTLE):
    return Plan.parse(text, model)


def weights_of(root, candidate, strategy=None):
    return view_of_rank_folders(dir_at(root), candidate, strategy)


def content(weights, name):
    """Returns the global tensor, assembled from its slices."""
    tensor = weights.tensors[name]
    array = np.full(
        tensor.shape, 77, TENSORS[name].dtype if name in TENSORS else COUNTERS[name].dtype
    )
    for cut in tensor.cuts(whole(tensor.shape)):
        place = weights.locate(name, cut)
        with open(place.path, "rb") as file:
            found = read_tensor(file, place.entry)
        assert found.shape == shape_of(cut.stored) and place.rank - tensor.first in cut.holders
        assert place.checksum in (None, array_checksum(found))
        view(array, cut.part)[...] = view(found, within(cut.part, cut.stored))
    return array


def check_all(weights, tensors=TENSORS, counters=COUNTERS):
    assert weights.tensors.keys() == {*tensors, *counters}
    for name, array in {**tensors, **counters}.items():
        tensor = weights.tensors[name]
        assert (tensor.dtype, tensor.shape) == (array.dtype.name, array.shape)
        assert content(weights, name).tobytes() == array.tobytes(), name


# ---- counters, and tensors without a layout ------------------------------------------------------


@pytest.mark.parametrize("layouts", [False, True])
def test_counters_and_copies_without_layout_when_the_file_of_rank_0_is_lost(tmp_path, layouts):
    plan = plan_of("dp2")
    candidate = recorded(tmp_path, plan, TENSORS, layouts=layouts)
    lose(tmp_path, candidate, [0])
    weights = weights_of(tmp_path, candidate)
    check_all(weights)
    # without layouts the records prove that both ranks hold the same
    assert layouts or not any(tensor.layout for tensor in weights.tensors.values())


def test_a_number_that_only_the_last_stage_has(tmp_path):
    plan = plan_of("tp2pp2")
    for rank in range(4):
        extra = {"aux_loss": np.array([0.5], np.float32)} if rank > 1 else {}
        put(
            path_of(tmp_path, STEP, rank),
            {**shard_file(plan, TENSORS, rank), **extra},
            {"format": "ms"},
        )
    weights = weights_of(tmp_path, newest(tmp_path), plan.strategy())
    tensor = weights.tensors["aux_loss"]
    assert weights.locate("aux_loss", tensor.cuts(((0, 1),))[0]).rank == 2


@pytest.mark.parametrize("text", ["tp2", "dp2opt2", "pp2"])
def test_ranks_that_differ_and_have_no_layouts_are_refused(tmp_path, text):
    plan = plan_of(text)
    with pytest.raises(
        StrategyError,
        match=r"tensors have no layout: .* no strategy is given \(src_strategy.*, --from\)",
    ):
        weights_of(tmp_path, recorded(tmp_path, plan, TENSORS, layouts=False))


def test_a_tensor_that_the_strategy_does_not_name_is_named(tmp_path):
    plan = plan_of("tp2")
    short = {
        name: layout
        for name, layout in plan.stages[0].items()
        if name not in ("head.weight", "layers.1.qkv.weight")
    }
    with pytest.raises(StrategyError, match="2 tensors have no layout: ") as found:
        weights_of(tmp_path, foreign(tmp_path, plan, TENSORS), Strategy((short,), "/job/strategy"))
    for part in (
        "head.weight (8, 8)",
        "layers.1.qkv.weight (12, 8)",
        "/job/strategy",
        str(tmp_path),
        f"step {STEP}",
    ):
        assert part in str(found.value)


def test_a_strategy_completes_records_without_layouts(tmp_path):
    plan = plan_of("tp2")
    check_all(
        weights_of(tmp_path, recorded(tmp_path, plan, TENSORS, layouts=False), plan.strategy())
    )


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", ["dp4", "dp2tp2opt2", "tp2pp2", "dp2tp2axes10", "dp2tp2opt-1"])
def test_a_strategy_that_contradicts_the_records(tmp_path, wanted):
    candidate = recorded(tmp_path, plan_of("tp4"), TENSORS)
    with pytest.raises(
        StrategyError, match=r"would hold another part of \(.* Leave src_.* \(--from\) away"
    ) as found:
        weights_of(tmp_path, candidate, plan_of(wanted).strategy())
    assert str(found.value).partition(":")[0] in TENSORS


def test_an_equivalent_strategy_is_accepted(tmp_path):
    candidate = recorded(tmp_path, plan_of("tp4"), TENSORS)
    other = {
        name: TensorLayout((2, 2), tuple((1, 0) if axis == 0 else -1 for axis in layout.tensor_map))
        for name, layout in plan_of("tp4").stages[0].items()
    }
    check_all(weights_of(tmp_path, candidate, Strategy((other,))))


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_a_file_of_another_job(tmp_path, fmt):
    """The file is of the same model cut differently, of another model, or of another dtype."""
    plan = plan_of("tp4")
    candidate = foreign(tmp_path, plan, TENSORS, fmt)
    odd = {
        1: shard_file(plan_of("dp4"), TENSORS, 1),
        3: {**shard_file(plan, TENSORS, 3), "head.weight": np.ones((4, 8), np.float16)},
    }
    for rank, arrays in odd.items():
        put(tmp_path / candidate.files[rank][0].path, arrays, {})
    weights = weights_of(tmp_path, candidate, plan.strategy())
    for rank in range(4):
        (cut,) = weights.tensors["head.weight"].cuts(((4 * rank, 4 * rank + 1), (0, 8)))
        if rank not in odd:
            assert weights.locate("head.weight", cut).rank == rank
            continue
        with pytest.raises(
            CorruptFileError,
            match=f"rank {rank} holds head.weight as .* the file is of another job",
        ) as found:
            weights.locate("head.weight", cut)
        assert (
            found.value.path == str(tmp_path / candidate.files[rank][0].path)
            and found.value.tensor == "head.weight"
        )
        assert f"expected float32 of shape (4, 8), a part of {LITTLE['head.weight'].shape}" in str(
            found.value
        )


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [foreign, recorded])
def test_lost_tensors_of_a_deduplicated_checkpoint_are_missed(tmp_path, write):
    plan = plan_of("dp2")
    candidate = write(tmp_path, plan, TENSORS, dedup=True)
    gone = plan.keeps(1)
    assert gone
    lose(tmp_path, candidate, [1])
    try:
        weights = weights_of(tmp_path, candidate, plan.strategy() if write is foreign else None)
    except LoadError as error:
        assert any(name in str(error) for name in gone)
    else:
        assert gone <= weights.tensors.keys()
        for name in gone:
            with pytest.raises(LoadError, match="is nowhere"):
                content(weights, name)


def test_a_scan_does_not_count_ranks_whose_files_are_lost(tmp_path):
    """The number of ranks is unknown for files of mindformers: the candidate has as many ranks as
    have a file."""
    plan = plan_of("dp2tp2")
    lose(tmp_path, foreign(tmp_path, plan, TENSORS), [3])
    candidate = newest(tmp_path)
    assert candidate.world_size == 3
    with pytest.raises(StrategyError, match="a strategy of 4 ranks .* is of 3"):
        weights_of(tmp_path, candidate, plan.strategy())
    check_all(weights_of(tmp_path, replace(candidate, world_size=4), plan.strategy()))


# ---- costs ---------------------------------------------------------------------------------------


class Counting(PosixStorage):
    def __init__(self):
        self.opened = Counter()

    def open(self, path):
        self.opened[os.path.basename(path)] += 1
        return super().open(path)


@pytest.mark.parametrize("write", [foreign, recorded])
def test_one_header_and_one_record_per_stage_are_read(tmp_path, write):
    plan, storage = plan_of("dp2tp2pp2"), Counting()
    candidate = write(tmp_path, plan, TENSORS)
    view_of_rank_folders(CheckpointDir(storage, str(tmp_path)), candidate, plan.strategy())
    assert sum(storage.opened.values()) == 2 * (1 if write is foreign else 2), storage.opened


def test_each_header_and_record_is_read_once(tmp_path):
    """By the view, by the verification of all ranks, and by a load."""
    storage = Counting()
    recorded(tmp_path, plan_of("tp4"), TENSORS)
    weights = open_checkpoint(storage, str(tmp_path)).weights
    for name, tensor in weights.tensors.items():
        for cut in tensor.cuts(whole(tensor.shape)):
            weights.locate(name, cut)
    assert set(storage.opened.values()) == {1}, storage.opened
