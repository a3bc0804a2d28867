"""Streaming data of Hugging Face (``HFDataLoader`` with ``streaming: True``): it cannot be skipped to a place, only be taken up
from a state that its iterator saved: ``{dataset_state_dir}/step_N/dataset_state_rankR.json``, N steps from the beginning.

mindformers takes up the state of the step of the *training*, whatever became of the data: with a new data set, or another batch
size, that is the state of another place, and between two passes it gives the first sample for ever (mindformers
dataset/dataloader/hf_dataloader.py, HFIterableDataset.__getitem__). Here the place in the data decides, and a state that is not
of it is an error.
"""
from __future__ import annotations

import os
from typing import Any

from mindresume.errors import ProgressError
from mindresume.model.data_position import SKIP_KEY
from mindresume.resume.progress import ResumeProgress
from mindresume.storage.operations import MAX_SMALL_FILE, read_json
from mindresume.storage.posix import PosixStorage

_DEPTH = 20                     # of datasets around the one that reads


def resume_data(dataset: Any, progress: ResumeProgress) -> None:
    """Continues the data where ``progress`` says. ProgressError if it cannot. Nothing is done for other data, and on ranks that
    do not read."""
    source = _source(dataset)
    if source is None or not progress.data_skip:
        return
    if progress.begins:
        refuse_skip(dataset, progress.data_skip)
    passes, steps = divmod(progress.data_skip, dataset.get_dataset_size())
    if not steps:                                       # the iterator begins anew by itself; states are named by all passes
        source.cur_epoch = passes + 1
        return
    path = os.path.join(source.state_dir, f"step_{progress.data_skip}", f"dataset_state_rank{source.local_rank}.json")
    expected = {"cur_epoch": passes + 1, "cur_step": steps, "cur_iter": steps * source.batch_size}
    do = ("Resume from a checkpoint at whose step a state was saved, with the batch size it was saved with; or begin the data "
          "anew (ignore_data_skip: True)")
    try:
        state = read_json(PosixStorage(), path, MAX_SMALL_FILE)["_train_state"]
        found = {name: state[name] for name in expected}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProgressError(f"{path}: the state of the streaming data set behind {progress.data_skip} steps cannot be read "
                            f"({type(error).__name__}: {error}). {do}") from error
    if found != expected:
        raise ProgressError(f"{path}: the state of the streaming data set is of another place: {found}, expected {expected}. "
                            f"{do}")
    source.resume_step = progress.data_skip


def refuse_skip(dataset: Any, skip: int) -> None:
    """Raises ProgressError if steps of streaming data would have to be left out: mindformers would begin with its first
    samples."""
    if skip and _source(dataset) is not None:
        raise ProgressError(f"{SKIP_KEY}: {skip} steps of a streaming data set (HFDataLoader, streaming: True) cannot be skipped"
                            f": it is read from its beginning. Remove the key, or set streaming: False")


def _source(dataset: Any) -> Any:
    """Returns the streaming reader below a pipeline of datasets; None: there is none."""
    for _ in range(_DEPTH):
        if dataset is None or hasattr(dataset, "source"):
            break
        children = getattr(dataset, "children", None)
        dataset = children[0] if children else None
    source = getattr(dataset, "source", None)
    return source if hasattr(source, "_load_state") else None
