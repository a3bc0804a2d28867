"""Strategy files against MindSpore itself: what we write it reads, what it wrote we read. No
training runs here."""

import json
import shutil
from pathlib import Path

import pytest

from mindresume.formats.parallel_plan import ParallelPlan, strategy_from_plan
from mindresume.formats.strategy import Strategy, read_strategy
from mindresume.model.layout import TensorLayout, held
from st.training_run import ROOT
from tests.strategy_files import encode_strategy, write_strategy

FIXTURES = ROOT / "st" / "fixtures"
COMPILED = sorted(path.name for path in FIXTURES.glob("strategy_*"))
FILES = sorted(FIXTURES.glob("*/output/strategy/*.ckpt"))
RANKS = {
    "strategy_dp1mp8": (1, 8),
    "strategy_dp2mp2pp2opt": (2, 4),
    "strategy_dp2mp4": (1, 8),
    "strategy_dp8opt": (1, 8),
}

CUT, MOVED = TensorLayout((2, 1, 2), (0, -1)), TensorLayout((2, 2), (-1, 0), -1)
FLAT = Strategy(
    (
        {
            "embedding.weight": CUT,
            "layers.0.norm": TensorLayout((4,), (-1,), 2),
            "scale": TensorLayout((2, 2), ()),
        },
        {"layers.1.weight": MOVED, "embedding.weight": CUT},
        {"head.weight": TensorLayout((2, 2), (-1, -1), -1)},
    )
)
NESTED = Strategy(
    (
        {
            "w": TensorLayout((2, 2, 2), ((2, 0), -1), 2),
            "v": TensorLayout((4, 2), (-1, (0, 1), -1)),
            "b": TensorLayout((8,), (-1,), -1),
        },
    )
)


def by_mindspore(path: Path | str) -> dict[str, list]:
    """{name: [device matrix, tensor map, split shape, field, step, size, stages]}"""
    from mindspore.parallel._parallel_serialization import _extract_layout_map

    return _extract_layout_map(str(path))


def meant(strategy: Strategy, stages: list[int], named: bool) -> dict[str, list]:
    """Returns the same from our layouts; ``named``: the file lists the stages of a parameter."""
    found: dict[str, list] = {}
    for stage in stages:
        for name, layout in strategy.stages[stage].items():
            nested = any(isinstance(cut, tuple) for cut in layout.tensor_map)
            cuts = [
                list(cut) if isinstance(cut, tuple) else [cut] if nested else cut
                for cut in layout.tensor_map
            ]
            row = found.setdefault(
                name,
                [
                    list(layout.device_matrix),
                    cuts,
                    [],
                    0,
                    layout.optimizer_stride,
                    layout.optimizer_shards,
                    [],
                ],
            )
            row[6].append(stage if named else 0)
    return found


def test_the_fixtures_exist():
    assert set(RANKS) == set(COMPILED) and len(FILES) >= 32 + 18


@pytest.mark.parametrize("strategy, fmt", [(FLAT, "ckpt"), (FLAT, "json"), (NESTED, "ckpt")])
def test_mindspore_reads_and_merges_what_we_write(tmp_path, strategy, fmt):
    from mindspore import merge_pipeline_strategys

    stages = list(range(len(strategy.stages)))
    for rank, path in enumerate(write_strategy(strategy, str(tmp_path / "ranks"), fmt)):
        assert by_mindspore(path) == meant(strategy, [rank // strategy.stage_size], named=False)
    merged = tmp_path / f"merged_ckpt_strategy.{fmt}"
    merge_pipeline_strategys(str(tmp_path / "ranks"), str(merged))
    ours = tmp_path / f"ours.{fmt}"
    ours.write_bytes(encode_strategy(dict(enumerate(strategy.stages)), fmt))
    for path in (merged, ours):
        assert sorted_stages(by_mindspore(path)) == meant(strategy, stages, named=True)
        assert read_strategy(str(path)) == strategy
    shutil.copy(merged, tmp_path / "ranks")
    assert read_strategy(str(tmp_path / "ranks")) == strategy


def sorted_stages(rows: dict[str, list]) -> dict[str, list]:
    """MindSpore merges in the order in which the folder lists the files."""
    return {name: [*row[:6], sorted(row[6])] for name, row in rows.items()}


@pytest.mark.parametrize("strategy", [FLAT, NESTED])
def test_its_own_class_writes_the_same_bytes(strategy):
    import mindspore  # noqa: F401  first: it decides which protobuf its classes are made for
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    everything = dict(enumerate(strategy.stages))
    for stages in ({number: stage} for number, stage in everything.items()):
        content = encode_strategy(stages)
        assert ParallelStrategyMap.FromString(content).SerializeToString() == content
    content = encode_strategy(everything)
    assert ParallelStrategyMap.FromString(content).SerializeToString() == content


@pytest.mark.parametrize("name", COMPILED)
def test_strategies_compiled_by_mindspore_are_read_exactly(name):
    folder = FIXTURES / name
    strategy = read_strategy(str(folder / "output" / "strategy"))
    expected = json.loads((folder / "layouts.json").read_text(encoding="utf-8"))
    known = json.loads((folder / "parameters.json").read_text(encoding="utf-8"))
    # made by the front end with pipelines
    known |= {f"accu_grads.{parameter}": row for parameter, row in known.items()}
    assert (len(strategy.stages), strategy.stage_size) == RANKS[name]
    assert {parameter for stage in strategy.stages for parameter in stage} == set(expected)
    for parameter, row in expected.items():
        ranks = [rank for rank in range(strategy.world_size) if parameter in strategy.of_rank(rank)]
        layout = strategy.of_rank(ranks[0])[parameter]
        assert ranks == row["ranks"] and strategy.stage_of(parameter) == known[parameter]["stage"]
        assert (list(layout.device_matrix), list(layout.tensor_map)) == (
            row["device_matrix"],
            row["tensor_map"],
        )
        assert (layout.optimizer_stride, layout.optimizer_shards) == (
            row["opt_weight_shard_step"],
            row["opt_weight_shard_size"],
        )
        layout.counts(known[parameter]["global_shape"])
    assert (
        strategy.fit_dimensions(
            {parameter: len(row["global_shape"]) for parameter, row in known.items()}
        )
        == strategy
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-4]}-{path.stem[-1]}")
def test_every_file_of_mindspore_survives_a_round_trip(tmp_path, path):
    strategy = read_strategy(str(path.parent))
    copies = write_strategy(strategy, str(tmp_path))
    assert sorted_stages(by_mindspore(copies[int(path.stem.rpartition("_")[2])])) == sorted_stages(
        by_mindspore(path)
    )


@pytest.mark.parametrize(
    "name, text",
    [
        ("strategy_dp1mp8", "tp=8"),
        ("strategy_dp2mp2pp2opt", "dp=2,tp=2,pp=2,opt=all"),
        ("strategy_dp2mp4", "dp=2,tp=4"),
        ("strategy_dp8opt", "dp=8,opt=all"),
    ],
)
def test_a_plan_cuts_as_mindspore_compiles(name, text):
    """From the layouts of another job of the same model without pipeline stages it computes cuts,
    optimizer shards and stages."""
    of = read_strategy(str(FIXTURES / "strategy_dp2mp4" / "output" / "strategy"))
    known = json.loads((FIXTURES / name / "parameters.json").read_text(encoding="utf-8"))
    tensors = {
        parameter: (tuple(known[parameter]["global_shape"]), layout, (0,))
        for parameter, layout in of.stages[0].items()
    }
    found, compiled = (
        strategy_from_plan(ParallelPlan.parse(text), tensors),
        read_strategy(str(FIXTURES / name / "output" / "strategy")),
    )
    assert found.world_size == compiled.world_size
    for rank in range(found.world_size):
        local = rank % found.stage_size
        for parameter, layout in found.of_rank(rank).items():
            shape = tensors[parameter][0]
            assert held(layout, local, shape) == held(
                compiled.of_rank(rank)[parameter], local, shape
            ), (rank, parameter)
        assert {
            parameter for parameter in compiled.of_rank(rank) if "accu_grads" not in parameter
        } == set(found.of_rank(rank))
