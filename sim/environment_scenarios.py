"""Scenarios with a difficult environment: quotas, memory limits, copied folders, and commands that run beside a job.

The faults ``schedule.QUOTA``, ``MEMORY``, ``KILL_LAUNCHER`` and ``UNREADABLE`` are among the ``kinds`` of these scenarios only.
"""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mindresume.coordination.preemption import BY_UNKNOWN
from mindresume.events import PreemptionRequested
from mindresume.fault_injection.tiny_checkpoints import ITERATION
from mindresume.supervisor.restart_policy import DIED, EXITED, RESTART, TERMINATED, JobEnd, RestartPolicy, StartOutcome, decide
from sim import concurrent_commands
from sim.bucket_fault_scenarios import SCENARIOS
from sim.cluster import SHARED, Host, current_cluster
from sim.disk import Disk, File, Folder
from sim.jobs import History, Job, Training, newest_acknowledged
from sim.oracle import STUCK, WRONG, Finding
from sim.scenarios import ATTEMPTS, TIER, Scenario, Simulation, restarted
from sim.schedule import KILL_LAUNCHER, KINDS, MEMORY, OWN_SIGNAL, PASSING, QUOTA, QUOTA_OF_HOST

OTHER = "/other"                # output folder of the job whose folder is copied
SOON = replace(Training().settings, heartbeat=2.0)  # a second job must see the first one's heartbeat before it ends
LONG = 0.1                      # seconds of an operation from which a save may exceed the timeouts of others
HANGING = 3000.0                # seconds after which a job hangs
LATE = 3.0                      # seconds between a copy and the start of a job in it
OUTLIVING = 80                  # steps of a job that still runs when another has waited for three of its heartbeats
MOMENTS = (1.0, 3.0, 5.0, 6.5, 7.0, 9.0)            # moments of the snapshot, in seconds after the start of the first job
MEMORIES = (1 << 40, 0)         # memory limits in bytes: enough for every copy, and for none
_READING = (*KINDS, *PASSING * 6)                   # faults of scenarios in which somebody reads checkpoints
COPIED = ("at once", "in order", "backwards", "in any order")


def _quotas(sim: Simulation) -> None:
    """A platform restarts the job on the same hosts, where a quota may still be exhausted."""
    hosts = [sim.cluster.host() for _ in range(sim.training.hosts)]
    restarted(sim, lambda attempt: sim.job(sim.training, hosts=hosts))


def _memory(sim: Simulation) -> None:
    """Hosts differ in the memory that is free when the job starts."""
    hosts = [sim.cluster.host() for _ in range(sim.training.hosts)]
    for number, host in enumerate(hosts):
        host.memory = MEMORIES[sim.schedule.seed >> number & 1]
    restarted(sim, lambda attempt: sim.job(sim.training, hosts=hosts))


def _relaunched(sim: Simulation, hosts: list[Host] | None = None) -> None:
    """A platform starts the command again as soon as its first launcher has ended, on the same or another host, while its ranks
    may still run. Later attempts wait for those ranks, so the platform lets them end. (Two attempts that wait for the same
    orphans and start together are scenario "twice".)"""
    hosts = hosts or ([sim.cluster.host()] if sim.schedule.seed % 2 else None)

    def work() -> None:
        for attempt in range(ATTEMPTS):
            job = sim.job(sim.training, hosts=hosts)
            launcher = job.start()
            while not launcher.dead or (attempt and job.ranks and not job.over):
                current_cluster().scheduler.sleep(1.0)
            if launcher.exit == 0 and not any(process.exit for process in job.ranks):
                return
    sim.cluster.process(sim.cluster.host("platform"), "platform", work)


def _hidden(sim: Simulation) -> None:
    """The same where /proc does not show the processes of others (hidepid), or cannot be read: only heartbeats tell."""
    host = sim.cluster.host()
    host.hides_processes = True
    _relaunched(sim, [host])


def _supervised(sim: Simulation) -> None:
    """A platform that decides as the supervisor does starts the job again. It ends a job that hangs."""
    cluster = sim.cluster

    def work() -> None:
        starts: list[StartOutcome] = []
        while len(starts) <= ATTEMPTS:
            job, until = sim.job(sim.training), cluster.scheduler.now + HANGING
            job.start()
            while (not job.launcher.dead or job.ranks and not job.over) and cluster.scheduler.now < until:
                cluster.scheduler.sleep(1.0)
            for process in (*job.ranks, job.launcher):
                cluster.kill(process)
            kind = EXITED if job.ranks and not any(process.exit for process in job.ranks) else DIED
            asked = kind == EXITED and _was_asked(job)
            starts.append(StartOutcome(len(starts) + 1, 0.0, 0.0, JobEnd(kind, 1 if kind == DIED else TERMINATED * asked, "",
                                                                         noticed=0.0), is_preempted=asked))
            if decide(RestartPolicy(), starts).action != RESTART:
                return
    cluster.process(cluster.host("platform"), "platform", work)


def _was_asked(job: Job) -> bool:
    """Returns whether the ranks have agreed to stop because somebody else has asked them."""
    return any(isinstance(event, PreemptionRequested) and event.reason != BY_UNKNOWN
               for process in job.ranks for _, event in process.events)


def _with_converter(sim: Simulation) -> None:
    """A user converts the newest checkpoint beside a job that keeps one."""
    sim.job(sim.training).start()
    sim.cluster.process(sim.cluster.host("user"), "convert", lambda: concurrent_commands.convert(sim))


def _with_verifier(sim: Simulation) -> None:
    """A user verifies all checkpoints beside a job that keeps one."""
    sim.job(sim.training).start()
    sim.cluster.process(sim.cluster.host("user"), "verify", lambda: concurrent_commands.verify(sim))


def _with_scrub(sim: Simulation) -> None:
    """A user scrubs and repairs all checkpoints beside a job that keeps one."""
    sim.job(sim.training).start()
    sim.cluster.process(sim.cluster.host("user"), "scrub", lambda: concurrent_commands.scrub(sim))


# ---- copies ----------------------------------------------------------------------------------------------------------

def _copied(sim: Simulation) -> None:
    """The folder is a copy: modification times are those of the copy, in the order in which files were copied."""
    disk, rng = sim.cluster.disks[SHARED], random.Random(sim.schedule.seed)
    sim.variant = rng.choice(COPIED)
    files = [file for _, file in sorted(disk.walk())]
    if sim.variant == COPIED[2]:
        files.reverse()
    elif sim.variant == COPIED[3]:
        rng.shuffle(files)
        sim.variant += f" {sim.schedule.seed}"
    for number, file in enumerate(files):
        file.mtime = disk.now + (number if sim.variant != COPIED[0] else 0)
    restarted(sim, lambda attempt: sim.job(sim.training))


def _snapshot(sim: Simulation, same_host: bool = False, is_restarted: bool = False) -> None:
    """A snapshot is taken of the folder of a running job, and another job resumes from it on another host, or on its host.
    ``is_restarted``: a platform restarts the latter."""
    history, disk = History(), sim.cluster.disks[SHARED]
    beside = replace(sim.training, root=f"{OTHER}/checkpoint", output=OTHER, steps=(
        2 * OUTLIVING if is_restarted else OUTLIVING if same_host else sim.training.steps))
    host = sim.cluster.host("elsewhere")
    Job(sim.cluster, history, beside, [host], "other").start()

    def work() -> None:
        current_cluster().scheduler.sleep(MOMENTS[sim.schedule.seed % len(MOMENTS)])
        clone_folder(disk, OTHER, "/out")
        snapshot = history.copy()
        sim.history.reported, sim.history.failed, sim.history.sizes, sim.history.began = (
            snapshot.reported, snapshot.failed, snapshot.sizes, snapshot.began)
        if is_restarted:
            current_cluster().scheduler.sleep(LATE)     # the other job has made newer saves
            restarted(sim, lambda attempt: sim.job(sim.training, hosts=[host]))
        else:
            sim.job(sim.training, hosts=[host] if same_host else None).start()
    sim.cluster.process(sim.cluster.host("admin"), "admin", work)


def clone_folder(disk: Disk, source: str, target: str) -> None:
    """Copies what is visible in ``source`` to ``target``, durably, with the current time as modification time."""
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


# ---- invariants of a run ---------------------------------------------------------------------------------------------

def _check_success(sim: Simulation) -> list[Finding]:
    """Checks that every process ends well if no fault was injected. A writer that outlives its training has a time limit."""
    if sim.stuck or sim.cluster.injected or sim.schedule.tick >= LONG:
        return []
    return list(_failed_processes(sim))


def _check_orphans(sim: Simulation) -> list[Finding]:
    """Checks that ranks whose launcher alone was killed train to their end, whatever is started beside them."""
    if sim.stuck or sim.cluster.lag or sim.schedule.tick >= LONG:
        return []
    if any(row.fault.kind != KILL_LAUNCHER for row in sim.cluster.injected):
        return []
    return [Finding(STUCK, f"{process.name}, an orphan, ended with {process.exit}: {type(process.error).__name__}: "
                           f"{process.error}") for process in sim.jobs[0].ranks if process.exit]


def _check_signals(sim: Simulation) -> list[Finding]:
    """Checks that a job that has sent SIGTERM to itself ends at once and is started again until it has finished; one that was
    asked to stop is not."""
    kinds, newest = {row.fault.kind for row in sim.cluster.injected}, newest_acknowledged(sim.history)
    if kinds <= {OWN_SIGNAL} and (late := [process for process in sim.cluster.processes if process.hangs and process.exit == -9]):
        return [Finding(STUCK, f"{late[0].name} has failed, and did not end by itself")]
    if kinds <= {OWN_SIGNAL} and (newest is None or newest[1] < sim.training.steps):
        return [Finding(STUCK, f"the training ended with {newest}, though nobody had asked it to stop")]
    if not kinds <= {"term", "term all"}:
        return []
    return [Finding(WRONG, f"{job.name} was asked to stop, and was started again")
            for job in sim.jobs[:-1] if _was_asked(job) and not any(process.exit for process in job.ranks)]


def _check_sources(sim: Simulation) -> list[Finding]:
    """Checks that no job in the copy resumes from a save that the job in the original has made after the snapshot."""
    return [*_check_success(sim), *(
        Finding(WRONG, f"run {run}, in the copy, takes {chosen}, a save of the job in the original")
        for run, chosen in sim.history.chosen.items() if chosen is not None and chosen not in sim.history.began)]


def _failed_processes(sim: Simulation) -> Iterator[Finding]:
    for process in sim.cluster.processes:
        if (process.exit or process.error is not None) and not process.name.endswith(".writer"):
            yield Finding(STUCK, f"{process.name} ended with {process.exit}: {type(process.error).__name__}: {process.error}")


SCENARIOS.update({scenario.name: scenario for scenario in (
    Scenario("quota", "the quota of one host or one rank is exhausted; the others can write", _quotas,
             Training(hosts=2, steps=8, keep=2), kinds=(*KINDS, *(QUOTA, QUOTA_OF_HOST) * 4), check_run=_check_success),
    Scenario("memory", "hosts have no memory for a copy, at the start or temporarily", _memory,
             Training(hosts=2, steps=8, keep=2), ways=("thread", "process"), kinds=(*KINDS, *(MEMORY,) * 6),
             check_run=_check_success),
    Scenario("launcher", "only the launcher is killed, and the command is restarted beside its ranks", _relaunched,
             Training(steps=8, keep=2, pace=3.0, settings=SOON), kinds=(*KINDS, *(KILL_LAUNCHER,) * 20),
             check_run=_check_orphans),
    Scenario("hidden", "the same on a host where no process can be looked at: its heartbeats alone tell whether it is alive",
             _hidden, Training(steps=8, keep=2, pace=3.0, settings=SOON), kinds=(*KINDS, *(KILL_LAUNCHER,) * 20),
             check_run=_check_orphans),
    Scenario("own signal", "ranks send SIGTERM to themselves after a failure, under a supervisor; others are asked to stop",
             _supervised, Training(steps=8, keep=2), kinds=(*(OWN_SIGNAL,) * 8, "term", "term all", "kill", "pause", "EIO"),
             check_run=_check_signals),
    Scenario("copied", "a job resumes in a copy of a folder whose files have new modification times", _copied,
             Training(steps=12, keep=2), Training(steps=8), check_run=_check_success),
    Scenario("snapshot", "a job resumes from a snapshot of the folder of another job that still runs", _snapshot,
             Training(steps=8, keep=2), None, check_run=_check_success),
    Scenario("copy", "the same on the host of the job that still runs, whose process is looked up there",
             partial(_snapshot, same_host=True), Training(steps=8, keep=2), None, check_run=_check_success),
    Scenario("copy with a tier", "the same with tiers in memory of that host, where the job in the copy is restarted",
             partial(_snapshot, same_host=True, is_restarted=True), Training(steps=10, every=100, keep=2, settings=TIER), None,
             check_run=_check_sources),
    Scenario("conversion", "the newest checkpoint is converted beside a job that keeps one", _with_converter,
             Training(steps=8, keep=1), formats=(ITERATION,), oracle=concurrent_commands.check_conversions,
             kinds=_READING, check_run=_check_success),
    Scenario("conversion of files", "the same for a job of one rank", _with_converter, Training(ranks=1, steps=8, keep=1),
             Training(ranks=1, steps=2), oracle=concurrent_commands.check_conversions, kinds=_READING, check_run=_check_success),
    Scenario("verify", "all checkpoints are verified beside a job that keeps one", _with_verifier,
             Training(steps=8, keep=1), kinds=_READING, check_run=_check_success),
    Scenario("scrub", "all checkpoints are scrubbed and repaired beside a job that keeps one", _with_scrub,
             Training(steps=8, keep=1), kinds=_READING, check_run=_check_success),
)})

__all__ = ["SCENARIOS", "clone_folder"]
