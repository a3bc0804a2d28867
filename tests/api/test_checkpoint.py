"""One saved step through the API: its state, its tensors, regions of them, and how long it is
held."""

import errno
import gc
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from rank_folders import RECORDS, STORAGE, leases, save, write_foreign
from reshard.plans import (
    STEP,
    Plan,
    Spec,
    complete,
    foreign,
    put,
    random_tensors,
    recorded,
)
from storages import failing

import mindresume
from mindresume.api.catalog import Catalog
from mindresume.api.checkpoint import is_strategy, opened
from mindresume.errors import ConfigError, MissingCheckpointError

MODEL = {
    "embedding.weight": Spec((16, 8), 0, "first", "bfloat16"),
    "layers.0.weight": Spec((8, 12), 1, 0),
    "layers.1.weight": Spec((8, 12), 1, 1),
    "norm.weight": Spec((8,), None, "last"),
    "layers.1.none": Spec((8, 0), 0, 1),
}
TENSORS = random_tensors(MODEL)
PLAN = Plan.parse("dp2tp2pp2opt2", MODEL)


@pytest.fixture(params=["mindresume", "mindformers", "merged"])
def saved(request, tmp_path):
    """Returns a checkpoint of 8 ranks, or the same tensors as consolidated weights."""
    root = tmp_path / "output" / "checkpoint"
    if request.param == "mindresume":
        recorded(root, PLAN, TENSORS)
    elif request.param == "mindformers":
        foreign(root, PLAN, TENSORS)
        PLAN.write(tmp_path / "output" / "strategy")
    else:
        complete(root, TENSORS)
    return root


def same(found, wanted):
    return (found.dtype, found.shape, found.tobytes()) == (
        wanted.dtype,
        wanted.shape,
        wanted.tobytes(),
    )


def test_a_region_is_what_indexing_gives(saved):
    with mindresume.open(saved)[STEP] as checkpoint:
        for region in (
            (slice(3, 5), slice(1, 11)),
            (slice(-2, None),),
            (),
            (slice(4, 4), slice(None)),
            (slice(5, 2),),
            (slice(0, 100),),
        ):
            found = checkpoint.read("layers.1.weight", region)
            assert same(found, TENSORS["layers.1.weight"][region])
        for region in ((slice(0, 8, 2),), (slice(0, 1),) * 3, (3, slice(None))):
            with pytest.raises(ValueError, match="region"):
                checkpoint.read("layers.1.weight", region)


def test_only_the_region_is_read(tmp_path, monkeypatch):
    recorded(tmp_path, PLAN, TENSORS)
    read, plain = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *arguments: read.append(plain(*arguments)) or read[-1])
    with mindresume.open(tmp_path)[STEP] as checkpoint:
        checkpoint.read("layers.0.weight", (slice(0, 2), slice(0, 12)))
    assert sum(read) == 2 * 12 * 4


def test_weights_alone_have_no_state(tmp_path):
    put(tmp_path / "one.ckpt", {"w": np.zeros((2, 3), np.float16)})
    checkpoint = mindresume.open(tmp_path / "one.ckpt").latest()
    assert checkpoint.step is checkpoint.state is None
    assert checkpoint.read("w").dtype == np.float16


# ---- the hold ------------------------------------------------------------------------------------


def prune_all_but_the_newest(root):
    return [row.step for row in mindresume.prune(root, policy=mindresume.KeepLast(1)).removed]


def test_the_read_lock_lasts_from_the_first_read_until_deletion(tmp_path):
    checkpoint = two_steps(tmp_path)[5]
    # nothing but its listing was read
    assert checkpoint.state.step == 5 and leases(tmp_path) == []
    checkpoint.read("layer.bias")
    assert len(leases(tmp_path)) == 1 and prune_all_but_the_newest(tmp_path) == []
    del checkpoint
    gc.collect()
    assert leases(tmp_path) == []


def test_the_read_lock_is_released_when_the_process_ends(tmp_path):
    save(tmp_path, 5, world=2, replicas=1)
    code = (
        "import mindresume, pathlib, sys; checkpoint = mindresume.open(sys.argv[1])[5]; "
        "checkpoint.read('layer.bias'); "
        "print(len(list(pathlib.Path(sys.argv[1]).glob('*/claim-*'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n" and leases(tmp_path) == []


def test_a_catalog_releases_all_locks(tmp_path):
    with two_steps(tmp_path) as catalog:
        found = [catalog[5], catalog[10]]
        assert all(checkpoint.tensors for checkpoint in found) and len(leases(tmp_path)) == 2
    assert leases(tmp_path) == [] and not any(checkpoint.is_held for checkpoint in found)
    assert found[0].read("layer.bias").shape == (5,) and found[0].is_held  # held again
    found[0].release()


def test_nothing_is_written_without_a_read_lock(tmp_path):
    save(tmp_path, 5, world=2, replicas=1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with mindresume.open(tmp_path, hold=False)[5] as checkpoint:
        checkpoint.read("layer.bias")
        assert not checkpoint.is_held
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_checkpoints_of_mindformers_are_not_locked(tmp_path):
    write_foreign(tmp_path, 5, world=1)
    with mindresume.open(tmp_path)[5] as checkpoint:
        assert (
            checkpoint.read("layer.bias").shape == (5,)
            and not checkpoint.is_held
            and not (tmp_path / RECORDS).exists()
        )


def test_a_read_only_folder_is_read_without_a_lock(tmp_path):
    save(tmp_path, 5, world=2, replicas=1)
    read_only = failing("", "write", "create", "make_folder", "rename", number=errno.EROFS)
    with Catalog(read_only, str(tmp_path))[5] as checkpoint:
        assert checkpoint.read("layer.bias").shape == (5,) and not checkpoint.is_held
        assert any("Read-only file system" in note for note in checkpoint.notes)


def test_a_checkpoint_that_was_removed_meanwhile_is_an_error(tmp_path):
    checkpoint = two_steps(tmp_path)[5]
    assert prune_all_but_the_newest(tmp_path) == [5]
    with pytest.raises(MissingCheckpointError, match="step 5"):
        checkpoint.read("layer.bias")
    with pytest.raises(MissingCheckpointError), checkpoint:
        pass
    unheld = mindresume.open(tmp_path, hold=False)[10]
    shutil.rmtree(tmp_path / RECORDS)
    with pytest.raises(MissingCheckpointError, match="step 10"):
        unheld.read("layer.bias")


# ---- a checkpoint that a caller names ------------------------------------------------------------


def test_strategy_arguments_are_recognized(tmp_path):
    for fmt in ("ckpt", "json"):
        Plan.parse("tp2").write(tmp_path / fmt, fmt)
        for path in (tmp_path / fmt, *(tmp_path / fmt).iterdir()):
            assert is_strategy(STORAGE, str(path))
    put(tmp_path / "weights" / "strategy.ckpt", {"w": np.zeros(3, np.float32)})
    complete(tmp_path / "merged", TENSORS)
    (tmp_path / "merged" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    save(tmp_path / "run" / "checkpoint", 5, world=1)
    (tmp_path / "failed_strategy.ckpt").touch()
    assert is_strategy(STORAGE, str(tmp_path / "failed_strategy.ckpt"))
    for path in ("weights", "weights/strategy.ckpt", "merged", "empty", "run", "run/checkpoint"):
        assert not is_strategy(STORAGE, str(tmp_path / path)), path


def test_a_checkpoint_stays_locked_as_long_as_its_owner_wants(tmp_path):
    save(tmp_path, 5, world=1)
    checkpoint = mindresume.open(tmp_path)[5]
    with opened(checkpoint) as source:
        assert source.state.step == 5 and checkpoint.is_held
    assert checkpoint.is_held
    checkpoint.release()
    assert leases(tmp_path) == []
    with opened(str(tmp_path), hold=False):
        assert leases(tmp_path) == []
    with pytest.raises(ConfigError), opened(checkpoint, step=5):
        pass


def two_steps(root):
    for step in (5, 10):
        save(root, step, world=2, replicas=1)
    return mindresume.open(root)
