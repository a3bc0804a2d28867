"""Computes where a resumed training continues: steps, epochs and data, from the state of the
checkpoint and the new settings.

Steps, by the formulas of mindformers (trainer/utils.py:load_resume_context_from_checkpoint,
documents 002 and 003):

    scale         = global batch size of the checkpoint / global batch size of this run
    initial step  = step * scale, rounded down; so is the optimizer's global_step

Data, by the position of the checkpoint in its data set, which does not depend on the batch size:

    data skip     = passes * steps of a pass + samples of the current pass / global batch size,
                    rounded down; or data_skip_steps, or 0 with ignore_data_skip: once, when the
                    configuration first requests it
    initial epoch = epochs before the data set + passes

In sink mode an epoch of MindSpore is one sink. mindformers runs ``epochs * steps of a pass // sink
size`` of them in all, counted by the data set of this run, even if earlier steps used other data.
So there

    initial epoch = (epochs before the data set * steps of a pass + data skip) / sink size

rounded so that as many whole sinks follow as fit into the rest. Data is skipped in whole sinks.

``summary_rows`` tells of each part of the training state whether it is restored, recomputed, absent
or changed:

    step           restored    35
    data           recomputed  pass 4, behind 32 of 80 samples: 17 steps are skipped; 8 samples are
                   seen again
    random state   absent      not in the checkpoint: the seeds of the configuration apply
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd
from typing import Any, NamedTuple

from mindresume.errors import ConfigError, ProgressError
from mindresume.formats.bad_steps import BadStep
from mindresume.model.training_state import (
    IGNORE_KEY,
    SKIP_KEY,
    DataPosition,
    DataRequest,
    TrainingState,
)
from mindresume.resume.dataset_fingerprint import dataset_differences
from mindresume.resume.eligible import Choice


@dataclass(frozen=True)
class RunSettings:
    """Settings of the new run.

    Args:
        global_batch_size: in samples. None: not known.
        dataset_size: steps of one pass over its data.
        sink_size: steps of a sink. None: not in sink mode.
        identity: identity of its data set (``dataset_fingerprint.dataset_identity``). Empty: not
            known.
        data_request: where its data set starts, by the configuration.
        epochs: passes that the configuration requests. None: any number.
        item_samples: samples of one item of the data set. None: a step reads one item. Else
            ``dataset_size``, ``data_skip`` and the like count items, not steps; ``data_skip_steps``
            of the configuration still counts steps.
    """

    global_batch_size: int | None
    dataset_size: int
    sink_size: int | None = None
    identity: Mapping[str, str] | None = None
    data_request: DataRequest = DataRequest()
    epochs: int | None = None
    item_samples: int | None = None

    @property
    def samples_at_once(self) -> int:
        """Returns the samples of one item of the data set."""
        return self.item_samples or self.global_batch_size or 1

    @property
    def skip(self) -> int:
        """Returns the items that the configuration skips at the beginning of the data set."""
        steps = 0 if self.data_request.ignore else self.data_request.skip or 0
        return steps * (self.global_batch_size or 1) // self.samples_at_once


@dataclass(frozen=True)
class ResumeProgress:
    """Counters with which a run begins.

    Args:
        initial_step: its first step follows this one.
        step_scale: multiplies every step count of the checkpoint.
        position: where its data continues, in whole steps of this run.
        data_skip: the same as steps from the beginning of the data.
        consumed: samples that the training has seen. None: not known.
        repeated: samples that will be seen a second time.
        changed: differences between the data set and that of the checkpoint, as phrases.
        starts_data_set: the data starts where the configuration says, not at the position of the
            checkpoint.
        repeats_request: ``starts_data_set``, and the configuration said the same for an earlier
            data set. False where no sample is left out: between two passes, without a skip.
        moved_passes: passes by which a position between two passes was moved, because a sink must
            begin there. This affects only the order of a shuffled data set.
        skipped: samples of bad steps that come next, and are skipped.
        window_step: after this step samples of a bad step come next. The run ends there, and the
            next one skips them. None: none are ahead.
    """

    initial_step: int
    initial_epoch: int
    global_step: int
    step_scale: float
    position: DataPosition
    data_skip: int
    consumed: int | None = None
    repeated: int = 0
    changed: tuple[str, ...] = ()
    starts_data_set: bool = False
    repeats_request: bool = False
    moved_passes: int = 0
    skipped: int = 0
    window_step: int | None = None


START = ResumeProgress(0, 0, 0, 1.0, DataPosition(0, 0), 0, 0)  # of a training from its first step


DATA_KEYS = {IGNORE_KEY: (None, False), SKIP_KEY: (None,)}  # {key: values that mean "not set"}


def lift_data_skip(config: MutableMapping) -> list[str]:
    """Moves ``ignore_data_skip`` and ``data_skip_steps`` from ``trainer:``, where mindformers
    documents them, to the top level, where its code reads them. Returns a note for each.
    ConfigError if the two places hold different values."""
    trainer, notes = config.get("trainer"), []
    for key, defaults in DATA_KEYS.items():
        if not isinstance(trainer, MutableMapping) or key not in trainer:
            continue
        value, top = trainer[key], config.get(key)
        if top not in defaults and top != value:
            raise ConfigError(
                f"{key} is {top!r} at the top level of the configuration but {value!r} in "
                "trainer:; keep one of them"
            )
        config[key] = value
        del trainer[key]
        notes.append(f"trainer.{key}: {value!r} is used as {key} of the top level")
    return notes


def parse_data_request(ignore: Any, skip: Any) -> DataRequest:
    """Returns what ``ignore_data_skip`` and ``data_skip_steps`` ask for. Raises ConfigError for
    values of another kind."""
    if ignore not in (None, False, True):
        raise ConfigError(f"{IGNORE_KEY} is {ignore!r}; expected True or False")
    if skip is not None and (isinstance(skip, bool) or not isinstance(skip, int) or skip < 0):
        raise ConfigError(f"{SKIP_KEY} is {skip!r}; expected a whole number of steps, at least 0")
    return DataRequest(bool(ignore), skip)


def resume_progress(
    state: TrainingState, new: RunSettings, bad_steps: Sequence[BadStep] = ()
) -> ResumeProgress:
    """Returns the counters of a run that continues after ``state``, and skips the samples of
    ``bad_steps``. Raises ProgressError if the checkpoint has less than one step of the new run, or
    the data would start within a sink."""
    step, old = state.step, state.global_batch_size
    scale = Fraction(old, new.global_batch_size) if old and new.global_batch_size else Fraction(1)
    initial_step, global_step = int(step * scale), max(int(state.global_step * scale), -1)
    if step and not initial_step:
        raise ProgressError(
            f"step {step} at global batch size {old} is less than one step at global batch size "
            f"{new.global_batch_size}: {step} * {old} samples. Choose a smaller batch, or start a "
            "new training with these weights (resume_training: False)"
        )
    before = _position_of(state, new, initial_step)
    changed = tuple(dataset_differences(before.identity, new.identity or {}))
    identity = dict(new.identity or {}) or before.identity
    declared = str(new.data_request)
    starts = bool(declared) and (declared != before.declared or bool(changed))
    start = _skip_partial_sink(before, state) if starts or changed else before
    if starts:
        check_skip(new)
        position, repeated = _beginning(new, start.first_epoch + start.passes), 0
    else:
        position, repeated = _rescaled(start, new, old)
    passes, position = position.passes, replace(_align_to_sink(position, new), identity=identity)
    moved = position.passes - passes
    position, skipped, ahead = skip_windows(position, new, bad_steps)
    skip = position.steps(new.dataset_size, new.samples_at_once)
    _check_sink(skip, SKIP_KEY if starts else f"the data of step {initial_step}", new)
    consumed = step * old if state.consumed is None and old else state.consumed
    return ResumeProgress(
        initial_step,
        _initial_epoch(position, skip, new),
        global_step,
        float(scale),
        position,
        skip,
        consumed,
        repeated,
        changed,
        starts,
        starts and declared == before.declared and bool(start.samples or new.skip),
        moved,
        skipped,
        None if ahead is None else initial_step + ahead,
    )


def fresh_progress(new: RunSettings, bad_steps: Sequence[BadStep] = ()) -> ResumeProgress:
    """Returns the counters of a run that does not resume, and skips the samples of ``bad_steps``.
    Raises ProgressError if no data is left, or the data would start within a sink."""
    check_skip(new)
    position = replace(_align_to_sink(_beginning(new, 0), new), identity=dict(new.identity or {}))
    position, skipped, ahead = skip_windows(position, new, bad_steps)
    skip = position.steps(new.dataset_size, new.samples_at_once)
    _check_sink(skip, SKIP_KEY, new)
    return replace(
        START,
        initial_epoch=_initial_epoch(position, skip, new),
        data_skip=skip,
        position=position,
        skipped=skipped,
        window_step=ahead,
    )


def skip_windows(
    position: DataPosition, new: RunSettings, bad_steps: Sequence[BadStep]
) -> tuple[DataPosition, int, int | None]:
    """Returns the position behind the samples of bad steps that come next, how many samples are
    skipped, and the steps until those of another bad step come next; None: there are none. Rows of
    another data set say nothing. What is skipped are whole steps and sinks of this run, with all of
    the samples in them."""
    batch, size = new.samples_at_once, new.dataset_size
    unit = new.sink_size or max((new.global_batch_size or 1) // batch, 1)  # items
    windows = [  # [first, end) in items from the beginning of the data set
        (
            row.data.steps(size, batch),
            row.data.passes * size + math.ceil((row.data.samples + row.samples) / batch),
        )
        for row in bad_steps
        if row.data is not None
        and row.samples
        and row.data.first_epoch == position.first_epoch
        and not dataset_differences(row.data.identity, position.identity)
    ]
    begin = now = position.steps(size, batch)
    for first, end in sorted(windows):
        if first - (first - begin) % unit <= now < end:
            now += math.ceil((end - now) / unit) * unit
    steps = [
        (first - now) // unit * unit * batch // (new.global_batch_size or batch)
        for first, _ in windows
        if first >= now
    ]
    if now > begin:
        position = position.after(now - begin, size, batch)
    return position, (now - begin) * batch, min(steps, default=None)


def _beginning(new: RunSettings, epochs: int) -> DataPosition:
    """Returns the position at which the configuration starts a data set after ``epochs`` epochs of
    the training. MindSpore runs as many passes as epochs, so a skipped pass counts as an epoch only
    if it replaces a finished one."""
    position = DataPosition(0, 0).after(new.skip, new.dataset_size, new.samples_at_once)
    passes = min(position.passes, epochs)
    return replace(
        position, passes=passes, first_epoch=epochs - passes, declared=str(new.data_request)
    )


def check_skip(new: RunSettings) -> str:
    """Returns a warning if more than a pass is skipped, else an empty text. Raises ProgressError if
    no data would be left."""
    skip = new.skip
    size = new.dataset_size
    epochs = new.epochs
    if epochs and skip and size * epochs - skip < (new.sink_size or 1):
        raise ProgressError(
            f"{SKIP_KEY} is {skip}; the data set has {size} steps, {epochs} passes over it have "
            f"{size * epochs}: nothing of it would be "
            f"left{', not even one sink' if skip < size * epochs else ''}. It counts steps of this "
            "data set alone, not of the whole training"
        )
    if skip >= size:
        return (
            f"{SKIP_KEY} is {skip}, a pass over the data set has {size} steps: it begins after "
            f"{skip % size} steps of a pass"
        )
    return ""


def _position_of(state: TrainingState, new: RunSettings, initial_step: int) -> DataPosition:
    """Returns the position that the checkpoint recorded. Without one, all of its steps are assumed
    to be of one data set."""
    if state.data is not None:
        return state.data
    if state.dataset_size and state.global_batch_size:
        return DataPosition(0, 0).after(state.step, state.dataset_size, state.global_batch_size)
    return DataPosition(0, 0).after(initial_step, new.dataset_size, new.global_batch_size or 1)


def _rescaled(
    position: DataPosition, new: RunSettings, old: int | None
) -> tuple[DataPosition, int]:
    """Returns the position in whole steps of the new run, and the samples of the partial step that
    is left over."""
    batch = new.item_samples or new.global_batch_size or old or 1
    steps, left = divmod(position.samples, batch)
    # a pass has fewer steps now: skip its last samples
    if steps >= new.dataset_size:
        return replace(position, passes=position.passes + 1, samples=0), 0
    return replace(position, samples=steps * batch), left


def _skip_partial_sink(position: DataPosition, state: TrainingState) -> DataPosition:
    """Moves a position in the last, partial sink of a pass to the next pass, because a training
    with that number of epochs ends before the partial sink (mindformers trainer/utils.py,
    check_runner_config)."""
    if not (
        state.sink_size and state.dataset_size and state.global_batch_size and position.samples
    ):
        return position
    left = state.dataset_size - position.samples // state.global_batch_size
    return (
        replace(position, passes=position.passes + 1, samples=0)
        if left < state.sink_size
        else position
    )


def _align_to_sink(position: DataPosition, new: RunSettings) -> DataPosition:
    """Moves a position between two passes back to the nearest one at which a sink begins, within
    the trained passes."""
    if (
        not new.sink_size
        or position.samples
        or position.passes * new.dataset_size % new.sink_size == 0
    ):
        return position
    epochs = max(position.first_epoch + position.passes, 0)
    passes = epochs - epochs % (new.sink_size // gcd(new.dataset_size, new.sink_size))
    return replace(position, passes=passes, first_epoch=epochs - passes)


def _initial_epoch(position: DataPosition, skip: int, new: RunSettings) -> int:
    if not new.sink_size:
        return position.first_epoch + position.passes
    sinks, more = divmod(position.first_epoch * new.dataset_size + skip, new.sink_size)
    # mindformers trains whole sinks only
    rest = (new.epochs or 0) * new.dataset_size % new.sink_size
    return sinks + (more > rest)


def _check_sink(skip: int, what: str, new: RunSettings) -> None:
    """Raises ProgressError if ``skip`` is not a multiple of the sink size: MindSpore would round it
    down and repeat samples (mindspore train/dataset_helper.py)."""
    if new.sink_size and skip % new.sink_size:
        raise ProgressError(
            f"{what}: it begins after {skip} steps of the data set, no multiple of sink_size "
            f"{new.sink_size}. MindSpore skips data in whole sinks and would repeat "
            f"{skip % new.sink_size} steps of it. Use a sink_size that divides {skip}, or "
            "sink_mode: False"
        )


# ---- summary -------------------------------------------------------------------------------------

RESTORED = "restored"
RECOMPUTED = "recomputed"
ABSENT = "absent"
CHANGED = "changed"


class SummaryRow(NamedTuple):
    """Describes one part of the state. ``how``: RESTORED, RECOMPUTED, ABSENT or CHANGED. ``text``:
    details."""

    name: str
    how: str
    text: str


def summary_rows(
    state: TrainingState, progress: ResumeProgress, new: RunSettings
) -> list[SummaryRow]:
    """Returns a row for each part of the state except the random state, which is restored later."""
    scaled, old = progress.step_scale != 1, state.global_batch_size
    how = RECOMPUTED if scaled else RESTORED
    step = (
        _scaled(state.step, progress.initial_step, old, new.global_batch_size)
        if scaled
        else str(state.step)
    )
    rows = [SummaryRow("step", how, step)]
    if progress.consumed is not None:
        rows.append(SummaryRow("samples", RESTORED, f"{progress.consumed} seen"))
    epoch = RECOMPUTED if progress.starts_data_set and new.sink_size else how
    rows += [
        SummaryRow(
            "epoch",
            epoch,
            f"{progress.initial_epoch} done" + (" (an epoch is a sink)" if new.sink_size else ""),
        ),
        _data(state, progress, new),
        _data_set(state, progress),
    ]
    rate = (
        _scaled(state.global_step, progress.global_step, old, new.global_batch_size)
        if scaled
        else f"step {state.global_step} of the optimizer"
    )
    rows.append(SummaryRow("learning rate", how, f"position of the schedule: {rate}"))
    rows.append(
        SummaryRow("loss scale", ABSENT, "not in use")
        if state.loss_scale is None
        else SummaryRow("loss scale", RESTORED, f"{state.loss_scale:g}")
    )
    return rows


def random_state_row(restored: Sequence[str], ranks: str = "") -> SummaryRow:
    """Returns the row of the random state.

    Args:
        restored: names of the generators whose state was restored.
        ranks: why none was restored, such as "saved by 4 ranks, this job has 2". Empty: the
            checkpoint has no random state.
    """
    if restored:
        return SummaryRow("random state", RESTORED, ", ".join(restored))
    return SummaryRow(
        "random state",
        ABSENT,
        f"{ranks or 'not in the checkpoint'}: the seeds of the configuration apply",
    )


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
        ProgressError: The data set has changed, the configuration does not say so, and
            ``on_change`` is "error".
    """
    found = list(filter(None, [check_skip(new)])) if progress.starts_data_set else []
    if progress.repeats_request:
        found.append(
            f"{progress.position.declared} is still set, and the data set differs from that of the "
            f"checkpoint ({'; '.join(progress.changed)}), so it starts as that key says. Remove "
            "the key once the new data set has started, or the next change of the data set has the "
            "same effect"
        )
    if progress.changed and not progress.starts_data_set:
        what = f"the data set differs from that of the checkpoint ({'; '.join(progress.changed)})"
        do = (
            f"If it is a new data set, set {IGNORE_KEY}: True to start at its beginning, or "
            f"{SKIP_KEY} to the number of its steps that were trained already"
        )
        if on_change == "error":
            raise ProgressError(
                f"{what}, and the configuration does not say so (mindresume.on_dataset_change: "
                f"error). {do}"
            )
        found.append(
            f"{what}; {progress.data_skip} {_unit(new)} of it are skipped as if it were the same. "
            f"{do}"
        )
    if progress.moved_passes and not progress.starts_data_set and not progress.changed:
        place = progress.position.passes
        found.append(
            f"sink_size {new.sink_size} does not divide the {new.dataset_size} steps of a pass: "
            f"the data continues with pass {place + 1} instead of "
            f"{place - progress.moved_passes + 1}, which changes only the order of shuffled data"
        )
    if progress.repeated:
        found.append(
            f"{progress.repeated} samples are seen again: the checkpoint is within a step of "
            f"global batch size {new.global_batch_size}, and steps are rounded down"
        )
    return found


def _scaled(count: int, result: int, old: int | None, new: int | None) -> str:
    exact = count * (old or 1) / (new or 1)
    return f"{count} * {old} / {new} = {exact:g}" + ("" if exact == result else f", so {result}")


def _data(state: TrainingState, progress: ResumeProgress, new: RunSettings) -> SummaryRow:
    position, size = progress.position, new.dataset_size * new.samples_at_once
    where = (
        f"pass {position.passes + 1}, behind {position.samples} of {size} samples: "
        f"{progress.data_skip} {_unit(new)} are skipped"
    )
    if progress.starts_data_set:
        return SummaryRow("data", RECOMPUTED, f"as {position.declared} says: {where}")
    again = f"; {progress.repeated} samples are seen again" if progress.repeated else ""
    how = (
        RESTORED
        if state.data is not None and progress.step_scale == 1 and not again
        else RECOMPUTED
    )
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
