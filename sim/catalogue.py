"""The scenarios of the simulation, as data: workload, training, past, faults and invariants.

Most faults may be injected in all of them (``schedule.KINDS``); those of a difficult environment
only where the table says so, as often as their number of entries makes likely.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mindresume.fault_injection.journal import ITERATION
from mindresume.settings import GuardSettings, MemoryTierSettings
from mindresume.supervisor.rendezvous import BackgroundStates
from sim import commands, partners, run_checks, supervisors, workloads
from sim.bucket_oracle import check_bucket, check_faulty_bucket
from sim.cluster import SHM
from sim.jobs import Training
from sim.scenarios import FORMATS, Scenario
from sim.schedule import (
    ERRORS,
    KILL_LAUNCHER,
    KINDS,
    MEMORY,
    OF_A_NETWORK,
    OUTAGE,
    OWN_SIGNAL,
    PASSING,
    QUOTA,
    QUOTA_OF_HOST,
    ROT,
    ROT_IN_MEMORY,
    UNREADABLE,
)

URL = "obs://bucket/job/checkpoint"
USUAL = Training().settings
TIER = replace(USUAL, memory_tier=MemoryTierSettings(1, SHM.rstrip("/")))
GUARD = replace(USUAL, guard=GuardSettings(nan="rollback"))
GUARDED_TIER = replace(TIER, guard=GUARD.guard)
PARTNERS = replace(USUAL, memory_tier=MemoryTierSettings(1, SHM.rstrip("/"), partner=True))
# a second job must see the first one's heartbeat before it ends
SOON = replace(USUAL, heartbeat=2.0)
IN_RANKS = FORMATS[:2]
OUTAGES = (*KINDS, OUTAGE, OUTAGE)
# of scenarios in which somebody reads checkpoints
READING = (*KINDS, *PASSING * 6)
ROTTING = (*KINDS, *(ROT,) * 12)
OF_SUPERVISORS = (*ERRORS, "kill", "kill host", "slow", "pause", "clock")
BRIEF = Training(steps=6, keep=2)
KEEPS_ONE = Training(steps=6, keep=1)
LONGER = Training(steps=8, keep=2)
RELAUNCHED = Training(steps=8, keep=2, pace=3.0, settings=SOON)
REPLICAS = Training(hosts=2, steps=8, keep=2, replicated=True)
REPLICAS_PAST = replace(REPLICAS, steps=6, keep=0)


def _bucket(
    name: str,
    about: str,
    workload: Any,
    training: Training,
    formats: tuple[str, ...] = FORMATS,
    before: int = 2,
) -> Scenario:
    """Returns a scenario after a training of ``before`` steps that uploaded all of its saves."""
    past = replace(
        training, steps=before, keep=0, fresh=False, pace=training.pace if before == 2 else 10.0
    )
    return Scenario(
        name,
        about,
        workload,
        training,
        past,
        formats,
        kinds=OUTAGES,
        oracle=check_bucket,
        check_run=run_checks.check_uploads,
    )


def _supervisors(
    name: str, about: str, kinds: tuple[str, ...] = OF_SUPERVISORS, **how: Any
) -> Scenario:
    """Returns a scenario without a checkpoint on the disks."""
    return Scenario(
        name,
        about,
        partial(supervisors.supervise, **how),
        past=None,
        formats=FORMATS[:1],
        ways=("",),
        kinds=kinds,
        oracle=lambda *_, **__: [],
        check_run=supervisors.check,
    )


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("save", "two ranks save one step", partial(workloads.save_only, steps=(4,))),
        Scenario(
            "prune",
            "two ranks save two steps and keep the newest",
            partial(workloads.save_only, steps=(4, 6), keep=1),
        ),
        Scenario(
            "replace",
            "two ranks save one step, commit it, and remove the previous one",
            partial(workloads.save_only, steps=(4,), keep=1),
        ),
        Scenario("first", "a job in an empty folder", workloads.one_job, past=None),
        Scenario(
            "job",
            "a job resumes from a checkpoint, saves twice, keeps one",
            workloads.one_job,
            KEEPS_ONE,
        ),
        Scenario(
            "older",
            "a job resumes where two checkpoints exist",
            workloads.one_job,
            Training(steps=8, keep=1),
            Training(steps=4),
        ),
        Scenario(
            "restarts", "a platform restarts the job after every error", workloads.restarted, LONGER
        ),
        Scenario(
            "twice", "two jobs are started in one folder at the same time", workloads.twice, BRIEF
        ),
        Scenario(
            "rare beats",
            "another job is started beside one with a long heartbeat interval",
            workloads.rare_beats,
            replace(BRIEF, pace=25.0),
        ),
        Scenario(
            "same hosts",
            "a job is restarted on its hosts, and once more with the hosts swapped",
            partial(workloads.on_same_hosts, swapped=2),
            replace(LONGER, hosts=2),
        ),
        Scenario(
            "orphan",
            "an earlier version has left records under a name that is in use",
            workloads.orphan,
            KEEPS_ONE,
            formats=(ITERATION,),
        ),
        Scenario(
            "health",
            "the last checkpoints of a job are unhealthy",
            workloads.restarted,
            Training(steps=8, keep=1, health_monitored=True, unhealthy=(6, 8)),
            Training(steps=2, health_monitored=True),
        ),
        Scenario(
            "two hosts",
            "a job on two hosts that share a disk",
            workloads.one_job,
            replace(KEEPS_ONE, hosts=2),
        ),
        Scenario(
            "three ranks",
            "a job of three ranks resumes from a checkpoint of two",
            workloads.one_job,
            replace(KEEPS_ONE, ranks=3, allow_reshard=True),
        ),
        Scenario(
            "nodes",
            "a job on two hosts that share no disk",
            workloads.restarted,
            replace(KEEPS_ONE, hosts=2, node_local=True),
            Training(hosts=2, steps=2, node_local=True),
            IN_RANKS,
        ),
        Scenario(
            "afresh",
            "a new training in the folder of another one",
            workloads.afresh,
            Training(steps=4, keep=1, fresh=True),
        ),
        Scenario(
            "lost ranks",
            "after a rank has died, the others save what they have",
            workloads.one_job,
            replace(BRIEF, rescue=True),
        ),
        Scenario(
            "tier",
            "a job with a tier in memory is restarted on its host",
            workloads.on_same_hosts,
            Training(steps=10, every=6, keep=2, settings=TIER),
            check_run=run_checks.check_memory,
        ),
        Scenario(
            "tier of two hosts",
            "a job with tiers in memory of two hosts is restarted on them",
            workloads.on_same_hosts,
            Training(hosts=2, steps=10, every=6, keep=2, settings=TIER),
            formats=IN_RANKS,
            check_run=run_checks.check_memory,
        ),
        Scenario(
            "a reader",
            "one process prunes and another one reads",
            workloads.readers,
            Training(steps=8, pruned_by_others=True),
            Training(steps=8),
            ways=("",),
        ),
        Scenario(
            "readers",
            "one process prunes and another one reads beside a job",
            workloads.pruned_and_read,
            replace(BRIEF, pruned_by_others=True),
        ),
        Scenario(
            "bad steps",
            "a job has two bad batches, is restarted, and skips them",
            partial(workloads.restarted, attempts=8),
            Training(steps=10, keep=1, bad=(5, 6), settings=GUARD),
            check_run=run_checks.check_guard,
        ),
        Scenario(
            "bad steps of nodes",
            "the same on two hosts that share no disk",
            partial(workloads.restarted, attempts=8),
            Training(hosts=2, steps=8, keep=1, node_local=True, bad=(2, 5), settings=GUARD),
            Training(hosts=2, steps=2, node_local=True),
            IN_RANKS,
            check_run=run_checks.check_guard,
        ),
        Scenario(
            "bad steps and a tier",
            "the same with a tier in memory, on the same hosts",
            partial(workloads.on_same_hosts, attempts=8),
            Training(steps=10, every=4, keep=1, bad=(3, 7), settings=GUARDED_TIER),
            check_run=run_checks.check_guard,
        ),
        Scenario(
            "partners",
            "a job with partner copies is restarted on hosts that lose their memory, change places "
            "and come back",
            partners.on_changing_hosts,
            Training(hosts=2, steps=8, every=6, keep=2, settings=PARTNERS),
            formats=IN_RANKS,
            kinds=("kill host", "kill host", "kill", "kill all", *OF_A_NETWORK, "slow", "pause"),
            check_run=partners.check,
        ),
        # ---- remains of earlier runs -------------------------------------------------------------
        Scenario(
            "uncommitted",
            "a job starts where two saves are complete and were never committed",
            workloads.uncommitted,
            LONGER,
        ),
        Scenario(
            "damaged",
            "a job dies after loading a checkpoint, which is damaged before the restart",
            workloads.damaged,
            Training(steps=8, keep=1),
            Training(steps=4),
        ),
        # ---- an object store, as on ModelArts: pods lose their disks, and checkpoints come back fr
        _bucket(
            "bucket",
            "a job uploads to a bucket, in pods that lose their disks",
            workloads.pods,
            replace(KEEPS_ONE, url=URL),
        ),
        _bucket(
            "bucket nodes",
            "the same on two hosts that share no disk",
            workloads.pods,
            replace(KEEPS_ONE, hosts=2, node_local=True, url=URL),
            IN_RANKS,
        ),
        _bucket(
            "bucket archived",
            "the manifest of the newest checkpoint in the bucket cannot be read",
            workloads.archived,
            Training(steps=8, keep=1, url=URL),
            before=4,
        ),
        _bucket(
            "bucket slow",
            "uploads are slower than saves, on two hosts that share no disk",
            workloads.slow_uploads,
            Training(hosts=2, steps=14, keep=1, node_local=True, url=URL),
            IN_RANKS,
        ),
        _bucket(
            "two pods",
            "two jobs on different disks use one url",
            workloads.two_pods,
            replace(KEEPS_ONE, url=URL),
        ),
        _bucket(
            "bucket afresh",
            "a new training at the url of another one",
            workloads.afresh_in_bucket,
            Training(steps=4, keep=1, fresh=True, url=URL),
        ),
        Scenario(
            "bucket unreadable",
            "objects of the bucket become unreadable",
            workloads.pods,
            replace(LONGER, url=URL),
            Training(steps=2, url=URL),
            kinds=(*KINDS, OUTAGE, *(UNREADABLE,) * 10),
            oracle=check_faulty_bucket,
        ),
        Scenario(
            "bucket health",
            "the last checkpoints in the bucket are unhealthy",
            workloads.pods,
            Training(steps=8, keep=1, url=URL, health_monitored=True, unhealthy=(6, 8)),
            Training(steps=2, url=URL, health_monitored=True),
            kinds=OUTAGES,
            oracle=check_faulty_bucket,
        ),
        # ---- difficult environments --------------------------------------------------------------
        Scenario(
            "quota",
            "the quota of one host or one rank is exhausted; the others can write",
            workloads.on_same_hosts,
            replace(LONGER, hosts=2),
            kinds=(*KINDS, *(QUOTA, QUOTA_OF_HOST) * 4),
            check_run=run_checks.check_success,
        ),
        Scenario(
            "memory",
            "hosts have no memory for a copy, at the start or temporarily",
            workloads.with_memory_limits,
            replace(LONGER, hosts=2),
            ways=("thread", "process"),
            kinds=(*KINDS, *(MEMORY,) * 6),
            check_run=run_checks.check_success,
        ),
        Scenario(
            "launcher",
            "only the launcher is killed, and the command is restarted beside its ranks",
            workloads.relaunched,
            RELAUNCHED,
            kinds=(*KINDS, *(KILL_LAUNCHER,) * 20),
            check_run=run_checks.check_orphans,
        ),
        Scenario(
            "hidden",
            "the same on a host where no process can be looked at: its heartbeats alone tell "
            "whether it is alive",
            partial(workloads.relaunched, is_hidden=True),
            RELAUNCHED,
            kinds=(*KINDS, *(KILL_LAUNCHER,) * 20),
            check_run=run_checks.check_orphans,
        ),
        Scenario(
            "own signal",
            "ranks send SIGTERM to themselves after a failure, under a supervisor; others are "
            "asked to stop",
            workloads.supervised,
            LONGER,
            kinds=(*(OWN_SIGNAL,) * 8, "term", "term all", "kill", "pause", "EIO"),
            check_run=run_checks.check_signals,
        ),
        Scenario(
            "copied",
            "a job resumes in a copy of a folder whose files have new modification times",
            workloads.copied,
            Training(steps=12, keep=2),
            Training(steps=8),
            check_run=run_checks.check_success,
        ),
        Scenario(
            "snapshot",
            "a job resumes from a snapshot of the folder of another job that still runs",
            workloads.snapshot,
            LONGER,
            None,
            check_run=run_checks.check_success,
        ),
        Scenario(
            "copy",
            "the same on the host of the job that still runs, whose process is looked up there",
            partial(workloads.snapshot, same_host=True),
            LONGER,
            None,
            check_run=run_checks.check_success,
        ),
        Scenario(
            "copy with a tier",
            "the same with tiers in memory of that host, where the job in the copy is restarted",
            partial(workloads.snapshot, same_host=True, is_restarted=True),
            Training(steps=10, every=100, keep=2, settings=TIER),
            None,
            check_run=run_checks.check_sources,
        ),
        # ---- commands beside a job ---------------------------------------------------------------
        Scenario(
            "conversion",
            "the newest checkpoint is converted beside a job that keeps one",
            partial(workloads.beside, command=commands.convert),
            Training(steps=8, keep=1),
            formats=(ITERATION,),
            oracle=commands.check_conversions,
            kinds=READING,
            check_run=run_checks.check_success,
        ),
        Scenario(
            "conversion of files",
            "the same for a job of one rank",
            partial(workloads.beside, command=commands.convert),
            Training(ranks=1, steps=8, keep=1),
            Training(ranks=1, steps=2),
            oracle=commands.check_conversions,
            kinds=READING,
            check_run=run_checks.check_success,
        ),
        Scenario(
            "verify",
            "all checkpoints are verified beside a job that keeps one",
            partial(workloads.beside, command=commands.verify),
            Training(steps=8, keep=1),
            kinds=READING,
            check_run=run_checks.check_success,
        ),
        Scenario(
            "scrub",
            "all checkpoints are scrubbed and repaired beside a job that keeps one",
            partial(workloads.beside, command=commands.scrub),
            Training(steps=8, keep=1),
            kinds=READING,
            check_run=run_checks.check_success,
        ),
        # ---- supervisors of several nodes --------------------------------------------------------
        _supervisors("supervisors", "the supervisors of three nodes restart a job together"),
        _supervisors(
            "fewer nodes",
            "the supervisors of three nodes go on with two if one does not come back",
            fewest=supervisors.FEWEST,
        ),
        _supervisors(
            "hanging disk",
            "the same, and the disk hangs while nobody reads what the supervisors print",
            (*OF_SUPERVISORS, *("slow",) * 10),
            fewest=supervisors.FEWEST,
            states=BackgroundStates,
        ),
        # ---- rot: some files have rotted before the job starts, as the seed says; the fault ROT le
        Scenario(
            "rot and scrub",
            "checkpoints rot, and are scrubbed and repaired beside a job on two hosts",
            workloads.rotten_and_scrubbed,
            REPLICAS,
            REPLICAS_PAST,
            kinds=ROTTING,
            check_run=run_checks.check_rotten,
        ),
        Scenario(
            "unreadable",
            "files of intact checkpoints cannot be read for a while, beside a job on two hosts and "
            "a scrub that repairs",
            workloads.scrubbed,
            REPLICAS,
            REPLICAS_PAST,
            kinds=(*KINDS, *PASSING * 8),
        ),
        Scenario(
            "rot in memory",
            "saves in memory rot, and a job on two hosts is restarted on them",
            workloads.rotten_in_memory,
            Training(hosts=2, steps=10, every=6, keep=2, settings=TIER),
            formats=IN_RANKS,
            kinds=("kill", "kill", "kill all", "term", "pause", *(ROT_IN_MEMORY,) * 5),
            check_run=run_checks.check_memory,
        ),
    )
}
