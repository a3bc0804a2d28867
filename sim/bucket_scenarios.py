"""Scenarios with an object store, as on ModelArts: pods lose their disks, and checkpoints come back from the bucket."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindresume.model.manifest import attempt_name
from sim.bucket import BUCKET
from sim.bucket_oracle import check_bucket, manifest_url
from sim.cluster import current_cluster
from sim.disk import Disk
from sim.jobs import Job, Training
from sim.leftover_scenarios import SCENARIOS
from sim.oracle import LOST, MISREPORTED, STUCK, Finding
from sim.scenarios import FORMATS, Scenario, Simulation, restarted
from sim.schedule import KINDS, OUTAGE

URL = "obs://bucket/job/checkpoint"
SLOW = 3.0                      # seconds of an upload in the scenarios with slow uploads
LATER = (0.0, 1.5, 3.0, 4.5)    # seconds between the starts of the first and the second job
PAUSE = 20.0                    # seconds until the platform has another pod: longer than the lag of a bucket listing


def _pods(sim: Simulation) -> None:
    """A platform restarts the command after every error, on other nodes with empty disks."""
    def job_of(attempt: int) -> Job:
        first = attempt * sim.training.hosts
        if attempt:
            current_cluster().scheduler.sleep(PAUSE)
            sim.history.reported.clear()                                # the disks of the old pods are gone
            for node in range(sim.training.hosts):
                sim.cluster.disks[f"node{first + node}"] = Disk(local=True)
        return sim.job(sim.training, first)
    restarted(sim, job_of)


def _slow(sim: Simulation) -> None:
    """An upload takes longer than the time between two saves."""
    sim.cluster.disks[BUCKET].seconds = SLOW                # type: ignore[attr-defined]
    sim.job(sim.training).start()


def _two_pods(sim: Simulation) -> None:
    """Two jobs on different disks use one url. The second starts with the first, or while it saves and uploads."""
    sim.cluster.disks["node1"] = Disk(local=True)
    sim.job(sim.training, 0).start()

    def work() -> None:
        current_cluster().scheduler.sleep(LATER[sim.schedule.seed % len(LATER)])
        sim.job(sim.training, 1).start()
    sim.cluster.process(sim.cluster.host("platform"), "platform", work)


def _archived(sim: Simulation) -> None:
    """The manifest of the newest checkpoint in the bucket can never be read again."""
    newest, bucket = max(sim.history.uploaded), sim.cluster.disks[BUCKET]
    sim.history.uploaded.remove(newest)
    sim.history.protected = [newest]
    bucket.unreadable.add(manifest_url(sim.training, attempt_name(newest[1], newest[0])))         # type: ignore[attr-defined]
    _pods(sim)


def _afresh(sim: Simulation) -> None:
    """A new training is started on purpose at the url of another one. After an error it is resumed on the same disk."""
    sim.history.protected = sorted(sim.history.uploaded)
    restarted(sim, lambda attempt: sim.job(replace(sim.training, fresh=not attempt)))


# ---- invariants of a run ---------------------------------------------------------------------------------------------

def _checks(sim: Simulation) -> list[Finding]:
    """Checks jobs that no fault affected: they end well, and the last one uploads all of its saves. Where another job was killed,
    the ranks of this one learn what they need."""
    if sim.stuck:
        return []
    return [*_check_overtaken(sim), *(_check_ended(sim) if not sim.cluster.injected else ())]


def _check_ended(sim: Simulation) -> Iterator[Finding]:
    for job in sim.jobs:
        for process in job.ranks:
            if process.exit or process.error is not None:
                yield Finding(STUCK, f"{process.name} ended with {process.exit}: {type(process.error).__name__}: {process.error}")
    runs = [run for run in sim.history.ended if (run, sim.training.steps) in sim.history.uploaded]
    if not runs or max(runs) != max(sim.history.ended):
        yield Finding(LOST, f"only {runs} of the runs {sim.history.ended} have uploaded their last step")
    for job in sim.jobs:
        for process in job.ranks:
            uploader = getattr(process.own, "uploader", None)
            if uploader is not None and uploader.failed and not _stopped(job, 0):
                yield Finding(LOST, f"{process.name} gave up {uploader.failed} uploads that it had begun")


def _check_overtaken(sim: Simulation) -> Iterator[Finding]:
    """Checks, for jobs that no fault affected: if rank 0 was overtaken, every rank with pending uploads was told."""
    for job in sim.jobs:
        if not all(injected.fault.kind in ("kill", "kill host") and not injected.process.startswith(f"{job.name}.")
                   for injected in sim.cluster.injected):
            continue
        stopped = _stopped(job, 0)
        for rank in range(1, len(job.ranks)):
            uploader = getattr(job.ranks[rank].own, "uploader", None)
            if stopped and uploader is not None and uploader.uploaded < uploader._last and not _stopped(job, rank):
                yield Finding(MISREPORTED, f"{job.name}: rank 0 stopped uploading ({stopped}), and rank {rank} was not told")


def _stopped(job: Job, rank: int) -> str:
    uploader = getattr(job.ranks[rank].own, "uploader", None) if rank < len(job.ranks) else None
    return (uploader._stopped or "") if uploader is not None else ""


def _scenario(name: str, about: str, workload: object, training: Training, formats: tuple[str, ...] = FORMATS, before: int = 2
              ) -> Scenario:
    """Returns a scenario after a training of ``before`` steps that uploaded all of its saves."""
    past = replace(training, steps=before, keep=0, fresh=False, pace=training.pace if before == 2 else 10.0)
    return Scenario(name, about, workload, training, past, formats,     # type: ignore[arg-type]
                    kinds=(*KINDS, OUTAGE, OUTAGE), oracle=check_bucket, check_run=_checks)


SCENARIOS.update({scenario.name: scenario for scenario in (
    _scenario("bucket", "a job uploads to a bucket, in pods that lose their disks", _pods, Training(steps=6, keep=1, url=URL)),
    _scenario("bucket nodes", "the same on two hosts that share no disk", _pods,
              Training(hosts=2, steps=6, keep=1, node_local=True, url=URL), FORMATS[:2]),
    _scenario("bucket archived", "the manifest of the newest checkpoint in the bucket cannot be read", _archived,
              Training(steps=8, keep=1, url=URL), before=4),
    _scenario("bucket slow", "uploads are slower than saves, on two hosts that share no disk", _slow,
              Training(hosts=2, steps=14, keep=1, node_local=True, url=URL), FORMATS[:2]),
    _scenario("two pods", "two jobs on different disks use one url", _two_pods, Training(steps=6, keep=1, url=URL)),
    _scenario("bucket afresh", "a new training at the url of another one", _afresh,
              Training(steps=4, keep=1, fresh=True, url=URL)),
)})

__all__ = ["SCENARIOS", "URL"]
