"""Which iteration is selected, the reasons for refusing the others, and whether it is a fresh start
or an error."""

import json
import os
import shutil

import job_choices
import pytest
import rank_folders
from iteration_folders import (
    COMMON,
    FOREIGN,
    METADATA,
    TRACKER,
    folder_of,
    foreign,
    intend,
    making,
    records_of,
    save,
    track,
    unname,
    weights_of,
    write_all,
    write_rank,
)
from rank_folders import LATER_RUN, MANIFEST, RECORDS, RUN, Ranks, flip_bit

from mindresume.errors import MissingCheckpointError, NoUsableCheckpointError


def choose(root, named=None, world=None, **options):
    return job_choices.choose(root, world, named, **options)


def notes(choice):
    return " | ".join(choice.notes)


def refused(choice):
    return [(refusal.step, refusal.reason) for refusal in choice.refused]


def taken(choice):
    return (choice.chosen.step, choice.chosen.run)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, 5, 10, 15)
    return tmp_path


# ---- the tracker ---------------------------------------------------------------------------------


def test_the_iteration_that_the_tracker_names_is_selected(saved):
    choice = choose(saved)
    assert taken(choice) == (15, RUN) and choice.chosen.iteration_dir == "iteration_00000015"
    assert (choice.refused, choice.notes, choice.is_fresh_start) == ((), (), False)
    assert [proof.details.random for proof in choice.shards] == [
        {"python": f"of rank {rank}"} for rank in range(2)
    ]


@pytest.mark.parametrize("text", ["10", "10\n", "  10\r\n", "0000000010"])
def test_a_tracker_that_was_set_back_by_hand(saved, text):
    track(saved, text)
    choice = choose(saved)
    assert taken(choice) == (10, RUN) and choice.refused == ()
    assert (
        notes(choice)
        == f"newer than step 10, which {TRACKER} names, so only used as a last resort: step 15"
    )


def test_a_published_folder_whose_manifest_rotted_is_the_newest_still(saved):
    """Else the tracker counts as set back, and a later save that all ranks have written as a last
    resort."""
    flip_bit(records_of(folder_of(saved, 15), 15) / MANIFEST)
    write_all(saved, 20)
    choice = choose(saved)
    assert choice.chosen.step == 20 and choice.refused == () and "last resort" not in notes(choice)


def test_a_tracker_that_names_a_missing_step(saved):
    track(saved, 12)
    choice = choose(saved)
    assert taken(choice) == (10, RUN)
    assert notes(choice) == (
        f"{TRACKER} names step 12, which does not exist | newer than step 12, which {TRACKER} "
        "names, so only used as a last resort: step 15"
    )


def test_a_tracker_that_names_a_later_step_than_any(saved):
    track(saved, 10**17)
    choice = choose(saved)
    assert (
        taken(choice) == (15, RUN)
        and notes(choice) == f"{TRACKER} names step {10**17}, which does not exist"
    )


def test_a_tracker_older_than_everything_is_not_a_fresh_start(saved):
    track(saved, 0)
    choice = choose(saved)
    assert taken(choice) == (15, RUN) and "only used as a last resort: step 15, 10, 5" in notes(
        choice
    )


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\xff\xfe\x00", "it is not text"),
        (b"-15", "is negative"),
        (b"9" * 40, "a number of 40 digits"),
        (b"1" * 5000, "a number of 1024 digits"),
        (b"10.0", "not a whole number"),
        (b"release", "not a whole number"),
        ("١٠".encode(), "not a whole number"),
        (b"10 5", "not a whole number"),
        (b"\0", "not a whole number"),
    ],
)
def test_an_invalid_tracker_is_reported_and_the_newest_is_selected(saved, content, reason):
    track(saved, content)
    choice = choose(saved)
    assert (
        taken(choice) == (15, RUN)
        and reason in notes(choice)
        and "taking the newest complete one" in notes(choice)
    )
    assert len(notes(choice)) < 200


def test_the_newest_is_selected_without_a_tracker(saved):
    os.remove(saved / TRACKER)
    choice = choose(saved)
    assert taken(choice) == (15, RUN)
    assert notes(choice) == f"{TRACKER} is missing; taking the newest complete one"


def test_a_tracker_that_is_a_folder(saved):
    os.remove(saved / TRACKER)
    (saved / TRACKER).mkdir()
    assert taken(choose(saved)) == (15, RUN)


def test_a_dead_jobs_unfinished_tracker_update_counts(saved):
    track(saved, 10)
    intend(saved, 15)
    choice = choose(saved)
    assert taken(choice) == (15, RUN)
    assert (
        notes(choice)
        == f"{TRACKER} names step 10: the job that saved step 15 died before it could change it"
    )


def test_an_intent_of_another_step_does_not_count(saved):
    track(saved, 5)
    intend(saved, 10)
    assert taken(choose(saved)) == (5, RUN)


# ---- not committed -------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [True, False])
def test_a_save_that_all_ranks_have_finished_is_the_newest(saved, manifest):
    if manifest:
        unname(saved, 15)
        track(saved, 10)
    else:
        shutil.rmtree(folder_of(saved, 15))
        write_all(saved, 15)
        track(saved, 10)
    choice = choose(saved)
    assert (
        taken(choice) == (15, RUN) and choice.chosen.committed is manifest and choice.refused == ()
    )
    assert choice.chosen.iteration_dir.startswith(RECORDS)


def test_a_tracker_that_was_set_back_precedes_a_save_that_all_ranks_have_finished(saved):
    write_all(saved, 20)
    track(saved, 5)
    choice = choose(saved)
    assert taken(choice) == (5, RUN) and "only used as a last resort: step 20, 15, 10" in notes(
        choice
    )


def test_a_run_from_a_tracker_set_back_is_selected_if_killed_before_the_rename(saved):
    """Steps 5, 10 and 15 of the previous run are published; the new run has committed 10 and
    recorded the intent of its tracker."""
    track(saved, 5)
    save(saved / "elsewhere", 10, run=LATER_RUN)
    os.rename(folder_of(saved / "elsewhere", 10), making(saved, 10, LATER_RUN))
    intend(saved, 10)
    choice = choose(saved)
    assert taken(choice) == (
        10,
        LATER_RUN,
    ) and "names step 5: the job that saved step 10 died" in notes(choice)


def test_a_save_newer_than_a_tracker_set_back_needs_an_intent_to_be_selected(saved):
    """Between its last record and the intent, a run from a tracker set back by hand cannot be
    distinguished from an earlier one behind which the tracker was set: the tracker of the user
    counts, and a note names the other save."""
    track(saved, 5)
    write_all(saved, 10, run=LATER_RUN)
    choice = choose(saved)
    assert (
        taken(choice) == (5, RUN)
        and "newer than step 5" in notes(choice)
        and "step 10" in notes(choice)
    )


def test_a_complete_save_newer_than_a_folder_of_mindformers_that_the_tracker_names(tmp_path):
    save(tmp_path, 5)
    foreign(tmp_path, "mf190_20_single", (10, 15))
    write_all(tmp_path, 20, run=LATER_RUN, at=3e9)
    choice = choose(tmp_path)
    assert taken(choice) == (20, LATER_RUN) and choice.refused == ()


def test_a_save_without_one_rank_is_not_selected(saved):
    write_rank(saved, 20, 1)
    choice = choose(saved)
    # it is newer than what the tracker names, so it comes last
    assert taken(choice) == (15, RUN) and choice.refused == ()


def test_a_first_save_with_a_damaged_record_is_not_a_fresh_start(tmp_path):
    write_all(tmp_path, 10)
    (records_of(making(tmp_path, 10), 10) / "rank_00001.json").write_bytes(b"torn")
    with pytest.raises(NoUsableCheckpointError, match="the record of rank 1 cannot be read"):
        choose(tmp_path)


# ---- damaged -------------------------------------------------------------------------------------


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


DAMAGE = {
    "removed": (
        lambda root: os.remove(weights_of(root, 10, 1)),
        "the file of rank 1 is missing, and 1 of its tensors are on no",
    ),
    "cut": (lambda root: cut(weights_of(root, 10, 1, "opt")), "bytes, "),
    "a bit": (
        lambda root: flip_bit(weights_of(root, 10, 1)),
        "is not what was written; damaged: embedding.weight",
    ),
    "empty": (
        lambda root: weights_of(root, 10).write_bytes(b""),
        "the file of rank 0 is empty (0 bytes)",
    ),
    "another step": (
        lambda root: shutil.copy(weights_of(root, 5), weights_of(root, 10)),
        "is not of run",
    ),
    "record": (
        lambda root: os.remove(records_of(folder_of(root, 10), 10) / "rank_00001.json"),
        "the record of rank 1 is missing",
    ),
    "another record": (
        lambda root: shutil.copy(
            records_of(folder_of(root, 10), 10) / "rank_00000.json",
            records_of(folder_of(root, 10), 10) / "rank_00001.json",
        ),
        "is of run",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_next_older_iteration_is_selected_if_the_tracked_one_is_damaged(saved, kind):
    damage, reason = DAMAGE[kind]
    track(saved, 10)
    damage(saved)
    choice = choose(saved)
    assert taken(choice) == (5, RUN) and "only used as a last resort: step 15" in notes(choice)
    ((step, said),) = refused(choice)
    assert step == 10 and reason in said


def test_a_newer_one_is_the_last_resort(saved):
    track(saved, 10)
    for step in (5, 10):
        cut(weights_of(saved, step))
    choice = choose(saved)
    assert taken(choice) == (15, RUN) and [step for step, _ in refused(choice)] == [10, 5]


@pytest.mark.parametrize("name", [COMMON, METADATA])
def test_metadata_files_are_not_needed_beside_records(saved, name):
    os.remove(folder_of(saved, 15) / name)
    assert taken(choose(saved)) == (15, RUN)


def test_a_folder_that_was_renamed_to_another_step_is_refused(saved):
    os.rename(folder_of(saved, 15), folder_of(saved, 20))
    track(saved, 20)
    choice = choose(saved)
    assert taken(choice) == (10, RUN)
    assert "iteration_00000020 holds step 15: the folder was renamed" in " ".join(
        reason for _, reason in refused(choice)
    )


def test_all_ranks_select_the_same_and_damage_on_one_rank_counts_for_all(saved):
    flip_bit(weights_of(saved, 15, 1))
    choices = Ranks(2).run(lambda group: choose(saved, world=2, group=group, is_own=True))
    assert [taken(choice) for choice in choices] == [(10, RUN)] * 2
    assert {choice.refused[0].rank for choice in choices} == {1}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_number_of_ranks_may_be_another(saved, world):
    assert taken(choose(saved, world=world)) == (15, RUN)


def test_health(tmp_path):
    for step, health in ((5, 0), (10, None), (15, 1)):
        save(tmp_path, step, health=health)
    assert taken(choose(tmp_path)) == (15, RUN)
    choice = choose(tmp_path, unhealthy=())
    assert (
        taken(choice) == (10, RUN)
        and "unhealthy when it was saved (the embedding's local norm" in refused(choice)[0][1]
    )
    assert taken(choose(tmp_path, "15", unhealthy=())) == (15, RUN)
    assert taken(choose(folder_of(tmp_path, 15), unhealthy=())) == (15, RUN)


def test_no_healthy_checkpoint_is_an_error(tmp_path):
    save(tmp_path, 5, health=1)
    with pytest.raises(
        NoUsableCheckpointError,
        match="(?s)The training has no healthy checkpoints yet, please start.*unhealthy",
    ):
        choose(tmp_path, unhealthy=())


# ---- named ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named",
    [
        "iteration_00000010",
        "iteration_0000010",
        "iteration_10",
        "iteration_00000010/",
        "10",
        "0010",
    ],
)
def test_resume_training_names_a_step(saved, named):
    choice = choose(saved, named)
    assert taken(choice) == (10, RUN) and choice.notes == ()


@pytest.mark.parametrize(
    "named",
    [
        "12",
        "iteration_00000012",
        "-10",
        "ten",
        "rank_0",
        "١٠",
        "net-model-0000000-0000002.safetensors",
    ],
)
def test_resume_training_names_a_missing_step(saved, named):
    with pytest.raises(
        MissingCheckpointError,
        match="There are: iteration_00000005, iteration_00000010, iteration_00000015",
    ):
        choose(saved, named)


def test_a_damaged_named_checkpoint_is_an_error_without_a_fallback(saved):
    cut(weights_of(saved, 10))
    with pytest.raises(MissingCheckpointError, match="requested"):
        choose(saved, "10")


@pytest.mark.parametrize(
    "name", ["iteration_00000010", "iteration_0000010", "iteration_10", "best", "epoch 3"]
)
def test_a_folder_given_directly_may_have_any_name(saved, name):
    os.rename(folder_of(saved, 10), saved / name)
    choice = choose(saved / name)
    assert taken(choice) == (10, RUN) and choice.chosen.iteration_dir == name


@pytest.mark.parametrize("name", ["iteration_00000010", "best"])
def test_a_folder_that_was_copied_elsewhere_without_its_root(saved, tmp_path_factory, name):
    there = tmp_path_factory.mktemp("there") / name
    shutil.copytree(folder_of(saved, 10), there)
    shutil.rmtree(saved)
    assert taken(choose(there)) == (10, RUN) and taken(choose(f"{there}/")) == (10, RUN)
    assert taken(choose(there / "net-opt-0000001-0000002.safetensors")) == (10, RUN)
    if name != "best":
        assert taken(choose(there.parent)) == (10, RUN)


def test_a_folder_under_the_number_of_another_step_is_refused_even_if_it_is_named(saved):
    os.rename(folder_of(saved, 10), folder_of(saved, 12))
    with pytest.raises(
        MissingCheckpointError, match="iteration_00000012 holds step 10: the folder was renamed"
    ):
        choose(folder_of(saved, 12))


def test_two_folders_of_one_step_under_names_of_different_length(saved):
    shutil.copytree(folder_of(saved, 10), saved / "iteration_0000010")
    assert taken(choose(saved, "10")) == (10, RUN)
    track(saved, 10)
    assert taken(choose(saved)) == (10, RUN)


# ---- rank folders beside -------------------------------------------------------------------------


def test_both_formats_in_one_root_are_ordered(tmp_path):
    """A job changed the format and changed it back: the newest is selected."""
    rank_folders.save(tmp_path, 5, world=2)
    save(tmp_path, 10, 15, run=LATER_RUN)
    assert taken(choose(tmp_path)) == (15, LATER_RUN)
    rank_folders.save(tmp_path, 12, world=2, run="0003-0000cccc")
    choice = choose(tmp_path)
    assert (choice.chosen.step, choice.chosen.iteration_dir) == (12, "")


def test_the_other_format_is_selected_if_all_of_one_are_damaged(tmp_path):
    rank_folders.save(tmp_path, 5, world=2)
    save(tmp_path, 10, 15, run=LATER_RUN)
    for step in (10, 15):
        weights_of(tmp_path, step, 1).write_bytes(b"")
    choice = choose(tmp_path)
    assert choice.chosen.step == 5 and [step for step, _ in refused(choice)] == [15, 10]


def test_a_save_that_never_completed_does_not_hide_the_rank_folders(tmp_path):
    """The first save after a change to Checkpoint 2.0 was killed: the rank folders still exist."""
    rank_folders.save(tmp_path, 5, world=2)
    write_rank(tmp_path, 10, 0, run=LATER_RUN)
    choice = choose(tmp_path)
    assert choice.chosen is not None and choice.chosen.step == 5


# ---- checkpoints of mindformers ------------------------------------------------------------------


@pytest.mark.parametrize("name", FOREIGN)
def test_mindformers_folders(tmp_path, name):
    foreign(tmp_path, name)
    choice = choose(tmp_path)
    assert taken(choice) == (15, None) and choice.refused == () and choice.notes == ()
    assert (choice.chosen.state.global_batch_size, choice.chosen.epoch) == (
        8,
        choice.chosen.state.epoch,
    )
    assert (
        choice.chosen.world_size
        == {"mf190_20_single": 1, "mf190_20_dp2tp2opt": 4, "mf180_20_tp2": 2}[name]
    )
    track(tmp_path, 10)
    assert taken(choose(tmp_path)) == (10, None)
    assert taken(choose(folder_of(tmp_path, 15))) == (15, None)
    assert taken(choose(next(folder_of(tmp_path, 15).glob("*-opt-*0-*")))) == (15, None)


def without(pattern):
    def act(folder):
        for path in folder.glob(pattern):
            path.unlink()

    return act


def common(**values):
    def act(folder):
        path = folder / COMMON
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return act


def mixed(folder):
    """Replaces the last rank by one of a save with another number of ranks."""
    shutil.copy(
        folder / "qwen3-model-0000003-0000004.safetensors",
        folder / "qwen3-model-0000007-0000008.safetensors",
    )


def other_prefix(folder):
    os.rename(
        folder / "qwen3-opt-0000002-0000004.safetensors",
        folder / "llama-opt-0000002-0000004.safetensors",
    )


def metadata(change):
    def act(folder):
        path = folder / METADATA
        rows = json.loads(path.read_text())
        change(
            rows,
            *(next(iter(rows[key].items())) for key in ("state_dict_metadata", "storage_data")),
        )
        path.write_text(json.dumps(rows))

    return act


def elsewhere(rows, described, stored):
    for row in stored[1]:
        row["file_name"] = "x-model-0000000-0000004.safetensors"


def narrower(rows, described, stored):
    """Returns metadata in which every dimension is larger than in the files."""
    row = described[1]
    row["global_shape"] = [2 * size for size in row["global_shape"]]
    for chunk in row["chunk"]:
        chunk["local_shape"] = [2 * size for size in chunk["local_shape"]]


def renamed(rows, described, stored):
    name = described[0]
    rows["state_dict_metadata"]["other"] = rows["state_dict_metadata"].pop(name)
    for key in [key for key in rows["storage_data"] if f"'{name}'" in key]:
        rows["storage_data"][key.replace(f"'{name}'", "'other'")] = rows["storage_data"].pop(key)


FOREIGN_DAMAGE = {
    "metadata cut": (lambda folder: cut(folder / METADATA), "metadata.json: "),
    "metadata empty": (
        lambda folder: (folder / METADATA).write_bytes(b""),
        "metadata.json: it has 0 bytes",
    ),
    "metadata no object": (
        lambda folder: (folder / METADATA).write_bytes(b"[]"),
        "metadata.json: ",
    ),
    "metadata of other files": (metadata(elsewhere), "slice 0 of "),
    "metadata of other shapes": (metadata(narrower), "by metadata.json it is float32 of shape"),
    "metadata of other tensors": (metadata(renamed), "metadata.json names for it"),
    "metadata without a tensor": (
        metadata(
            lambda rows, described, stored: [
                rows["state_dict_metadata"].pop(described[0]),
                [
                    rows["storage_data"].pop(key)
                    for key in list(rows["storage_data"])
                    if f"'{described[0]}'" in key
                ],
            ]
        ),
        "metadata.json does not name ",
    ),
    "model": (without("*-model-0000002-*"), "3 of 4 model files are there, missing: 2"),
    "all models": (without("*-model-*"), "the weights of the network are missing"),
    "opt": (without("*-opt-0000000-*"), "3 of 4 opt files are there, missing: 0"),
    "metadata": (without(METADATA), "metadata.json is missing"),
    "common": (without(COMMON), "common.json is missing"),
    "weights": (without("*.safetensors"), "the folder holds no weights"),
    "cut": (lambda folder: cut(folder / "qwen3-model-0000001-0000004.safetensors"), "rank 1: "),
    "empty": (
        lambda folder: (folder / "qwen3-opt-0000003-0000004.safetensors").write_bytes(b""),
        "(0 bytes)",
    ),
    "mixed": (mixed, "files of two saves are mixed"),
    "other prefix": (other_prefix, "files of two saves are mixed"),
    "common empty": (lambda folder: (folder / COMMON).write_bytes(b""), "common.json: it is empty"),
    "common torn": (lambda folder: cut(folder / COMMON), "common.json: "),
    "common of another step": (
        common(step_num=10),
        "common.json is of step 10, the folder of step 15",
    ),
    "common without step": (common(step_num=None), "step_num is missing"),
    "common a text": (common(global_batch_size="8"), "global_batch_size is '8'"),
    "common zero": (common(global_batch_size=0), "global_batch_size is 0"),
}


@pytest.mark.parametrize("kind", FOREIGN_DAMAGE)
def test_damaged_mindformers_folders(tmp_path, kind):
    foreign(tmp_path)
    damage, reason = FOREIGN_DAMAGE[kind]
    damage(folder_of(tmp_path, 15))
    choice = choose(tmp_path)
    assert taken(choice) == (10, None)
    ((step, said),) = refused(choice)
    assert step == 15 and reason in said
    with pytest.raises(MissingCheckpointError) as error:
        choose(folder_of(tmp_path, 15))
    assert reason in str(error.value)
    shutil.rmtree(folder_of(tmp_path, 10))
    with pytest.raises(NoUsableCheckpointError):
        choose(tmp_path)


def test_unhealthy_mindformers_folders_are_refused(tmp_path):
    foreign(tmp_path, "mf190_20_single")
    common(ckpt_status=1)(folder_of(tmp_path, 15))
    assert taken(choose(tmp_path)) == (15, None)
    assert taken(choose(tmp_path, unhealthy=())) == (10, None)


def test_missing_files_without_a_tracker_are_a_killed_first_save(tmp_path):
    foreign(tmp_path, steps=(10,), tracked=False)
    without(COMMON)(folder_of(tmp_path, 10))
    choice = choose(tmp_path)
    assert (
        choice.chosen is None
        and choice.is_fresh_start
        and "common.json is missing" in refused(choice)[0][1]
    )


def test_with_a_tracker_missing_files_are_an_error(tmp_path):
    foreign(tmp_path, steps=(10,))
    without("*-model-0000001-*")(folder_of(tmp_path, 10))
    with pytest.raises(NoUsableCheckpointError, match="missing: 1"):
        choose(tmp_path)


def test_a_file_named_like_an_iteration_is_ignored(saved):
    folder_of(saved, 20).write_text("")
    assert taken(choose(saved)) == (15, RUN)


def test_a_tracker_alone_prevents_a_fresh_start(tmp_path):
    """A user removed the folders, or they are not visible yet."""
    track(tmp_path, 15)
    with pytest.raises(MissingCheckpointError, match="names step 15"):
        choose(tmp_path)


def test_our_saves_after_folders_of_mindformers_are_newer(tmp_path):
    foreign(tmp_path, "mf190_20_single")
    save(tmp_path, 20, run=LATER_RUN, at=3e9)
    assert taken(choose(tmp_path)) == (20, LATER_RUN)
    cut(weights_of(tmp_path, 20))
    choice = choose(tmp_path)
    assert taken(choice) == (15, None) and [step for step, _ in refused(choice)] == [20]


def test_files_of_two_saves_of_ours_without_records(tmp_path):
    save(tmp_path, 10, 15)
    shutil.rmtree(folder_of(tmp_path, 15) / RECORDS)
    shutil.copy(weights_of(tmp_path, 10, 1), weights_of(tmp_path, 15, 1))
    assert taken(choose(tmp_path)) == (10, RUN)
