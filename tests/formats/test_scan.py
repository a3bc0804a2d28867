"""A folder of either format, or of both, or one iteration alone."""

import errno
import os
import re
import shutil

import iteration_folders
import pytest
import rank_folders
from rank_folders import STORAGE

import mindresume
from mindresume.errors import MissingCheckpointError
from mindresume.formats.scan import find, fresh_start_refusal, locate
from mindresume.model.manifest import FOLDER
from mindresume.storage.posix import PosixStorage


def found(root):
    return [(row.step, row.iteration_dir or "") for row in mindresume.open(root).list()]


KINDS = {
    "rank folders": lambda root: rank_folders.save(root, 5, world=2),
    "iterations": lambda root: iteration_folders.save(root, 5),
    "mindformers 1.0": lambda root: rank_folders.write_foreign(root, 5, world=2),
    "mindformers 2.0": lambda root: iteration_folders.foreign(root, "mf190_20_single", (10,)),
}


def make(root, *paths):
    """Creates files, or folders if the names end with a slash."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).mkdir(exist_ok=True) if path.endswith("/") else (root / path).write_bytes(
            b"x"
        )
    return root


def why(path):
    return fresh_start_refusal(STORAGE, str(path), False)


# ---- below ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "place",
    [
        "",
        "checkpoint",
        "output/checkpoint",
        "my_run",
        "run/output/checkpoint",
        "transformed_checkpoint/checkpoint",
        "20260101_ckpt_convert/net",
    ],
)
def test_a_checkpoint_directory_is_found_below(tmp_path, kind, place):
    KINDS[kind](tmp_path / place)
    make(tmp_path, "log/rank_0/info.log", "strategy/ckpt_strategy_rank_0.ckpt", "train.log")
    assert os.path.realpath(locate(STORAGE, str(tmp_path))) == str(tmp_path / place).rstrip("/")


class Stale(PosixStorage):
    """A disk that cannot list one folder now."""

    def __init__(self, folder):
        self.folder = str(folder)

    def list(self, path):
        if path == self.folder:
            raise OSError(errno.ESTALE, "Stale file handle", path)
        return super().list(path)


def test_a_folder_whose_records_cannot_be_listed_now_is_not_passed_over(tmp_path):
    """Beside debris of a first save, it was: the training began afresh."""
    iteration_folders.write_rank(tmp_path, 10, 0)
    rank_folders.save(tmp_path / "run1", 5, world=2)
    storage = Stale(tmp_path / "run1" / FOLDER)
    assert locate(storage, str(tmp_path)) == str(tmp_path / "run1")
    rank_folders.save(tmp_path / "run2", 5, world=2)
    with pytest.raises(MissingCheckpointError, match="several folders below do"):
        locate(storage, str(tmp_path))


def test_iteration_folders_are_found_beside_records_that_cannot_be_listed_now(tmp_path):
    iteration_folders.save(tmp_path, 5)
    (tmp_path / FOLDER).mkdir(exist_ok=True)
    storage = Stale(tmp_path / FOLDER)
    assert locate(storage, str(tmp_path)) == str(tmp_path)


def test_the_folder_in_which_the_job_saves_counts_before_others(tmp_path):
    rank_folders.save(tmp_path / "transformed_checkpoint" / "net", 50, world=2)
    rank_folders.save(tmp_path / "checkpoint", 5, world=2)
    assert locate(STORAGE, str(tmp_path)) == str(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "left",
    ["checkpoint/", "checkpoint/rank_0/.net.mindresume-tmp", "checkpoint_network/rank_0/net.ckpt"],
)
def test_an_empty_checkpoint_folder_does_not_hide_others(tmp_path, left):
    rank_folders.save(tmp_path / "transformed_checkpoint" / "net", 50, world=2)
    make(tmp_path, left)
    assert locate(STORAGE, str(tmp_path)) == str(tmp_path / "transformed_checkpoint" / "net")


def test_an_incomplete_save_does_not_hide_a_checkpoint_below(tmp_path):
    """Checkpoint 2.0 saves to ``directory``, 1.0 to a folder in it: the first save after the change
    was killed."""
    rank_folders.save(tmp_path / "checkpoint", 5, world=2)
    iteration_folders.write_rank(tmp_path, 10, 0)
    assert locate(STORAGE, str(tmp_path)) == str(tmp_path / "checkpoint")


def test_several_are_an_error_that_names_them(tmp_path):
    for name in ("a", "b"):
        rank_folders.save(tmp_path / name, 5, world=1)
    with pytest.raises(
        MissingCheckpointError, match=rf"several folders below do: {tmp_path}/a, {tmp_path}/b"
    ):
        locate(STORAGE, str(tmp_path))


@pytest.mark.parametrize("path", ["rank_0", "iteration_00000005", "none"])
def test_a_single_checkpoint_is_returned_itself(tmp_path, path):
    rank_folders.save(tmp_path, 5, world=1)
    iteration_folders.save(tmp_path, 5)
    assert locate(STORAGE, str(tmp_path / path)) == str(tmp_path / path)


def test_consolidated_weights_are_returned_themselves(tmp_path):
    make(tmp_path, "part0.safetensors")
    rank_folders.save(tmp_path / "checkpoint", 5, world=1)
    assert locate(STORAGE, str(tmp_path)) == str(tmp_path)


def test_large_and_cyclic_trees_are_searched_in_part(tmp_path):
    os.symlink(tmp_path, tmp_path / "self")
    make(tmp_path, *(f"{number:04d}/" for number in range(300)))
    rank_folders.save(tmp_path / "x", 5, world=1)
    assert find(STORAGE, str(tmp_path)) is None
    rank_folders.save(tmp_path / "0003", 5, world=1)
    assert find(STORAGE, str(tmp_path)) == str(tmp_path / "0003")


class Locked:
    """Cannot list ``folder``: a broken mount, or the folder of another user."""

    def __init__(self, folder):
        self.folder = str(folder)

    def __getattr__(self, name):
        return getattr(STORAGE, name)

    def list(self, folder):
        if folder == self.folder:
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return STORAGE.list(folder)


def test_an_unlisted_folder_prevents_only_a_fresh_start(tmp_path):
    make(tmp_path, "checkpoint/", "locked/")
    disk = Locked(tmp_path / "locked")
    assert find(disk, str(tmp_path)) is None
    assert (
        "locked cannot be listed: Permission denied, so whether there is one"
        in fresh_start_refusal(disk, str(tmp_path), False)
    )
    rank_folders.save(tmp_path / "other", 5, world=1)
    assert find(disk, str(tmp_path)) == str(tmp_path / "other")
    rank_folders.write_foreign(tmp_path / "checkpoint", 5, world=2)
    assert find(Locked(tmp_path / "checkpoint" / "rank_0"), str(tmp_path)) == str(
        tmp_path / "checkpoint"
    )
    with pytest.raises(PermissionError):
        find(Locked(tmp_path / "checkpoint"), str(tmp_path))


# ---- fresh starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("lost+found/", ".snapshot/"),
        ("rank_0/.net.0001.mindresume-tmp",),
        ("rank_0/net_rank_0-1_5.tmp", "rank_0/tmpab12cd_e"),
        ("rank_0/meta.json", "rank_0/net_rank_0-graph.meta"),
        ("rank_0/net_rank_0-1_5_breakpoint.ckpt",),
        (".mindresume/ended-0001-0000aaaa.json", "anything"),
        (".mindresume/probe-0123abcd-0",),
        ("log/rank_0/info.log", "msrun_log/worker_0.log", "strategy/ckpt_strategy_rank_0.ckpt"),
        (
            "log/rank_0/info.log",
            "tensorboard/rank_0/events.out.tfevents.1",
            "profile/rank_0/a.json",
            "debug/graphs_info/a.ir",
        ),
        (
            "checkpoint/",
            "strategy_0123abcd/ckpt_strategy_rank_0.ckpt",
            "train.log",
            "config.yaml",
            "rank_0/om/graph.ir",
        ),
        ("checkpoint/iteration_00000005/net-model-0000000-0000001.safetensors", "log/a"),
        (
            "checkpoint/rank_0/",
            "checkpoint_network/rank_0/net-network.ckpt",
            "merged_strategy/src_strategy.ckpt",
        ),
        ("checkpoint/.mindresume/claim-0001-0000aaaa.json", "data/a.bin"),
    ],
)
def test_traces_of_first_starts_allow_a_fresh_start(tmp_path, names):
    make(tmp_path, *names)
    assert why(tmp_path) == ""


@pytest.mark.parametrize(
    "names, found",
    [
        (("train.json", "src/main.py"), "found src, train.json"),
        (("rank_0/info.log",), "found rank_0/info.log"),
        (
            (
                ".mindresume/probe-0123abcd-0",
                ".mindresume/.probe-0123abcd-9.0123abcd.mindresume-tmp",
                "a.bin",
            ),
            "found a.bin",
        ),
        (("epoch_5.pt",), "found epoch_5.pt"),
        (("checkpoint/epoch_5.pt",), "found checkpoint"),
        (("rank_0/net_rank_3-1_5.ckpt",), "found rank_0/net_rank_3-1_5.ckpt"),
        (("checkpoint/", "merged/part0.safetensors"), "weights lie in .*/merged"),
        (("model.safetensors",), "holds only weights"),
        (("checkpoint/", "qwen/a.ckpt"), "weights lie in .*/qwen. To load them"),
    ],
)
def test_other_folders_do_not_allow_a_fresh_start(tmp_path, names, found):
    make(tmp_path, *names)
    assert re.search(found, why(tmp_path))


def test_a_tracker_without_folder_does_not_allow_a_fresh_start(tmp_path):
    iteration_folders.save(tmp_path, 5)
    shutil.rmtree(iteration_folders.folder_of(tmp_path, 5))
    assert "names step 5, but there is no iteration folder beside it" in why(tmp_path)
    assert fresh_start_refusal(STORAGE, str(tmp_path), True) != ""
    for content in ("0", "", "x"):
        iteration_folders.track(tmp_path, content)
        assert why(tmp_path) == ""
