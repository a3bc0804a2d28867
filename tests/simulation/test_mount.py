"""A mount: errors before and after the effect, half-written files, lagging listings."""

import errno

import pytest

from mindresume.fault_injection.faults import Fault, Killed
from sim.cluster import SHARED, Cluster, current_cluster
from sim.disk import Disk
from sim.machine import use_cluster
from sim.mount import Mount
from sim.schedule import Schedule


def disk_with_files():
    disk = Disk()
    disk.make_folder("/c")
    disk.make_folder("/empty")
    disk.create("/c/a", b"old")
    for folder in ("/", "/c"):
        disk.sync(folder)
    return disk


def run(*works, disk=None, **schedule):
    """Runs each ``work(mount)`` in a process on its own host. Returns (cluster, results or
    OSErrors)."""
    cluster, found = Cluster(Schedule(**schedule), {SHARED: disk or disk_with_files()}), {}
    cluster.trace.wanted = True
    with use_cluster(cluster):
        for number, work in enumerate(works):

            def attempt(number=number, work=work):
                try:
                    found[number] = work(Mount(cluster, cluster.processes[number]))
                except OSError as error:
                    found[number] = error

            cluster.process(cluster.host(), f"p{number}", attempt)
        cluster.scheduler.run()
    return cluster, [found.get(number) for number in range(len(works))]


def files(cluster):
    return {path: file.data for path, file in cluster.disks[SHARED].walk()}


OPERATIONS = {
    "write": lambda mount: mount.write("/c/b", [b"12", b"34"]),
    "rename": lambda mount: mount.rename("/c/a", "/c/b"),
    "remove": lambda mount: mount.remove("/c/a"),
    "make_folder": lambda mount: mount.make_folder("/c/new"),
    "sync": lambda mount: mount.sync("/c"),
    "list": lambda mount: mount.list("/c"),
    "status": lambda mount: mount.status("/c/a").size,
    "open": lambda mount: mount.open("/c/a").read(),
}


@pytest.mark.parametrize("kind", ["EIO", "ESTALE"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_error_before_the_effect_has_none(name, kind):
    cluster, (found,) = run(OPERATIONS[name], faults=(Fault(1, kind),))
    assert found.errno == getattr(errno, kind) and files(cluster) == {"/c/a": b"old"}
    assert cluster.disks[SHARED].find("/c/new") is None and [
        injected.name for injected in cluster.injected
    ] == [name]


@pytest.mark.parametrize("kind", ["kill", "kill host", "kill all", "power"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kill_before_an_operation_prevents_it(name, kind):
    cluster, found = run(OPERATIONS[name], faults=(Fault(1, kind),))
    assert (
        found == [None] and files(cluster) == {"/c/a": b"old"} and cluster.processes[0].exit == -9
    )
    assert isinstance(cluster.processes[0].main.error, Killed)


def test_content_is_durable_after_the_flush_and_not_before():
    def work(mount):
        made = mount.create("/c/b", 6)
        disk = mount.host.disk
        disk.sync("/c")
        made.write_at(2, memoryview(b"cdef"))
        left.append(after(disk))
        made.write_at(0, memoryview(b"ab"))
        made.finish()
        left.append(after(disk))
        made.abandon()  # of a finished file: nothing

    def after(disk):
        copy = disk.copy()
        copy.lose_power(lambda: True)
        return copy.find("/c/b").data

    left = []
    cluster, _ = run(work)
    assert left == [b"", b"abcdef"] and files(cluster)["/c/b"] == b"abcdef"


# ---- the view of other hosts ---------------------------------------------------------------------


def watched(seconds, change, look=lambda mount: mount.list("/c")):
    """Returns what a host sees before, right after and ``seconds`` after the ``change`` of another
    host."""

    def watcher(mount):
        results = [look(mount)]
        current_cluster().scheduler.sleep(2.0)
        results.append(look(mount))
        current_cluster().scheduler.sleep(seconds)
        results.append(look(mount))
        return results

    def changer(mount):
        current_cluster().scheduler.sleep(1.0)
        change(mount)
        return look(mount)

    return run(watcher, changer, lag=30.0)[1]


def test_a_host_caches_its_listing_until_its_own_changes():
    seen, own = watched(40.0, OPERATIONS["write"])
    assert seen == [["a"], ["a"], ["a", "b"]] and own == ["a", "b"]


def test_a_name_that_was_removed_can_still_be_listed_but_not_opened():
    def look(mount):
        return mount.list("/c"), mount.status("/c/a") is not None

    seen, own = watched(40.0, OPERATIONS["remove"], look)
    assert seen == [(["a"], True), (["a"], False), ([], False)] and own == ([], False)
