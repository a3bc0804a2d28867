"""metadata.json without mindformers: slices and ordinals, what is written is read back, what is
damaged is refused by name."""

import copy
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layouts import cuts, representable
from mutations import places

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats.metadata import (
    MAX_METADATA,
    StoredSlice,
    TensorMetadata,
    encode_metadata,
    metadata_from_records,
    read_metadata,
    slice_key,
)
from mindresume.model.layout import MAX_RANKS, TensorLayout, fold_optimizer_shards, ordinals
from mindresume.model.manifest import Details, TensorRecord

FIRST = 4


def described(name, layout, shape, *, first=0, dtype="float32", copies=True, kind="model"):
    """Returns the rows for all ranks of the stage, or for the last holder of each slice only."""
    groups = {}
    for rank, number in enumerate(ordinals(layout, shape), first):
        groups.setdefault(number, []).append(rank)
    stored = {
        number: tuple(
            StoredSlice(f"net-{kind}-{rank:07d}-0000099.safetensors", rank, tuple(group))
            for rank in (group if copies else group[-1:])
        )
        for number, group in groups.items()
    }
    return TensorMetadata(name, dtype, tuple(shape), layout, first, stored)


def encoded(*tensors):
    return b"".join(encode_metadata(tensors))


# ---- both ways -----------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.dictionaries(
        names,
        st.tuples(
            cuts(),
            st.sampled_from(["float32", "bfloat16", "bool", "int64", "float8_e4m3fn"]),
            st.integers(0, 99),
            st.booleans(),
        ),
        max_size=4,
    )
)
def test_written_metadata_is_read_back(rows):
    tensors = []
    for name, ((layout, shape), dtype, first, copies) in rows.items():
        assume(representable(layout))
        tensors.append(described(name, layout, shape, first=first, dtype=dtype, copies=copies))
    found = read_metadata(encoded(*tensors), "m")
    assert list(found) == list(rows)
    for tensor in tensors:
        assert found[tensor.name] == TensorMetadata(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            fold_optimizer_shards(tensor.layout),
            tensor.first,
            tensor.stored,
        )


LINE_OF_A = (
    '"a":{"properties":{"dtype":"float32","replica_id":[0,0,1,1],"allow_shape_mismatch":false,'
    '"allow_to_save":true},"global_shape":[4,3],"axis_fragmentations":[2,1],'
    '"layout":{"device_matrix":[2,2],"tensor_map":[0,-1],"interleaved_parallel":false,'
    '"alias_name":["a","b"],"rank_list":[4,5,6,7]},'
    '"chunk":[{"global_offset":[0],"local_shape":[2,3]},{"global_offset":[1],"local_shape":[2,3]}]},'
)


def test_the_file_is_that_of_mindformers_line_by_line():
    layout = TensorLayout((2, 2), (0, -1))
    data = encoded(
        described("a", layout, (4, 3), first=FIRST),
        described("b", TensorLayout((1,), ()), (), dtype="bfloat16"),
    )
    assert len(data.splitlines()) == 1 + 2 + 2 + 2 + 1
    assert data.decode().splitlines()[1] == LINE_OF_A
    found = json.loads(data)
    assert list(found) == ["state_dict_metadata", "storage_data"]
    assert list(found["storage_data"]) == ["('a', (0,))", "('a', (1,))", "('b', (0,))"]
    assert json.dumps(found["storage_data"]["('a', (1,))"]) == (
        '[{"file_name": "net-model-0000005-0000099.safetensors", "storage_rank": 5, '
        '"rank_group": [5, 7]}, {"file_name": "net-model-0000007-0000099.safetensors", '
        '"storage_rank": 7, "rank_group": [5, 7]}]'
    )


def test_a_parameter_without_layout_is_written_as_whole_on_the_rank_that_stored_it():
    tensor = TensorMetadata(
        "w",
        "int32",
        (3,),
        None,
        0,
        {0: (StoredSlice("f.safetensors", 3), StoredSlice("e.safetensors", 2))},
    )
    found = read_metadata(encoded(tensor), "m")["w"]
    assert found == TensorMetadata("w", "int32", (3,), TensorLayout((1,), (-1,)), 2, tensor.stored)


def test_a_layout_of_null_is_read():
    rows = json.loads(
        encoded(
            TensorMetadata("w", "int32", (3,), None, 0, {0: (StoredSlice("f.safetensors", 3),)})
        )
    )
    rows["state_dict_metadata"]["w"]["layout"] = None
    expected = TensorMetadata("w", "int32", (3,), None, 0, {0: (StoredSlice("f.safetensors", 3),)})
    assert read_metadata(json.dumps(rows).encode(), "m") == {"w": expected}


def test_parameters_that_differ_in_one_property():
    layout = TensorLayout((2, 2), (0, -1))
    tensors = [
        described(f"{dtype}{first}{shape}", layout, shape, dtype=dtype, first=first)
        for dtype in ("float32", "float8_e5m2")
        for first in (0, 4)
        for shape in ((4, 3), (2, 3))
    ]
    data = encoded(*tensors)
    assert read_metadata(data, "m") == {tensor.name: tensor for tensor in tensors}
    assert {
        row["properties"]["dtype"] for row in json.loads(data)["state_dict_metadata"].values()
    } == {"float32", "float8e5m2"}


def test_a_parameter_of_two_stages():
    layout = TensorLayout((2,), (0,))
    one, two = (described("w", layout, (4,), first=first) for first in (0, 6))
    both = TensorMetadata(
        "w",
        "float32",
        (4,),
        layout,
        0,
        {number: one.stored[number] + two.stored[number] for number in (0, 1)},
    )
    assert read_metadata(encoded(both), "m") == {"w": both}


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(dtype="complex64"), "dtype"),
        (dict(shape=(5, 3)), "divide"),
        (dict(name="\ud800"), "surrogate"),
        (dict(stored={}), "expected all of 2"),
        (dict(first=MAX_RANKS - 1), "rank"),
        (dict(layout=TensorLayout((2, 3), (-1, -1), 2)), "end within an axis"),
        # copies that mindformers would not find
        (StoredSlice("../x.safetensors", 5, (5, 7)), "file_name"),
        (StoredSlice("x.safetensors", -1, (5, 7)), "rank"),
        (StoredSlice("x.safetensors", 4, (5, 7)), "rank 4"),
        (StoredSlice("x.safetensors", 5, (5, 6)), "rank 6"),
        (StoredSlice("x.safetensors", 7), "rank 5 is in no group"),
    ],
)
def test_values_that_could_not_be_read_back_are_refused(change, reason):
    tensor = described("w", TensorLayout((2, 2), (0, -1)), (4, 3), first=FIRST)
    if isinstance(change, StoredSlice):
        change = dict(stored={**tensor.stored, 1: (change,)})
    with pytest.raises(ValueError, match=reason):
        encode_metadata([TensorMetadata(**{**vars(tensor), **change})])


def test_a_parameter_twice_is_not_written():
    tensor = described("w", TensorLayout((2,), (0,)), (4,))
    with pytest.raises(ValueError, match="twice"):
        encode_metadata([tensor, tensor])


# ---- damage --------------------------------------------------------------------------------------

WHOLE = json.loads(
    encoded(
        described("w", TensorLayout((2, 2), (0, -1)), (4, 3), first=FIRST),
        described("v", TensorLayout((2, 2), (-1,)), (3,), first=FIRST),
    )
)
KEY = slice_key("w", 1)


def changed(*path_and_value):
    """Returns the file with one value replaced; ``...`` removes it."""
    *path, last, value = path_and_value
    rows = inner = copy.deepcopy(WHOLE)
    for step in path:
        inner = inner[step]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(rows).encode()


def of_w(*path_and_value):
    return changed("state_dict_metadata", "w", *path_and_value)


def of_copy(*path_and_value):
    return changed("storage_data", KEY, 0, *path_and_value)


SAME_KEY = json.dumps(WHOLE).replace('"v": {', '"w": {').encode()

DAMAGED = [
    (b"", "0 bytes"),
    (b"[]", "JSON object"),
    (SAME_KEY, "'w' occurs twice"),
    (changed("state_dict_metadata", "w", ...), "storage_data has 'w'"),
    *((of_w(key, ...), f"{key} is missing") for key in ("properties", "global_shape", "chunk")),
    (of_w("properties", "dtype", "float8e4m3"), "float8e4m3"),
    *((of_w("global_shape", shape), "global_shape") for shape in ([4, -3], [2**40] * 2, [4] * 40)),
    (of_w("global_shape", [5, 3]), "divide"),
    (of_w("axis_fragmentations", [1, 2]), "axis_fragmentations"),
    (of_w("layout", "device_matrix", [2, 4]), "rank_list"),
    (of_w("layout", "rank_list", [4, 5, 6]), "3 ranks"),
    (of_w("layout", "rank_list", [4, 6, 5, 7]), "follow each other"),
    (of_w("layout", "rank_list", [4, 5, 6, MAX_RANKS]), f"rank is {MAX_RANKS}"),
    (of_w("layout", "interleaved_parallel", True), "interleaved_parallel"),
    (of_w("chunk", []), "0 slices, expected 2"),
    (of_w("chunk", 0, "local_shape", [4, 3]), "local_shape"),
    (of_w("chunk", 0, "global_offset", [1]), "different"),
    (changed("storage_data", KEY, []), "stored nowhere"),
    (changed("storage_data", slice_key("w", 2), WHOLE["storage_data"][KEY]), "slice 2 is stored"),
    *((changed("storage_data", key, []), "has the key") for key in ("('w', (0, 0))", "(" * 10**5)),
    (changed("storage_data", slice_key("unknown", 0), []), "storage_data has 'unknown'"),
    *(
        (of_copy("file_name", name), "file_name")
        for name in (
            "../x.safetensors",
            "x.ckpt",
        )
    ),
    *((of_copy("storage_rank", rank), "rank") for rank in (-1, MAX_RANKS, 10**400)),
    (of_copy("storage_rank", 4), "rank 4, which has slice 0"),
    (of_copy("rank_group", [5, 6]), "rank 6, which has slice 0"),
]
FREE = {"replica_id", "allow_shape_mismatch", "allow_to_save", "alias_name"}  # what nobody reads


def test_a_value_of_another_type_is_refused_wherever_it_stands():
    accepted = set()
    for path in places(WHOLE):
        found = WHOLE
        for key in path:
            found = found[key]
        for value in (None, -1, 1.5, "x", [], {}, 2**70, [None]):
            if type(value) is type(found) or FREE & set(path):
                continue
            try:
                tensors = read_metadata(changed(*path, value), "m")
            except CorruptFileError as error:
                assert error.path == "m" and len(str(error)) < 1500
            else:
                accepted.add((path[-1], str(value)))
                assert read_metadata(encoded(*tensors.values()), "m").keys() == tensors.keys()
    # a tensor without a layout is whole; a dimension without an axis; groups came with 1.9.0
    assert accepted == {("layout", "None"), (0, "[]"), (1, "[]"), ("rank_group", "None")}


@pytest.mark.parametrize("data, reason", DAMAGED)
def test_damage_is_refused_by_name(data, reason):
    with pytest.raises(CorruptFileError) as caught:
        read_metadata(data, "here/metadata.json")
    assert reason in str(caught.value) and caught.value.path == "here/metadata.json"
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "data",
    [
        changed("version", 7),
        of_w("new", {"deep": [1]}),
        of_copy("new", 1),
        of_w("properties", {"dtype": "Float32"}),
        of_w("axis_fragmentations", ...),
        of_w("layout", "alias_name", ...),
    ],
)
def test_optional_keys_may_be_missing(data):
    assert read_metadata(data, "m") == read_metadata(json.dumps(WHOLE).encode(), "m")


def test_without_groups_as_mindformers_1_8_writes():
    found = read_metadata(of_copy("rank_group", ...), "m")["w"].stored[1]
    assert [copy.group for copy in found] == [(), (5, 7)] and [copy.rank for copy in found] == [
        5,
        7,
    ]


def test_the_tensor_is_named():
    with pytest.raises(CorruptFileError) as caught:
        read_metadata(of_w("chunk", []), "m")
    assert caught.value.tensor == "w"


def test_a_file_that_is_too_large_is_not_parsed():
    class Large(bytes):
        def __len__(self):
            return MAX_METADATA + 1

    with pytest.raises(CorruptFileError, match="bytes"):
        read_metadata(Large(b"{}"), "m")


@given(st.binary())
def test_any_bytes(data):
    with pytest.raises(CorruptFileError):
        read_metadata(data, "m")


SUM = "0" * 32


def files_of(world):
    return [[name_of(rank, world, kind) for kind in ("model", "opt")] for rank in range(world)]


def row(layout, shape, file=0, dtype="float32"):
    return TensorRecord(dtype, layout.local_shape(shape), SUM, layout, shape, file)


class Tables:
    """The records of ranks. ``tables``: {name: row} of each rank."""

    def __init__(self, tables):
        self.tables, self.read = tables, []

    def details(self, rank):
        self.read.append(rank)
        return Details(self.tables[rank])


def made(world, tables, deduplicated=False):
    """``tables``: {name: row} of each rank."""
    records = Tables(tables)
    rows = metadata_from_records(files_of(world), deduplicated, records)
    assert read_metadata(b"".join(encode_metadata(rows)), "metadata.json") is not None
    return {found.name: found for found in rows}, records.read


def stored(found):
    return {
        number: [(copy.file, copy.rank, copy.group) for copy in copies]
        for number, copies in found.stored.items()
    }


def name_of(rank, world, kind="model"):
    return f"net-{kind}-{rank:07d}-{world:07d}.safetensors"


def test_replicas_are_named_and_one_record_is_read():
    tensor = row(TensorLayout((2, 2), (0, -1)), (8, 4))
    found, read = made(4, [{"w": tensor}] * 4)
    assert stored(found["w"]) == {
        0: [(name_of(0, 4), 0, (0, 2)), (name_of(2, 4), 2, ())],
        1: [(name_of(1, 4), 1, (1, 3)), (name_of(3, 4), 3, ())],
    }
    assert read == [0]


def test_the_file_of_a_tensor_is_that_of_its_record():
    tensor = row(TensorLayout((2,), (0, -1)), (8, 4), file=1)
    found, _ = made(2, [{"adam_m.w": tensor}] * 2)
    assert [copies[0].file for copies in found["adam_m.w"].stored.values()] == [
        name_of(rank, 2, "opt") for rank in range(2)
    ]


def test_without_redundancy_each_slice_is_where_its_writer_put_it():
    tensor = row(TensorLayout((2, 2), (0, -1)), (8, 4))
    found, read = made(4, [{"w": tensor}, {}, {}, {"w": tensor}], deduplicated=True)
    assert stored(found["w"]) == {0: [(name_of(0, 4), 0, (0, 2))], 1: [(name_of(3, 4), 3, (1, 3))]}
    assert sorted(read) == [0, 1, 2, 3]


def test_stages_have_their_own_ranks_and_a_shared_tensor_has_the_copies_of_both():
    layout = TensorLayout((2,), (0, -1))
    both, first, second = row(layout, (8, 4)), row(layout, (4, 4)), row(layout, (6, 4))
    found, read = made(4, [{"shared": both, "a": first}] * 2 + [{"shared": both, "b": second}] * 2)
    assert {name: tensor.first for name, tensor in found.items()} == {"shared": 0, "a": 0, "b": 2}
    assert {
        number: [copy.rank for copy in copies] for number, copies in found["shared"].stored.items()
    } == {0: [0, 2], 1: [1, 3]}
    assert [copies[0].rank for copies in found["b"].stored.values()] == [2, 3] and read == [0, 2]


def test_a_shared_tensor_with_different_layouts_has_the_first_one():
    first, other = (
        row(TensorLayout((2,), (0, -1)), (8, 4)),
        row(TensorLayout((2,), (-1, 0)), (8, 4)),
    )
    found, _ = made(4, [{"shared": first}] * 2 + [{"shared": other}] * 2)
    assert found["shared"].layout == first.layout
    assert [copies[0].rank for copies in found["shared"].stored.values()] == [0, 1]


def test_counters_are_not_described():
    found, _ = made(
        2,
        [
            {
                "global_step": TensorRecord("int32", (1,), SUM),
                "w": row(TensorLayout((2,), (0,)), (8,)),
            }
        ]
        * 2,
    )
    assert list(found) == ["w"]


def test_stages_of_different_size_are_refused():
    two, four = row(TensorLayout((2,), (0,)), (8,)), row(TensorLayout((4,), (0,)), (8,))
    with pytest.raises(RecordError, match="sharded over 4 ranks, other tensors over 2"):
        made(4, [{"a": two, "b": four}] * 4)
    with pytest.raises(RecordError, match="sharded over 2 ranks, which does not divide 3"):
        made(3, [{"a": two}] * 3)
