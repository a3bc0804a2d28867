"""What would be resumed? The same selection as at the start of a training, for all ranks, and every tensor compared."""
from __future__ import annotations

import json
import os
from dataclasses import dataclass

from mindresume.agree import Solo
from mindresume.drill.stories import RUNS, Saved, World, save_quietly, tensors
from mindresume.errors import DamagedFileError, MindResumeError, UnusableError
from mindresume.files import read_header, read_tensor
from mindresume.formats.names import META, folder_name
from mindresume.formats.rank_folders import scan_records
from mindresume.manifest import FOLDER, attempts
from mindresume.resume.prove import quick
from mindresume.resume.select import Choice, select
from mindresume.store.claim import Owner, occupy
from mindresume.store.commit import Committer, Place, clean_own_folder
from mindresume.store.retention import KeepLast
from mindresume.store.storage import PosixStorage, Storage

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
        choice = select(storage, world.root, Solo(), world.ranks, ranks=lambda candidate: list(candidate.files))
    except UnusableError as error:
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
            except (OSError, DamagedFileError) as error:        # it was proven, so it must be readable
                return f"rank {proof.rank}: {chosen} was chosen and cannot be read: {error}"
        for name, array in expected.items():
            if name not in found or found[name].tobytes() != array.tobytes():
                return f"rank {proof.rank}: {name} of {chosen} is not what was saved"
    return ""


def _committed(world: World, storage: Storage, found: Verdict) -> Verdict:
    """Not only the newest: whatever has a manifest is whole, so that it can be named, or taken if the newer ones are damaged."""
    for candidate in scan_records(storage, world.root)[0]:
        refusal = quick(storage, world.root, candidate, world.ranks) if candidate.committed else None
        if refusal:
            return Verdict(HARD_FAIL, f"committed and not whole: {refusal}", found.chosen)
    return found


def _pointers(world: World, found: Verdict) -> Verdict:
    """mindformers without mindresume goes by ``meta.json``: it must name a whole file, of this rank."""
    for rank in range(world.ranks):
        folder = os.path.join(world.root, folder_name(rank))
        path = os.path.join(folder, META)
        if not os.path.exists(path):
            continue
        try:
            with open(path) as file:
                name = json.load(file)["last_ckpt_file"]
            with open(os.path.join(folder, name), "rb") as file:
                read_header(file, name)
        except (OSError, ValueError, KeyError, TypeError, MindResumeError) as error:
            return Verdict(HARD_FAIL, f"{folder_name(rank)}/{META} leads nowhere: {error}", found.chosen)
    return found


def _next_life(world: World, storage: Storage, found: Verdict) -> Verdict:
    """The next run starts, saves once and keeps one: then a resume takes that, and nothing else is left."""
    run, step = len(RUNS) - 1, 90
    try:
        occupy(storage, world.root, Owner("saving", RUNS[run], "drill", "", 1, 1, 0.0, world.ranks), 0.0).leave()
        for rank in range(world.ranks):
            clean_own_folder(Place(storage, world.root, RUNS[run], rank, world.ranks))
        Committer(Place(storage, world.root, RUNS[run], 0, world.ranks)).adopt()
        save_quietly(world.root, world.format, world.ranks, run, step, commit=False, storage=storage)
        Committer(Place(storage, world.root, RUNS[run], 0, world.ranks), KeepLast(1)).saved(step)
    except (MindResumeError, OSError) as error:
        return Verdict(HARD_FAIL, f"the next run cannot save: {error}", found.chosen)
    after = _resume(world, storage, (RUNS[run], step))
    if after.verdict != PASS:
        return Verdict(after.verdict, f"after the next run: {after.reason}", found.chosen)
    return Verdict(PASS, found.reason, found.chosen, tuple(_left(world, storage)))


def _left(world: World, storage: Storage) -> list[str]:
    """Files of no checkpoint, and checkpoints that should have gone."""
    _, known, _ = scan_records(storage, world.root)
    names = storage.list(os.path.join(world.root, FOLDER))
    left = [f"{FOLDER}/{name}" for name in names if not any(True for _ in attempts([name]))]
    left += [f"{FOLDER}/{name}" for name, step, _ in attempts(names) if step != 90]
    for rank in range(world.ranks):
        folder = folder_name(rank)
        left += [f"{folder}/{name}" for name in storage.list(os.path.join(world.root, folder))
                 if f"{folder}/{name}" not in known and name != META]
    return left
