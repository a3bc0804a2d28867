"""The selection among saves in memory and on disk. Each node has its own part of the tmpfs."""

import errno
import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
from coordination.test_storage_topology import save_part
from job_choices import ALONE
from memory_tiers import make_owned_tier
from rank_folders import (
    RUN,
    STORAGE,
    Ranks,
    dir_at,
    flip_bit,
    name_of,
    path_of,
    save,
    start_of,
    tensors_in,
    write_foreign,
    write_rank,
)

from mindresume.coordination.lease import lease_holders
from mindresume.errors import LoadError, NoUsableCheckpointError
from mindresume.events import CandidateRefused, FreshStart, Notice, ignore
from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, record_name, run_name
from mindresume.resume import memory_source
from mindresume.resume.job_selection import CheckpointSelector, SelectionRequest
from mindresume.resume.sources import CheckpointSources
from mindresume.saving.crash_loop import FailedLoad, LoadAttempt, key_of
from mindresume.saving.memory_tier.directory import NOTE, DiskNote, this_process
from mindresume.settings import MemoryTierSettings, Settings
from mindresume.storage.read_cache import ReadCache
from sim.cluster import current_process

LATER = run_name(2, "0000bbbb")


def choose(
    root,
    ranks=2,
    settings=None,
    emit=ignore,
    saved_to=None,
    path=None,
    storages=None,
    shared_groups=None,
    **request,
):
    """Returns what all ranks select, which is the same. ``storages``: of the ranks."""
    settings = settings or Settings(memory_tier=MemoryTierSettings(every_steps=2))
    request = SelectionRequest(str(path or root), output_dir="/output", **request)
    sources = CheckpointSources(saved_to={os.path.realpath(root)} if saved_to is None else saved_to)

    def work(group):
        found = CheckpointSelector(
            storages[group.rank] if storages else STORAGE,
            group,
            settings,
            ignore if group.rank else emit,
            sources,
            {} if shared_groups is None else shared_groups,
        ).select(request)
        if found.read_lock is not None:
            found.read_lock.release()
        return found

    found = Ranks(ranks).run(work) if ranks > 1 else [work(ALONE)]
    errors = [one for one in found if isinstance(one, Exception)]
    if errors:
        assert len(errors) == len(found), found
        raise errors[0]
    assert (
        len({one.choice and (one.choice.in_memory, one.choice.chosen.name) for one in found}) == 1
    )
    return found


def taken(root, **how):
    """Returns (step, whether it lies in memory); None: a fresh start."""
    choice = choose(root, **how)[0].choice
    return (choice.chosen.step, choice.in_memory) if choice is not None else None


@pytest.fixture
def both_saved(root, tier):
    """Saves step 5 on disk, and step 10 in memory. Returns the tier."""
    save(root, 5, world=2)
    save(tier, 10, world=2)
    return tier


def refused(events):
    return [event for event in events if isinstance(event, CandidateRefused)]


def notices(events):
    return " ".join(event.text for event in events if isinstance(event, Notice))


@pytest.mark.parametrize(
    "on_disk, in_memory, expected",
    [
        ((10, RUN), 10, (10, True)),
        ((5, LATER), 100, (5, False)),  # Megatron-Bridge#5090: a newer root was missed
        ((5, run_name(1, "0000cccc")), 100, (5, False)),  # another run of the same number
    ],
)
def test_the_newer_run_wins_and_memory_of_the_same_step(root, tier, on_disk, in_memory, expected):
    save(root, on_disk[0], 2, on_disk[1])
    save(tier, in_memory, world=2)
    assert taken(root) == expected


def test_memory_alone_is_enough_and_is_locked_while_it_is_read(root, tier):
    save(tier, 10, world=2)
    found = choose(root)
    assert [shard.rank for one in found for shard in one.choice.shards] == [0, 1] and not found[
        0
    ].uses_layouts
    assert found[0].choice.checkpoint_dir == str(root) and found[0].choice.root == str(tier)
    assert isinstance(found[0].load_attempt, LoadAttempt) and found[
        0
    ].load_attempt.directory.root == str(tier)
    assert lease_holders(dir_at(tier)) == []


@pytest.mark.parametrize("budget", [1 << 20, 10])
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_exactly_what_was_verified_is_loaded(root, tier, budget, fmt):
    from mindresume.mindformers.loading import read_shard

    for step in (5, 10, 15):
        save(tier, step, world=2, fmt=fmt)
    flip_bit(path_of(tier, 15, 0, fmt=fmt))
    expected = [tensors_in(path_of(tier, 10, rank, fmt=fmt)) for rank in range(2)]
    storages = [ReadCache(STORAGE, budget) for _ in range(2)]
    found = choose(root, storages=storages)
    for rank, path in enumerate(path_of(tier, 10, rank, fmt=fmt) for rank in range(2)):
        assert found[rank].choice.chosen.step == 10
        flip_bit(path, start_of(path, "embedding.weight"))
        (shard,) = found[rank].choice.shards
        read = partial(read_shard, CheckpointDir(storages[rank], str(tier)), shard)
        if budget > 10:
            arrays = read()
            assert {name: array.tobytes() for name, array in arrays.items()} == {
                name: array.tobytes()
                for name, array in expected[rank].items()
                if array.dtype.kind != "U"
            }
        # it is read again, because little is kept and an array is given away once; that it changed
        # is seen
        with pytest.raises(LoadError, match="changed after it was checked"):
            read()


def test_what_was_refused_in_memory_is_not_kept(root, both_saved):
    flip_bit(path_of(both_saved, 10, 1))
    storages = [ReadCache(STORAGE, 1 << 20) for _ in range(2)]
    found = choose(root, storages=storages)
    assert (found[0].choice.chosen.step, found[0].choice.in_memory) == (5, False)
    assert [
        storage.keeps(str(path_of(both_saved, 10, rank))) for rank, storage in enumerate(storages)
    ] == [False, False]


def test_the_path_may_be_the_output_folder(tmp_path, memory):
    root = tmp_path / "output" / "checkpoint"
    save(make_owned_tier(memory, root), 10, world=2)
    assert taken(root, path=root.parent) == (10, True)


def test_a_newer_save_of_mindformers_wins(root, both_saved):
    write_foreign(root, 8, world=2, suffix=1)
    assert taken(root) == (8, False)


def noted(root, tier, *steps):
    """Saves steps on disk, and step 12 in memory, of a training that had step 10 on disk."""
    for step in steps:
        save(root, step, world=2)
    save(tier, 12, world=2)
    DiskNote(attempt_name(10, RUN), RUN, 10).write(STORAGE, str(tier))


@pytest.mark.parametrize("has_records, has_others", [(True, True), (False, True), (True, False)])
def test_memory_does_not_bring_back_what_a_person_has_removed_to_go_back(
    root, tier, has_records, has_others
):
    noted(root, tier, 5, 10)
    assert taken(root) == (12, True)
    events = []
    for rank in range(2):
        os.remove(path_of(root, 10, rank))
        if not has_others:
            shutil.rmtree(root / f"rank_{rank}")
    if not has_records:
        shutil.rmtree(root / FOLDER / attempt_name(10, RUN))
    if has_others:
        assert taken(root, emit=events.append) == (5, False)
    else:
        with pytest.raises(NoUsableCheckpointError):
            taken(root, emit=events.append)
    assert attempt_name(10, RUN) in notices(events) and "flush" in notices(events)


def test_what_retention_removed_after_a_newer_save_was_not_removed_by_a_person(root, tier):
    save(tier, 20, world=2)
    noted(root, tier, 15)
    assert taken(root) == (20, True)
    flip_bit(path_of(root, 15, 0))
    assert taken(root) == (20, True)


def test_a_noted_checkpoint_that_cannot_be_used_is_still_there(root, tier):
    noted(root, tier, 5, 10)
    os.remove(path_of(root, 10, 0))
    assert taken(root) == (12, True)


def test_a_checkpoint_without_records_is_not_known_to_be_older_unless_the_training_has_loaded_it(
    root, tier
):
    save(tier, 12, world=2)
    write_foreign(root, 500, world=2)
    assert taken(root) == (500, False)
    chosen = choose(root)[0].choice.chosen
    DiskNote(key_of(chosen), RUN).write(STORAGE, str(tier))
    assert taken(root) == (12, True)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"key": 1, "run": 2, "step": 3}',
        b'{"key": "", "run": "x", "step": 1}',
    ],
)
def test_a_note_of_another_form_says_nothing(root, tier, content):
    save(root, 5, world=2)
    save(tier, 12, world=2)
    (tier / NOTE).write_bytes(content)
    assert taken(root) == (12, True)


def test_an_error_of_the_tier_does_not_keep_a_job_from_the_disk(root, tier, monkeypatch):
    save(root, 5, world=2)
    save(tier, 12, world=2)

    def broken(directory):
        raise OSError(errno.EIO, "is broken", directory.root)

    monkeypatch.setattr(memory_source, "scan_records", broken)
    events = []
    assert taken(root, emit=events.append) == (5, False)
    assert "is broken" in notices(events)


def test_an_incomplete_save_is_not_taken_and_the_one_before_is(root, both_saved):
    """maxtext#5260: an incomplete step was chosen."""
    write_rank(both_saved, 15, 1, 2)
    events = []
    assert taken(root, emit=events.append) == (10, True)
    assert [event.step for event in refused(events)] == [15]
    shutil.rmtree(both_saved / FOLDER)
    assert taken(root) == (5, False)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_corrupt_replica_is_refused_once_and_never_tried_again(root, both_saved, rank):
    """Megatron-LM#5281: a corrupt replica was trusted in 44 restarts."""
    save(both_saved, 12, world=2)
    flip_bit(path_of(both_saved, 12, rank))
    events = []
    assert taken(root, emit=events.append) == (10, True)
    (event,) = refused(events)
    assert event.step == 12 and f"rank {rank} is not what was written" in event.reason
    damaged = next(c for c in scan_records(dir_at(both_saved))[0] if c.step == 12)
    assert damaged.problem is not None and not os.path.exists(
        os.path.join(damaged.records_dir, record_name(rank))
    )
    flip_bit(path_of(both_saved, 10, rank))
    assert taken(root) == (5, False) and taken(root) == (5, False)


def test_a_save_of_a_living_owner_is_refused_and_left_alone(memory, root):
    tier = make_owned_tier(memory, root, processes=[this_process()])
    save(root, 5, world=1)
    save(tier, 10, world=1)
    flip_bit(path_of(tier, 10, 0))
    assert taken(root, ranks=1) == (5, False)
    assert scan_records(dir_at(tier))[0][0].problem is None


def test_memory_is_taken_if_the_newer_checkpoint_on_disk_is_damaged(root, both_saved):
    save(root, 15, world=2)
    flip_bit(path_of(root, 15, 1))
    events = []
    assert taken(root, emit=events.append) == (10, True)
    assert [event.step for event in refused(events)] == [15]
    shutil.rmtree(root / "rank_0")
    assert taken(root) == (10, True)


def test_if_neither_can_be_used_the_error_is_that_of_the_disk(root, both_saved):
    """Megatron-Bridge#4900: a silent start from step 0."""
    flip_bit(path_of(root, 5, 0))
    flip_bit(path_of(both_saved, 10, 0))
    events = []
    with pytest.raises(NoUsableCheckpointError):
        choose(root, emit=events.append)
    assert "step 10" in notices(events)


def test_a_fresh_start_without_any_checkpoint_on_disk_is_not_silent(root, tier):
    save(tier, 10, world=2)
    flip_bit(path_of(tier, 10, 0))
    events = []
    assert taken(root, emit=events.append) is None
    assert [event.step for event in refused(events)] == [10]
    assert any(isinstance(event, FreshStart) for event in events)


def test_without_the_node_the_disk_is_taken(root, both_saved):
    shutil.rmtree(both_saved)
    assert taken(root) == (5, False)


def test_a_requested_checkpoint_a_switched_off_tier_and_another_folder_do_not_ask_memory(
    root, both_saved
):
    assert taken(root, requested=str(name_of(0, 5))) == (5, False)
    assert taken(root, settings=Settings()) == (5, False)
    assert taken(root, saved_to=frozenset()) == (5, False)
    assert taken(root, resume=False) == (5, False)


def test_another_number_of_ranks_reads_regions_of_memory_on_one_node(root, both_saved):
    found = choose(root, ranks=1, any_layout=True)[0]
    assert (
        found.uses_layouts
        and found.choice.in_memory
        and [shard.rank for shard in found.choice.shards] == [0, 1]
    )
    shutil.rmtree(root)
    # its mark is gone with the directory
    assert taken(root, ranks=2, any_layout=True) is None


def test_without_layouts_another_number_of_ranks_takes_the_disk(root, tier):
    save(root, 5, world=1)
    save(tier, 10, world=2)
    assert taken(root, ranks=1) == (5, False)


def test_a_tracker_that_was_set_back_by_hand_decides(root, tier, monkeypatch):
    save(root, 5, world=2)
    save(tier, 20, world=2)
    save(root, 10, world=2)
    real = memory_source.find_candidates

    def set_back(*arguments):
        found, is_explicit = real(*arguments)
        return replace(found, candidates=tuple(reversed(found.candidates))), is_explicit

    monkeypatch.setattr(memory_source, "find_candidates", set_back)
    assert taken(root) == (10, False)


def test_a_save_after_which_jobs_die_is_taken_last(root, both_saved):
    chosen = scan_records(dir_at(both_saved))[0][0]
    for number in range(2):
        attempt = LoadAttempt(dir_at(both_saved), chosen, "/output", 0, 2)
        attempt.run = run_name(number + 2, "0000bbbb")
        attempt.begin()
        attempt._stop_capturing()
    assert taken(root) == (5, False)
    shutil.rmtree(root / FOLDER / scan_records(dir_at(root))[0][0].name)
    shutil.rmtree(root / "rank_0")
    shutil.rmtree(root / "rank_1")
    assert taken(root) == (10, True)
    assert FailedLoad(RUN).hosts == 1


# ---- several nodes -------------------------------------------------------------------------------


@pytest.fixture
def nodes(memory, root, monkeypatch):
    """Makes one disk for two nodes with ranks 0, 1 and 2, 3, with step 5 on it. Returns their
    tiers; that of a rank is found by its thread."""
    tiers = {}
    for node in ("a", "b"):
        os.mkdir(os.path.join(memory, node))
        tiers[node] = make_owned_tier(os.path.join(memory, node), root)

    def find(directory):
        tier = tiers["a" if current_process().name in ("rank0", "rank1") else "b"]
        return (str(tier), "") if tier.exists() else ("", "")

    monkeypatch.setattr(memory_source, "find_tier", find)
    save(root, 5, world=4)
    return tiers


def both(nodes, *steps):
    for step in steps:
        save_part(nodes["a"], step, (0, 1), commit=False)
        save_part(nodes["b"], step, (2, 3), commit=False)


def test_a_step_counts_only_if_every_rank_has_it(root, nodes):
    both(nodes, 10)
    save_part(nodes["a"], 12, (0, 1), commit=False)
    groups = {}
    for rank, found in enumerate(choose(root, 4, shared_groups=groups)):
        choice = found.choice
        assert (choice.chosen.step, choice.in_memory, choice.refused[0].step) == (10, True, 12)
        assert [shard.rank for shard in choice.shards] == [rank]
    assert {groups[str(tier)].leaders for tier in nodes.values()} == {(0, 0, 2, 2)}


def test_the_loss_of_one_node_falls_back_to_the_disk(root, nodes):
    both(nodes, 10)
    shutil.rmtree(nodes["b"])
    assert taken(root, ranks=4) == (5, False)


def test_damage_on_one_node_moves_all_to_the_save_before(root, nodes):
    both(nodes, 8, 10)
    flip_bit(path_of(nodes["b"], 10, 3))
    assert taken(root, ranks=4) == taken(root, ranks=4) == (8, True)


def test_regions_are_not_read_from_several_nodes(root, nodes):
    both(nodes, 10)
    assert taken(root, ranks=4, any_layout=True) == (5, False)
