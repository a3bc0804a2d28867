"""Scenarios in which kept checkpoints rot (``bit_rot``): on disk, beside a scrub that repairs, and in memory of the hosts; or in
which they cannot be read for a while.

Some files have rotted before the job starts, as the seed says; the fault ``schedule.ROT`` lets others rot at any operation.
"""
from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from mindresume.coordination.lease import Lease
from mindresume.errors import NoUsableCheckpointError
from mindresume.formats import Candidate
from mindresume.model.manifest import MANIFEST, record_name
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.replicas import unknown_strategy
from mindresume.resume.scrub import REMOVED, CheckpointScrub, Scrubber, ScrubOptions
from mindresume.settings import ScrubSettings
from sim.bit_rot import rot, rotted_files
from sim.cluster import SHARED, current_cluster, current_process
from sim.concurrent_commands import errors_recorded, is_affected, pauses
from sim.disk import File
from sim.jobs import Job, Training
from sim.mount import Mount
from sim.oracle import STUCK, Finding
from sim.scenarios import FORMATS, TIER, Scenario, Simulation, check_memory, restarted
from sim.schedule import KINDS, PASSING, ROT, ROT_IN_MEMORY
from sim.supervisor_scenarios import SCENARIOS

EARLIER = (0, 1, 1, 2)          # number of files that have rotted before the job starts
STARTS = 3                      # number of times that the scrub is started if it is killed
_KINDS, _IN_MEMORY = (*KINDS, *(ROT,) * 12), ("kill", "kill", "kill all", "term", "pause", *(ROT_IN_MEMORY,) * 5)
_IN_TRAINING = replace(Training().settings, scrub=ScrubSettings(every_hours=0.005))


class _ObservedScrubber(Scrubber):
    """Compares what the scrub of a checkpoint says with what has rotted. ``listed``: what had rotted when the checkpoints were
    listed, which is when manifests are read."""
    sim: Simulation
    listed: Collection[str]

    def _read(self, candidate: Candidate, lock: Lease) -> CheckpointScrub:
        disk, wrong = self.sim.cluster.disks[SHARED], self.sim.history.wrong
        paths = [f"{self.root}/{file.path}" for file in (*candidate.all_files, *candidate.metadata_files)]
        before = {path: file for path, file in rotted_files([disk]).items()
                  if path in paths or path.startswith(f"{candidate.records_dir}/")}
        written = {path: file.written for path, file in before.items()}
        found = super()._read(candidate, lock)
        if found.state == REMOVED or is_affected(self.sim):
            return found
        repaired = {f"{self.root}/{row.file}" for row in found.repaired}
        named = {f"{self.root}/{row.file}" for row in (*found.damaged, *found.repaired) if not row.is_unreadable}
        unreadable = {f"{self.root}/{file.path}" for rank, files in candidate.files.items() for file in files
                      if f"{candidate.records_dir}/{record_name(rank)}" in named}       # nothing tells what these should hold
        text = " ".join(found.notes)
        for path, file in before.items():
            called = path.removeprefix(f"{self.root}/")
            if path.endswith(f"/{MANIFEST}"):
                if path not in self.listed:
                    continue
                called = f"{MANIFEST} of step {candidate.step}"
            if disk.find(path) is file and file.written is not None and path not in named | unreadable and called not in text:
                wrong.append(f"a scrub of {candidate.name} read all of it and did not find that {path} has rotted")
            now = disk.find(path)
            if path in repaired and isinstance(now, File) and (now.data if now.written is None else now.written) != written[path]:
                wrong.append(f"{path} was repaired and is not as it was written")
        known = {*before, *(row.path for row in self.sim.cluster.rots)}
        wrong += [f"a scrub took {path} for damaged, which has never rotted" for path in named - known]
        return found


def _scrub(sim: Simulation) -> None:
    """Scrubs all checkpoints some times, as ``mindresume scrub`` does, the first time without repairs if the seed says so."""
    storage, sleep = Mount(sim.cluster, current_process()), current_cluster().scheduler.sleep
    for number, pause in enumerate(pauses(sim)):
        sleep(pause)
        repairs = bool(number or sim.schedule.seed % 3)
        with errors_recorded(sim, "scrub"):
            listed = set(rotted_files(sim.cluster.disks.values()))
            found, rows = list_checkpoints(storage, sim.training.root, unknown_strategy)
            scrubber = _ObservedScrubber(storage, found.root, ScrubOptions(repairs=repairs), wait=sleep)
            scrubber.sim, scrubber.listed = sim, listed
            for _ in scrubber.scrub(rows):
                pass


def _rotten(workload: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
    """Returns ``workload``, before which some files have rotted."""
    def act(sim: Simulation) -> None:
        rng = random.Random(sim.schedule.seed)
        for _ in range(rng.choice(EARLIER)):
            sim.cluster.rots += rot(list(sim.cluster.disks.values()), rng.randrange(1000))
        workload(sim)
    return act


def _beside(sim: Simulation) -> None:
    """A platform restarts the job after every error, and a user the scrub beside it."""
    restarted(sim, lambda attempt: sim.job(sim.training))

    def user() -> None:
        host = sim.cluster.host("user")
        for number in range(STARTS):
            process = sim.cluster.process(host, f"scrub{number}", lambda: _scrub(sim))
            while not process.dead:
                current_cluster().scheduler.sleep(1.0)
            if process.exit == 0:
                return
    sim.cluster.process(sim.cluster.host("desk"), "user", user)


def _in_training(sim: Simulation) -> None:
    """A platform restarts a job that scrubs in the background."""
    restarted(sim, lambda attempt: sim.job(sim.training))


def _in_memory(sim: Simulation) -> None:
    """A platform restarts the same command on the same hosts. Meanwhile some files in their memory have rotted."""
    hosts, rng = [sim.cluster.host("", node) for node in range(sim.training.hosts)], random.Random(sim.schedule.seed)

    def job_of(attempt: int) -> Job:
        for _ in range(rng.choice(EARLIER) if attempt else 0):
            sim.cluster.rots += rot([host.shm for host in hosts], rng.randrange(1000))
        return sim.job(sim.training, hosts=hosts)
    restarted(sim, job_of)


def _check(sim: Simulation) -> list[Finding]:
    """Checks that all processes end well if only files rot. A job whose checkpoints have all rotted ends with an error."""
    if sim.stuck or any(row.fault.kind != ROT for row in sim.cluster.injected):
        return []
    return list(_failed_processes(sim))


def _failed_processes(sim: Simulation) -> Iterator[Finding]:
    for process in sim.cluster.processes:
        if process.error is not None and not process.name.endswith(".writer") and not (
                sim.cluster.rots and isinstance(process.error, NoUsableCheckpointError)):
            yield Finding(STUCK, f"{process.name} ended with {process.exit}: {type(process.error).__name__}: {process.error}")


_REPLICAS = Training(hosts=2, steps=8, keep=2, replicated=True)
_PAST = replace(_REPLICAS, steps=6, keep=0)
SCENARIOS.update({scenario.name: scenario for scenario in (
    Scenario("rot and scrub", "checkpoints rot, and are scrubbed and repaired beside a job on two hosts", _rotten(_beside),
             _REPLICAS, _PAST, kinds=_KINDS, check_run=_check),
    Scenario("rot in training", "checkpoints rot, and a job on two hosts scrubs and repairs them in the background",
             _rotten(_in_training), replace(_REPLICAS, settings=_IN_TRAINING), _PAST, kinds=_KINDS, check_run=_check),
    Scenario("unreadable", "files of intact checkpoints cannot be read for a while, beside a job on two hosts and a scrub that "
             "repairs", _beside, _REPLICAS, _PAST, kinds=(*KINDS, *PASSING * 8)),
    Scenario("rot in memory", "saves in memory rot, and a job on two hosts is restarted on them", _in_memory,
             Training(hosts=2, steps=10, every=6, keep=2, settings=TIER), formats=FORMATS[:2], kinds=_IN_MEMORY,
             check_run=check_memory),
)})

__all__ = ["SCENARIOS"]
