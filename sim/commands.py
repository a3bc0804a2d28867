"""Commands that a user runs beside a job: converts the newest checkpoint into another folder,
verifies all, scrubs all, prunes, or reads.

The code of ``mindresume convert``, ``verify``, ``scrub`` and ``prune`` runs, without what these
print.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import BinaryIO

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import Lease, ReadLocks, acquire_read_lock, read_locks
from mindresume.coordination.lease_acquisition import EndedRuns
from mindresume.errors import MindResumeError, MissingCheckpointError
from mindresume.events import warning
from mindresume.fault_injection.journal import select, wrong_content
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.maintenance.scrub import REMOVED, CheckpointScrub, Scrubber, ScrubOptions
from mindresume.model.manifest import MANIFEST, record_name
from mindresume.reshard.conversion_plan import to_iteration, to_ranks
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Engine
from mindresume.reshard.open_checkpoint import OpenCheckpoint, ReadHold, open_checkpoint
from mindresume.reshard.strategy_store import own_strategy
from mindresume.resume.candidates import list_checkpoints, verify_checkpoints
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.replicas import unknown_strategy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.retention import KeepLast, plan
from sim.bit_rot import rotted_files
from sim.cluster import SHARED, Cluster, current_cluster, current_process
from sim.disk import Disk, File
from sim.jobs import History, Training
from sim.mount import Mount
from sim.oracle import WRONG, Finding, check_disks, run_alone
from sim.scenarios import Simulation
from sim.schedule import PASSING, SILENT

TARGETS = "/converted"
REPEATS = 3  # number of conversions or verifications
# seconds before each: it then overlaps the saves of a job that saves every two seconds
PAUSES = (0.1, 2.2)
READING = 0.2  # seconds to read a file
COUNTERS = ("step_num", "global_step")
# faults that affect more than one process
BEYOND_THE_PROCESS = ("ENOSPC", "EDQUOT", "kill all", "power")


class _Slow(Mount):
    """A mount on which opening a file takes ``READING`` seconds, so that others run meanwhile."""

    def open(self, path: str) -> BinaryIO:
        found = super().open(path)
        current_cluster().scheduler.sleep(READING)
        return found


class _Files(_Slow):
    """A slow mount that opens real files of the kernel, for readers that need positioned reads."""

    def open(self, path: str) -> BinaryIO:
        handle = os.memfd_create("simulated")
        try:
            data = super().open(path).read()
            os.write(handle, data)
            os.lseek(handle, 0, os.SEEK_SET)
            return open(handle, "rb")  # noqa: SIM115  the caller closes it
        except BaseException:
            os.close(handle)
            raise


class _Conversion(Conversion):
    """A conversion without its lock: that is a file of the real disk, and no other process makes
    the same conversion here."""

    def _take_lock(self, kind: int) -> bool:
        self._owns_work = True
        return True


def convert(sim: Simulation) -> None:
    """Converts the newest checkpoint ``REPEATS`` times, as ``mindresume convert`` does, each time
    into another folder."""
    storage, training = _Files(sim.cluster, current_process()), sim.training
    for number, pause in enumerate(pauses(sim)):
        current_cluster().scheduler.sleep(pause)
        with (
            errors_recorded(sim, "conversion"),
            closing(ReadHold()) as hold,
        ):
            source = open_checkpoint(storage, training.root, hold=hold)
            _carry_out(storage, source, f"{TARGETS}/{number}", training)


def _carry_out(storage: _Files, source: OpenCheckpoint, target: str, training: Training) -> None:
    strategy = own_strategy(source.weights)
    job = (
        to_iteration(source, strategy)
        if source.is_iteration
        else to_ranks(source, strategy, source.weights.format)
    )
    conversion = _Conversion(storage, job, target)
    if not conversion.finished():
        conversion.run(Engine(workers=1, tile=1 << 10), checks_source=True)


def verify(sim: Simulation) -> None:
    """Verifies all checkpoints ``REPEATS`` times, as ``mindresume verify`` does. Nothing is ever
    damaged here."""
    storage, training = _Slow(sim.cluster, current_process()), sim.training
    for pause in pauses(sim):
        current_cluster().scheduler.sleep(pause)
        with errors_recorded(sim, "verify"):
            found, rows = list_checkpoints(storage, training.root, unknown_strategy)
            for candidate, bad in verify_checkpoints(
                CheckpointDir(storage, found.root),
                rows,
                lambda: list_checkpoints(storage, training.root, unknown_strategy)[1],
            ):
                bad = [row for row in bad if not row.is_unreadable]
                if bad and candidate.maybe_completed and not is_affected(sim):
                    sim.history.wrong.append(
                        f"verify reports step {candidate.step} as damaged: {bad[0].reason}"
                    )


def scrub(sim: Simulation) -> None:
    """Scrubs all checkpoints ``REPEATS`` times, as ``mindresume scrub --repair`` does. Nothing is
    ever damaged here."""
    storage = _Slow(sim.cluster, current_process())
    training = sim.training
    for pause in pauses(sim):
        current_cluster().scheduler.sleep(pause)
        with errors_recorded(sim, "scrub"):
            found, rows = list_checkpoints(storage, training.root, unknown_strategy)
            for result in Scrubber(found.directory, ScrubOptions(repairs=True)).scrub(rows):
                row = next(
                    (row for row in (*result.damaged, *result.repaired) if not row.is_unreadable),
                    None,
                )
                if row is not None and not is_affected(sim):
                    sim.history.wrong.append(
                        f"scrub takes step {result.candidate.step} for damaged: {row.reason}"
                    )


class _ObservedScrubber(Scrubber):
    """Compares what the scrub of a checkpoint says with what has rotted. ``listed``: what had
    rotted when the checkpoints were listed, which is when manifests are read."""

    sim: Simulation
    listed: Collection[str]

    def _read(self, candidate: Candidate, lock: Lease) -> CheckpointScrub:
        disk, wrong = self.sim.cluster.disks[SHARED], self.sim.history.wrong
        paths = [
            f"{self.directory.root}/{file.path}"
            for file in (*candidate.all_files, *candidate.metadata_files)
        ]
        before = {
            path: file
            for path, file in rotted_files([disk]).items()
            if path in paths or path.startswith(f"{candidate.records_dir}/")
        }
        written = {path: file.written for path, file in before.items()}
        found = super()._read(candidate, lock)
        if found.state == REMOVED or is_affected(self.sim):
            return found
        repaired = {f"{self.directory.root}/{row.file}" for row in found.repaired}
        named = {
            f"{self.directory.root}/{row.file}"
            for row in (*found.damaged, *found.repaired)
            if not row.is_unreadable
        }
        unreadable = {
            f"{self.directory.root}/{file.path}"
            for rank, files in candidate.files.items()
            for file in files
            # nothing tells what these should hold
            if f"{candidate.records_dir}/{record_name(rank)}" in named
        }
        text = " ".join(found.notes)
        for path, file in before.items():
            called = path.removeprefix(f"{self.directory.root}/")
            if path.endswith(f"/{MANIFEST}"):
                if path not in self.listed:
                    continue
                called = f"{MANIFEST} of step {candidate.step}"
            if (
                disk.find(path) is file
                and file.written is not None
                and path not in named | unreadable
                and called not in text
            ):
                wrong.append(
                    f"a scrub of {candidate.name} read all of it and did not find that {path} has "
                    "rotted"
                )
            now = disk.find(path)
            if (
                path in repaired
                and isinstance(now, File)
                and (now.data if now.written is None else now.written) != written[path]
            ):
                wrong.append(f"{path} was repaired and is not as it was written")
        known = {*before, *(row.path for row in self.sim.cluster.rots)}
        wrong += [
            f"a scrub took {path} for damaged, which has never rotted" for path in named - known
        ]
        return found


def observed_scrub(sim: Simulation) -> None:
    """Scrubs all checkpoints some times, as ``mindresume scrub`` does, the first time without
    repairs if the seed says so."""
    storage = Mount(sim.cluster, current_process())
    for number, pause in enumerate(pauses(sim)):
        current_cluster().scheduler.sleep(pause)
        repairs = bool(number or sim.schedule.seed % 3)
        with errors_recorded(sim, "scrub"):
            listed = set(rotted_files(sim.cluster.disks.values()))
            found, rows = list_checkpoints(storage, sim.training.root, unknown_strategy)
            scrubber = _ObservedScrubber(found.directory, ScrubOptions(repairs=repairs))
            scrubber.sim, scrubber.listed = sim, listed
            for _ in scrubber.scrub(rows):
                pass


def prune(sim: Simulation, keeps: tuple[int, ...] = (1, 1, 1), pause: float = 1.5) -> None:
    """Prunes as ``mindresume prune --keep-last KEEP`` does."""
    storage, root = Mount(sim.cluster, current_process()), sim.training.root
    for keep in keeps:
        current_cluster().scheduler.sleep(pause)
        made = plan(
            CheckpointDir(storage, root),
            KeepLast(keep),
            read_locks(CheckpointDir(storage, root)),
            ended=EndedRuns(CheckpointDir(storage, root)),
        )
        carry_out(CheckpointDir(storage, root), made, ReadLocks(CheckpointDir(storage, root)))


def read(sim: Simulation, pause: float = 0.8) -> None:
    """Selects and reads as a conversion does, with a read lock: alternately the newest checkpoint,
    and the oldest by its name."""
    storage, training = Mount(sim.cluster, current_process()), sim.training
    for number in range(6):
        current_cluster().scheduler.sleep(pause)
        oldest = (
            next(iter(scan_records(CheckpointDir(storage, training.root))[0][::-1]), None)
            if number % 2
            else None
        )
        named = (
            oldest
            and oldest.first
            and (oldest.iteration_dir or os.path.basename(oldest.first.path))
        )
        try:
            choice = select_checkpoint(
                storage,
                training.root,
                SingleProcess(),
                SelectionPolicy(training.ranks, named, every_rank=True),
            )
        except MissingCheckpointError:
            continue  # it was pruned meanwhile
        if choice.chosen is None:
            continue
        if choice.chosen.run is None:
            sim.history.wrong.append(f"{choice.chosen.first} was selected as files without records")
            continue
        held = acquire_read_lock(
            CheckpointDir(storage, choice.root), choice.chosen.name, choice.chosen.commit_dir
        )
        if held is not None:
            try:
                sim.history.wrong += wrong_content(storage, choice, list(range(training.ranks)))
            except FileNotFoundError as error:
                if not any(
                    row.process == current_process().name and row.fault.kind in ("slow", "pause")
                    for row in current_cluster().injected
                ):
                    sim.history.wrong.append(
                        f"{choice.chosen.name} has a read lock and was removed: {error}"
                    )
                raise
            held.release()


def pauses(sim: Simulation) -> list[float]:
    rng = random.Random(sim.schedule.seed)
    return [rng.uniform(*PAUSES) for _ in range(REPEATS)]


@contextmanager
def errors_recorded(sim: Simulation, what: str) -> Iterator[None]:
    """Records an error inside the block as a violation, unless a fault affected this process, or
    something cannot be read."""
    try:
        yield
    except (MindResumeError, OSError) as error:
        current_process().emit(warning(f"{what}: {type(error).__name__}: {error}"))
        if not (is_affected(sim) or any(row.fault.kind in PASSING for row in sim.cluster.injected)):
            sim.history.wrong.append(
                f"{what} beside a job, without a fault: {type(error).__name__}: {error}"
            )


def is_affected(sim: Simulation) -> bool:
    """Returns whether a fault hit this process that excuses what it says. Errors of reading that
    pass are no excuse for calling something damaged."""
    return bool(sim.cluster.lag) or any(
        row.process == current_process().name or row.fault.kind in BEYOND_THE_PROCESS
        for row in sim.cluster.injected
        if row.fault.kind not in (*SILENT, *PASSING)
    )


# ---- invariants of the disks ---------------------------------------------------------------------


def check_conversions(
    disks: Mapping[str, Disk], history: History, training: Training, restart: bool = True
) -> list[Finding]:
    """Checks that each target under its final name is a whole checkpoint with the same bits as one
    of the job's; then runs ``check_disks``."""
    findings: list[Finding] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        for name in storage.list(TARGETS) if storage.status(TARGETS) is not None else ():
            if not name.startswith("."):
                findings.extend(_wrong_target(storage, f"{TARGETS}/{name}", history, training))

    error = run_alone(disks, work).processes[0].error
    if error is not None:
        findings.append(Finding(WRONG, f"inspecting a target: {type(error).__name__}: {error}"))
    return findings + check_disks(disks, history, training, restart)


def _wrong_target(
    storage: Mount, target: str, history: History, training: Training
) -> Iterator[Finding]:
    try:
        choice = select(CheckpointDir(storage, target), training.ranks)
    except MindResumeError as error:
        yield Finding(WRONG, f"{target} exists and cannot be used: {error}")
        return
    if choice.chosen is None:
        yield Finding(WRONG, f"{target} exists and holds no checkpoint")
        return
    runs = [run for run, step in sorted(history.began) if step == choice.chosen.step]
    ranks = list(range(training.ranks))
    wrong = [_differences(storage, choice, run, ranks) for run in runs]
    if all(wrong):
        yield Finding(
            WRONG,
            f"{target}, step {choice.chosen.step}, is not what any of the runs {runs} saved: "
            f"{wrong[:1]}",
        )


def _differences(storage: Mount, choice: Choice, run: str, ranks: list[int]) -> list[str]:
    """Returns what of the converted checkpoint differs from what ``run`` saved. An iteration folder
    keeps its counters in ``common.json`` alone, so these are not compared."""
    found = wrong_content(storage, replace(choice, chosen=replace(choice.chosen, run=run)), ranks)
    return [
        text for text in found if not (choice.chosen.iteration_dir and text.startswith(COUNTERS))
    ]
