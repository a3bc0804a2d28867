"""Quotas, memory limits, a killed launcher, copies and concurrent commands: their faults, and what
the oracle finds."""

from dataclasses import replace

import pytest
from simulation.test_search import found as failures
from simulation.test_teeth import Edit, mutate

from mindresume.coordination import lease, lease_acquisition
from mindresume.errors import LeaseHeldError
from mindresume.events import CheckpointSelected, SaveCommitted
from mindresume.fault_injection.faults import Fault
from mindresume.maintenance import scrub
from mindresume.reshard import open_checkpoint
from mindresume.resume import eligible, sources
from mindresume.resume.bucket_source import BucketSource
from mindresume.saving import remote_checkpoints
from mindresume.saving.committer import SyncSaver
from mindresume.saving.staging import StagingLimits
from sim.bucket import BUCKET
from sim.jobs import common_saves
from sim.scenarios import FORMATS, WAYS, Simulation
from sim.schedule import (
    QUOTA,
    QUOTA_OF_HOST,
    Schedule,
)
from sim.search import SCENARIOS
from sim.workloads import MOMENTS, RUN

NAMES = (
    "quota",
    "memory",
    "launcher",
    "hidden",
    "own signal",
    "copied",
    "snapshot",
    "copy",
    "copy with a tier",
    "conversion",
    "conversion of files",
    "verify",
    "scrub",
    "unreadable",
    "bucket unreadable",
    "bucket health",
)


NOTHING = Schedule()


def simulated(name, schedule=NOTHING, fmt="ckpt", way=""):
    return Simulation(SCENARIOS[name], fmt, schedule, way).run()


def kinds_of(sim):
    return {finding.kind for finding in sim.findings()}


def found(name, seeds, fmt="ckpt", way=""):
    """Returns the kinds of findings of the first seed that has any; kills are not tried at every
    moment."""
    for failure in failures((0, seeds), name, fmt, way, deaths=False):
        return {finding.kind for finding in failure.findings}
    return set()


# ---- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_process_ends_with_success_without_a_fault(name):
    scenario = SCENARIOS[name]
    for fmt in scenario.formats:
        sim = simulated(name, fmt=fmt, way=scenario.ways[-1])
        assert sim.findings() == [] and not any(process.exit for process in sim.cluster.processes)


# ---- faults --------------------------------------------------------------------------------------


def first(sim, process, name):
    return next(
        number for number, who, what, _ in sim.cluster.trace.rows if (who, what) == (process, name)
    )


def traced(name, fmt="ckpt", way=""):
    sim = Simulation(SCENARIOS[name], fmt, Schedule(), way)
    sim.cluster.trace.wanted = True
    return sim.run()


@pytest.mark.parametrize("way", ["", "thread", "process"])
@pytest.mark.parametrize(("kind", "alone"), [(QUOTA, True), (QUOTA_OF_HOST, True)])
def test_a_quota_is_of_one_rank_and_its_writer(way, kind, alone):
    rows = traced("quota", way=way).cluster.trace.rows
    at = next(
        number
        for number, who, name, path in rows
        if who == f"job0.1{'.writer' if way == 'process' else ''}"
        and name == "write"
        and "_1_" in path
    )
    sim = simulated("quota", Schedule(faults=(Fault(at, kind, 10_000),)), way=way)
    assert sim.findings() == []
    failed = {
        (process, "quota" in text.lower()) for (_, process), text in sim.history.failed.items()
    }
    assert (1, True) in failed and (0, True) not in failed


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(len(MOMENTS)))
def test_a_job_resumes_from_a_snapshot_beside_its_original(seed):
    sim = simulated("snapshot", Schedule(seed=seed))
    (start,) = sim.history.chosen.values()
    assert sim.findings() == [] and (start is not None) == (seed > 0)


# ---- what a death leaves -------------------------------------------------------------------------


def killed(kind, at):
    """Runs the scenario with one fault. Returns the saves in memory of its first job, and the
    sources of the selections."""
    sim = simulated("tier", Schedule(faults=(Fault(at, kind),)), "safetensors")
    assert sim.findings() == []
    return common_saves(sim.jobs[0]), [
        event.source
        for process in sim.cluster.processes
        for _, event in process.events
        if isinstance(event, CheckpointSelected) and process.name.endswith(".0")
    ]


def test_memory_survives_the_death_of_processes_and_not_that_of_the_host():
    saves, sources = killed("kill", 350)
    assert saves and sources == ["disk", "memory"]
    saves, sources = killed("kill host", 350)
    assert saves and sources == ["disk", "disk"]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_an_uncommitted_save_is_selected_and_committed(fmt, way):
    sim = simulated("uncommitted", fmt=fmt, way=way)
    chosen = [sim.history.chosen[run] for run in sorted(sim.history.chosen)][1:]
    assert chosen == [(RUN, 6)] and sim.findings() == []
    events = [event for _, event in sim.jobs[0].ranks[0].events if isinstance(event, SaveCommitted)]
    assert [event.step for event in events if event.run_id == RUN] == [4, 6]


# ---- broken products -----------------------------------------------------------------------------


def test_a_save_prevented_by_a_quota_and_reported_as_saved_is_found(monkeypatch):
    write = SyncSaver.write
    monkeypatch.setattr(
        SyncSaver, "write", lambda work, save: replace(write(work, save), saved=True)
    )
    assert "lost" in found("quota", 30)


def test_memory_used_beyond_the_limit_is_found(monkeypatch):
    monkeypatch.setattr(StagingLimits, "why_not", lambda *_: None)
    assert "stuck" in kinds_of(simulated("memory", Schedule(seed=3), way="thread"))


def test_a_job_that_expels_orphans_is_found(monkeypatch):
    def dead(self, besides=()):
        return [
            other
            for other in lease.lease_holders(self.directory)
            if other.run not in (self.me.run, *besides) and other.purpose == lease.SAVING
        ]

    monkeypatch.setattr(lease_acquisition._Others, "watch", dead)
    assert found("launcher", 30) & {"stuck", "lost"}


def test_a_selection_by_file_times_is_found(monkeypatch):
    find_candidates = sources.find_candidates

    def by_time(storage, path, *more):
        scan, is_explicit = find_candidates(storage, path, *more)
        rows = sorted(
            scan.candidates,
            key=lambda c: storage.status(f"{scan.root}/{c.first.path}").mtime,
            reverse=True,
        )
        return replace(scan, candidates=tuple(rows)), is_explicit

    monkeypatch.setattr(sources, "find_candidates", by_time)
    assert "lost" in found("copied", 20)


def test_a_lease_that_never_expires_is_found(monkeypatch):
    def watch(self, besides=()):
        if any(
            other.run not in (self.me.run, *besides)
            for other in lease.lease_holders(self.directory)
        ):
            raise LeaseHeldError("somebody")
        return []

    monkeypatch.setattr(lease_acquisition._Others, "watch", watch)
    assert "stuck" in found("snapshot", 10)


@pytest.mark.parametrize(
    ("name", "fmt"), [("conversion", "iteration"), ("conversion of files", "ckpt")]
)
def test_a_conversion_without_a_read_lock_is_found(name, fmt, monkeypatch):
    class Nothing:
        def release(self):
            pass

    monkeypatch.setattr(open_checkpoint, "acquire_read_lock", lambda *_, **__: Nothing())
    assert "wrong" in found(name, 120, fmt)


def test_a_verify_that_lists_only_once_is_found(monkeypatch):
    monkeypatch.setattr("mindresume.resume.candidates._MAX_LISTINGS", 0)
    assert "wrong" in found("verify", 30)


def test_a_scrub_that_locks_nothing_and_does_not_look_again_is_found(monkeypatch):
    """Each of the two alone is enough: with the lock nothing is removed, and without it a look at
    the end tells."""

    class Unlocked:
        run = "0000-00000000"

        def release(self):
            pass

    monkeypatch.setattr(scrub, "acquire_read_lock", lambda *_, **__: Unlocked())
    monkeypatch.setattr(scrub.Scrubber, "other_scrub", lambda *_: None)
    assert "wrong" not in found("scrub", 10)
    mutate(
        monkeypatch,
        [
            Edit(
                scrub.Scrubber,
                "_is_removed",
                "self.directory.storage.status(candidate.commit_dir) is None",
                "False",
            )
        ],
    )
    assert "wrong" in found("scrub", 30)


def test_a_retention_that_passes_over_the_locks_of_scrubs_is_found(monkeypatch):
    mutate(
        monkeypatch,
        [
            Edit(
                lease.ReadLocks,
                "__call__",
                "holder.purpose != REMOVING",
                'holder.purpose == "loading"',
            ),
            Edit(
                scrub.Scrubber,
                "_is_removed",
                "self.directory.storage.status(candidate.commit_dir) is None",
                "False",
            ),
        ],
    )
    assert "wrong" in found("scrub", 30)


def test_a_fresh_start_beside_an_unreadable_bucket_is_found(monkeypatch):
    def kinds():
        sim = simulated("bucket unreadable")
        bucket = sim.cluster.disks[BUCKET]
        bucket.unreadable |= {url for url in bucket.objects if url.endswith("manifest.json")}
        return kinds_of(sim)

    assert kinds() == set()
    monkeypatch.setattr(BucketSource, "allow", lambda self, choice: choice)
    assert kinds() == {"wrong"}


def test_a_store_that_is_not_searched_for_older_ones_is_found(monkeypatch):
    monkeypatch.setattr(
        BucketSource,
        "_refuse",
        lambda self, attempt, reason: self._tried.update(self.remote.scan().committed()),
    )
    assert found("bucket unreadable", 60)


def test_a_bucket_that_loses_its_last_healthy_checkpoint_is_found(monkeypatch):
    right = remote_checkpoints.candidate_of

    def healthy(manifest):
        return right(replace(manifest, state=replace(manifest.state, health=0)))

    monkeypatch.setattr(remote_checkpoints, "candidate_of", healthy)
    assert "lost" in kinds_of(simulated("bucket health"))


def test_an_unhealthy_checkpoint_selected_from_a_bucket_is_found(monkeypatch):
    monkeypatch.setattr(eligible, "is_unhealthy", lambda *_: False)
    assert kinds_of(simulated("bucket health")) & {"inconsistent", "wrong"}
