"""``mindresume diff``: its output for two checkpoints, and its exit status."""

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


# ---- equal ---------------------------------------------------------------------------------------


def test_layouts_from_strategies(tmp_path, call):
    a, b, of_a = tmp_path / "a", tmp_path / "b", tmp_path / "of_a"
    one, other = Plan.parse("tp4", MODEL), Plan.parse("dp2tp2", MODEL)
    foreign(a, one, TENSORS)
    foreign(b / "checkpoint", other, TENSORS, "ckpt")
    one.write(of_a)
    other.write(b / "strategy")  # beside: found
    status, _, err = call(a, b)
    assert status == 2 and "have no layout" in err and err.count("\n") == 1
    assert call(a, b, "--from-a", of_a)[0] == call(b, a, "--from-b", of_a)[0] == 0


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
    wide = ONE["w"].astype(np.float64)
    a, b = two({**ONE, "gone": np.zeros(2, np.int8)}, {"w": wide, "step_num": np.ones(1, int)})
    status, found = read(a, b, "--tolerance", "inf")
    assert status == 1 and [(row["name"], row["kind"]) for row in found["differences"]] == [
        ("gone", "only in A"),
        ("step_num", "shape"),
        ("w", "dtype"),
    ]
    out = call(a, b)[1]
    assert "dtype: float32 (2, 3) -> float64 (2, 3)" in out
    assert "shape: int64 () -> int64 (1,)" in out


def test_minus_zero_is_reported_as_a_difference_of_bits(two, call):
    paths = two(ONE, {**ONE, "w": np.where(ONE["w"] == 0, np.float32(-0.0), ONE["w"])})
    status, out, _ = call(*paths)
    assert status == 1 and "bits only: signs of 0, or NaN" in out and "0 -> -0" in out
    assert call(*paths, "--tolerance", 0)[0] == 0


# ---- errors --------------------------------------------------------------------------------------


def test_errors_are_one_line_and_status_2(tmp_path, two, call):
    a, b = two(ONE, ONE)
    Plan.parse("tp2", MODEL).write(tmp_path / "strategy")
    for arguments, said in [
        ((tmp_path / "strategy", b), "is a strategy, which has no tensors"),
        ((a, b, "--step-b", 8), "holds step 7, not step 8"),
        ((a, b, "--from-a", tmp_path / "strategy"), "which have no layout"),
        ((a, b, "--tensor", "x*"), "matches 'x*'"),
    ]:
        status, out, err = call(*arguments)
        assert (status, out) == (2, "") and said in err and err.count("\n") == 1, (said, err)
    assert call(a, b, "--tolerance", -1)[0] == call(a)[0] == 2
