"""The oracle reports damage with the right kind, and reports nothing for intact disks."""

import json
from functools import cache

import pytest

from mindresume.fault_injection import journal
from mindresume.fault_injection.journal import ITERATION
from sim import jobs, oracle
from sim.cluster import SHARED, Cluster
from sim.disk import Disk
from sim.jobs import History, Job, Training
from sim.machine import use_cluster
from sim.oracle import INCONSISTENT, LEFTOVER, LOST, STUCK, WRONG, check_disks
from sim.schedule import Schedule

FORMATS = ("safetensors", "ckpt", ITERATION)
ROOT = "/out/checkpoint"


def training(fmt):
    return Training(steps=6, format=fmt)


def trained(fmt):
    """Returns (disk, history) after three saves."""
    disk, history, cluster = Disk(), History(), None
    cluster = Cluster(Schedule(), {SHARED: disk})
    with use_cluster(cluster):
        Job(cluster, history, training(fmt), [cluster.host()], "past").start()
        cluster.scheduler.run()
    assert not any(process.exit for process in cluster.processes)
    disk.lose_power(lambda: True)
    return disk, history


once = cache(trained)


def findings_of(fmt, damage=lambda disk, fmt: None, restart=True):
    disk, history = once(fmt)
    disk = disk.copy()
    damage(disk, fmt)
    return check_disks({SHARED: disk}, history.copy(), training(fmt), restart)


def kinds(findings):
    return {finding.kind for finding in findings}


# ---- damage --------------------------------------------------------------------------------------


def paths(disk, *parts, step=6):
    """Returns the paths of files of ``step`` that contain all ``parts``."""
    names = (f"_{step}.", f"step-{step:010}-", f"iteration_{step:08}")
    return sorted(
        path
        for path, _ in disk.walk(ROOT)
        if any(name in path for name in names) and all(part in path for part in parts)
    )


def weights(disk, fmt, rank, step=6):
    if fmt == ITERATION:
        return paths(disk, f"sim-model-{rank:07}", step=step)[0]
    return paths(disk, f"/rank_{rank}/", step=step)[0]


def put(disk, path, data):
    disk.create(path, data)
    disk.lose_power(lambda: True)


def flip(disk, path, position=-1):
    data = bytearray(disk.find(path).data)
    data[position] ^= 4
    put(disk, path, bytes(data))


def take(disk, path):
    disk.remove(path)
    disk.lose_power(lambda: True)


def a_bit_of_weights(disk, fmt):
    flip(disk, weights(disk, fmt, 1))


def a_bit_of_a_record(disk, fmt):
    flip(disk, paths(disk, "rank_00001.json")[0], 100)


def a_bit_of_the_manifest(disk, fmt):
    flip(disk, paths(disk, "manifest.json")[0], 100)


def no_file_of_a_rank(disk, fmt):
    take(disk, weights(disk, fmt, 1))


def files_of_two_steps_swapped(disk, fmt):
    one, two = weights(disk, fmt, 0), weights(disk, fmt, 0, step=4)
    data = disk.find(one).data
    put(disk, one, disk.find(two).data)
    put(disk, two, data)


def no_manifest(disk, fmt):
    take(disk, paths(disk, "manifest.json")[0])


def no_record(disk, fmt):
    take(disk, paths(disk, "rank_00001.json")[0])


def a_bit_of_common_json(disk, fmt):
    flip(disk, paths(disk, "common.json")[0], 25)


def a_bit_of_metadata_json(disk, fmt):
    flip(disk, paths(disk, "metadata.json")[0], 25)


def a_stray_file(disk, fmt):
    put(disk, f"{ROOT}/rank_1/notes.txt", b"x")


def stale_pointer(disk, fmt):
    if fmt == ITERATION:
        put(disk, f"{ROOT}/latest_checkpointed_iteration.txt", b"4")
    else:
        path = f"{ROOT}/rank_0/meta.json"
        put(disk, path, disk.find(path).data.replace(b"_6.", b"_4.").replace(b":6", b":4"))


def all_three_damaged(disk, fmt):
    for step in (2, 4, 6):
        flip(disk, weights(disk, fmt, 1, step))


ALL, RANKS, FOLDERS = FORMATS, FORMATS[:2], FORMATS[2:]
OLDER, ANOTHER = (
    {LOST},
    {
        LOST,
        # command line and job differ on damage that only a full verification
        # finds
        INCONSISTENT,
    },
)
CASES = [
    (damage, fmt, expected)
    for damage, formats, expected in (
        (a_bit_of_weights, ALL, ANOTHER),
        (a_bit_of_a_record, ALL, ANOTHER),
        (a_bit_of_the_manifest, ALL, {WRONG}),
        (no_file_of_a_rank, ALL, OLDER),
        (files_of_two_steps_swapped, ALL, ANOTHER),
        (no_manifest, RANKS, set()),  # the records of all ranks are the commit
        (no_manifest, FOLDERS, {WRONG}),
        (no_record, ALL, OLDER),
        (a_bit_of_common_json, FOLDERS, {WRONG}),
        (a_bit_of_metadata_json, FOLDERS, {WRONG}),
        (stale_pointer, FOLDERS, OLDER),
        (all_three_damaged, ALL, {STUCK, LOST}),
    )
    for fmt in formats
]


@pytest.mark.parametrize("fmt", FORMATS)
def test_an_undamaged_disk_has_no_findings(fmt):
    assert findings_of(fmt) == [] and findings_of(fmt, restart=False) == []


@pytest.mark.parametrize(("damage", "fmt", "expected"), CASES)
def test_damage_is_reported_with_the_right_kind(damage, fmt, expected):
    selected = kinds(findings_of(fmt, damage, restart=False))
    assert selected == expected
    restarted = kinds(findings_of(fmt, damage))
    assert restarted == expected


def test_leftovers_after_the_next_run_are_reported():
    for fmt in RANKS:
        (found,) = findings_of(fmt, a_stray_file)
        assert found.kind == LEFTOVER and "notes." in found.text
        assert findings_of(fmt, a_stray_file, restart=False) == []


# ---- findings that the disk alone does not show --------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_wrong_tensors_with_correct_checksums_are_reported(fmt, monkeypatch):
    """Both ranks save the tensors of rank 0, with correct checksums."""
    right = journal.tensors
    monkeypatch.setattr(
        journal, "tensors", lambda run, step, rank, replicated=False: right(run, step, 0)
    )
    disk, history = trained(fmt)
    monkeypatch.undo()
    for restart in (False, True):
        found = check_disks({SHARED: disk.copy()}, history.copy(), training(fmt), restart)
        assert kinds(found) == {WRONG} and all("rank 1" in finding.text for finding in found)


def test_blaming_a_checkpoint_for_a_job_that_did_not_start_is_reported():
    disk, recorded = once("ckpt")
    (run,) = recorded.sizes
    disk, dead_run = disk.copy(), "0002-00000000"
    note = {"output": "/out", "deaths": [], "began": {"run": dead_run}}
    put(disk, f"{ROOT}/.mindresume/trial-step-0000000006-run-{run}", json.dumps(note).encode())
    (found,) = check_disks({SHARED: disk.copy()}, recorded.copy(), training("ckpt"), restart=False)
    assert found.kind == LOST and dead_run in found.text
    history = recorded.copy()
    history.started_runs.add(dead_run)
    assert check_disks({SHARED: disk.copy()}, history, training("ckpt"), restart=False) == []


@pytest.mark.parametrize("fmt", FORMATS)
def test_without_a_fault_the_pointers_are_those_of_the_last_save(fmt):
    disk, recorded = once(fmt)
    assert oracle.check_pointers({SHARED: disk.copy()}, recorded, training(fmt)) == []
    disk = disk.copy()
    stale_pointer(disk, fmt)
    (found,) = oracle.check_pointers({SHARED: disk}, recorded, training(fmt))
    assert found.kind == LOST
    # of a run that may not have come so far
    assert oracle.check_pointers({SHARED: disk}, History(), training(fmt)) == []


def test_different_answers_of_command_line_and_job_are_reported(monkeypatch):
    real = oracle.list_checkpoints
    monkeypatch.setattr(oracle, "list_checkpoints", lambda *values: (None, real(*values)[1][1:]))
    assert kinds(findings_of("ckpt")) == {INCONSISTENT}


def test_a_job_that_does_not_start_is_stuck(monkeypatch):
    def fails(*_, **__):
        raise ValueError("does not start")

    monkeypatch.setattr(jobs.CheckpointSelector, "select", fails)
    (found,) = findings_of("ckpt")
    assert found.kind == STUCK and "does not start" in found.text


def test_a_job_that_waits_forever_is_stuck(monkeypatch):
    monkeypatch.setattr(
        jobs, "_train", lambda *_: jobs.current_cluster().scheduler.block(None, "for nothing")
    )
    (found,) = findings_of("ckpt")
    assert found.kind == STUCK and "OperationLimit" in found.text  # its heartbeat never ends
