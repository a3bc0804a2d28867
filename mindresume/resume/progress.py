"""Where a resumed training goes on: steps, epochs and data, from the state of the checkpoint and the settings of the new run.

Steps, by the formulas of mindformers (trainer/utils.py:load_resume_context_from_checkpoint, documents 002 and 003):

    scale         = global batch size of the checkpoint / global batch size of this run
    initial step  = step * scale, rounded down; so is the optimizer's global_step

Data, by where the checkpoint stood in its data set, which a change of the batch size does not move:

    data skip     = passes * steps of a pass + samples of the pass that was begun / global batch size, rounded down
                    or data_skip_steps, or 0 with ignore_data_skip: once, when the configuration says so for the first time
    initial epoch = epochs before the data set + passes              (in sink mode an epoch is a sink: initial step // sink size)
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from mindresume.data import IGNORED, SKIPPED, DataPosition, DataWish
from mindresume.errors import ConfigError, ProgressError
from mindresume.resume.dataset import differences
from mindresume.state import TrainingState


@dataclass(frozen=True)
class Setting:
    """Of the new run. ``size``: steps of one pass over its data; ``sink_size`` None: not in sink mode; ``identity``: of its data
    set, empty: not known. ``epochs``: passes that the configuration asks for, None: any number."""
    batch: int | None
    size: int
    sink_size: int | None = None
    identity: Mapping[str, str] | None = None
    wish: DataWish = DataWish()
    epochs: int | None = None


@dataclass(frozen=True)
class Progress:
    """Counters of a new run. ``step_scale`` multiplies every step count of the checkpoint. ``position``: where its data goes on,
    in whole steps of this run, ``data_skip`` of them from the beginning. ``consumed``: samples that the training has seen;
    ``repeated``: so many of them will be seen again. ``changed``: in what the data set differs from that of the checkpoint.
    ``begins``: it begins as the configuration says, instead of where the checkpoint stood; ``again``: by words that had been
    heeded for another data set before."""
    initial_step: int
    initial_epoch: int
    global_step: int
    step_scale: float
    position: DataPosition
    data_skip: int
    consumed: int | None = None
    repeated: int = 0
    changed: tuple[str, ...] = ()
    begins: bool = False
    again: bool = False


def data_wish(ignore: Any, skip: Any) -> DataWish:
    """Of ``ignore_data_skip`` and ``data_skip_steps``. ConfigError if one cannot be meant."""
    if ignore not in (None, False, True):
        raise ConfigError(f"{IGNORED} is {ignore!r}; expected True or False")
    if skip is not None and (isinstance(skip, bool) or not isinstance(skip, int) or skip < 0):
        raise ConfigError(f"{SKIPPED} is {skip!r}; expected a whole number of steps, at least 0")
    return DataWish(bool(ignore), skip)


def progress_of(state: TrainingState, new: Setting) -> Progress:
    """ProgressError if the checkpoint has less than one step of the new run, or a sink would have to be cut."""
    step, old = state.step, state.global_batch_size
    scale = Fraction(old, new.batch) if old and new.batch else Fraction(1)
    initial_step, global_step = int(step * scale), int(state.global_step * scale)
    if step and not initial_step:
        raise ProgressError(f"step {step} at global batch size {old} is less than one step at global batch size {new.batch}: "
                            f"{step} * {old} samples. Choose a smaller batch, or begin anew with these weights "
                            f"(resume_training: False)")
    before = _position_of(state, new, initial_step)
    changed = tuple(differences(before.identity, new.identity or {}))
    identity = dict(new.identity or {}) or before.identity
    position, repeated = _rescaled(before, new, old)
    declared = str(new.wish)
    begins = bool(declared) and (declared != before.declared or bool(changed))
    if begins:
        check_skip(new.wish, new.size, new.epochs)
        epochs = position.first_epoch + position.passes
        position, repeated = beginning(new.wish, new.size, new.batch or 1, epochs), 0
    position = replace(position, identity=identity)
    skip = position.steps(new.size, new.batch or 1)
    if new.sink_size:
        _check_sink(initial_step, "step", new.sink_size)
        _check_sink(skip, SKIPPED if begins else "the data of step", new.sink_size)
    epoch = initial_step // new.sink_size if new.sink_size else position.first_epoch + position.passes
    consumed = step * old if state.consumed is None and old else state.consumed
    return Progress(initial_step, epoch, global_step, float(scale), position, skip, consumed, repeated, changed, begins,
                    begins and declared == before.declared)


def beginning(wish: DataWish, size: int, batch: int, epochs: int = 0) -> DataPosition:
    """Where a data set begins as ``wish`` says, after so many epochs of the training."""
    position = DataPosition().after(0 if wish.ignore else wish.skip or 0, size, batch)
    return replace(position, first_epoch=epochs - position.passes, declared=str(wish))


def check_skip(wish: DataWish, size: int, epochs: int | None) -> str:
    """ProgressError if nothing of the data would be left. Returns what is worth a warning: more than a pass is skipped."""
    skip = 0 if wish.ignore else wish.skip or 0
    if epochs and skip >= size * epochs:
        raise ProgressError(f"{SKIPPED} is {skip}; the data set has {size} steps, {epochs} passes over it have {size * epochs}: "
                            f"nothing of it would be left. It counts steps of this data set alone, not of the whole training")
    if skip >= size:
        return (f"{SKIPPED} is {skip}, more than the {size} steps of the data set: it begins in pass {skip // size + 1}, behind "
                f"{skip % size} steps")
    return ""


def _position_of(state: TrainingState, new: Setting, initial_step: int) -> DataPosition:
    """What the checkpoint says; of one that does not, that its steps were all on one data set."""
    if state.data is not None:
        return state.data
    if state.dataset_size and state.global_batch_size:
        return DataPosition().after(state.step, state.dataset_size, state.global_batch_size)
    return DataPosition().after(initial_step, new.size, new.batch or 1)


def _rescaled(position: DataPosition, new: Setting, old: int | None) -> tuple[DataPosition, int]:
    """In whole steps of the new run, and the samples of the part of a step that is left over."""
    batch = new.batch or old or 1
    steps, left = divmod(position.samples, batch)
    if steps >= new.size:                                   # a pass is shorter now: its last samples are left out
        return replace(position, passes=position.passes + 1, samples=0), 0
    return replace(position, samples=steps * batch), left


def _check_sink(steps: int, what: str, sink_size: int) -> None:
    """MindSpore would round the data skip down to a multiple of the sink size and repeat samples (mindspore
    train/dataset_helper.py)."""
    if steps % sink_size:
        raise ProgressError(
            f"{what} {steps} is no multiple of sink_size {sink_size}: MindSpore skips data in whole sinks and would repeat "
            f"{steps % sink_size} steps of data. Use a sink_size that divides {steps}, or sink_mode: False")
