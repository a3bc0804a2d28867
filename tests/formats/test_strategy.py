import json
import random
import shutil
from itertools import product
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import tensor_layouts

from mindresume.errors import StrategyError
from mindresume.formats import strategy as module
from mindresume.formats.strategy import Strategy, _field, decode_strategy, read_strategy
from mindresume.model.layout import MAX_AXES, MAX_RANKS, TensorLayout
from mindresume.tensor_files.ckpt import encode_varint
from tests.strategy_files import encode_strategy, write_strategy

few = settings(
    max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="-"), min_size=1, max_size=12)


MATRICES = [
    matrix for n in (1, 2, 3) for matrix in product((1, 2, 3, 4, 6), repeat=n) if prod(matrix) <= 12
]


@st.composite
def strategies(draw, nested=True):
    """Draws every kind of layout that a file can contain."""
    size = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    layouts = tensor_layouts(
        st.sampled_from([one for one in MATRICES if prod(one) == size])
    ).filter(
        lambda layout: (
            nested
            and len(layout.tensor_map) > 1
            or not any(isinstance(cut, tuple) for cut in layout.tensor_map)
        )
    )
    stages = st.lists(
        st.dictionaries(NAMES, layouts, min_size=1, max_size=5), min_size=1, max_size=3
    )
    return Strategy(tuple(draw(stages)))


def numbered(strategy):
    return dict(enumerate(strategy.stages))


W, B, N = (
    TensorLayout((2, 2), (0, -1)),
    TensorLayout((2, 2), (-1,)),
    TensorLayout((2, 2), ((1, 0), -1)),
)
ONE = {"w": W, "b": B}
TWO = Strategy((ONE, {"v": W, "c": TensorLayout((2, 1, 2), (-1,), -1)}))


# ---- round trips ---------------------------------------------------------------------------------


@few
@given(st.data(), st.sampled_from(["ckpt", "json"]))
def test_a_file_is_read_back(data, fmt):
    strategy = data.draw(strategies(nested=fmt == "ckpt"))
    stages = decode_strategy(encode_strategy(numbered(strategy), fmt), f"s.{fmt}")
    assert Strategy(tuple(stages[number] for number in sorted(stages))) == strategy


@few
@given(strategies())
def test_round_trip_as_a_value_of_json_with_each_layout_once(strategy):
    value = json.loads(json.dumps(strategy.to_json()))
    assert Strategy.from_json(value) == strategy
    assert len({json.dumps(layout) for layout in value["layouts"]}) == len(value["layouts"])


def test_equivalent_layouts_are_normalized():
    alike = [W, TensorLayout((2, 2), ((0,), (-1,))), TensorLayout((2, 2), ((0, -1), -1), 1)]
    assert all(Strategy(({"w": layout},)).stages == ({"w": W},) for layout in alike)
    assert Strategy(({"w": TensorLayout((4,), (0,), -1)},)).stages[0]["w"].optimizer_shards == 0


def test_ranks_stages_and_names():
    assert (TWO.stage_size, TWO.world_size) == (4, 8)
    assert [TWO.stages.index(TWO.of_rank(rank)) for rank in range(8)] == [0] * 4 + [1] * 4
    assert (TWO.stage_of("w"), TWO.stage_of("c"), TWO.stage_of("x")) == (0, 1, None)
    assert Strategy((ONE, {**ONE, "v": W})).stage_of("w") == 0
    for rank in (-1, 8):
        with pytest.raises(StrategyError, match=f"rank {rank} is not one of the 8 ranks"):
            TWO.of_rank(rank)


def test_packed_numbers_and_unknown_fields_are_read():
    packed = _field(1, b"".join(map(encode_varint, (2, 2))))
    body = _field(1, packed) + _field(2, _field(1, encode_varint(0) + encode_varint(-1)))
    body += _field(5, 0) + _field(6, 0) + _field(7, 0)
    body += (
        _field(900, "of a later version")
        + encode_varint(11 << 3 | 1)
        + bytes(8)
        + encode_varint(12 << 3 | 5)
        + bytes(4)
    )
    content = (
        encode_strategy({3: {"b": B}}) + _field(3, _field(1, "w") + _field(2, body)) + _field(9, 7)
    )
    assert decode_strategy(content, "s.ckpt") == {3: {"b": B, "w": W}}


# ---- dimensions ----------------------------------------------------------------------------------


def test_two_axes_describe_a_matrix_unless_the_tensor_is_a_vector():
    strategy = Strategy(
        (
            {
                "w": TensorLayout((2, 4), (1, 0)),
                "v": TensorLayout((2, 2, 2), (1, 0), 2),
                "x": TensorLayout((8,), (0, -1)),
            },
        )
    )
    fitted = strategy.fit_dimensions({"w": 1, "v": 1, "x": 2, "absent": 5})
    assert fitted.stages == (
        {
            "w": TensorLayout((2, 4), ((1, 0),)),
            "v": TensorLayout((2, 2, 2), ((1, 0),), 2),
            "x": TensorLayout((8,), (0, -1)),
        },
    )
    assert strategy.fit_dimensions({"w": 2}) == strategy


def test_a_stage_of_one_rank_fits_any_number_of_dimensions():
    (stage,) = decode_strategy(parameter(body(matrix=(), maps=((),)), "b"), "s.ckpt").values()
    assert Strategy((stage,)).fit_dimensions({"b": 2}).stages == (
        {"b": TensorLayout((1,), (-1, -1))},
    )


@pytest.mark.parametrize(
    "layout, dimensions", [(W, 3), (W, 0), (B, 2), (N, 1), (TensorLayout((4,), ()), 1)]
)
def test_other_dimensions_do_not_fit(layout, dimensions):
    says = (
        f"here: parameter w has {dimensions} dimensions, the strategy has {len(layout.tensor_map)}"
    )
    with pytest.raises(StrategyError, match=says):
        Strategy(({"w": layout},), "here").fit_dimensions({"w": dimensions})


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["ckpt", "json"])
def test_a_folder_of_eight_ranks_in_two_stages(tmp_path, fmt):
    paths = write_strategy(TWO, str(tmp_path / "new" / "strategy"), fmt)
    found = read_strategy(str(tmp_path / "new" / "strategy"))
    assert found == TWO and found.source == str(tmp_path / "new" / "strategy")
    assert read_strategy(paths[0]).stages == (TWO.stages[0],)
    with pytest.raises(
        StrategyError,
        match="rank_5.*: the highest pipeline stage is 1, and 1 below it are missing, the first is "
        "0: give the folder",
    ):
        read_strategy(paths[5])


def test_rank_10_comes_after_rank_2(tmp_path):
    strategy = Strategy(tuple({f"layers.{stage}.w": W} for stage in range(3)))
    write_strategy(strategy, str(tmp_path))
    assert (tmp_path / "ckpt_strategy_rank_10.ckpt").exists() and read_strategy(
        str(tmp_path)
    ) == strategy
    # the last number counts
    (tmp_path / "ckpt_strategy_rank_2.ckpt").rename(tmp_path / "x_rank_9_rank_2.ckpt")
    (tmp_path / "ckpt_strategy_rank_10.ckpt").rename(tmp_path / "my_strategy_rank_10_of_12.ckpt")
    assert read_strategy(str(tmp_path)) == strategy
    (tmp_path / "my_strategy_rank_10_of_12.ckpt").write_bytes(
        encode_strategy({0: {"layers.0.w": TensorLayout((4,), (0, -1))}})
    )
    for rank in (0, 1, 3):
        (tmp_path / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    with pytest.raises(
        StrategyError,
        match="x_rank_9_rank_2.ckpt and my_strategy_rank_10_of_12.ckpt are both of stage 0 and "
        "differ in layers.0.w",
    ):
        read_strategy(str(tmp_path))


def test_one_file_per_stage_is_enough_and_each_content_is_parsed_once(tmp_path, monkeypatch):
    write_strategy(TWO, str(tmp_path))
    parsed = []
    monkeypatch.setattr(
        module,
        "decode_strategy",
        lambda content, path: parsed.append(path) or decode_strategy(content, path),
    )
    assert read_strategy(str(tmp_path)) == TWO and len(parsed) == 2
    for rank in (0, 2, 3, 4, 5, 7):
        (tmp_path / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    assert read_strategy(str(tmp_path)) == TWO


def test_equal_layouts_in_different_bytes_are_the_same_job(tmp_path):
    write_strategy(TWO, str(tmp_path))
    (tmp_path / "ckpt_strategy_rank_1.ckpt").write_bytes(
        encode_strategy({0: dict(reversed(ONE.items()))})
    )
    (tmp_path / "ckpt_strategy_rank_2.ckpt").unlink()
    (tmp_path / "ckpt_strategy_rank_2.json").write_bytes(encode_strategy({0: ONE}, "json"))
    assert read_strategy(str(tmp_path)) == TWO


@pytest.mark.parametrize(
    "name",
    [
        "merged_ckpt_strategy_by_rank_3.ckpt",
        "merged.json",
    ],
)
def test_a_merged_file_is_used_if_it_is_alone(tmp_path, name):
    merged = encode_strategy(numbered(TWO), name.rpartition(".")[2])
    (tmp_path / name).write_bytes(merged)
    for other in (
        "meta.json",
        "merge_succeed.txt",
        "llama_rank_0-1_10.ckpt",
        ".ckpt_strategy_rank_1.ckpt",
        "net.safetensors",
    ):
        (tmp_path / other).write_bytes(b"no strategy")
    assert read_strategy(str(tmp_path)) == TWO == read_strategy(str(tmp_path / name))
    (tmp_path / ("merged_again" + name)).write_bytes(merged)
    assert read_strategy(str(tmp_path)) == TWO
    (tmp_path / name).write_bytes(b"old, of another job, or being written")
    write_strategy(Strategy((ONE,)), str(tmp_path))
    assert read_strategy(str(tmp_path)).stages == (ONE,)


def test_a_merged_file_of_one_stage_is_read():
    row = _field(3, _field(1, "0-layers-0.w") + _field(2, body()))
    assert decode_strategy(items(0) + row, "s.ckpt") == {0: {"layers-0.w": W}}


# ---- refusals ------------------------------------------------------------------------------------


def body(matrix=(2, 2), maps=((0, -1),), split=(), offset=(), uneven=0, step=0, size=0):
    return b"".join(
        [
            _field(1, matrix),
            *(_field(2, cut) for cut in maps),
            _field(3, split),
            _field(4, offset),
            _field(5, uneven),
            _field(6, step),
            _field(7, size),
        ]
    )


def items(stage=0):
    return _field(1, 1) + _field(
        2, _field(1, "MatMul") + _field(2, _field(1, stage) + _field(2, (1,)))
    )


def parameter(row, name="layers.0.w"):
    return items() + _field(3, _field(1, name) + _field(2, row))


UNEVEN = "parameter 'layers.0.w': .*sharded unevenly"


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "it is empty; a failed compile"),
        (_field(1, 1), "no strategy items .*a failed compile"),
        (items(), "names no parameter; a failed compile"),
        (items(MAX_RANKS + 1) + parameter(body())[len(items()) :], f"the stage is {MAX_RANKS + 1}"),
        (parameter(body(split=(4, 4))), UNEVEN),
        (parameter(body(offset=(1,))), UNEVEN),
        (parameter(body(uneven=2)), UNEVEN),
        (
            parameter(body(step=1, size=2)),
            r"layers.0.w': .*opt_weight_shard_step is 1, expected 2 ranks",
        ),
        (
            parameter(body(step=2, size=3)),
            "layers.0.w': .*3 optimizer shards do not divide 2 replicas",
        ),
        (parameter(body(maps=((2, -1),))), "layers.0.w': .*does not have"),
        (parameter(body(matrix=(MAX_RANKS, 2))), f"at most {MAX_AXES} axes and {MAX_RANKS} ranks"),
        (parameter(body(maps=((-1,),) * 33)), "33 tensor maps"),
        (parameter(body() + body()), "occurs 2 times, expected one"),
        (parameter(body())[:-1], "truncated"),
        (parameter(body()) + b"\x0b", "wire type 3"),
        (parameter(body()) + b"\x00\x00", "field 0"),
        (parameter(body()) + encode_varint(3 << 3 | 2) + encode_varint(-5), "field 3 has -5 bytes"),
        (parameter(body()) + b"\x08" + b"\xff" * 12, "does not end"),
        (parameter(body()) + _field(3, _field(1, b"\xff") + _field(2, body())), "utf-8"),
        (
            parameter(body())
            + _field(3, _field(1, "layers.0.w") + _field(2, body(maps=((-1, 0),)))),
            "'layers.0.w' occurs twice",
        ),
        (
            parameter(body(), "0-w") + _field(3, _field(1, "00-w") + _field(2, body())),
            "'0-w' begins with a stage.*'00-w' does not",
        ),
    ],
)
def test_refused_with_path_and_reason(tmp_path, content, says):
    path = tmp_path / "ckpt_strategy_rank_0.ckpt"
    path.write_bytes(content)
    for where in (path, tmp_path):
        with pytest.raises(StrategyError, match=f"{path}: not a usable strategy file: .*{says}"):
            read_strategy(str(where))


def test_optimizer_shard_with_step_0_is_none_and_equal_parameters_may_come_twice():
    content = parameter(body(size=-1)) + _field(
        3, _field(1, "layers.0.w") + _field(2, body(step=2))
    )
    assert decode_strategy(content, "s.ckpt") == {0: {"layers.0.w": W}}


ROW = {
    "dev_matrix": [2, 2],
    "tensor_map": [0, -1],
    "param_split_shape": [],
    "indices_offset": [],
    "field": 0,
    "opt_weight_shard_step": 0,
    "opt_weight_shard_size": 0,
}
OPERATORS = '"parallel_strategy_item": {"MatMul": {"stage": 0, "parallel_strategy": [[1]]}}'


def json_of(rows, operators=OPERATORS):
    return f'{{{operators}, "parallel_layout_item": {{{rows}}}}}'


@pytest.mark.parametrize(
    "content, says",
    [
        ("", "it is empty"),
        ("{", "JSONDecodeError"),
        ("{}", "no strategy items"),
        ("[" * 20_000, "nested more than"),
        (json_of("", '"parallel_strategy_item": {"a": {"stage": "0"}}'), "the stage is '0'"),
        (json_of(""), "names no parameter"),
        (json_of('"w": {}'), "parameter 'w': KeyError: 'dev_matrix'"),
        (json_of(f'"\\ud800": {json.dumps(ROW)}'), "surrogates"),
        (
            json_of(f'"w": {json.dumps(ROW)}, "w": {json.dumps({**ROW, "tensor_map": [-1, -1]})}'),
            "'w' occurs twice",
        ),
        *(
            (json_of(f'"w": {json.dumps({**ROW, **change})}'), says)
            for change, says in [
                ({"field": 1}, "unevenly"),
                ({"param_split_shape": [3, 5]}, "unevenly"),
                ({"dev_matrix": [2, True]}, "integer"),
                ({"tensor_map": None}, "not a tensor layout"),
                ({"opt_weight_shard_step": None}, "None"),
            ]
        ),
    ],
)
def test_json_is_refused_with_path_and_reason(tmp_path, content, says):
    path = tmp_path / "strategy.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(StrategyError, match=f"{path}: not a usable strategy file: (?s:.*){says}"):
        read_strategy(str(path))


@pytest.fixture
def jobs(tmp_path):
    """Returns a folder with the files of TWO, and one with files of other jobs."""
    write_strategy(TWO, str(tmp_path / "job"))
    write_strategy(Strategy(({**ONE, "w": N}, TWO.stages[1], {"x": W})), str(tmp_path / "other"))
    write_strategy(
        Strategy(({"w": TensorLayout((2,), (0, -1))}, {"v": TensorLayout((2,), (0, -1))})),
        str(tmp_path / "small"),
    )
    return tmp_path


def put(jobs, source, rank, to):
    shutil.copyfile(
        jobs / source / f"ckpt_strategy_rank_{rank}.ckpt",
        jobs / "job" / f"ckpt_strategy_rank_{to}.ckpt",
    )


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda jobs: put(jobs, "other", 2, 2),
            "rank_0.ckpt and ckpt_strategy_rank_2.ckpt are both of stage 0 and differ in w: .*Keep",
        ),
        (
            lambda jobs: put(jobs, "job", 1, 8),
            "rank_8.ckpt is of stage 0; with 4 ranks a stage and 2 stages, rank 8 is one too many, "
            "there are 8",
        ),
        (
            lambda jobs: [
                (jobs / "job" / f"ckpt_strategy_rank_{rank}.ckpt").unlink() for rank in range(4)
            ],
            "the highest pipeline stage is 1, and 1 below it are missing, the first is 0",
        ),
        (
            lambda jobs: shutil.copyfile(
                jobs / "job" / "ckpt_strategy_rank_3.ckpt", jobs / "job" / "x_rank_03.ckpt"
            ),
            "ckpt_strategy_rank_3.ckpt and x_rank_03.ckpt are both the file of rank 3",
        ),
        (
            lambda jobs: (jobs / "job" / "ckpt_strategy_rank_3.ckpt").write_bytes(
                encode_strategy(numbered(TWO))
            ),
            "rank_3.ckpt has the name of rank 3's file, but holds 2 stages",
        ),
        (
            lambda jobs: (jobs / "job" / "ckpt_strategy_rank_6.ckpt").write_bytes(b""),
            "rank_6.ckpt: .*it is empty",
        ),
    ],
)
def test_files_of_several_jobs_or_missing_stages_are_refused(jobs, change, says):
    change(jobs)
    with pytest.raises(StrategyError, match=f"{jobs / 'job'}.*{says}"):
        read_strategy(str(jobs / "job"))


def test_a_file_of_another_stage_than_its_rank_is_refused(jobs):
    for rank in range(4):
        put(jobs, "other", 4, rank)  # stage 1
    for rank in range(4, 8):
        put(jobs, "small", 0, rank)  # stage 0, of 2 ranks
    with pytest.raises(
        StrategyError,
        match=r"same number of ranks per stage, found 2 \(w of stage 0\), 4 \(. of stage 1\)",
    ):
        read_strategy(str(jobs / "job"))
    for rank in range(4, 8):
        put(jobs, "other", 0, rank)
    with pytest.raises(
        StrategyError,
        match="rank_0.ckpt is of stage 1; with 4 ranks a stage and 2 stages, rank 0 is of stage 0",
    ):
        read_strategy(str(jobs / "job"))


def test_invalid_strategy_files_and_folders(tmp_path):
    with pytest.raises(StrategyError, match="nowhere: there is no such strategy file or folder"):
        read_strategy(str(tmp_path / "nowhere"))
    with pytest.raises(
        StrategyError, match="no file of a rank .* and no merged file; found nothing"
    ):
        read_strategy(str(tmp_path))
    (tmp_path / "llama_rank_0-1_10.ckpt").touch()
    with pytest.raises(StrategyError, match="found llama_rank_0-1_10.ckpt"):
        read_strategy(str(tmp_path))
    (tmp_path / "a_strategy.ckpt").write_bytes(b"a")
    (tmp_path / "b_strategy.ckpt").write_bytes(b"b")
    with pytest.raises(
        StrategyError,
        match="2 others that differ: a_strategy.ckpt, b_strategy.ckpt; give one of them",
    ):
        read_strategy(str(tmp_path))
    with open(tmp_path / "large.ckpt", "wb") as file:
        file.truncate(module.MAX_BYTES + 1)
    with pytest.raises(StrategyError, match=f"large.ckpt: {module.MAX_BYTES + 1} bytes"):
        read_strategy(str(tmp_path / "large.ckpt"))


def test_a_merged_file_with_a_gap_is_refused(tmp_path):
    (tmp_path / "merged.ckpt").write_bytes(encode_strategy({0: ONE, 2: ONE, 99_999: ONE}))
    with pytest.raises(
        StrategyError, match="stage is 99999, and 99997 below it are missing, the first is 1"
    ):
        read_strategy(str(tmp_path))


@pytest.mark.parametrize(
    "stages, says",
    [
        ((), "0 stages"),
        ((ONE, {}), "2 stages, 1 of them"),
        (({"w": W, "b": TensorLayout((8,), (0,))},), "same number of ranks"),
        (
            tuple({f"{i}": TensorLayout((50_000,), (0,))} for i in range(3)),
            "3 stages of 50000 ranks; a job has up to 100000",
        ),
    ],
)
def test_impossible_strategies_are_refused(stages, says):
    with pytest.raises(StrategyError, match=f"here: .*{says}"):
        Strategy(stages, "here")


@pytest.mark.parametrize(
    "name, layout, says",
    [
        ("layers-0", W, "parameter layers-0: MindSpore cannot read a name with '-'"),
        ("", W, "a name must be UTF-8 and not empty"),
        ("\ud800", W, "UTF-8"),
        (
            "w",
            TensorLayout((2, 2), ((1, 0),)),
            "parameter w: no strategy file can express a vector sharded by several axes",
        ),
    ],
)
def test_strategies_that_mindspore_cannot_read_are_refused(name, layout, says):
    with pytest.raises(StrategyError, match=says):
        encode_strategy(numbered(Strategy(({"b": B}, {name: layout}))))


# ---- damage --------------------------------------------------------------------------------------

DAMAGED = {
    "ckpt": encode_strategy(
        {0: {"embedding.weight": N, "b": B}, 1: {"w": TensorLayout((2, 2), (0, -1), -1)}}
    ),
    "json": encode_strategy(numbered(TWO), "json"),
}


def survives(content, path):
    """Checks that a file gives a strategy, or the one error that names the file."""
    try:
        stages = decode_strategy(content, path)
    except StrategyError as error:
        assert str(error).startswith(path) and len(str(error)) < 1100
        return
    for layouts in stages.values():
        assert all(
            layout.stage_size <= MAX_RANKS and len(layout.tensor_map) <= MAX_AXES
            for layout in layouts.values()
        )


@pytest.mark.parametrize("fmt", ["ckpt", "json"])
def test_every_truncation(fmt):
    for length in range(len(DAMAGED[fmt])):
        survives(DAMAGED[fmt][:length], f"s.{fmt}")


@pytest.mark.parametrize("fmt", ["ckpt", "json"])
def test_every_byte_altered(fmt):
    chance = random.Random(0)
    for position in range(len(DAMAGED[fmt])):
        for value in {0, 0x7F, 0x80, 0xFF, DAMAGED[fmt][position] ^ 1, chance.randrange(256)}:
            content = bytearray(DAMAGED[fmt])
            content[position] = value
            survives(bytes(content), f"s.{fmt}")


@few
@given(st.binary(max_size=200))
def test_any_bytes(content):
    survives(content, "s.ckpt")
    survives(items() + content, "s.ckpt")
    survives(items() + _field(3, _field(1, "w") + _field(2, content)), "s.ckpt")
    survives(content, "s.json")


def test_a_message_of_endless_fields_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_FIELDS", 100)
    assert decode_strategy(
        items() + _field(1, 1) * 95 + parameter(body())[len(items()) :], "s.ckpt"
    ) == {0: {"layers.0.w": W}}
    with pytest.raises(StrategyError, match="more than 100 fields"):
        decode_strategy(items() + _field(1, 1) * 98 + parameter(body())[len(items()) :], "s.ckpt")


def test_two_thousand_parameters_have_few_layouts_in_memory():
    many = {f"layers.{i}.weight": (W, B, N)[i % 3] for i in range(2000)}
    (stage,) = decode_strategy(encode_strategy({0: many}), "s.ckpt").values()
    assert stage == many and len({id(layout) for layout in stage.values()}) == 3
