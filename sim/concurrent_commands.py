"""Commands that a user runs beside a job: converts the newest checkpoint into another folder, verifies all, or scrubs all.

The code of ``mindresume convert``, ``verify`` and ``scrub`` runs, without what these print.
"""
from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import MindResumeError
from mindresume.events import warning
from mindresume.reshard.conversion_plan import to_iteration, to_ranks
from mindresume.reshard.converter import Conversion
from mindresume.reshard.engines import Engine
from mindresume.reshard.open_checkpoint import OpenCheckpoint, open_and_hold
from mindresume.reshard.strategy_store import own_strategy
from mindresume.resume.candidates import list_checkpoints
from mindresume.resume.choice import Choice
from mindresume.resume.eligible import SelectionPolicy, every_rank
from mindresume.resume.folder_verification import verify_checkpoints
from mindresume.resume.replicas import unknown_strategy
from mindresume.resume.scrub import Scrubber, ScrubOptions
from mindresume.resume.selection import select_checkpoint
from sim.cluster import Cluster, current_cluster, current_process
from sim.disk import Disk
from sim.jobs import History, Training
from sim.mount import Mount
from sim.oracle import WRONG, Finding, check_disks, run_alone
from sim.saved_content import wrong_content
from sim.scenarios import Simulation
from sim.schedule import PASSING, SILENT

TARGETS = "/converted"
REPEATS = 3                     # number of conversions or verifications
PAUSES = (0.1, 2.2)             # seconds before each: it then overlaps the saves of a job that saves every two seconds
READING = 0.2                   # seconds to read a file
COUNTERS = ("step_num", "global_step")
BEYOND_THE_PROCESS = ("ENOSPC", "EDQUOT", "kill all", "power")  # faults that affect more than one process


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
            return open(handle, "rb")                           # noqa: SIM115  the caller closes it
        except BaseException:
            os.close(handle)
            raise


class _Conversion(Conversion):
    """A conversion without its lock: that is a file of the real disk, and no other process makes the same conversion here."""

    def _take_lock(self, kind: int) -> bool:
        self._owns_work = True
        return True


def convert(sim: Simulation) -> None:
    """Converts the newest checkpoint ``REPEATS`` times, as ``mindresume convert`` does, each time into another folder."""
    storage, training = _Files(sim.cluster, current_process()), sim.training
    for number, pause in enumerate(pauses(sim)):
        current_cluster().scheduler.sleep(pause)
        with errors_recorded(sim, "conversion"), open_and_hold(storage, training.root, emit=current_process().emit) as source:
            _carry_out(storage, source, f"{TARGETS}/{number}", training)


def _carry_out(storage: _Files, source: OpenCheckpoint, target: str, training: Training) -> None:
    strategy = own_strategy(source.weights)
    job = to_iteration(source, strategy) if source.is_iteration else to_ranks(source, strategy, source.weights.format)
    conversion = _Conversion(storage, job, target)
    if not conversion.finished():
        conversion.run(Engine(workers=1, tile=1 << 10), checks_source=True)


def verify(sim: Simulation) -> None:
    """Verifies all checkpoints ``REPEATS`` times, as ``mindresume verify`` does. Nothing is ever damaged here."""
    storage, training = _Slow(sim.cluster, current_process()), sim.training
    for pause in pauses(sim):
        current_cluster().scheduler.sleep(pause)
        with errors_recorded(sim, "verify"):
            found, rows = list_checkpoints(storage, training.root, unknown_strategy)
            for candidate, bad in verify_checkpoints(storage, found.root, rows,
                                                     lambda: list_checkpoints(storage, training.root, unknown_strategy)[1]):
                bad = [row for row in bad if not row.is_unreadable]
                if bad and candidate.maybe_completed and not is_affected(sim):
                    sim.history.wrong.append(f"verify reports step {candidate.step} as damaged: {bad[0].reason}")


def scrub(sim: Simulation) -> None:
    """Scrubs all checkpoints ``REPEATS`` times, as ``mindresume scrub --repair`` does. Nothing is ever damaged here."""
    storage, training, sleep = _Slow(sim.cluster, current_process()), sim.training, current_cluster().scheduler.sleep
    for pause in pauses(sim):
        sleep(pause)
        with errors_recorded(sim, "scrub"):
            found, rows = list_checkpoints(storage, training.root, unknown_strategy)
            for result in Scrubber(storage, found.root, ScrubOptions(repairs=True), wait=sleep).scrub(rows):
                row = next((row for row in (*result.damaged, *result.repaired) if not row.is_unreadable), None)
                if row is not None and not is_affected(sim):
                    sim.history.wrong.append(f"scrub takes step {result.candidate.step} for damaged: {row.reason}")


def pauses(sim: Simulation) -> list[float]:
    rng = random.Random(sim.schedule.seed)
    return [rng.uniform(*PAUSES) for _ in range(REPEATS)]


@contextmanager
def errors_recorded(sim: Simulation, what: str) -> Iterator[None]:
    """Records an error inside the block as a violation, unless a fault affected this process, or something cannot be read."""
    try:
        yield
    except (MindResumeError, OSError) as error:
        current_process().emit(warning(f"{what}: {type(error).__name__}: {error}"))
        if not (is_affected(sim) or any(row.fault.kind in PASSING for row in sim.cluster.injected)):
            sim.history.wrong.append(f"{what} beside a job, without a fault: {type(error).__name__}: {error}")


def is_affected(sim: Simulation) -> bool:
    """Returns whether a fault hit this process that excuses what it says. Errors of reading that pass are no excuse for calling
    something damaged."""
    return bool(sim.cluster.lag) or any(row.process == current_process().name or row.fault.kind in BEYOND_THE_PROCESS
                                        for row in sim.cluster.injected if row.fault.kind not in (*SILENT, *PASSING))


# ---- invariants of the disks -------------------------------------------------------------------------------------------

def check_conversions(disks: Mapping[str, Disk], history: History, training: Training, restart: bool = True) -> list[Finding]:
    """Checks that each target under its final name is a whole checkpoint with the same bits as one of the job's; then runs
    ``check_disks``."""
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


def _wrong_target(storage: Mount, target: str, history: History, training: Training) -> Iterator[Finding]:
    try:
        choice = select_checkpoint(storage, target, SingleProcess(), SelectionPolicy(training.ranks, ranks_to_verify=every_rank))
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
        yield Finding(WRONG, f"{target}, step {choice.chosen.step}, is not what any of the runs {runs} saved: {wrong[:1]}")


def _differences(storage: Mount, choice: Choice, run: str, ranks: list[int]) -> list[str]:
    """Returns what of the converted checkpoint differs from what ``run`` saved. An iteration folder keeps its counters in
    ``common.json`` alone, so these are not compared."""
    found = wrong_content(storage, replace(choice, chosen=replace(choice.chosen, run=run)), ranks)
    return [text for text in found if not (choice.chosen.iteration_dir and text.startswith(COUNTERS))]
