"""Where a resumed training goes on: steps, epochs and data, from the state of the checkpoint and the settings of the new run.

The formulas of mindformers (trainer/utils.py:load_resume_context_from_checkpoint, documents 002 and 003):

    scale         = global batch size of the checkpoint / global batch size of this run
    initial step  = step * scale                     (must come out whole; mindformers rounds down in silence)
    initial epoch = initial step // steps per epoch  (in sink mode an epoch is one sink)
    data skip     = initial step, or data_skip_steps if the user gave it, or 0 with ignore_data_skip
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mindresume.errors import ProgressError


@dataclass(frozen=True)
class Progress:
    """Counters of a new run. ``step_scale`` multiplies every step count of the checkpoint."""
    initial_step: int
    initial_epoch: int
    global_step: int
    step_scale: float


def progress_of(step: int, global_step: int, old_batch: int | None, new_batch: int | None,
                steps_per_epoch: int) -> Progress:
    """``steps_per_epoch`` of the new run: steps of one pass over its data, or its sink size in sink mode.

    Raises ProgressError if a step count does not scale to a whole number of steps, or a sink would have to be cut.
    """
    scale = Fraction(old_batch, new_batch) if old_batch and new_batch else Fraction(1)
    initial_step = _whole(step * scale, "step", step, old_batch, new_batch)
    return Progress(initial_step, initial_step // steps_per_epoch,
                    _whole(global_step * scale, "global_step", global_step, old_batch, new_batch), float(scale))


def _whole(value: Fraction, name: str, count: int, old_batch: int | None, new_batch: int | None) -> int:
    if value.denominator != 1:
        raise ProgressError(
            f"{name} {count} at global batch size {old_batch} is {float(value):g} steps at global batch size {new_batch}: "
            f"{count} * {old_batch} samples are no multiple of {new_batch}. Resume from a step where they are "
            f"(resume_training: its file name), or choose a global batch size that divides them")
    return int(value)


def check_sink(progress: Progress, sink_size: int) -> None:
    """ProgressError if the training would have to go on in the middle of a sink: MindSpore would round the data skip down to
    a multiple of the sink size and repeat samples (mindspore train/dataset_helper.py)."""
    if progress.initial_step % sink_size:
        raise ProgressError(
            f"step {progress.initial_step} is no multiple of sink_size {sink_size}: MindSpore skips data in whole sinks and "
            f"would repeat {progress.initial_step % sink_size} steps of data. Use a sink_size that divides "
            f"{progress.initial_step}, or sink_mode: False")


