"""Resumes streaming data of Hugging Face (``HFDataLoader`` with ``streaming: True``). Such data cannot skip to a position; it
continues only from a state that its iterator saved: ``{dataset_state_dir}/step_N/dataset_state_rankR.json``, N steps from the
beginning.

mindformers loads the state of the step of the *training*, even if the data set or the batch size changed, so that the state
belongs to another position; and between two passes it returns the first sample forever (mindformers
dataset/dataloader/hf_dataloader.py, HFIterableDataset.__getitem__). Here the position in the data decides, and a state of another
position is an error.
"""
from __future__ import annotations

import os
from typing import Any

from mindresume.errors import ProgressError
from mindresume.model.data_position import SKIP_KEY
from mindresume.resume.progress import ResumeProgress
from mindresume.storage.operations import MAX_SMALL_FILE, read_json
from mindresume.storage.posix import PosixStorage

_DEPTH = 20                     # most datasets around the one that reads


def resume_data(dataset: Any, progress: ResumeProgress) -> None:
    """Continues streaming data at the position of ``progress``. Does nothing for other data, and on ranks that read none.

    Raises:
        ProgressError: There is no valid state of this position.
    """
    source = _source(dataset)
    if source is None or not progress.data_skip:
        return
    if progress.starts_data_set:
        refuse_skip(dataset, progress.data_skip)
    passes, steps = divmod(progress.data_skip, dataset.get_dataset_size())
    if not steps:                                       # the iterator restarts by itself; names of states count all passes
        source.cur_epoch = passes + 1
        return
    path = os.path.join(source.state_dir, f"step_{progress.data_skip}", f"dataset_state_rank{source.local_rank}.json")
    expected = {"cur_epoch": passes + 1, "cur_step": steps, "cur_iter": steps * source.batch_size}
    do = ("Resume from a checkpoint whose step has a saved state, with the batch size of that time; or restart the data "
          "(ignore_data_skip: True)")
    try:
        state = read_json(PosixStorage(), path, MAX_SMALL_FILE)["_train_state"]
        found = {name: state[name] for name in expected}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProgressError(f"{path}: the state of the streaming data set after {progress.data_skip} steps cannot be read "
                            f"({type(error).__name__}: {error}). {do}") from error
    if found != expected:
        raise ProgressError(f"{path}: the state of the streaming data set is of another position: {found}, expected {expected}. "
                            f"{do}")
    source.resume_step = progress.data_skip


def refuse_skip(dataset: Any, skip: int) -> None:
    """Raises ProgressError if ``skip`` steps of streaming data would have to be skipped: mindformers would begin with the first
    samples."""
    if skip and _source(dataset) is not None:
        raise ProgressError(f"{SKIP_KEY}: {skip} steps of a streaming data set (HFDataLoader, streaming: True) cannot be skipped"
                            f": it always starts at its beginning. Remove the key, or set streaming: False")


def _source(dataset: Any) -> Any:
    """Returns the streaming reader below a pipeline of datasets, or None."""
    for _ in range(_DEPTH):
        if dataset is None or hasattr(dataset, "source"):
            break
        children = getattr(dataset, "children", None)
        dataset = children[0] if children else None
    source = getattr(dataset, "source", None)
    return source if hasattr(source, "_load_state") else None
