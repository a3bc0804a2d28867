"""The choice of an engine and its memory, and the effect of a direct engine's writer on a
conversion."""

import os

import pytest
from rank_folders import STORAGE
from reshard.plans import COUNTERS, Plan, Spec, random_tensors, recorded, shard_file

from mindresume.errors import ConfigError
from mindresume.reshard.conversion_plan import to_consolidated, to_ranks
from mindresume.reshard.converter import Conversion, Share
from mindresume.reshard.direct_engine import (
    BUFFERS,
    ENGINES,
    MIN_TILE,
    TILE,
    Engine,
    Traffic,
    engine_for,
    tile_for,
)
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.tensor_files import file_checksum

MODEL = {
    "embedding.weight": Spec((64, 32), 0, "first"),
    "layers.0.weight": Spec((32, 64), 1, 0, "bfloat16"),
    "layers.1.weight": Spec((32, 64), 1, 1, "float16"),
}
TENSORS = random_tensors(MODEL)
NBYTES = sum(array.nbytes for array in (*TENSORS.values(), *COUNTERS.values()))


@pytest.fixture
def made(tmp_path):
    recorded(tmp_path / "a", Plan.parse("tp2", MODEL), TENSORS)
    target = Plan.parse("dp2tp2pp2opt2", MODEL).strategy()
    return Conversion(
        STORAGE,
        to_ranks(open_checkpoint(STORAGE, str(tmp_path / "a")), target, "safetensors"),
        str(tmp_path / "new"),
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fmt", ["ckpt", "safetensors"])
def test_engines(engine, fmt):
    assert engine_for(engine, fmt) == {"direct": "direct", "mindspore": "mindspore"}.get(
        engine, {"ckpt": "mindspore", "safetensors": "direct"}[fmt]
    )


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("memory", [None, 10**6 * 3, 1 << 22, 100 << 20, 1 << 40])
def test_all_buffers_together_fit_into_the_memory(memory, workers):
    tile = tile_for(memory, workers)
    assert MIN_TILE <= tile <= TILE
    assert memory is None and tile == TILE or tile * BUFFERS * workers <= memory


@pytest.mark.parametrize("workers", [1, 4])
def test_too_little_memory(workers):
    least = MIN_TILE * BUFFERS * workers
    assert tile_for(least, workers) == MIN_TILE
    with pytest.raises(
        ConfigError,
        match=rf"{least - 1} bytes of memory are too little for {workers} workers: each needs at "
        rf"least {MIN_TILE * BUFFERS}",
    ):
        tile_for(least - 1, workers)


@pytest.mark.parametrize("workers, tile", [(1, TILE), (2, 256), (4, 100)])
def test_the_direct_engine_writes_the_groups_of_a_conversion(made, workers, tile):
    traffic, shown = Traffic(), []
    traffic.progress = shown.append
    made.prepare()
    made.write(Engine(workers=workers, tile=tile, traffic=traffic))
    sums = {}
    for number, group in enumerate(made.plan.groups):
        sums |= dict(zip(group, made.done(number), strict=True))
    for rank, file in enumerate(made.plan.files):
        with open(os.path.join(made.work, file.path), "rb") as opened:
            assert file_checksum(opened) == (sums[rank].file, sums[rank].size)
    made.commit()
    plan = Plan.parse("dp2tp2pp2opt2", MODEL)
    assert (
        traffic.written
        == sum(shown)
        == sum(
            array.nbytes for rank in range(8) for array in shard_file(plan, TENSORS, rank).values()
        )
    )
    # both stages
    assert (
        traffic.verified
        == traffic.read
        == NBYTES + sum(array.nbytes for array in COUNTERS.values())
    )


def test_finished_files_are_not_written_again(made):
    made.prepare()
    traffic = Traffic()
    made.share = Share(1, 2)
    made.write(Engine(traffic=traffic))
    first = traffic.written
    made.write(Engine(traffic=traffic))
    assert traffic.written == first > 0
    made.share = Share()
    made.write(Engine(traffic=traffic))
    assert traffic.written > first
    made.commit()


def test_every_source_byte_is_read_once_for_consolidated_weights(tmp_path, made):
    source = open_checkpoint(STORAGE, str(tmp_path / "a"))
    merged, traffic = (
        Conversion(STORAGE, to_consolidated(source, "mindspore", 4096), str(tmp_path / "merged")),
        Traffic(),
    )
    merged.run(Engine(traffic=traffic))
    assert traffic.read == traffic.verified == traffic.written == NBYTES


@pytest.mark.parametrize("still_writing", [False, True])
def test_leftovers_in_the_scratch_folder_are_ignored(made, monkeypatch, still_writing):
    """MindSpore's engine refuses folders that exist; and workers of the process that was killed may
    still write into theirs."""
    from mindresume.reshard import converter, mindspore_engine

    scratch = os.path.join(made.work, "scratch-of-one")
    made.prepare()
    STORAGE.make_folder(os.path.join(scratch, "mindspore-1-0000aaaa", "out"))
    made._release()
    given = []

    def rewrite(weights, target, work, **_):
        given.append(
            (
                os.listdir(work),
                [name for name in os.listdir(scratch) if name.startswith("mindspore")],
            )
        )
        return weights

    monkeypatch.setattr(mindspore_engine, "rewrite", rewrite)
    with monkeypatch.context() as patched:
        if still_writing:
            # not empty: OSError
            patched.setattr(converter, "remove_tree", lambda storage, folder: os.rmdir(folder))
        made.prepare()
    made.write(Engine("mindspore"))
    ((content, beside),) = given
    assert content == [] and len(beside) == (2 if still_writing else 1)
    made.commit()
    assert os.listdir(made.target) and not os.path.exists(made.work)
