"""The choice where nodes share no disk. Ranks 0 and 1 are on one node, 2 and 3 on the other."""

import shutil

import job_choices
import pytest
from coordination.test_storage_topology import LATER, save_part
from rank_folders import RECORDS, Ranks, flip_bit, name_of, path_of, save, write_foreign

from mindresume.errors import CollectiveError, MissingCheckpointError, NoUsableCheckpointError

NODES = ("a", "a", "b", "b")
APART = job_choices.apart(0, 0, 2, 2)
PARTS = {"a": (0, 1), "b": (2, 3)}


def both(tmp_path, *steps, **how):
    for step in steps:
        for node, ranks in PARTS.items():
            save_part(tmp_path / node, step, ranks, **how)


def choose(tmp_path, path="", **options):
    found = Ranks(4).run(
        lambda group: job_choices.choose(
            tmp_path / NODES[group.rank] / path, group=group, sources=APART, is_own=True, **options
        )
    )
    for error in found:
        if isinstance(error, Exception):
            assert all(type(other) is type(error) for other in found)
            raise error
    return found


def step_of(choices):
    steps = {choice.chosen.step if choice.chosen else None for choice in choices}
    assert len(steps) == 1, steps
    return steps.pop()


def test_the_newest_step_that_both_nodes_have_is_selected(tmp_path):
    both(tmp_path, 5, 10)
    save_part(tmp_path / "a", 15, (0, 1))
    choices = choose(tmp_path)
    assert step_of(choices) == 10
    for rank, choice in enumerate(choices):
        assert [shard.rank for shard in choice.shards] == [rank] and choice.shards[
            0
        ].state.step == 10
        assert choice.shards[0].details.random == {"python": f"of rank {rank}"}


def test_an_uncommitted_part_is_selected_if_its_records_list_all_local_ranks(tmp_path):
    both(tmp_path, 5)
    for step, with_local_ranks in ((10, True), (15, False)):
        save_part(tmp_path / "a", step, (0, 1), with_local_ranks=with_local_ranks)
        save_part(tmp_path / "b", step, (2, 3), with_local_ranks=with_local_ranks, commit=False)
    assert step_of(choose(tmp_path)) == 10


def test_damage_on_one_node_is_refused_by_all(tmp_path):
    both(tmp_path, 5, 10)
    flip_bit(path_of(tmp_path / "b", 10, 3))
    choices = choose(tmp_path)
    assert step_of(choices) == 5
    assert all("rank 3 is not what was written" in choice.refused[0].reason for choice in choices)
    assert step_of(choose(tmp_path, full=False)) == 10


def test_a_later_run_that_went_back_is_newer(tmp_path):
    both(tmp_path, 5, 10, 15)
    for node, ranks in PARTS.items():
        save_part(tmp_path / node, 6, ranks, run=LATER)
    assert step_of(choose(tmp_path)) == 6


def test_a_folder_that_is_lost_is_read_from_its_replica_on_the_same_node_or_refused(tmp_path):
    both(tmp_path, 5)
    # that of rank 1 is on the other node
    shutil.rmtree(tmp_path / "b" / "rank_3")
    with pytest.raises(NoUsableCheckpointError, match="rank 3"):
        choose(tmp_path)


def test_empty_folders_on_all_nodes_are_a_fresh_start(tmp_path):
    choices = choose(tmp_path)
    assert step_of(choices) is None and all(choice.is_fresh_start for choice in choices)


def test_an_unrelated_folder_on_one_node_prevents_a_fresh_start(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "data.bin").write_bytes(b"x")
    with pytest.raises(MissingCheckpointError, match="rank 2: .* is not a checkpoint directory"):
        choose(tmp_path)


def test_a_node_with_an_empty_disk_is_an_error_that_lists_the_steps_of_each_node(tmp_path):
    both(tmp_path, 5)
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(NoUsableCheckpointError) as caught:
        choose(tmp_path)
    text = str(caught.value)
    assert "rank 0, 1: step-0000000005-run" in text and "rank 2, 3: " in text
    assert "resume_training: False" in text


def test_nodes_in_another_order(tmp_path):
    both(tmp_path, 5)
    shutil.move(tmp_path / "a", tmp_path / "c")
    shutil.move(tmp_path / "b", tmp_path / "a")
    shutil.move(tmp_path / "c", tmp_path / "b")
    with pytest.raises(
        NoUsableCheckpointError, match="this node holds files of rank 2, 3, none of rank 0"
    ):
        choose(tmp_path)


def test_the_same_checkpoint_copied_to_both(tmp_path):
    """A user copied it from a shared disk."""
    save(tmp_path / "a", 5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert step_of(choose(tmp_path)) == 5


def test_checkpoints_of_mindformers_are_selected(tmp_path):
    for node, ranks in PARTS.items():
        write_foreign(tmp_path / node, 5, ranks=ranks)
    write_foreign(tmp_path / "a", 10, ranks=(0, 1))
    choices = choose(tmp_path)
    assert step_of(choices) == 5 and choices[3].shards[0].scalars["step_num"] == 5
    # a node sees its own two, and nothing was loaded
    assert {choice.chosen.world_size for choice in choices} == {4}


def test_checkpoints_of_mindformers_on_more_ranks_are_refused(tmp_path):
    for node, ranks in {"a": (0, 1, 4, 5), "b": (2, 3, 6, 7)}.items():
        write_foreign(tmp_path / node, 5, ranks=ranks)
    with pytest.raises(NoUsableCheckpointError, match="saved by at least 6 ranks, this job has 4"):
        choose(tmp_path)


def test_another_number_of_ranks(tmp_path):
    for node, ranks in {"a": (0, 1), "b": (2, 3)}.items():
        save_part(tmp_path / node, 5, ranks, world=8)
    with pytest.raises(NoUsableCheckpointError, match="saved by 8 ranks, this job has 4"):
        choose(tmp_path)


def test_named(tmp_path):
    both(tmp_path, 5, 10)
    assert step_of(choose(tmp_path, requested=str(name_of(0, 5)))) == 5
    with pytest.raises(MissingCheckpointError, match="cannot be used by all ranks"):
        choose(tmp_path, requested=str(name_of(0, 7)))
    save_part(tmp_path / "a", 15, (0, 1))
    with pytest.raises(MissingCheckpointError, match="cannot be used by all ranks"):
        choose(tmp_path, requested=str(name_of(0, 15)))


def test_the_health_list_of_rank_0_applies(tmp_path):
    both(tmp_path, 5, 10)
    assert step_of(choose(tmp_path, unhealthy=frozenset({str(name_of(0, 10))}))) == 5


def test_a_rank_that_fails_reaches_all(tmp_path):
    both(tmp_path, 5)
    shutil.rmtree(tmp_path / "b" / RECORDS)
    (tmp_path / "b" / RECORDS).write_text("no folder")
    with pytest.raises((CollectiveError, NoUsableCheckpointError)):
        choose(tmp_path)
