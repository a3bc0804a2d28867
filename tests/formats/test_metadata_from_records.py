"""The content of metadata.json, derived from the records alone."""
import pytest

from mindresume.errors import RecordError
from mindresume.formats.metadata import encode_metadata, metadata_from_records, read_metadata
from mindresume.model.layout import TensorLayout, region_of
from mindresume.model.manifest import Details, TensorRecord

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
    return {number: [(copy.file, copy.rank, copy.group) for copy in copies] for number, copies in found.stored.items()}


def name_of(rank, world, kind="model"):
    return f"net-{kind}-{rank:07d}-{world:07d}.safetensors"


def test_replicas_are_named_and_one_record_is_read():
    tensor = row(TensorLayout((2, 2), (0, -1)), (8, 4))
    found, read = made(4, [{"w": tensor}] * 4)
    assert stored(found["w"]) == {0: [(name_of(0, 4), 0, (0, 2)), (name_of(2, 4), 2, ())],
                                  1: [(name_of(1, 4), 1, (1, 3)), (name_of(3, 4), 3, ())]}
    assert read == [0]


def test_the_file_of_a_tensor_is_that_of_its_record():
    tensor = row(TensorLayout((2,), (0, -1)), (8, 4), file=1)
    found, _ = made(2, [{"adam_m.w": tensor}] * 2)
    assert [copies[0].file for copies in found["adam_m.w"].stored.values()] == [name_of(rank, 2, "opt") for rank in range(2)]


def test_without_redundancy_each_slice_is_where_its_writer_put_it():
    tensor = row(TensorLayout((2, 2), (0, -1)), (8, 4))
    found, read = made(4, [{"w": tensor}, {}, {}, {"w": tensor}], deduplicated=True)
    assert stored(found["w"]) == {0: [(name_of(0, 4), 0, (0, 2))], 1: [(name_of(3, 4), 3, (1, 3))]}
    assert sorted(read) == [0, 1, 2, 3]


def test_an_optimizer_shard_splits_slices():
    tensor = row(TensorLayout((2, 2), (0, -1), 2), (8, 4))
    found, _ = made(4, [{"w": tensor}] * 4)
    assert {number: copies[0].rank for number, copies in found["w"].stored.items()} == {0: 0, 1: 2, 2: 1, 3: 3}
    assert region_of(tensor.layout, (8, 4), 1)[0] == slice(2, 4)


def test_stages_have_their_own_ranks_and_a_shared_tensor_has_the_copies_of_both():
    layout = TensorLayout((2,), (0, -1))
    both, first, second = row(layout, (8, 4)), row(layout, (4, 4)), row(layout, (6, 4))
    found, read = made(4, [{"shared": both, "a": first}] * 2 + [{"shared": both, "b": second}] * 2)
    assert {name: tensor.first for name, tensor in found.items()} == {"shared": 0, "a": 0, "b": 2}
    assert {number: [copy.rank for copy in copies] for number, copies in found["shared"].stored.items()} == {0: [0, 2], 1: [1, 3]}
    assert [copies[0].rank for copies in found["b"].stored.values()] == [2, 3] and read == [0, 2]


def test_a_shared_tensor_with_different_layouts_has_the_first_one():
    first, other = row(TensorLayout((2,), (0, -1)), (8, 4)), row(TensorLayout((2,), (-1, 0)), (8, 4))
    found, _ = made(4, [{"shared": first}] * 2 + [{"shared": other}] * 2)
    assert found["shared"].layout == first.layout
    assert [copies[0].rank for copies in found["shared"].stored.values()] == [0, 1]


def test_counters_are_not_described():
    found, _ = made(2, [{"global_step": TensorRecord("int32", (1,), SUM), "w": row(TensorLayout((2,), (0,)), (8,))}] * 2)
    assert list(found) == ["w"]


def test_tensors_without_layout_give_empty_metadata():
    assert metadata_from_records(files_of(2), False, Tables([{"w": TensorRecord("float32", (1,), SUM)}])) == []


def test_stages_of_different_size_are_refused():
    two, four = row(TensorLayout((2,), (0,)), (8,)), row(TensorLayout((4,), (0,)), (8,))
    with pytest.raises(RecordError, match="sharded over 4 ranks, other tensors over 2"):
        made(4, [{"a": two, "b": four}] * 4)
    with pytest.raises(RecordError, match="sharded over 2 ranks, which does not divide 3"):
        made(3, [{"a": two}] * 3)
