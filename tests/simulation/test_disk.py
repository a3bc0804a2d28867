"""The in-memory disk behaves as a real one, and keeps what a power loss may leave."""

import errno
import os
import random
from contextlib import suppress

import pytest

from mindresume.storage.posix import PosixStorage
from sim.cluster import Cluster
from sim.disk import Disk
from sim.machine import use_cluster
from sim.mount import Mount
from sim.schedule import Schedule


def names(disk):
    return {path: file.data for path, file in disk.walk()}


def after_power_loss(disk, survives=lambda: False, torn=lambda data: b""):
    """Returns the files after a power loss. Does not change ``disk``."""
    copy = disk.copy()
    copy.lose_power(survives, torn)
    return names(copy)


def all_power_losses(disk):
    """Returns every set of files that a power loss can leave, by trying every answer of
    ``survives``."""
    found, pending = [], [()]
    while pending:
        answers = pending.pop()
        options = []

        def survives(answers=answers, options=options):
            options.append(answers[len(options)] if len(options) < len(answers) else False)
            return options[-1]

        result = after_power_loss(disk, survives)
        if len(answers) < len(options):
            pending += [
                (*options[:position], True) for position in range(len(answers), len(options))
            ]
        if result not in found:
            found.append(result)
    return found


# ---- visible files -------------------------------------------------------------------------------


def run_both(tmp_path, operations):
    """Returns (operation, result of each storage) until the results differ."""
    cluster, real, root = Cluster(Schedule()), PosixStorage(), str(tmp_path)
    results = []

    def attempt(storage, prefix, name, arguments):
        paths = [
            prefix + argument if isinstance(argument, str) else argument for argument in arguments
        ]
        try:
            found = getattr(storage, name)(*paths)
            if name == "open":
                with found:
                    return found.read()
            if name == "create":
                found.write_at(2, memoryview(b"cd"))
                found.write_at(0, memoryview(b"ab"))
                found.finish()
                return None
            if name == "status" and found is not None:
                return found.is_folder or found.size
        except OSError as error:
            return errno.errorcode[error.errno]
        return found

    def look(storage, prefix, folder=""):
        found = []
        for name in storage.list(prefix + folder):
            path = f"{folder}/{name}"
            status = storage.status(prefix + path)
            found.append(
                (
                    path,
                    status.is_folder,
                    None if status.is_folder else attempt(storage, prefix, "open", [path]),
                )
            )
            found += look(storage, prefix, path) if status.is_folder else []
        return found

    def work():
        mount = Mount(cluster, cluster.processes[0])
        for name, *arguments in operations:
            row = (
                name,
                arguments,
                attempt(mount, "", name, arguments),
                attempt(real, root, name, arguments),
            )
            results.append((*row, look(mount, ""), look(real, root)))
            if row[2] != row[3] or results[-1][4] != results[-1][5]:
                return

    with use_cluster(cluster):
        process = cluster.process(cluster.host(), "one", work)
        cluster.scheduler.run()
    assert process.exit == 0, process.error
    return results


def check_both(tmp_path, operations):
    for name, arguments, simulated, real, listing, real_listing in run_both(tmp_path, operations):
        assert (name, arguments, simulated, listing) == (name, arguments, real, real_listing)


@pytest.mark.parametrize("seed", range(12))
def test_the_same_operations_on_the_disk_and_on_a_real_folder_give_the_same(tmp_path, seed):
    rng = random.Random(seed)
    parts = ["a", "b", "c"]

    def path():
        return "".join(f"/{rng.choice(parts)}" for _ in range(rng.choice((1, 1, 2, 2, 3))))

    operations = []
    for _ in range(120):
        kind = rng.choice(
            (
                "write",
                "write",
                "make_folder",
                "make_folder",
                "rename",
                "rename",
                "rename",
                "remove",
                "open",
                "list",
                "status",
                "create",
            )
        )
        arguments = [path(), path()] if kind == "rename" else [path()]
        if kind == "write":
            arguments.append([rng.randbytes(rng.randrange(5)) for _ in range(rng.randrange(3))])
        if kind == "create":
            arguments.append(rng.randrange(7))
        operations.append((kind, *arguments))
    check_both(tmp_path, operations)


# ---- power loss ----------------------------------------------------------------------------------


def test_a_name_is_durable_once_its_folder_was_flushed():
    disk = Disk()
    disk.make_folder("/c")
    disk.sync("/")
    disk.create("/c/a", b"1")
    assert all_power_losses(disk) == [{}, {"/c/a": b"1"}]
    disk.sync("/c")
    assert after_power_loss(disk) == {"/c/a": b"1"} and not disk.pending()


def test_a_rename_changes_both_names_or_none():
    disk = Disk()
    for folder in ("/x", "/y"):
        disk.make_folder(folder)
    disk.create("/x/a", b"1")
    disk.create("/y/a", b"2")
    for folder in ("/", "/x", "/y"):
        disk.sync(folder)
    disk.rename("/x/a", "/y/a")
    found = all_power_losses(disk)
    assert sorted(map(len, found)) == [1, 2] and {"/y/a": b"1"} in found
    # of one of the two folders is enough: it is one change
    disk.sync("/x")
    assert after_power_loss(disk) == {"/y/a": b"1"}


def test_a_move_is_not_durable_without_the_one_before():
    """The file moved twice and one folder is flushed: it must not be in its first place too."""
    disk = Disk()
    for folder in ("/a", "/b", "/c"):
        disk.make_folder(folder)
    disk.make_folder("/c/in")
    disk.create("/c/in/f", b"1")
    for folder in ("/", "/c", "/c/in"):
        disk.sync(folder)
    disk.rename("/c/in", "/b/in")
    disk.rename("/b/in", "/a/in")
    disk.sync("/a")
    assert all_power_losses(disk) == [{"/a/in/f": b"1"}]


def test_a_folder_rename_is_undone_with_its_flushed_content():
    disk = Disk()
    disk.make_folder("/old")
    disk.sync("/")
    disk.create("/old/kept", b"1")
    disk.sync("/old")
    disk.create("/old/not", b"2")
    disk.rename("/old", "/new")
    disk.create("/new/later", b"3")
    assert after_power_loss(disk) == {"/old/kept": b"1"}
    disk.sync("/")
    assert after_power_loss(disk) == {"/new/kept": b"1"}
    disk.sync("/new")
    assert after_power_loss(disk) == {"/new/kept": b"1", "/new/not": b"2", "/new/later": b"3"}


def test_a_removal_that_was_not_flushed_is_undone():
    disk = Disk()
    disk.make_folder("/a")
    disk.create("/a/f", b"1")
    disk.sync("/")
    disk.sync("/a")
    disk.remove("/a/f")
    disk.remove("/a")
    assert after_power_loss(disk) == {"/a/f": b"1"} and names(disk) == {}
    disk.sync("/")
    assert all_power_losses(disk) == [{}]


def test_bytes_that_were_not_flushed_are_torn_also_under_a_durable_name():
    disk = Disk()
    file = disk.create("/.a", b"", whole=False)
    disk.fill(file, b"12345678", False, "/.a")
    disk.rename("/.a", "/a")
    disk.sync("/")
    assert disk.pending()
    assert after_power_loss(disk) == {"/a": b""} and after_power_loss(
        disk, torn=lambda data: data[:3]
    ) == {"/a": b"123"}
    disk.fill(file, b"12345678", True, "/a")
    assert after_power_loss(disk) == {"/a": b"12345678"} and not disk.pending()


# ---- copies and signatures -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_equal_signatures_mean_equal_possible_remains(seed):
    """Compares random short histories of two files and two folders."""
    rng, by_signature = random.Random(seed), {}
    for _ in range(120):
        disk = Disk()
        for folder in ("/a", "/b"):
            disk.make_folder(folder)
        for folder in ("/", "/a", "/b"):
            disk.sync(folder)
        for _ in range(rng.randrange(1, 6)):
            path, other = (f"/{rng.choice('ab')}/{rng.choice('xy')}" for _ in range(2))
            with suppress(OSError):
                rng.choice(
                    (
                        lambda p=path, d=disk: d.create(p, rng.choice((b"1", b"2"))),
                        lambda p=path, q=other, d=disk: d.rename(p, q),
                        lambda p=path, d=disk: d.remove(p),
                        lambda p=path, d=disk: d.sync(os.path.dirname(p)),
                    )
                )()
        possible = sorted(map(str, all_power_losses(disk)))
        assert by_signature.setdefault(disk.signature(), possible) == possible
