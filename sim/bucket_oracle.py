"""The invariants of an object store after a schedule, when the pods and their disks are gone.

    check_bucket(disks, history, training)      # findings, of the kinds of ``oracle``

The same command starts again, without faults, on empty disks beside the same bucket; and, where the
schedule had one set of nodes only, on their disks as they are. It must take nothing older than the
last save that rank 0 was told is uploaded and the newest manifest in the bucket, bit for bit;
upload its last step; and leave nothing else but checkpoints of other trainings.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mindresume.errors import MindResumeError
from mindresume.fault_injection.journal import Saved, save_order
from mindresume.model.manifest import (
    MANIFEST,
    Manifest,
    attempts,
    parse_attempt,
    record_name,
    run_sequence,
)
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, record_path
from mindresume.tensor_files import file_checksum
from sim.bucket import BUCKET, Bucket, PodStore
from sim.cluster import Cluster
from sim.disk import Disk
from sim.jobs import History, Training
from sim.oracle import (
    LEFTOVER,
    LOST,
    STUCK,
    UNKNOWN,
    WRONG,
    Finding,
    restart_and_check,
    run_alone,
)

# errors that name the checkpoints and why they are refused
EXPECTED_ERRORS = ("NoUsableCheckpointError", "RemoteError")


def check_bucket(
    disks: Mapping[str, Disk], history: History, training: Training, restart: bool = True
) -> list[Finding]:
    """Returns the violations. Changes ``disks``. ``restart`` False: looks at the bucket and starts
    nothing."""
    # the copy is inspected much later: its listings do not lag
    disks = {**disks, BUCKET: disks[BUCKET].copy()}
    findings = [Finding(WRONG, text) for text in history.wrong]
    newest = inspect_bucket(disks, training, findings)
    uploaded = max(history.uploaded, key=save_order, default=None)
    if uploaded is not None and (newest is None or save_order(newest) < save_order(uploaded)):
        findings.append(
            Finding(
                LOST,
                f"the bucket holds {newest}, though rank 0 was told that {uploaded} is uploaded",
            )
        )
    findings += _check_protected(disks, history, training)
    if not restart or findings:
        return findings
    nodes = [name for name in disks if name != BUCKET]
    empty = {f"node{node}": Disk(local=True) for node in range(training.hosts)}
    findings += _restart(
        {**empty, BUCKET: disks[BUCKET].copy()}, history, training, newest, "on empty disks"
    )
    if len(nodes) == training.hosts:
        required = max(
            (saved for saved in (newest, history.newest()) if saved), key=save_order, default=None
        )
        findings += _restart(disks, history, training, required, "on the same disks")
    return findings


def _restart(
    disks: Mapping[str, Disk],
    history: History,
    training: Training,
    required: Saved | None,
    where: str,
) -> list[Finding]:
    """Runs the same command once more. It must resume from ``required`` or something newer."""
    last = max((step for _, step in history.began), default=0)
    found = restart_and_check(disks, training, required, UNKNOWN, last, False)
    if not found:
        newest = inspect_bucket(disks, training, found)
        step = (last // training.every + 1) * training.every
        if newest is None or newest[1] != step:
            found.append(
                Finding(LOST, f"after the next run the bucket holds {newest}, not its step {step}")
            )
        else:
            found += _check_leftovers(disks, history, training, newest)
    return [Finding(finding.kind, f"{where}: {finding.text}") for finding in found]


def manifest_url(training: Training, name: str) -> str:
    return f"{training.url}/{name}/{record_path(name, MANIFEST)}"


def inspect_bucket(
    disks: Mapping[str, Disk], training: Training, findings: list[Finding]
) -> Saved | None:
    """Returns the newest checkpoint in the bucket whose manifest can be read, and adds what is
    wrong with it to ``findings``."""
    newest: list[Saved] = []

    def work(cluster: Cluster) -> None:
        store = PodStore(cluster, cluster.processes[0])
        remote = RemoteCheckpoints(store, training.url)
        readable = [
            name
            for name in remote.scan().committed()
            if manifest_url(training, name) not in store.bucket.unreadable
        ]
        for name in readable[:1]:
            manifest, _ = remote.manifest(name)
            newest.append((manifest.run, manifest.state.step))
            for file in [
                *(file for files in manifest.files for file in files),
                *manifest.metadata_files,
            ]:
                found = store.bucket.objects.get(f"{training.url}/{name}/{file.path}")
                if found is None or file_checksum(io.BytesIO(found.data))[0] != file.checksum:
                    findings.append(
                        Finding(
                            WRONG,
                            f"{name} has a manifest, but for {file.path} the bucket holds "
                            f"{'nothing' if found is None else 'other bytes'}",
                        )
                    )

    error = run_alone(disks, work).processes[0].error
    if error is not None:
        findings.append(
            Finding(
                WRONG if isinstance(error, MindResumeError) else STUCK,
                f"inspecting the bucket: {type(error).__name__}: {error}",
            )
        )
    return newest[0] if newest else None


def _check_protected(
    disks: Mapping[str, Disk], history: History, training: Training
) -> list[Finding]:
    """Checks that checkpoints of another training are there, unless a job has resumed from them, so
    that they became its own."""
    if not set(history.chosen.values()).isdisjoint(history.protected):
        return []
    boxes = _objects_by_save(disks, training)
    return [
        Finding(
            LOST,
            f"step {step} of run {run}, which belongs to another training, was removed from the "
            "bucket",
        )
        for run, step in history.protected
        if (run, step) not in boxes
    ]


def _objects_by_save(disks: Mapping[str, Disk], training: Training) -> dict[Saved, list[str]]:
    """Returns (run, step) -> names of the objects of that attempt."""
    found: dict[Saved, list[str]] = {}
    for name in disks[BUCKET].list(training.url):  # type: ignore[attr-defined]
        commit_dir, _, path = name.partition("/")
        if path and (parsed := parse_attempt(commit_dir)):
            found.setdefault((parsed[1], parsed[0]), []).append(name)
    return found


def _check_leftovers(
    disks: Mapping[str, Disk], history: History, training: Training, newest: Saved
) -> list[Finding]:
    """Checks that after the next run, which keeps one checkpoint, the bucket holds its last step,
    its run marker, and nothing else."""
    left = [
        name
        for saved, names in _objects_by_save(disks, training).items()
        if saved != newest and saved not in history.protected
        for name in names
    ]
    left += [
        name
        for name in disks[BUCKET].list(training.url)
        if "/" not in name and name != f"run-{newest[0]}.json"
    ]
    return [Finding(LEFTOVER, f"in the bucket: {', '.join(left)}")] if left else []


# ---- a bucket that is only partly usable ---------------------------------------------------------


def check_faulty_bucket(
    disks: Mapping[str, Disk], history: History, training: Training, restart: bool = True
) -> list[Finding]:
    """Checks that the same command on empty disks takes the newest checkpoint in the bucket that is
    healthy and entirely readable. If all others are not, it must end with an error that says so
    instead of a fresh start. Changes ``disks``."""
    bucket = disks[BUCKET].copy()
    rows = list(_committed_checkpoints(bucket, training.url))  # type: ignore[arg-type]
    findings = [Finding(WRONG, text) for text in history.wrong]
    for what, saved, there in (
        ("", history.uploaded, [saved for saved, *_ in rows]),
        (
            "healthy ",
            {saved for saved in history.uploaded if saved[1] not in history.unhealthy},
            [saved for saved, healthy, _ in rows if healthy],
        ),
    ):
        required = max(saved, key=save_order, default=None)
        newest = max(there, key=save_order, default=None)
        if required is not None and (newest is None or save_order(newest) < save_order(required)):
            findings.append(
                Finding(
                    LOST,
                    f"the newest {what}checkpoint in the bucket is {newest}, though rank 0 was "
                    f"told that {required} is uploaded",
                )
            )
    if not restart or findings:
        return findings
    expected = next((saved for saved, healthy, readable in rows if healthy and readable), None)
    empty = {f"node{node}": Disk(local=True) for node in range(training.hosts)}
    found = restart_and_check(
        {**empty, BUCKET: bucket},
        replace(training, unhealthy=()),
        expected,
        expected,
        max((step for _, step in history.began), default=0),
        False,
    )
    if rows and expected is None:
        if not any(name in finding.text for finding in found for name in EXPECTED_ERRORS):
            findings.append(
                Finding(
                    WRONG,
                    f"none of {[saved for saved, *_ in rows]} can be taken, and the job reports no "
                    f"error: {'; '.join(map(str, found)) or 'it starts fresh'}",
                )
            )
        return findings
    return [*findings, *found]


def _committed_checkpoints(bucket: Bucket, url: str) -> Iterator[tuple[Saved, bool, bool]]:
    """Yields ((run, step), is healthy, is readable) for all checkpoints with a manifest, newest
    first."""
    names = {name.partition("/")[0] for name in bucket.list(url)}
    for name, step, run in sorted(
        attempts(sorted(names)), key=lambda row: (run_sequence(row[2]), row[1]), reverse=True
    ):
        path = f"{url}/{name}/{record_path(name, MANIFEST)}"
        if path not in bucket.objects:
            continue
        manifest = Manifest.read(io.BytesIO(bucket.objects[path].data))
        paths = [file.path for files in manifest.files for file in files] + [
            file.path for file in manifest.metadata_files
        ]
        paths += [record_path(name, record_name(rank)) for rank in range(manifest.world_size)]
        urls = {path, *(f"{url}/{name}/{inner}" for inner in paths)}
        yield (run, step), not manifest.state.health, not urls & bucket.unreadable
