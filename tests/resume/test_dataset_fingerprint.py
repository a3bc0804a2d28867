"""The fingerprint of a data set: equal for the same samples in the same order, whatever its folder
and reading options."""

import os
import shutil

import pytest
from rank_folders import STORAGE

from mindresume.resume.dataset_fingerprint import (
    MAX_IDENTITY,
    MAX_TEXT,
    dataset_differences,
    dataset_identity,
)


def mind(path, **more):
    return {
        "data_loader": {"type": "MindDataset", "dataset_dir": str(path), "shuffle": False, **more},
        "input_columns": ["input_ids", "labels"],
        "batch_size": 8,
        "num_parallel_workers": 4,
        "seed": 0,
    }


def of(section, seed=42):
    return dataset_identity(STORAGE, section, seed)


def differs(before, now):
    return len(dataset_differences(before, now)) == 1


def write(folder, *names, data=b"123"):
    for name in names:
        os.makedirs(os.path.dirname(folder / name), exist_ok=True)
        (folder / name).write_bytes(data)


def loader(kind, **more):
    return {"data_loader": {"type": kind, **more}}


def test_a_file_is_identified_by_name_and_size_not_by_its_folder(tmp_path):
    write(tmp_path / "a", "x.mindrecord")
    before = of(mind(tmp_path / "a" / "x.mindrecord"))
    assert before == {
        "type": "MindDataset",
        "dataset_dir": "1 file, 3 bytes: x.mindrecord",
        "shuffle": "False",
        "input_columns": "input_ids, labels",
        "seed": "0",
    }
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = mind(tmp_path / "b" / "x.mindrecord")
    assert of({**moved, "batch_size": 16, "num_parallel_workers": 1}) == before
    write(tmp_path / "b", "x.mindrecord", data=b"1234")
    assert dataset_differences(before, of(moved)) == [
        "dataset_dir: 1 file, 3 bytes: x.mindrecord, now 1 file, 4 bytes: x.mindrecord"
    ]


def test_settings_that_decide_the_samples_count(tmp_path):
    section = mind("/no/where")
    for changed in (
        mind("/no/where", num_samples=80),
        mind("/else/where"),
        {**section, "seed": 1},
        {**section, "input_columns": ["input_ids"]},
        {**section, "drop_remainder": True},
    ):
        assert differs(of(section), of(changed)), changed


def test_the_seed_of_the_job_counts_if_the_data_set_has_none():
    section = loader("T")
    assert of(section, 1) == {"type": "T", "seed": "1"} and of(section, None) == {"type": "T"}


def test_a_folder_is_all_files_in_it(tmp_path):
    for number in range(5):
        write(tmp_path / "d", f"{number}/part.mindrecord", data=b"1" * number)
    write(tmp_path / "d", ".cache")
    before = of(mind(tmp_path / "d"))["dataset_dir"]
    assert before.startswith(
        "5 files, 10 bytes: 0/part.mindrecord, 1/part.mindrecord, 2/part.mindrecord, ... ("
    )
    (tmp_path / "d" / "3" / "part.mindrecord").rename(tmp_path / "d" / "3" / "new.mindrecord")
    assert of(mind(tmp_path / "d"))["dataset_dir"] != before


def test_a_blend_of_megatron(tmp_path):
    one, two = tmp_path / "a_text", tmp_path / "b_text"
    write(tmp_path, "a_text.bin", "a_text.idx", "b_text.bin", "b_text.idx")
    before = of(megatron(0.3, one, 0.7, two))
    said = before["config.data_path"]
    assert said.startswith("4 files, 12 bytes: a_text.bin, a_text.idx, b_text.bin, ... (")
    assert said.endswith("; 0.3, 0.7") and before["sizes"] == "1000, 0, 0"
    assert differs(before, of(megatron(0.5, one, 0.5, two)))


def test_many_keys_and_long_values_are_bounded_and_still_count():
    def section(last):
        many = {f"key{number}": "x" for number in range(200)}
        return {**loader("T", **many, last=last), "text": "y" * 9999 + last}

    first, second = of(section("a")), of(section("b"))
    assert len(first) <= MAX_IDENTITY and all(len(text) <= MAX_TEXT for text in first.values())
    assert first != second and dataset_differences(first, second)


def test_a_missing_configuration_has_no_fingerprint():
    assert dataset_identity(STORAGE, None) == dataset_identity(STORAGE, "a text") == {}


def test_differences_are_named():
    before = {"type": "MindDataset", "shuffle": "True", "seed": "1"}
    assert (
        dataset_differences(before, dict(before))
        == dataset_differences({}, before)
        == dataset_differences(before, {})
        == []
    )
    assert dataset_differences(
        before, {"type": "MindDataset", "shuffle": "False", "num_samples": "80"}
    ) == ["shuffle: True, now False", "seed: 1, now nothing", "num_samples: nothing, now 80"]
    (long,) = dataset_differences({"files": "a" * 500}, {"files": "b"})
    assert len(long) < 150 and long.endswith("..., now b")


# ---- files written by loaders --------------------------------------------------------------------

HASH = "0123456789abcdef0123456789abcdef"
INDICES = tuple(
    f"{HASH}-GPTDataset-train-{name}"
    for name in ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
)


def megatron(*blend, **config):
    """Returns a blend: weight, prefix, ..."""
    config = {"seq_length": 64, "data_path": [str(part) for part in blend], **config}
    return loader("BlendedMegatronDatasetDataLoader", sizes=[1000, 0, 0], config=config)


def test_indices_that_mindformers_keeps_beside_a_prefix(tmp_path):
    """``{prefix}/cache/GPTDataset_indices``, its default: made at the first start. A replaced .bin
    is still noticed."""
    write(tmp_path, "text.bin", "text.idx")
    before = of(megatron(1, tmp_path / "text"))
    assert before["config.data_path"] == "2 files, 6 bytes of 3, 3: text.bin, text.idx; 1"
    write(tmp_path / "text" / "cache" / "GPTDataset_indices", *INDICES)
    assert of(megatron(1, tmp_path / "text")) == before
    write(tmp_path, "text.bin", data=b"1234")
    assert differs(before, of(megatron(1, tmp_path / "text")))


def test_a_prefix_without_a_folder_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "text.bin", "text.idx", "1000.bin")
    assert (
        of(megatron(1, "text"))["config.data_path"]
        == "2 files, 6 bytes of 3, 3: text.bin, text.idx; 1"
    )
    assert of(megatron(1, " text "))["config.data_path"].startswith("2 files")
    assert of(megatron(1, "text"))["type"] == "BlendedMegatronDatasetDataLoader"


def test_caches_and_states_named_in_the_configuration(tmp_path):
    """``path_to_cache`` and ``cache_dir`` may be within the data; ``dataset_state_dir`` grows with
    each save."""
    write(tmp_path / "d", "data.json")

    def section(**more):
        data = str(tmp_path / "d")
        return loader("HFDataLoader", path="json", data_dir=data, streaming=True, size=80, **more)

    extra = {
        "cache_dir": str(tmp_path / "d" / "c"),
        "dataset_state_dir": str(tmp_path / "states"),
        "num_proc": 4,
    }
    before = of(section(**extra))
    assert before == of(section()) and before["data_dir"] == "1 file, 3 bytes: data.json"
    write(tmp_path / "d" / "c", "json/default/0.0.0/json-train.arrow")
    write(tmp_path / "states", "step_5/dataset_state_rank0.json")
    write(tmp_path / "d", "step_5/dataset_state_rank0.json")
    assert of(section(**extra)) == before
    write(tmp_path / "cache", *INDICES)
    assert of(
        megatron(1, "/no/where", path_to_cache=str(tmp_path / "cache"), mmap_bin_files=False)
    ) == of(megatron(1, "/no/where"))


@pytest.mark.parametrize(
    "name",
    [
        "cache-8f0a.arrow",
        "train/cache-8f0a_00001_of_00004.arrow",
        "tmpab12cd_3",
        "data.lock",
        "x.incomplete/part.arrow",
        "param_name_map.json",
        "text/cache/GPTDataset_indices/" + INDICES[0],
        INDICES[2],
        "__pycache__/script.pyc",
    ],
)
def test_files_that_loaders_leave_among_the_data(tmp_path, name):
    path = str(tmp_path / "d")
    section = loader("HFDataLoader", load_func="load_from_disk", dataset_path=path)
    write(tmp_path / "d", "data-00000-of-00001.arrow", "state.json")
    before = of(section)
    write(tmp_path / "d", name)
    assert of(section) == before
    write(tmp_path / "d", "data-00001-of-00002.arrow")
    assert differs(before, of(section))


def test_credentials_are_not_recorded():
    options = {"key": "secret"}
    section = loader("HFDataLoader", path="json", token="secret", storage_options=options)
    assert "secret" not in str(of(section))


def test_cache_rows_of_earlier_versions_are_no_change():
    """One run had recorded caches; another had not, and lacks the row of a key that is ignored
    now."""
    now = {"type": "B", "config.data_path": "2 files, 6 bytes of 3, 3: text.bin, text.idx; 1"}
    names = ", ".join(f"cache/GPTDataset_indices/{name}" for name in INDICES[:3])
    for before in (
        {
            **now,
            "config.path_to_cache": "/no/where",
            "dataset_state_dir": "9 files, 90 bytes: a, b, c, ... (00)",
        },
        {**now, "config.data_path": f"4 files, 12 bytes: {names}, ... (0123456789abcdef); 1"},
    ):
        assert dataset_differences(before, now) == [] and dataset_differences(now, before) == []
    for other in (
        {"config.data_path": "2 files, 7 bytes of 4, 3: text.bin, text.idx; 1"},
        {"type": "cache-1.arrow"},
    ):
        assert differs({**now, **other}, now)
