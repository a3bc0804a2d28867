import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindresume.errors import ConfigError
from mindresume.formats.parallel_plan import ParallelPlan, is_plan, strategy_from_plan
from mindresume.model.layout import MAX_RANKS, TensorLayout, held
from mindresume.reshard.range_reader import view

few = settings(max_examples=50)
ROWS, COLUMNS, WHOLE, PLAIN = (
    TensorLayout((2, 2), cuts) for cuts in ((0, -1), (-1, 0), (-1, -1), (-1,))
)


def model(layers=2, hidden=8, vocabulary=16):
    """{name: (shape, dimension that tensor parallelism cuts, the end it is at without a layer
    number)}, with Adam's moments."""
    weights = {
        "embedding.word_embeddings.weight": ((vocabulary, hidden), 0, "first"),
        "final_norm.weight": ((hidden,), None, "last"),
        "output_layer.weight": ((vocabulary, hidden), 0, "last"),
    }
    for i in range(layers):
        for name, shape, cut in (
            ("qkv.weight", (3 * hidden, hidden), 0),
            ("proj.weight", (hidden, 2 * hidden), 1),
            ("norm.weight", (hidden,), None),
            ("up.bias", (2 * hidden,), 0),
            ("odd.weight", (3, hidden), None),
        ):
            weights[f"decoder.layers.{i}.{name}"] = shape, cut, None
    return {
        prefix + name: row for prefix in ("", "adam_m.", "adam_v.") for name, row in weights.items()
    }


def source(tensors, axis=0, matrix=(2, 2)):
    """Returns the layouts of a job of one stage."""
    return {
        name: (
            shape,
            TensorLayout(matrix, [axis if dim == cut else -1 for dim in range(len(shape))]),
            (0,),
        )
        for name, (shape, cut, _) in tensors.items()
    }


# ---- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("dp=2,tp=4,pp=2,opt=2", ParallelPlan(2, 4, 2, 2)),
        ("tp=8", ParallelPlan(tp=8)),
        ("mp=8,dp=2", ParallelPlan(2, 8)),
        ("opt=all,dp=4", ParallelPlan(dp=4, opt=-1)),
        ("opt=-1", ParallelPlan(opt=-1)),
        (" dp = 2 , pp=3 ", ParallelPlan(2, 1, 3)),
    ],
)
def test_plans(text, expected):
    assert is_plan(text) and ParallelPlan.parse(text) == expected == ParallelPlan.parse(
        str(expected)
    )


@pytest.mark.parametrize(
    "text, says",
    [
        (
            "dp=2,xp=2",
            "'xp=2' is not dp=, tp= (or mp=), pp= or opt= with a number, as in "
            "dp=2,tp=4,pp=2,opt=2",
        ),
        ("dp=2,", "'' is not"),
        ("dp=0", "dp is '0', expected"),
        ("dp=", "dp is '', expected"),
        ("pp=٢", "pp is '٢', expected"),
        (
            "opt=0",
            "opt is '0', expected a whole number >= 1, or all for as many pieces as there are "
            "replicas",
        ),
        ("dp=2,dp=2", "dp=2 gives dp a second time"),
        ("tp=2,mp=2", "mp=2 gives tp a second time (mp is a synonym of tp)"),
        ("dp=1000,tp=1000", f"1000000 ranks; a job has at most {MAX_RANKS}"),
        ("dp=9999999999", "dp is '9999999999'"),
    ],
)
def test_wrong_plans_are_errors_that_name_the_problem(text, says):
    assert is_plan(text)
    with pytest.raises(ConfigError, match=re.escape(says)):
        ParallelPlan.parse(text)


@pytest.mark.parametrize(
    "text", ["", "strategy", "./dp=2", "/ckpt/dp=2,tp=2", "dp=2/strategy", "run=new", "dp", "a=1,b"]
)
def test_paths_are_not_plans(text):
    assert not is_plan(text)


@pytest.mark.parametrize("numbers", [(1, 0), (1, 1, 1, -2), (MAX_RANKS, 2)])
def test_impossible_numbers_are_refused(numbers):
    with pytest.raises(ConfigError, match="plan dp="):
        ParallelPlan(*numbers)


# ---- owners of elements --------------------------------------------------------------------------


def owners(plan, shape, cut, stage):
    """Returns which rank of the job has which element: bool[rank, *shape], element by element from
    the numbers of the plan."""
    cut = cut if plan.tp > 1 else None
    replicas = plan.dp * (1 if cut is not None else plan.tp)
    # of dimension 0, in each part of the tensor cut
    rows = shape[0] // (plan.tp if cut == 0 else 1)
    pieces = replicas if plan.opt == -1 else max(plan.opt, 1)
    if replicas % pieces or rows % pieces:
        pieces = 1
    held = np.zeros((plan.world_size, *shape), bool)
    for rank in range(plan.world_size):
        if rank // (plan.dp * plan.tp) != stage:
            continue
        data, tensor = divmod(rank % (plan.dp * plan.tp), plan.tp)
        replica = data if cut is not None else data * plan.tp + tensor
        for element in itertools.product(*map(range, shape)):
            mine = cut is None or element[cut] * plan.tp // shape[cut] == tensor
            held[(rank, *element)] = mine and element[0] % rows * pieces // rows == replica % pieces
    return held


def check(plan, tensors, layers, strategy):
    assert (strategy.world_size, strategy.stage_size, len(strategy.stages)) == (
        plan.world_size,
        plan.dp * plan.tp,
        plan.pp,
    )
    assert {name for stage in strategy.stages for name in stage} == set(tensors)
    for name, (shape, cut, end) in tensors.items():
        number = re.search(r"layers\.(\d+)", name)
        stage = (
            int(number[1]) * plan.pp // layers if number else 0 if end == "first" else plan.pp - 1
        )
        found = np.zeros((plan.world_size, *shape), bool)
        for rank in range(plan.world_size):
            layout = strategy.of_rank(rank).get(name)
            if layout is not None:
                view(found[rank], held(layout, rank % strategy.stage_size, shape))[...] = True
        assert (found == owners(plan, shape, cut, stage)).all(), name
        assert strategy.stage_of(name) == stage


plans = st.builds(
    ParallelPlan,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from([-1, 0, 1, 2, 3, 4, 8]),
)
SMALL = {name: row for name, row in model(3).items() if not name.startswith("adam_v")}


@few
@given(plans)
def test_every_element_is_owned_by_exactly_the_expected_ranks(plan):
    check(plan, SMALL, 3, strategy_from_plan(plan, source(SMALL)))


# ---- the cut dimension ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout, shape, expected",
    [
        (TensorLayout((2, 1, 2), (-1, 0)), (8, 8), (-1, 0)),
        (TensorLayout((2, 2), ((1, 0), -1)), (8, 8), (0, -1)),
        (TensorLayout((4, 1), (0, -1)), (8, 8), (-1, -1)),  # an axis of one rank cuts nothing
        (TensorLayout((4,), ()), (), ()),
        (None, (8, 8), (-1, -1)),
        (TensorLayout((2, 2), ((1, 0),)), (8,), (0,)),
    ],
)
def test_the_dimension_sharded_in_the_source_is_sharded(layout, shape, expected):
    tensors = {"w": (shape, layout, (0,)), "cut": ((8, 8), ROWS, (0,))}
    (stage,) = strategy_from_plan(ParallelPlan(dp=1, tp=4), tensors).stages
    assert stage == {"w": TensorLayout((1, 4), expected), "cut": TensorLayout((1, 4), (0, -1))}


@pytest.mark.parametrize(
    "tensors, plan, says",
    [
        (
            {"w": ((8, 8), TensorLayout((2, 2), (1, 0)), (0,))},
            "tp=2",
            "the source shards w of shape (8, 8) along dimensions 0 and 1; a plan can shard only "
            "one; give a strategy file",
        ),
        (
            {"w": ((8, 8), WHOLE, (0,)), "b": ((8,), PLAIN, (0,)), "s": ((), None, ())},
            "tp=2",
            "no tensor of the source is sharded, so the dimension for tensor parallelism is "
            "unknown; give a strategy file",
        ),
        (
            {"w": ((6, 8), ROWS, (0,))},
            "tp=4",
            "w of shape (6, 8) has 6 elements in dimension 0, which tp=4 does not divide",
        ),
        (
            {"w": ((8, 3), COLUMNS, (0,))},
            "dp=3,tp=2",
            "w of shape (8, 3) has 3 elements in dimension 1",
        ),
        (
            {"w": ((8,), ROWS, (0,))},
            "tp=2",
            "w has the shape (8,), its layout in the source is for 2 dimensions",
        ),
        ({}, "tp=2", "there are no tensors"),
    ],
)
def test_tensors_that_a_plan_cannot_shard(tensors, plan, says):
    with pytest.raises(ConfigError, match=f"plan dp=.*{re.escape(says)}"):
        strategy_from_plan(ParallelPlan.parse(plan), tensors)


def test_without_tensor_parallelism_layouts_may_be_unknown():
    tensors = {"w": ((8, 8), TensorLayout((2, 2), (1, 0)), (0,)), "b": ((6,), None, ())}
    (stage,) = strategy_from_plan(ParallelPlan(dp=2, opt=-1), tensors).stages
    assert stage == {"w": TensorLayout((2, 1), (-1, -1), -1), "b": TensorLayout((2, 1), (-1,), -1)}


@pytest.mark.parametrize(
    "shape, opt, shards",
    [
        ((8, 3), 2, 2),
        ((8, 3), 8, 0),
        ((6, 3), 4, 0),
        ((6, 3), -1, 0),
        ((8, 3), -1, -1),
        ((), -1, 0),
    ],
)
def test_no_optimizer_shard_where_the_pieces_do_not_divide(shape, opt, shards):
    (stage,) = strategy_from_plan(ParallelPlan(dp=4, opt=opt), {"w": (shape, None, ())}).stages
    assert stage["w"].optimizer_shards == shards


# ---- stages --------------------------------------------------------------------------------------


def places(pp, names, stages=None):
    strategy = strategy_from_plan(
        ParallelPlan(pp=pp),
        {name: ((4,), PLAIN, (stages[name],) if name in (stages or {}) else ()) for name in names},
    )
    return {name: strategy.stage_of(name) for name in names}


@pytest.mark.parametrize(
    "count, held, pp, expected",
    [
        (2, (0, 1), 2, [0, 1]),
        (2, (0, 1), 3, [0, 2]),
        (3, (0, 2), 2, [0, 1]),
        (3, (0, 1, 2), 3, [0, 1, 2]),
    ],
)
def test_a_tensor_of_several_stages_stays_in_several(count, held, pp, expected):
    """A tied embedding: of two stages that is both ends."""
    tensors = {
        **{name: ((4,), PLAIN, ()) for name in LAYERS},
        "adam_m.tok_embeddings.weight": ((4,), PLAIN, held),
    }
    stages = strategy_from_plan(ParallelPlan(pp=pp), tensors, count).stages
    assert [
        number for number, stage in enumerate(stages) if "adam_m.tok_embeddings.weight" in stage
    ] == expected


@pytest.mark.parametrize(
    "name, count, held",
    [
        ("table", 2, (0, 1)),
        ("embedding", 4, (0, 1)),
        ("layers.1.embedding", 4, (0, 3)),
    ],
)
def test_ambiguous_stages_are_refused(name, count, held):
    tensors = {**{name: ((4,), PLAIN, ()) for name in LAYERS}, name: ((4,), PLAIN, held)}
    says = (
        f"{name} is held by the pipeline stages {', '.join(map(str, held))} of {count} in the "
        "source, .* give a strategy file"
    )
    with pytest.raises(ConfigError, match=says):
        strategy_from_plan(ParallelPlan(pp=3), tensors, count)
    strategy_from_plan(ParallelPlan(), tensors, count)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.w",
        "transformer.h.{}.attn.bias",
        "adam_v.blocks.{}.w",
        "encoder.layer.{}.w",
        "backbone.blocks.{}.layers.9.w",
    ],
)
@pytest.mark.parametrize(
    "layers, pp, expected",
    [
        (5, 2, [0, 0, 0, 1, 1]),
        (5, 3, [0, 0, 1, 1, 2]),
        (3, 3, [0, 1, 2]),
    ],
)
def test_layers_are_spread_evenly_in_order_of_their_numbers(name, layers, pp, expected):
    names = [name.format(layer) for layer in range(layers)]
    assert list(places(pp, names).values()) == expected


LAYERS = ["layers.0.w", "layers.1.w", "layers.2.w"]


def test_tensors_without_layer_number_are_placed_by_name():
    names = {
        "model.embed_tokens.weight": 0,
        "tok_embeddings.weight": 0,
        "adam_m.transformer.wte.weight": 0,
        "norm.weight": 2,
        "lm_head.weight": 2,
        "adam_v.lm_head.weight": 2,
        "mtp.layers.0.norm.weight": 2,
        "adam_m.mtp.layers.7.w": 2,
        "mtp.embedding.weight": 2,
        "global_step": 2,
    }
    assert places(3, [*LAYERS, *names]) == {**dict(zip(LAYERS, range(3), strict=True)), **names}


def test_tensors_without_layer_number_stay_in_their_end_stage():
    stages = {
        "layers.0.w": 0,
        "layers.1.w": 0,
        "layers.2.w": 1,
        "head": 0,
        "input_embed": 1,
        "layers.0.late": 1,
    }
    assert places(3, [*stages, "norm", "wte"], stages) == {
        "layers.0.w": 0,
        "layers.1.w": 1,
        "layers.2.w": 2,
        "head": 0,
        "input_embed": 2,
        "layers.0.late": 0,
        "norm": 2,
        "wte": 0,
    }
    stages |= {"layers.2.w": 2, "input_embed": 2, "middle_embed": 1, "middle": 1}
    assert places(2, [*stages], stages) == {
        "layers.0.w": 0,
        "layers.1.w": 0,
        "layers.2.w": 1,
        "head": 0,
        "input_embed": 1,
        "layers.0.late": 0,
        "middle_embed": 0,
        "middle": 1,
    }


@pytest.mark.parametrize(
    "names, pp, says",
    [
        (
            LAYERS,
            4,
            "3 layers (names with layers.<i>, blocks.<i>, h.<i> or layer.<i>) do not fill 4 "
            "pipeline stages",
        ),
        (["xlayers.0.w", "layers.9999999999.w"], 2, "0 layers"),
        (
            ["layers.0.w", "layers.3.w"],
            4,
            "pipeline stage 1 would hold no tensor; take a smaller pp, or give a strategy file",
        ),
    ],
)
def test_pipelines_that_cannot_be_filled(names, pp, says):
    with pytest.raises(ConfigError, match=f"plan dp=1,tp=1,pp={pp}: {re.escape(says)}"):
        places(pp, names)
