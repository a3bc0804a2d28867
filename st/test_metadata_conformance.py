"""metadata.json against mindformers itself: what it writes we read, what we write it reads and
finds the same bytes with. No training and no cluster: layouts and the functions that work on them
need neither."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mindresume.formats.iterations import (
    CommonInfo,
    WeightFile,
    encode_common,
    iteration_name,
    parse_common,
    parse_weight_file,
)
from mindresume.formats.metadata import (
    StoredSlice,
    TensorMetadata,
    encode_metadata,
    read_metadata,
    slice_key,
)
from mindresume.model.layout import (
    Region,
    TensorLayout,
    fold_optimizer_shards,
    held,
    ordinals,
    shape_of,
    shares,
)
from mindresume.model.layout import whole as whole_region
from mindresume.reshard.range_reader import view
from st.training_run import ROOT

WRITTEN = sorted((ROOT / "st" / "fixtures").glob("*/output/checkpoint/iteration_*/metadata.json"))
TYPES = ["float32", "bfloat16", "float16", "int32", "bool", "float8_e4m3fn", "float8_e5m2", "uint8"]
quick = settings(max_examples=60, suppress_health_check=list(HealthCheck))


@st.composite
def cuts(draw, ranks=None, least=1):
    """(layout without optimizer shard, shape that divides); ``ranks``: of the stage. mindformers
    cannot describe what has no dimension."""
    if ranks:
        matrix = draw(
            st.sampled_from([(ranks,), (2, ranks // 2), (ranks // 2, 2), (2, 1, ranks // 2)])
        )
    else:
        matrix = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
        assume(math.prod(matrix) <= 32)
    axes, maps = draw(st.permutations(range(len(matrix)))), []
    for _ in range(draw(st.integers(least, 3))):
        count = draw(st.integers(0, min(2, len(axes))))
        taken, axes = tuple(axes[:count]), axes[count:]
        maps.append(-1 if not taken else taken[0] if count == 1 else taken)
    layout = TensorLayout(matrix, maps)
    return layout, tuple(
        draw(st.integers(1, 3)) * count for count in layout.counts([0] * len(maps))
    )


def theirs(layout: TensorLayout, first: int = 0):
    """The layout as an object of MindSpore."""
    from mindspore.parallel import Layout

    names = tuple("abcdefgh"[: len(layout.device_matrix)])

    def name(axis: int) -> str:
        return "None" if axis == -1 else names[len(names) - 1 - axis]

    cuts = [
        tuple(map(name, cut)) if isinstance(cut, tuple) else name(cut) for cut in layout.tensor_map
    ]
    return Layout(layout.device_matrix, names, list(range(first, first + layout.stage_size)))(*cuts)


def region_of(layout: TensorLayout | None, shape, number: int) -> Region:
    if layout is None:
        return whole_region(shape)
    return held(layout, ordinals(layout, shape).index(number), shape)


def groups_of(layout: TensorLayout, shape, first: int = 0) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for rank, number in enumerate(ordinals(layout, shape), first):
        found.setdefault(number, []).append(rank)
    return {number: tuple(ranks) for number, ranks in found.items()}


# ---- slices --------------------------------------------------------------------------------------


@quick
@given(cuts(), st.integers(0, 50))
def test_ordinals_and_regions_are_those_of_mindformers(case, first):
    from mindformers.checkpoint.reshard import infer_slice_area_by_rank
    from mindformers.checkpoint.sharded_tensor import _get_global_offset_and_replica_id_from_layout

    layout, shape = case
    numbers, replicas = _get_global_offset_and_replica_id_from_layout(theirs(layout, first))
    assert numbers == ordinals(layout, shape)
    for rank, number in enumerate(numbers):
        area = infer_slice_area_by_rank(layout.device_matrix, layout.tensor_map, rank, shape)
        assert area == region_of(layout, shape, number)
    head = json.loads(b"".join(encode_metadata([stored_by_all("w", layout, shape, first=first)])))[
        "state_dict_metadata"
    ]["w"]
    assert head["properties"]["replica_id"] == replicas


@quick
@given(cuts(), st.data())
def test_an_optimizer_shard_is_folded_as_mindspore_does(case, data):
    from mindspore.parallel.strategy import _NetStrategyInfo

    plain, shape = case
    sizes = [n for n in range(1, plain.replicas + 1) if plain.replicas % n == 0]
    layout = TensorLayout(
        plain.device_matrix, plain.tensor_map, data.draw(st.sampled_from([-1, 0, *sizes]))
    )
    compiled = SimpleNamespace(
        dev_matrix=list(layout.device_matrix),
        opt_weight_shard_size=layout.optimizer_shards,
        tensor_map=[list(cut) if isinstance(cut, tuple) else [cut] for cut in layout.tensor_map],
        tensor_type="float32",
        tensor_shape=shape,
        rank_list=list(range(layout.stage_size)),
    )
    info = object.__new__(_NetStrategyInfo)
    try:
        found = fold_optimizer_shards(layout)
    except ValueError:
        assert not right(info, compiled, layout)  # it says something else, or fails
        return
    row = info._layout_process(compiled)[0].to_dict()
    assert TensorLayout(row["device_matrix"], row["tensor_map"]).normalized() == found


def right(info, compiled, layout: TensorLayout) -> bool:
    """Returns whether MindSpore's own layout cuts dimension 0 into the given number of pieces."""
    try:
        row = info._layout_process(compiled)[0].to_dict()
        return TensorLayout(row["device_matrix"], row["tensor_map"]).copies == layout.copies
    except (ValueError, IndexError, ZeroDivisionError):
        return False


# ---- metadata of mindformers ---------------------------------------------------------------------


@quick
@given(
    tensors=st.dictionaries(
        st.text("ab.'\"(),\\ é", min_size=1, max_size=6),
        st.tuples(cuts(8), st.sampled_from(TYPES)),
        min_size=1,
        max_size=4,
    ),
    prefix=st.sampled_from([None, "qwen3"]),
    balanced=st.booleans(),
)
def test_metadata_written_by_mindformers_is_read(tmp_path, tensors, prefix, balanced):
    """Two stages of 8 ranks have the same parameters with names that differ in one letter."""
    rows = {stage: {f"{name}{stage}": row for name, row in tensors.items()} for stage in (0, 1)}
    path = tmp_path / "metadata.json"
    written_by_mindformers(path, rows, prefix, balanced)
    found = read_metadata(path.read_bytes(), str(path))
    assert set(found) == {*rows[0], *rows[1]}
    for stage in (0, 1):
        for number, (name, ((layout, shape), dtype)) in enumerate(rows[stage].items()):
            tensor = found[name]
            assert (tensor.dtype, tensor.shape, tensor.layout, tensor.first) == (
                dtype,
                shape,
                layout.normalized(),
                8 * stage,
            )
            for ordinal, group in groups_of(layout, shape, 8 * stage).items():
                copies = [
                    StoredSlice(
                        str(WeightFile(prefix, "opt" if number else "model", rank, 16)), rank, group
                    )
                    for rank in group
                ]
                assert tensor.stored[ordinal] == tuple(copies[-1:] if balanced else copies)


def written_by_mindformers(path: Path, rows: dict, prefix: str | None, balanced: bool) -> None:
    """The first parameter of a stage is of the model, the others are not. ``balanced``: only the
    last holder stores."""
    import mindspore as ms
    from mindformers.checkpoint import metadata
    from mindformers.checkpoint.sharded_tensor import get_sharded_tensor_from_strategy_metadata

    everything = {}
    for stage, parameters in rows.items():
        infos = {
            name: [
                theirs(layout, 8 * stage),
                getattr(ms, dtype if dtype != "bool" else "bool_"),
                shape,
            ]
            for name, ((layout, shape), dtype) in parameters.items()
        }
        for rank in range(8 * stage, 8 * stage + 8):
            everything[rank] = get_sharded_tensor_from_strategy_metadata(infos, rank)
    with patch.object(metadata, "get_group_size", lambda: 16):
        mappings = metadata.get_total_params_file_mapping_info(
            everything, prefix, [next(iter(rows[stage])) for stage in rows]
        )
    if balanced:
        mappings = [row for row in mappings if row[1] == row[2][-1]]
    metadata.save_metadata(everything, mappings, str(path))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parts[-5]}-{path.parts[-2]}")
def test_metadata_of_a_real_run_is_read(path):
    """Every slice has its expected shape in its file, and our metadata of the same job is equal."""
    from safetensors import safe_open

    found = read_metadata(path.read_bytes(), str(path))
    for tensor in found.values():
        for number, copies in tensor.stored.items():
            shape = list(shape_of(region_of(tensor.layout, tensor.shape, number)))
            for copy in copies:
                with safe_open(path.parent / copy.file, "np") as file:
                    assert file.get_slice(tensor.name).get_shape() == shape
                assert parse_weight_file(copy.file).index == copy.rank
    assert read_metadata(b"".join(encode_metadata(found.values())), "ours") == found
    common = (path.parent / "common.json").read_bytes()
    assert encode_common(parse_common(common, "c")) == common.replace(
        b',\n    "ckpt_status": null', b""
    )


# ---- our metadata --------------------------------------------------------------------------------


def stored_by_all(
    name: str, layout: TensorLayout, shape, *, first: int = 0, dtype: str = "float32"
) -> TensorMetadata:
    stored = {
        number: tuple(
            StoredSlice(str(WeightFile("ours", "model", rank, 99)), rank, group) for rank in group
        )
        for number, group in groups_of(layout, shape, first).items()
    }
    return TensorMetadata(name, dtype, tuple(shape), layout, first, stored)


@quick
@given(
    tensors=st.dictionaries(
        st.text("ab.'\"(),\\ é", min_size=1, max_size=6),
        st.tuples(cuts(8, 0), st.sampled_from(TYPES)),
        min_size=1,
        max_size=4,
    ),
    shards=st.sampled_from([0, 0, -1]),
    shared=st.booleans(),
    target=cuts(4, 0),
    rank=st.integers(0, 3),
)
def test_mindformers_reads_our_metadata_and_loads_from_the_same_files(
    tmp_path, tensors, shards, shared, target, rank
):
    """Written by stage 1 of 8 ranks, with all replicas or only the assignment of ``shares``; read
    by ``rank`` of 4 in another layout."""
    import mindspore as ms
    from mindformers.checkpoint.metadata import load_metadata

    described, files = {}, {}
    layouts = {name: sharded(*cut, shards) for name, (cut, _) in tensors.items()}
    mine = shares({name: (layout, shape, 4) for name, (layout, shape) in layouts.items()}, 8)
    for name, (layout, shape) in layouts.items():
        tensor = stored_by_all(name, layout, shape, first=8, dtype=tensors[name][1])
        if shared:
            stored = {
                number: tuple(copy for copy in copies if name in mine[copy.rank - 8])
                for number, copies in tensor.stored.items()
            }
            tensor = TensorMetadata(**{**vars(tensor), "stored": stored})
        described[name] = tensor
        files[name] = {
            copy.rank: (copy.file, number)
            for number, copies in tensor.stored.items()
            for copy in copies
        }
    path = tmp_path / "metadata.json"
    path.write_bytes(b"".join(encode_metadata(described.values())))
    found, storage = load_metadata(str(path))
    assert set(found) == set(described) and len(storage) == sum(
        len(tensor.stored) for tensor in described.values()
    )
    for name, tensor in described.items():
        dtype = getattr(ms, tensor.dtype if tensor.dtype != "bool" else "bool_")
        chunks = {chunk.global_offset: chunk for chunk in found[name]}
        assert set(chunks) == {(number,) for number in tensor.stored}
        for (number,), chunk in chunks.items():
            assert (chunk.dtype, tuple(chunk.global_shape)) == (dtype, tensor.shape)
            assert tuple(chunk.local_shape) == tensor.layout.local_shape(tensor.shape)
            assert [
                StoredSlice(row["file_name"], row["storage_rank"], tuple(row["rank_group"]))
                for row in storage[str((name, (number,)))]
            ] == list(tensor.stored[number])
        check_load(name, tensor, files[name], found, storage, target, rank)


def sharded(layout: TensorLayout, shape, shards: int) -> tuple[TensorLayout, tuple[int, ...]]:
    """Draws a layout with an optimizer shard, and a shape that it divides."""
    found = TensorLayout(layout.device_matrix, layout.tensor_map, shards)
    return found, (shape[0] * found.optimizer_slices, *shape[1:]) if shape else ()


def check_load(name: str, tensor: TensorMetadata, files, found, storage, target, rank: int) -> None:
    """The files and areas that mindformers' loader would read, put together from a real tensor, are
    the part of the target."""
    from mindformers.checkpoint import reshard

    layout = TensorLayout(
        target[0].device_matrix, (target[0].tensor_map + (-1, -1, -1))[: len(tensor.shape)]
    )
    try:
        layout.counts(tensor.shape)
    except ValueError:
        layout = TensorLayout((4,), (-1,) * len(tensor.shape))
    wanted = SimpleNamespace(layout=theirs(layout), global_shape=tensor.shape)
    with patch.object(reshard, "get_real_rank", lambda: rank):
        loader = reshard.ReshardLoader("here", {name: wanted}, found, storage)
    whole = np.arange(1, math.prod(tensor.shape) + 1, dtype=np.float32).reshape(tensor.shape)
    pieces = {}
    for file, rows in loader._organize_file_load_info().items():
        for source, searched, area in rows:
            # What lies in that file is the slice that we say its rank stored.
            [number] = {number for other, number in files.values() if other == file}
            stored = view(whole, region_of(tensor.layout, tensor.shape, number))
            pieces[searched] = stored[tuple(slice(*part) for part in area)]
            assert source == name
    handler = loader.params_info[name]["reshard_handler"]
    assert np.array_equal(
        handler.get_real_tensor(pieces), view(whole, held(layout, rank, tensor.shape))
    )


def test_a_parameter_without_layout_is_loaded_from_the_rank_that_stored_it(tmp_path):
    from mindformers.checkpoint.metadata import load_metadata

    tensor = TensorMetadata("w", "int32", (3,), None, 0, {0: (StoredSlice("five.safetensors", 5),)})
    path = tmp_path / "metadata.json"
    path.write_bytes(b"".join(encode_metadata([tensor])))
    check_load(
        "w",
        tensor,
        {5: ("five.safetensors", 0)},
        *load_metadata(str(path)),
        (TensorLayout((4,), (-1,)), (3,)),
        2,
    )


# ---- common.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [1, None])
def test_mindformers_reads_our_common_json(tmp_path, status):
    from mindformers.checkpoint import checkpoint

    common = CommonInfo(2, 20, 19, 1.0, 8, status)
    path = tmp_path / "common.json"
    path.write_bytes(encode_common(common))
    found = checkpoint.CommonInfo.load_common(str(path))
    assert vars(found) == {
        name: value for name, value in vars(common).items() if name != "consumed_samples"
    }
    found.save_common(str(path))
    assert parse_common(path.read_bytes(), "c") == common


def test_names_are_those_of_mindformers():
    from mindformers.checkpoint.utils import (
        FileType,
        get_checkpoint_iter_dir,
        get_checkpoint_name,
        get_sharded_tensor_shard_id,
    )

    assert get_checkpoint_iter_dir("", 20) == iteration_name(20)
    for prefix in (None, "qwen3"):
        for kind in FileType:
            assert get_checkpoint_name(None, prefix, 3, 8, kind) + ".safetensors" == str(
                WeightFile(prefix, kind.value, 3, 8)
            )
    for name in ("a.b", "it's", "both'\"", "tab\t\\"):
        assert get_sharded_tensor_shard_id(name, (3,)) == slice_key(name, 3)
