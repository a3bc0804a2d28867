"""Files in memory of a simulated host: what a death leaves, and what is lost with the host."""

import pytest

from mindresume.events import CheckpointSelected
from mindresume.fault_injection.faults import Fault
from sim.catalogue import SCENARIOS
from sim.cluster import Cluster, current_process
from sim.jobs import common_saves
from sim.machine import MappedFile, use_cluster
from sim.scenarios import Simulation
from sim.schedule import Schedule

PATH = "/dev/shm/a/file"


def test_a_file_is_overwritten_in_two_operations():
    cluster, seen = Cluster(Schedule()), []

    def work():
        disk = current_process().host.disk_of(PATH)
        disk.make_folder("/dev")
        disk.make_folder("/dev/shm")
        disk.make_folder("/dev/shm/a")
        made = MappedFile(PATH, 4)
        made.data[:] = list(b"abcd")
        made.resize(6)
        seen.append(disk.find(PATH).data)
        made.data[:] = list(b"efghij")
        assert made.data.tobytes() == b"efghij" == disk.find(PATH).data and made.size == 6
        with pytest.raises(FileExistsError):
            MappedFile(PATH, 4)

    with use_cluster(cluster):
        cluster.process(cluster.host(), "one", work)
        cluster.scheduler.run()
    assert cluster.processes[0].error is None and seen == [b"\7\7\7d\0\0"]


def killed(kind, at):
    """Runs the scenario with one fault. Returns the saves in memory of its first job, and the
    sources of the selections."""
    sim = Simulation(SCENARIOS["tier"], "safetensors", Schedule(faults=(Fault(at, kind),))).run()
    assert sim.findings() == []
    return common_saves(sim.jobs[0]), [
        event.source
        for process in sim.cluster.processes
        for _, event in process.events
        if isinstance(event, CheckpointSelected) and process.name.endswith(".0")
    ]


def test_memory_survives_the_death_of_processes_and_not_that_of_the_host():
    saves, sources = killed("kill", 350)
    assert saves and sources == ["disk", "memory"]
    saves, sources = killed("kill host", 350)
    assert saves and sources == ["disk", "disk"]
