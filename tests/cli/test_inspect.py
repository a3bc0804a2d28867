"""``mindresume inspect``: what a checkpoint or a strategy holds, in numbers and in words."""

import os

import pytest
from cli.test_diff import MODEL, TENSORS
from reshard.plans import (
    Plan,
    complete,
    foreign,
    recorded,
)

from mindresume.api.checkpoint import TensorInfo
from mindresume.cli.inspect import merge_similar_rows, ranges_text

PLAN = Plan.parse("dp2tp2pp2opt2", MODEL)


COMMAND = "inspect"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{origin: folder of the run}, of 8 ranks in 2 stages; what mindformers wrote lacks redundant
    copies."""
    roots = {kind: tmp_path_factory.mktemp(kind) for kind in ("mindresume", "mindformers")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        recorded(roots["mindresume"] / "output" / "checkpoint", PLAN, TENSORS)
        foreign(roots["mindformers"] / "output" / "checkpoint", PLAN, TENSORS, dedup=True)
        PLAN.write(roots["mindformers"] / "output" / "strategy")
    return roots


@pytest.fixture(params=["mindresume", "mindformers"])
def origin(request):
    return request.param


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["layers.2.*weight", "embedding.weight", "norm.weight", "layers.3.none"]
)
def test_inspect_lists_the_ranks_that_hold_a_slice(saved, read_ok, origin, pattern):
    found = read_ok(saved[origin], "--tensor", pattern)
    names = [row["name"] for row in found["tensors"]]
    assert names and {part["name"] for part in found["slices"]} == set(names)
    for name in names:
        expected, kept = (
            {},
            {rank for rank in range(8) if origin == "mindresume" or name in PLAN.keeps(rank)},
        )
        for rank in range(8):
            if name in PLAN.regions(rank) and TENSORS[name].size:
                expected.setdefault(PLAN.regions(rank)[name], []).append(rank)
        parts = {
            tuple(map(tuple, part["region"])): part
            for part in found["slices"]
            if part["name"] == name
        }
        for region, ranks in expected.items():
            assert parts[region]["ranks"] == [rank for rank in ranks if rank in kept]
            assert parts[region]["missing_ranks"] == [rank for rank in ranks if rank not in kept]
        assert len(parts) == len(expected) or not TENSORS[name].size


# ---- strategies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["ckpt", "json"])
def test_a_strategy(tmp_path, read_ok, call, fmt):
    PLAN.write(tmp_path, fmt)
    rows = {row["name"]: row for row in read_ok(tmp_path)["tensors"]}
    assert rows.keys() == set(TENSORS)
    assert rows["layers.0.qkv.weight"]["layout"] == PLAN.stages[0]["layers.0.qkv.weight"].to_json()
    found = read_ok(tmp_path, "--tensor", "layers.3.qkv.weight")
    assert [(part["region"], part["of"], part["ranks"]) for part in found["slices"]] == [
        ([[i, i + 1], [0, 1]], [4, 1], [rank]) for i, rank in enumerate((4, 6, 5, 7))
    ]
    assert {part["name"] for part in read_ok(tmp_path, "--rank", 5)["slices"]} == set(
        PLAN.layouts(5)
    )
    out = call(tmp_path)[1]
    assert "has neither shapes nor dtypes" in out and "8 ranks = 2 stages x 4" in out
    assert "piece (3, 0) of (4, 1)" in call(tmp_path, "--rank", 7)[1]


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers, text",
    [([], ""), ([0, 1], "0,1"), (range(9), "0-8"), ([7, 4, 0, 2, 5, 6, 10], "0,2,4-7,10")],
)
def test_ranges_text(numbers, text):
    assert ranges_text(numbers) == text


def test_folding():
    def row(name, shape=(2,), stage=0, layout=None):
        return TensorInfo(name, "float32", shape, layout, (stage,), 1)

    cut = PLAN.stages[0]["embedding.weight"]
    rows = [
        *(row("layers.0.experts.0.w"), row("layers.0.experts.1.w")),
        row("layers.1.experts.0.w", stage=1),
        *(row("layers.0.b2"), row("layers.10.b2")),
        *(row("layers.0.c", (3,)), row("layers.1.c")),
        *(row("layers.1.d", layout=cut), row("layers.2.d")),
        *(row("5.0.y"), row("5.1.y")),
    ]
    assert {name: len(group) for name, group in merge_similar_rows(rows)} == {
        "layers.*.experts.*.w": 3,
        "layers.*.b2": 2,
        "layers.0.c": 1,
        "layers.1.c": 1,
        "layers.1.d": 1,
        "layers.2.d": 1,
        "5.*.y": 2,
    }


# ---- errors and imports --------------------------------------------------------------------------


def test_errors_are_one_line_and_status_2(tmp_path, saved, call):
    PLAN.write(tmp_path / "strategy")
    complete(tmp_path / "merged", TENSORS)
    ours = saved["mindresume"]
    for arguments, said in [
        ((ours, "--from", tmp_path / "missing"), "there is no such strategy file"),
        ((ours, "--rank", 8), "there is no rank 8; it has 8 ranks"),
        ((ours, "--tensor", "x*"), "tensors matches 'x*'"),
        ((tmp_path / "strategy", "--rank", 9), "there is no rank 9"),
        ((tmp_path / "strategy", "--step", 3), "is a strategy; the arguments strategy and step"),
        ((tmp_path / "merged", "--rank", 0), "which belong to no rank"),
    ]:
        status, out, err = call(*arguments)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1, (said, err)
