"""The arrays of a live MindSpore network, what their layouts are read from, and whether a
checkpoint fits. CPU, one process."""

import json
import random
import types

import ml_dtypes
import numpy as np
import pytest

ms = pytest.importorskip("mindspore")

from mindresume.errors import LoadError, SaveError  # noqa: E402
from mindresume.mindformers.network_state import (  # noqa: E402
    capture_random,
    deferred,
    layouts,
    restore_random,
    strategy_layouts,
    to_numpy,
)
from mindresume.model.layout import TensorLayout  # noqa: E402
from mindresume.tensor_files import read_header, read_tensor, tensor_bytes  # noqa: E402

# infinities, a denormal
BITS = np.array([0x0000, 0x8000, 0x3F80, 0x7F80, 0xFF80, 0x0001, 0x4049, 0xC2F7], np.uint16)


def bf16(name="w"):
    return ms.Parameter(
        ms.Tensor(BITS.view(ml_dtypes.bfloat16).astype(np.float32), ms.bfloat16), name=name
    )


# ---- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value, dtype",
    [
        (7, "int64"),
        (-(2**62), "int64"),
        (np.int32(3), "int64"),
        (0.5, "float32"),
        (np.float64(0.5), "float32"),
        (True, "bool"),
        (np.bool_(False), "bool"),
        ("text", "<U4"),
        (np.arange(6, dtype=np.int8).reshape(2, 3), "int8"),
    ],
)
def test_plain_numbers_and_arrays(value, dtype):
    array = to_numpy("x", value)
    assert array.dtype == np.dtype(dtype) and array.shape == np.shape(value)
    assert np.array_equal(array, value)


def test_a_value_that_is_no_tensor_is_named():
    with pytest.raises(SaveError, match="parameter table is a list; only tensors can be saved"):
        to_numpy("table", [1, 2])


@pytest.mark.parametrize(
    "dtype", [ms.float32, ms.float16, ms.float64, ms.int32, ms.int64, ms.int8, ms.uint8, ms.bool_]
)
def test_tensors_of_every_dtype(dtype):
    value = ms.Tensor(np.array([[0, 1], [1, 0]]), dtype)
    array = to_numpy("x", value)
    assert array.dtype.name == str(dtype).lower().rstrip("_")
    assert np.array_equal(array, value.asnumpy())


def test_a_parameter_that_was_never_filled_is_initialised():
    from mindspore.common.initializer import initializer

    parameter = ms.Parameter(initializer("ones", (2, 3), ms.float32), name="w")
    assert np.array_equal(to_numpy("w", parameter), np.ones((2, 3), np.float32))


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_the_same_names_dtypes_shapes_and_bytes_as_mindspore_save_checkpoint(tmp_path, fmt):
    parameters = {
        "w": bf16("w"),
        "half": ms.Parameter(ms.Tensor([[1.5]], ms.float16), name="half"),
        "scalar": ms.Parameter(ms.Tensor(2.5, ms.float32), name="scalar"),
        "count": ms.Parameter(ms.Tensor([3], ms.int32), name="count"),
    }
    plain = {"step_num": 7, "loss_scale": 0.5, "flag": True, "global_step": parameters["count"]}
    path = str(tmp_path / f"theirs.{fmt}")
    ms.save_checkpoint(
        [{"name": name, "data": value} for name, value in parameters.items()],
        path,
        append_dict=dict(plain),
        format=fmt,
    )
    ours = deferred([*parameters.items(), *plain.items()])
    ours = {name: np.asarray(value) for name, value in ours.items()}
    with open(path, "rb") as file:
        theirs = {
            name: read_tensor(file, entry)
            for name, entry in read_header(file, path).tensors.items()
        }
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].tobytes()) == (array.dtype, array.tobytes()), name
        assert ours[name].shape == array.shape, name


# ---- layouts -------------------------------------------------------------------------------------


def row(matrix, tensor_map, before, full, group="4-1234"):
    """Returns a row of ``network.parameter_layout_dict`` as after a compilation; without ``full``
    as a graph from the compile cache has it (mindspore 2.9.0). ``before``: the slice before the
    optimizer shard."""
    return matrix, tensor_map, before, 0, True, group, full or ()


def in_tuples(tensor_map):
    return tuple(tuple(each) if isinstance(each, list) else each for each in tensor_map)


@pytest.mark.parametrize(
    "matrix, tensor_map, before, held, full, pieces",
    [
        ((2, 2), [0, -1], (4, 4), (4, 4), (8, 4), 0),  # dp 2 x tp 2, rows cut
        ((2, 2), [-1, 0], (8, 2), (8, 2), (8, 4), 0),
        # and the optimizer's share of the dp replicas
        ((2, 2), [0, -1], (4, 4), (2, 4), (8, 4), 2),
        ((2, 2), [-1], (8,), (2,), (8,), 4),  # replicated: cut over all four ranks
        ((2, 2), [-1], (8,), (4,), (8,), 2),
        ((4,), [-1, -1], (4, 4), (4, 4), (4, 4), 0),  # dp 4, nothing cut
        ((2, 2), [[1, 0], -1], (2, 4), (2, 4), (8, 4), 0),  # two axes on one dimension
        ((2, 2, 2), [(2, 0), -1], (2, 4), (1, 4), (8, 4), 2),
        ((2, 2), [], (), (), (), 0),  # no dimensions
        ((2, 2), [0, -1], (0, 4), (0, 4), (0, 4), 0),
    ],
)
def test_layouts_with_the_optimizer_shard_that_the_sizes_tell(
    matrix, tensor_map, before, held, full, pieces
):
    """Only the shape of the parameter shows it (facts of MindSpore 2.9.0)."""
    expected = TensorLayout(matrix, in_tuples(tensor_map), pieces), full
    for group in ("4-1234" if pieces else "", "4-1234"):
        compiled = row(matrix, tensor_map, before, full, group)
        assert layouts({"w": compiled}, {"w": held}, pytest.fail) == {"w": expected}
    cached = row(matrix, tensor_map, before, None, "4-1234" if pieces else "")
    assert layouts({"w": cached, "inputs0": cached}, {"w": held}, pytest.fail) == {"w": expected}
    assert expected[0].local_shape(full) == held


def test_without_a_table_there_are_no_layouts():
    assert layouts(None, {"w": (4,)}, pytest.fail) == {} == layouts({}, {"w": (4,)}, pytest.fail)


@pytest.mark.parametrize(
    "matrix, tensor_map, held, full, says",
    [
        # its whole share is held: the row hides the optimizer shard
        ((2, 2), [0, -1], (2, 4), None, "group 4-1234"),
        ((2, 2), [0, -1], (8, 4), (8, 4), ""),
        ((2, 2), [0, -1], (3, 4), (8, 4), ""),
        ((2, 2), [0, -1], (4,), (8, 4), ""),
        ((2, 2), [0, -1], (8, 2), (8, 4), ""),  # cut in the other dimension
        ((2, 2), [0, -1], (1, 4), (8, 4), ""),  # smaller than the smallest piece
        ((2, 2), [0, -1], (4, 4), (7, 4), ""),
        ((), [0, -1], (4, 4), (8, 4), ""),
        ((2, 2), [5, -1], (4, 4), (8, 4), ""),
        ((2, 2), [0, 0], (4, 4), (8, 4), ""),
        ((0, 2), [0, -1], (4, 4), (8, 4), ""),
    ],
)
def test_a_row_that_does_not_fit_is_left_out_with_a_warning(matrix, tensor_map, held, full, says):
    warnings = []
    table = {"w": row(matrix, tensor_map, held, full), "v": row((2, 2), [0], (4,), (8,))}
    assert list(layouts(table, {"w": held, "v": (4,)}, warnings.append)) == ["v"]
    [warned] = warnings
    assert warned.text.startswith("w: its layout is not recorded: ") and says in warned.text


# ---- random states -------------------------------------------------------------------------------


def test_generators_continue_from_their_saved_state():
    # of MindSpore the state itself: no operator of the CPU back end draws from this generator
    # (those of ops and nn.Dropout have one of their own in each kernel, which nothing can read)
    def draws():
        # more than the 624 words of the Mersenne Twister
        numbers = [(random.random(), random.gauss(0, 1), np.random.randn()) for _ in range(700)]
        return numbers, ms.get_rng_state().asnumpy().tolist()

    def seed(number):
        ms.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        random.gauss(0, 1)  # leaves half of a pair inside the generator
        np.random.randn()

    seed(5)
    saved = json.dumps(capture_random())
    expected = draws()
    seed(99)
    assert draws() != expected
    assert restore_random(json.loads(saved)) == ["python", "numpy", "MindSpore's default generator"]
    assert draws() == expected
    assert restore_random({}) == []


def test_a_deferred_tensor_has_the_bytes_of_the_array():
    rows = [
        ("f32", ms.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))),
        ("bf16", ms.Tensor([1.5, -2.0], ms.bfloat16)),
        ("zero", ms.Tensor(3, ms.int64)),
        ("flag", ms.Tensor([True, False])),
        ("number", 7),
        ("text", "dynamic"),
        ("numpy", np.arange(3, dtype=np.int8)),
    ]
    for name, value in rows:
        array, found = to_numpy(name, value), deferred(rows)[name]
        assert (found.dtype.name, tuple(found.shape), found.nbytes) == (
            array.dtype.name,
            array.shape,
            array.nbytes,
        )
        assert np.asarray(found).tobytes() == array.tobytes()


def test_a_deferred_tensor_is_read_on_demand():
    class Tensor:
        shape, dtype, reads = (2,), ms.float32, 0

        def asnumpy(self):
            self.reads += 1
            return np.array([1, 2], np.float32)

    tensor = Tensor()
    found = deferred([("x", tensor)])["x"]
    assert found.nbytes == 8 and tensor.reads == 0
    assert (
        bytes(tensor_bytes(found)) == np.array([1, 2], np.float32).tobytes() and tensor.reads == 1
    )


@pytest.mark.parametrize(
    "state",
    [
        {"python": {"version": 3}},
        {"numpy": 5},
        {"mindspore": {"state": "%%"}},
        {"python": {"version": 3, "internal": "AAAA", "gauss": None}},
    ],
)
def test_an_invalid_random_state_is_our_error(state):
    with pytest.raises(LoadError, match="the random state in the record cannot be restored"):
        restore_random(state)


# ---- strategy metadata ---------------------------------------------------------------------------


def described(matrix, tensor_map, full):
    """Returns a row of MindSpore's strategy metadata, in which the optimizer shard is part of the
    tensor map."""
    row = {"device_matrix": matrix, "tensor_map": tensor_map, "interleaved_parallel": False}
    return types.SimpleNamespace(to_dict=lambda: row), "float32", full


# parameter_layout_dict and strategy metadata of one parameter, as MindSpore 2.9.0 gave them for dp2
# tp2 with optimizer shards
QKV_ROW = (
    [2, 2],
    [0, -1],
    [288, 192],
    0,
    True,
    "dp-0-2",
    [576, 192],
    [288, 192],
    False,
    False,
    0,
    0,
)


def test_the_optimizer_shard_is_kept_apart_from_tensor_parallelism():
    network = types.SimpleNamespace(parameter_layout_dict={"w": QKV_ROW})
    shapes, warnings = {"w": (144, 192)}, []
    split = layouts(network.parameter_layout_dict, shapes, warnings.append)
    apart = (TensorLayout((2, 2), (0, -1), 2), (576, 192))
    assert split == {"w": apart}
    folded = {"w": described((2, 1, 2), ((0, 2, 1), -1), (576, 192))}
    assert strategy_layouts(folded, shapes, warnings.append, split) == {"w": apart}
    assert strategy_layouts(folded, shapes, warnings.append) == {
        "w": (TensorLayout((2, 1, 2), ((0, 2, 1), -1)), (576, 192))
    }
    assert warnings == []


@pytest.mark.parametrize(
    "row",
    [
        described((2, 1, 2), ((2, 1, 0), -1), (576, 192)),
        described((2, 2), (0, 1), (576, 192)),
        described((2, 1, 2), ((0, 2, 1), -1), (1152, 96)),
    ],
)
def test_a_layout_that_mindspore_describes_in_two_ways_is_unknown(row):
    shapes, warnings = {"w": (144, 192)}, []
    split = layouts({"w": QKV_ROW}, shapes, warnings.append)
    assert (
        strategy_layouts({"w": row}, shapes, warnings.append, split) == {}
        and "its layout is not recorded" in warnings[0].text
    )
