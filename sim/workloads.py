"""The workloads of the scenarios: which processes run, when, and what was there before. Each starts
processes of a simulation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from mindresume.fault_injection.journal import ITERATION, make_shard
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import iteration_name
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, record_name
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import KEEP_ALL, KeepLast
from mindresume.saving.shard_writer import Save, SaveTarget, write_shard
from mindresume.supervisor.restart_policy import (
    DIED,
    EXITED,
    RESTART,
    TERMINATED,
    JobEnd,
    StartOutcome,
    decide,
)
from sim import commands
from sim.bit_rot import rot
from sim.bucket import BUCKET
from sim.bucket_oracle import manifest_url
from sim.cluster import SHARED, Cluster, Host, current_cluster, current_process
from sim.disk import Disk, File, Folder
from sim.jobs import NAMED, History, Job
from sim.machine import use_cluster
from sim.mount import Mount
from sim.oracle import run_alone
from sim.run_checks import was_asked
from sim.scenarios import Simulation
from sim.schedule import Schedule

RUN = "0002-1111aaaa"
RESTARTS = 5  # in a row without progress
ATTEMPTS = 3  # number of times that a platform starts a job
LATER = (0.0, 0.0, 2.5)  # seconds between the starts of two jobs
LATER_IN_PODS = (0.0, 1.5, 3.0, 4.5)
SLOW = 3.0  # seconds of an upload in the scenarios with slow uploads
# seconds until the platform has another pod: longer than the lag of a bucket listing
PAUSE = 20.0
HANGING = 3000.0  # seconds after which a job hangs
OTHER = "/other"  # output folder of the job whose folder is copied
LATE = 3.0  # seconds between a copy and the start of a job in it
# steps of a job that still runs when another has waited for three of its heartbeats
OUTLIVING = 80
# moments of the snapshot, in seconds after the start of the first job
MOMENTS = (1.0, 3.0, 5.0, 6.5, 7.0, 9.0)
MEMORIES = (1 << 40, 0)  # memory limits in bytes: enough for every copy, and for none
COPIED = ("at once", "in order", "backwards", "in any order")
EARLIER = (0, 1, 1, 2)  # number of files that have rotted before the job starts
STARTS = 3  # number of times that the scrub is started if it is killed


# ---- saves alone, without the start and the end of a job -----------------------------------------


def save_only(sim: Simulation, steps: tuple[int, ...], keep: int = 0) -> None:
    host = sim.cluster.host()
    sim.history.sizes[RUN] = sim.training.ranks
    for rank in range(sim.training.ranks):
        sim.cluster.process(host, f"rank{rank}", lambda rank=rank: _save(sim, rank, steps, keep))


def _save(sim: Simulation, rank: int, steps: tuple[int, ...], keep: int) -> None:
    training = sim.training
    history = sim.history
    process = current_process()
    target = SaveTarget(
        Mount(sim.cluster, process),
        training.root,
        RUN,
        rank,
        training.ranks,
        sim.format == ITERATION,
        (),
        next(iter(history.chosen), RUN),
    )
    policy = (KeepLast(keep) if keep else KEEP_ALL) if rank == 0 else None
    saver = (
        AsyncSaver(target, policy, sim.way, emit=process.emit, timeout=20.0)
        if sim.way
        else SyncSaver(target, policy, process.emit)
    )
    for step in steps:
        history.began.add((RUN, step))
        saver.save(Save(make_shard(target, step, sim.format, 1, *NAMED)))
        history.hear(RUN, rank, saver.poll())
    history.hear(RUN, rank, saver.wait(20.0))
    history.hear(RUN, rank, saver.finish(20.0, 5.0))
    # keeps the process alive for a late writer thread
    current_cluster().scheduler.sleep(200.0)


# ---- whole jobs ----------------------------------------------------------------------------------


def one_job(sim: Simulation) -> None:
    sim.job(sim.training).start()


def on_platform(sim: Simulation, work: Callable[[], None]) -> None:
    """Runs ``work`` as a process on a host of its own."""
    sim.cluster.process(sim.cluster.host("platform"), "platform", work)


def restarted(
    sim: Simulation, job_of: Callable[[int], Job] | None = None, attempts: int = ATTEMPTS
) -> None:
    """Starts a platform process that runs ``job_of(attempt)``, from attempt 0, until a job ends
    without an error; at most ``attempts``. By default it restarts the same command on new hosts."""

    def work() -> None:
        for attempt in range(attempts):
            job = job_of(attempt) if job_of is not None else sim.job(sim.training)
            job.start()
            while not job.launcher.dead or not job.over:
                current_cluster().scheduler.sleep(1.0)
                if job.launcher.dead and not job.ranks:  # killed before it started a rank
                    break
            if job.ranks and not any(process.exit for process in job.ranks):
                return

    on_platform(sim, work)


def on_same_hosts(sim: Simulation, swapped: int | None = None, attempts: int = ATTEMPTS) -> None:
    """A platform restarts the same command on the same hosts, which keep their caches, quotas and
    what lies in their memory. ``swapped``: at this attempt they change places."""
    hosts = [sim.cluster.host("", node) for node in range(sim.training.hosts)]
    restarted(
        sim,
        lambda attempt: sim.job(sim.training, hosts=hosts[::-1] if attempt == swapped else hosts),
        attempts,
    )


def with_memory_limits(sim: Simulation) -> None:
    """Hosts differ in the memory that is free when the job starts."""
    hosts = [sim.cluster.host() for _ in range(sim.training.hosts)]
    for number, host in enumerate(hosts):
        host.memory = MEMORIES[sim.schedule.seed >> number & 1]
    restarted(sim, lambda attempt: sim.job(sim.training, hosts=hosts))


def twice(sim: Simulation) -> None:
    """Two jobs are started in one folder, at the same moment or while the first one trains."""
    sim.job(sim.training).start()

    def work() -> None:
        current_cluster().scheduler.sleep(LATER[sim.schedule.seed % len(LATER)])
        sim.job(sim.training).start()

    on_platform(sim, work)


def rare_beats(sim: Simulation) -> None:
    """A job has a longer heartbeat interval than a second one that is started beside it."""
    sim.job(replace(sim.training, settings=replace(sim.training.settings, heartbeat=60.0))).start()
    sim.job(sim.training).start()


def afresh(sim: Simulation) -> None:
    """A new training is started on purpose in the folder of another one."""
    sim.history.protected = list(sim.history.reported)
    one_job(sim)


def relaunched(sim: Simulation, is_hidden: bool = False) -> None:
    """A platform starts the command again as soon as its first launcher has ended, on the same or
    another host, while its ranks may still run. Later attempts wait for those ranks, so the
    platform lets them end. (Two attempts that wait for the same orphans and start together are
    scenario "twice".)

    ``is_hidden``: on one host, where /proc does not show the processes of others (hidepid), or
    cannot be read: only heartbeats tell.
    """
    hosts: list[Host] | None = [sim.cluster.host()] if is_hidden or sim.schedule.seed % 2 else None
    if is_hidden:
        hosts[0].hides_processes = True

    def work() -> None:
        for attempt in range(ATTEMPTS):
            job = sim.job(sim.training, hosts=hosts)
            launcher = job.start()
            while not launcher.dead or (attempt and job.ranks and not job.over):
                current_cluster().scheduler.sleep(1.0)
            if launcher.exit == 0 and not any(process.exit for process in job.ranks):
                return

    on_platform(sim, work)


def supervised(sim: Simulation) -> None:
    """A platform that decides as the supervisor does starts the job again. It ends a job that
    hangs."""
    cluster = sim.cluster

    def work() -> None:
        starts: list[StartOutcome] = []
        while len(starts) <= ATTEMPTS:
            job, until = sim.job(sim.training), cluster.scheduler.now + HANGING
            job.start()
            while (
                not job.launcher.dead or job.ranks and not job.over
            ) and cluster.scheduler.now < until:
                cluster.scheduler.sleep(1.0)
            for process in (*job.ranks, job.launcher):
                cluster.kill(process)
            kind = EXITED if job.ranks and not any(process.exit for process in job.ranks) else DIED
            asked = kind == EXITED and was_asked(job)
            starts.append(
                StartOutcome(
                    len(starts) + 1,
                    0.0,
                    0.0,
                    JobEnd(kind, 1 if kind == DIED else TERMINATED * asked, "", noticed=0.0),
                    is_preempted=asked,
                )
            )
            if decide(RESTARTS, starts).action != RESTART:
                return

    on_platform(sim, work)


# ---- remains of earlier runs ---------------------------------------------------------------------


def orphan(sim: Simulation) -> None:
    """An earlier version has left a folder of records under the name of one inside an iteration
    folder."""
    root, disk = sim.training.root, sim.cluster.disks[SHARED]
    ((run, step),) = sim.history.reported
    name = attempt_name(step, run)
    inner = f"{iteration_name(step)}/{FOLDER}/{name}"
    for path in ("", f"/{FOLDER}", f"/{FOLDER}/{name}"):
        disk.make_folder(f"{root}/{FOLDER}/{name}{path}")
    disk.create(
        f"{root}/{FOLDER}/{name}/{FOLDER}/{name}/{record_name(1)}",
        disk.find(f"{root}/{inner}/{record_name(1)}").data,
    )
    disk.lose_power(lambda: True, lambda data: data)
    one_job(sim)


def uncommitted(sim: Simulation) -> None:
    """All ranks of a run have saved two steps; it died before rank 0 committed any of them."""
    training, history = sim.training, sim.history
    lineage, cluster = next(iter(history.chosen)), Cluster(Schedule(), sim.cluster.disks)
    cluster._tokens = 350_000  # tokens that no later process draws
    history.sizes[RUN] = training.ranks

    def work() -> None:
        storage = Mount(cluster, current_process())
        for step in (4, 6):
            for rank in range(training.ranks):
                target = SaveTarget(
                    storage,
                    training.root,
                    RUN,
                    rank,
                    training.ranks,
                    sim.format == ITERATION,
                    (),
                    lineage,
                )
                write_shard(target, make_shard(target, step, sim.format, 1, *NAMED))
            history.began.add((RUN, step))
            history.reported[RUN, step] = set(range(training.ranks))

    with use_cluster(cluster):
        cluster.process(cluster.host("before"), "before", work)
        cluster.scheduler.run()
    sim.cluster.disks[SHARED].lose_power(lambda: True)
    one_job(sim)


def damaged(sim: Simulation) -> None:
    """A job is killed in its first step; then a file of the checkpoint that it had loaded is
    truncated, and the platform restarts it."""
    newest = max(sim.history.reported)

    def job_of(attempt: int) -> Job:
        if (
            attempt
            and newest == max(sim.history.chosen.items())[1]
            and newest in sim.history.reported
        ):
            _damage(sim, newest)
        return sim.job(replace(sim.training, dies_in_first_step=not attempt))

    restarted(sim, job_of)


def _damage(sim: Simulation, saved: tuple[str, int]) -> None:
    """Truncates the last file of ``saved`` by one byte. No job has to take it any more."""
    disk, rows = sim.cluster.disks[SHARED], []

    def work(cluster: Cluster) -> None:
        rows.extend(
            file.path
            for candidate in scan_records(
                CheckpointDir(Mount(cluster, current_process()), sim.training.root)
            )[0]
            if (candidate.run, candidate.step) == saved
            for file in candidate.all_files
        )

    (process,) = run_alone(sim.cluster.disks, work).processes
    if process.error is None and rows:
        file = disk.find(f"{sim.training.root}/{rows[-1]}")
        if isinstance(file, File):
            disk.fill(file, file.data[:-1], True, rows[-1])
            del sim.history.reported[saved]


# ---- commands beside a job -----------------------------------------------------------------------


def beside(sim: Simulation, command: Callable[[Simulation], None]) -> None:
    """A user runs a command beside a job."""
    one_job(sim)
    sim.cluster.process(sim.cluster.host("user"), command.__name__, lambda: command(sim))


def pruned_and_read(sim: Simulation) -> None:
    """Beside a job one process prunes the folder, and one reads checkpoints."""
    one_job(sim)
    host = sim.cluster.host("user")
    sim.cluster.process(host, "prune", lambda: commands.prune(sim))
    sim.cluster.process(host, "reader", lambda: commands.read(sim))


def readers(sim: Simulation) -> None:
    """One process prunes, another one reads, and no process saves."""
    sim.cluster.process(
        sim.cluster.host("user"), "prune", lambda: commands.prune(sim, (3, 2, 1), 0.0)
    )
    sim.cluster.process(sim.cluster.host("user2"), "reader", lambda: commands.read(sim, 0.0))


# ---- copies --------------------------------------------------------------------------------------


def copied(sim: Simulation) -> None:
    """The folder is a copy: modification times are those of the copy, in the order in which files
    were copied."""
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
    restarted(sim)


def snapshot(sim: Simulation, same_host: bool = False, is_restarted: bool = False) -> None:
    """A snapshot is taken of the folder of a running job, and another job resumes from it on
    another host, or on its host. ``is_restarted``: a platform restarts the latter."""
    history, disk = History(), sim.cluster.disks[SHARED]
    original = replace(
        sim.training,
        root=f"{OTHER}/checkpoint",
        output=OTHER,
        steps=(2 * OUTLIVING if is_restarted else OUTLIVING if same_host else sim.training.steps),
    )
    host = sim.cluster.host("elsewhere")
    Job(sim.cluster, history, original, [host], "other").start()

    def work() -> None:
        current_cluster().scheduler.sleep(MOMENTS[sim.schedule.seed % len(MOMENTS)])
        clone_folder(disk, OTHER, "/out")
        then = history.copy()
        sim.history.reported = then.reported
        sim.history.failed = then.failed
        sim.history.sizes = then.sizes
        sim.history.began = then.began
        if is_restarted:
            current_cluster().scheduler.sleep(LATE)  # the other job has made newer saves
            restarted(sim, lambda attempt: sim.job(sim.training, hosts=[host]))
        else:
            sim.job(sim.training, hosts=[host] if same_host else None).start()

    sim.cluster.process(sim.cluster.host("admin"), "admin", work)


def clone_folder(disk: Disk, source: str, target: str) -> None:
    """Copies what is visible in ``source`` to ``target``, durably, with the current time as
    modification time."""
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


# ---- an object store -----------------------------------------------------------------------------


def pods(sim: Simulation) -> None:
    """A platform restarts the command after every error, on other nodes with empty disks."""

    def job_of(attempt: int) -> Job:
        first = attempt * sim.training.hosts
        if attempt:
            current_cluster().scheduler.sleep(PAUSE)
            # the disks of the old pods are gone
            sim.history.reported.clear()
            for node in range(sim.training.hosts):
                sim.cluster.disks[f"node{first + node}"] = Disk(local=True)
        return sim.job(sim.training, first)

    restarted(sim, job_of)


def slow_uploads(sim: Simulation) -> None:
    """An upload takes longer than the time between two saves."""
    sim.cluster.disks[BUCKET].seconds = SLOW  # type: ignore[attr-defined]
    one_job(sim)


def two_pods(sim: Simulation) -> None:
    """Two jobs on different disks use one url. The second starts with the first, or while it saves
    and uploads."""
    sim.cluster.disks["node1"] = Disk(local=True)
    sim.job(sim.training, 0).start()

    def work() -> None:
        current_cluster().scheduler.sleep(LATER_IN_PODS[sim.schedule.seed % len(LATER_IN_PODS)])
        sim.job(sim.training, 1).start()

    on_platform(sim, work)


def archived(sim: Simulation) -> None:
    """The manifest of the newest checkpoint in the bucket can never be read again."""
    newest, bucket = max(sim.history.uploaded), sim.cluster.disks[BUCKET]
    sim.history.uploaded.remove(newest)
    sim.history.protected = [newest]
    # type: ignore[attr-defined]
    bucket.unreadable.add(manifest_url(sim.training, attempt_name(newest[1], newest[0])))
    pods(sim)


def afresh_in_bucket(sim: Simulation) -> None:
    """A new training is started on purpose at the url of another one. After an error it is resumed
    on the same disk."""
    sim.history.protected = sorted(sim.history.uploaded)
    restarted(sim, lambda attempt: sim.job(replace(sim.training, fresh=not attempt)))


# ---- bit rot -------------------------------------------------------------------------------------


def _rot_some(sim: Simulation, disks: list[Disk], rng: random.Random) -> None:
    for _ in range(rng.choice(EARLIER)):
        sim.cluster.rots += rot(disks, rng.randrange(1000))


def rotten_and_scrubbed(sim: Simulation) -> None:
    """Some files have rotted before a job starts that is scrubbed from outside."""
    _rot_some(sim, list(sim.cluster.disks.values()), random.Random(sim.schedule.seed))
    scrubbed(sim)


def scrubbed(sim: Simulation) -> None:
    """A platform restarts the job after every error, and a user the scrub beside it."""
    restarted(sim)

    def user() -> None:
        host = sim.cluster.host("user")
        for number in range(STARTS):
            process = sim.cluster.process(
                host, f"scrub{number}", lambda: commands.observed_scrub(sim)
            )
            while not process.dead:
                current_cluster().scheduler.sleep(1.0)
            if process.exit == 0:
                return

    sim.cluster.process(sim.cluster.host("desk"), "user", user)


def rotten_in_memory(sim: Simulation) -> None:
    """A platform restarts the same command on the same hosts. Meanwhile some files in their memory
    have rotted."""
    hosts = [sim.cluster.host("", node) for node in range(sim.training.hosts)]
    rng = random.Random(sim.schedule.seed)

    def job_of(attempt: int) -> Job:
        if attempt:
            _rot_some(sim, [host.shm for host in hosts], rng)
        return sim.job(sim.training, hosts=hosts)

    restarted(sim, job_of)
