"""What would be resumed? The same selection as at the start of a training, for all ranks, and every tensor compared."""
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
from mindresume.fault_injection.scenarios import ITERATION, RUNS, Saved, World, save_quietly, tensors
from mindresume.formats.iteration_naming import COMMON, METADATA, TRACKER, iteration_name, parse_common, parse_tracker
from mindresume.formats.metadata import read_metadata
from mindresume.formats.rank_folder_naming import META, folder_name
from mindresume.formats.records import scan_records
from mindresume.model.manifest import FOLDER, attempt_name, attempts, parse_attempt
from mindresume.resume.checkpoint_warnings import damaged_metadata_files
from mindresume.resume.choice import Choice
from mindresume.resume.file_checks import check_files
from mindresume.resume.selection_policy import SelectionPolicy, every_rank
from mindresume.resume.shared_selection import select_shared
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import clean_own_folder
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header, read_tensor

VERDICTS = PASS, LOST_WORK, HARD_FAIL, SILENT_DIVERGENCE = "PASS", "LOST_WORK", "HARD_FAIL", "SILENT_DIVERGENCE"


@dataclass(frozen=True)
class Verdict:
    """``chosen``: what a resume takes, None: a fresh start. ``left``: files that belong to no checkpoint after the next run has
    saved and cleaned up."""
    verdict: str
    reason: str = ""
    chosen: Saved | None = None
    left: tuple[str, ...] = ()


def judge(world: World, past: list[Saved], storage: Storage | None = None, tidy: bool = True) -> Verdict:
    """``past``: committed before the attack, newest last. ``tidy``: let the next run save, and look again."""
    storage = storage or PosixStorage()
    due = max([*past, *world.complete], key=_newer, default=None)
    found = _resume(world, storage, due)
    if found.verdict == PASS:
        found = _committed(world, storage, found)
    if found.verdict == PASS:
        found = _pointers(world, found)
    if found.verdict == PASS and tidy:
        found = _next_life(world, storage, found)
    return found


def _newer(saved: Saved) -> tuple[str, int]:
    return saved


def _resume(world: World, storage: Storage, due: Saved | None) -> Verdict:
    try:
        choice = select_shared(storage, world.root, SingleProcess(), SelectionPolicy(world.ranks, ranks_to_verify=every_rank))
    except UnusableCheckpointError as error:
        return Verdict(HARD_FAIL, f"no resume: {error}")
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"{type(error).__name__}: {error}")
    if choice.chosen is None:
        return Verdict(HARD_FAIL, f"a fresh start, though {due} is complete") if due else Verdict(PASS, "nothing was complete")
    chosen = (choice.chosen.run or "", choice.chosen.step or 0)
    wrong = _wrong(world, choice, chosen)
    if wrong:
        return Verdict(SILENT_DIVERGENCE, wrong, chosen)
    if due and _newer(chosen) < _newer(due):
        refused = "; ".join(map(str, choice.refused))
        return Verdict(LOST_WORK, f"took {chosen}, though {due} was complete: {refused}", chosen)
    return Verdict(PASS, "", chosen)


def _wrong(world: World, choice: Choice, chosen: Saved) -> str:
    """What is not, bit for bit, what was saved; empty if all is."""
    if sorted(choice.chosen.files) != list(range(world.ranks)):
        return f"{chosen} has files of ranks {sorted(choice.chosen.files)}"
    if chosen[0] not in RUNS:
        return f"{chosen} is of no run: files that no record names"
    for proof in choice.shards:
        expected = tensors(RUNS.index(chosen[0]), chosen[1], proof.rank)
        found = {}
        for source in proof.sources:
            path = os.path.join(choice.root, source.file.path)
            try:
                with open(path, "rb") as file:
                    header = read_header(file, path)
                    found.update({name: read_tensor(file, header.tensors[name]) for name in source.names or header.tensors})
            except (OSError, CorruptFileError) as error:        # it was proven, so it must be readable
                return f"rank {proof.rank}: {chosen} was chosen and cannot be read: {error}"
        for name, array in expected.items():
            if name not in found or found[name].tobytes() != array.tobytes():
                return f"rank {proof.rank}: {name} of {chosen} is not what was saved"
    return ""


def _committed(world: World, storage: Storage, found: Verdict) -> Verdict:
    """Not only the newest: whatever has a manifest is whole, so that it can be named, or taken if the newer ones are damaged."""
    for candidate in scan_records(storage, world.root)[0]:
        if not candidate.committed:
            continue
        refusal = check_files(storage, world.root, candidate, world.ranks)
        wrong = [str(refusal)] if refusal else damaged_metadata_files(storage, world.root, candidate)
        if wrong:
            return Verdict(HARD_FAIL, f"committed and not whole: {wrong[0]}", found.chosen)
    return found


def _pointers(world: World, found: Verdict) -> Verdict:
    """What mindformers without mindresume goes by must lead to something whole."""
    for what, check in _checks_of_pointers(world).items():
        try:
            check()
        except (OSError, ValueError, KeyError, TypeError, MindResumeError) as error:
            return Verdict(HARD_FAIL, f"{what} leads nowhere: {error}", found.chosen)
    return found


def _checks_of_pointers(world: World) -> dict[str, Callable[[], None]]:
    """By name of the pointers that are there: ``meta.json`` of every rank, or the tracker."""
    if world.format == ITERATION:
        checks = {TRACKER: partial(_follow_tracker, world)}
    else:
        checks = {f"{folder}/{META}": partial(_follow_meta, os.path.join(world.root, folder))
                  for folder in map(folder_name, range(world.ranks))}
    return {what: check for what, check in checks.items() if os.path.exists(os.path.join(world.root, what))}


def _follow_meta(folder: str) -> None:
    with open(os.path.join(folder, META)) as file:
        name = json.load(file)["last_ckpt_file"]
    with open(os.path.join(folder, name), "rb") as file:
        read_header(file, name)


def _follow_tracker(world: World) -> None:
    """All that mindformers alone reads of the iteration that the tracker names; and it is what was saved."""
    with open(os.path.join(world.root, TRACKER), "rb") as file:
        step = parse_tracker(file.read())
    if isinstance(step, str):
        raise ValueError(step)
    folder = os.path.join(world.root, iteration_name(step))
    with open(os.path.join(folder, COMMON), "rb") as file:
        found = parse_common(file.read(), COMMON).step_num
    if found != step:
        raise ValueError(f"{COMMON} in {iteration_name(step)} is of step {found}")
    if world.ranks > 1:
        with open(os.path.join(folder, METADATA), "rb") as file:
            rows = read_metadata(file.read(), METADATA).values()
        for name in {stored.file for row in rows for copies in row.stored.values() for stored in copies}:
            with open(os.path.join(folder, name), "rb") as file:
                read_header(file, name)
        if len(rows) != 2:
            raise ValueError(f"{METADATA} in {iteration_name(step)} describes {len(rows)} tensors, not 2")
    choice = select_shared(PosixStorage(), folder, SingleProcess(), SelectionPolicy(world.ranks, ranks_to_verify=every_rank))
    wrong = _wrong(world, choice, (choice.chosen.run or "", step))
    if wrong:
        raise ValueError(wrong)


def _next_life(world: World, storage: Storage, found: Verdict) -> Verdict:
    """The next run starts, saves once and keeps one: then a resume takes that, and nothing else is left."""
    run, step = len(RUNS) - 1, 90
    places = [world.place(rank, run, storage) for rank in range(world.ranks)]
    try:
        holder = LeaseHolder("saving", RUNS[run], "drill", "", 1, 1, 0.0, world.ranks)
        lease = acquire(storage, world.root, holder, 1.0, clock=world.machine.clock, sleep=world.machine.sleep,
                        keep_run_marker=world.format == ITERATION)
        for place in places:
            clean_own_folder(place)
        Committer(places[0]).adopt()
        save_quietly(world.root, world.format, world.ranks, run, step, commit=False, storage=storage)
        Committer(places[0], KeepLast(1)).saved(step)
        lease.release()
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"the next run cannot save: {error}", found.chosen)
    after = _resume(world, storage, (RUNS[run], step))
    if after.verdict == PASS:
        after = _pointers(world, after)
    if after.verdict != PASS:
        return Verdict(after.verdict, f"after the next run: {after.reason}", found.chosen)
    return Verdict(PASS, found.reason, found.chosen, tuple(_left(world, storage, step)))


def _left(world: World, storage: Storage, step: int) -> list[str]:
    """Files of no checkpoint, and checkpoints that should have gone."""
    candidates, known, _ = scan_records(storage, world.root)
    # What says who removes goes when its process is seen dead. Here that is this one, which lives: the simulation looks after it.
    attempted = [name for name in storage.list(os.path.join(world.root, FOLDER)) if f"{PREFIX}{READER:04}-" not in name]
    if world.format == ITERATION:
        base = iteration_name(step)
        known |= {file.path for candidate in candidates for file in candidate.metadata_files}
        left = [f"{FOLDER}/{name}" for name in attempted if name != f"ended-{RUNS[-1]}.json"]     # tells the number of the run
        left += [name for name in storage.list(world.root) if name not in (FOLDER, TRACKER, base)]
        left += [f"{base}/{name}" for name in storage.list(os.path.join(world.root, base))
                 if f"{base}/{name}" not in known and name != FOLDER]
        return left + [f"{base}/{FOLDER}/{name}" for name in storage.list(os.path.join(world.root, base, FOLDER))
                       if name != attempt_name(step, RUNS[-1])]
    left = [f"{FOLDER}/{name}" for name in attempted if parse_attempt(name) is None]
    left += [f"{FOLDER}/{name}" for name, found, _ in attempts(attempted) if found != step]
    for folder in map(folder_name, range(world.ranks)):
        left += [f"{folder}/{name}" for name in storage.list(os.path.join(world.root, folder))
                 if f"{folder}/{name}" not in known and name != META]
    return left
