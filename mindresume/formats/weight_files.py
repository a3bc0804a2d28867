"""Reads headers, sizes, times and counters of weight files: mindformers stores the counters of a training as one-element tensors
in every file of Checkpoint 1.0."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import BinaryIO

from mindresume.errors import CorruptFileError, UnreadableFileError
from mindresume.formats import Candidate, Refusal
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.model.manifest import FileRecord
from mindresume.model.training_state import TrainingState
from mindresume.storage.interface import Status, Storage
from mindresume.storage.operations import parallel
from mindresume.tensor_files import Header, read_header, read_scalar
from mindresume.tensor_files.checksum import file_checksum
from mindresume.tensor_files.header import file_name


def header_of(directory: CheckpointDir, file: FileRecord) -> Header:
    """Returns the header of a file. Raises CorruptFileError if it is missing, truncated or malformed; UnreadableFileError if that
    is not known."""
    path = directory.path(file.path)
    try:
        with directory.storage.open(path) as opened:
            return read_header(opened, path)
    except FileNotFoundError as error:
        raise CorruptFileError(path, "the file is missing") from error
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read: {error}") from error


def status_of(directory: CheckpointDir, file: FileRecord) -> Status | None:
    """Returns the status of a file, for display; None if it is missing or cannot be read."""
    try:
        return directory.storage.status(directory.path(file.path))
    except OSError:
        return None


def is_as_recorded(storage: Storage, path: str, file: FileRecord) -> bool:
    """Returns whether the file at ``path`` has the size and the checksum of ``file``. Its bytes are read only if its size is
    right: it can be sparse, of terabytes. Raises OSError, if it is missing, too."""
    with storage.open(path) as opened:
        return opened.seek(0, 2) == file.size and file_checksum(opened) == (file.checksum, file.size)


def file_sizes(directory: CheckpointDir, files: Iterable[FileRecord]) -> list[int | None]:
    """Returns the size of each file in bytes; None for a missing one."""
    found = parallel(directory.storage, lambda file: directory.storage.status(directory.path(file.path)), files)
    return [status.size if status else None for status in found]


def sizes_match(directory: CheckpointDir, files: Iterable[FileRecord]) -> bool:
    """Returns whether all files exist with their recorded sizes (any size but 0 if none was recorded), without opening them."""
    files = list(files)
    return all(size and file.size in (None, size) for file, size in zip(files, file_sizes(directory, files), strict=True))


SCALARS = ("step_num", "epoch_num", "global_step", "global_batch_size", "loss_scale")


def scalars_of(directory: CheckpointDir, file: FileRecord, header: Header) -> dict[str, int | float]:
    """Returns the counters in a file of mindformers: step_num (absolute), epoch_num, global_step, ..."""
    with directory.storage.open(directory.path(file.path)) as opened:
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
