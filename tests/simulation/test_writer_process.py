"""The writer process of a simulated job keeps the contract of the real one."""

import pytest

from mindresume.fault_injection.faults import Fault
from mindresume.fault_injection.journal import make_shard
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.retention import KEEP_ALL
from mindresume.saving.shard_writer import Save, SaveTarget
from sim.cluster import SHARED, Cluster, current_cluster, current_process
from sim.disk import Disk
from sim.machine import use_cluster
from sim.mount import Mount
from sim.schedule import Schedule

ROOT, RUN, TIMEOUT = "/out/checkpoint", "0001-1111aaaa", 20.0
WRITER = "rank0.writer"


def run(work, *others, ranks=1, most=20_000, **schedule):
    """Runs ``work(background, target)`` in a training of ``ranks``, with ``others`` beside it.
    Returns (cluster, result)."""
    cluster, found = Cluster(Schedule(**schedule), {SHARED: Disk()}, most), []
    cluster.trace.wanted = True

    def training():
        target = SaveTarget(Mount(cluster, current_process()), ROOT, RUN, 0, ranks, False, (), RUN)
        found.append(work(AsyncSaver(target, KEEP_ALL, "process", timeout=TIMEOUT), target))

    with use_cluster(cluster):
        host = cluster.host()
        cluster.process(host, "rank0", training)
        for number, other in enumerate(others):
            cluster.process(cluster.host(), f"other{number}", other)
        cluster.scheduler.run()
    return cluster, found[0] if found else None


def writer_of(cluster):
    return next(process for process in cluster.processes if process.name == WRITER)


def save(saver, target, step=2):
    saver.save(Save(make_shard(target, step, "ckpt", 1)))


def committed(cluster):
    return sorted(
        path for path, _ in cluster.disks[SHARED].walk(ROOT) if path.endswith("manifest.json")
    )


def operations(cluster, process=WRITER):
    return [number for number, name, _, _ in cluster.trace.rows if name == process]


def complete(saver, target):
    save(saver, target)
    outcomes = saver.wait(TIMEOUT)
    outcomes += saver.finish(TIMEOUT, 5.0)
    return [
        (outcome.step, outcome.saved) for outcome in outcomes
    ], current_process().cluster.scheduler.now


def test_the_writer_ignores_sigterm():
    undisturbed, _ = run(complete)
    for number in operations(undisturbed):
        cluster, (outcomes, _) = run(complete, faults=(Fault(number, "term"),))
        assert cluster.injected[0].process == WRITER
        assert (
            outcomes == [(2, True)]
            and len(committed(cluster)) == 1
            and writer_of(cluster).exit == 0
        )


def dies(saver, target):
    save(saver, target)
    # waits for the first; then the training has ended
    save(saver, target, 4)
    current_cluster().kill(current_process())
    current_cluster().scheduler.sleep(1.0)


@pytest.mark.parametrize("end", ["kill", "error"])
def test_a_started_save_is_finished_when_the_training_is_killed(end):
    def fails(saver, target):
        save(saver, target)
        save(saver, target, 4)
        raise ValueError

    cluster, _ = run(dies if end == "kill" else fails)
    assert cluster.processes[0].exit == (-9 if end == "kill" else 1)
    assert len(committed(cluster)) == 2 and writer_of(cluster).exit == 0
    assert cluster.scheduler.now < TIMEOUT
