"""Checks what a resume would take: selects as a training does at its start, for all ranks, and
compares every tensor."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace

from mindresume.coordination.lease import PREFIX, READER
from mindresume.errors import MindResumeError, UnusableCheckpointError
from mindresume.fault_injection.journal import (
    ITERATION,
    Saved,
    leftovers,
    save_order,
    select,
    wrong_content,
)
from mindresume.fault_injection.scenarios import RUNS, Sandbox
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import (
    COMMON,
    METADATA,
    TRACKER,
    iteration_name,
    parse_common,
    parse_tracker,
)
from mindresume.formats.metadata import read_metadata
from mindresume.formats.rank_folders import META, folder_name
from mindresume.formats.records import scan_records
from mindresume.resume.candidates import damaged_metadata_files
from mindresume.resume.eligible import Choice, SelectionPolicy, check_files, eligible
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import clean_own_folder
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header

VERDICTS = PASS, LOST_WORK, HARD_FAIL, SILENT_DIVERGENCE = (
    "PASS",
    "LOST_WORK",
    "HARD_FAIL",
    "SILENT_DIVERGENCE",
)


@dataclass(frozen=True)
class Verdict:
    """The result of a check. ``chosen``: the checkpoint that a resume takes; None for a fresh
    start. ``left``: files that belong to no checkpoint after the next run has saved and cleaned
    up."""

    verdict: str
    reason: str = ""
    chosen: Saved | None = None
    left: tuple[str, ...] = ()


def check_resume(sandbox: Sandbox, past: list[Saved], tidy: bool = True) -> Verdict:
    """Checks the folder of ``sandbox``. ``past``: checkpoints committed before the workload, newest
    last. ``tidy``: also runs the next save, and checks again."""
    required = max([*past, *sandbox.journal.complete()], key=save_order, default=None)
    found = _resume(sandbox, required)
    if found.verdict == PASS:
        wrong = _wrong_committed(sandbox) or _wrong_pointer(sandbox)
        if wrong:
            return Verdict(HARD_FAIL, wrong, found.chosen)
        if tidy:
            return _check_next_run(sandbox, found)
    return found


def _resume(sandbox: Sandbox, required: Saved | None) -> Verdict:
    try:
        choice = select(sandbox.directory, sandbox.ranks)
    except UnusableCheckpointError as error:
        return Verdict(HARD_FAIL, f"no resume: {error}")
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"{type(error).__name__}: {error}")
    if choice.chosen is None:
        if required:
            return Verdict(HARD_FAIL, f"a fresh start, though {required} is complete")
        return Verdict(PASS, "nothing was complete")
    chosen = (choice.chosen.run or "", choice.chosen.step or 0)
    wrong = _differences(sandbox, choice)
    if wrong:
        return Verdict(SILENT_DIVERGENCE, wrong, chosen)
    if required and save_order(chosen) < save_order(required):
        refused = "; ".join(map(str, choice.refused))
        return Verdict(
            LOST_WORK, f"took {chosen}, though {required} was complete: {refused}", chosen
        )
    return Verdict(PASS, "", chosen)


def _differences(sandbox: Sandbox, choice: Choice) -> str:
    """Returns what is not, bit for bit, what was saved; empty if nothing."""
    chosen, ranks = choice.chosen, range(sandbox.ranks)
    if sorted(chosen.files) != list(ranks):
        return f"{chosen.name} has files of ranks {sorted(chosen.files)}"
    if chosen.run not in RUNS:
        return f"{chosen.name} has no run: its files have no record"
    try:
        return next(iter(wrong_content(PosixStorage(), choice, ranks)), "")
    except OSError as error:
        # it was verified, so it must be readable
        return f"{chosen.name} was selected and cannot be read: {error}"


def _wrong_committed(sandbox: Sandbox) -> str:
    """Returns which committed checkpoint is not whole, not only the newest: a user can name it, or
    it is taken if newer ones are damaged."""
    for candidate in scan_records(sandbox.directory)[0]:
        if not candidate.committed:
            continue
        refusal = eligible(sandbox.directory, candidate, SelectionPolicy()) or check_files(
            sandbox.directory, candidate, sandbox.ranks
        )
        wrong = [str(refusal)] if refusal else damaged_metadata_files(sandbox.directory, candidate)
        if wrong:
            return f"committed but incomplete: {wrong[0]}"
    return ""


def _wrong_pointer(sandbox: Sandbox) -> str:
    """Returns which pointer leads to nothing whole. mindformers alone follows ``meta.json`` of
    every rank, or the tracker."""
    names = [f"{folder_name(rank)}/{META}" for rank in range(sandbox.ranks)]
    for name in [TRACKER] if sandbox.format == ITERATION else names:
        path = os.path.join(sandbox.root, name)
        try:
            if name == TRACKER and os.path.exists(path):
                _follow_tracker(sandbox)
            elif os.path.exists(path):
                with open(path) as file:
                    _read_header(os.path.dirname(path), json.load(file)["last_ckpt_file"])
        except (OSError, ValueError, KeyError, TypeError, MindResumeError) as error:
            return f"{name} points to something unusable: {error}"
    return ""


def _read_header(folder: str, name: str) -> None:
    with open(os.path.join(folder, name), "rb") as file:
        read_header(file, name)


def _follow_tracker(sandbox: Sandbox) -> None:
    """Reads all that mindformers alone reads of the iteration that the tracker names, and compares
    it with what was saved."""
    with open(os.path.join(sandbox.root, TRACKER), "rb") as file:
        step = parse_tracker(file.read())
    if isinstance(step, str):
        raise ValueError(step)
    folder = os.path.join(sandbox.root, iteration_name(step))
    with open(os.path.join(folder, COMMON), "rb") as file:
        stored_step = parse_common(file.read(), COMMON).step_num
    if stored_step != step:
        raise ValueError(f"{COMMON} in {iteration_name(step)} is of step {stored_step}")
    if sandbox.ranks > 1:
        with open(os.path.join(folder, METADATA), "rb") as file:
            rows = read_metadata(file.read(), METADATA).values()
        for name in {
            stored.file for row in rows for copies in row.stored.values() for stored in copies
        }:
            _read_header(folder, name)
        if len(rows) != 2:
            raise ValueError(
                f"{METADATA} in {iteration_name(step)} describes {len(rows)} tensors, not 2"
            )
    choice = select(CheckpointDir(PosixStorage(), folder), sandbox.ranks)
    wrong = _differences(sandbox, replace(choice, chosen=replace(choice.chosen, step=step)))
    if wrong:
        raise ValueError(wrong)


def _check_next_run(sandbox: Sandbox, found: Verdict) -> Verdict:
    """Runs the next start, one save and a retention of one checkpoint; then a resume must take it,
    and nothing else may be left."""
    run, step = len(RUNS) - 1, 90
    targets = [sandbox.target(rank, run, sandbox.storage) for rank in range(sandbox.ranks)]
    try:
        with sandbox.injector.clock():
            lease = sandbox.acquire(run, sandbox.storage)
        for target in targets:
            clean_own_folder(target)
        Committer(targets[0]).recover()
        sandbox.save_without_faults(run, step, commit=False)
        Committer(targets[0], KeepLast(1)).poll(step)
        lease.release()
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"the next run cannot save: {error}", found.chosen)
    after = _resume(sandbox, (RUNS[run], step))
    if after.verdict == PASS and (wrong := _wrong_pointer(sandbox)):
        after = Verdict(HARD_FAIL, wrong)
    if after.verdict != PASS:
        return Verdict(after.verdict, f"after the next run: {after.reason}", found.chosen)
    # A read lock goes when its process is seen dead. Here that is this process, which is alive: the
    # simulation covers it.
    left = [
        path
        for path in leftovers(sandbox.directory, sandbox.format, (RUNS[run], step))
        if f"{PREFIX}{READER:04}-" not in path
    ]
    return Verdict(PASS, found.reason, found.chosen, tuple(left))
