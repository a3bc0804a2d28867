"""The simulation finds broken protocols: known ways to get them wrong, put back one by one, and how soon each is found.

    pytest -s tests/simulation/test_teeth.py                    # each from a seed that finds it soon, with a table
    python tests/simulation/test_teeth.py [PART OF A NAME]      # each from seed 0: the table of docs/reliability.md

A mutant is the product with some text of it replaced. It counts as found only if the product as it is passes with the same seeds.
"""
from __future__ import annotations
import __future__

import inspect
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from mindresume import manifest
from mindresume.formats import iterations, records
from mindresume.resume import choosing, restore, select
from mindresume.simulation.explore import SCENARIOS, SHARE, Counts, Failure, Known, operations_of, run
from mindresume.simulation.oracle import LOST, STUCK, TOLD, UNEQUAL, UNTIDY, WRONG
from mindresume.simulation.schedule import Schedule, Strike, draw
from mindresume.simulation.standins import replaced
from mindresume.store import (
    background,
    claim,
    commit,
    iteration,
    manager,
    mirror,
    preemption,
    protection,
    remote,
    removal,
    save_session,
    saver,
    shard,
    staging,
    storage,
    trials,
)

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Edit:
    """``old`` in the source of ``name``, a function of ``owner`` (a module or a class), becomes ``new``."""
    owner: Any
    name: str
    old: str
    new: str


def mutate(patch: Patch, edits: Sequence[Edit]) -> None:
    for owner, name in dict.fromkeys((edit.owner, edit.name) for edit in edits):
        function = vars(owner)[name]
        source = textwrap.dedent(inspect.getsource(function))
        for edit in edits:
            if (edit.owner, edit.name) == (owner, name):
                assert source.count(edit.old) == 1, f"{name} is not as this mutant wants it: {edit.old!r}"
                source = source.replace(edit.old, edit.new)
        code = compile(source, f"<mutant of {name}>", "exec", __future__.annotations.compiler_flag)
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        if isinstance(owner, type):
            patch.setattr(owner, name, made[name])
            continue
        for module in [module for module_name, module in sys.modules.items() if module_name.startswith("mindresume.")]:
            for key, value in list(vars(module).items()):
                if value is function:                           # whoever has imported it
                    patch.setattr(module, key, made[name])


Draws = Callable[[int, int, Sequence[str]], Schedule]       # of a seed, for so many operations, with strikes of these kinds


def at_random(seed: int, operations: int, kinds: Sequence[str]) -> Schedule:
    return draw(random.Random(seed), operations, kinds)


def one_strike(*kinds: str) -> Draws:
    """Seeds are operations, at each of which one strikes."""
    return lambda seed, operations, _: Schedule(seed, strikes=(Strike(1 + seed // len(kinds) % operations,
                                                                      kinds[seed % len(kinds)]),))


@dataclass(frozen=True)
class Mutant:
    """``kinds`` of finding of which one is expected in ``scenario``. ``first``: the seed with which the test begins; it is found
    ``within`` so many. ``deaths``: as of ``explore.run``. ``draws``: the schedule of a seed."""
    name: str
    edits: tuple[Edit, ...]
    scenario: str
    format: str
    way: str
    kinds: tuple[str, ...]
    first: int = 0
    within: int = 1
    deaths: bool = True
    draws: Draws = at_random


def mutant(name: str, edits: list[Edit], where: tuple[str, str, str], kinds: str, **how: Any) -> Mutant:
    return Mutant(name, tuple(edits), *where, tuple(kinds.split()), **how)


MUTANTS = [
    # ---- defects of earlier versions -----------------------------------------------------------------------------------
    mutant("files are removed after the rename of their record was attempted", [
        Edit(shard, "write_shard", "return _settled(place, step, error)", "raise place.storage.remove(where) or error")],
        ("prune", "safetensors", ""), f"{LOST} {STUCK}", deaths=False, first=1957),
    mutant("what was committed meanwhile is reported as failed", [
        Edit(shard, "_settled", "found = _recorded(place, step, place.bases(step))", "found = None"),
        Edit(shard, "_settled", "may not be saved", "was not saved")],
        ("save", "iteration", ""), TOLD, deaths=False, first=170),
    mutant("retention removes what is of another training", [
        Edit(commit.Committer, "prune", "self._is_over, self.place.lineage)", "self._is_over, None)")],
        ("afresh", "safetensors", ""), LOST),
    mutant("trash has no name of its own, and one victim that fails stops the rest", [
        Edit(manifest, "trash_name", ".{secrets.token_hex(4)}", ""), Edit(removal, "carry_out", "continue", "raise")],
        ("orphan", "iteration", ""), UNTIDY, deaths=False),
    mutant("a job counts against a checkpoint from the moment it was chosen", [
        Edit(manager.CheckpointManager, "begin", "agreed(self.group", "self.meet(); self.begin_trial(); agreed(self.group")],
        ("restarts", "safetensors", ""), LOST),
    mutant("nobody waits for what other ranks see", [
        Edit(choosing.Chooser, "choose", "settled = settle(disk, path, group, islands)",
             "from mindresume.resume.witness import Settled; settled = Settled()")], ("same hosts", "safetensors", ""), LOST,
        deaths=False, first=43),
    mutant("the signs of life of another job are expected as often as one's own", [
        Edit(claim, "_watch", "owner.every if _is_told_by_beats(owner) else BEAT", "BEAT")], ("rare beats", "safetensors", ""),
        STUCK, deaths=False, first=7),
    mutant("retention removes the last healthy one", [
        Edit(protection, "protected", "for rule in RULES:", "for rule in RULES[:1] + RULES[2:]:")],
        ("health", "safetensors", ""), f"{LOST} {STUCK}", deaths=False, first=1),
    mutant("nodes that share no disk upload what each has", [
        Edit(manager.CheckpointManager, "_start_mirror", "pledged=apart and self.settings.leave_check > 0", "pledged=False")],
        ("bucket slow", "safetensors", ""), LOST, deaths=False, first=7),
    mutant("a manifest in the bucket that cannot be read ends the start", [
        Edit(restore.Restore, "_offer", "except (RecordError, RemoteError) as error:", "except RecordError as error:")],
        ("bucket archived", "safetensors", ""), STUCK, deaths=False),
    mutant("a manifest in the bucket that cannot be read ends all retention there", [
        Edit(remote.Remote, "_known", "except (RecordError, RemoteError) as error:", "except RecordError as error:")],
        ("bucket archived", "safetensors", ""), UNTIDY, deaths=False),
    mutant("rank 0 is overtaken at the url and tells nobody", [
        Edit(mirror.Mirror, "_end", "if self.place.rank == 0:", "if self.place.rank == 0 and not self._stopped:")],
        ("two pods", "safetensors", ""), TOLD, deaths=False),
    mutant("an attempt without inner folders is no attempt", [
        Edit(records, "find_attempts", "attempts_within(storage, root, making) or [",
             "attempts_within(storage, root, making) or 0 * [")], ("prune", "iteration", ""), UNTIDY),
    mutant("a late tracker counts as set back while a later save has no name", [
        Edit(iterations, "_from_tracker", " and (c.step in intended or parse_iteration(c.base) is not None)", "")],
        ("prune", "iteration", ""), LOST, first=67),
    mutant("memory that was given back is mapped anew", [
        Edit(staging.Staging, "unpack", "if self.fd < 0:", "if False:")],
        ("save", "safetensors", "thread"), WRONG, deaths=False, first=726),

    # ---- committing ----------------------------------------------------------------------------------------------------
    mutant("no fence", [
        Edit(shard, "write_shard", "fence(place.storage, place.root, place.run)", "pass"),
        Edit(commit.Committer, "try_commit", "fence(self.place.storage, self.place.root, self.place.run)", "pass")],
        ("twice", "iteration", ""), LOST, deaths=False, first=15),
    mutant("a manifest before all records are there", [
        Edit(commit.Committer, "try_commit", "if missing:", "if 0 in missing:"),
        Edit(commit.Committer, "_manifest", "read, place.ranks)",
             "read, [r for r in place.ranks if r not in self._missing(step)])"),
        Edit(commit.Committer, "_manifest", "zip(place.ranks, records, strict=True)", "zip(place.ranks, records)")],
        ("prune", "safetensors", ""), f"{LOST} {STUCK} {WRONG}"),
    mutant("files are published without a flush of their folder", [
        Edit(storage, "publish", "storage.sync(folder)", "pass")], ("save", "ckpt", ""), LOST, first=2),
    mutant("saved is said before it is written", [
        Edit(background, "serve", "outcome = work.write(", "send((\"outcome\", Outcome(step, True))); outcome = work.write(")],
        ("save", "safetensors", "thread"), LOST, first=1),
    mutant("a save in doubt is reported as saved", [
        Edit(saver.Work, "write", "written.doubt is None", "True")], ("save", "ckpt", ""), LOST,
        draws=one_strike("EIO")),
    mutant("earlier runs' complete saves are not adopted", [
        Edit(commit.Committer, "adopt", "storage, root, adopted = self.place.storage, self.place.root, []", "return []")],
        ("save", "iteration", ""), UNTIDY),
    mutant("the oldest is adopted last", [
        Edit(commit.Committer, "adopt", "reversed(found)", "found")], ("uncommitted", "iteration", ""), LOST),
    mutant("an iteration folder of that name is not made way", [
        Edit(iteration, "show", "if storage.status(target) is not None:", "if False:")], ("afresh", "iteration", ""),
        LOST, deaths=False),
    mutant("what a dead job intended with the tracker is not settled", [
        Edit(commit.Committer, "adopt", "iteration.settle(storage, root, scan_records(storage, root)[0], self.place.run)",
             "pass")], ("save", "iteration", ""), UNTIDY),
    mutant("the intent goes before the tracker is changed", [
        Edit(iteration, "show", "point(storage, root, step, place.run)", "storage.remove(intent); point(storage, root, step, "
             "place.run)")], ("save", "iteration", ""), LOST, first=2),

    # ---- removing ------------------------------------------------------------------------------------------------------
    mutant("older ones are removed before the pointers are changed", [
        Edit(commit.Committer, "_after", "self._point(self.place, manifest)", "self.prune(); self._point(self.place, manifest)")],
        ("prune", "safetensors", ""), LOST),
    mutant("policies count what is not committed", [
        Edit(removal, "plan", "committed = [c for c in counted if c.committed]", "committed = list(counted)")],
        ("restarts", "safetensors", ""), LOST, draws=one_strike("EIO"), deaths=False),
    mutant("a hold is not looked for after the rename", [
        Edit(removal, "_uncommit", "who = holds().get(candidate.name)", "who = None")],
        ("a reader", "safetensors", ""), WRONG, deaths=False, first=988),
    mutant("weights are removed before the rename un-commits them", [
        Edit(removal, "_uncommit", "storage.rename(candidate.box, os.path.join(records, name))",
             "_clear_weights(storage, root, candidate.attempt, ()); storage.rename(candidate.box, os.path.join(records, name))")],
        ("a reader", "safetensors", ""), WRONG, deaths=False, first=119),
    mutant("a reader looks first, then holds", [
        Edit(claim, "hold", "claim.publish()", "there = storage.status(box); claim.publish()"),
        Edit(claim, "hold", "if storage.status(box) is None:", "if there is None:")],
        ("a reader", "safetensors", ""), WRONG, deaths=False, first=420),
    mutant("a run that lives counts as over", [
        Edit(claim, "ended", "return lambda run: run not in living", "return lambda run: True")], ("readers", "safetensors", ""),
        LOST, deaths=False, first=345),
    mutant("what all nodes have is not protected", [
        Edit(protection, "protected", "for rule in RULES:", "for rule in RULES[:3] + RULES[4:]:")],
        ("nodes", "safetensors", ""), f"{LOST} {STUCK}", first=1),

    # ---- starting and ending together ----------------------------------------------------------------------------------
    mutant("a claim that cannot be read is none", [
        Edit(claim, "look", "unreadable[run] = str(error)", "pass")],
        ("twice", "safetensors", ""), STUCK, deaths=False, first=1511),
    mutant("a note on trial stays while the training goes on from another", [
        Edit(trials.Trial, "_forget_others", "if self.limit else ()", "if False else ()")],
        ("damaged", "safetensors", ""), UNTIDY, deaths=False),
    mutant("the number of a run is used again", [
        Edit(claim, "next_run", "max(map(run_sequence, used), default=0) + 1", "max(map(run_sequence, used), default=1)")],
        ("restarts", "safetensors", ""), f"{UNTIDY} {LOST} {UNEQUAL} {WRONG}"),
    mutant("ranks do not agree on a suffix", [
        Edit(save_session, "open_save_session", "[row[1] for row in rows if row] + suffixes)",
             "[row[1] for row in rows if row] + [suffixes[group.rank]])")], ("restarts", "safetensors", ""), f"{UNTIDY} {LOST}",
        first=4),
    mutant("what rank 0 finds decides alone", [
        Edit(select, "proven_by_all", 'for row in rows if "refusal" in row]', 'for row in rows[:1] if "refusal" in row]')],
        ("job", "safetensors", ""), WRONG, deaths=False, first=118),
    mutant("a rank that is asked to leave leaves alone", [
        Edit(preemption.PreemptionHandler, "at", "if self.group.size == 1:", "if True:")],
        ("job", "safetensors", ""), STUCK, deaths=False, first=3),
    mutant("the last step is saved again by one rank alone", [
        Edit(manager.CheckpointManager, "_save_last", "step.collect()", "pass")],
        ("job", "safetensors", ""), STUCK, deaths=False, first=106),
]


# ---- hunting -------------------------------------------------------------------------------------------------------

@contextmanager
def mutated(one: Mutant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, one.edits)
        yield


def hunt(one: Mutant, seeds: range, changed: bool = True) -> tuple[int | None, Failure | None, Counts]:
    """Returns the first of ``seeds`` that finds something; what; and the counts until then. ``changed`` False: of the product
    as it is, and on no seed that ``until`` is not reached by."""
    scenario, counts, known = SCENARIOS[one.scenario], Counts(), Known()
    with replaced():
        size = operations_of(scenario, one.format, one.way)     # and the past, by the product as it is
        with mutated(one) if changed else pytest.MonkeyPatch.context():
            for seed in seeds:
                failure = run(scenario, one.format, one.way, one.draws(seed, size, scenario.kinds), known, counts, one.deaths,
                              SHARE)
                if failure is not None:
                    return seed, failure, counts
    return None, None, counts


def row_of(one: Mutant, seed: int, failure: Failure, counts: Counts, first: int) -> str:
    where = ", ".join(filter(None, (one.scenario, one.format, one.way)))
    return f"| {one.name} | {failure.findings[0].kind} | {where} | {seed - first + 1} | {counts.schedules:,} |"


HEAD = "| mutant | found by | in | seeds | schedules |\n|---|---|---|---|---|"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    print("\n" + "\n".join([HEAD, *rows]))


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_found(one, table):
    seed, failure, counts = hunt(one, range(one.first, one.first + one.within))
    assert failure is not None, "the mutant survives"
    assert failure.findings[0].kind in one.kinds, failure.findings
    table.append(row_of(one, seed, failure, counts, one.first))
    # ... and it was the mutant
    assert hunt(one, range(one.first, seed + 1), changed=False)[1] is None


def main(part: str, most: int, seconds: float, share: str = "0/1") -> None:
    """From seed 0, at most so many seeds and seconds of CPU each."""
    print(HEAD, flush=True)
    first, of = map(int, share.split("/"))
    for one in [one for one in MUTANTS if part in one.name][first::of]:
        began, first, counts = time.process_time(), 0, Counts()
        seed = failure = None
        while failure is None and first < most and time.process_time() - began < seconds:
            seed, failure, more = hunt(one, range(first, first + 5))
            counts = Counts(counts.runs + more.runs, counts.schedules + more.schedules, counts.states + more.states)
            first += 5
        spent = time.process_time() - began
        if failure is None:
            print(f"| {one.name} | SURVIVES {first} seeds | {one.scenario} | | {counts.schedules:,} | {spent:.1f} s", flush=True)
            continue
        control = hunt(one, range(seed, seed + 1), changed=False)
        alone = hunt(one, range(seed, seed + 1))
        good = failure.findings[0].kind in one.kinds and control[1] is None and alone[1] is not None
        print(f"{row_of(one, seed, failure, counts, 0)} {spent:.1f} s, seed {seed} {'' if good else 'BAD'} "
              f"{'' if control[1] is None else control[1].to_json()} {'' if alone[1] else 'not alone'} {failure.how} "
              f"{failure.findings[0]}", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:2] or [""]), int((sys.argv[2:3] or ["1000"])[0]), float((sys.argv[3:4] or ["60"])[0]), *sys.argv[4:5])
