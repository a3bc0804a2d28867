"""One rank reads its regions of a checkpoint of any layout and no other byte, verified where a
checksum is known."""

import os

import ml_dtypes
import numpy as np
import pytest
from rank_folders import STORAGE, dir_at, flip_bit
from reshard.plans import COUNTERS, MODEL, Plan, foreign, put, random_tensors, recorded

from mindresume.errors import CorruptFileError, LoadError
from mindresume.formats.consolidated import read_consolidated
from mindresume.model.layout import TensorLayout, elements, whole
from mindresume.reshard import region_load
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, view_of_consolidated
from mindresume.reshard.range_reader import Traffic
from mindresume.reshard.region_load import LoadTarget, check_tensors, read_regions, wanted_regions
from mindresume.reshard.step_view import view_of_rank_folders
from mindresume.tensor_files import read_header

TENSORS = random_tensors(MODEL)
EVERYTHING = {**TENSORS, **COUNTERS}


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """{plan and kind: (root, candidate)}, each written once."""
    known = {}

    def root(text, write):
        if (text, write) not in known:
            folder = tmp_path_factory.mktemp("source")
            known[text, write] = folder, write(folder, Plan.parse(text), TENSORS)
        return known[text, write]

    return root


def weights_of(roots, text, write=recorded):
    root, candidate = roots(text, write)
    return view_of_rank_folders(
        dir_at(root), candidate, Plan.parse(text).strategy() if write is foreign else None
    )


def parameters_to_load(plan, rank, model=MODEL):
    """Returns the parameters of the network on the rank, and their layouts."""
    shard = plan.shard(random_tensors(model), rank)
    wanted = {
        name: (array.shape, str(array.dtype)) for name, array in {**shard, **COUNTERS}.items()
    }
    return LoadTarget(
        wanted, {name: (layout, model[name].shape) for name, layout in plan.layouts(rank).items()}
    )


# ---- wanted_regions ------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["tp4", "dp2tp2pp2opt2"])
@pytest.mark.parametrize("target", ["dp1", "dp2tp2pp2opt2", "dp4opt-1", "tp8", "dp2tp2axes10"])
def test_the_regions_of_every_rank(roots, source, target):
    weights, plan = weights_of(roots, source), Plan.parse(target)
    for rank in range(plan.world_size):
        found = wanted_regions(weights, parameters_to_load(plan, rank), rank)
        expected = plan.regions(rank)
        assert set(found) == set(expected) | set(COUNTERS)
        assert all(found[name] == region for name, region in expected.items() if elements(region))
        assert all(found[name] == whole(array.shape) for name, array in COUNTERS.items())


def test_everything_that_does_not_fit_is_named(roots):
    weights = weights_of(roots, "tp4")
    wanted = {name: (array.shape, str(array.dtype)) for name, array in TENSORS.items()}
    wanted |= {
        "layers.9.weight": ((4, 4), "float32"),
        "embedding.weight": ((16, 8), "float32"),
        "norm.weight": ((9,), "float32"),
    }
    with pytest.raises(LoadError) as found:
        wanted_regions(weights, LoadTarget(wanted, {}), 0)
    assert str(found.value) == (
        f"the checkpoint {weights.name} does not fit the network (3 tensors): embedding.weight is "
        "bfloat16 in the checkpoint, float32 in the network; norm.weight is (8,) in the "
        "checkpoint, (9,) in the network; layers.9.weight is not in the checkpoint. All shapes are "
        "those of whole tensors. Was the model configuration changed?"
    )


def test_whole_shapes_are_compared(roots):
    """The slice of this rank has the right shape, the global tensor has not."""
    layout = TensorLayout((2,), (0, -1))
    with pytest.raises(
        LoadError, match=r"embedding.weight is \(16, 8\) in the checkpoint, \(8, 8\) in the network"
    ):
        wanted_regions(
            weights_of(roots, "tp4"),
            LoadTarget(
                {"embedding.weight": ((4, 8), "bfloat16")}, {"embedding.weight": (layout, (8, 8))}
            ),
            0,
        )


def test_transient_state_of_a_step_may_be_missing(roots):
    weights = weights_of(roots, "tp4")
    wanted = {"accu_grads.new.weight": ((4,), "float32"), "norm.weight": ((8,), "float32")}
    assert set(wanted_regions(weights, LoadTarget(wanted, {}), 0)) == {"norm.weight"}
    wanted = {"hidden_states_dropout.seed": ((), "int64"), "norm.weight": ((8,), "float32")}
    assert set(wanted_regions(weights, LoadTarget(wanted, {}), 0)) == {"norm.weight"}
    wanted = {"adam_m.new": ((4,), "float32")}
    assert wanted_regions(weights, LoadTarget(wanted, {}, {"adam_m.new"}), 0) == {}


@pytest.mark.parametrize("here, there", [((), (1,)), ((1,), ()), ((1, 1), ())])
def test_a_number_may_have_other_dimensions(here, there):
    weights = CheckpointView(STORAGE, "w", {"global_step": Tensor("global_step", "int32", here)})
    assert wanted_regions(weights, LoadTarget({"global_step": (there, "int32")}, {}), 0) == {
        "global_step": whole(here)
    }
    with pytest.raises(
        LoadError, match="global_step is int32 in the checkpoint, int64 in the network"
    ):
        wanted_regions(weights, LoadTarget({"global_step": (there, "int64")}, {}), 0)
    with pytest.raises(
        LoadError, match=r"global_step is .* in the checkpoint, \(2,\) in the network"
    ):
        wanted_regions(weights, LoadTarget({"global_step": ((2,), "int32")}, {}), 0)


FITTING = {
    "w": np.zeros((8, 4), np.float32),
    "bias": np.zeros(4, ml_dtypes.bfloat16),
    "global_step": np.zeros(1, np.int32),
}
SHAPES = {"w": ((8, 4), "float32"), "bias": ((4,), "bfloat16"), "global_step": ((1,), "int32")}


def misfits(arrays, **more):
    return LoadTarget({**SHAPES, **more}, {}).misfits(arrays)


def test_the_state_of_a_dropout_of_1_8_0_may_be_missing_or_left_over():
    """Only the network of mindformers 1.8.0 has it. And 1.8.0 has no indexer_loss."""
    state = {
        "layers.0.hidden_states_dropout.seed": ((), "int64"),
        "layers.0.hidden_states_dropout.offset": ((), "int64"),
    }
    assert (
        misfits(FITTING, **state)
        == misfits({**FITTING, **{name: np.array(3) for name in state}})
        == ""
    )
    assert (
        misfits({**FITTING, "lm_loss": np.zeros(1, np.float32)}, indexer_loss=((1,), "float32"))
        == ""
    )


# ---- a missing optimizer -------------------------------------------------------------------------


def small_weights(**shapes):
    return CheckpointView(
        STORAGE,
        "source",
        {
            name.replace("__", "."): Tensor(name.replace("__", "."), "float32", shape)
            for name, shape in shapes.items()
        },
    )


def small_wanted(**shapes):
    return {name.replace("__", "."): (shape, "float32") for name, shape in shapes.items()}


@pytest.mark.parametrize("others", [{}, {"other_stage__v": (2,)}, {"scale_sense": ()}])
def test_no_optimizer_state_names_the_key(others):
    """A pipeline stage holds some of the parameters of the model only."""
    with pytest.raises(LoadError, match="source holds no optimizer state.*set no_load_optim: True"):
        wanted_regions(
            small_weights(w=(3,), **others),
            LoadTarget(small_wanted(w=(3,), adam_m__w=(3,)), {}, (), {"w"}),
            0,
        )


@pytest.mark.parametrize(
    "shapes, message",
    [
        ({"w": (3,), "v": (2,), "adam_m__w": (3,)}, "v is not in the checkpoint"),
        ({"w": (4,), "adam_m__w": (3,)}, r"w is \(3,\) in the checkpoint, \(4,\) in the network"),
        ({"w": (3,), "adam_m__w": (3,), "adam_v__w": (3,)}, "adam_v.w is not in the checkpoint"),
        # the state of another optimizer
        ({"w": (3,), "muon_m__w": (3,)}, "muon_m.w is not in the checkpoint"),
    ],
)
def test_tensors_that_do_not_fit_are_named(shapes, message):
    with pytest.raises(LoadError, match=message):
        wanted_regions(
            small_weights(w=(3,), adam_m__w=(3,)),
            LoadTarget(small_wanted(**shapes), {}, (), {"w", "v"}),
            0,
        )


def test_what_may_miss_is_left_out():
    found = wanted_regions(
        small_weights(w=(3,)),
        LoadTarget(small_wanted(w=(3,), adam_m__w=(3,)), {}, {"adam_m.w"}, {"w"}),
        0,
    )
    assert set(found) == {"w"}


# ---- read_regions --------------------------------------------------------------------------------


def damaged(tmp_path, plan, name, rank, fmt="safetensors", tensors=TENSORS):
    """Returns a recorded checkpoint with one bit of one tensor flipped in the file of a rank."""
    candidate = recorded(tmp_path, plan, tensors, fmt)
    path = tmp_path / candidate.files[rank][0].path
    with open(path, "rb") as file:
        ranges = read_header(file, str(path)).tensors[name].ranges
    flip_bit(path, ranges[-1][0] + ranges[-1][1] - 1)
    return view_of_rank_folders(dir_at(tmp_path), candidate), str(path)


def test_a_region_of_a_copy_is_taken_from_the_first_rank_that_has_it(tmp_path):
    plan = Plan.parse("dp2tp2")
    weights, _ = damaged(tmp_path, plan, "embedding.weight", 3)  # a copy of that of rank 1
    found = read_regions(weights, {"embedding.weight": whole((16, 8))})
    assert found["embedding.weight"].tobytes() == TENSORS["embedding.weight"].tobytes()
    os.remove(weights.files[1][0])
    weights.headers.clear()
    with pytest.raises(
        CorruptFileError, match="embedding.weight of rank 3 is not what was written"
    ):
        read_regions(weights, {"embedding.weight": whole((16, 8))})


def test_arrays_are_writable_and_independent(roots):
    weights = weights_of(roots, "tp4")
    regions = {name: whole(weights.tensors[name].shape) for name in TENSORS}
    first, second = read_regions(weights, regions), read_regions(weights, regions)
    for array in first.values():
        array.view(np.uint8)[...] = 0 if array.ndim and array.size else ()
    assert all(second[name].tobytes() == TENSORS[name].tobytes() for name in TENSORS)


# ---- check_tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
@pytest.mark.parametrize(
    "name, rank, tile",
    [
        ("layers.0.qkv.weight", 0, 64),
        ("layers.2.proj.weight", 3, 4096),
        ("norm.weight", 0, 1 << 22),
        ("step_num", 0, 64),
        ("layers.2.experts.weight", 1, 64),
        ("layers.1.mask", 2, 16),
    ],
)
def test_a_flipped_bit_is_found(tmp_path, monkeypatch, fmt, name, rank, tile):
    monkeypatch.setattr(region_load, "TILE", tile)
    weights, path = damaged(tmp_path, Plan.parse("tp4"), name, rank, fmt)
    with pytest.raises(
        CorruptFileError, match=rf"{name} of rank {rank} is not what was written"
    ) as found:
        check_tensors(weights, weights.tensors, 3)
    assert found.value.path == path
    check_tensors(weights, [other for other in weights.tensors if other != name], 3)


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("tile", [64, 1 << 22])
def test_every_byte_is_compared_once(roots, monkeypatch, workers, tile):
    monkeypatch.setattr(region_load, "TILE", tile)
    for text in ("tp4", "dp2tp2pp2opt2", "dp2tp2axes10"):
        traffic = Traffic()
        weights = weights_of(roots, text)
        check_tensors(weights, weights.tensors, workers, traffic)
        assert (
            traffic.read == traffic.verified == sum(array.nbytes for array in EVERYTHING.values())
        )


def test_a_tensor_larger_than_a_tile(tmp_path, monkeypatch):
    tensors = {"w": np.arange(1 << 16, dtype=np.float32).reshape(64, 1024)}
    monkeypatch.setattr(region_load, "TILE", 4096)
    weights = view_of_consolidated(
        STORAGE, read_consolidated(STORAGE, str(put(tmp_path / "w.safetensors", tensors)))
    )
    found = read_regions(weights, {"w": ((3, 61), (5, 1019))})
    assert found["w"].tobytes() == tensors["w"][3:61, 5:1019].tobytes()
