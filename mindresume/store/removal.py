"""Removing checkpoints: what goes, decided as a value, and carried out so that it may die anywhere.

    made = plan(storage, root, policy, holds(), active=run)       # looks, touches nothing
    removed = carry_out(storage, root, made, holds)

    per victim   rename its box to trash-... ─▶ sync ─▶ held after all? rename it back
    then         weights of all ranks ─▶ sync their folders ─▶ records ─▶ the trash folder

The box is the folder of records, or the iteration folder, which holds the weights too: then it is all that has to go.

The rename un-commits: from then on it is no checkpoint, only work left to do, which the next ``carry_out`` of any process
finishes. The records go last, because they say which files belong to it; and only after the names of the weights are gone for
good, or a power loss could bring weights back that nobody knows any more.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from mindresume.errors import RecordError
from mindresume.formats import Candidate
from mindresume.formats.iteration_files import COMMON, TRACKER, iteration_name, parse_weight_file
from mindresume.formats.iterations import tracked
from mindresume.formats.names import folder_name, name_for_rank, parse_name
from mindresume.formats.rank_folders import labelled_files
from mindresume.formats.records import attempts_within, scan_records, whole
from mindresume.manifest import FOLDER, MANIFEST, TRASH, Manifest, parse_attempt, read_record, record_rank
from mindresume.store.retention import KeepAny, Policy, surplus
from mindresume.store.storage import Storage, parallel, remove_tree, temporary_name

Holds = Callable[[], Mapping[str, str]]                # name of an attempt folder -> who holds it, asked anew each time

NEWEST_WHOLE = "the newest one that is whole"
NOTHING_WHOLE = "no checkpoint is whole: nothing goes while that is so"


@dataclass(frozen=True)
class Plan:
    """What a policy says about the saves of one folder, each group newest first.

    ``kept``: checkpoints that stay. ``victims``: checkpoints that go. ``debris``: saves that never completed and never will,
    they go too. ``unfinished``: incomplete as well, but their run may still go on. ``held``: {name of the attempt folder: who
    holds it} of those that would go and are in none of the groups that do. ``reasons``: why, by name of the attempt folder.
    """
    kept: tuple[Candidate, ...] = ()
    victims: tuple[Candidate, ...] = ()
    debris: tuple[Candidate, ...] = ()
    unfinished: tuple[Candidate, ...] = ()
    spared: tuple[Candidate, ...] = ()                 # the candidates of ``held``
    held: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


# ---- deciding ------------------------------------------------------------------------------------------------------

def plan(storage: Storage, root: str, policy: Policy, held: Mapping[str, str] | None = None, active: str | None = None,
         ended: Callable[[str], bool] = lambda run: False) -> Plan:
    """What goes from ``root``. Counts the checkpoints of earlier runs too, and never those that mindformers wrote alone.

    ``active``: the run that saves now; its incomplete saves before its newest commit go, because every rank is past them.
    ``ended(run)``: whether a run is over for certain; asked after the folder was read, so that no run that began meanwhile
    counts as over. Of other runs nothing incomplete goes, however old.

    The newest committed checkpoint whose files are all there with the recorded sizes never goes. Committed ones newer than it
    are broken: they do not count when the policy chooses among the others, and go only if it would not keep them either if
    they counted. Without a single whole one no checkpoint goes at all.
    """
    found, _, _ = scan_records(storage, root)
    committed = [c for c in found if c.committed]
    good = next((index for index, c in enumerate(committed)
                 if c.problem is None and whole(storage, root, [*c.every_file, *c.small])), None)
    reasons: dict[str, str] = {}
    going = _policy_says(policy, committed, good, reasons)
    for candidate in committed if (named := tracked(storage, root)) is not None else ():
        if candidate.step == named and candidate.base and candidate.name in going:      # somebody set it back by hand
            going.remove(candidate.name)
            reasons[candidate.name] = f"{TRACKER} names it"
    # Saves that were complete once and that nobody can commit any more take a place, but remove nothing good.
    over = {run for run in {c.run for c in found if c.run not in (None, active) and not c.committed} if ended(run)}
    counted = [c for c in found if c.committed or (c.existed and c.run in over)]
    stale = [counted[index] for index in surplus(policy, counted) if not counted[index].committed] if good is not None else []
    going |= {c.name for c in stale}
    reasons.update({c.name: f"not committed, and none of: {policy}" for c in stale})

    newest = max((c.step or 0 for c in committed if c.run == active), default=0)
    debris = [c for c in found if not c.existed and (c.run in over or (c.run == active and (c.step or 0) < newest))]
    reasons.update({c.name: "the save never completed" for c in debris})
    lost = {c.name for c in debris}
    unfinished = [c for c in found if not c.existed and c.name not in lost]
    reasons.update({c.name: "not complete yet; its run may still go on" for c in unfinished})

    victims = [c for c in found if c.name in going]
    spared = [c for c in victims + debris if c.name in (held or {})]
    names = {c.name: (held or {})[c.name] for c in spared}
    reasons.update({name: f"held: {who}" for name, who in names.items()})
    kept = [c for c in found if c.existed and c.name not in going]
    for candidate in kept:
        reasons.setdefault(candidate.name, "complete, not committed yet")
    return Plan(tuple(kept), tuple(c for c in victims if c.name not in names),
                tuple(c for c in debris if c.name not in names), tuple(unfinished), tuple(spared), names, reasons)


def _policy_says(policy: Policy, committed: Sequence[Candidate], good: int | None, reasons: dict[str, str]) -> set[str]:
    """Names of the committed ones (newest first) that go; ``reasons`` gets one for each of them. ``good``: the newest whole."""
    if good is None:
        reasons.update({c.name: NOTHING_WHOLE for c in committed})
        return set()
    going: set[str] = set()
    # Those newer than the good one are broken: judged among all; the others as if the broken ones were not there.
    for counted, judged in ((committed, committed[:good]), (committed[good:], committed[good:])):
        keepers = _keepers(policy, counted)
        gone = set(surplus(policy, counted))
        for index, candidate in enumerate(judged):
            if index in gone:
                going.add(candidate.name)
                reasons[candidate.name] = f"none of: {policy}"
            else:
                reasons[candidate.name] = ", ".join(keepers.get(index, ())) or "the newest one"
    best = committed[good].name
    reasons[best] = ", ".join([NEWEST_WHOLE, *_keepers(policy, committed[good:]).get(0, ())])
    return going


def _keepers(policy: Policy, newest_first: Sequence[Candidate]) -> dict[int, list[str]]:
    """Which parts of ``policy`` keep each index."""
    found: dict[int, list[str]] = {}
    for part in policy.policies if isinstance(policy, KeepAny) else (policy,):
        for index in part.keeps(newest_first):
            found.setdefault(index, []).append(str(part))
    return found


# ---- carrying out --------------------------------------------------------------------------------------------------

def carry_out(storage: Storage, root: str, made: Plan, holds: Holds = dict,
              log: Callable[[str], None] = lambda text: None) -> list[Candidate]:
    """Removes victims and debris of a plan, and finishes what an earlier process left. Returns those that are no checkpoints any
    more; one that somebody else removed or that is held by now is not among them. OSError of a file system in trouble: what
    was left is finished by the next call."""
    removed = [candidate for candidate in (*made.victims, *made.debris) if _uncommit(storage, root, candidate, holds, log)]
    empty_trash(storage, root, holds, {candidate.name for candidate in removed})
    return removed


def _uncommit(storage: Storage, root: str, candidate: Candidate, holds: Holds, log: Callable[[str], None]) -> bool:
    """Whoever begins to read publishes its hold and then looks whether the folder is still there; this renames and then looks for
    holds. So at least one of the two sees the other."""
    if not candidate.box:
        return False
    records = os.path.join(root, FOLDER)
    trash = os.path.join(records, TRASH + candidate.name)
    try:
        storage.rename(candidate.box, trash)
    except FileNotFoundError:
        return False                                                    # somebody removed it by hand: fine
    for folder in dict.fromkeys((os.path.dirname(candidate.box), records)):
        storage.sync(folder)
    who = holds().get(candidate.name)
    if who is None:
        return True
    if _restore(storage, trash, candidate.box):
        log(f"step {candidate.step} stays for now: {who}")
    return False


def _restore(storage: Storage, trash: str, attempt: str) -> bool:
    """False if another process finished the removal meanwhile."""
    try:
        storage.rename(trash, attempt)
    except FileNotFoundError:
        return False
    storage.sync(os.path.dirname(attempt))
    return True


def empty_trash(storage: Storage, root: str, holds: Holds = dict, checked: Collection[str] = ()) -> None:
    """Finishes every removal that was begun. ``checked``: names of attempts that are known not to be held.

    What a process un-committed and then died before it saw the hold on it comes back if nothing of it is lost yet; else it waits
    until the hold is gone.
    """
    folder = os.path.join(root, FOLDER)
    names = [name for name in storage.list(folder) if name.startswith(TRASH)]
    if not names:
        return
    held = holds() if any(name.removeprefix(TRASH) not in checked for name in names) else {}
    for name in list(names):
        attempt = name.removeprefix(TRASH)
        if attempt in held and attempt not in checked:
            names.remove(name)
            manifest, base = _manifest_of(storage, root, os.path.join(folder, name))
            if manifest is not None:
                box = os.path.join(root, iteration_name(manifest.step)) if base != root else os.path.join(folder, attempt)
                if storage.status(box) is None:
                    _restore(storage, os.path.join(folder, name), box)
    # A name can be used twice where rank folders were deleted by hand and their records were not: the later file stays.
    _, claimed, _ = scan_records(storage, root)
    for name in names:
        _clear(storage, root, os.path.join(folder, name), claimed)


def _manifest_of(storage: Storage, root: str, trash: str) -> tuple[Manifest | None, str]:
    """If nothing of it is lost yet; and what its paths are relative to."""
    inner = attempts_within(storage, os.path.dirname(trash), os.path.basename(trash))
    folder, base = (inner[0].path(os.path.dirname(trash)), trash) if inner else (trash, root)
    try:
        with storage.open(os.path.join(folder, MANIFEST)) as file:
            manifest = Manifest.read(file)
    except (OSError, RecordError):
        return None, base
    there = set(map(record_rank, storage.list(folder)))
    files = [*(file for files in manifest.files for file in files), *manifest.small]
    return manifest if there.issuperset(manifest.ranks) and whole(storage, base, files) else None, base


def _clear(storage: Storage, root: str, trash: str, claimed: Collection[str]) -> None:
    status = storage.status(trash)
    if status is not None and not status.is_link:               # what lies behind a link is somebody else's
        if holds_weights(storage, trash):
            remove_tree(storage, trash)
            return
        _clear_weights(storage, root, trash, claimed)
        for entry in storage.list(trash):
            storage.remove(os.path.join(trash, entry))
    storage.remove(trash)


def holds_weights(storage: Storage, trash: str) -> bool:
    """Whether it was an iteration folder: then nothing of it lies elsewhere."""
    names = storage.list(trash)
    return FOLDER in names or any(map(parse_weight_file, names)) or COMMON in names


def _clear_weights(storage: Storage, root: str, trash: str, claimed: Collection[str]) -> None:
    spared = {os.path.join(root, path) for path in claimed}
    by_folder: dict[str, list[str]] = {}
    for path in weights_of(storage, root, trash):
        if path not in spared:
            by_folder.setdefault(os.path.dirname(path), []).append(path)

    def clear(item: tuple[str, list[str]]) -> None:
        rank_folder, paths = item
        for path in paths:
            storage.remove(path)
        try:
            storage.sync(rank_folder)           # also if nothing was there: who removed it may have died before this
        except FileNotFoundError:
            return                              # this rank never wrote anything, or its folder was removed by hand
    parallel(storage, clear, by_folder.items())


def weights_of(storage: Storage, root: str, folder: str) -> list[str]:
    """Paths of the weights that an attempt may have written, on every rank, recorded or not. ``folder``: path of its records,
    already trash or not yet.

    One record names the file of all ranks: the prefix with its suffix belongs to one run alone. Without any record that is of
    this attempt and names a file of its step, the labels inside the files tell.
    """
    step, run = parse_attempt(os.path.basename(folder).removeprefix(TRASH)) or (0, "")
    for entry in storage.list(folder):
        if record_rank(entry) is None:
            continue
        try:
            with storage.open(os.path.join(folder, entry)) as file:
                record, _ = read_record(file)
        except (OSError, RecordError):
            continue
        name = record.files[0].path.partition("/")[2]
        parsed = parse_name(name)
        if (record.run, record.step) != (run, step) or parsed is None or (parsed.rank, parsed.epoch, parsed.step) != (
                record.rank, record.state.epoch, record.state.step_in_epoch):
            continue                                            # it may name what is not of this checkpoint
        paths = [os.path.join(root, folder_name(rank), name_for_rank(name, rank, record.files[0].format))
                 for rank in range(record.world_size)]
        return paths + [temporary_name(path, record.run) for path in paths]
    return labelled_files(storage, root, run, step)
