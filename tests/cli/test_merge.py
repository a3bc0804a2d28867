"""``mindresume merge``: consolidated weights of both kinds, its output, and its refusals."""

from rank_folders import tensors_at
from reshard.plans import (
    COUNTERS,
    MODEL,
    Plan,
    complete,
    foreign,
    put,
    random_tensors,
)

# without the empty one
SOLID = {name: spec for name, spec in MODEL.items() if name != "layers.1.none"}
TENSORS = random_tensors(SOLID)
EVERYTHING = {**TENSORS, **COUNTERS}
COMMAND = "merge"


def bits(tensors):
    # by name: MindSpore, where it was imported, brings a bfloat16 of its own
    return {
        name: (array.dtype.name, array.shape, array.tobytes()) for name, array in tensors.items()
    }


# ---- results and output --------------------------------------------------------------------------


def test_consolidated_weights_in_other_parts(tmp_path, call):
    complete(tmp_path / "a", TENSORS)
    assert call(tmp_path / "a", tmp_path / "b", "--part-size", "500")[0] == 0
    assert bits(tensors_at(tmp_path / "b")) == bits(EVERYTHING)
    put(tmp_path / "one" / "net.ckpt", EVERYTHING)
    foreign(tmp_path / "two", Plan.parse("dp1", SOLID), TENSORS)
    for src in ("one/net.ckpt", "two"):
        assert call(tmp_path / src, tmp_path / f"new {src[:3]}", "--engine", "direct")[0] == 0
        assert bits(tensors_at(tmp_path / f"new {src[:3]}")) == bits(EVERYTHING)
