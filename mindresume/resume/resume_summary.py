"""Summarizes a resume: each part of the training state is restored, recomputed, absent or changed. Collects the warnings.

    step           restored    35
    data           recomputed  pass 4, behind 32 of 80 samples: 17 steps are skipped; 8 samples are seen again
    random state   absent      not in the checkpoint: the seeds of the configuration apply
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mindresume.errors import ProgressError
from mindresume.model.data_position import IGNORE_KEY, SKIP_KEY
from mindresume.model.training_state import TrainingState
from mindresume.resume.choice import Choice
from mindresume.resume.progress import ResumeProgress, RunSettings, check_skip

RESTORED, RECOMPUTED, ABSENT, CHANGED = "restored", "recomputed", "absent", "changed"


class SummaryRow(NamedTuple):
    """Describes one part of the state. ``how``: RESTORED, RECOMPUTED, ABSENT or CHANGED. ``text``: details."""
    name: str
    how: str
    text: str


def summary_rows(state: TrainingState, progress: ResumeProgress, new: RunSettings) -> list[SummaryRow]:
    """Returns a row for each part of the state except the random state, which is restored later."""
    scaled, old = progress.step_scale != 1, state.global_batch_size
    how = RECOMPUTED if scaled else RESTORED
    step = _scaled(state.step, progress.initial_step, old, new.global_batch_size) if scaled else str(state.step)
    rows = [SummaryRow("step", how, step)]
    if progress.consumed is not None:
        rows.append(SummaryRow("samples", RESTORED, f"{progress.consumed} seen"))
    epoch = RECOMPUTED if progress.starts_data_set and new.sink_size else how
    rows += [SummaryRow("epoch", epoch, f"{progress.initial_epoch} done" + (" (an epoch is a sink)" if new.sink_size else "")),
             _data(state, progress, new), _data_set(state, progress)]
    rate = _scaled(state.global_step, progress.global_step, old, new.global_batch_size) if scaled else \
        f"step {state.global_step} of the optimizer"
    rows.append(SummaryRow("learning rate", how, f"position of the schedule: {rate}"))
    rows.append(SummaryRow("loss scale", ABSENT, "not in use") if state.loss_scale is None else
                SummaryRow("loss scale", RESTORED, f"{state.loss_scale:g}"))
    return rows


def random_state_row(restored: Sequence[str], ranks: str = "") -> SummaryRow:
    """Returns the row of the random state.

    Args:
        restored: names of the generators whose state was restored.
        ranks: why none was restored, such as "saved by 4 ranks, this job has 2". Empty: the checkpoint has no random state.
    """
    if restored:
        return SummaryRow("random state", RESTORED, ", ".join(restored))
    return SummaryRow("random state", ABSENT, f"{ranks or 'not in the checkpoint'}: the seeds of the configuration apply")


def source_rows(selected: Choice | None) -> list[SummaryRow]:
    """Returns a row for a checkpoint that does not lie on disk; none for one that does."""
    if selected is None or not selected.in_memory:
        return []
    return [SummaryRow("checkpoint", RESTORED, f"from memory of the nodes, {selected.root}")]


def resume_warnings(progress: ResumeProgress, new: RunSettings, on_change: str) -> list[str]:
    """Returns the warnings of a resume.

    Args:
        on_change: the setting ``on_dataset_change``: "warn" or "error".
    Raises:
        ProgressError: The data set has changed, the configuration does not say so, and ``on_change`` is "error".
    """
    found = list(filter(None, [check_skip(new)])) if progress.starts_data_set else []
    if progress.repeats_request:
        found.append(f"{progress.position.declared} is still set, and the data set differs from that of the checkpoint "
                     f"({'; '.join(progress.changed)}), so it starts as that key says. Remove the key once the new data set has "
                     f"started, or the next change of the data set has the same effect")
    if progress.changed and not progress.starts_data_set:
        what = f"the data set differs from that of the checkpoint ({'; '.join(progress.changed)})"
        do = (f"If it is a new data set, set {IGNORE_KEY}: True to start at its beginning, or {SKIP_KEY} to the number of its "
              f"steps that were trained already")
        if on_change == "error":
            raise ProgressError(f"{what}, and the configuration does not say so (mindresume.on_dataset_change: error). {do}")
        found.append(f"{what}; {progress.data_skip} {_unit(new)} of it are skipped as if it were the same. {do}")
    if progress.moved_passes and not progress.starts_data_set and not progress.changed:
        place = progress.position.passes
        found.append(f"sink_size {new.sink_size} does not divide the {new.dataset_size} steps of a pass: the data continues "
                     f"with pass {place + 1} instead of {place - progress.moved_passes + 1}, which changes only the order of "
                     f"shuffled data")
    if progress.repeated:
        found.append(f"{progress.repeated} samples are seen again: the checkpoint is within a step of global batch size "
                     f"{new.global_batch_size}, and steps are rounded down")
    return found


def _scaled(count: int, result: int, old: int | None, new: int | None) -> str:
    exact = count * (old or 1) / (new or 1)
    return f"{count} * {old} / {new} = {exact:g}" + ("" if exact == result else f", so {result}")


def _data(state: TrainingState, progress: ResumeProgress, new: RunSettings) -> SummaryRow:
    position, size = progress.position, new.dataset_size * new.samples_at_once
    where = (f"pass {position.passes + 1}, behind {position.samples} of {size} samples: {progress.data_skip} {_unit(new)} are "
             f"skipped")
    if progress.starts_data_set:
        return SummaryRow("data", RECOMPUTED, f"as {position.declared} says: {where}")
    again = f"; {progress.repeated} samples are seen again" if progress.repeated else ""
    how = RESTORED if state.data is not None and progress.step_scale == 1 and not again else RECOMPUTED
    return SummaryRow("data", how, where + again)


def _data_set(state: TrainingState, progress: ResumeProgress) -> SummaryRow:
    if state.data is None or not state.data.identity:
        return SummaryRow("data set", ABSENT, "not in the checkpoint: taken for the same")
    if progress.changed:
        return SummaryRow("data set", CHANGED, "; ".join(progress.changed))
    return SummaryRow("data set", RESTORED, "the same")


def _unit(new: RunSettings) -> str:
    """Returns the word for what ``data_skip`` counts."""
    return "items" if new.item_samples else "steps"
