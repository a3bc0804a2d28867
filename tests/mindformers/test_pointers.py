"""How mindformers alone interprets the pointers in rank folders."""

import json
import os

import pytest
from rank_folders import name_of, save, write_rank

from mindresume.formats.rank_folders import META, folder_name, meta_json

resume_ckpt = pytest.importorskip("mindformers.tools.resume_ckpt")


def taken(root, ranks=4):
    """Returns the file of rank 2, as mindformers.tools.resume_ckpt.get_resume_checkpoint_by_meta
    finds it."""
    *_, last = resume_ckpt.get_info_from_meta(str(root), ranks, "safetensors")
    return os.path.basename(
        resume_ckpt.get_resume_ckpt_list(str(root), last, 2, ranks, "safetensors")[-1]
    )


def test_the_pointer_of_one_rank_is_enough(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    write_rank(tmp_path, 20, 0, 4)  # the others were killed
    assert [rank for rank in range(4) if (tmp_path / folder_name(rank) / META).exists()] == [0]
    assert taken(tmp_path) == str(name_of(2, 15))


def test_stale_pointers_of_former_ranks_are_removed(tmp_path):
    for step in (5, 10):
        save(tmp_path, step)
    old = tmp_path / folder_name(3) / META
    old.write_text(json.dumps(meta_json(name_of(3, 5))))
    assert taken(tmp_path) == str(name_of(2, 5))
    save(tmp_path, 15)
    assert not old.exists() and taken(tmp_path) == str(name_of(2, 15))
