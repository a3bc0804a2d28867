"""What memory of this node has: in the catalog, on the command line, and written to disk."""

import json
import shutil
from dataclasses import replace

import pytest
from job_choices import choose
from lease_holders import ELSEWHERE, publish_lease
from memory_tiers import ALIVE, make_owned_tier, newest_file
from rank_folders import RUN, flip_bit, folder_contents, path_of, save
from saving.memory_tier.test_tier import Training

import mindresume
from mindresume.api.memory import flush
from mindresume.errors import LeaseHeldError, SaveError


def test_the_catalog_shows_and_selects_what_memory_has(root, tier):
    save(root, 5, world=2)
    Training(tier, 2, world=2).steps(9).stop()
    catalog = mindresume.open(root)
    assert [row.step for row in catalog.list()] == [5] and [
        row.step for row in catalog.list().memory
    ] == [8, 6]
    assert all(row.usable and row.state == "complete" for row in catalog.list().memory)
    found = catalog.select()
    assert (found.chosen.info.step, found.source, found.root) == (8, "memory", str(tier))
    assert json.loads(json.dumps(found.to_json()))["source"] == "memory"
    report = catalog.verify()
    assert [row.step for row in report.checkpoints] == [5] and [
        row.state for row in report.memory
    ] == ["verified"] * 2
    flip_bit(newest_file(tier))
    assert [row.state for row in catalog.verify().memory] == [
        "damaged",
        "verified",
    ] and not catalog.verify().damaged
    before = folder_contents(tier)
    found = catalog.select()
    assert (found.chosen.info.step, found.source) == (6, "memory") and found.refused[0].step == 8
    assert folder_contents(tier) == before
    shutil.rmtree(tier)
    assert (catalog.select().chosen.info.step, catalog.select().source, catalog.list().memory) == (
        5,
        "disk",
        (),
    )


def chosen(root):
    """Returns what a job takes without the tier: the step, whether it is committed, whether its
    bytes were verified."""
    choice = choose(root)
    return choice.chosen.step, choice.chosen.committed, choice.bytes_verified


@pytest.mark.parametrize("iterations", [False, True])
def test_the_newest_save_in_memory_is_written_to_disk(root, tier, iterations):
    if not iterations:
        save(root, 5, world=2)
    Training(tier, 2, world=2, iterations=iterations).steps(9).stop()
    result = flush(root)
    assert (result.step, result.committed) == (8, True) and result.size_bytes > 1000
    assert chosen(root) == (8, True, True)
    if not iterations:
        assert path_of(root, 8, 1).exists()
    again = flush(root)
    assert again.step is None and again.up_to_date
    shutil.rmtree(tier)
    assert flush(root).step is None and not flush(root).up_to_date


def test_a_damaged_save_is_not_written_and_the_one_before_is(root, tier):
    Training(tier, 2, world=2).steps(9).stop()
    flip_bit(newest_file(tier))
    assert flush(root).step == 6 and chosen(root)[0] == 6


def test_a_newer_run_on_disk_is_left_alone(root, tier):
    Training(tier, 2, world=1).steps(9).stop()
    save(root, 5, world=1, run="0002-0000bbbb")
    assert flush(root).up_to_date and chosen(root)[0] == 5


def test_an_interrupted_write_is_continued_and_other_files_are_not_overwritten(root, tier):
    Training(tier, 2, world=2).steps(9).stop()
    save(root, 5, world=2)
    copied = path_of(root, 8, 0)
    shutil.copy(tier / "rank_0" / f"{RUN}.{copied.name}", copied)
    path_of(root, 8, 1).write_bytes(b"something else")
    with pytest.raises(SaveError, match="never overwritten"):
        flush(root)
    path_of(root, 8, 1).unlink()
    assert flush(root).committed and chosen(root)[0] == 8


def test_a_running_job_saves_by_itself(memory, root):
    tier = make_owned_tier(memory, root, processes=ALIVE)
    Training(tier, 2).steps(9).stop()
    with pytest.raises(LeaseHeldError):
        flush(root)


def test_a_killed_job_whose_lease_is_of_another_node_is_over(root, tier):
    """The lease of a job of several nodes is that of its first node, and SIGKILL leaves it."""
    save(root, 5, world=2)
    Training(tier, 2, world=2).steps(9).stop()
    publish_lease(root, replace(ELSEWHERE, every=0.001))
    assert flush(root).committed and chosen(root)[0] == 8


def save_part(tier, ranks, steps):
    """Makes the tier of a node that has two of four ranks."""
    job = Training(tier, 2, world=2)
    for each, rank in zip(job.tiers, ranks, strict=True):
        each.slots.target = replace(each.slots.target, rank=rank, world_size=4, local_ranks=ranks)
    job.steps(steps).stop()


@pytest.mark.parametrize("first", ["longer", "shorter"])
def test_nodes_that_died_at_different_moments_write_the_save_that_both_have(
    root, tier, tmp_path, first
):
    nodes = {name: tmp_path / name for name in ("longer", "shorter")}
    for folder in nodes.values():
        shutil.copytree(tier, folder)
    save_part(nodes["longer"], (0, 1), 9)  # 8 and 6
    save_part(nodes["shorter"], (2, 3), 7)  # 6 and 4
    found = []
    for name in sorted(nodes, key=lambda name: name != first):
        shutil.rmtree(tier)
        shutil.copytree(nodes[name], tier)
        found.append(flush(root))
    assert not found[0].committed and (found[1].step, found[1].committed) == (6, True)
