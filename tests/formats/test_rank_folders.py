"""Names of files, and the candidates and notes of a scan of rank folders."""
import json
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_folders import RUN, STORAGE, dir_at, flip_bit, name_of, path_of, save, tensors_of, write_foreign, write_rank

from mindresume.formats import MINDFORMERS, OURS, CheckpointDir
from mindresume.formats.rank_folders import (
    FileName,
    folder_name,
    folder_rank,
    free_suffix,
    meta_json,
    name_for_rank,
    parse_name,
    stem,
)
from mindresume.formats.scan import is_root, scan
from mindresume.formatting import listed
from mindresume.model.manifest import FOLDER, attempt_name, record_name, run_name
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import encode

NEXT_RUN = run_name(2, "0000bbbb")


def found(root):
    return scan(dir_at(root))


def order(root):
    """(step, origin) newest first."""
    return [(candidate.step, candidate.origin) for candidate in found(root).candidates]


# ---- names -----------------------------------------------------------------------------------------------------------

@given(st.builds(FileName, st.text("ab0129-_.", min_size=1, max_size=12).filter(lambda text: "_rank_" not in text),
                 st.integers(0, 10**5), st.integers(0, 99), st.integers(0, 10**6), st.integers(0, 10**6),
                 st.sampled_from(["ckpt", "safetensors"])))
def test_names_are_read_back(name):
    assert parse_name(str(name)) == name
    assert meta_json(name) == {"last_epoch": name.epoch, "last_step": name.step, "last_ckpt_file": str(name)}
    for rank in (0, 7, 4096):
        assert name_for_rank(str(name), rank, name.format) == str(name._replace(rank=rank))


@pytest.mark.parametrize("name, expected", [
    ("qwen3_8b_rank_0-200_1.safetensors", FileName("qwen3_8b", 0, 0, 200, 1, "safetensors")),
    ("qwen3_8b_rank_12_3-20_2.ckpt", FileName("qwen3_8b", 12, 3, 20, 2, "ckpt")),
    ("qwen3-0.6b_rank_1-1_1.ckpt", FileName("qwen3-0.6b", 1, 0, 1, 1, "ckpt")),
    ("7_rank_1-1_1.ckpt", FileName("7", 1, 0, 1, 1, "ckpt")),
    ("a-1_2_rank_1-1_1.ckpt", FileName("a-1_2", 1, 0, 1, 1, "ckpt")),
])
def test_names_of_mindformers(name, expected):
    assert parse_name(name) == expected and str(expected) == name


@pytest.mark.parametrize("name", ["", "model.safetensors", "net_rank_0-1.ckpt", "net-1_1.ckpt", "_rank_0-1_1.ckpt",
                                  "net_rank_0-1_1.ckpt.tmp", "net_rank_0-1_1.npz", "net_rank_x-1_1.ckpt", "meta.json",
                                  "net_rank_0-network-1_1.ckpt", f".net_rank_0-1_1.ckpt.{RUN}.mindresume-tmp"])
def test_other_names(name):
    assert parse_name(name) is None


@pytest.mark.parametrize("name, rank, fmt, expected", [
    ("qwen3_8b_rank_0-200_1.safetensors", 1, "safetensors", "qwen3_8b_rank_1-200_1.safetensors"),     # document 001
    ("qwen3_8b_rank_0-200_1", 1, "safetensors", "qwen3_8b_rank_1-200_1.safetensors"),
    ("qwen3_8b_rank_0_1-200_1", 17, "ckpt", "qwen3_8b_rank_17_1-200_1.ckpt"),
    ("qwen3_8b_rank_11-200_1.ckpt", 1, "safetensors", "qwen3_8b_rank_1-200_1.ckpt"),
    ("qwen3-0.6b_rank_0-200_1", 1, "ckpt", "qwen3-0.6b_rank_1-200_1.ckpt"),       # the dot is not an extension
    ("complete.safetensors", 1, "safetensors", "complete.safetensors"),
    ("complete-1_1.safetensors", 1, "safetensors", "complete-1_1.safetensors"),
    ("rank_0-1_1", 1, "ckpt", "rank_0-1_1.ckpt"),
])
def test_the_file_of_a_rank(name, rank, fmt, expected):
    assert name_for_rank(name, rank, fmt) == expected


@pytest.mark.parametrize("names, expected", [
    ([], 0), (["meta.json", "other_rank_0-1_1.ckpt", "net_rank_1-1_1.ckpt"], 0), (["net_rank_0-1_1.ckpt"], 1),
    (["net_rank_0-1_1.ckpt", "net_rank_0_4-1_1.safetensors", "net_rank_0_2-1_1.ckpt"], 5),
    ([f".net_rank_0_9-1_1.ckpt.{RUN}.mindresume-tmp"], 0),
])
def test_a_free_suffix_is_larger_than_all_in_use(names, expected):
    assert free_suffix(names, "net", 0) == expected


def test_small_helpers():
    assert stem("net", 3, 0) == "net_rank_3" and stem("net", 3, 2) == "net_rank_3_2"
    assert folder_rank(folder_name(12)) == 12
    assert [folder_rank(name) for name in ("rank_", "rank_x", "rank_1.bak", "my_rank_1", "Rank_1")] == [None] * 5
    assert listed([1, 2]) == "1, 2" and listed(list(range(11))) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_a_root_is_a_folder_of_rank_folders_or_records(tmp_path):
    assert not is_root(STORAGE, str(tmp_path)) and not is_root(STORAGE, str(tmp_path / "missing"))
    (tmp_path / FOLDER).mkdir()
    assert is_root(STORAGE, str(tmp_path))
    save(tmp_path / "other", 5, world=1)
    shutil.rmtree(tmp_path / "other" / FOLDER)
    assert is_root(STORAGE, str(tmp_path / "other"))


# ---- results of a scan -----------------------------------------------------------------------------------------------

def test_nothing(tmp_path):
    assert (found(tmp_path).candidates, found(tmp_path).exists) == ((), True)
    assert (found(tmp_path / "missing").candidates, found(tmp_path / "missing").exists) == ((), False)


def test_a_committed_checkpoint(tmp_path):
    save(tmp_path, 15, world=2)
    candidate, = found(tmp_path).candidates
    assert (candidate.step, candidate.origin, candidate.format, candidate.world_size, candidate.run, candidate.epoch) == (
        15, OURS, "safetensors", 2, RUN, 2)
    assert candidate.committed and candidate.maybe_completed and candidate.problem is None and candidate.saved_at == 1015.0
    assert [candidate.files[rank][0].path for rank in range(2)] == [f"rank_{rank}/net_rank_{rank}-2_5.safetensors"
                                                                 for rank in range(2)]


def test_a_file_of_rank_1_in_the_folder_of_rank_0_is_ignored(tmp_path):
    write_foreign(tmp_path, 5, world=2)
    shutil.copy(path_of(tmp_path, 5, 1), tmp_path / "rank_0")
    scanned = found(tmp_path)
    candidate, = scanned.candidates
    assert [file.path for file in candidate.all_files] == ["rank_0/net_rank_0-1_5.safetensors",
                                                               "rank_1/net_rank_1-1_5.safetensors"]
    assert "rank_0/net_rank_1-1_5.safetensors: a file of rank 1 in the folder of rank 0; ignored" in scanned.notes


@pytest.mark.parametrize("name", [f".net_rank_0-1_10.safetensors.{RUN}.mindresume-tmp", ".net_rank_0-1_10.ckpt", "notes.txt",
                                  "net_rank_0-1_10.tmp", "net-graph.meta"])
def test_temporary_and_other_files_are_ignored(tmp_path, name):
    write_foreign(tmp_path, 5, world=1)
    (tmp_path / "rank_0" / name).write_bytes(b"half")
    assert order(tmp_path) == [(5, MINDFORMERS)] and found(tmp_path).notes == ()


@pytest.mark.parametrize("content, note_text", [
    ("", "empty or truncated"), ("{", "empty or truncated"), ("[]", "empty or truncated"), ("{}", "empty or truncated"),
    ('{"last_ckpt_file": "gone.ckpt"}', "names gone.ckpt, which is not there"),
    ('{"last_ckpt_file": null}', "which is not there"),
])
def test_a_wrong_meta_json_is_noted(tmp_path, content, note_text):
    write_foreign(tmp_path, 5, world=2)
    (tmp_path / "rank_1" / "meta.json").write_text(content)
    note, = found(tmp_path).notes
    assert note.startswith("rank_1/meta.json ") and note_text in note and "the files decide" in note


def test_weights_without_counters_and_damaged_files_are_candidates_with_a_problem(tmp_path):
    folder = tmp_path / "rank_0"
    folder.mkdir()
    weights = {"w": tensors_of(0, 5)["layer.bias"]}
    (folder / "net_rank_0-1_5.ckpt").write_bytes(b"".join(bytes(piece) for _, piece in encode("ckpt", weights, {})))
    (folder / "net_rank_0-1_6.ckpt").write_bytes(b"")
    (folder / "net_rank_0-1_7.safetensors").write_bytes(b"\xff" * 64)
    reasons = {c.files[0][0].path: c.problem.reason for c in found(tmp_path).candidates}
    assert "holds no step_num: weights only" in reasons["rank_0/net_rank_0-1_5.ckpt"]
    assert "the file is empty" in reasons["rank_0/net_rank_0-1_6.ckpt"]
    assert "truncated, or not a safetensors file" in reasons["rank_0/net_rank_0-1_7.safetensors"]


def test_a_damaged_file_of_the_first_rank_does_not_hide_the_step(tmp_path):
    write_foreign(tmp_path, 5, world=2)
    path_of(tmp_path, 5, 0).write_bytes(b"")
    candidate, = found(tmp_path).candidates
    assert candidate.step == 5 and candidate.problem is None      # rank 0 refuses its own file when it proves it


@pytest.mark.parametrize("prefix", ["checkpoint_", "llama2_7b_", "7b-rank_", "3x8_"])
def test_files_of_a_transform_are_grouped_with_any_digits_in_the_prefix(tmp_path, prefix):
    for rank in range(12):
        folder = tmp_path / f"rank_{rank}"
        folder.mkdir()
        pieces = encode("safetensors", tensors_of(rank, 5), {})
        (folder / f"{prefix}{rank}.safetensors").write_bytes(b"".join(bytes(piece) for _, piece in pieces))
    candidate, = found(tmp_path).candidates
    assert sorted(candidate.files) == list(range(12)) and candidate.step == 5


def test_the_same_step_in_both_formats_is_two_candidates(tmp_path):
    write_foreign(tmp_path, 5, world=1, fmt="ckpt")
    write_foreign(tmp_path, 5, world=1, fmt="safetensors")
    assert sorted(c.format for c in found(tmp_path).candidates) == ["ckpt", "safetensors"]


# ---- the number of ranks ---------------------------------------------------------------------------------------------

def test_expected_ranks_are_the_number_of_rank_folders(tmp_path):
    write_foreign(tmp_path / "checkpoint", 5, world=3)
    scanned = found(tmp_path / "checkpoint")
    assert (scanned.expected_ranks, scanned.expected_source) == (3, "the number of rank folders")


@pytest.mark.parametrize("names, expected", [
    (["ckpt_strategy_rank_0.ckpt", "ckpt_strategy_rank_7.ckpt"], 8), (["x_rank_3.json"], 4), (["merged.ckpt", "rank_9"], 3)])
def test_expected_ranks_of_the_strategy_folder_beside(tmp_path, names, expected):
    write_foreign(tmp_path / "checkpoint", 5, world=3)
    (tmp_path / "strategy").mkdir()
    for name in names:
        (tmp_path / "strategy" / name).write_bytes(b"")
    assert found(tmp_path / "checkpoint").expected_ranks == expected


# ---- order -----------------------------------------------------------------------------------------------------------

def test_our_runs_are_ordered_by_number_then_by_step(tmp_path):
    save(tmp_path, 20, world=1)
    save(tmp_path, 5, world=1, run=NEXT_RUN, suffix=1)
    save(tmp_path, 10, world=1, run=NEXT_RUN, suffix=1)
    assert [(c.step, c.run) for c in found(tmp_path).candidates] == [(10, NEXT_RUN), (5, NEXT_RUN), (20, RUN)]


def test_mindformers_files_are_ordered_by_samples_when_global_batch_sizes_differ(tmp_path):
    from rank_folders import counters
    for step, batch, suffix in ((100, 8, 0), (60, 16, 1)):          # 800 samples; then a larger batch: 960
        folder = tmp_path / "rank_0"
        folder.mkdir(exist_ok=True)
        pieces = encode("ckpt", {**tensors_of(0, step), **counters(step, batch)}, {})
        name = name_of(0, step, suffix, "ckpt")
        (folder / str(name)).write_bytes(b"".join(bytes(piece) for _, piece in pieces))
        (folder / "meta.json").write_text(json.dumps(meta_json(name)))
    assert [c.step for c in found(tmp_path).candidates] == [60, 100]


def test_files_without_meta_json_are_ordered_by_steps_not_by_time(tmp_path):
    write_foreign(tmp_path, 10, world=1, meta=False, time=100)
    write_foreign(tmp_path, 5, world=1, meta=False, time=200)
    assert [step for step, _ in order(tmp_path)] == [10, 5]


# ---- our files, records and labels -----------------------------------------------------------------------------------

def test_labelled_files_without_any_records_are_ordinary_candidates(tmp_path):
    save(tmp_path, 10, world=2)
    shutil.rmtree(tmp_path / FOLDER)
    candidate, = found(tmp_path).candidates
    assert (candidate.step, candidate.origin, candidate.problem, candidate.maybe_completed) == (10, MINDFORMERS, None, True)


@pytest.mark.parametrize("run", ["x", "../../x", "1-0000aaaa"])
def test_a_label_that_names_no_run_does_not_stop_a_scan_without_records(tmp_path, run):
    path = path_of(tmp_path, 10, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(bytes(piece) for _, piece in encode("safetensors", tensors_of(0, 10), {"mindresume": f"{run} 10"})))
    (tmp_path / FOLDER).symlink_to(FOLDER)              # a link to itself cannot be listed
    hidden, candidate = found(tmp_path).candidates
    assert hidden.listing_error and (candidate.step, candidate.origin, candidate.problem) == (10, MINDFORMERS, None)


def test_labelled_files_stay_candidates_after_the_next_run(tmp_path):
    save(tmp_path, 10, world=2)
    shutil.rmtree(tmp_path / FOLDER)                                # cp -r rank_* here, resumed ...
    write_rank(tmp_path, 15, 0, 2, run=run_name(1, "0000cccc"), suffix=1)    # ... and killed in the first save
    assert [(c.step, c.maybe_completed) for c in found(tmp_path).candidates if c.maybe_completed] == [(10, True)]


def test_a_file_of_a_run_that_keeps_records_here_but_none_of_this_step_never_completed(tmp_path):
    save(tmp_path, 5, world=2)
    save(tmp_path, 10, world=2)
    shutil.rmtree(tmp_path / FOLDER / attempt_name(10, RUN))
    newest = found(tmp_path).candidates[0]
    assert (newest.step, newest.origin, newest.run, newest.maybe_completed) == (10, OURS, RUN, False)
    assert newest.problem.reason == "the save never completed: no record of it was written"


def test_recorded_files_are_not_separate_candidates(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, 5, rank, 3)                            # rank 2 never wrote
    path = path_of(tmp_path, 5, 2)
    path.parent.mkdir()
    shutil.copy(path_of(tmp_path, 5, 0), path)                      # and rank 2 wrote its file but no record
    candidate, = found(tmp_path).candidates
    assert "2 of 3 ranks recorded" in candidate.problem.reason and candidate.problem.rank == 2


def test_a_manifest_of_another_step_is_refused(tmp_path):
    save(tmp_path, 5, world=1)
    save(tmp_path, 10, world=1)
    shutil.copytree(tmp_path / FOLDER / attempt_name(5, RUN), tmp_path / FOLDER / attempt_name(20, RUN))
    newest = found(tmp_path).candidates[0]
    assert newest.step == 20 and "of another run, step or rank" in newest.problem.reason
    assert [c.step for c in found(tmp_path).candidates if c.problem is None] == [10, 5]


def test_a_flipped_bit_in_a_manifest_is_noted(tmp_path):
    save(tmp_path, 5, world=1)
    flip_bit(tmp_path / FOLDER / attempt_name(5, RUN) / "manifest.json", 60)
    scanned = found(tmp_path)
    assert scanned.candidates[0].problem is None and not scanned.candidates[0].committed
    assert "truncated or altered; using the records" in scanned.notes[0]


@pytest.mark.parametrize("content", [b"", b"torn"])
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_records_that_are_there_but_unreadable_do_not_prove_that_the_save_never_completed(tmp_path, content, ranks):
    for rank in (0, 1):
        write_rank(tmp_path, 5, rank, 2)                            # killed before the manifest
    for rank in ranks:
        (tmp_path / FOLDER / attempt_name(5, RUN) / record_name(rank)).write_bytes(content)
    candidate, = (c for c in found(tmp_path).candidates if c.records_dir)
    assert candidate.maybe_completed and "cannot be read" in candidate.problem.reason
    save(tmp_path, 10, world=2, run=NEXT_RUN, suffix=1)
    assert path_of(tmp_path, 5, 0).exists()                         # and it is not removed as an orphan


def test_a_missing_record_proves_that_the_save_never_completed(tmp_path):
    write_rank(tmp_path, 5, 0, 2)
    assert [c.maybe_completed for c in found(tmp_path).candidates] == [False]


class Late(PosixStorage):
    """Lists in one folder only what was there when it was made: other hosts have created the rest."""

    def __init__(self, folder, *but):
        self.folder, self.names = str(folder), [name for name in os.listdir(folder) if name not in but]

    def list(self, folder):
        return self.names if folder == self.folder else super().list(folder)


@pytest.mark.parametrize("missing", ["newest", "all", "trouble"])
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_records_that_are_listed_late_are_looked_up(tmp_path, fmt, missing):
    """The files counted as a checkpoint without records: unverified, and without a lease holder."""
    for step, run, suffix in ((5, RUN, 0), (10, NEXT_RUN, 1)):
        save(tmp_path, step, world=2, fmt=fmt, run=run, suffix=suffix)
    late = attempt_name(10, NEXT_RUN)
    storage = Late(tmp_path / FOLDER, late, *([attempt_name(5, RUN)] if missing == "all" else []))
    if missing == "trouble":
        def fail(path, status=storage.status):
            if path.endswith(late):
                raise OSError(5, "Input/output error", path)
            return status(path)
        storage.status = fail
    rows = [(c.origin, c.step, c.run, c.committed) for c in scan(CheckpointDir(storage, str(tmp_path))).candidates]
    assert rows == [(OURS, 10, NEXT_RUN, missing != "trouble"), (OURS, 5, RUN, True)]
