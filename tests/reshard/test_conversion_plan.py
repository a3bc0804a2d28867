"""Contents of the new files: required and optional names, regions compared with numpy, parts of
consolidated weights."""

import re

import pytest
from rank_folders import STORAGE
from reshard.plans import COUNTERS, MODEL, Plan, Spec

from mindresume.errors import StrategyError
from mindresume.formats.consolidated import HYPER, MINDSPORE
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import TensorLayout
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor
from mindresume.reshard.conversion_plan import (
    METADATA,
    consolidated_files,
    fitted,
    holdings,
    rank_files,
)


def weights_of(model, counters=COUNTERS):
    """Returns weights with these tensors, all of them cut; no file exists."""
    tensors = {
        name: Tensor(name, spec.dtype, spec.shape, TensorLayout((1,), (-1,) * len(spec.shape)))
        for name, spec in model.items()
    }
    tensors |= {
        name: Tensor(name, str(array.dtype), array.shape) for name, array in counters.items()
    }
    return CheckpointView(STORAGE, "the source", tensors)


def strategy_of(model, text="tp2pp2"):
    return Plan.parse(text, model).strategy()


def without(model, *prefixes):
    return {name: spec for name, spec in model.items() if not name.startswith(prefixes)}


# ---- holdings ------------------------------------------------------------------------------------


def test_counters_are_recognized():
    assert (
        Tensor("step_num", "int64", ()).is_counter
        and Tensor("global_step", "int32", (1,)).is_counter
    )
    assert not Tensor("step_num", "int64", (2,)).is_counter
    # the strategy names it
    assert not Tensor("scale", "float32", (1,), TensorLayout((1,), (-1,))).is_counter


# ---- names ---------------------------------------------------------------------------------------


def test_tensors_without_a_stage_are_named():
    named = without(MODEL, "layers.3.", "head")
    lost = [name for name in MODEL if name not in named]
    with pytest.raises(
        StrategyError,
        match=rf"the strategy of the test: {len(lost)} tensors of the source are in no stage of "
        rf"the target \(2 stages of 2 ranks\), for example (\S+), (\S+), (\S+) and "
        rf"{len(lost) - 3} more. Is it the strategy of the same model, with all its "
        rf"stages\?",
    ) as found:
        holdings(weights_of(MODEL), strategy_of(named))
    assert found.match(lost[0])


@pytest.mark.parametrize(
    "families",
    [
        ("adam_m.",),
        ("adam_v.",),
        ("accu_grads.",),
        ("adam_m.", "adam_v."),
        ("adam_", "accu_grads."),
    ],
)
def test_a_family_may_be_missing_as_a_whole(families):
    weights, strategy = weights_of(without(MODEL, *families)), strategy_of(MODEL)
    for held in holdings(weights, strategy):
        assert not any(name.startswith(families) for name in held)


@pytest.mark.parametrize(
    "name", ["adam_m.layers.1.qkv.weight", "layers.0.up.bias", "embedding.weight", "norm.weight"]
)
def test_a_single_missing_tensor_is_refused(name):
    with pytest.raises(
        StrategyError,
        match=rf"target needs 1 tensors that the source does not have, for example {name}",
    ):
        holdings(
            weights_of({other: spec for other, spec in MODEL.items() if other != name}),
            strategy_of(MODEL),
        )


# ---- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, layout, message",
    [
        (
            (6, 4),
            TensorLayout((4,), (0, -1)),
            r"dimension 0 of shape \(6, 4\) has 6 elements and does not divide into 4",
        ),
        (
            (4, 6),
            TensorLayout((4,), (-1, 0)),
            r"dimension 1 of shape \(4, 6\) has 6 elements and does not divide into 4",
        ),
        (
            (2, 4),
            TensorLayout((4,), (-1, -1), 4),
            r"dimension 0 of shape \(2, 4\) has 2 elements and does not divide into 4",
        ),
    ],
)
def test_a_shape_that_does_not_divide_is_named(shape, layout, message):
    weights, strategy = (
        weights_of({"w": Spec(shape, 0, "first")}),
        Strategy(({"w": layout},), "plan.ckpt"),
    )
    with pytest.raises(StrategyError, match=rf"plan.ckpt: w: {message}"):
        holdings(weights, strategy)


def test_another_number_of_dimensions_is_named():
    weights = weights_of({"w": Spec((8, 4), 0, "first")})
    with pytest.raises(
        StrategyError, match="plan.ckpt: parameter w has 2 dimensions, the strategy has 3"
    ):
        fitted(Strategy(({"w": TensorLayout((2,), (0, -1, -1))},), "plan.ckpt"), weights)


@pytest.mark.parametrize("dtype", ["complex64", "str"])
def test_a_dtype_that_the_format_cannot_store_is_an_error(dtype):
    weights = weights_of({"w": Spec((4,), 0, "first", dtype)}, {})
    with pytest.raises((ValueError, KeyError)):
        rank_files(weights, None, ["0"], "safetensors")


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_each_rank_gets_one_file(fmt):
    plan = Plan.parse("dp2tp2pp2opt2")
    files = rank_files(
        weights_of(MODEL),
        plan.strategy(),
        [f"rank_{rank}/net.{fmt}" for rank in range(8)],
        fmt,
        {"a": "b"},
    )
    assert [file.path for file in files] == [f"rank_{rank}/net.{fmt}" for rank in range(8)]
    assert {file.format for file in files} == {fmt} and all(
        file.metadata == {"a": "b"} for file in files
    )
    assert rank_files(weights_of(MODEL), None, ["0"], fmt)[0].metadata == METADATA


# ---- consolidated weights ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drop, gone",
    [
        ((), "never"),
        (("adam_*",), "adam_"),
        (("adam_m.*", "*.bias"), r"adam_m\.|.*\.bias$"),
        (("ADAM_*",), "never"),
        (("embedding",), "never"),
        (("layers.?.norm*",), r"layers\.\d\.norm"),
    ],
)
def test_patterns_of_names_are_left_out(drop, gone):
    files, _ = consolidated_files(weights_of(MODEL), MINDSPORE, drop=drop)
    assert {name for file in files for name in file.holds} == {
        name for name in {**MODEL, **COUNTERS} if not re.match(gone, name)
    }


def test_counters_that_are_dropped_leave_no_file_of_them():
    files, _ = consolidated_files(
        weights_of(without(MODEL, "layers.1.none")), MINDSPORE, drop=tuple(COUNTERS)
    )
    assert HYPER not in [file.path for file in files]
