"""Which checkpoint is selected, and the reasons for refusing the others."""

import os
import shutil

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


def choose(root, world=WORLD, named=None, **options):
    """Selects in one process that verifies all ranks, as `mindresume which` does."""
    return job_choices.choose(root, world, named, **options)


@pytest.fixture
def saved(tmp_path):
    """Saves steps 5, 10, 15 of 4 ranks; ranks 0/2 and 1/3 are replicas."""
    for step in (5, 10, 15):
        save(tmp_path, step)
    return tmp_path


def refusals(choice):
    return [(refusal.step, refusal.reason) for refusal in choice.refused]


def test_a_file_of_another_kind_is_a_config_error_on_all_ranks(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    errors = Ranks(2).run(lambda group: job_choices.choose(tmp_path / "notes.txt", 2, group=group))
    assert [type(error) for error in errors] == [ConfigError, ConfigError] and "notes.txt" in str(
        errors[1]
    )


def test_the_newest_complete_one(saved):
    choice = choose(saved)
    assert (choice.chosen.step, choice.chosen.epoch, choice.chosen.run) == (15, 2, RUN)
    assert choice.refused == () and not choice.is_fresh_start
    assert choice.shards[2].details.random == {"python": "of rank 2"}
    assert choice.shards[0].state.step == 15


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_a_flipped_bit_names_file_and_tensor(tmp_path, fmt):
    for step in (5, 10):
        save(tmp_path, step, fmt=fmt)
    path = path_of(tmp_path, 10, 1, fmt=fmt)
    flip_bit(path, start_of(path, "embedding.weight") + 7)
    choice = choose(tmp_path)
    assert choice.chosen.step == 5
    (refusal,) = choice.refused
    assert (refusal.step, refusal.rank, refusal.file) == (10, 1, f"rank_1/net_rank_1-1_10.{fmt}")
    assert (
        "not what was written" in refusal.reason and "damaged: embedding.weight" in refusal.reason
    )


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_a_file_cut_at_a_tensor_boundary(tmp_path, fmt):
    for step in (5, 10):
        save(tmp_path, step, fmt=fmt)
    path = path_of(tmp_path, 10, 3, fmt=fmt)
    end = max(start_of(path, name) for name in tensors_of(3, 10))
    written = path.stat().st_size
    os.truncate(path, end)
    choice = choose(tmp_path)
    assert choice.chosen.step == 5
    assert refusals(choice) == [(10, f"the file of rank 3 has {end} bytes, {written} were written")]


def test_garbage_of_the_right_size_is_refused(saved):
    path = path_of(saved, 15, 2)
    path.write_bytes(b"\xff" * path.stat().st_size)
    choice = choose(saved)
    assert choice.chosen.step == 10 and choice.refused[0].rank == 2


def test_a_deleted_rank_folder_is_refused_without_replicas(tmp_path):
    for step in (5, 10):
        save(tmp_path, step, replicas=4)
    shutil.rmtree(tmp_path / "rank_1")
    with pytest.raises(NoUsableCheckpointError) as caught:
        choose(tmp_path)
    assert [refusal.step for refusal in caught.value.refused] == [10, 5]
    assert "the file of rank 1 is missing, and 3 of its tensors are on no other rank" in str(
        caught.value
    )
    assert "resume_training: False" in str(caught.value)


def test_a_deleted_rank_folder_is_read_from_proven_replicas(saved):
    shutil.rmtree(saved / "rank_1")
    choice = choose(saved)
    assert choice.chosen.step == 15
    shard = choice.shards[1]
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
    choice = choose(saved)
    assert choice.chosen.step == 10
    assert choice.refused[0].rank in (1, 3) and "damaged" in choice.refused[0].reason


@pytest.mark.parametrize("content", [b"", b"torn", None])
def test_a_torn_or_altered_record(saved, content):
    path = records_of(saved, 15) / "rank_00001.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] if content is None else content)
    choice = choose(saved)
    assert choice.chosen.step == 10 and choice.refused[0].rank == 1


def test_a_save_cut_short_is_refused_with_the_missing_ranks(saved):
    for rank in (0, 3):
        write_rank(saved, 20, rank, WORLD)
    choice = choose(saved)
    assert choice.chosen.step == 15
    assert refusals(choice) == [
        (20, "the save never completed: 2 of 4 ranks recorded what they wrote, missing: rank 1, 2")
    ]


def test_a_file_whose_record_was_never_written(saved):
    write_rank(saved, 20, 0, 1)
    shutil.rmtree(records_of(saved, 20))
    records_of(saved, 20).mkdir()
    choice = choose(saved)
    assert choice.chosen.step == 15 and refusals(choice)[0] == (
        20,
        "the save never completed: no rank recorded what they wrote",
    )


def test_another_world_size(saved):
    with pytest.raises(
        NoUsableCheckpointError, match="saved by 4 ranks, this job has 2; .*auto_trans_ckpt: True"
    ):
        choose(saved, world=2)
    assert choose(saved, world=None).chosen.step == 15


def test_a_leftover_of_a_larger_world_size(tmp_path):
    save(tmp_path, 20, world=8, run=RUN)
    save(tmp_path, 5, world=4, run=LATER_RUN, suffix=1)
    # the later run, though of an earlier step
    assert choose(tmp_path).chosen.step == 5
    write_foreign(tmp_path / "foreign", 20, world=8, meta=False, time=100)
    write_foreign(tmp_path / "foreign", 25, world=4, time=200)
    choice = choose(tmp_path / "foreign")
    assert choice.chosen.step == 25 and set(choice.chosen.files) == {0, 1, 2, 3}


def test_two_runs_side_by_side_are_never_mixed(tmp_path):
    save(tmp_path, 5)
    for rank in (0, 1):
        write_rank(tmp_path, 10, rank, WORLD)  # the first run is killed
    for rank in (2, 3):
        # and so does the second one, the other way round
        write_rank(tmp_path, 10, rank, WORLD, run=LATER_RUN, suffix=1)
    choice = choose(tmp_path)
    assert choice.chosen.step == 5
    assert [reason for _, reason in refusals(choice)] == [
        "the save never completed: 2 of 4 ranks recorded what they wrote, missing: rank 0, 1",
        "the save never completed: 2 of 4 ranks recorded what they wrote, missing: rank 2, 3",
    ]


def test_a_shard_of_another_run_under_the_right_name(saved):
    other = saved.parent / "other"
    save(other, 15, run=LATER_RUN)
    shutil.copy(path_of(other, 15, 1), path_of(saved, 15, 1))
    choice = choose(saved)
    assert choice.chosen.step == 10 and f"is not of run {RUN}, step 15" in choice.refused[0].reason


def test_after_a_fall_back_the_new_run_is_newer(saved):
    save(saved, 10, run=LATER_RUN, suffix=1)
    choice = choose(saved)
    assert (choice.chosen.step, choice.chosen.run, choice.refused) == (10, LATER_RUN, ())


# ---- fresh start or error ------------------------------------------------------------------------


def test_an_empty_folder_is_a_fresh_start(tmp_path):
    assert choose(tmp_path).is_fresh_start and choose(tmp_path / "missing").is_fresh_start


def test_leftovers_of_a_first_save_are_a_fresh_start(tmp_path):
    write_rank(tmp_path, 5, 0, WORLD)
    (tmp_path / "rank_1").mkdir()
    (tmp_path / "rank_1" / f".net_rank_1-1_5.safetensors.{RUN}.mindresume-tmp").write_bytes(b"half")
    choice = choose(tmp_path)
    assert choice.is_fresh_start and choice.chosen is None and refusals(choice)[0][0] == 5


def test_never_a_silent_fresh_start_when_something_was_complete(tmp_path):
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 0))
    write_rank(tmp_path, 10, 0, WORLD)
    with pytest.raises(NoUsableCheckpointError) as caught:
        choose(tmp_path)
    assert [refusal.step for refusal in caught.value.refused] == [10, 5]


# ---- named checkpoints ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["net_rank_0-1_10.safetensors", "net_rank_3-1_10", "net_rank_0-1_10"]
)
def test_a_named_checkpoint(saved, name):
    assert choose(saved, named=name).chosen.step == 10


def test_a_named_checkpoint_that_is_missing_on_a_rank(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10, replicas=4)
    path_of(tmp_path, 10, 2).unlink()
    with pytest.raises(
        MissingCheckpointError, match="rank 2 is missing.*rank_2/net_rank_2-1_10.safetensors"
    ):
        choose(tmp_path, named="net_rank_0-1_10.safetensors")


def test_a_named_checkpoint_that_does_not_exist_lists_the_others(saved):
    with pytest.raises(
        MissingCheckpointError, match="net_rank_0-1_10.safetensors, net_rank_0-1_5.safetensors"
    ):
        choose(saved, named="net_rank_0-9_9")


def test_a_named_checkpoint_that_is_damaged_is_an_error_not_a_fall_back(saved):
    flip_bit(path_of(saved, 15, 0))
    with pytest.raises(MissingCheckpointError, match="not what was written"):
        choose(saved, named=str(name_of(0, 15)))


# ---- files and rank folders ----------------------------------------------------------------------


def test_a_file_in_a_rank_folder(saved):
    choice = choose(path_of(saved, 10, 0))
    assert choice.chosen.step == 10 and len(choice.shards) == WORLD


def test_a_file_outside_rank_folders(saved, tmp_path):
    shutil.copy(path_of(saved, 10, 0), tmp_path / "single.safetensors")
    choice = choose(tmp_path / "single.safetensors", world=1)
    assert choice.chosen.step == 10 and choice.shards[0].scalars["global_batch_size"] == 8


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
    assert choice.chosen.step == 15
    assert "no file of rank" in choice.refused[0].reason


@pytest.mark.parametrize(
    "meta", ["", "{", '{"last_ckpt_file": "net_rank_0-7_7.safetensors"}', "[]"]
)
def test_a_bad_meta_json_is_only_a_note(tmp_path, meta):
    for step in (5, 10):
        write_foreign(tmp_path, step)
    (tmp_path / "rank_0" / "meta.json").write_text(meta)
    choice = choose(tmp_path)
    assert choice.chosen.step == 10 and any("meta.json" in note for note in choice.notes)


def test_ranks_of_mindformers_at_different_steps(tmp_path):
    for step in (5, 10):
        write_foreign(tmp_path, step)
    # step 5 inside, the name of step 10
    shutil.copy(path_of(tmp_path, 5, 1), path_of(tmp_path, 10, 1))
    choice = choose(tmp_path)
    assert choice.chosen.step == 5 and "rank 1 holds step 5" in choice.refused[0].reason


def test_files_copied_without_their_records_are_selected(saved):
    shutil.rmtree(saved / RECORDS)  # cp -r rank_* elsewhere
    choice = choose(saved)
    assert choice.chosen.step == 15 and choice.shards[0].details is None


def test_weights_without_counters_cannot_be_resumed(tmp_path):
    put(path_of(tmp_path, 5, 0), {"w": tensors_of(0, 5)["layer.bias"]})
    with pytest.raises(NoUsableCheckpointError, match="no step_num"):
        choose(tmp_path, world=1)


# ---- several ranks -------------------------------------------------------------------------------


def test_one_rank_with_a_bad_file_makes_all_ranks_fall_back(saved):
    flip_bit(path_of(saved, 15, 2))
    results = Ranks(WORLD).run(lambda group: choose(saved, group=group, is_own=True))
    assert [result.chosen.step for result in results] == [10] * WORLD
    assert [result.shards[0].rank for result in results] == [0, 1, 2, 3]
    assert all(len(result.shards) == 1 for result in results)
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
        root = tmp_path / str(world)
        for step in (10, 20):
            save(root, step, world)
        for rank in range(world // 2 if trouble else 0):
            write_rank(root, 30, rank, world)
        storage = Hooked()
        assert choose(root, world, storage=storage, is_own=True).chosen.step == 20
        counts.append(len(storage.asked))
    assert counts[0] == counts[1]
