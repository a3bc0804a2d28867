"""The invariants that the disks must satisfy after a schedule.

    check_disks(disks, history, training)       # findings; empty if all invariants hold

It inspects the disks as a user would (``list_checkpoints``, ``select``), then starts the same
command again without faults and inspects the result. The kind of a finding names the broken
promise:

    wrong          the selected checkpoint is not, bit for bit, what was saved, or mixes two runs
    lost           an acknowledged checkpoint was removed, or something older was taken
    stuck          the job does not start, or a rank waits for ever
    leftover       files of no checkpoint stay after the next save
    misreported    a rank was told that a save failed, and it is committed
    inconsistent   users and the job get different answers
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import NEWEST_COMMON
from mindresume.errors import BadStepError, MindResumeError, NoUsableCheckpointError
from mindresume.fault_injection.journal import (
    ITERATION,
    Saved,
    leftovers,
    save_order,
    select,
    wrong_content,
)
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.bad_steps import BAD_STEPS
from mindresume.formats.iterations import TRACKER, iteration_name, tracked
from mindresume.formats.rank_folders import META, folder_name
from mindresume.formats.records import scan_records
from mindresume.formats.weight_files import known_damage
from mindresume.model.manifest import FOLDER, attempt_name, parse_attempt
from mindresume.resume.candidates import COMPLETE, damaged_metadata_files, list_checkpoints
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.replicas import unknown_strategy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.crash_loop import load_attempts, suspicion
from mindresume.saving.guard import GO_ON
from mindresume.saving.memory_tier.directory import MARK
from mindresume.storage import read_json
from sim.bit_rot import rotted_files, rotted_saves, unreadable_saves
from sim.cluster import Cluster, Process
from sim.disk import Disk
from sim.jobs import History, Job, Training, intact_saves
from sim.machine import use_cluster
from sim.mount import Mount
from sim.schedule import Schedule
from sim.scheduler import Deadlock, OperationLimit

UNKNOWN, UNUSABLE = "?", "nothing can be used"
WRONG = "wrong"
LOST = "lost"
STUCK = "stuck"
LEFTOVER = "leftover"
MISREPORTED = "misreported"
INCONSISTENT = "inconsistent"


@dataclass(frozen=True)
class Finding:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def check_disks(
    disks: Mapping[str, Disk], history: History, training: Training, restart: bool = True
) -> list[Finding]:
    """Returns the violations. Changes ``disks``: the restarted job saves there. ``restart`` False:
    inspects only."""
    rotted = rotted_saves(disks.values())
    suspected = set() if training.node_local else _suspected_saves(disks, training)
    # no resume has to take these; what else is acknowledged must be taken
    if rotted or suspected:
        history = history.copy()
        intact = intact_saves(history, disks, training.keep) if rotted else history.reported
        history.reported = {
            saved: history.reported[saved] for saved in intact if saved not in suspected
        }
    required = history.newest()
    findings = [Finding(WRONG, text) for text in history.wrong]
    findings += [Finding(LOST, text) for text in history.stale_choices]
    findings += [Finding(STUCK, text) for text in history.lease_losses]
    selected: Saved | None | str = UNKNOWN
    if not training.node_local:
        selected, more = _inspect(disks, history, training, rotted, suspected)
        findings += more
    else:
        findings += _inspect_node_local(disks, history, training)
    findings += _check_protected(disks, history, training)
    stale_choices = _check_choice(required, selected, "which") if not training.node_local else []
    findings += stale_choices
    if not restart and not training.node_local:
        return findings
    if selected == UNUSABLE:
        return findings + _check_refusal(disks, training)
    last = max((step for _, step in history.began), default=0)
    findings += restart_and_check(
        disks,
        training,
        None if stale_choices else required,
        selected,
        last,
        not training.fresh
        # these stay, with the attempts to load them
        and not stale_choices
        and not suspected
        # a node has its part of a save that a rank with a bad step did not make on another node
        and not (training.bad and training.node_local),
    )
    return findings


def _check_protected(
    disks: Mapping[str, Disk], history: History, training: Training
) -> Iterator[Finding]:
    """Checks that checkpoints of another training were never removed."""
    present = {
        name
        for disk in disks.values()
        for path, _ in disk.walk(training.root)
        for name in path.split("/")
    }
    for run, step in history.protected:
        if attempt_name(step, run) not in present:
            yield Finding(
                LOST, f"step {step} of run {run}, which belongs to another training, was removed"
            )


def run_alone(disks: Mapping[str, Disk], work: Callable[[Cluster], None], node: int = 0) -> Cluster:
    """Runs ``work`` as the only process of a new cluster, on a host with empty caches. ``node``:
    the number of its disk, where hosts share none."""
    cluster = Cluster(Schedule(), disks)
    with use_cluster(cluster):
        cluster.process(cluster.host("looker", node), "looker", lambda: work(cluster))
        cluster.scheduler.run()
    return cluster


def _check_refusal(disks: Mapping[str, Disk], training: Training) -> list[Finding]:
    """Checks that the same command ends with an error on all ranks if every checkpoint has rotted:
    it must not start afresh."""
    job = _run_again(disks, replace(training, fresh=False))[0]
    return [
        Finding(
            WRONG,
            f"the next run: {process.name} ended with {process.exit}, "
            f"{type(process.error).__name__}, though no checkpoint can be used",
        )
        for process in job.ranks
        if not isinstance(process.error, NoUsableCheckpointError)
    ]


def _suspected_saves(disks: Mapping[str, Disk], training: Training) -> set[Saved]:
    """Returns the saves that a resume takes last: several jobs in a row have died in their first
    step after they loaded them."""
    suspected: set[Saved] = set()

    def work(cluster: Cluster) -> None:
        for key, deaths in load_attempts(
            CheckpointDir(Mount(cluster, cluster.processes[0]), training.root)
        ).items():
            parsed = parse_attempt(key)
            if (
                parsed is not None
                and deaths
                and suspicion(deaths, training.settings.max_failed_loads)
            ):
                suspected.add((parsed[1], parsed[0]))

    run_alone(disks, work)
    return suspected


def _inspect(
    disks: Mapping[str, Disk],
    history: History,
    training: Training,
    rotted: Collection[Saved],
    suspected: Collection[Saved],
) -> tuple[Saved | None | str, list[Finding]]:
    """Returns what a resume would take according to ``which``, and the violations that a user can
    see. ``rotted``: saves whose damage ``ls``, which reads no contents, need not know.
    ``suspected``: saves of which it does not say so."""
    findings: list[Finding] = []
    selections: list[Saved | None | str] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        try:
            ranks = None if training.allow_reshard else training.ranks
            policy = SelectionPolicy(
                ranks,
                every_rank=True,
                unhealthy=frozenset() if training.health_monitored else None,
                max_failed_loads=training.settings.max_failed_loads,
            )
            choice = select_checkpoint(storage, training.root, SingleProcess(), policy)
            rows = list_checkpoints(storage, training.root, unknown_strategy, ranks)[1]
        except (MindResumeError, OSError) as error:
            if isinstance(error, NoUsableCheckpointError) and rotted and history.newest() is None:
                selections.append(UNUSABLE)
            else:
                findings.append(Finding(STUCK, f"which, ls: {type(error).__name__}: {error}"))
            return
        chosen = choice.chosen
        selections.append((chosen.run or "", chosen.step or 0) if chosen is not None else None)
        if chosen is not None:
            findings.extend(
                Finding(WRONG, text)
                for text in wrong_content(
                    storage, choice, list(range(chosen.world_size)), training.replicated
                )
            )
            known = rotted_files(disks.values())
            if chosen.run:  # mindformers alone reads the metadata files
                findings.extend(
                    Finding(WRONG, refusal.reason)
                    for refusal in damaged_metadata_files(
                        CheckpointDir(storage, training.root), chosen
                    )
                    if f"{training.root}/{refusal.file}" not in known
                )
            rows = [
                row
                for row in rows
                if row.state == COMPLETE
                and not (training.health_monitored and row.candidate.health)
                and (
                    (saved := (row.candidate.run, row.candidate.step)) == selections[0]
                    or saved not in rotted
                    and saved not in suspected
                )
            ]
            first = next(iter(rows), None)
            if first is None or (first.candidate.run, first.candidate.step) != selections[0]:
                findings.append(
                    Finding(
                        INCONSISTENT,
                        f"which says {selections[0]}, ls {first and first.candidate.name}",
                    )
                )
        candidates = scan_records(CheckpointDir(storage, training.root))[0]
        findings.extend(_check_failed_saves(candidates, history))
        findings.extend(
            _check_retention(candidates, history, training, rotted)
            if not training.pruned_by_others
            else ()
        )
        findings.extend(_check_load_attempts(storage, history, training))
        findings.extend(_check_damage(storage, training, candidates, rotted))
        findings.extend(_check_pointers(storage, training))

    cluster = run_alone(disks, work)
    error = cluster.processes[0].error
    if error is not None:
        findings.append(Finding(STUCK, f"inspecting: {type(error).__name__}: {error}"))
    return selections[0] if selections else None, findings


def _inspect_node_local(
    disks: Mapping[str, Disk], history: History, training: Training
) -> list[Finding]:
    """Returns the violations on the disk of each node, where hosts share none."""
    findings: list[Finding] = []
    for node in range(training.hosts):
        cluster = run_alone(
            disks,
            lambda cluster: findings.extend(
                _check_failed_saves(
                    scan_records(
                        CheckpointDir(Mount(cluster, cluster.processes[0]), training.root)
                    )[0],
                    history,
                )
            ),
            node,
        )
        error = cluster.processes[0].error
        if error is not None:
            findings.append(
                Finding(STUCK, f"inspecting node {node}: {type(error).__name__}: {error}")
            )
    return findings


def _check_failed_saves(candidates: Sequence[Candidate], history: History) -> Iterator[Finding]:
    """Checks that no committed checkpoint was reported as failed."""
    for candidate in candidates:
        saved = (candidate.run or "", candidate.step or 0)
        for rank in candidate.local_ranks or range(candidate.world_size):
            text = history.failed.get((saved, rank))
            if candidate.committed and text is not None and " may not " not in text:
                yield Finding(
                    MISREPORTED,
                    f"rank {rank} was told that {saved} failed, and it is committed: {text}",
                )


def _check_retention(
    candidates: Sequence[Candidate], history: History, training: Training, rotted: Collection[Saved]
) -> Iterator[Finding]:
    """Checks that as many committed checkpoints stay as are to be kept. A save of all ranks whose
    records rank 0 did not see in time is given up after a later commit, and does not count. One
    whose manifest has rotted counts."""
    there = {(c.run, c.step) for c in candidates}
    committed = [
        c
        for c in candidates
        if (c.committed or (c.run, c.step) in rotted) and (c.run, c.step) not in history.protected
    ]
    gone = [saved for saved in history.complete() if saved not in there]
    if gone and len(committed) < training.keep:
        yield Finding(
            LOST,
            f"{max(gone, key=save_order)} was removed, though {training.keep} must be kept and "
            f"only {len(committed)} are committed",
        )


def _check_load_attempts(storage: Mount, history: History, training: Training) -> Iterator[Finding]:
    """Checks that no checkpoint is blamed for the death of a job that had not begun its first
    step."""
    for key, deaths in load_attempts(CheckpointDir(storage, training.root)).items():
        for death in deaths or ():
            if death.run not in history.started_runs:
                yield Finding(
                    LOST,
                    f"run {death.run} counts as a failed load of {key}, though it had not begun "
                    "its first step",
                )


def _check_damage(
    storage: Mount, training: Training, candidates: Sequence[Candidate], rotted: Collection[Saved]
) -> Iterator[Finding]:
    """Checks that no checkpoint is recorded as damaged of which no file has rotted."""
    for candidate in candidates:
        damage = known_damage(CheckpointDir(storage, training.root), candidate)
        if damage is not None and (candidate.run, candidate.step) not in rotted:
            yield Finding(
                WRONG, f"{candidate.name} is intact, and recorded as damaged: {damage.reason}"
            )


def check_pointers(
    disks: Mapping[str, Disk], history: History, training: Training
) -> list[Finding]:
    """Checks, after a run without faults, that mindformers alone would begin with the last save of
    a job that ended well."""
    findings: list[Finding] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        newest = next(
            (c for c in scan_records(CheckpointDir(storage, training.root))[0] if c.committed), None
        )
        if newest is None or newest.run not in history.ended:
            return
        if training.format == ITERATION:
            pointed_to = tracked(CheckpointDir(storage, training.root)), newest.iteration_dir
            wanted = newest.step, iteration_name(newest.step or 0)
        else:
            meta = f"{training.root}/{folder_name(0)}/{META}"
            pointed_to = read_json(storage, meta)["last_ckpt_file"]
            wanted = os.path.basename(newest.all_files[0].path)
        if pointed_to != wanted:
            findings.append(
                Finding(
                    LOST,
                    f"{TRACKER if training.format == ITERATION else META} leads to {pointed_to}, "
                    f"not {wanted}, though no fault prevented {newest.name}",
                )
            )

    error = run_alone(disks, work).processes[0].error
    if error is not None:
        findings.append(Finding(STUCK, f"inspecting the pointers: {type(error).__name__}: {error}"))
    return findings


def _check_pointers(storage: Mount, training: Training) -> Iterator[Finding]:
    """Checks that the files to which mindformers alone is pointed exist."""
    root, files = training.root, []
    if training.format == ITERATION:
        step = tracked(CheckpointDir(storage, root))
        if step is not None:
            found = [
                c
                for c in scan_records(CheckpointDir(storage, root))[0]
                if c.iteration_dir == iteration_name(step)
            ]
            files = [file.path for c in found for file in (*c.all_files, *c.metadata_files)] or [
                iteration_name(step)
            ]
    else:
        meta = f"{root}/{folder_name(0)}/{META}"
        if storage.status(meta) is not None:
            files = [f"{folder_name(0)}/{read_json(storage, meta)['last_ckpt_file']}"]
    for file in files:
        if storage.status(f"{root}/{file}") is None:
            yield Finding(
                LOST,
                f"{TRACKER if training.format == ITERATION else META} leads to {file}, which does "
                "not exist",
            )


def restart_and_check(
    disks: Mapping[str, Disk],
    training: Training,
    required: Saved | None,
    selected: Saved | None | str,
    last: int,
    tidy: bool,
) -> list[Finding]:
    """Runs the same command once more, without faults, keeping one checkpoint."""
    findings: list[Finding] = []
    # Where nodes share no disk, ``which`` does not show where the restart resumes.
    start = last if selected == UNKNOWN else selected[1] if selected is not None else 0
    again = replace(
        training,
        steps=(start // training.every + 1) * training.every,
        keep=1,
        fresh=False,
        async_save=False,
        rescue=False,
        unhealthy=(),
    )
    unreadable = unreadable_saves(disks.values())
    job, stuck = _run_again(disks, again)
    history = job.history
    for _ in again.bad:  # each ends two starts at most
        for _ in range(2):
            if all(_rolls_back(process) for process in job.ranks):
                job, stuck = _run_again(disks, again)
                history.wrong += job.history.wrong
    if stuck is not None:
        return [Finding(STUCK, f"the next run: {type(stuck).__name__}: {stuck}")]
    for process in (*job.ranks, job.launcher):
        if process.exit or process.error is not None:
            return [Finding(STUCK, f"the next run: {process.ending}")]
    findings += [Finding(WRONG, text) for text in history.wrong]
    ((_, chosen),) = history.chosen.items()
    ((run, _),) = job.history.chosen.items()
    if selected not in (UNKNOWN, chosen):
        findings.append(Finding(INCONSISTENT, f"which says {selected}, the job takes {chosen}"))
    findings += _check_choice(required, chosen, "the job")
    if tidy and not findings:
        newest = run, again.steps
        if training.node_local:
            findings += _check_node_leftovers(disks, again, newest, chosen)
        else:
            findings += _check_leftovers(disks, again, newest, unreadable)
    return findings


def _rolls_back(process: Process) -> bool:
    return isinstance(process.error, BadStepError) and process.error.status == GO_ON


def _run_again(disks: Mapping[str, Disk], training: Training) -> tuple[Job, BaseException | None]:
    """Runs a job of ``training`` on ``disks`` without faults. Returns it, and why it did not
    end."""
    cluster = Cluster(Schedule(), disks)
    # tokens that no process of the schedule has drawn
    cluster._pids, cluster._tokens = 10_000, 500_000
    # garbage that is removed by age is old enough
    cluster.scheduler.now = 2 * 3600.0
    # the read lock of a dead reader on another host lasts for minutes
    cluster.shared_pid_namespace = True
    with use_cluster(cluster):
        hosts = [cluster.host(f"again{number}", number) for number in range(training.hosts)]
        job = Job(cluster, History(), training, hosts, "again")
        job.start()
        try:
            cluster.scheduler.run()
        except (Deadlock, OperationLimit) as error:
            return job, error
    return job, None


def _check_choice(required: Saved | None, chosen: Saved | None | str, who: str) -> list[Finding]:
    if required is None or (
        chosen is not None
        and (isinstance(chosen, str) or save_order(chosen) >= save_order(required))
    ):
        return []
    return [
        Finding(LOST, f"{who} takes {chosen}, though all ranks were told that {required} is saved")
    ]


def _check_leftovers(
    disks: Mapping[str, Disk], training: Training, newest: Saved, unreadable: Collection[str] = ()
) -> list[Finding]:
    """Checks that after the restart its last step is there and nothing else but ``unreadable``."""
    findings: list[Finding] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        choice = select(CheckpointDir(storage, training.root), training.ranks)
        chosen = choice.chosen
        if chosen is None or (chosen.run, chosen.step) != newest:
            findings.append(
                Finding(
                    LOST, f"after the next run: {chosen and chosen.name} is taken, not {newest}"
                )
            )
            return
        findings.extend(
            Finding(WRONG, text)
            for text in wrong_content(
                storage, choice, list(range(training.ranks)), training.replicated
            )
        )
        left = [
            name
            for name in _leftovers(storage, training, newest)
            if not any(f"{path}/".startswith(f"{training.root}/{name}/") for path in unreadable)
        ]
        if left:
            findings.append(Finding(LEFTOVER, ", ".join(left)))

    cluster = run_alone(disks, work)
    error = cluster.processes[0].error
    if error is not None:
        findings.append(Finding(STUCK, f"after the next run: {type(error).__name__}: {error}"))
    return findings


def _check_node_leftovers(
    disks: Mapping[str, Disk], training: Training, newest: Saved, chosen: Saved | None
) -> list[Finding]:
    """Checks the disks of nodes that share none. Each also keeps the checkpoint from which it
    resumed and everything newer: the nodes may not have agreed yet that all of them have a newer
    one."""
    findings: list[Finding] = []
    for node in range(training.hosts):

        def work(cluster: Cluster, node: int = node) -> None:
            storage = Mount(cluster, cluster.processes[0])
            found = [
                c
                for c in scan_records(CheckpointDir(storage, training.root))[0]
                if (c.run, c.step) == newest and c.committed
            ]
            if not found:
                findings.append(
                    Finding(LOST, f"after the next run: {newest} is not on node {node}")
                )
            left = _leftovers(storage, training, newest, chosen or ("", 0))
            if left:
                findings.append(Finding(LEFTOVER, f"node {node}: {', '.join(left)}"))

        run_alone(disks, work, node)
    return findings


def _leftovers(
    storage: Mount, training: Training, newest: Saved, chosen: Saved | None = None
) -> list[str]:
    """Returns the leftover files. ``chosen``: where nodes share no disk, this checkpoint and newer
    ones may stay."""
    own = (
        {f"{FOLDER}/{NEWEST_COMMON}"}
        if training.node_local
        else {f"{FOLDER}/{MARK}"}
        if training.settings.memory_tier.every_steps
        else set()
    )
    return [
        path
        for path in leftovers(
            CheckpointDir(storage, training.root), training.format, newest, chosen
        )
        if path not in {*own, f"{FOLDER}/{BAD_STEPS}"}
    ]
