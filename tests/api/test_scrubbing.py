"""The scrub: every flipped bit is found and no other, and repairs are byte for byte."""

import random

import iteration_folders
import pytest
from rank_folders import (
    damage,
    flip_bit,
    folder_contents,
    path_of,
    records_of,
    save,
    start_of,
    tensors_in,
)

import mindresume


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


def test_a_damaged_record_is_found(tmp_path):
    save(tmp_path, 5)
    path = records_of(tmp_path, 5) / "rank_00002.json"
    flip_bit(path)
    (found,) = scrubbed(tmp_path).values()
    assert [(row.rank, row.file) for row in found.damaged] == [(2, str(path))]
    (row,) = mindresume.open(tmp_path).list()
    assert row.problem.rank == 2


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


def test_what_has_no_copy_is_refused_and_stays(tmp_path):
    save(tmp_path, 5)
    for rank in (0, 2):
        damage(tmp_path, 5, rank, "layer.bias")  # of both replicas
    before = folder_contents(tmp_path)
    found = scrubbed(tmp_path, repair=True)[5]
    assert (
        found.state == "damaged"
        and [row.rank for row in found.damaged] == [0, 2]
        and found.repaired == ()
    )
    assert without_results(tmp_path) == before and any(
        "no other rank" in note for note in found.notes
    )
    assert mindresume.open(tmp_path).list().checkpoints[0].state == "unusable"


def test_a_replica_with_another_content_is_never_taken(tmp_path):
    """Names and shapes are those of a copy; only the recorded checksums tell that it is none."""
    save(tmp_path, 5, replicas=4)
    damage(tmp_path, 5, 1, "layer.bias")
    content = path_of(tmp_path, 5, 1).read_bytes()
    assert (
        states(tmp_path, repair=True) == {5: "damaged"}
        and path_of(tmp_path, 5, 1).read_bytes() == content
    )


def test_retention_does_not_count_on_a_damaged_checkpoint(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    flip_bit(path_of(tmp_path, 15, 0))
    scrubbed(tmp_path)
    made = mindresume.prune(tmp_path, policy=mindresume.KeepLast(1), dry_run=True)
    assert {row.step for row in made.kept} == {15, 10} and [row.step for row in made.removed] == [5]
