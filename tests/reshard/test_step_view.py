"""An iteration folder as weights: any layout, by records and by metadata.json, ours and without
records."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from rank_folders import RUN, STORAGE, dir_at, flip_bit, state_of
from reshard.plans import MODEL, STEP, Plan, random_tensors

import mindresume
from mindresume.errors import ConfigError, CorruptFileError, LoadError, StrategyError
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import METADATA, iteration_name
from mindresume.formats.scan import scan
from mindresume.model.layout import fold_optimizer_shards, held, shares, whole
from mindresume.model.manifest import FOLDER
from mindresume.reshard import step_view
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.range_reader import view
from mindresume.reshard.region_load import read_regions
from mindresume.reshard.step_view import view_of_iteration
from mindresume.reshard.strategy_store import own_strategy
from mindresume.resume.verifier import VerifiedShard, Verifier
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import SaveTarget, iteration_shard, write_shard
from mindresume.storage.read_cache import ReadCache

TENSORS = random_tensors(MODEL)
NAME = iteration_name(STEP)
PLANS = ["dp1", "tp2", "dp2", "dp2tp2opt2", "dp2tp2pp2opt2", "dp4opt2", "pp4"]


def iterated(root, plan, dedup=False, skip=(), trainer=None, folds=lambda layout: layout):
    """Returns our checkpoint: weights in one file, moments and a counter in the other. ``skip``:
    tensors without a known layout. ``trainer``: counters of a PyNative trainer. ``folds(layout)``:
    what is recorded of a layout."""
    plan = Plan.parse(plan)
    shapes = {name: array.shape for name, array in TENSORS.items()}
    for rank in range(plan.world_size):
        place = SaveTarget(STORAGE, str(root), RUN, rank, plan.world_size, True)
        layouts = {
            name: (folds(layout), shapes[name])
            for name, layout in plan.layouts(rank).items()
            if plan.world_size > 1
        }
        mine = set(plan.layouts(rank))
        if dedup:
            held = {name: (layout, shape, 4) for name, (layout, shape) in layouts.items()}
            mine = shares(held, plan.stage_size)[rank % plan.stage_size]
        arrays = {name: array for name, array in plan.shard(TENSORS, rank).items() if name in mine}
        model = {name: array for name, array in arrays.items() if not name.startswith("adam_")}
        rest = {name: array for name, array in arrays.items() if name not in model} | {
            "global_step": np.array([STEP], np.int32)
        }
        layouts = {name: row for name, row in layouts.items() if name not in skip}
        write_shard(
            place,
            iteration_shard(
                "net",
                place,
                replace(state_of(STEP), trainer=trainer or {}),
                model,
                rest,
                layouts,
                deduplicated=dedup,
            ),
        )
    Committer(SaveTarget(STORAGE, str(root), RUN, 0, plan.world_size, True)).poll(STEP)
    return root / NAME


def without_records(root):
    shutil.rmtree(root / NAME / FOLDER)
    return root


def values(root):
    weights = open_checkpoint(STORAGE, str(root)).weights
    found = read_regions(
        weights, {name: whole(tensor.shape) for name, tensor in weights.tensors.items()}
    )
    assert found.pop("global_step").tolist() == [STEP]
    return found


def right(found):
    assert set(found) == set(TENSORS)
    assert [name for name in TENSORS if found[name].tobytes() != TENSORS[name].tobytes()] == []


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_every_tensor_by_records_and_by_metadata(tmp_path, plan, dedup):
    iterated(tmp_path, plan, dedup and plan != "dp1")
    right(values(tmp_path))
    if Plan.parse(plan).world_size > 1:
        right(values(without_records(tmp_path)))


def test_no_plan_is_derived_from_a_checkpoint_of_the_pynative_trainer(tmp_path):
    """hyper_parallel gives one layout, with the shards over data parallelism: tp=2 would cut
    vectors that no tensor parallelism cuts."""
    iterated(
        tmp_path / "run", "dp2tp1opt2", trainer={"total_flops": 1.0}, folds=fold_optimizer_shards
    )
    assert not open_checkpoint(STORAGE, str(tmp_path / "run")).weights.split
    with pytest.raises(ConfigError, match="not known what tp=2 has to cut"):
        mindresume.convert(tmp_path / "run", tmp_path / "new", to="tp=2")
    mindresume.convert(tmp_path / "run", tmp_path / "new", to="dp=2")
    right(values(tmp_path / "run"))


def test_metadata_json_is_read_instead_of_many_records_if_intact(tmp_path, monkeypatch):
    """Few records, or one metadata.json instead of all records; and that only if it is what was
    written, and if nobody needs to tell the optimizer shard from tensor parallelism."""
    asked = []
    real = step_view.read_metadata
    monkeypatch.setattr(
        step_view, "read_metadata", lambda data, path: asked.append(path) or real(data, path)
    )

    def view(folder, **how):
        return view_of_iteration(dir_at(folder), scan(dir_at(folder)).candidates[0], **how)

    iterated(tmp_path / "a", "dp2tp2opt2")
    assert view(tmp_path / "a").split and asked == []
    folder = iterated(tmp_path / "b", "dp2tp2opt2", dedup=True)
    right(values(tmp_path / "b"))
    apart = {
        name: tensor.layout
        for name, tensor in view(tmp_path / "b", split=True).tensors.items()
        if tensor.layout
    }
    assert (
        apart == {name: layout for name, layout in Plan.parse("dp2tp2opt2").layouts(0).items()}
        and asked == []
    )
    folded = view(tmp_path / "b")
    assert not folded.split and not any(
        tensor.layout.optimizer_shards for tensor in folded.tensors.values() if tensor.layout
    )
    assert asked == [str(folder / METADATA)]
    for damage in (
        lambda data: b"",
        lambda data: data[:-9],
        lambda data: data.replace(b"[0", b"[1", 1),
        None,
    ):
        if damage is None:
            os.remove(folder / METADATA)
        else:
            (folder / METADATA).write_bytes(damage((folder / METADATA).read_bytes()))
        assert view(tmp_path / "b").split
    right(values(tmp_path / "b"))
    assert len(asked) == 1


def test_the_layout_of_the_source_itself(tmp_path):
    for plan in PLANS[1:]:
        iterated(tmp_path / plan, plan)
        strategy = own_strategy(open_checkpoint(STORAGE, str(tmp_path / plan)).weights)
        assert strategy.world_size == Plan.parse(plan).world_size
        for rank in range(strategy.world_size):
            assert set(strategy.of_rank(rank)) == set(Plan.parse(plan).layouts(rank)), (plan, rank)
    iterated(tmp_path / "one", "dp1")
    assert own_strategy(open_checkpoint(STORAGE, str(tmp_path / "one")).weights) is None


def test_a_file_is_missing_and_replicas_have_it_or_not(tmp_path):
    folder = iterated(tmp_path, "dp2tp2")
    os.remove(folder / "net-model-0000000-0000004.safetensors")
    right(values(tmp_path))
    folder = iterated(tmp_path / "b", "dp2tp2opt2")
    os.remove(folder / "net-model-0000000-0000004.safetensors")
    candidate = scan(dir_at(tmp_path / "b")).candidates[0]
    weights = step_view.view_of_iteration(dir_at(tmp_path / "b"), candidate)
    with pytest.raises(LoadError, match="is nowhere: it should be in the file of rank 0"):
        read_regions(
            weights, {name: whole(tensor.shape) for name, tensor in weights.tensors.items()}
        )


def test_without_records_the_metadata_is_all_there_is(tmp_path):
    folder = iterated(without := tmp_path, "tp2")
    without_records(without)
    content = json.loads((folder / METADATA).read_text())
    name = "adam_m.layers.0.qkv.weight"
    del content["state_dict_metadata"][name]
    content["storage_data"] = {
        key: row for key, row in content["storage_data"].items() if name not in key
    }
    (folder / METADATA).write_text(json.dumps(content))
    candidate = scan(dir_at(tmp_path)).candidates[0]
    with pytest.raises(
        StrategyError,
        match=r"1 tensors have no layout: adam_m.*qkv.weight \(.*metadata.json does not name",
    ):
        step_view.view_of_iteration(dir_at(tmp_path), candidate)
    (folder / METADATA).write_text("{")
    with pytest.raises(CorruptFileError, match="metadata.json"):
        step_view.view_of_iteration(dir_at(tmp_path), candidate)


def test_a_tensor_without_a_known_layout_is_refused_by_name(tmp_path):
    iterated(tmp_path, "tp2", skip=("embedding.weight",))
    with pytest.raises(StrategyError, match=r"embedding.weight \("):
        open_checkpoint(STORAGE, str(tmp_path), STEP)


@pytest.mark.parametrize("keeps_tensors", [False, True])
@pytest.mark.parametrize("plan", ["dp2", "dp2tp2", "dp2tp2opt2", "dp4opt2"])
def test_a_load_in_the_same_layout_reads_the_disk_once(tmp_path, plan, keeps_tensors):
    """Each rank has verified its own files, which are in memory: it takes replicas from there too,
    not from the first rank's."""
    root = iterated(tmp_path, plan).parent
    candidate, layouts = scan(dir_at(root)).candidates[0], Plan.parse(plan)
    caches = [ReadCache(STORAGE, 1 << 30) for _ in range(layouts.world_size)]
    for rank, cache in enumerate(caches):
        storage, keep = (STORAGE, cache) if keeps_tensors else (cache, None)
        assert isinstance(
            Verifier(CheckpointDir(storage, str(root)), candidate, keep=keep).verify(rank),
            VerifiedShard,
        )
        cache.freeze()
    for file in candidate.all_files:
        if file.path.endswith(".safetensors"):
            # whoever reads the disk again finds damage
            flip_bit(root / file.path, -1)
    for rank, cache in enumerate(caches):
        weights = view_of_iteration(CheckpointDir(cache, str(root)), candidate)
        regions = {
            name: held(layout, rank % layout.stage_size, TENSORS[name].shape)
            for name, layout in layouts.layouts(rank).items()
        }
        found = read_regions(weights, regions)
        assert all(
            found[name].tobytes() == view(TENSORS[name], region).tobytes()
            for name, region in regions.items()
        )
        cache.clear()
