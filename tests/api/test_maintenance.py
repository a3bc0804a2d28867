"""Scrubs of a folder through the API, and saves that are brought from memory to disk."""

import json
import random
import shutil
from dataclasses import replace

import iteration_folders
import pytest
from job_choices import choose
from lease_holders import ELSEWHERE, publish_lease
from memory_tiers import ALIVE, make_owned_tier, newest_file
from rank_folders import (
    RUN,
    damage,
    flip_bit,
    folder_contents,
    path_of,
    save,
    start_of,
    tensors_in,
)
from saving.memory_tier.test_tier import Training

import mindresume
from mindresume.api.maintenance import flush
from mindresume.errors import LeaseHeldError, SaveError


def scrubbed(root, **options):
    """Returns {step: result}."""
    return {row.step: row for row in mindresume.scrub(root, **options).checkpoints}


def states(root, **options):
    return {step: row.state for step, row in scrubbed(root, **options).items()}


def without_results(root):
    return {
        path: content
        for path, content in folder_contents(root).items()
        if path.name != "scrub.json"
    }


def test_200_flipped_bits_are_found_by_file_and_tensor_and_nothing_else(tmp_path):
    draw, flips, steps = random.Random(20), {}, range(1, 61)
    for step in steps:
        save(tmp_path, step, replicas=4)
    files = [(step, rank) for step in steps for rank in range(4)]
    for step, rank in draw.sample(files, 200):
        path = path_of(tmp_path, step, rank)
        held = tensors_in(path)
        starts = {name: start_of(path, name) for name in held}
        content = bytearray(path.read_bytes())
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        flips[str(path)] = tuple(
            name for name, start in starts.items() if start <= at < start + held[name].nbytes
        )
    found = scrubbed(tmp_path)
    damaged = {problem.file: problem.tensors for row in found.values() for problem in row.damaged}
    assert set(damaged) == set(flips)
    assert [file for file, tensors in flips.items() if tensors and damaged[file] != tensors] == []
    for step, row in found.items():
        assert row.state == ("damaged" if any(row.damaged) else "intact"), step


def test_all_damaged_files_of_a_rank_are_found(tmp_path):
    iteration_folders.save(tmp_path, 5)
    for kind in ("model", "opt"):
        flip_bit(iteration_folders.weights_of(tmp_path, 5, 1, kind))
    (found,) = scrubbed(tmp_path).values()
    assert len(found.damaged) == 2 and found.state == "damaged"
    (row,) = mindresume.open(tmp_path).list()
    assert row.state == "unusable" and "1 more file" in row.problem.reason
    assert row.problem.file.startswith(str(iteration_folders.folder_of(tmp_path, 5)))


def test_incomplete_saves_and_those_of_mindformers_are_left_out(tmp_path):
    iteration_folders.save(tmp_path, 5)
    iteration_folders.write_rank(tmp_path, 10, 0)  # rank 1 is still writing
    assert states(tmp_path) == {5: "intact", 10: "skipped"}
    other = tmp_path / "other"
    iteration_folders.foreign(other)
    assert set(states(other).values()) == {"skipped"}


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_flipped_bits_are_repaired_byte_for_byte(tmp_path, fmt):
    for step in range(1, 11):
        save(tmp_path, step, fmt=fmt)
    before, draw = folder_contents(tmp_path), random.Random(3)
    for step in range(1, 11):
        path = path_of(tmp_path, step, draw.randrange(4), fmt=fmt)
        flip_bit(path, draw.randrange(path.stat().st_size))
    found = scrubbed(tmp_path, repair=True)
    assert {row.state for row in found.values()} == {"repaired"} and without_results(
        tmp_path
    ) == before
    assert all(not row.damaged and len(row.repaired) == 1 for row in found.values())
    assert (
        set(states(tmp_path).values()) == {"intact"}
        and mindresume.open(tmp_path).select().chosen.step == 10
    )


def test_lost_and_truncated_files_are_repaired(tmp_path):
    save(tmp_path, 5)
    before = folder_contents(tmp_path)
    path_of(tmp_path, 5, 0).unlink()
    path_of(tmp_path, 5, 1).write_bytes(b"")
    found = scrubbed(tmp_path, repair=True)[5]
    assert (
        found.state == "repaired"
        and len(found.repaired) == 2
        and without_results(tmp_path) == before
    )


def test_damage_in_different_tensors_of_both_copies_is_repaired(tmp_path):
    save(tmp_path, 5)
    before = folder_contents(tmp_path)
    for rank, name in ((0, "layer.bias"), (2, "embedding.weight")):
        damage(tmp_path, 5, rank, name)
    assert states(tmp_path, repair=True) == {5: "repaired"} and without_results(tmp_path) == before


def test_a_replica_with_another_content_is_never_taken(tmp_path):
    """Names and shapes are those of a copy; only the recorded checksums tell that it is none."""
    save(tmp_path, 5, replicas=4)
    damage(tmp_path, 5, 1, "layer.bias")
    content = path_of(tmp_path, 5, 1).read_bytes()
    assert (
        states(tmp_path, repair=True) == {5: "damaged"}
        and path_of(tmp_path, 5, 1).read_bytes() == content
    )


# ---- flush ---------------------------------------------------------------------------------------


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
