"""Somebody at a desk, beside a job: converts the newest checkpoint into another folder, or verifies all that are there.

The commands' own work is run, without what they print: ``mindresume convert``, ``mindresume verify``.
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
from mindresume.reshard.engines import writer
from mindresume.reshard.open_checkpoint import OpenCheckpoint, open_and_hold
from mindresume.reshard.replica_check import check_replicas
from mindresume.reshard.strategy_store import own_strategy
from mindresume.resume.choice import Choice
from mindresume.resume.folder_verification import verify_checkpoints
from mindresume.resume.listing import list_checkpoints
from mindresume.resume.missing_ranks import unknown_strategy
from mindresume.resume.selection_policy import SelectionPolicy, every_rank
from mindresume.resume.shared_selection import select_shared
from mindresume.simulation.cluster import Cluster
from mindresume.simulation.disk import Disk
from mindresume.simulation.jobs import History, Training, wrong_content
from mindresume.simulation.mount import Mount
from mindresume.simulation.oracle import WRONG, Finding, _alone, judge
from mindresume.simulation.scenarios import Play
from mindresume.simulation.standins import here, running

TARGETS = "/converted"
AGAIN = 3                       # times that somebody converts, or verifies
PAUSES = (0.1, 2.2)             # seconds before each: so it falls into the saves of a job that makes one in two seconds
READING = 0.2                   # seconds for which a file is read, while others go on
COUNTERS = ("step_num", "global_step")
ELSEWHERE = ("ENOSPC", "EDQUOT", "kill all", "power")          # strike more than the process at whose operation they do


class _Slow(Mount):
    """Reading takes time."""

    def open(self, path: str) -> BinaryIO:
        found = super().open(path)
        here().scheduler.sleep(READING)
        return found


class _Files(_Slow):
    """What it opens are files of the kernel, as those who read at positions of it want them."""

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
    """Nobody else makes the same one: its lock, which is a file of the real disk, is not needed."""

    def _take_lock(self) -> None:
        self._mine = True


def convert(play: Play) -> None:
    """As ``mindresume convert``: some times the newest checkpoint that is there then, each time into another folder."""
    storage, training = _Files(play.cluster, running()), play.training
    for number, pause in enumerate(_pauses(play)):
        here().scheduler.sleep(pause)
        with _judged(play, "conversion"), open_and_hold(storage, training.root, emit=running().emit) as source:
            _carry_out(storage, source, f"{TARGETS}/{number}", training)


def _carry_out(storage: _Files, source: OpenCheckpoint, target: str, training: Training) -> None:
    strategy = own_strategy(source.weights)
    job = to_iteration(source, strategy) if source.is_iteration else to_ranks(source, strategy, source.weights.format)
    conversion = _Conversion(storage, job, target)
    if conversion.finished():
        return

    def write() -> None:
        check_replicas(source.weights, read=True)
        conversion.write(writer("direct", conversion, workers=1, tile=1 << 10))
    conversion.run(write)


def verify(play: Play) -> None:
    """As ``mindresume verify``: nothing here is ever damaged."""
    storage, training = _Slow(play.cluster, running()), play.training
    for pause in _pauses(play):
        here().scheduler.sleep(pause)
        with _judged(play, "verify"):
            found, rows = list_checkpoints(storage, training.root, unknown_strategy)
            for candidate, bad in verify_checkpoints(storage, found.root, rows,
                                                     lambda: list_checkpoints(storage, training.root, unknown_strategy)[1]):
                if bad and candidate.maybe_completed and not _is_struck(play):
                    play.history.wrong.append(f"verify calls step {candidate.step} damaged: {bad[0].reason}")


def _pauses(play: Play) -> list[float]:
    chance = random.Random(play.schedule.seed)
    return [chance.uniform(*PAUSES) for _ in range(AGAIN)]


@contextmanager
def _judged(play: Play, what: str) -> Iterator[None]:
    """An error inside is one of the product unless something was in the way of this process."""
    try:
        yield
    except (MindResumeError, OSError) as error:
        running().emit(warning(f"{what}: {type(error).__name__}: {error}"))
        if not _is_struck(play):
            play.history.wrong.append(f"{what} beside a job, in whose way nothing was: {type(error).__name__}: {error}")


def _is_struck(play: Play) -> bool:
    return bool(play.cluster.lag) or any(row.process == running().name or row.strike.kind in ELSEWHERE
                                         for row in play.cluster.struck)


# ---- what must hold of the disks ---------------------------------------------------------------------------------------

def judge_conversions(disks: Mapping[str, Disk], history: History, training: Training, live: bool = True) -> list[Finding]:
    """What has the name of a target is a whole checkpoint, the same bits as one of the job's; the rest as of every job."""
    findings: list[Finding] = []

    def work(cluster: Cluster) -> None:
        storage = Mount(cluster, cluster.processes[0])
        for name in storage.list(TARGETS) if storage.status(TARGETS) is not None else ():
            if not name.startswith("."):
                findings.extend(_wrong_target(storage, f"{TARGETS}/{name}", history, training))
    error = _alone(disks, work).processes[0].error
    if error is not None:
        findings.append(Finding(WRONG, f"looking at a target: {type(error).__name__}: {error}"))
    return findings + judge(disks, history, training, live)


def _wrong_target(storage: Mount, target: str, history: History, training: Training) -> Iterator[Finding]:
    try:
        choice = select_shared(storage, target, SingleProcess(), SelectionPolicy(training.ranks, ranks_to_verify=every_rank))
    except MindResumeError as error:
        yield Finding(WRONG, f"{target} has its name, and cannot be used: {error}")
        return
    if choice.chosen is None:
        yield Finding(WRONG, f"{target} has its name, and no checkpoint is there")
        return
    runs = [run for run, step in sorted(history.began) if step == choice.chosen.step]
    ranks = list(range(training.ranks))
    wrong = [_unlike(storage, choice, run, ranks) for run in runs]
    if all(wrong):
        yield Finding(WRONG, f"{target}, step {choice.chosen.step}, is not what any of the runs {runs} saved: {wrong[:1]}")


def _unlike(storage: Mount, choice: Choice, run: str, ranks: list[int]) -> list[str]:
    """What of it is not what ``run`` saved. An iteration folder keeps counters in ``common.json`` alone."""
    found = wrong_content(storage, replace(choice, chosen=replace(choice.chosen, run=run)), ranks)
    return [text for text in found if not (choice.chosen.iteration_dir and text.startswith(COUNTERS))]
