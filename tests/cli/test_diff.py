"""``mindresume diff``: its output for two checkpoints, and its exit status."""

from pathlib import Path

import numpy as np
import pytest
from reshard.plans import Plan, Spec, foreign, put, random_tensors

MODEL = {
    "embedding.weight": Spec((16, 8), 0, "first", "bfloat16"),
    "norm.weight": Spec((8,), None, "last"),
    **{f"layers.{i}.qkv.weight": Spec((24, 8), 0, i) for i in range(4)},
    **{f"layers.{i}.proj.weight": Spec((8, 8), 1, i, "bfloat16") for i in range(4)},
    "layers.2.experts.weight": Spec((8, 8, 8), 2, 2, "float16"),
    "layers.3.ids": Spec((16,), 0, 3, "int64"),
    "layers.3.mask": Spec((8, 8), 1, 3, "bool"),
    "layers.3.none": Spec((8, 0), 0, 3),
    "head.weight": Spec((16, 8), 0, "last"),
}
TENSORS = random_tensors(MODEL)
ONE = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "step_num": np.array(7, np.int64)}


COMMAND = "diff"


@pytest.fixture
def two(tmp_path):
    """Writes both sides from tensors; returns their paths."""

    def write(a, b):
        return put(tmp_path / "a.safetensors", a), put(tmp_path / "b.ckpt", b)

    return write


def changed(**new):
    return {**ONE, **new}


# ---- equal ---------------------------------------------------------------------------------------


def test_layouts_from_strategies(tmp_path, call):
    plan = Plan.parse("tp4", MODEL)
    foreign(tmp_path / "a", plan, TENSORS)
    foreign(tmp_path / "b" / "checkpoint", Plan.parse("dp2tp2", MODEL), TENSORS, "ckpt")
    plan.write(tmp_path / "of_a")
    Plan.parse("dp2tp2", MODEL).write(tmp_path / "b" / "strategy")  # beside: found
    status, _, err = call(tmp_path / "a", tmp_path / "b")
    assert status == 2 and "have no layout" in err and err.count("\n") == 1
    assert call(tmp_path / "a", tmp_path / "b", "--from-a", tmp_path / "of_a")[0] == 0
    assert call(tmp_path / "b", tmp_path / "a", "--from-b", tmp_path / "of_a")[0] == 0


# ---- different -----------------------------------------------------------------------------------


def test_a_table_of_the_largest(two, call):
    size = {f"w{number:02}": np.full(3, number, np.float32) for number in range(1, 26)}
    status, out, err = call(*two({name: np.zeros(3, np.float32) for name in size}, size))
    rows = [line.split()[0] for line in out.splitlines() if line.startswith("w")]
    assert (status, err) == (1, "") and rows == [f"w{number:02}" for number in range(25, 5, -1)]
    assert (
        "\nand 5 more (--json lists all)\ndifferent: 25 of 25 tensors\n" in out
        and "[0]" in out
        and "3 of 3" in out
    )


def test_tensors_of_one_side_only_are_listed(two, call, read):
    a, b = two(
        changed(gone=np.zeros(2, np.int8)),
        {"w": ONE["w"].astype(np.float64), "step_num": ONE["step_num"][None]},
    )
    status, found = read(a, b, "--tolerance", "inf")
    assert status == 1 and {row["name"]: row["kind"] for row in found["differences"]} == {
        "gone": "only in A",
        "w": "dtype",
        "step_num": "shape",
    }
    first = found["differences"][0]
    assert (first["name"], first["a"], first["b"], first["elements"]) == (
        "gone",
        {"dtype": "int8", "shape": [2]},
        None,
        None,
    )
    out = call(a, b)[1]
    assert all(
        text in out
        for text in (
            "only in A: int8 (2,)",
            "dtype: float32 (2, 3) -> float64 (2, 3)",
            "shape: int64 () -> int64 (1,)",
        )
    )


@pytest.mark.parametrize(
    "change, tolerance, status",
    [
        (0.25, None, 1),
        (0.25, 0.25, 0),
        (0.25, 0.2, 1),
        (-0.25, 0.25, 0),
        (np.nan, 1e300, 1),
        (0, 0, 0),
        (0, None, 0),
    ],
)
def test_tolerance(two, read, call, change, tolerance, status):
    paths = two(ONE, changed(w=ONE["w"] + np.float32([[0, 0, 0], [0, change, 0]])))
    options = [] if tolerance is None else ["--tolerance", tolerance]
    assert call(*paths, *options)[0] == status
    found = read(*paths, *options)[1]
    assert found["within_tolerance"] is (status == 0) and found["equal"] is (change == 0)
    if change:
        (row,) = found["differences"]
        assert row["first_index"] == [1, 1] and row["largest_absolute"] == (
            "inf" if change != change else 0.25
        )
        assert row["differing"] == 1 and row["first_values"][0] == 4


def test_minus_zero_is_reported_as_a_difference_of_bits(two, call, read):
    paths = two(ONE, changed(w=np.where(ONE["w"] == 0, np.float32(-0.0), ONE["w"])))
    status, out, _ = call(*paths)
    assert status == 1 and "bits only: signs of 0, or NaN" in out and "0 -> -0" in out
    status, out, _ = call(*paths, "--tolerance", 0)
    assert status == 0 and "equal within 0: 2 tensors, 32 B; 1 of them differ in bits" in out
    assert read(*paths)[1]["differences"][0]["bits_only"] == 1


# ---- errors --------------------------------------------------------------------------------------


def test_errors_are_one_line_and_status_2(tmp_path, two, call):
    a, b = two(ONE, ONE)
    Plan.parse("tp2", MODEL).write(tmp_path / "strategy")
    (tmp_path / "empty").mkdir()
    Path(tmp_path / "text.safetensors").write_text("text")
    for arguments, said in [
        ((a, tmp_path / "missing"), "missing does not exist"),
        ((a, tmp_path / "empty"), "has no checkpoint"),
        ((tmp_path / "strategy", b), "is a strategy, which has no tensors"),
        ((a, tmp_path / "text.safetensors"), "text.safetensors"),
        ((a, b, "--step-b", 8), "holds step 7, not step 8"),
        ((a, b, "--from-a", tmp_path / "strategy"), "which have no layout"),
        ((a, b, "--tensor", "x*"), "matches 'x*'"),
    ]:
        status, out, err = call(*arguments)
        assert (
            (status, out) == (2, "")
            and err.startswith("mindresume: ")
            and said in err
            and err.count("\n") == 1
        ), (said, err)
    assert call(a, b, "--tolerance", -1)[0] == call(a)[0] == 2
