"""Scenarios with an object store, as on ModelArts: the disks of pods vanish with them, and checkpoints come back from the url."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindresume.model.manifest import attempt_name
from mindresume.simulation.bucket import BUCKET
from mindresume.simulation.disk import Disk
from mindresume.simulation.jobs import Job, Training
from mindresume.simulation.left_scenarios import SCENARIOS
from mindresume.simulation.oracle import LOST, STUCK, TOLD, Finding
from mindresume.simulation.remote_oracle import judge_bucket, manifest_url
from mindresume.simulation.scenarios import FORMATS, Play, Scenario, restarted
from mindresume.simulation.schedule import KINDS, OUTAGE
from mindresume.simulation.standins import here

URL = "obs://bucket/job/checkpoint"
SLOW = 3.0                      # seconds of an upload, where it is slower than the saves
LATER = (0.0, 1.5, 3.0, 4.5)    # seconds after the first that a second job is started
PAUSE = 20.0                    # seconds until a platform has another pod: longer than listings of a bucket lag


def _pods(play: Play) -> None:
    """A platform starts the same command again whenever it ends with an error, on other nodes with empty disks."""
    def job_of(life: int) -> Job:
        first = life * play.training.hosts
        if life:
            here().scheduler.sleep(PAUSE)
            play.history.reported.clear()                               # their disks are gone
            for node in range(play.training.hosts):
                play.cluster.disks[f"node{first + node}"] = Disk(local=True)
        return play.job(play.training, first)
    restarted(play, job_of)


def _slow(play: Play) -> None:
    """An upload takes longer than it takes to the next save."""
    play.cluster.disks[BUCKET].seconds = SLOW               # type: ignore[attr-defined]
    play.job(play.training).start()


def _two_pods(play: Play) -> None:
    """Two jobs on different disks are given one url; the second is started with the first, or while it saves and uploads."""
    play.cluster.disks["node1"] = Disk(local=True)
    play.job(play.training, 0).start()

    def work() -> None:
        here().scheduler.sleep(LATER[play.schedule.seed % len(LATER)])
        play.job(play.training, 1).start()
    play.cluster.process(play.cluster.host("platform"), "platform", work)


def _archived(play: Play) -> None:
    """Of the newest checkpoint in the bucket the manifest cannot be read any more, and never can be."""
    newest, bucket = max(play.history.uploaded), play.cluster.disks[BUCKET]
    play.history.uploaded.remove(newest)
    play.history.protected = [newest]
    bucket.unreadable.add(manifest_url(play.training, attempt_name(newest[1], newest[0])))        # type: ignore[attr-defined]
    _pods(play)


def _afresh(play: Play) -> None:
    """A new training, on purpose, at the url of another one. If it ends with an error it is resumed on the same disk."""
    play.history.protected = sorted(play.history.uploaded)
    restarted(play, lambda life: play.job(replace(play.training, fresh=not life)))


# ---- what must hold of a run -----------------------------------------------------------------------------------------

def _checks(play: Play) -> list[Finding]:
    """Of jobs in whose way nothing was: they end well, and the last of them uploads all it has saved. Where one was killed, the
    others know what they have to know."""
    if play.stuck:
        return []
    return [*_told(play), *(_ended(play) if not play.cluster.struck else ())]


def _ended(play: Play) -> Iterator[Finding]:
    for job in play.jobs:
        for process in job.ranks:
            if process.exit or process.error is not None:
                yield Finding(STUCK, f"{process.name} ended with {process.exit}: {type(process.error).__name__}: {process.error}")
    runs = [run for run in play.history.ended if (run, play.training.steps) in play.history.uploaded]
    if not runs or max(runs) != max(play.history.ended):
        yield Finding(LOST, f"of the runs {play.history.ended} only {runs} have uploaded their last step")
    for job in play.jobs:
        for process in job.ranks:
            uploader = getattr(process.own, "uploader", None)
            if uploader is not None and uploader.failed and not _stopped(job, 0):
                yield Finding(LOST, f"{process.name} has given up {uploader.failed} uploads that it had begun")


def _told(play: Play) -> Iterator[Finding]:
    """If rank 0 was overtaken, every rank that has something left to upload was told. Of jobs that nothing struck."""
    for job in play.jobs:
        if not all(struck.strike.kind in ("kill", "kill host") and not struck.process.startswith(f"{job.name}.")
                   for struck in play.cluster.struck):
            continue
        stopped = _stopped(job, 0)
        for rank in range(1, len(job.ranks)):
            uploader = getattr(job.ranks[rank].own, "uploader", None)
            if stopped and uploader is not None and uploader.uploaded < uploader._last and not _stopped(job, rank):
                yield Finding(TOLD, f"{job.name}: rank 0 stopped uploading ({stopped}), and rank {rank} was not told")


def _stopped(job: Job, rank: int) -> str:
    uploader = getattr(job.ranks[rank].own, "uploader", None) if rank < len(job.ranks) else None
    return (uploader._stopped or "") if uploader is not None else ""


def _scenario(name: str, about: str, attack: object, training: Training, formats: tuple[str, ...] = FORMATS, before: int = 2
              ) -> Scenario:
    """``before``: steps of the training that was there before, and uploaded all of its saves."""
    past = replace(training, steps=before, keep=0, fresh=False, pace=training.pace if before == 2 else 10.0)
    return Scenario(name, about, attack, training, past, formats,       # type: ignore[arg-type]
                    kinds=(*KINDS, OUTAGE, OUTAGE), judges=judge_bucket, checks=_checks)


SCENARIOS.update({scenario.name: scenario for scenario in (
    _scenario("bucket", "a job in pods that lose their disks, and a bucket", _pods, Training(steps=6, keep=1, url=URL)),
    _scenario("bucket nodes", "the same on two hosts that share no disk", _pods,
              Training(hosts=2, steps=6, keep=1, apart=True, url=URL), FORMATS[:2]),
    _scenario("bucket archived", "of the newest checkpoint in the bucket the manifest cannot be read", _archived,
              Training(steps=8, keep=1, url=URL), before=4),
    _scenario("bucket slow", "uploads are slower than saves, on two hosts that share no disk", _slow,
              Training(hosts=2, steps=14, keep=1, apart=True, url=URL), FORMATS[:2]),
    _scenario("two pods", "two jobs on different disks are given one url", _two_pods, Training(steps=6, keep=1, url=URL)),
    _scenario("bucket afresh", "a new training at the url of another one", _afresh,
              Training(steps=4, keep=1, fresh=True, url=URL)),
)})

__all__ = ["SCENARIOS", "URL"]
