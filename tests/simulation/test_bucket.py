"""An object store as pods see it, and jobs that lose their disks beside it."""

from dataclasses import replace
from itertools import product

import pytest
from simulation.test_search import found

from mindresume.fault_injection.faults import Fault
from mindresume.saving import save_session
from mindresume.saving.remote_checkpoints import RemoteCheckpoints
from mindresume.saving.upload import Uploader, UploadQueue
from sim.bucket import BUCKET, Bucket, PodStore
from sim.bucket_oracle import check_bucket
from sim.cluster import Cluster, current_cluster
from sim.disk import Disk
from sim.machine import use_cluster
from sim.mount import Mount
from sim.scenarios import Simulation
from sim.schedule import Schedule
from sim.search import (
    SCENARIOS,
)
from sim.workloads import LATER_IN_PODS as LATER

NAMES = ("bucket", "bucket nodes", "bucket slow", "bucket archived", "two pods", "bucket afresh")


def in_pod(work, schedule=None, bucket=None):
    """Returns what ``work(store, disk)`` returns or raises in the only process of a pod."""
    cluster = Cluster(
        schedule or Schedule(), {"node0": Disk(local=True), BUCKET: bucket or Bucket()}
    )
    found = []
    with use_cluster(cluster):
        host = cluster.host()

        def run():
            try:
                found.append(work(PodStore(cluster, process), Mount(cluster, process)))
            except Exception as error:
                found.append(error)

        process = cluster.process(host, "pod", run)
        cluster.scheduler.run()
    return found[0]


def test_listings_lag_and_urls_do_not():
    def work(store, disk):
        moments = []
        for name in "abcd":
            store.put(f"obs://b/{name}", b"bytes")
            moments.append((store.size(f"obs://b/{name}"), store.list("obs://b")))
        current_cluster().scheduler.sleep(6.0)
        found = [store.list("obs://b")]
        store.delete("obs://b/a")
        found += [store.size("obs://b/a"), store.list("obs://b")]
        current_cluster().scheduler.sleep(6.0)
        return moments, [*found, store.list("obs://b")]

    moments, found = in_pod(work, Schedule(lag=60.0))
    assert moments == [(5, [])] * 4
    assert found == [["a", "b", "c", "d"], None, ["a", "b", "c", "d"], ["b", "c", "d"]]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_fault_the_last_step_is_uploaded(name, soak):
    """Covers each format and each way; with --soak each format in each way."""
    scenario = SCENARIOS[name]
    formats, ways = scenario.formats, scenario.ways
    # so that the scenarios together have other pairs
    first = NAMES.index(name)
    some = [
        (formats[i % len(formats)], ways[(i + first) % len(ways)])
        for i in range(max(len(formats), len(ways)))
    ]
    for fmt, way in product(formats, ways) if soak else some:
        sim = Simulation(scenario, fmt, Schedule(), way).run()
        assert not sim.findings()
        assert max(step for _, step in sim.history.uploaded) == scenario.training.steps


@pytest.mark.parametrize("seed", range(len(LATER)))
def test_one_of_two_pods_is_superseded_and_both_end_without_findings(seed):
    sim = Simulation(SCENARIOS["two pods"], "ckpt", Schedule(seed=seed)).run()
    stopped = [
        [process.own.uploader.queue.stopped or "" for process in job.ranks] for job in sim.jobs
    ]
    assert sorted("taken over" in rows[0] for rows in stopped) == [False, True]
    assert not sim.findings() and not any(process.exit for job in sim.jobs for process in job.ranks)


@pytest.mark.parametrize("way", ["manifest", "weights", "changed", "leftover"])
def test_the_oracle_sees_what_is_wrong(way, monkeypatch):
    sim = Simulation(SCENARIOS["bucket"], "ckpt", Schedule()).run()
    bucket = sim.cluster.disks[BUCKET]
    weights = next(url for url in bucket.objects if url.endswith(".ckpt"))
    if way == "manifest":
        bucket.delete(next(url for url in bucket.objects if url.endswith("manifest.json")))
    elif way == "weights":
        bucket.delete(weights)
    elif way == "changed":
        bucket.put(weights, bucket.objects[weights].data[:-1] + b"?")
    else:
        monkeypatch.setattr(RemoteCheckpoints, "prune", lambda *_: [])
    kinds = {finding.kind for finding in check_bucket(sim.cluster.disks, sim.history, sim.training)}
    assert kinds == {
        {"manifest": "lost", "weights": "wrong", "changed": "wrong", "leftover": "leftover"}[way]
    }


def test_a_superseded_rank_0_notifies_its_ranks(monkeypatch):
    """The other job is killed before it uploads anything, so it removes nothing."""

    def findings(schedule):
        sim = Simulation(SCENARIOS["two pods"], "ckpt", schedule)
        sim.cluster.trace.wanted = True
        return sim.run().cluster.trace.rows, [finding.kind for finding in sim.findings()]

    rows, _ = findings(Schedule(seed=2))
    at = next(
        number
        for number, process, name, path in rows
        if (process, name) == ("job1.0", "write") and "_4.ckpt" in path
    )
    schedule = Schedule(seed=2, faults=(Fault(at, "kill host"),))
    assert findings(schedule)[1] == []
    end = Uploader._end

    def silent(uploader):
        if uploader.uploads.target.rank == 0 and uploader.queue.stopped:
            uploader.queue.finished = True
            return None
        return end(uploader)

    monkeypatch.setattr(Uploader, "_end", silent)
    assert findings(schedule)[1] == ["misreported"]


def test_a_run_that_is_numbered_without_looking_into_the_bucket_is_found(monkeypatch):
    monkeypatch.setattr(save_session, "number_runs", lambda *_: None)
    assert next(found((0, 30), "bucket nodes", deaths=False), None)


@pytest.mark.parametrize("way", ["", "thread"])
def test_uploads_of_steps_that_the_nodes_do_not_keep_are_found(way, monkeypatch):
    """Breaks the rule that a rank keeps the save that is uploaded next."""
    start = Uploader.start

    def unbound(uploader):
        uploader.uploads = replace(uploader.uploads, only_scheduled=False)
        return start(uploader)

    monkeypatch.setattr(Uploader, "start", unbound)
    monkeypatch.setattr(UploadQueue, "schedule", lambda queue, name: None)
    assert "lost" in {
        finding.kind
        for finding in Simulation(SCENARIOS["bucket slow"], "ckpt", Schedule(), way)
        .run()
        .findings()
    }
