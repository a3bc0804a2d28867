"""Scrubs of a folder through the API, and saves that are brought from memory to disk."""

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

    def shown():
        listing, report, found = catalog.list(), catalog.verify(), catalog.select()
        assert [row.step for row in listing] == [5] and not report.damaged
        memory = [(row.step, row.state) for row in listing.memory]
        return memory, [row.state for row in report.memory], found.chosen.info.step, found.source

    whole = [(8, "complete"), (6, "complete")]
    assert shown() == (whole, ["verified", "verified"], 8, "memory")
    assert catalog.select().to_json()["root"] == str(tier)
    flip_bit(newest_file(tier))
    before = folder_contents(tier)
    assert shown() == (whole, ["damaged", "verified"], 6, "memory")
    assert catalog.select().refused[0].step == 8 and folder_contents(tier) == before
    shutil.rmtree(tier)
    assert shown() == ([], [], 5, "disk")


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


def test_flipped_bits_are_found_by_file_and_tensor_and_nothing_else(tmp_path):
    draw, flips, steps = random.Random(20), {}, range(1, 8)
    for step in steps:
        save(tmp_path, step, replicas=4)
    for step, rank in draw.sample([(step, rank) for step in steps for rank in range(4)], 22):
        path = path_of(tmp_path, step, rank)
        held = {
            name: (start_of(path, name), len(x.tobytes())) for name, x in tensors_in(path).items()
        }
        at = draw.randrange(path.stat().st_size)
        flip_bit(path, at)
        flips[str(path)] = tuple(
            name for name, (start, size) in held.items() if start <= at < start + size
        )
    rows = scrubbed(tmp_path)
    damaged = {problem.file: problem.tensors for row in rows.values() for problem in row.damaged}
    assert damaged.keys() == flips.keys()
    # damage of a header or between tensors names none
    assert {file: tensors or damaged[file] for file, tensors in flips.items()} == damaged
    for step, row in rows.items():
        assert row.state == ("damaged" if row.damaged else "intact"), step


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_damage_is_repaired_byte_for_byte(tmp_path, fmt):
    for step in range(1, 8):
        save(tmp_path, step, fmt=fmt)
    before, draw = folder_contents(tmp_path), random.Random(3)
    for step in range(1, 5):
        path = path_of(tmp_path, step, draw.randrange(4), fmt=fmt)
        flip_bit(path, draw.randrange(path.stat().st_size))
    path_of(tmp_path, 5, 0, fmt=fmt).unlink()
    path_of(tmp_path, 6, 1, fmt=fmt).write_bytes(b"")
    for rank, name in ((0, "layer.bias"), (2, "embedding.weight")):  # in both copies
        path = path_of(tmp_path, 7, rank, fmt=fmt)
        flip_bit(path, start_of(path, name))
    found = scrubbed(tmp_path, repair=True)
    assert {row.state for row in found.values()} == {"repaired"}
    assert without_results(tmp_path) == before
    assert [len(found[step].repaired) for step in range(1, 8)] == [1] * 6 + [2]
    assert set(states(tmp_path).values()) == {"intact"}
    assert mindresume.open(tmp_path).select().chosen.step == 7
