"""Scenarios that begin with what runs before have left: complete saves that nobody committed, a checkpoint that was damaged."""
from __future__ import annotations

from dataclasses import replace

from mindresume.formats.records import scan_records
from mindresume.saving.shard_writer import SaveTarget, write_shard
from mindresume.simulation.cluster import SHARED, Cluster
from mindresume.simulation.disk import File
from mindresume.simulation.jobs import ITERATION, Job, Training, shard_of
from mindresume.simulation.mount import Mount
from mindresume.simulation.scenarios import RUN, SCENARIOS, Play, Scenario, restarted
from mindresume.simulation.schedule import Schedule
from mindresume.simulation.standins import running, standing_in


def _uncommitted(play: Play) -> None:
    """All ranks of a run have saved two steps, and it died before rank 0 had committed any of them."""
    training, history = play.training, play.history
    lineage, cluster = next(iter(history.chosen)), Cluster(Schedule(), play.cluster.disks)
    cluster._tokens = 350_000                                   # names that are never used again
    history.sizes[RUN] = training.ranks

    def work() -> None:
        storage = Mount(cluster, running())
        for step in (4, 6):
            for rank in range(training.ranks):
                place = SaveTarget(storage, training.root, RUN, rank, training.ranks, play.format == ITERATION, (), lineage)
                write_shard(place, shard_of(place, step, play.format, 1))
            history.began.add((RUN, step))
            history.reported[RUN, step] = set(range(training.ranks))
    with standing_in(cluster):
        cluster.process(cluster.host("before"), "before", work)
        cluster.scheduler.run()
    play.cluster.disks[SHARED].lose_power(lambda: True)
    play.job(training).start()


def _damaged(play: Play) -> None:
    """A job is killed in its first step; then a file of the checkpoint that it had loaded loses its end, and the platform
    starts the job again."""
    newest = max(play.history.reported)

    def job_of(life: int) -> Job:
        if life and newest == max(play.history.chosen.items())[1] and newest in play.history.reported:
            _damage(play, newest)
        return play.job(replace(play.training, dies=not life))
    restarted(play, job_of)


def _damage(play: Play, saved: tuple[str, int]) -> None:
    """Nobody has to take it any more."""
    cluster, disk = Cluster(Schedule(), play.cluster.disks), play.cluster.disks[SHARED]
    rows: list[str] = []
    with standing_in(cluster):
        process = cluster.process(cluster.host("looker"), "looker", lambda: rows.extend(
            file.path for candidate in scan_records(Mount(cluster, running()), play.training.root)[0]
            if (candidate.run, candidate.step) == saved for file in candidate.all_files))
        cluster.scheduler.run()
    if process.error is None and rows:
        file = disk.find(f"{play.training.root}/{rows[-1]}")
        if isinstance(file, File):
            disk.fill(file, file.data[:-1], True, rows[-1])
            del play.history.reported[saved]


SCENARIOS.update({scenario.name: scenario for scenario in (
    Scenario("uncommitted", "a job starts where two saves are complete and were never committed", _uncommitted,
             Training(steps=8, keep=2)),
    Scenario("damaged", "a job dies of a checkpoint, which is damaged when it is started again", _damaged,
             Training(steps=8, keep=1), Training(steps=4)),
)})

__all__ = ["SCENARIOS"]
