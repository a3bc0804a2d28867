"""Compares the steps that a resume trains for the second time with the ledgers of the runs that
trained them first.

    earlier = earlier_rows(folder, run, 1200)   # {step: (row, its run)} after the resumed step
    proof = RedoneSteps(run, earlier)
    proof.add(row)                              # after each step: a StepDifference, or None
    proof.is_complete, proof.steps, proof.largest

A job that died at step 1,234 and resumes after step 1,200 trains 34 steps again. Samples, learning
rate and loss scale must be equal; in the same layout also epoch and batch. The loss must be equal
to the last bit where the layout and the release are the same and the computation is deterministic;
else it may differ by a tolerance, because sums are added in another order (``TOLERANCES``;
docs/reliability.md has the measurements). If the first run had itself diverged in these steps, for
example after a flipped bit in the memory of a device, the comparison shows that, too: it cannot say
which of the two is right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from mindresume.errors import RecordError
from mindresume.events.event_file import LEDGER
from mindresume.events.step_ledger import Ledger, LedgerRun, StepRow, read_ledger
from mindresume.storage.posix import PosixStorage

# relative difference of a loss between two layouts, by the dtype of the computation
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}


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

    @property
    def step(self) -> int:
        return self.found.step

    def text(self) -> str:
        """Returns the sentence for a log."""
        return (
            f"step {self.step} was trained by run {self.first_run} before, with another "
            f"{self.name.replace('_', ' ')}: {getattr(self.expected, self.name)!r} then, "
            f"{getattr(self.found, self.name)!r} now"
        )


def earlier_rows(folder: str, run: LedgerRun, after: int) -> dict[int, tuple[StepRow, LedgerRun]]:
    """Returns {step: (row, run)} of the steps after ``after`` that earlier runs of the training of
    ``run`` recorded in ``folder``; of a step that several of them trained, the newest. Files that
    are no ledgers are ignored: they say nothing about this training."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(LEDGER))
    except OSError:
        return {}
    found: dict[int, tuple[StepRow, LedgerRun]] = {}
    for ledger in filter(None, (_ledger_of(os.path.join(folder, name), run) for name in names)):
        # oldest first: names begin with the time
        found.update({step: (row, ledger.run) for step, row in ledger.rows.items() if step > after})
    return found


def _ledger_of(path: str, run: LedgerRun) -> Ledger | None:
    """Returns the ledger at ``path`` if an earlier run of the training of ``run`` wrote it."""
    try:
        with PosixStorage().open(path) as file:
            ledger = read_ledger(file, path)
    except (OSError, RecordError):
        return None
    same = (ledger.run.lineage or ledger.run.run_id) == (run.lineage or run.run_id)
    return ledger if same and ledger.run.run_id != run.run_id else None


@dataclass
class RedoneSteps:
    """Compares the rows of ``run`` with ``earlier`` while they come.

    Attributes:
        run: this run.
        earlier: {step: (row, run)} as ``earlier_rows`` returns it.
        tolerance: relative difference that a loss may have; None: by layout, release and dtype.
        steps: how many steps were compared.
        largest: largest relative difference of a loss so far; None: no loss was compared.
        differences: of the steps so far.
    """

    run: LedgerRun
    earlier: Mapping[int, tuple[StepRow, LedgerRun]]
    tolerance: float | None = None
    steps: int = 0
    largest: float | None = None
    differences: list[StepDifference] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Returns the last step that an earlier run trained; 0: none."""
        return max(self.earlier, default=0)

    def allowed(self, first: LedgerRun) -> dict[str, float]:
        """Returns {field: relative difference that it may have from that of the run ``first``}. In
        another layout rank 0 has another part of the batch, and an epoch can be another number of
        steps: these two are not compared."""
        run = self.run
        same_layout = first.layout == run.layout
        same = same_layout and (first.release, first.dtype) == (run.release, run.dtype)
        exact = same and first.deterministic and run.deterministic
        loss = 0.0 if exact else TOLERANCES.get(run.dtype, max(TOLERANCES.values()))
        return {
            "samples": 0.0,
            **({"epoch": 0.0, "batch": 0.0} if same_layout else {}),
            "learning_rate": 0.0 if first.release == run.release else 1e-6,
            "loss_scale": 0.0,
            "loss": loss if self.tolerance is None else self.tolerance,
        }

    def add(self, row: StepRow) -> StepDifference | None:
        """Compares a row. Returns the first difference of this step; None: there is none, or no
        earlier run recorded the step."""
        if row.step not in self.earlier:
            return None
        expected, first = self.earlier[row.step]
        self.steps += 1
        differing = []
        for name, allowed in self.allowed(first).items():
            pair = getattr(expected, name), getattr(row, name)
            if None not in pair:
                difference = _relative(*pair)
                if difference > allowed:
                    differing.append(name)
                if name == "loss":
                    self.largest = max(self.largest or 0.0, difference)
        if not differing:
            return None
        self.differences.append(StepDifference(differing[0], expected, row, first.run_id))
        return self.differences[-1]


def _relative(expected: float, found: float) -> float:
    """Returns the relative difference; 0 for equal ones, also if both are NaN; else infinite where
    one of them is not finite."""
    if expected == found or math.isnan(expected) and math.isnan(found):
        return 0.0
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(found - expected) / max(abs(expected), abs(found))
