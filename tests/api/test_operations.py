"""convert, merge, export_hf, compare, inspect and prune through the API, on a training's folder."""

import json
import os

import pytest
from rank_folders import leases

import mindresume
from mindresume.errors import ConfigError

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture
def root(training):
    return training / "output" / "checkpoint"


def plain(result):
    value = result.to_json()
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    return value


def contents(folder):
    """Returns the files without the leases of readers, which come and go."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# ---- convert, merge, export ----------------------------------------------------------------------


def test_convert_makes_the_same_tensors_in_another_layout(root, training):
    result = mindresume.convert(root, training / "new", to="dp=1,tp=4", step=300)
    assert (result.files, result.finished, result.dry_run, result.engine) == (
        4,
        True,
        False,
        "direct",
    )
    assert (
        result.bytes_written == result.bytes_to_write and result.bytes_verified == result.bytes_read
    )
    with mindresume.open(training / "new")[300] as new, mindresume.open(root)[300] as old:
        assert new.tensors[EMBEDDING].local_shape == (32, 32) and old.tensors[
            EMBEDDING
        ].local_shape == (64, 32)
        assert (
            new.read(EMBEDDING) == old.read(EMBEDDING)
        ).all() and new.state.metrics == old.state.metrics
    assert set(plain(result)) >= {"source", "target", "bytes_read", "seconds"}
    again = mindresume.convert(root, training / "new", to="dp=1,tp=4", step=300)
    assert again.finished and again.seconds is None and again.bytes_written == 0


def test_a_checkpoint_can_be_converted(root, training):
    with mindresume.open(root)[200] as checkpoint:
        assert mindresume.convert(checkpoint, training / "new", format="iteration").finished
        assert checkpoint.is_held
        with pytest.raises(ConfigError):
            mindresume.convert(checkpoint, training / "other", step=200)
    assert mindresume.open(training / "new")[200].info.iteration_dir == "iteration_00000200"


def test_the_source_is_locked_while_it_is_converted(root, training):
    held = []

    class Looker:
        def expect(self, count):
            held.append(leases(root))

        def advance(self, count):
            pass

    mindresume.convert(root, training / "new", to="tp=4", progress=Looker())
    mindresume.compare(root, training / "new", progress=Looker())
    assert [len(names) for names in held] == [1, 1] and leases(root) == []


def test_merge_and_export(root, training):
    merged = mindresume.merge(root, training / "merged", drop=["adam_*"], part_size_bytes=40_000)
    assert merged.files > 1 and not any(
        name.startswith("adam_") for name in mindresume.open(training / "merged").latest().tensors
    )
    exported = mindresume.export_hf(
        root, training / "hf", config=training / "Qwen3" / "config.json", dtype="bfloat16"
    )
    assert (exported.model_type, exported.dtypes) == ("qwen3", ("bfloat16",)) and plain(exported)[
        "finished"
    ] is True
    assert sorted(os.listdir(training / "hf")) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]


# ---- compare, inspect ----------------------------------------------------------------------------


def test_compare_two_steps(root):
    catalog = mindresume.open(root)
    found = mindresume.compare(catalog[500], root, step_b=300)
    (row,) = found.differences
    assert (
        not found.equal
        and not found.within_tolerance
        and (row.name, row.first_values) == ("step_num", (500, 300))
    )
    assert (found.a.step, found.b.step, found.a.world_size) == (500, 300, 4)
    assert row.within(200) and not row.within(199) and not row.within(None)
    assert plain(found)["differences"][0]["a"] == {"dtype": "int64", "shape": []}
    assert mindresume.compare(root, root, tensors="decoder.*").equal
    with pytest.raises(ConfigError):
        mindresume.compare(root, root, tensors="nothing.*")


def test_inspect(root):
    found = mindresume.inspect(root, step=300)
    assert (found.step, found.world_size, found.kind, found.format) == (
        300,
        4,
        "checkpoint",
        "safetensors",
    )
    assert found.slices is None and len(found.tensors) == found.tensor_count == len(
        mindresume.open(root)[300].tensors
    )
    (row,) = mindresume.inspect(root, tensors=EMBEDDING).tensors
    parts = mindresume.inspect(root, tensors=EMBEDDING).slices
    assert row.size_bytes == 128 * 32 * 4 and [part.ranks for part in parts] == [(0, 2), (1, 3)]
    assert plain(found)["dtypes"]["int64"]["tensors"] == 3
    of_rank = mindresume.inspect(mindresume.open(root)[300], rank=3, tensors=EMBEDDING).slices
    assert [(part.region, part.ranks, part.is_whole) for part in of_rank] == [
        (((64, 128), (0, 32)), (3,), False)
    ]
    for wrong in ({"rank": 4}, {"tensors": "nothing"}):
        with pytest.raises(ConfigError):
            mindresume.inspect(root, **wrong)


# ---- prune ---------------------------------------------------------------------------------------


def test_prune_reports_what_it_removes_and_why(root):
    before = contents(root)
    policy = mindresume.KeepAny((mindresume.KeepLast(1), mindresume.KeepEverySteps(200)))
    dry = mindresume.prune(root, policy=policy, dry_run=True)
    assert contents(root) == before and dry.dry_run
    real = mindresume.prune(root.parent, policy=policy)
    assert [row.step for row in real.kept] == [500, 400, 200] and [
        row.step for row in real.removed
    ] == [300, 100]
    assert {**plain(dry), "dry_run": False} == plain(real) and real.freed_bytes == sum(
        row.size_bytes for row in real.removed
    )
    assert mindresume.open(root).steps() == (200, 400, 500)


def test_prune_refuses_other_folders(root):
    with pytest.raises(ConfigError):
        mindresume.prune(root / "rank_0", policy=mindresume.KeepLast(1))
    with pytest.raises(FileNotFoundError):
        mindresume.prune(root / "missing", policy=mindresume.KeepLast(1))
    with pytest.raises(ConfigError):
        mindresume.KeepLast(0)
