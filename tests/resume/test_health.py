"""The results of mindformers' health monitor decide which checkpoints can be selected."""

import errno
import json

import pytest
from rank_folders import RUN, STORAGE, flip_bit, name_of, path_of, save, write_foreign

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import NoUsableCheckpointError
from mindresume.resume.eligible import LIST, SelectionPolicy, unhealthy_files
from mindresume.resume.selection import select_checkpoint
from mindresume.storage.posix import PosixStorage


def listed(folder, *rows):
    """Writes the list as mindformers' CheckpointMonitor does."""
    text = json.dumps([{"is_health": health, "ckpt_name": str(name)} for name, health in rows])
    (folder / LIST).write_text(text, encoding="utf-8")


def choose(root, unhealthy, named=None):
    return select_checkpoint(
        STORAGE,
        str(root),
        SingleProcess(),
        SelectionPolicy(4, named, every_rank=True, unhealthy=unhealthy),
    )


@pytest.mark.parametrize("write", [save, write_foreign])
def test_the_newest_healthy_checkpoint_is_selected(tmp_path, write):
    for step in (5, 10, 15):
        write(tmp_path, step)
    listed(tmp_path, (name_of(0, 5), 0), (name_of(0, 10), 0), (name_of(0, 15), 1))
    names, trouble = unhealthy_files(STORAGE, str(tmp_path))
    assert (names, trouble) == ({str(name_of(0, 15))}, "")
    choice = choose(tmp_path, names)
    assert choice.chosen.step == 10 and "unhealthy when it was saved" in choice.refused[0].reason
    assert choose(tmp_path, None).chosen.step == 15
    # the user requests it explicitly
    assert choose(tmp_path, names, str(name_of(0, 15))).chosen.step == 15


def test_a_checkpoint_that_is_not_listed_counts_as_healthy(tmp_path):
    save(tmp_path, 5)
    listed(tmp_path, (name_of(0, 3), 1))
    assert choose(tmp_path, unhealthy_files(STORAGE, str(tmp_path))[0]).chosen.step == 5


def test_the_last_entry_of_a_name_counts(tmp_path):
    listed(
        tmp_path, (name_of(0, 5), 1), (name_of(0, 10), 0), (name_of(0, 5), 0), (name_of(0, 10), 1)
    )
    assert unhealthy_files(STORAGE, str(tmp_path))[0] == {str(name_of(0, 10))}


def test_no_healthy_checkpoint_is_the_documented_error_with_a_way_out(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 10)
    flip_bit(path_of(tmp_path, 5, 1))
    with pytest.raises(NoUsableCheckpointError) as caught:
        choose(tmp_path, {str(name_of(0, 10))})
    assert str(caught.value).startswith(
        "The training has no healthy checkpoints yet, please start training again. "
    )
    assert "step 10" in str(caught.value) and "step 5" in str(caught.value)


def test_damage_alone_is_not_called_bad_health(tmp_path):
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 1))
    with pytest.raises(NoUsableCheckpointError) as caught:
        choose(tmp_path, set())
    assert "healthy" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]"])
def test_an_empty_list_is_ignored(tmp_path, content):
    (tmp_path / LIST).write_text(content, encoding="utf-8")
    assert unhealthy_files(STORAGE, str(tmp_path)) == (frozenset(), "")


@pytest.mark.parametrize(
    "content",
    [
        "[{",
        '{"is_health": 1}',
        "[1]",
        '[{"ckpt_name": "a"}]',
        '[{"ckpt_name": 3, "is_health": 1}]',
        "[" * 100_000,
    ],
)
def test_a_damaged_list_is_reported_and_ignored(tmp_path, content):
    (tmp_path / LIST).write_text(content, encoding="utf-8")
    names, trouble = unhealthy_files(STORAGE, str(tmp_path))
    assert names == frozenset() and trouble.startswith(f"{tmp_path / LIST} cannot be used (")


def test_a_missing_list_is_no_error(tmp_path):
    assert unhealthy_files(STORAGE, str(tmp_path)) == (frozenset(), "")


def test_a_list_that_cannot_be_looked_up_is_reported_and_ignored(tmp_path):
    """Rank 0 alone reads it: an error would leave the others in the exchange that follows."""

    class Stale(PosixStorage):
        def status(self, path):
            raise OSError(errno.ESTALE, "Stale file handle", path)

    names, trouble = unhealthy_files(Stale(), str(tmp_path))
    assert (
        names == frozenset() and "cannot be used (OSError: [Errno 116] Stale file handle" in trouble
    )


def test_our_records_store_their_health(tmp_path):
    from dataclasses import replace

    from rank_folders import target_of, tensors_of

    from mindresume.model.training_state import TrainingState
    from mindresume.saving.committer import Committer
    from mindresume.saving.shard_writer import rank_shard, write_shard

    save(tmp_path, 5, world=1)
    state = replace(TrainingState(10, 10, 10, 8), health=1)
    target = target_of(tmp_path, 0, 1, RUN)
    write_shard(target, rank_shard(name_of(0, 10), state, tensors_of(0, 10)))
    Committer(target).poll(10)
    found = select_checkpoint(
        STORAGE, str(tmp_path), SingleProcess(), SelectionPolicy(1, unhealthy=())
    )
    assert found.chosen.step == 5 and "unhealthy" in found.refused[0].reason
