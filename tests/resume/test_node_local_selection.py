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


def choose(tmp_path, **options):
    """Returns what each rank selects, which is the same; raises what all of them raise."""
    found = Ranks(4).run(
        lambda group: job_choices.choose(
            tmp_path / NODES[group.rank], group=group, sources=APART, is_own=True, **options
        )
    )
    for error in found:
        if isinstance(error, Exception):
            assert all(type(other) is type(error) for other in found)
            raise error
    return found


def taken(tmp_path, **options):
    (step,) = {
        choice.chosen.step if choice.chosen else None for choice in choose(tmp_path, **options)
    }
    return step


def fails(tmp_path, *said, error=NoUsableCheckpointError, **options):
    with pytest.raises(error) as caught:
        choose(tmp_path, **options)
    assert all(text in str(caught.value) for text in said)


def test_the_newest_step_that_both_nodes_have_is_selected(tmp_path):
    both(tmp_path, 5, 10)
    save_part(tmp_path / "a", 15, (0, 1))
    for rank, choice in enumerate(choose(tmp_path)):
        (shard,) = choice.shards
        assert (choice.chosen.step, shard.rank, shard.state.step) == (10, rank, 10)
        assert shard.details.random == {"python": f"of rank {rank}"}


def test_an_uncommitted_part_is_selected_if_its_records_list_all_local_ranks(tmp_path):
    both(tmp_path, 5)
    for step, with_local_ranks in ((10, True), (15, False)):
        save_part(tmp_path / "a", step, (0, 1), with_local_ranks=with_local_ranks)
        save_part(tmp_path / "b", step, (2, 3), with_local_ranks=with_local_ranks, commit=False)
    assert taken(tmp_path) == 10


def test_damage_on_one_node_is_refused_by_all(tmp_path):
    both(tmp_path, 5, 10)
    flip_bit(path_of(tmp_path / "b", 10, 3))
    for choice in choose(tmp_path):
        assert choice.chosen.step == 5
        assert "rank 3 is not what was written" in choice.refused[0].reason
    assert taken(tmp_path, full=False) == 10


def test_a_later_run_that_went_back_is_newer(tmp_path):
    both(tmp_path, 5, 10, 15)
    for node, ranks in PARTS.items():
        save_part(tmp_path / node, 6, ranks, run=LATER)
    assert taken(tmp_path) == 6


def test_a_folder_that_is_lost_is_read_from_its_replica_on_the_same_node_or_refused(tmp_path):
    both(tmp_path, 5)
    # that of rank 1 is on the other node
    shutil.rmtree(tmp_path / "b" / "rank_3")
    fails(tmp_path, "rank 3")


def test_empty_folders_on_all_nodes_are_a_fresh_start(tmp_path):
    assert taken(tmp_path) is None and all(choice.is_fresh_start for choice in choose(tmp_path))


def test_an_unrelated_folder_on_one_node_prevents_a_fresh_start(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "data.bin").write_bytes(b"x")
    said = "is not a checkpoint directory"
    fails(tmp_path, "rank 2: ", said, error=MissingCheckpointError)


def test_a_node_with_an_empty_disk_is_an_error_that_lists_the_steps_of_each_node(tmp_path):
    both(tmp_path, 5)
    shutil.rmtree(tmp_path / "b")
    said = ("rank 0, 1: step-0000000005-run", "rank 2, 3: ", "resume_training: False")
    fails(tmp_path, *said)


def test_nodes_in_another_order(tmp_path):
    both(tmp_path, 5)
    for old, new in (("a", "c"), ("b", "a"), ("c", "b")):
        shutil.move(tmp_path / old, tmp_path / new)
    fails(tmp_path, "this node holds files of rank 2, 3, none of rank 0")


def test_the_same_checkpoint_copied_to_both(tmp_path):
    """A user copied it from a shared disk."""
    save(tmp_path / "a", 5)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert taken(tmp_path) == 5


def test_checkpoints_of_mindformers_are_selected(tmp_path):
    for node, ranks in PARTS.items():
        write_foreign(tmp_path / node, 5, ranks=ranks)
    write_foreign(tmp_path / "a", 10, ranks=(0, 1))
    for choice in choose(tmp_path):
        assert choice.chosen.step == choice.shards[0].scalars["step_num"] == 5
        # a node sees its own two, and nothing was loaded
        assert choice.chosen.world_size == 4


def test_another_number_of_ranks(tmp_path):
    for node, ranks in {"a": (0, 1, 4, 5), "b": (2, 3, 6, 7)}.items():
        write_foreign(tmp_path / "foreign" / node, 5, ranks=ranks)
    both(tmp_path, 5, world=8)
    fails(tmp_path / "foreign", "saved by at least 6 ranks, this job has 4")
    fails(tmp_path, "saved by 8 ranks, this job has 4")


def test_named(tmp_path):
    both(tmp_path, 5, 10)
    save_part(tmp_path / "a", 15, (0, 1))
    assert taken(tmp_path, requested=str(name_of(0, 5))) == 5
    for step in (7, 15):
        said, name = "cannot be used by all ranks", str(name_of(0, step))
        fails(tmp_path, said, error=MissingCheckpointError, requested=name)


def test_the_health_list_of_rank_0_applies(tmp_path):
    both(tmp_path, 5, 10)
    assert taken(tmp_path, unhealthy={str(name_of(0, 10))}) == 5


def test_a_rank_that_fails_reaches_all(tmp_path):
    both(tmp_path, 5)
    shutil.rmtree(tmp_path / "b" / RECORDS)
    (tmp_path / "b" / RECORDS).write_text("no folder")
    fails(tmp_path, error=(CollectiveError, NoUsableCheckpointError))
