"""What must hold of the disks after a schedule, whatever happened.

    judge(disks, history, training)             # findings; none: all is well

It looks at the disks as a person would (``survey``, ``select``), then lets the same command start again, undisturbed, and looks
at what that did. Each finding names the promise that was broken:

    wrong     what was taken is not, bit for bit, what was saved; or two lives were mixed
    lost      something older was taken, or nothing, though all ranks had been told that it is saved; or it was removed
    stuck     the job does not start, or a rank waits for ever
    untidy    files of no checkpoint stay after the next save
    told      a rank was told that a save failed, and it is there
    unequal   people and the job are given different answers
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.common_checkpoint import COMMON
from mindresume.errors import MindResumeError
from mindresume.formats import Candidate
from mindresume.formats.iteration_naming import TRACKER, iteration_name
from mindresume.formats.iteration_scan import tracked
from mindresume.formats.rank_folder_naming import META, folder_name, folder_rank
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, attempts, parse_attempt
from mindresume.resume.checkpoint_warnings import damaged_metadata_files
from mindresume.resume.listing import COMPLETE, list_checkpoints
from mindresume.resume.missing_ranks import unknown_strategy
from mindresume.resume.selection_policy import SelectionPolicy, every_rank
from mindresume.resume.shared_selection import select_shared
from mindresume.saving.crash_loop import load_attempts
from mindresume.simulation.cluster import Cluster
from mindresume.simulation.disk import Disk
from mindresume.simulation.jobs import ITERATION, History, Job, Saved, Training, due, newer, wrong_content
from mindresume.simulation.mount import Mount
from mindresume.simulation.schedule import Schedule
from mindresume.simulation.scheduler import Stuck, TooLong
from mindresume.simulation.standins import standing_in
from mindresume.storage.operations import read_json

UNKNOWN = "?"
WRONG, LOST, STUCK, UNTIDY, TOLD, UNEQUAL = "wrong", "lost", "stuck", "untidy", "told", "unequal"


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def judge(disks: Mapping[str, Disk], history: History, training: Training, live: bool = True) -> list[Finding]:
    """``disks`` are changed: the next life of the job saves there. ``live`` False: there is none, people look, and no more."""
    least = due(history)
    findings = [Finding(WRONG, text) for text in history.wrong]
    findings += [Finding(LOST, text) for text in history.older]
    findings += [Finding(STUCK, text) for text in history.expelled]
    looked: Saved | None | str = UNKNOWN
    if not training.apart:
        looked, more = _look(disks, history, training)
        findings += more
    else:
        findings += _look_apart(disks, history, training)
    findings += _kept(disks, history, training)
    older = _older(least, looked, "which") if not training.apart else []
    findings += older
    if not live and not training.apart:
        return findings
    last = max((step for _, step in history.began), default=0)
    findings += _live(disks, training, None if older else least, looked, last, not training.fresh and not older)
    return findings


def _kept(disks: Mapping[str, Disk], history: History, training: Training) -> Iterator[Finding]:
    """Checkpoints of another training are never removed."""
    present = {name for disk in disks.values() for path, _ in disk.walk(training.root) for name in path.split("/")}
    for run, step in history.protected:
        if attempt_name(step, run) not in present:
            yield Finding(LOST, f"step {step} of run {run}, which is of another training, was removed")


def _alone(disks: Mapping[str, Disk], work: Callable[[Cluster], None], node: int = 0) -> Cluster:
    """One process on a host that has seen nothing yet. ``node``: whose disk it has, where hosts share none."""
    cluster = Cluster(Schedule(), disks)
    with standing_in(cluster):
        cluster.process(cluster.host("looker", node), "looker", lambda: work(cluster))
        cluster.scheduler.run()
    return cluster


def _look(disks: Mapping[str, Disk], history: History, training: Training
          ) -> tuple[Saved | None, list[Finding]]:
    """What a person is told. Returns what a resume would take, as ``which`` says."""
    findings: list[Finding] = []
    told: list[Saved | None] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        try:
            ranks = None if training.converts else training.ranks
            policy = SelectionPolicy(ranks, ranks_to_verify=every_rank, unhealthy=frozenset() if training.monitored else None,
                                     max_failed_loads=training.settings.max_failed_loads)
            choice = select_shared(storage, training.root, SingleProcess(), policy)
            rows = list_checkpoints(storage, training.root, unknown_strategy, ranks)[1]
        except (MindResumeError, OSError) as error:
            findings.append(Finding(STUCK, f"which, ls: {type(error).__name__}: {error}"))
            return
        chosen = choice.chosen
        told.append((chosen.run or "", chosen.step or 0) if chosen is not None else None)
        if chosen is not None:
            findings.extend(Finding(WRONG, text) for text in wrong_content(storage, choice, list(range(chosen.world_size))))
            if chosen.run:                              # mindformers alone goes by what lies beside the weights
                findings.extend(Finding(WRONG, refusal.reason)
                                for refusal in damaged_metadata_files(storage, training.root, chosen))
            rows = [row for row in rows if row.state == COMPLETE and not (training.monitored and row.candidate.health)]
            first = next(iter(rows), None)
            if first is None or (first.candidate.run, first.candidate.step) != told[0]:
                findings.append(Finding(UNEQUAL, f"which says {told[0]}, ls {first and first.candidate.name}"))
        candidates = scan_records(storage, training.root)[0]
        findings.extend(_committed(candidates, history))
        findings.extend(_enough(candidates, history, training) if not training.pruned else ())
        findings.extend(_suspected(storage, history, training))
        findings.extend(_pointers(storage, training))
    cluster = _alone(disks, work)
    error = cluster.processes[0].error
    if error is not None:
        findings.append(Finding(STUCK, f"looking: {type(error).__name__}: {error}"))
    return told[0] if told else None, findings


def _look_apart(disks: Mapping[str, Disk], history: History, training: Training) -> list[Finding]:
    """What the disk of each node says, where hosts share none."""
    findings: list[Finding] = []
    for node in range(training.hosts):
        cluster = _alone(disks, lambda cluster: findings.extend(
            _committed(scan_records(Mount(cluster, cluster.processes[0]), training.root)[0], history)), node)
        error = cluster.processes[0].error
        if error is not None:
            findings.append(Finding(STUCK, f"looking at node {node}: {type(error).__name__}: {error}"))
    return findings


def _committed(candidates: Sequence[Candidate], history: History) -> Iterator[Finding]:
    for candidate in candidates:
        saved = (candidate.run or "", candidate.step or 0)
        for rank in candidate.local_ranks or range(candidate.world_size):
            text = history.failed.get((saved, rank))
            if candidate.committed and text is not None and " may not " not in text:
                yield Finding(TOLD, f"rank {rank} was told that {saved} failed, and it is committed: {text}")


def _enough(candidates: Sequence[Candidate], history: History, training: Training) -> Iterator[Finding]:
    """As many committed checkpoints stay as are to be kept. (What all ranks have saved, and rank 0 did not see in time, is given
    up behind a later commit: it counts as nothing.)"""
    there = {(c.run, c.step) for c in candidates}
    committed = [c for c in candidates if c.committed and (c.run, c.step) not in history.protected]
    gone = [saved for saved in history.complete() if saved not in there]
    if gone and len(committed) < training.keep:
        yield Finding(LOST, f"{max(gone, key=newer)} was removed, though {training.keep} are to be kept, and only "
                            f"{len(committed)} are committed")


def _suspected(storage: Mount, history: History, training: Training) -> Iterator[Finding]:
    """No checkpoint is suspected for the death of a job that had not begun its first step."""
    for key, deaths in load_attempts(storage, training.root).items():
        for death in deaths or ():
            if death.run not in history.tried:
                yield Finding(LOST, f"run {death.run} counts as died of {key}, and had not begun its first step")


def pointed(disks: Mapping[str, Disk], history: History, training: Training) -> list[Finding]:
    """After a run in which nothing struck: mindformers without us begins with the last save of a job that ended well."""
    findings: list[Finding] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        newest = next((c for c in scan_records(storage, training.root)[0] if c.committed), None)
        if newest is None or newest.run not in history.ended:
            return
        if training.format == ITERATION:
            told, wanted = (tracked(storage, training.root), newest.iteration_dir), (newest.step,
                iteration_name(newest.step or 0))
        else:
            meta = f"{training.root}/{folder_name(0)}/{META}"
            told, wanted = read_json(storage, meta)["last_ckpt_file"], os.path.basename(newest.all_files[0].path)
        if told != wanted:
            findings.append(Finding(LOST, f"{TRACKER if training.format == ITERATION else META} leads to {told}, not {wanted}, "
                                          f"though nothing was in the way of {newest.name}"))
    error = _alone(disks, work).processes[0].error
    if error is not None:
        findings.append(Finding(STUCK, f"looking where the pointers lead: {type(error).__name__}: {error}"))
    return findings


def _pointers(storage: Mount, training: Training) -> Iterator[Finding]:
    """What mindformers without us goes by must lead to files that are there."""
    root, files = training.root, []
    if training.format == ITERATION:
        step = tracked(storage, root)
        if step is not None:
            found = [c for c in scan_records(storage, root)[0] if c.iteration_dir == iteration_name(step)]
            files = [file.path for c in found for file in (*c.all_files, *c.metadata_files)] or [iteration_name(step)]
    else:
        meta = f"{root}/{folder_name(0)}/{META}"
        if storage.status(meta) is not None:
            files = [f"{folder_name(0)}/{read_json(storage, meta)['last_ckpt_file']}"]
    for file in files:
        if storage.status(f"{root}/{file}") is None:
            yield Finding(LOST, f"{TRACKER if training.format == ITERATION else META} leads to {file}, which is not there")


def _live(disks: Mapping[str, Disk], training: Training, least: Saved | None, looked: Saved | None | str, last: int,
          tidy: bool
          ) -> list[Finding]:
    """The same command once more, with nothing in its way; it keeps one checkpoint."""
    findings: list[Finding] = []
    history = History()
    cluster = Cluster(Schedule(), disks)
    cluster._pids, cluster._tokens = 10_000, 500_000            # names that were never used
    cluster.scheduler.now = 2 * 3600.0                          # what is cleared up by its age is old by then
    cluster.one_machine = True                                  # a dead reader on another one holds for minutes
    # Of nodes that share no disk it is not known here where the next life begins.
    start = last if looked == UNKNOWN else looked[1] if looked is not None else 0
    again = replace(training, steps=(start // training.every + 1) * training.every, keep=1, fresh=False, async_save=False,
                    rescue=False, sick=())
    with standing_in(cluster):
        hosts = [cluster.host(f"again{number}", number) for number in range(training.hosts)]
        job = Job(cluster, history, again, hosts, "again")
        launcher = job.start()
        try:
            cluster.scheduler.run()
        except (Stuck, TooLong) as error:
            return [Finding(STUCK, f"the next life: {type(error).__name__}: {error}")]
    for process in (*job.ranks, launcher):
        if process.exit or process.error is not None:
            findings.append(Finding(STUCK, f"the next life: {process.name} ended with {process.exit}: "
                                           f"{type(process.error).__name__}: {process.error}"))
            return findings
    findings += [Finding(WRONG, text) for text in history.wrong]
    (run, chosen), = history.chosen.items()
    if looked not in (UNKNOWN, chosen):
        findings.append(Finding(UNEQUAL, f"which says {looked}, the job takes {chosen}"))
    findings += _older(least, chosen, "the job")
    if tidy and not findings:
        newest = run, again.steps
        findings += _tidied_nodes(disks, again, newest, chosen) if training.apart else _tidied(disks, again, newest)
    return findings


def _older(least: Saved | None, chosen: Saved | None | str, who: str) -> list[Finding]:
    if least is None or (chosen is not None and (isinstance(chosen, str) or newer(chosen) >= newer(least))):
        return []
    return [Finding(LOST, f"{who} takes {chosen}, though all ranks were told that {least} is saved")]


def _tidied(disks: Mapping[str, Disk], training: Training, newest: Saved) -> list[Finding]:
    """After the next life: its last step is there, and nothing else."""
    findings: list[Finding] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        choice = select_shared(storage, training.root, SingleProcess(),
                               SelectionPolicy(training.ranks, ranks_to_verify=every_rank))
        chosen = choice.chosen
        if chosen is None or (chosen.run, chosen.step) != newest:
            findings.append(Finding(LOST, f"after the next life: {chosen and chosen.name} is taken, not {newest}"))
            return
        findings.extend(Finding(WRONG, text) for text in wrong_content(storage, choice, list(range(training.ranks))))
        left = left_over(storage, training, newest)
        if left:
            findings.append(Finding(UNTIDY, ", ".join(left)))
    cluster = _alone(disks, work)
    error = cluster.processes[0].error
    if error is not None:
        findings.append(Finding(STUCK, f"after the next life: {type(error).__name__}: {error}"))
    return findings


def _tidied_nodes(disks: Mapping[str, Disk], training: Training, newest: Saved, chosen: Saved | None) -> list[Finding]:
    """Nodes that share no disk also keep what they went on from and all that is newer: they may not have told each other yet that
    all have a newer one."""
    findings: list[Finding] = []
    for node in range(training.hosts):
        def work(cluster: Cluster, node: int = node) -> None:
            storage = Mount(cluster, cluster.processes[0])
            found = [c for c in scan_records(storage, training.root)[0] if (c.run, c.step) == newest and c.committed]
            if not found:
                findings.append(Finding(LOST, f"after the next life: {newest} is not on node {node}"))
            left = left_over(storage, training, newest, chosen or ("", 0))
            if left:
                findings.append(Finding(UNTIDY, f"node {node}: {', '.join(left)}"))
        _alone(disks, work, node)
    return findings


def is_rank_folder(name: str) -> bool:
    return folder_rank(name) is not None


def left_over(storage: Mount, training: Training, newest: Saved, chosen: Saved | None = None) -> list[str]:
    """Paths that belong to no checkpoint, or to one that should have gone. ``chosen``: where nodes share no disk, it and whatever
    is newer may stay."""
    root, (run, step) = training.root, newest
    candidates, known, _ = scan_records(storage, root)
    names = storage.list(os.path.join(root, FOLDER))
    if training.format == ITERATION:
        base = iteration_name(step)
        known = known | {file.path for candidate in candidates for file in candidate.metadata_files}
        left = [f"{FOLDER}/{name}" for name in names if name != f"ended-{run}.json"]
        left += [name for name in storage.list(root) if name not in (FOLDER, TRACKER, base)]
        left += [f"{base}/{name}" for name in storage.list(os.path.join(root, base))
                 if f"{base}/{name}" not in known and name != FOLDER]
        return left + [f"{base}/{FOLDER}/{name}" for name in storage.list(os.path.join(root, base, FOLDER))
                       if name != attempt_name(step, run)]
    left = [name for name in storage.list(root) if name != FOLDER and not is_rank_folder(name)]
    left += [f"{FOLDER}/{name}" for name in names if parse_attempt(name) is None and not (training.apart and name == COMMON)]
    left += [f"{FOLDER}/{name}" for name, found, of in attempts(names)
             if found != step and (chosen is None or newer((of, found)) < newer(chosen))]
    for folder in filter(is_rank_folder, storage.list(root)):
        left += [f"{folder}/{name}" for name in storage.list(os.path.join(root, folder))
                 if f"{folder}/{name}" not in known and name != META]
    return left
