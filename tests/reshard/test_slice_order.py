"""A tensor whose elements are ordered within each piece is never cut in another way, whoever reads
it."""

import os

import iteration_folders
import pytest
from reshard.plans import Plan, Spec, random_tensors, recorded

import mindresume
from mindresume.errors import ConfigError
from mindresume.formats.huggingface import ATTENTION_KEY, MLP_KEY
from mindresume.model.layout import TensorLayout, fold_optimizer_shards
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, check_order, computed_slices
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.region_load import LoadTarget, wanted_regions
from mindresume.storage.posix import PosixStorage

QKV, FC1, FC2, PROJ = (
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
)
MODEL = {
    QKV: Spec((24, 8), 0, 0),
    f"adam_m.{QKV}": Spec((24, 8), 0, 0),
    FC1: Spec((32, 8), 0, 0),
    FC2: Spec((8, 16), 1, 0),
}
CONTIGUOUS = {ATTENTION_KEY: True, MLP_KEY: False}
DEFAULT = {ATTENTION_KEY: False, MLP_KEY: True}


def saved(folder, plan="dp1tp2", arrangement=CONTIGUOUS):
    recorded(folder, Plan.parse(plan, MODEL), random_tensors(MODEL), arrangement=arrangement)
    return folder


def regions(source, plan, rank=0):
    """Returns what a job of ``plan`` reads."""
    weights = open_checkpoint(PosixStorage(), str(source)).weights
    layouts = {
        name: (layout, MODEL[name].shape)
        for name, layout in Plan.parse(plan, MODEL).layouts(rank).items()
    }
    return wanted_regions(
        weights,
        LoadTarget({name: (spec.shape, spec.dtype) for name, spec in MODEL.items()}, layouts),
        rank,
    )


@pytest.mark.parametrize("change", ["tp=1", "tp=4", "dp=2,tp=1"])
def test_a_conversion_to_another_tensor_parallelism_is_refused(tmp_path, change):
    source = saved(tmp_path / "source")
    for more in ({}, {"format": "iteration"}):
        with pytest.raises(ConfigError, match="linear_qkv.*cut into 2 there"):
            mindresume.convert(source, tmp_path / "new", to=change, **more)
    assert os.listdir(tmp_path) == ["source"]


def test_merged_weights_are_refused_unless_nothing_was_cut(tmp_path):
    with pytest.raises(ConfigError, match="cannot be cut into 1"):
        mindresume.merge(saved(tmp_path / "source"), tmp_path / "merged")
    mindresume.merge(saved(tmp_path / "one", "dp2tp1"), tmp_path / "merged")
    assert regions(tmp_path / "merged", "dp2tp1")
    with pytest.raises(ConfigError, match="cut into 1 there"):
        regions(tmp_path / "merged", "dp1tp2")


def test_a_job_with_another_tensor_parallelism_is_refused(tmp_path):
    source = saved(tmp_path / "source")
    for plan in ("dp1tp2", "dp2tp2", "dp2tp2opt2"):
        assert set(regions(source, plan)) == set(MODEL)
    for plan in ("dp1tp1", "dp1tp4"):
        with pytest.raises(ConfigError, match=f"keep the tensor parallelism|{ATTENTION_KEY}"):
            regions(source, plan)


@pytest.mark.parametrize("arrangement", [{}, DEFAULT])
def test_the_default_order_and_an_unknown_one_are_converted(tmp_path, arrangement):
    source = saved(tmp_path / "source", arrangement=arrangement)
    mindresume.convert(source, tmp_path / "new", to="tp=4")
    mindresume.merge(source, tmp_path / "merged")
    assert (
        set(regions(tmp_path / "new", "dp1tp1"))
        == set(MODEL)
        == set(regions(tmp_path / "merged", "dp1tp4"))
    )


def view(arrangement, layout):
    names = (QKV, FC1, f"adam_v.{QKV}", FC2)
    tensors = {name: Tensor(name, "float32", (24, 8), layout) for name in names[:-1]}
    behind = Plan.parse("dp1tp2" if computed_slices(layout) == 2 else "dp2tp1", MODEL).layouts(0)[
        names[-1]
    ]
    tensors[names[-1]] = Tensor(names[-1], "float32", (8, 16), behind)
    return CheckpointView(PosixStorage(), "it", tensors, arrangement=arrangement)


def test_each_tensor_has_its_key():
    one, two = (
        Plan.parse("dp2tp1", MODEL).layouts(0)[QKV],
        Plan.parse("dp1tp2", MODEL).layouts(0)[QKV],
    )
    check_order(view({MLP_KEY: False}, one), {QKV: two})
    check_order(view({ATTENTION_KEY: True}, one), {FC1: two})
    check_order(view(CONTIGUOUS, one), {FC2: two})
    for name in (QKV, FC1, f"adam_v.{QKV}"):
        with pytest.raises(ConfigError):
            check_order(view(CONTIGUOUS, one), {name: two})
        check_order(view(CONTIGUOUS, two), {name: two})


BEHIND = {
    **MODEL,
    PROJ: Spec((8, 24), 1, 0),
    f"adam_m.{PROJ}": Spec((8, 24), 1, 0),
    f"adam_m.{FC1}": Spec((32, 8), 0, 0),
    f"adam_m.{FC2}": Spec((8, 16), 1, 0),
}


def folded(plan, leave_out=(), split=False):
    """Returns a checkpoint of this plan as a ``metadata.json`` of mindformers describes it;
    ``split``: as records of mindresume 0.1.0 did."""
    layouts = {
        name: fold_optimizer_shards(layout)
        for name, layout in Plan.parse(plan, BEHIND).layouts(0).items()
    }
    tensors = {
        name: Tensor(name, "float32", BEHIND[name].shape, layout)
        for name, layout in layouts.items()
        if name not in leave_out
    }
    return CheckpointView(PosixStorage(), "it", tensors, arrangement=CONTIGUOUS, split=split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", [QKV, FC1, f"adam_m.{QKV}", f"adam_m.{FC1}"])
@pytest.mark.parametrize(
    "stored, right, wrong",
    [
        ("dp2tp1opt2", ["dp2tp1opt2", "dp2tp1", "dp1tp1", "dp4tp1opt2"], ["dp1tp2", "dp2tp2opt2"]),
        ("dp1tp2", ["dp1tp2", "dp2tp2opt2", "dp2tp2"], ["dp2tp1opt2", "dp1tp1", "dp1tp4"]),
        (
            "dp2tp2opt2",
            ["dp2tp2opt2", "dp1tp2", "dp4tp2"],
            ["dp1tp4", "dp4tp1opt4", "dp2tp1opt2", "dp1tp1"],
        ),
        ("dp2tp1", ["dp2tp1opt2", "dp1tp1"], ["dp1tp2"]),
    ],
)
def test_the_tensor_behind_tells_optimizer_shards_from_tensor_parallelism(
    stored, right, wrong, name, split
):
    """dp2 with optimizer shards, saved by mindformers alone, and tp2 give each rank the same rows,
    and are another function."""
    weights = folded(stored, split=split)
    for plan in right:
        check_order(weights, {name: Plan.parse(plan, BEHIND).layouts(0)[name]})
    for plan in wrong:
        with pytest.raises(ConfigError, match="keep the tensor parallelism of that job"):
            check_order(weights, {name: Plan.parse(plan, BEHIND).layouts(0)[name]})


def test_a_checkpoint_of_mindformers_alone(tmp_path):
    """Of four ranks, data parallel 2 with optimizer shards, tensor parallel 2."""
    weights = open_checkpoint(PosixStorage(), str(iteration_folders.foreign(tmp_path))).weights
    weights.arrangement = CONTIGUOUS
    assert not weights.split
    for name in (name for name in weights.tensors if QKV in name or FC1 in name):
        check_order(weights, {name: TensorLayout((2, 2), (0, -1), -1)})
        check_order(weights, {name: TensorLayout((1, 2), (0, -1))})
        for other in (TensorLayout((1, 4), (0, -1)), TensorLayout((4, 1), (0, -1), -1), None):
            with pytest.raises(ConfigError, match="cut into 2 there"):
                check_order(weights, {name: other})


def test_what_no_tensor_tells_is_not_guessed():
    for plan in ("dp2tp1opt2", "dp1tp2"):
        for wanted in ("dp2tp1opt2", "dp1tp2", "dp1tp1"):
            with pytest.raises(
                ConfigError, match="metadata.json does not tell, and no linear_proj beside it does"
            ):
                check_order(
                    folded(plan, leave_out=[PROJ]),
                    {QKV: Plan.parse(wanted, BEHIND).layouts(0)[QKV]},
                )
    check_order(folded("dp2tp1", leave_out=[PROJ]), {QKV: None})  # nothing is cut


def test_no_plan_is_derived_from_metadata_json_alone(tmp_path):
    """It does not tell which cuts are those of optimizer shards: norms would be cut, too."""
    iteration_folders.foreign(tmp_path / "source", "mf190_20_dp2tp2opt")
    with pytest.raises(ConfigError, match="do not tell shards over data parallelism"):
        mindresume.convert(tmp_path / "source", tmp_path / "new", to="tp=4")
    mindresume.convert(tmp_path / "source", tmp_path / "new", to="dp=4,tp=1")
    assert os.path.isdir(tmp_path / "new")
