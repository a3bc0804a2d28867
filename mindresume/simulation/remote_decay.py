"""Buckets of which not everything can be taken: objects that cannot be read any more, and checkpoints that are not healthy."""
from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mindresume.model.manifest import MANIFEST, Manifest, attempts, record_name, run_sequence
from mindresume.saving.remote_checkpoints import record_path
from mindresume.simulation.bucket import BUCKET, Bucket
from mindresume.simulation.disk import Disk
from mindresume.simulation.jobs import History, Saved, Training, newer
from mindresume.simulation.oracle import LOST, WRONG, Finding, _live
from mindresume.simulation.remote_scenarios import SCENARIOS, URL, _pods
from mindresume.simulation.scenarios import Scenario
from mindresume.simulation.schedule import KINDS, OUTAGE, UNREADABLE

CLEAR = ("NoUsableCheckpointError", "RemoteError")          # errors that say what is there and why it is not taken


def judge_decayed(disks: Mapping[str, Disk], history: History, training: Training, live: bool = True) -> list[Finding]:
    """The same command on empty disks takes the newest checkpoint in the bucket that is healthy and of which every object can be
    read; if there are only others, it ends with an error that says so, and nothing begins afresh. ``disks`` are changed."""
    bucket = disks[BUCKET].copy()
    rows = list(_committed(bucket))                             # type: ignore[arg-type]
    findings = [Finding(WRONG, text) for text in history.wrong]
    for what, saved, there in (
            ("", history.uploaded, [saved for saved, *_ in rows]),
            ("healthy ", {saved for saved in history.uploaded if saved[1] not in history.sick},
             [saved for saved, healthy, _ in rows if healthy])):
        least, newest = max(saved, key=newer, default=None), max(there, key=newer, default=None)
        if least is not None and (newest is None or newer(newest) < newer(least)):
            findings.append(Finding(LOST, f"the newest {what}checkpoint in the bucket is {newest}, though rank 0 was told that "
                                          f"{least} is uploaded"))
    if not live or findings:
        return findings
    expected = next((saved for saved, healthy, readable in rows if healthy and readable), None)
    empty = {f"node{node}": Disk(local=True) for node in range(training.hosts)}
    found = _live({**empty, BUCKET: bucket}, replace(training, sick=()), expected, expected,
                  max((step for _, step in history.began), default=0), False)
    if rows and expected is None:
        if not any(name in finding.text for finding in found for name in CLEAR):
            findings.append(Finding(WRONG, f"of {[saved for saved, *_ in rows]} none can be taken, and the job does not say so: "
                                           f"{'; '.join(map(str, found)) or 'it begins afresh'}"))
        return findings
    return [*findings, *found]


def _committed(bucket: Bucket) -> Iterator[tuple[Saved, bool, bool]]:
    """((run, step), whether it is healthy, whether all of it can be read) of all checkpoints with a manifest, newest first."""
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
    Scenario("bucket unreadable", "objects of the bucket cannot be read any more", _pods, Training(steps=8, keep=2, url=URL),
             Training(steps=2, url=URL), kinds=(*KINDS, OUTAGE, *(UNREADABLE,) * 10), judges=judge_decayed),
    Scenario("bucket health", "the last checkpoints in the bucket are not healthy", _pods,
             Training(steps=8, keep=1, url=URL, monitored=True, sick=(6, 8)), Training(steps=2, url=URL, monitored=True),
             kinds=(*KINDS, OUTAGE, OUTAGE), judges=judge_decayed),
)})
