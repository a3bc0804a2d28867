"""Reads the counters of a training, which mindformers stores as one-element tensors in every file of Checkpoint 1.0."""
from __future__ import annotations

import math
import os
from typing import BinaryIO

from mindresume.errors import CorruptFileError
from mindresume.formats import Candidate, Refusal
from mindresume.model.file_record import FileRecord
from mindresume.model.training_state import TrainingState
from mindresume.storage.interface import Storage
from mindresume.tensor_files import Header, read_scalar
from mindresume.tensor_files.header import file_name

SCALARS = ("step_num", "epoch_num", "global_step", "global_batch_size", "loss_scale")


def scalars_of(storage: Storage, root: str, file: FileRecord, header: Header) -> dict[str, int | float]:
    """Returns the counters in a file of mindformers: step_num (absolute), epoch_num, global_step, ..."""
    with storage.open(os.path.join(root, file.path)) as opened:
        found = {name: finite_scalar(opened, header, name) for name in SCALARS}
    return {name: value for name, value in found.items() if value is not None and not isinstance(value, str)}


def finite_scalar(file: BinaryIO, header: Header, name: str) -> int | float | str | None:
    """Returns the value of a counter. Raises CorruptFileError like ``read_scalar``, and for NaN or infinity."""
    value = read_scalar(file, header, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise CorruptFileError(file_name(file), f"{name} is {value}, expected a finite number", tensor=name)
    return value


def state_from_scalars(step: int, epoch: int | None, global_step: int | None, batch: int | None, scale: float | None,
                       step_in_epoch: int = 0) -> TrainingState:
    """Returns the training state for the counters of mindformers. The steps of an epoch follow from ``step_in_epoch`` if it is
    known (not 0); else they are the smallest number for which ``step`` lies in ``epoch``."""
    epoch = epoch or 1
    per_epoch = (step - step_in_epoch) // (epoch - 1) if epoch > 1 and step_in_epoch else -(-step // epoch)
    return TrainingState(step, max(per_epoch, 1), step if global_step is None else global_step, batch, scale)


def is_weights_only(candidate: Candidate) -> bool:
    """Returns whether the weights of a refused candidate can be loaded: it lacks its step or its optimizer state alone."""
    return candidate.problem is not None and candidate.problem.is_weights_only


def no_step(path: str) -> Refusal:
    """Refuses weights without the counters of a training, such as those of checkpoint_network."""
    return Refusal(None, f"{path} holds no step_num: weights only, not a training state", path, is_weights_only=True)
