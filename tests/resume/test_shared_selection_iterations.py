"""Which iteration is selected, the reasons for refusing the others, and whether it is a fresh start
or an error."""

import json
import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
import rank_folders
from iteration_folders import (
    COMMON,
    METADATA,
    TRACKER,
    folder_of,
    foreign,
    making,
    records_of,
    save,
    track,
    weights_of,
    write_all,
    write_rank,
)
from job_choices import choose, stops, takes
from rank_folders import LATER_RUN, RECORDS, Ranks, flip_bit

from mindresume.errors import MissingCheckpointError
from mindresume.model.manifest import read_details

missing = partial(stops, error=MissingCheckpointError)


def notes(choice):
    return " | ".join(choice.notes)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path, 5, 10, 15)
    return tmp_path


# ---- the tracker ---------------------------------------------------------------------------------


LAST_RESORT = "which {tracker} names, so only used as a last resort: step 15"


@pytest.mark.parametrize(
    "content, step, said",
    [
        ("10", 10, f"newer than step 10, {LAST_RESORT}"),  # set back by hand
        ("  10\r\n", 10, f"newer than step 10, {LAST_RESORT}"),
        (
            12,
            10,
            f"{{tracker}} names step 12, which does not exist | newer than step 12, {LAST_RESORT}",
        ),
        (10**17, 15, f"{{tracker}} names step {10**17}, which does not exist"),
        (
            0,
            15,
            "{tracker} names step 0, which does not exist | newer than step 0, "
            + LAST_RESORT
            + ", 10, 5",
        ),
        (b"", 15, "it is empty"),
        (b"1" * 5000, 15, "at most 999999999999999999; taking the newest complete one"),
        (None, 15, "{tracker} is missing; taking the newest complete one"),
    ],
)
def test_what_the_tracker_says_decides_and_is_reported(saved, content, step, said):
    os.remove(saved / TRACKER) if content is None else track(saved, content)
    found = notes(takes(saved, step))
    assert said.format(tracker=TRACKER) in found and len(found) < 250


def test_a_tracker_that_is_a_folder(saved):
    os.remove(saved / TRACKER)
    (saved / TRACKER).mkdir()
    takes(saved, 15)


# ---- not committed -------------------------------------------------------------------------------


def test_a_tracker_that_was_set_back_precedes_a_save_that_all_ranks_have_finished(saved):
    write_all(saved, 20)
    track(saved, 5)
    assert "only used as a last resort: step 20, 15, 10" in notes(takes(saved, 5))


def test_a_save_newer_than_a_tracker_set_back_needs_an_intent_to_be_selected(saved):
    """Between its last record and the intent, a run from a tracker set back by hand cannot be
    distinguished from an earlier one behind which the tracker was set: the tracker of the user
    counts, and a note names the other save."""
    track(saved, 5)
    write_all(saved, 10, run=LATER_RUN)
    choice = takes(saved, 5)
    assert "newer than step 5" in notes(choice) and "step 10" in notes(choice)


def test_a_save_without_one_rank_is_not_selected(saved):
    write_rank(saved, 20, 1)
    takes(saved, 15)  # the other is newer than what the tracker names, so it comes last


def test_a_first_save_with_a_damaged_record_is_not_a_fresh_start(tmp_path):
    write_all(tmp_path, 10)
    (records_of(making(tmp_path, 10), 10) / "rank_00001.json").write_bytes(b"torn")
    stops(tmp_path, "the record of rank 1 cannot be read")


# ---- damaged -------------------------------------------------------------------------------------


def cut(path):
    os.truncate(path, os.path.getsize(path) // 2)


def record(root, rank):
    return records_of(folder_of(root, 10), 10) / f"rank_0000{rank}.json"


def write_again(root):
    """Writes a whole record that says the same of the files, after the commit."""
    with open(record(root, 1), "rb") as file:
        written, details = read_details(file)
    record(root, 1).write_bytes(written.encode(replace(details, random={})))


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
    "record": (lambda root: os.remove(record(root, 1)), "the record of rank 1 is missing"),
    "another record": (lambda root: shutil.copy(record(root, 0), record(root, 1)), "is of run"),
    "record of later": (write_again, "the record of rank 1 is not the one that was committed"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_next_older_iteration_is_selected_if_the_tracked_one_is_damaged(saved, kind):
    damage, reason = DAMAGE[kind]
    track(saved, 10)
    damage(saved)
    assert "only used as a last resort: step 15" in notes(takes(saved, 5, (10, reason)))


def test_a_newer_one_is_the_last_resort(saved):
    track(saved, 10)
    for step in (5, 10):
        cut(weights_of(saved, step))
    takes(saved, 15, (10, ""), (5, ""))


@pytest.mark.parametrize("name", [COMMON, METADATA])
def test_metadata_files_are_not_needed_beside_records(saved, name):
    os.remove(folder_of(saved, 15) / name)
    takes(saved, 15)


def test_all_ranks_select_the_same_and_damage_on_one_rank_counts_for_all(saved):
    flip_bit(weights_of(saved, 15, 1))
    for choice in Ranks(2).run(
        lambda group: takes(saved, 10, (15, ""), world=2, group=group, is_own=True)
    ):
        assert choice.refused[0].rank == 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_number_of_ranks_may_be_another(saved, world):
    takes(saved, 15, world=world)


# ---- named ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "named", ["iteration_00000010", "iteration_10", "iteration_00000010/", "0010"]
)
def test_resume_training_names_a_step(saved, named):
    assert takes(saved, 10, requested=named).notes == ()


@pytest.mark.parametrize("named", ["12", "-10", "ten", "rank_0", "١٠", "net-model-0-2.safetensors"])
def test_resume_training_names_a_missing_step(saved, named):
    offered = "There are: iteration_00000005, iteration_00000010, iteration_00000015"
    missing(saved, offered, requested=named)


def test_a_damaged_named_checkpoint_is_an_error_without_a_fallback(saved):
    cut(weights_of(saved, 10))
    missing(saved, "requested", requested="10")


@pytest.mark.parametrize("name", ["iteration_00000010", "best"])
def test_a_folder_that_was_copied_elsewhere_without_its_root(saved, tmp_path_factory, name):
    there = tmp_path_factory.mktemp("there") / name
    shutil.copytree(folder_of(saved, 10), there)
    shutil.rmtree(saved)
    for path in (there, f"{there}/", there / "net-opt-0000001-0000002.safetensors"):
        takes(path, 10)
    if name != "best":
        takes(there.parent, 10)


def test_a_folder_under_the_number_of_another_step_is_refused_even_if_it_is_named(saved):
    os.rename(folder_of(saved, 15), folder_of(saved, 20))
    track(saved, 20)
    renamed = "iteration_00000020 holds step 15: the folder was renamed"
    choice = choose(saved)
    assert choice.chosen.step == 10
    assert renamed in " ".join(refusal.reason for refusal in choice.refused)
    missing(folder_of(saved, 20), renamed)


def test_two_folders_of_one_step_under_names_of_different_length(saved):
    shutil.copytree(folder_of(saved, 10), saved / "iteration_0000010")
    takes(saved, 10, requested="10")
    track(saved, 10)
    takes(saved, 10)


# ---- rank folders beside -------------------------------------------------------------------------


def test_both_formats_in_one_root_are_ordered(tmp_path):
    """A job changed the format and changed it back: the newest is selected, and the other format if
    all of one are damaged."""
    rank_folders.save(tmp_path, 5, world=2)
    # the first save after the change was killed
    write_rank(tmp_path, 8, 0, run=LATER_RUN)
    assert choose(tmp_path).chosen.step == 5
    save(tmp_path, 10, 15, run=LATER_RUN)
    assert takes(tmp_path, 15).chosen.run == LATER_RUN
    for step in (10, 15):
        weights_of(tmp_path, step, 1).write_bytes(b"")
    choice = choose(tmp_path)
    assert choice.chosen.step == 5
    assert [refusal.step for refusal in choice.refused if refusal.step != 8] == [15, 10]
    rank_folders.save(tmp_path, 12, world=2, run="0003-0000cccc")
    assert takes(tmp_path, 12).chosen.iteration_dir == ""


# ---- checkpoints of mindformers ------------------------------------------------------------------


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
    "common torn": (lambda folder: cut(folder / COMMON), "common.json: "),
    "common of another step": (
        common(step_num=10),
        "common.json is of step 10, the folder of step 15",
    ),
}


@pytest.mark.parametrize("kind", FOREIGN_DAMAGE)
def test_damaged_mindformers_folders(tmp_path, kind):
    foreign(tmp_path)
    damage, reason = FOREIGN_DAMAGE[kind]
    damage(folder_of(tmp_path, 15))
    takes(tmp_path, 10, (15, reason))
    missing(folder_of(tmp_path, 15), reason)
    shutil.rmtree(folder_of(tmp_path, 10))
    stops(tmp_path, reason)


def test_missing_files_without_a_tracker_are_a_killed_first_save(tmp_path):
    foreign(tmp_path, steps=(10,), tracked=False)
    without(COMMON)(folder_of(tmp_path, 10))
    choice = choose(tmp_path)
    assert choice.chosen is None and choice.is_fresh_start
    assert "common.json is missing" in choice.refused[0].reason


def test_a_tracker_alone_prevents_a_fresh_start(tmp_path):
    """A user removed the folders, or they are not visible yet."""
    track(tmp_path, 15)
    missing(tmp_path, "names step 15")


def test_files_of_two_saves_of_ours_without_records(tmp_path):
    save(tmp_path, 10, 15)
    shutil.rmtree(folder_of(tmp_path, 15) / RECORDS)
    shutil.copy(weights_of(tmp_path, 10, 1), weights_of(tmp_path, 15, 1))
    assert choose(tmp_path).chosen.step == 10
