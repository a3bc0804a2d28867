"""Compares the steps that a resume trains for the second time with the ledger of the run that
trained them first.

    lost = earlier_ledger(folder, saves, run, 1200, "0003-5e1a77bd")  # after step 1200, or None
    redone = RedoneSteps(run, lost)
    redone.add(row)                              # after each step: a StepDifference, or None
    redone.steps, redone.compared, redone.largest

A job that died at step 1,234 and resumes after step 1,200 trains 34 steps again. Samples, learning
rate and loss scale must be equal; in the same layout also epoch and batch. The loss must be equal
to the last bit where layout and release are the same and the computation is deterministic; else it
may differ by a tolerance, because sums are added in another order (``TOLERANCES``). If the first
run had itself diverged in these steps, for example after a flipped bit in the memory of a device,
the comparison shows that, too: it cannot say which of the two is right.

Only one run is compared: the newest one that trained a step after the checkpoint. It may be the run
that saved the checkpoint, or a later one. Earlier runs do not count: the training may have gone
another way since, with another batch size, other data or another learning rate.

Its rows are those beside its event file, in the output folder of this training; in another one, or
on another disk, those that newer saves of the checkpoint directory have copied (``LAST_STEPS``).
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from mindresume.coordination.lease import run_order
from mindresume.errors import RecordError
from mindresume.events.event_file import LEDGER
from mindresume.events.step_ledger import CAPACITY, Ledger, LedgerRun, StepRow, read_ledger
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import parse_iteration
from mindresume.formats.records import find_attempts
from mindresume.model.manifest import FOLDER, LAST_STEPS, attempts, is_run, run_sequence
from mindresume.storage.interface import Storage

# Relative difference of a loss between two layouts, by the dtype of the computation. Ten steps on a
# CPU (benchmarks/tolerances.py): 7e-8 to 4e-5 in float32, 1e-5 to 5e-5 in float16. bfloat16 by its
# precision. Ten steps of a training with other gradients, from other micro-batches: 1e-2.
TOLERANCES = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 2e-2}
LARGEST = max(TOLERANCES.values())
_MOST_RUNS = 8  # whose saves are looked at, two of each


@dataclass(frozen=True)
class StepDifference:
    """Says what differs in a step that was trained twice.

    Attributes:
        name: the field of the StepRow.
        expected: the row of the run that trained the step first.
        found: the row of this run.
        first_run: that run.
    """

    name: str
    expected: StepRow
    found: StepRow
    first_run: str

    def text(self) -> str:
        """Returns the sentence for a log."""
        return (
            f"step {self.found.step} was trained by run {self.first_run} before, with another "
            f"{self.name.replace('_', ' ')}: {getattr(self.expected, self.name)!r}; now "
            f"{getattr(self.found, self.name)!r}"
        )


def earlier_ledger(
    folder: str, saves: CheckpointDir, run: LedgerRun, after: int, since: str | None
) -> Ledger | None:
    """Returns the rows after step ``after`` of the newest earlier run of the training of ``run``
    that recorded one, in ``folder`` or in a save; None: there is none. Files that are no ledgers
    are ignored. Its run ``branches`` if it or one between it and ``since`` does: then it trained
    other steps.

    Args:
        folder: of the event files of this training.
        saves: the checkpoint directory that the resume reads. Another one than that of this
            training numbers its runs in its own way.
        after: the step of the checkpoint, as the run that saved it counted.
        since: that run; older ones do not count. None: mindformers saved it.
    """
    found = []
    with suppress(OSError):
        for name in os.listdir(folder):
            ledger = name.endswith(LEDGER) and ledger_of(saves.storage, os.path.join(folder, name))
            if ledger and run_order(ledger.run.run_id) < run_order(run.run_id):
                found.append(ledger)
    with suppress(OSError):
        found += filter(None, [ledger_of(saves.storage, path) for path in _copies(saves, after)])
    lineage, rows, branches = run.lineage or run.run_id, [], []
    for ledger in found:
        first = ledger.run
        is_older = since is not None and run_order(first.run_id) < run_order(since)
        is_other = (first.lineage or first.run_id) != lineage or first.run_id == run.run_id
        if is_older or is_other:
            continue
        if first.branches and first.run_id != since:
            branches.append(run_order(first.run_id))
        later = {step: row for step, row in ledger.rows.items() if after < step <= after + CAPACITY}
        # it was told to begin before the checkpoint, which was there: it may have gone another way
        went_back = since not in (None, first.run_id) and first.resumed < after
        if later and not went_back:
            rows.append(replace(ledger, rows=later))
    if not rows:
        return None
    newest = max(rows, key=_preference)
    is_branch = any(order <= run_order(newest.run.run_id) for order in branches)
    return replace(newest, run=replace(newest.run, branches=is_branch))


def _preference(ledger: Ledger) -> tuple[tuple[int, str], int, int]:
    """Returns a key that is larger for what is compared rather: the newest run, then the ledger
    that reaches back further, then the longer one."""
    return run_order(ledger.run.run_id), -min(ledger.rows), len(ledger.rows)


def _copies(saves: CheckpointDir, after: int) -> list[str]:
    """Returns the paths of the ledgers in a few saves after step ``after``: of each of the newest
    runs the save next to it, and the last one, which tells more if it reaches back so far. An
    iteration folder does not tell its run by its name. Raises OSError."""
    storage = saves.storage
    later = sorted(
        (run_sequence(run), step, name)
        for name, step, run in attempts(storage.list(saves.path(FOLDER)))
        if step > after
    )
    first = {run: name for run, _, name in reversed(later)}
    last = {run: name for run, _, name in later}
    runs = sorted(last)[-_MOST_RUNS:]
    names = {saved[run] for run in runs for saved in (first, last)}
    steps = {name: parse_iteration(name) or 0 for name in storage.list(saves.root)}
    top = sorted((name for name, step in steps.items() if step > after), key=steps.__getitem__)
    found = find_attempts(saves, sorted(names), {*top[:_MOST_RUNS], *top[-_MOST_RUNS:]})
    return [saves.path(it.place, LAST_STEPS) for it in found if LAST_STEPS in it.content]


def ledger_of(storage: Storage, path: str) -> Ledger | None:
    """Returns the ledger at ``path`` if a run wrote it."""
    try:
        with storage.open(path) as file:
            ledger = read_ledger(file, path)
    except (OSError, RecordError):
        return None
    return ledger if is_run(ledger.run.run_id) else None


@dataclass
class RedoneSteps:
    """Compares the rows of ``run`` with those of ``earlier`` while they come.

    Attributes:
        run: this run.
        earlier: as ``earlier_ledger`` returns it.
        tolerance: relative difference that a loss may have; None: by layout, release and dtype.
        random_is_restored: else a network with dropout draws anew, and its losses are others.
        steps: how many steps were compared.
        compared: the fields that were compared, in one step at least.
        largest: largest relative difference of a loss so far; None: no loss was compared.
        differences: of the steps so far.
    """

    run: LedgerRun
    earlier: Ledger
    tolerance: float | None = None
    random_is_restored: bool = True
    steps: int = 0
    compared: set[str] = field(default_factory=set)
    largest: float | None = None
    differences: list[StepDifference] = field(default_factory=list)

    @cached_property
    def last(self) -> int:
        """Returns the last step that the earlier run trained."""
        return max(self.earlier.rows)

    @cached_property
    def allowed(self) -> dict[str, float]:
        """Returns {field: relative difference that it may have}; other fields are not compared. In
        another layout rank 0 has another part of the batch, and an epoch can be another number of
        steps."""
        run, first = self.run, self.earlier.run
        same_layout = (first.layout, first.world_size) == (run.layout, run.world_size)
        same = same_layout and (first.release, first.dtype) == (run.release, run.dtype)
        exact = same and first.deterministic and run.deterministic
        loss = max(TOLERANCES.get(dtype, LARGEST) for dtype in (first.dtype, run.dtype))
        allowed = {
            "samples": 0.0,
            "learning_rate": 0.0 if first.release == run.release else 1e-6,
            "loss_scale": 0.0,
        }
        if same_layout:
            allowed |= {"epoch": 0.0, "batch": 0.0}
        if self.random_is_restored or not (first.draws or run.draws):
            allowed["loss"] = (0.0 if exact else loss) if self.tolerance is None else self.tolerance
        return allowed

    def add(self, row: StepRow) -> StepDifference | None:
        """Compares a row. Returns the first difference of this step; None: there is none, or the
        earlier run did not record the step."""
        expected = self.earlier.rows.get(row.step)
        if expected is None:
            return None
        differing = []
        for name, allowed in self.allowed.items():
            pair = getattr(expected, name), getattr(row, name)
            if None in pair:
                continue
            self.compared.add(name)
            difference = _relative(*pair)
            if difference > allowed:
                differing.append(name)
            if name == "loss":
                self.largest = max(self.largest or 0.0, difference)
        self.steps += 1
        if not differing:
            return None
        first_run = self.earlier.run.run_id
        self.differences.append(StepDifference(differing[0], expected, row, first_run))
        return self.differences[-1]


def _relative(expected: float, found: float) -> float:
    """Returns the relative difference; 0 for equal ones, also if both are NaN; else infinite where
    one of them is not finite."""
    if expected == found or math.isnan(expected) and math.isnan(found):
        return 0.0
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(found - expected) / max(abs(expected), abs(found))
