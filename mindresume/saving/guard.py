"""Guards a training against bad steps: NaN, and spikes of the loss or of the norm of the gradients.

    each rank    judges its values at the end of a step ─▶ a bad one: it saves nothing any more, so
                 no save since then becomes complete
    all ranks    with the next exchange of a preemption: the first bad step counts ─▶ a note on each
                 disk (``formats/bad_steps.py``) ─▶ BadStepError: status 67 or 68
    next start   the newest checkpoint before that step; its samples are skipped at once, or the
                 training goes on up to them, saves, and ends with status 67 again (``WINDOW``)

Data are skipped between two starts only, because nothing can be dropped from the queue of a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from mindresume.coordination.collectives import Group, gather_results
from mindresume.errors import BadStepError
from mindresume.events import BadStepFound, Emit, GuardEnded, warning
from mindresume.formats.bad_steps import BadStep, add_bad_step
from mindresume.model.training_state import DataPosition
from mindresume.saving.save_session import SaveSession
from mindresume.saving.shard_writer import StepState
from mindresume.saving.spike_rule import SpikeRule
from mindresume.settings import GuardSettings
from mindresume.typed import Count, decode

OFF, WARN, ROLLBACK, STOP = _RESPONSES = ("off", "warn", "rollback", "stop")  # the worst last
WINDOW = "the samples of a bad step come next"  # why a training stops
GO_ON, ENDED = 67, 68  # exit statuses: another start goes on; a person has to look


@dataclass(frozen=True)
class Finding:
    """A bad step as one rank found it. The attributes are those of ``BadStep``; ``response``: STOP
    or ROLLBACK."""

    step: Count
    rank: Count
    reason: str
    response: str
    samples: Count = 0
    data: DataPosition | None = None


class StepGuard:
    """Judges the steps of one rank.

    Attributes:
        found: the first bad step that ends the job, a ``Finding`` for JSON; None: there is none.
    """

    def __init__(self, settings: GuardSettings, rank: int, emit: Emit):
        self.settings, self.rank, self.emit = settings, rank, emit
        self.found: dict[str, Any] | None = None
        self._responses = {"loss": settings.loss_spike, "grad_norm": settings.grad_norm}
        self._rules = {
            name: SpikeRule(settings.window, settings.factor, settings.min_steps)
            for name, response in self._responses.items()
            if response != OFF
        }
        self._was_bad = False

    def judge(self, state: StepState) -> bool:
        """Returns whether the job is to end, because this step or an earlier one is bad."""
        if self.found is not None:
            return True
        response, reason = max(
            [(OFF, ""), *self._bad(state.values())], key=lambda row: _RESPONSES.index(row[0])
        )
        if response != OFF and not (response == WARN and self._was_bad):
            self.emit(BadStepFound(state.step, reason, response))
        self._was_bad = response != OFF
        if response in (STOP, ROLLBACK):
            step, data, samples = state.window(self.settings.skip_steps)
            self.found = asdict(Finding(step, self.rank, reason, response, samples, data))
        return self.found is not None

    def _bad(self, values: dict[str, float]) -> Iterable[tuple[str, str]]:
        """Yields (response, reason) of each value that is bad."""
        for name, value in values.items():
            if not math.isfinite(value):
                yield self.settings.nan, f"{name} is {value}"
            elif name in self._rules and (reason := self._rules[name].judge(value)):
                yield self._responses[name], f"{name} {reason}"


def end_job(
    findings: Sequence[Any],
    step: int,
    good: int,
    before: Sequence[BadStep],
    most: int,
    group: Group,
    session: SaveSession,
) -> BadStepError:
    """Returns the error with which all ranks end the job, once the note is on each disk.

    Args:
        findings: of all ranks, as JSON has them; None: a rank has none.
        step: the step that has ended.
        good: the newest step that this run began with or has saved.
        before: bad steps of earlier runs, oldest first.
        most: rollbacks in a row, ``max_rollbacks``.
    """
    found = [decode(Finding, row, "bad step") for row in findings if row is not None]
    first, target = min(found, key=lambda row: (row.step, row.rank)), session.target
    in_a_row = 1 + (before[-1].rollbacks if before and good < before[-1].step else 0)
    stops = in_a_row > most or any(row.response == STOP for row in found)
    row = BadStep(
        target.run,
        target.lineage,
        first.step,
        step,
        first.rank,
        first.reason,
        *((0, 0) if stops else (in_a_row, first.samples)),
        first.data,
    )
    # before any rank ends: its end may end the others
    written = gather_results(group, partial(_write, session, row), takes_part=session.is_leader)
    session.emit(GuardEnded(step, row.step, row.rank, row.reason, row.rollbacks, row.samples))
    do = (
        f"This was rollback {in_a_row} of at most {most} in a row: start the same command again "
        "to go on from the newest checkpoint before it, without its samples"
        if not stops
        else f"{most} rollbacks in a row led to no good checkpoint. Look at the data and the "
        "settings before you start again"
        if in_a_row > most
        else "mindresume.guard says stop. The next start takes the newest checkpoint before it, "
        "and trains the same samples again"
    )
    return BadStepError(
        f"step {row.step} is bad on rank {row.rank}: {row.reason}. Nothing was saved since. {do}",
        # without a note the next start trains the same step again: a failure as any other
        ENDED if stops else 1 if False in written else GO_ON,
    )


def _write(session: SaveSession, row: BadStep) -> bool:
    """Returns whether the note is on the disk of this rank."""
    try:
        add_bad_step(session.target, row)
    except OSError as error:
        session.emit(warning(f"the bad step {row.step} cannot be noted: {error}"))
        return False
    return True
