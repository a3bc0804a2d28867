"""st/data/make_data.py: the tokenising part without MindSpore, and one folder through to
MindDataset."""

import os

import numpy as np
import pytest

from st.data import make_data


@pytest.fixture(scope="module")
def story():
    with open(make_data.STORY, encoding="utf-8") as f:
        return f.read()


@pytest.fixture(scope="module")
def tokenizer(story):
    return make_data.train_tokenizer(story, 512)


def test_what_the_text_does_not_give_is_refused():
    assert make_data.cut(np.arange(12), 4, 8)[:, 0].tolist() == [0, 1, 2, 3]  # they overlap
    with pytest.raises(ValueError, match="12 tokens give at most 4 windows of 9"):
        make_data.cut(np.arange(12), 5, 8)
    with pytest.raises(ValueError, match="only 2 of 4 samples are distinct"):
        make_data.cut(np.tile([1, 2], 6), 4, 8)
    with pytest.raises(ValueError, match="vocabulary of .* not of 5000"):
        make_data.train_tokenizer("one small text", 5000)


def test_the_records_hold_the_windows(tmp_path, story, tokenizer):
    pytest.importorskip("mindspore", reason="the records are read with MindSpore")
    from mindspore.dataset import MindDataset

    folder = str(tmp_path / "data")
    assert make_data.make(folder, story, samples=40, seq=16)
    assert not make_data.make(folder, story, samples=40, seq=16)
    assert make_data.make(folder, story, samples=20, seq=16)
    assert not [name for name in os.listdir(folder) if name.startswith(".making")]
    windows = make_data.cut(np.array(tokenizer.encode(story).ids), 20, 16)
    mcore, legacy = (
        list(
            MindDataset(f"{folder}/{name}.mindrecord", shuffle=False).create_dict_iterator(
                output_numpy=True
            )
        )
        for name in ("mcore", "legacy")
    )
    assert (np.stack([row["input_ids"] for row in legacy]) == windows).all()
    assert (np.stack([row["input_ids"] for row in mcore]) == windows[:, :-1]).all()
    assert (np.stack([row["labels"] for row in mcore]) == windows[:, 1:]).all()
    assert all(
        (row["loss_mask"] == 1).all() and (row["position_ids"] == np.arange(16)).all()
        for row in mcore
    )
