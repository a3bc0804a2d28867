"""Checks what a resume would take: selects as a training does at its start, for all ranks, and compares every tensor."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import PREFIX, READER, LeaseHolder
from mindresume.coordination.lease_acquisition import acquire
from mindresume.errors import CorruptFileError, MindResumeError, UnusableCheckpointError
from mindresume.fault_injection.scenarios import RUNS, Sandbox, save_without_faults, tensors
from mindresume.fault_injection.tiny_checkpoints import ITERATION, Saved, differing_tensors, leftovers, read_sources
from mindresume.formats.iteration_naming import COMMON, METADATA, TRACKER, iteration_name, parse_common, parse_tracker
from mindresume.formats.metadata import read_metadata
from mindresume.formats.rank_folder_naming import META, folder_name
from mindresume.formats.records import scan_records
from mindresume.resume.checkpoint_warnings import damaged_metadata_files
from mindresume.resume.choice import Choice
from mindresume.resume.eligible import SelectionPolicy, check_files, eligible, every_rank
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import clean_own_folder
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header

VERDICTS = PASS, LOST_WORK, HARD_FAIL, SILENT_DIVERGENCE = "PASS", "LOST_WORK", "HARD_FAIL", "SILENT_DIVERGENCE"


@dataclass(frozen=True)
class Verdict:
    """The result of a check. ``chosen``: the checkpoint that a resume takes; None for a fresh start. ``left``: files that belong
    to no checkpoint after the next run has saved and cleaned up."""
    verdict: str
    reason: str = ""
    chosen: Saved | None = None
    left: tuple[str, ...] = ()


def check_resume(sandbox: Sandbox, past: list[Saved], storage: Storage | None = None, tidy: bool = True) -> Verdict:
    """Checks the folder of ``sandbox``. ``past``: checkpoints committed before the workload, newest last. ``tidy``: also runs the
    next save, and checks again."""
    storage = storage or PosixStorage()
    required = max([*past, *sandbox.complete], key=_save_order, default=None)
    found = _resume(sandbox, storage, required)
    if found.verdict == PASS:
        found = _check_committed(sandbox, storage, found)
    if found.verdict == PASS:
        found = _check_pointers(sandbox, found)
    if found.verdict == PASS and tidy:
        found = _check_next_run(sandbox, storage, found)
    return found


def _save_order(saved: Saved) -> tuple[str, int]:
    return saved


def _resume(sandbox: Sandbox, storage: Storage, required: Saved | None) -> Verdict:
    try:
        choice = select_checkpoint(storage, sandbox.root, SingleProcess(),
                                   SelectionPolicy(sandbox.ranks, ranks_to_verify=every_rank))
    except UnusableCheckpointError as error:
        return Verdict(HARD_FAIL, f"no resume: {error}")
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"{type(error).__name__}: {error}")
    if choice.chosen is None:
        if required:
            return Verdict(HARD_FAIL, f"a fresh start, though {required} is complete")
        return Verdict(PASS, "nothing was complete")
    chosen = (choice.chosen.run or "", choice.chosen.step or 0)
    wrong = _differences(sandbox, choice, chosen)
    if wrong:
        return Verdict(SILENT_DIVERGENCE, wrong, chosen)
    if required and _save_order(chosen) < _save_order(required):
        refused = "; ".join(map(str, choice.refused))
        return Verdict(LOST_WORK, f"took {chosen}, though {required} was complete: {refused}", chosen)
    return Verdict(PASS, "", chosen)


def _differences(sandbox: Sandbox, choice: Choice, chosen: Saved) -> str:
    """Returns what is not, bit for bit, what was saved; empty if nothing."""
    if sorted(choice.chosen.files) != list(range(sandbox.ranks)):
        return f"{chosen} has files of ranks {sorted(choice.chosen.files)}"
    if chosen[0] not in RUNS:
        return f"{chosen} has no run: its files have no record"
    for proof in choice.shards:
        try:
            found = read_sources(partial(open, mode="rb"), choice.root, proof.sources)
        except (OSError, CorruptFileError) as error:            # it was verified, so it must be readable
            return f"rank {proof.rank}: {chosen} was selected and cannot be read: {error}"
        for name in differing_tensors(tensors(RUNS.index(chosen[0]), chosen[1], proof.rank), found):
            return f"rank {proof.rank}: {name} of {chosen} is not what was saved"
    return ""


def _check_committed(sandbox: Sandbox, storage: Storage, found: Verdict) -> Verdict:
    """Checks that every committed checkpoint is whole, not only the newest: a user can name it, or it is taken if newer ones are
    damaged."""
    for candidate in scan_records(storage, sandbox.root)[0]:
        if not candidate.committed:
            continue
        refusal = eligible(storage, sandbox.root, candidate, SelectionPolicy()) or check_files(
            storage, sandbox.root, candidate, sandbox.ranks)
        wrong = [str(refusal)] if refusal else damaged_metadata_files(storage, sandbox.root, candidate)
        if wrong:
            return Verdict(HARD_FAIL, f"committed but incomplete: {wrong[0]}", found.chosen)
    return found


def _check_pointers(sandbox: Sandbox, found: Verdict) -> Verdict:
    """Checks that what mindformers alone follows leads to something whole."""
    for what, check in _checks_of_pointers(sandbox).items():
        try:
            check()
        except (OSError, ValueError, KeyError, TypeError, MindResumeError) as error:
            return Verdict(HARD_FAIL, f"{what} points to something unusable: {error}", found.chosen)
    return found


def _checks_of_pointers(sandbox: Sandbox) -> dict[str, Callable[[], None]]:
    """Returns a check for each pointer that exists: ``meta.json`` of every rank, or the tracker."""
    if sandbox.format == ITERATION:
        checks = {TRACKER: partial(_follow_tracker, sandbox)}
    else:
        checks = {f"{folder}/{META}": partial(_follow_meta, os.path.join(sandbox.root, folder))
                  for folder in map(folder_name, range(sandbox.ranks))}
    return {what: check for what, check in checks.items() if os.path.exists(os.path.join(sandbox.root, what))}


def _follow_meta(folder: str) -> None:
    with open(os.path.join(folder, META)) as file:
        name = json.load(file)["last_ckpt_file"]
    with open(os.path.join(folder, name), "rb") as file:
        read_header(file, name)


def _follow_tracker(sandbox: Sandbox) -> None:
    """Reads all that mindformers alone reads of the iteration that the tracker names, and compares it with what was saved."""
    with open(os.path.join(sandbox.root, TRACKER), "rb") as file:
        step = parse_tracker(file.read())
    if isinstance(step, str):
        raise ValueError(step)
    folder = os.path.join(sandbox.root, iteration_name(step))
    with open(os.path.join(folder, COMMON), "rb") as file:
        found = parse_common(file.read(), COMMON).step_num
    if found != step:
        raise ValueError(f"{COMMON} in {iteration_name(step)} is of step {found}")
    if sandbox.ranks > 1:
        with open(os.path.join(folder, METADATA), "rb") as file:
            rows = read_metadata(file.read(), METADATA).values()
        for name in {stored.file for row in rows for copies in row.stored.values() for stored in copies}:
            with open(os.path.join(folder, name), "rb") as file:
                read_header(file, name)
        if len(rows) != 2:
            raise ValueError(f"{METADATA} in {iteration_name(step)} describes {len(rows)} tensors, not 2")
    choice = select_checkpoint(PosixStorage(), folder, SingleProcess(),
                               SelectionPolicy(sandbox.ranks, ranks_to_verify=every_rank))
    wrong = _differences(sandbox, choice, (choice.chosen.run or "", step))
    if wrong:
        raise ValueError(wrong)


def _check_next_run(sandbox: Sandbox, storage: Storage, found: Verdict) -> Verdict:
    """Runs the next start, one save and a retention of one checkpoint; then a resume must take it, and nothing else may be left.
    """
    run, step = len(RUNS) - 1, 90
    places = [sandbox.target(rank, run, storage) for rank in range(sandbox.ranks)]
    try:
        holder = LeaseHolder("saving", RUNS[run], "drill", "", 1, 1, 0.0, sandbox.ranks)
        lease = acquire(storage, sandbox.root, holder, 1.0, time=sandbox.injector,
                        keep_run_marker=sandbox.format == ITERATION)
        for target in places:
            clean_own_folder(target)
        Committer(places[0]).recover()
        save_without_faults(sandbox.root, sandbox.format, sandbox.ranks, run, step, commit=False, storage=storage)
        Committer(places[0], KeepLast(1)).saved(step)
        lease.release()
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"the next run cannot save: {error}", found.chosen)
    after = _resume(sandbox, storage, (RUNS[run], step))
    if after.verdict == PASS:
        after = _check_pointers(sandbox, after)
    if after.verdict != PASS:
        return Verdict(after.verdict, f"after the next run: {after.reason}", found.chosen)
    return Verdict(PASS, found.reason, found.chosen, tuple(_leftovers(sandbox, storage, step)))


def _leftovers(sandbox: Sandbox, storage: Storage, step: int) -> list[str]:
    """Returns files that belong to no checkpoint, and checkpoints that should be gone."""
    # A read lock goes when its process is seen dead. Here that is this process, which is alive: the simulation covers it.
    return leftovers(storage, sandbox.root, sandbox.format, (RUNS[-1], step),
                     ignored=lambda name: f"{PREFIX}{READER:04}-" in name)
