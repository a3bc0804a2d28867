"""Scenarios that start with the remains of earlier runs: complete saves that were never committed, a damaged checkpoint."""
from __future__ import annotations

from dataclasses import replace

from mindresume.fault_injection.tiny_checkpoints import ITERATION
from mindresume.formats.records import scan_records
from mindresume.saving.shard_writer import SaveTarget, write_shard
from sim.cluster import SHARED, Cluster, current_process
from sim.disk import File
from sim.jobs import Job, Training
from sim.machine import use_cluster
from sim.mount import Mount
from sim.saved_content import make_shard
from sim.scenarios import RUN, SCENARIOS, Scenario, Simulation, restarted
from sim.schedule import Schedule


def _uncommitted(sim: Simulation) -> None:
    """All ranks of a run have saved two steps; it died before rank 0 committed any of them."""
    training, history = sim.training, sim.history
    lineage, cluster = next(iter(history.chosen)), Cluster(Schedule(), sim.cluster.disks)
    cluster._tokens = 350_000                                   # tokens that no later process draws
    history.sizes[RUN] = training.ranks

    def work() -> None:
        storage = Mount(cluster, current_process())
        for step in (4, 6):
            for rank in range(training.ranks):
                target = SaveTarget(storage, training.root, RUN, rank, training.ranks, sim.format == ITERATION, (), lineage)
                write_shard(target, make_shard(target, step, sim.format, 1))
            history.began.add((RUN, step))
            history.reported[RUN, step] = set(range(training.ranks))
    with use_cluster(cluster):
        cluster.process(cluster.host("before"), "before", work)
        cluster.scheduler.run()
    sim.cluster.disks[SHARED].lose_power(lambda: True)
    sim.job(training).start()


def _damaged(sim: Simulation) -> None:
    """A job is killed in its first step; then a file of the checkpoint that it had loaded is truncated, and the platform restarts
    it."""
    newest = max(sim.history.reported)

    def job_of(attempt: int) -> Job:
        if attempt and newest == max(sim.history.chosen.items())[1] and newest in sim.history.reported:
            _damage(sim, newest)
        return sim.job(replace(sim.training, dies_in_first_step=not attempt))
    restarted(sim, job_of)


def _damage(sim: Simulation, saved: tuple[str, int]) -> None:
    """Truncates the last file of ``saved`` by one byte. No job has to take it any more."""
    cluster, disk = Cluster(Schedule(), sim.cluster.disks), sim.cluster.disks[SHARED]
    rows: list[str] = []
    with use_cluster(cluster):
        process = cluster.process(cluster.host("looker"), "looker", lambda: rows.extend(
            file.path for candidate in scan_records(Mount(cluster, current_process()), sim.training.root)[0]
            if (candidate.run, candidate.step) == saved for file in candidate.all_files))
        cluster.scheduler.run()
    if process.error is None and rows:
        file = disk.find(f"{sim.training.root}/{rows[-1]}")
        if isinstance(file, File):
            disk.fill(file, file.data[:-1], True, rows[-1])
            del sim.history.reported[saved]


SCENARIOS.update({scenario.name: scenario for scenario in (
    Scenario("uncommitted", "a job starts where two saves are complete and were never committed", _uncommitted,
             Training(steps=8, keep=2)),
    Scenario("damaged", "a job dies after loading a checkpoint, which is damaged before the restart", _damaged,
             Training(steps=8, keep=1), Training(steps=4)),
)})

__all__ = ["SCENARIOS"]
