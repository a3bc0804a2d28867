"""Bits that rot: which files, what does not change, and what remembers it."""

import pytest

from mindresume.fault_injection.faults import Fault
from sim.bit_rot import (
    is_of_checkpoint,
    rot,
    rotted_files,
)
from sim.cluster import SHARED
from sim.oracle import check_disks
from sim.scenarios import Simulation
from sim.schedule import ROT, Schedule
from sim.search import SCENARIOS


@pytest.fixture
def trained():
    """Returns a simulation in which two ranks have saved the steps 2 and 4 of one run."""
    return Simulation(SCENARIOS["older"], "safetensors", Schedule())


def rotted(sim, wanted):
    """Lets files rot until one whose path contains ``wanted`` has. Returns its path."""
    disk = sim.cluster.disks[SHARED]
    path = next(path for path, _ in sorted(disk.walk()) if wanted in path)
    disk.find(path).rot(5, 3)
    disk.rots += 1
    return path


def test_one_bit_flips_and_no_size_and_no_time_changes(trained):
    disk = trained.cluster.disks[SHARED]
    before = {path: (file.data, file.mtime) for path, file in disk.walk()}
    for seed in range(40):
        (row,) = rot([disk], seed)
        assert is_of_checkpoint(row.path) and row.saves and row.saves[0][1] in (2, 4)
    for path, file in disk.walk():
        data, mtime = before[path]
        assert (len(file.data), file.mtime) == (len(data), mtime) and file.written in (None, data)
    changed = {path for path, file in disk.walk() if file.data != before[path][0]}
    assert changed == set(rotted_files([disk])) and len(changed) > 4
    assert rotted_files([disk.copy()]).keys() == changed


# ---- the oracle ----------------------------------------------------------------------------------


def findings(sim):
    return [finding.kind for finding in check_disks(sim.cluster.disks, sim.history, sim.training)]


def test_the_next_older_checkpoint_is_required_if_the_newest_has_rotted(trained):
    rotted(trained, "1_4.safetensors")
    assert findings(trained) == []


def test_an_intact_checkpoint_that_is_gone_is_lost_beside_a_rotted_one(trained):
    """Two are to be kept, so nothing allows to remove the older one of two."""
    rotted(trained, "1_4.safetensors")
    disk = trained.cluster.disks[SHARED]
    for path in [path for path, _ in disk.walk() if "step-0000000002" in path]:
        disk.remove(path)
    trained.training = SCENARIOS["restarts"].training
    assert trained.training.keep == 2 and "lost" in findings(trained)


def test_a_fault_lets_a_file_rot_and_affects_no_job():
    sim = Simulation(
        SCENARIOS["rot and scrub"], "safetensors", Schedule(faults=(Fault(3, ROT, 7),))
    ).run()
    assert (
        sim.cluster.rots
        and not any(job.is_affected(()) for job in sim.jobs)
        and sim.findings() == []
    )
