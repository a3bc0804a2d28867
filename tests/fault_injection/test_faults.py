"""The fault injector: the effect of each fault, and the state after a power loss."""

import errno
import os
import random
from itertools import product

import pytest

from mindresume.fault_injection.faults import (
    LAG,
    Fault,
    FaultInjector,
    Killed,
    Scheduler,
)
from mindresume.storage.posix import PosixStorage


def injector_for(kind=None, at=1, ranks=1, seed=0, root=""):
    return FaultInjector(
        PosixStorage(),
        Scheduler(ranks, random.Random(0)),
        Fault(at, kind) if kind else None,
        random.Random(seed),
        root,
    )


def content(root):
    """Returns {path below root: bytes, None for a folder}."""
    found = {}
    for folder, folders, files in os.walk(root):
        found.update({os.path.relpath(os.path.join(folder, name), root): None for name in folders})
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                found[os.path.relpath(os.path.join(folder, name), root)] = file.read()
    return found


@pytest.fixture
def root(folder):
    """``a/f``, ``a/g``: durable."""
    os.mkdir(folder + "/a")
    for name, bytes_ in (("f", b"one"), ("g", b"two")):
        with open(f"{folder}/a/{name}", "wb") as file:
            file.write(bytes_)
    return folder


# ---- errors --------------------------------------------------------------------------------------


def attempt(call):
    try:
        return call()
    except OSError as error:
        return error.errno


@pytest.mark.parametrize(
    "operation, arguments, changes",
    [
        ("open", ["a/f"], False),
        ("sync", ["a"], False),
        ("write", ["a/h", [b"x"]], True),
        ("rename", ["a/f", "a/h"], True),
        ("remove", ["a/f"], True),
        ("make_folder", ["b"], True),
    ],
)
def test_an_operation_fails_once_and_does_nothing(root, operation, arguments, changes):
    arguments = [os.path.join(root, row) if isinstance(row, str) else row for row in arguments]
    before, storage = content(root), injector_for("ESTALE").storage_of(0)
    with pytest.raises(OSError) as caught:
        getattr(storage, operation)(*arguments)
    assert caught.value.errno == errno.ESTALE and content(root) == before
    if hasattr(done := getattr(storage, operation)(*arguments), "close"):
        done.close()
    assert (content(root) != before) == changes


@pytest.mark.parametrize("kind, code", [("ENOSPC", errno.ENOSPC), ("EDQUOT", errno.EDQUOT)])
def test_a_full_disk_stays_full_and_operations_without_new_bytes_work(root, kind, code):
    injector = injector_for(kind, at=2)
    storage, path = injector.storage_of(0), os.path.join(root, "a", "f")
    assert storage.write(path + "2", [b"x"]) == 1
    assert [attempt(lambda: storage.write(path + "3", [b"x"])) for _ in range(3)] == [code] * 3
    assert (
        attempt(lambda: storage.rename(path, path + "4"))
        == attempt(lambda: storage.make_folder(root + "/b"))
        == code
    )
    storage.remove(path)
    assert sorted(storage.list(root + "/a")) == ["f2", "g"]


# ---- deaths --------------------------------------------------------------------------------------


def dead_after(folder, kind, seed=0, ranks=4):
    """Returns the ranks that are dead after a fault of rank 1 at the second operation."""
    injector = injector_for(kind, 2, ranks, seed)
    injector.storage_of(0).list("/")
    with pytest.raises(Killed):
        injector.storage_of(1).write(folder + "/never", [b"x"])

    def dies(rank):
        try:
            injector.storage_of(rank).list("/")
        except Killed:
            return True
        return False

    return {rank for rank in range(ranks) if dies(rank)}


def test_each_kill_fault_kills_the_right_ranks(folder):
    assert dead_after(folder, "kill one") == {1}
    assert dead_after(folder, "kill all") == dead_after(folder, "late") == {0, 1, 2, 3}
    some = [dead_after(folder, "kill some", seed) for seed in range(100)]
    assert all(1 in dead for dead in some)
    assert {len(dead) for dead in some} == {1, 2, 3, 4}
    assert some == [dead_after(folder, "kill some", seed) for seed in range(100)]
    assert os.listdir(folder) == []


def test_a_torn_write_leaves_its_first_half(root):
    storage = injector_for("torn").storage_of(0)
    with pytest.raises(Killed):
        storage.write(root + "/a/h", iter([b"0123", memoryview(b"456789")]))
    assert content(root)["a/h"] == b"01234"


# ---- loss of power -------------------------------------------------------------------------------


def lost(root, steps):
    """Returns what a power loss leaves of ``steps(storage)``: nothing that can be lost."""
    injector = injector_for(root=root)
    steps(injector.storage_of(0))
    injector.lose_power(0.0)
    return content(root)


def test_unsynced_names_are_lost_and_synced_ones_survive(root):
    def steps(storage):
        storage.write(root + "/a/h", [b"three"])
        storage.sync(root + "/a")
        storage.write(root + "/a/i", [b"four"])
        storage.make_folder(root + "/b")
        storage.rename(root + "/a/g", root + "/b/g")
        storage.sync(root + "/b")  # a rename happens in both folders or in none

    left = {"a": None, "a/f": b"one", "a/h": b"three", "b": None, "b/g": b"two"}
    assert lost(root, steps) == left


def test_reordering_keeps_any_subset(folder):
    """Three unsynced changes of names: all eight outcomes appear, the same one for the same
    seed."""

    def outcome(seed):
        root = f"{folder}/{seed}-{len(os.listdir(folder))}"
        os.makedirs(root)
        for name in "xy":
            with open(f"{root}/{name}", "wb") as file:
                file.write(b"old")
        injector = injector_for("reorder", 4, seed=seed, root=root)
        storage = injector.storage_of(0)
        storage.write(root + "/z", [b"new"])
        storage.remove(root + "/x")
        storage.rename(root + "/y", root + "/w")
        with pytest.raises(Killed):
            storage.sync(root)
        found = content(root)
        assert ("y" in found) != ("w" in found), "a rename happens or it does not"
        return "z" in found, "x" in found, "w" in found

    outcomes = [outcome(seed) for seed in range(60)]
    assert set(outcomes) == set(product([False, True], repeat=3))
    assert outcomes == [outcome(seed) for seed in range(60)]


# ---- seeing late ---------------------------------------------------------------------------------


def test_names_of_others_arrive_late_and_own_ones_at_once(root):
    injector = injector_for("late", at=1000, ranks=2)
    mine, other = injector.storage_of(0), injector.storage_of(1)
    assert mine.list(root + "/a") == other.list(root + "/a") == ["f", "g"]
    other.write(root + "/a/h", [b"x"])
    assert other.list(root + "/a") == ["f", "g", "h"] and other.status(root + "/a/h") is not None
    assert mine.list(root + "/a") == ["f", "g"] and mine.status(root + "/a/h") is None
    with pytest.raises(FileNotFoundError):
        mine.open(root + "/a/h")
    injector.sleep(LAG / 2)
    assert mine.status(root + "/a/h") is None
    injector.sleep(LAG / 2)
    assert mine.status(root + "/a/h").size == 1 and mine.list(root + "/a") == ["f", "g", "h"]
