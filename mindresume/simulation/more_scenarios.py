"""Scenarios in which somebody or something stands beside a job: quotas, memory limits, copies, conversions, a bucket that decays.

What strikes only here (``schedule.QUOTA``, ``MEMORY``, ``KILL_LAUNCHER``, ``UNREADABLE``) is among the ``kinds`` of these alone.
"""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from mindresume.simulation import desk
from mindresume.simulation.cluster import SHARED
from mindresume.simulation.disk import Disk, File, Folder
from mindresume.simulation.jobs import ITERATION, History, Job, Training
from mindresume.simulation.oracle import STUCK, Finding
from mindresume.simulation.remote_decay import SCENARIOS
from mindresume.simulation.scenarios import LIVES, Play, Scenario, restarted
from mindresume.simulation.schedule import KILL_LAUNCHER, KINDS, MEMORY, QUOTA, QUOTA_OF_HOST
from mindresume.simulation.standins import here

OTHER = "/other"                # output folder of the job of which a snapshot is taken
SOON = replace(Training().settings, heartbeat=2.0)  # so that another job is known to live before it ends
LONG = 0.1                      # seconds an operation: then a save may take longer than others wait for it
MOMENTS = (1.0, 3.0, 5.0, 6.5, 7.0, 9.0)            # seconds after its start, of a job that trains for some
MEMORIES = (1 << 40, 0)         # bytes: room for every copy, and for none
COPIED = ("at once", "in order", "backwards", "in any order")


def _quotas(play: Play) -> None:
    """A platform starts the job again on the same hosts, on which a quota may still be exhausted."""
    hosts = [play.cluster.host() for _ in range(play.training.hosts)]
    restarted(play, lambda life: play.job(play.training, hosts=hosts))


def _memory(play: Play) -> None:
    """Hosts differ in the memory that is left when the job starts."""
    hosts = [play.cluster.host() for _ in range(play.training.hosts)]
    for number, host in enumerate(hosts):
        host.memory = MEMORIES[play.schedule.seed >> number & 1]
    restarted(play, lambda life: play.job(play.training, hosts=hosts))


def _relaunched(play: Play) -> None:
    """A platform starts the command again as soon as its first launcher is gone, on the same host or another one, whatever its
    ranks do; later ones, which wait for these, it lets end. (Two that wait for the same orphans start together: "twice".)"""
    hosts = [play.cluster.host()] if play.schedule.seed % 2 else None

    def work() -> None:
        for life in range(LIVES):
            job = play.job(play.training, hosts=hosts)
            launcher = job.start()
            while not launcher.dead or (life and job.ranks and not job.over):
                here().scheduler.sleep(1.0)
            if launcher.exit == 0 and not any(process.exit for process in job.ranks):
                return
    play.cluster.process(play.cluster.host("platform"), "platform", work)


def _with_converter(play: Play) -> None:
    """Beside a job that keeps one checkpoint somebody converts the newest."""
    play.job(play.training).start()
    play.cluster.process(play.cluster.host("desk"), "convert", lambda: desk.convert(play))


def _with_verifier(play: Play) -> None:
    """Beside a job that keeps one checkpoint somebody verifies all that are there."""
    play.job(play.training).start()
    play.cluster.process(play.cluster.host("desk"), "verify", lambda: desk.verify(play))


# ---- copies ----------------------------------------------------------------------------------------------------------

def _copied(play: Play) -> None:
    """The folder was copied, and the files have the times of the copy, in the order in which they were copied."""
    disk, chance = play.cluster.disks[SHARED], random.Random(play.schedule.seed)
    play.variant = chance.choice(COPIED)
    files = [file for _, file in sorted(disk.walk())]
    if play.variant == COPIED[2]:
        files.reverse()
    elif play.variant == COPIED[3]:
        chance.shuffle(files)
        play.variant += f" {play.schedule.seed}"
    for number, file in enumerate(files):
        file.mtime = disk.now + (number if play.variant != COPIED[0] else 0)
    restarted(play, lambda life: play.job(play.training))


def _snapshot(play: Play) -> None:
    """A snapshot is taken of the folder of a job that goes on, and another job goes on from the snapshot, on another host."""
    history, disk = History(), play.cluster.disks[SHARED]
    beside = replace(play.training, root=f"{OTHER}/checkpoint", output=OTHER)
    Job(play.cluster, history, beside, [play.cluster.host("elsewhere")], "other").start()

    def work() -> None:
        here().scheduler.sleep(MOMENTS[play.schedule.seed % len(MOMENTS)])
        cloned(disk, OTHER, "/out")
        told = history.copy()
        play.history.reported, play.history.failed, play.history.sizes, play.history.began = (
            told.reported, told.failed, told.sizes, told.began)
        play.job(play.training).start()
    play.cluster.process(play.cluster.host("admin"), "admin", work)


def cloned(disk: Disk, source: str, target: str) -> None:
    """What is visible in ``source`` is in ``target``, too, and durable; with the time of now."""
    stack = [(source, target)] if disk.find(source) is not None else []
    folders = []
    while stack:
        old, new = stack.pop()
        disk.make_folder(new)
        folders.append(new)
        for name, node in sorted(disk.folder(old).entries.items()):
            if isinstance(node, Folder):
                stack.append((f"{old}/{name}", f"{new}/{name}"))
            elif isinstance(node, File):
                disk.create(f"{new}/{name}", node.data)
    for folder in folders:
        disk.sync(folder)
    disk.sync("/")


# ---- what must hold of a run -----------------------------------------------------------------------------------------

def _well(play: Play) -> list[Finding]:
    """Where nothing struck, everybody ends well. A writer that a training has left behind has its limit."""
    if play.stuck or play.cluster.struck or play.schedule.tick >= LONG:
        return []
    return list(_ends(play))


def _orphans_go_on(play: Play) -> list[Finding]:
    """Ranks whose launcher alone was killed train to their end, whatever is started beside them."""
    if play.stuck or play.cluster.lag or play.schedule.tick >= LONG:
        return []
    if any(row.strike.kind != KILL_LAUNCHER for row in play.cluster.struck):
        return []
    return [Finding(STUCK, f"{process.name}, an orphan, ended with {process.exit}: {type(process.error).__name__}: "
                           f"{process.error}") for process in play.jobs[0].ranks if process.exit]


def _ends(play: Play) -> Iterator[Finding]:
    for process in play.cluster.processes:
        if (process.exit or process.error is not None) and not process.name.endswith(".writer"):
            yield Finding(STUCK, f"{process.name} ended with {process.exit}: {type(process.error).__name__}: {process.error}")


SCENARIOS.update({scenario.name: scenario for scenario in (
    Scenario("quota", "on one host, or of one rank, the quota is exhausted; the others can write", _quotas,
             Training(hosts=2, steps=8, keep=2), kinds=(*KINDS, *(QUOTA, QUOTA_OF_HOST) * 4), checks=_well),
    Scenario("memory", "hosts have no memory for a copy, at the start or for a while", _memory,
             Training(hosts=2, steps=8, keep=2), ways=("thread", "process"), kinds=(*KINDS, *(MEMORY,) * 6), checks=_well),
    Scenario("launcher", "the launcher alone is killed, and the command is started again beside its ranks", _relaunched,
             Training(steps=8, keep=2, pace=3.0, settings=SOON), kinds=(*KINDS, *(KILL_LAUNCHER,) * 20), checks=_orphans_go_on),
    Scenario("copied", "a job goes on in a copy of a folder whose files have the times of the copy", _copied,
             Training(steps=12, keep=2), Training(steps=8), checks=_well),
    Scenario("snapshot", "a job goes on from a snapshot of the folder of another one, which goes on as well", _snapshot,
             Training(steps=8, keep=2), None, checks=_well),
    Scenario("conversion", "beside a job that keeps one checkpoint the newest is converted", _with_converter,
             Training(steps=8, keep=1), formats=(ITERATION,), judges=desk.judge_conversions, checks=_well),
    Scenario("conversion of files", "the same, of a job of one rank", _with_converter, Training(ranks=1, steps=8, keep=1),
             Training(ranks=1, steps=2), judges=desk.judge_conversions, checks=_well),
    Scenario("verify", "beside a job that keeps one checkpoint all that are there are verified", _with_verifier,
             Training(steps=8, keep=1), checks=_well),
)})

__all__ = ["SCENARIOS", "cloned"]
