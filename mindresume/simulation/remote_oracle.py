"""What must hold of an object store after a schedule, when the pods and their disks are gone.

    judge_bucket(disks, history, training)      # findings, of the kinds of ``oracle``

The same command starts again, undisturbed, on empty disks beside the same bucket; and, where the schedule had one set of nodes
only, on their disks as they are. It takes nothing older than what rank 0 was told is uploaded, and than the
newest manifest in the bucket, bit for bit; uploads its last step; and leaves nothing else behind but checkpoints of other
trainings.
"""
from __future__ import annotations

import io
from collections.abc import Mapping

from mindresume.errors import MindResumeError
from mindresume.model.manifest import MANIFEST, parse_attempt
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, record_path
from mindresume.simulation.bucket import BUCKET, PodStore
from mindresume.simulation.cluster import Cluster
from mindresume.simulation.disk import Disk
from mindresume.simulation.jobs import History, Saved, Training
from mindresume.simulation.oracle import LOST, STUCK, UNKNOWN, UNTIDY, WRONG, Finding, _alone, _live, due, newer
from mindresume.tensor_files.checksum import file_checksum


def judge_bucket(disks: Mapping[str, Disk], history: History, training: Training, live: bool = True) -> list[Finding]:
    """``disks`` are changed. ``live`` False: the bucket is looked at, and nothing starts."""
    disks = {**disks, BUCKET: disks[BUCKET].copy()}         # hours later no listing lags behind
    findings = [Finding(WRONG, text) for text in history.wrong]
    newest = look(disks, training, findings)
    uploaded = max(history.uploaded, key=newer, default=None)
    if uploaded is not None and (newest is None or newer(newest) < newer(uploaded)):
        findings.append(Finding(LOST, f"the bucket holds {newest}, though rank 0 was told that {uploaded} is uploaded"))
    findings += _kept(disks, history, training)
    if not live or findings:
        return findings
    nodes = [name for name in disks if name != BUCKET]
    empty = {f"node{node}": Disk(local=True) for node in range(training.hosts)}
    findings += _again({**empty, BUCKET: disks[BUCKET].copy()}, history, training, newest, "on empty disks")
    if len(nodes) == training.hosts:
        least = max((saved for saved in (newest, due(history)) if saved), key=newer, default=None)
        findings += _again(disks, history, training, least, "on the same disks")
    return findings


def _again(disks: Mapping[str, Disk], history: History, training: Training, least: Saved | None, where: str) -> list[Finding]:
    """The same command once more. ``least``: what it must take, or something newer."""
    last = max((step for _, step in history.began), default=0)
    found = _live(disks, training, least, UNKNOWN, last, False)
    if not found:
        newest = look(disks, training, found)
        step = (last // training.every + 1) * training.every
        if newest is None or newest[1] != step:
            found.append(Finding(LOST, f"after the next life the bucket holds {newest}, not its step {step}"))
        else:
            found += _tidied(disks, history, training, newest)
    return [Finding(finding.kind, f"{where}: {finding.text}") for finding in found]


def manifest_url(training: Training, name: str) -> str:
    return f"{training.url}/{name}/{record_path(name, MANIFEST)}"


def look(disks: Mapping[str, Disk], training: Training, findings: list[Finding]) -> Saved | None:
    """Returns the newest checkpoint in the bucket whose manifest can be read. What is wrong with it is added to ``findings``."""
    newest: list[Saved] = []

    def work(cluster: Cluster) -> None:
        store = PodStore(cluster, cluster.processes[0])
        remote = RemoteCheckpoints(store, training.url)
        readable = [name for name in remote.scan().committed() if manifest_url(training, name) not in store.bucket.unreadable]
        for name in readable[:1]:
            manifest, _ = remote.manifest(name)
            newest.append((manifest.run, manifest.step))
            for file in [*(file for files in manifest.files for file in files), *manifest.metadata_files]:
                found = store.bucket.objects.get(f"{training.url}/{name}/{file.path}")
                if found is None or file_checksum(io.BytesIO(found.data))[0] != file.checksum:
                    findings.append(Finding(WRONG, f"{name} has a manifest, and of {file.path} the bucket holds "
                                                   f"{'nothing' if found is None else 'other bytes'}"))
    error = _alone(disks, work).processes[0].error
    if error is not None:
        findings.append(Finding(WRONG if isinstance(error, MindResumeError) else STUCK,
                                f"looking into the bucket: {type(error).__name__}: {error}"))
    return newest[0] if newest else None


def _kept(disks: Mapping[str, Disk], history: History, training: Training) -> list[Finding]:
    """Checkpoints of another training are never removed; unless a job has gone on from them, so that they are of its own."""
    if not set(history.chosen.values()).isdisjoint(history.protected):
        return []
    boxes = _boxes(disks, training)
    return [Finding(LOST, f"step {step} of run {run}, which is of another training, was removed from the bucket")
            for run, step in history.protected if (run, step) not in boxes]


def _boxes(disks: Mapping[str, Disk], training: Training) -> dict[Saved, list[str]]:
    """{(run, step): names of the objects of that attempt}."""
    found: dict[Saved, list[str]] = {}
    for name in disks[BUCKET].list(training.url):           # type: ignore[attr-defined]
        commit_dir, _, path = name.partition("/")
        if path and (parsed := parse_attempt(commit_dir)):
            found.setdefault((parsed[1], parsed[0]), []).append(name)
    return found


def _tidied(disks: Mapping[str, Disk], history: History, training: Training, newest: Saved) -> list[Finding]:
    """After the next life, which keeps one: its last step is in the bucket, its mark, and nothing else."""
    left = [name for saved, names in _boxes(disks, training).items() if saved != newest and saved not in history.protected
            for name in names]
    left += [name for name in disks[BUCKET].list(training.url) if "/" not in name and name != f"run-{newest[0]}.json"]
    return [Finding(UNTIDY, f"in the bucket: {', '.join(left)}")] if left else []
