"""Scenarios with a bucket that is only partly usable: unreadable objects, and unhealthy checkpoints."""
from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mindresume.fault_injection.tiny_checkpoints import Saved
from mindresume.model.manifest import MANIFEST, Manifest, attempts, record_name, run_sequence
from mindresume.saving.remote_checkpoints import record_path
from sim.bucket import BUCKET, Bucket
from sim.bucket_scenarios import SCENARIOS, URL, _pods
from sim.disk import Disk
from sim.jobs import History, Training, save_order
from sim.oracle import LOST, WRONG, Finding, restart_and_check
from sim.scenarios import Scenario
from sim.schedule import KINDS, OUTAGE, UNREADABLE

EXPECTED_ERRORS = ("NoUsableCheckpointError", "RemoteError")  # errors that name the checkpoints and why they are refused


def check_faulty_bucket(disks: Mapping[str, Disk], history: History, training: Training, restart: bool = True) -> list[Finding]:
    """Checks that the same command on empty disks takes the newest checkpoint in the bucket that is healthy and entirely
    readable. If all others are not, it must end with an error that says so instead of a fresh start. Changes ``disks``."""
    bucket = disks[BUCKET].copy()
    rows = list(_committed_checkpoints(bucket))                    # type: ignore[arg-type]
    findings = [Finding(WRONG, text) for text in history.wrong]
    for what, saved, there in (
            ("", history.uploaded, [saved for saved, *_ in rows]),
            ("healthy ", {saved for saved in history.uploaded if saved[1] not in history.unhealthy},
             [saved for saved, healthy, _ in rows if healthy])):
        required, newest = max(saved, key=save_order, default=None), max(there, key=save_order, default=None)
        if required is not None and (newest is None or save_order(newest) < save_order(required)):
            findings.append(Finding(LOST, f"the newest {what}checkpoint in the bucket is {newest}, though rank 0 was told that "
                                          f"{required} is uploaded"))
    if not restart or findings:
        return findings
    expected = next((saved for saved, healthy, readable in rows if healthy and readable), None)
    empty = {f"node{node}": Disk(local=True) for node in range(training.hosts)}
    found = restart_and_check({**empty, BUCKET: bucket}, replace(training, unhealthy=()), expected, expected,
                  max((step for _, step in history.began), default=0), False)
    if rows and expected is None:
        if not any(name in finding.text for finding in found for name in EXPECTED_ERRORS):
            findings.append(Finding(WRONG, f"none of {[saved for saved, *_ in rows]} can be taken, and the job reports no error: "
                                           f"{'; '.join(map(str, found)) or 'it starts fresh'}"))
        return findings
    return [*findings, *found]


def _committed_checkpoints(bucket: Bucket) -> Iterator[tuple[Saved, bool, bool]]:
    """Yields ((run, step), is healthy, is readable) for all checkpoints with a manifest, newest first."""
    names = {name.partition("/")[0] for name in bucket.list(URL)}
    for name, step, run in sorted(attempts(sorted(names)), key=lambda row: (run_sequence(row[2]), row[1]), reverse=True):
        path = f"{URL}/{name}/{record_path(name, MANIFEST)}"
        if path not in bucket.objects:
            continue
        manifest = Manifest.read(io.BytesIO(bucket.objects[path].data))
        paths = [file.path for files in manifest.files for file in files] + [file.path for file in manifest.metadata_files]
        paths += [record_path(name, record_name(rank)) for rank in range(manifest.world_size)]
        urls = {path, *(f"{URL}/{name}/{inner}" for inner in paths)}
        yield (run, step), not manifest.state.health, not urls & bucket.unreadable


SCENARIOS.update({scenario.name: scenario for scenario in (
    Scenario("bucket unreadable", "objects of the bucket become unreadable", _pods, Training(steps=8, keep=2, url=URL),
             Training(steps=2, url=URL), kinds=(*KINDS, OUTAGE, *(UNREADABLE,) * 10), oracle=check_faulty_bucket),
    Scenario("bucket health", "the last checkpoints in the bucket are unhealthy", _pods,
             Training(steps=8, keep=1, url=URL, health_monitored=True, unhealthy=(6, 8)),
             Training(steps=2, url=URL, health_monitored=True), kinds=(*KINDS, OUTAGE, OUTAGE), oracle=check_faulty_bucket),
)})
