"""Which checkpoints a selection accepts: by the results of mindformers' health monitor, too; and
which ranks each process verifies."""

import json
from types import SimpleNamespace

import pytest
from job_choices import stops, takes
from rank_folders import STORAGE, flip_bit, name_of, path_of, save, write_foreign
from storages import failing

from mindresume.formats import MINDFORMERS, Candidate
from mindresume.model.manifest import FileRecord
from mindresume.resume.eligible import LIST, SelectionPolicy, unhealthy_files

FIVE, TEN = str(name_of(0, 5)), str(name_of(0, 10))


@pytest.mark.parametrize("write", [save, write_foreign])
def test_the_newest_healthy_checkpoint_is_selected(tmp_path, write):
    write(tmp_path, 5)
    write(tmp_path, 10)
    takes(tmp_path, 5, (10, "unhealthy when it was saved"), world=4, unhealthy={TEN, "others"})
    takes(tmp_path, 10, world=4, unhealthy=None)
    # the user requests it explicitly
    takes(tmp_path, 10, world=4, unhealthy={TEN}, requested=TEN)


def test_no_healthy_checkpoint_is_the_documented_error_with_a_way_out(tmp_path):
    save(tmp_path, 5)
    flip_bit(path_of(tmp_path, 5, 1))
    # damage alone is not called bad health
    assert "no healthy" not in str(stops(tmp_path, unhealthy=set()))
    save(tmp_path, 10)
    error = stops(tmp_path, "step 10", "step 5", unhealthy={TEN})
    assert str(error).startswith(
        "The training has no healthy checkpoints yet, please start training again. "
    )


def rows(*rows):
    """Returns the list as mindformers' CheckpointMonitor writes it."""
    return json.dumps([{"is_health": health, "ckpt_name": name} for name, health in rows])


@pytest.mark.parametrize(
    "content, names",
    [
        (rows((FIVE, 0), (TEN, 1)), {TEN}),
        # the last entry of a name counts
        (rows((FIVE, 1), (TEN, 0), (FIVE, 0), (TEN, 1)), {TEN}),
        ("", set()),
        ("[]", set()),
        (None, set()),
    ],
)
def test_the_list_of_the_monitor(tmp_path, content, names):
    if content is not None:
        (tmp_path / LIST).write_text(content, encoding="utf-8")
    assert unhealthy_files(STORAGE, str(tmp_path)) == (names, "")


@pytest.mark.parametrize(
    "content, storage",
    [
        ("[" * 100_000, STORAGE),
        ('{"is_health": 1}', STORAGE),
        ("[1]", STORAGE),
        ('[{"ckpt_name": "a"}]', STORAGE),
        ('[{"ckpt_name": 3, "is_health": 1}]', STORAGE),
        ("[]", failing(LIST, "status")),
    ],
)
def test_a_list_that_cannot_be_used_is_reported_and_ignored(tmp_path, content, storage):
    """Rank 0 alone reads it: an error would leave the others in the exchange that follows."""
    (tmp_path / LIST).write_text(content, encoding="utf-8")
    names, trouble = unhealthy_files(storage, str(tmp_path))
    assert names == frozenset() and trouble.startswith(f"{tmp_path / LIST} cannot be used (")


@pytest.mark.parametrize(
    "rank, size, state, ranks",
    [
        (0, 1, "recorded", [0, 1, 2, 3]),
        (0, 1, None, [0, 1, 2, 3]),
        (1, 2, "recorded", [1, 3]),
        (1, 2, None, [0, 1, 3]),
        (5, 8, "recorded", []),
        (5, 8, None, [0]),
    ],
)
def test_every_rank_is_verified_by_some_process_and_the_counters_of_mindformers_by_each(
    rank, size, state, ranks
):
    group = SimpleNamespace(rank=rank, size=size)
    files = dict.fromkeys(range(4), (FileRecord("f", "safetensors"),))
    saved = Candidate(5, MINDFORMERS, "safetensors", files, 4, state)
    assert list(SelectionPolicy(every_rank=True).ranks_to_verify(group, saved)) == ranks
    assert list(SelectionPolicy().ranks_to_verify(group, saved)) == [rank]
