"""Names of files, and the candidates and notes of a scan of rank folders."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iteration_folders import folder_of, foreign, track
from iteration_folders import save as save_iterations
from rank_folders import RUN, STORAGE, save

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
from mindresume.formats.scan import ITERATION, MISSING, ROOT, kind_of, scan_one
from mindresume.model.manifest import run_name

NEXT_RUN = run_name(2, "0000bbbb")


# ---- names ---------------------------------------------------------------------------------------


@given(
    st.builds(
        FileName,
        st.text("ab0129-_.", min_size=1, max_size=12).filter(lambda text: "_rank_" not in text),
        st.integers(0, 10**5),
        st.integers(0, 99),
        st.integers(0, 10**6),
        st.integers(0, 10**6),
        st.sampled_from(["ckpt", "safetensors"]),
    )
)
def test_names_are_read_back(name):
    assert parse_name(str(name)) == name
    assert meta_json(name) == {
        "last_epoch": name.epoch,
        "last_step": name.step,
        "last_ckpt_file": str(name),
    }
    for rank in (0, 7, 4096):
        assert name_for_rank(str(name), rank, name.format) == str(name._replace(rank=rank))


@pytest.mark.parametrize(
    "name, expected",
    [
        ("qwen3_8b_rank_0-200_1.safetensors", FileName("qwen3_8b", 0, 0, 200, 1, "safetensors")),
        ("qwen3_8b_rank_12_3-20_2.ckpt", FileName("qwen3_8b", 12, 3, 20, 2, "ckpt")),
        ("a-1_2_rank_1-1_1.ckpt", FileName("a-1_2", 1, 0, 1, 1, "ckpt")),
    ],
)
def test_names_of_mindformers(name, expected):
    assert parse_name(name) == expected and str(expected) == name


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "net_rank_0-1.ckpt",
        "_rank_0-1_1.ckpt",
        "net_rank_0-1_1.ckpt.tmp",
        "net_rank_x-1_1.ckpt",
        "net_rank_0-network-1_1.ckpt",
        f".net_rank_0-1_1.ckpt.{RUN}.mindresume-tmp",
    ],
)
def test_other_names(name):
    assert parse_name(name) is None


@pytest.mark.parametrize(
    "name, rank, fmt, expected",
    [
        # document 001
        (
            "qwen3_8b_rank_0-200_1.safetensors",
            1,
            "safetensors",
            "qwen3_8b_rank_1-200_1.safetensors",
        ),
        ("qwen3_8b_rank_0-200_1", 1, "safetensors", "qwen3_8b_rank_1-200_1.safetensors"),
        ("qwen3_8b_rank_0_1-200_1", 17, "ckpt", "qwen3_8b_rank_17_1-200_1.ckpt"),
        # the dot is not an extension
        ("qwen3-0.6b_rank_0-200_1", 1, "ckpt", "qwen3-0.6b_rank_1-200_1.ckpt"),
        ("complete-1_1.safetensors", 1, "safetensors", "complete-1_1.safetensors"),
        ("rank_0-1_1", 1, "ckpt", "rank_0-1_1.ckpt"),
    ],
)
def test_the_file_of_a_rank(name, rank, fmt, expected):
    assert name_for_rank(name, rank, fmt) == expected


@pytest.mark.parametrize(
    "names, expected",
    [
        ([], 0),
        (["meta.json", "other_rank_0-1_1.ckpt", "net_rank_1-1_1.ckpt"], 0),
        (["net_rank_0-1_1.ckpt"], 1),
        (["net_rank_0-1_1.ckpt", "net_rank_0_4-1_1.safetensors", "net_rank_0_2-1_1.ckpt"], 5),
        ([f".net_rank_0_9-1_1.ckpt.{RUN}.mindresume-tmp"], 0),
    ],
)
def test_a_free_suffix_is_larger_than_all_in_use(names, expected):
    assert free_suffix(names, "net", 0) == expected


def test_small_helpers():
    assert stem("net", 3, 0) == "net_rank_3" and stem("net", 3, 2) == "net_rank_3_2"
    assert folder_rank(folder_name(12)) == 12
    assert [
        folder_rank(name) for name in ("rank_", "rank_x", "rank_1.bak", "my_rank_1", "Rank_1")
    ] == [None] * 5


def test_roots_are_recognized(tmp_path):
    for name in ("both", "ranks", "iterations", "records", "tracker", "other"):
        (tmp_path / name).mkdir()
    save(tmp_path / "ranks", 5, world=1)
    save_iterations(tmp_path / "iterations", 5)
    (tmp_path / "records" / ".mindresume").mkdir()
    track(tmp_path / "tracker", 5)
    (tmp_path / "other" / "model.safetensors").write_bytes(b"")
    assert [
        name
        for name in sorted(os.listdir(tmp_path))
        if kind_of(STORAGE, str(tmp_path / name)) == ROOT
    ] == ["iterations", "ranks", "records", "tracker"]
    assert kind_of(STORAGE, str(folder_of(tmp_path / "iterations", 5))) == ITERATION
    assert kind_of(STORAGE, str(tmp_path / "none")) == MISSING


def test_a_single_iteration_folder(tmp_path):
    save_iterations(tmp_path, 10, 20)
    foreign(tmp_path, "mf190_20_single", (15,), tracked=False)
    for step, run in ((10, RUN), (15, None)):
        result = scan_one(STORAGE, str(folder_of(tmp_path, step)))
        assert [(c.step, c.run) for c in result.candidates] == [(step, run)] and result.root == str(
            tmp_path
        )
    assert scan_one(STORAGE, str(tmp_path / "none")).candidates == ()
