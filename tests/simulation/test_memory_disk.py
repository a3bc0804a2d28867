"""Files in memory of a simulated host: what a death leaves, and what is lost with the host."""

from mindresume.events import CheckpointSelected
from mindresume.fault_injection.faults import Fault
from sim.catalogue import SCENARIOS
from sim.jobs import common_saves
from sim.scenarios import Simulation
from sim.schedule import Schedule


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
