"""Restores the counters of a training, and its position in the data."""

from __future__ import annotations

import os
from typing import Any

from mindresume.errors import ProgressError
from mindresume.events import ProgressRestored, WindowSkipped, warning
from mindresume.formats.rank_folders import parse_name
from mindresume.mindformers.training_context import RunProgress, TrainingContext
from mindresume.model.training_state import SKIP_KEY, TrainingState
from mindresume.reshard.open_checkpoint import state_of
from mindresume.resume.eligible import Choice
from mindresume.resume.progress import (
    ResumeProgress,
    RunSettings,
    check_skip,
    fresh_progress,
    parse_data_request,
    resume_progress,
    resume_warnings,
    summary_rows,
)
from mindresume.storage import MAX_SMALL_FILE, read_json
from mindresume.storage.posix import PosixStorage


def progress_for(
    config: Any, dataset_size: int, context: TrainingContext
) -> tuple[ResumeProgress, float | None]:
    """Returns the counters of the run and the loss scale, from the state of the selected
    checkpoint; sets the position at which mindformers continues the data.

    Raises:
        ProgressError: As ``resume.progress.resume_progress``.
    """
    state = selected_state(context.plan.choice)
    progress = continue_after(state, _run_settings(config, dataset_size, context.progress), context)
    config.data_skip_steps, config.ignore_data_skip = progress.data_skip, not progress.data_skip
    return progress, state.loss_scale


def continue_after(
    state: TrainingState, setting: RunSettings, context: TrainingContext
) -> ResumeProgress:
    """Returns the counters of a run with ``setting`` that continues after ``state``, and records
    them in the context.

    Raises:
        ProgressError: As ``resume.progress.resume_progress``.
    """
    progress = resume_progress(state, setting, context.progress.bad_steps)
    context.progress.origin = progress
    context.progress.summary = summary_rows(state, progress, setting)
    for sentence in resume_warnings(progress, setting, context.settings.on_dataset_change):
        context.emit(warning(sentence))
    context.emit(
        ProgressRestored(
            progress.initial_step,
            progress.initial_epoch,
            state.step,
            progress.step_scale,
            setting.global_batch_size,
            state.loss_scale,
        )
    )
    _say_skipped(progress, context)
    return progress


def _say_skipped(progress: ResumeProgress, context: TrainingContext) -> None:
    if progress.skipped:
        context.emit(WindowSkipped(progress.initial_step, progress.skipped))


def begin_fresh(setting: RunSettings, context: TrainingContext) -> ResumeProgress:
    """Returns the counters of a run with ``setting`` that does not resume, and records them in the
    context. ``data_skip_steps`` counts at its beginning too.

    Raises:
        ProgressError: As ``resume.progress.fresh_progress``.
    """
    if sentence := check_skip(setting):
        context.emit(warning(sentence))
    context.progress.origin = fresh_progress(setting, context.progress.bad_steps)
    _say_skipped(context.progress.origin, context)
    return context.progress.origin


def skip_data(config: Any, dataset: Any, context: TrainingContext) -> None:
    """Sets where a run begins that does not resume. mindformers ignores that whole passes cannot be
    skipped, and that in sink mode fewer steps are left then."""
    setting = _run_settings(config, config.data_size, context.progress)
    progress = begin_fresh(setting, context)
    config.runner_config.initial_epoch = progress.initial_epoch
    refuse_skip(dataset, progress.data_skip)
    if progress.data_skip != setting.skip:  # which mindformers has done
        dataset.set_init_step(progress.data_skip)


def _run_settings(config: Any, dataset_size: int, run: RunProgress) -> RunSettings:
    runner = config.runner_config
    sink_size = (
        (dataset_size if runner.sink_size == -1 else runner.sink_size) if runner.sink_mode else None
    )
    data_request = parse_data_request(config.get("ignore_data_skip"), config.get("data_skip_steps"))
    # the latter later counts sinks
    epochs = getattr(runner, "origin_epochs", None) or getattr(runner, "epochs", None)
    return RunSettings(
        runner.global_batch_size,
        dataset_size,
        sink_size,
        run.dataset_identity,
        data_request,
        epochs,
    )


def restore_progress(config: Any, dataset_size: int, context: TrainingContext) -> None:
    """Sets the initial step, the initial epoch and the loss scale of the run.

    Raises:
        ProgressError: As ``progress_for``.
    """
    progress, scale = progress_for(config, dataset_size, context)
    runner = config.runner_config
    runner.step_scale, runner.initial_step = progress.step_scale, progress.initial_step
    runner.initial_epoch = progress.initial_epoch
    if scale is not None and runner_scale(config) is not None:
        if hasattr(config.runner_wrapper.scale_sense, "loss_scale_value"):
            config.runner_wrapper.scale_sense.loss_scale_value = scale
        else:
            config.runner_wrapper.scale_sense = scale


def runner_scale(config: Any) -> Any:
    """Returns the loss scale of the configuration, or None."""
    wrapper = config.get("runner_wrapper")
    return None if wrapper is None else wrapper.get("scale_sense")


def selected_state(choice: Choice) -> TrainingState:
    """Returns the training state of the selected checkpoint, from its records or from the counters
    in its first file."""
    chosen = choice.chosen
    found = chosen.state or state_of(
        choice.shards[0].scalars, parse_name(os.path.basename(chosen.first.path))
    )
    return found or TrainingState(0, 1, 0)  # mindformers saved before the first step


def common_info(config: Any, dataset_size: int, context: TrainingContext) -> dict[str, Any]:
    """Returns the numbers of ``common.json`` from which mindformers (trainer/base_trainer.py,
    training_process) computes the progress of this run: with this run's own global batch size it
    scales nothing.

    Raises:
        ProgressError: As ``progress_for``.
    """
    progress, scale = progress_for(config, dataset_size, context)
    runner, epoch = config.runner_config, progress.initial_epoch
    # mindformers subtracts one within an epoch
    if not runner.sink_mode:
        epoch += progress.initial_step % dataset_size != 0
    # mindformers would set the scale to None
    if scale is None:
        scale = runner_scale(config)
        scale = getattr(scale, "loss_scale_value", scale)
    return {
        "epoch_num": epoch,
        "step_num": progress.initial_step,
        "global_step": progress.global_step,
        "loss_scale": scale,
        "global_batch_size": runner.global_batch_size,
    }


# ---- streaming data ------------------------------------------------------------------------------

# Streaming data of Hugging Face (``HFDataLoader`` with ``streaming: True``) cannot skip to a
# position; it continues only from a state that its iterator saved:
# ``{dataset_state_dir}/step_N/dataset_state_rankR.json``, N steps from the beginning. mindformers
# loads the state of the step of the *training*, even if the data set or the batch size changed, so
# that the state belongs to another position; and between two passes it returns the first sample
# forever (mindformers dataset/dataloader/hf_dataloader.py, HFIterableDataset.__getitem__). Here the
# position in the data decides, and a state of another position is an error.
_DEPTH = 20  # most datasets around the one that reads


def resume_streaming(dataset: Any, progress: ResumeProgress) -> None:
    """Continues streaming data at the position of ``progress``. Does nothing for other data, and on
    ranks that read none.

    Raises:
        ProgressError: There is no valid state of this position.
    """
    source = _source(dataset)
    if source is None or not progress.data_skip:
        return
    if progress.starts_data_set:
        refuse_skip(dataset, progress.data_skip)
    passes, steps = divmod(progress.data_skip, dataset.get_dataset_size())
    # the iterator restarts by itself; names of states count all passes
    if not steps:
        source.cur_epoch = passes + 1
        return
    path = os.path.join(
        source.state_dir,
        f"step_{progress.data_skip}",
        f"dataset_state_rank{source.local_rank}.json",
    )
    expected = {"cur_epoch": passes + 1, "cur_step": steps, "cur_iter": steps * source.batch_size}
    do = (
        "Resume from a checkpoint whose step has a saved state, with the batch size of that time; "
        "or restart the data (ignore_data_skip: True)"
    )
    try:
        state = read_json(PosixStorage(), path, MAX_SMALL_FILE)["_train_state"]
        found = {name: state[name] for name in expected}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProgressError(
            f"{path}: the state of the streaming data set after {progress.data_skip} steps cannot "
            f"be read ({type(error).__name__}: {error}). {do}"
        ) from error
    if found != expected:
        raise ProgressError(
            f"{path}: the state of the streaming data set is of another position: {found}, "
            f"expected {expected}. {do}"
        )
    source.resume_step = progress.data_skip


def refuse_skip(dataset: Any, skip: int) -> None:
    """Raises ProgressError if ``skip`` steps of streaming data would have to be skipped:
    mindformers would begin with the first samples."""
    if skip and _source(dataset) is not None:
        raise ProgressError(
            f"{SKIP_KEY}: {skip} steps of a streaming data set (HFDataLoader, streaming: True) "
            "cannot be skipped"
            f": it always starts at its beginning. Remove the key, or set streaming: False"
        )


def _source(dataset: Any) -> Any:
    """Returns the streaming reader below a pipeline of datasets, or None."""
    for _ in range(_DEPTH):
        if dataset is None or hasattr(dataset, "source"):
            break
        children = getattr(dataset, "children", None)
        dataset = children[0] if children else None
    source = getattr(dataset, "source", None)
    return source if hasattr(source, "_load_state") else None
