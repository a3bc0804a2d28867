"""Which checkpoint is selected, and the reasons for refusing the others."""

import os
import shutil
from functools import partial

import job_choices
import pytest
from rank_folders import (
    LATER_RUN,
    RECORDS,
    RUN,
    Ranks,
    damage,
    flip_bit,
    name_of,
    path_of,
    records_of,
    save,
    start_of,
    tensors_of,
    write_foreign,
    write_rank,
)
from reshard.plans import put
from storages import Hooked

from mindresume.errors import ConfigError, MissingCheckpointError, NoUsableCheckpointError

WORLD = 4
# in one process that verifies all ranks, as `mindresume which` does
choose = partial(job_choices.choose, world=WORLD)
takes = partial(job_choices.takes, world=WORLD)
stops = partial(job_choices.stops, world=WORLD)


@pytest.fixture
def saved(tmp_path):
    """Saves steps 5, 10, 15 of 4 ranks; ranks 0/2 and 1/3 are replicas."""
    for step in (5, 10, 15):
        save(tmp_path, step)
    return tmp_path


def test_a_file_of_another_kind_is_a_config_error_on_all_ranks(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    for error in Ranks(2).run(lambda group: choose(tmp_path / "notes.txt", group=group)):
        assert type(error) is ConfigError and "notes.txt" in str(error)


def take_the_place_of_another_run(path):
    save(path.parents[2] / "other", 10, run=LATER_RUN)
    shutil.copy(path_of(path.parents[2] / "other", 10, 1), path)


FILE_DAMAGE = {
    "a bit": (
        lambda path: flip_bit(path, start_of(path, "embedding.weight") + 7),
        "not what was written; damaged: embedding.weight",
    ),
    "a cut at a tensor boundary": (
        lambda path: os.truncate(path, max(start_of(path, name) for name in tensors_of(1, 10))),
        "the file of rank 1 has ",
    ),
    "garbage": (lambda path: path.write_bytes(b"\xff" * path.stat().st_size), ""),
    "another run": (take_the_place_of_another_run, f"is not of run {RUN}, step 10"),
}


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
@pytest.mark.parametrize("kind", FILE_DAMAGE)
def test_a_damaged_file_is_named(tmp_path, fmt, kind):
    if kind == "another run" and fmt == "ckpt":
        return
    for step in (5, 10):
        save(tmp_path / "root", step, fmt=fmt)
    act, reason = FILE_DAMAGE[kind]
    act(path_of(tmp_path / "root", 10, 1, fmt=fmt))
    (refusal,) = takes(tmp_path / "root", 5, (10, reason)).refused
    assert (refusal.rank, refusal.file) == (1, f"rank_1/net_rank_1-1_10.{fmt}")


def test_a_deleted_rank_folder_is_read_from_proven_replicas(saved):
    shutil.rmtree(saved / "rank_1")
    shard = takes(saved, 15).shards[1]
    assert {source.file.path.split("/")[0] for source in shard.sources} <= {
        "rank_0",
        "rank_2",
        "rank_3",
    }
    assert {name for source in shard.sources for name in source.names} == set(tensors_of(1, 15))
    assert shard.details.random == {"python": "of rank 1"}


def test_a_damaged_replica_does_not_count(saved):
    path_of(saved, 15, 1).unlink()
    damage(saved, 15, 3, "layer.bias")
    assert takes(saved, 10, (15, "damaged")).refused[0].rank in (1, 3)


def test_a_file_whose_record_was_never_written(saved):
    write_rank(saved, 20, 0, 1)
    shutil.rmtree(records_of(saved, 20))
    records_of(saved, 20).mkdir()
    takes(saved, 15, (20, "the save never completed: no rank recorded what it wrote"))


def test_another_world_size(saved):
    stops(saved, "saved by 4 ranks, this job has 2; ", "auto_trans_ckpt: True", world=2)
    takes(saved, 15, world=None)


def test_a_named_checkpoint_that_cannot_be_used_is_an_error_not_a_fall_back(saved):
    fails = partial(stops, saved, error=MissingCheckpointError)
    path_of(saved, 10, 2).unlink()
    path_of(saved, 10, 0).unlink()
    fails("rank_0/net_rank_0-1_10.safetensors", requested=str(name_of(0, 10)))
    fails("net_rank_0-1_10.safetensors, net_rank_0-1_5.safetensors", requested="net_rank_0-9_9")
    flip_bit(path_of(saved, 15, 0))
    fails("not what was written", requested=str(name_of(0, 15)))


# ---- folders of mindformers ----------------------------------------------------------------------


def test_mindformers_folder_by_content_not_by_name(tmp_path):
    for step in (5, 10, 15):
        write_foreign(tmp_path, step)
    write_foreign(tmp_path, 20, suffix=1)
    os.rename(
        path_of(tmp_path, 20, 0, suffix=1), tmp_path / "rank_0" / "net_rank_0_1-2_5.safetensors"
    )
    choice = choose(tmp_path)
    # rank 0 alone has -2_5 of the second attempt
    assert choice.chosen.step == 15 and "no file of rank" in choice.refused[0].reason


def test_ranks_of_mindformers_at_different_steps(tmp_path):
    for step in (5, 10):
        write_foreign(tmp_path, step)
    # step 5 inside, the name of step 10
    shutil.copy(path_of(tmp_path, 5, 1), path_of(tmp_path, 10, 1))
    takes(tmp_path, 5, (10, "rank 1 holds step 5"))


def test_files_copied_without_their_records_are_selected(saved):
    shutil.rmtree(saved / RECORDS)  # cp -r rank_* elsewhere
    assert takes(saved, 15).shards[0].details is None


def test_weights_without_counters_cannot_be_resumed(tmp_path):
    put(path_of(tmp_path, 5, 0), {"w": tensors_of(0, 5)["layer.bias"]})
    stops(tmp_path, "no step_num", world=1)


# ---- several ranks -------------------------------------------------------------------------------


def test_one_rank_with_a_bad_file_makes_all_ranks_fall_back(saved):
    flip_bit(path_of(saved, 15, 2))
    results = Ranks(WORLD).run(lambda group: takes(saved, 10, (15, ""), group=group, is_own=True))
    assert [[shard.rank for shard in result.shards] for result in results] == [[0], [1], [2], [3]]
    assert len({str(result.refused) for result in results}) == 1


def test_an_error_of_rank_0_reaches_all(tmp_path):
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 3))
    results = Ranks(WORLD).run(lambda group: choose(tmp_path, group=group, is_own=True))
    assert [type(result) for result in results] == [NoUsableCheckpointError] * WORLD


@pytest.mark.parametrize("trouble", [False, True])
def test_choosing_among_committed_checkpoints_costs_the_same_for_any_number_of_ranks(
    tmp_path, trouble
):
    """Counts on rank 0, which verifies its own file. ``trouble``: the job was killed in a save of
    the newest."""
    counts = []
    for world in (2, 16):
        root, storage = tmp_path / str(world), Hooked()
        for step in (10, 20):
            save(root, step, world)
        for rank in range(world // 2 if trouble else 0):
            write_rank(root, 30, rank, world)
        assert choose(root, world=world, storage=storage, is_own=True).chosen.step == 20
        counts.append(len(storage.asked))
    assert counts[0] == counts[1]
