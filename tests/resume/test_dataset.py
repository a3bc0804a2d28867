"""What a data set is known by: equal for the same samples in the same order, wherever it lies and however fast it is read."""
import os
import shutil

from folders import STORAGE

from mindresume.data import MAX_IDENTITY, MAX_TEXT, differences
from mindresume.resume.dataset import identity_of


def mind(path, **more):
    return {"data_loader": {"type": "MindDataset", "dataset_dir": str(path), "shuffle": False, **more},
            "input_columns": ["input_ids", "labels"], "batch_size": 8, "num_parallel_workers": 4, "seed": 0}


def of(section, seed=42):
    return identity_of(STORAGE, section, seed)


def test_a_file_is_known_by_name_and_size_not_by_its_place(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.mindrecord").write_bytes(b"123")
    before = of(mind(tmp_path / "a" / "x.mindrecord"))
    assert before == {"type": "MindDataset", "dataset_dir": "1 file, 3 bytes: x.mindrecord", "shuffle": "False",
                      "input_columns": "input_ids, labels", "seed": "0"}
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert of({**mind(tmp_path / "b" / "x.mindrecord"), "batch_size": 16, "num_parallel_workers": 1}) == before
    (tmp_path / "b" / "x.mindrecord").write_bytes(b"1234")
    assert differences(before, of(mind(tmp_path / "b" / "x.mindrecord"))) == [
        "dataset_dir: 1 file, 3 bytes: x.mindrecord, now 1 file, 4 bytes: x.mindrecord"]


def test_what_decides_the_samples_counts(tmp_path):
    before = of(mind("/no/where"))
    for changed in (mind("/no/where", num_samples=80), {**mind("/no/where"), "seed": 1}, mind("/else/where"),
                    {**mind("/no/where"), "input_columns": ["input_ids"]}, {**mind("/no/where"), "drop_remainder": True}):
        assert len(differences(before, of(changed))) == 1, changed


def test_the_seed_of_the_job_counts_where_the_data_set_has_none():
    section = {"data_loader": {"type": "T"}}
    assert of(section, 1) == {"type": "T", "seed": "1"} and of(section, None) == {"type": "T"}


def test_a_folder_is_all_files_in_it(tmp_path):
    for number in range(5):
        os.makedirs(tmp_path / "d" / str(number), exist_ok=True)
        (tmp_path / "d" / str(number) / "part.mindrecord").write_bytes(b"1" * number)
    (tmp_path / "d" / ".cache").write_bytes(b"1")
    before = of(mind(tmp_path / "d"))["dataset_dir"]
    assert before.startswith("5 files, 10 bytes: 0/part.mindrecord, 1/part.mindrecord, 2/part.mindrecord, ... (")
    (tmp_path / "d" / "3" / "part.mindrecord").rename(tmp_path / "d" / "3" / "new.mindrecord")
    assert of(mind(tmp_path / "d"))["dataset_dir"] != before


def test_a_blend_of_megatron(tmp_path):
    for name in ("a_text", "b_text"):
        (tmp_path / f"{name}.bin").write_bytes(b"12")
        (tmp_path / f"{name}.idx").write_bytes(b"1")

    def section(*weights):
        blend = [part for weight, name in zip(weights, ("a_text", "b_text"), strict=True)
                 for part in (str(weight), str(tmp_path / name))]
        return {"data_loader": {"type": "BlendedMegatronDatasetDataLoader", "sizes": [1000, 0, 0],
                                "config": {"seed": 1234, "seq_length": 64, "data_path": blend}}}
    before = of(section(0.3, 0.7))
    assert before["config.data_path"].startswith("4 files, 6 bytes: a_text.bin, a_text.idx, b_text.bin, ... (")
    assert before["config.data_path"].endswith("; 0.3, 0.7") and before["sizes"] == "1000, 0, 0"
    assert len(differences(before, of(section(0.5, 0.5)))) == 1


def test_many_keys_and_long_values_are_bounded_and_still_count():
    def section(last):
        many = {f"key{number}": "x" for number in range(200)}
        return {"data_loader": {"type": "T", **many, "last": last}, "text": "y" * 9999 + last}
    first, second = of(section("a")), of(section("b"))
    assert len(first) <= MAX_IDENTITY and all(len(text) <= MAX_TEXT for text in first.values())
    assert first != second and differences(first, second)


def test_no_configuration_is_not_known():
    assert identity_of(STORAGE, None) == identity_of(STORAGE, "a text") == {}
