"""Drives the saves of a training, for the graph trainer and for the PyNative trainer, and collects
what a save of the graph trainer consists of:

    TrainingSaves   acquire the directory
      begin         clean up, commit what earlier runs completed ─▶ end of the resume
      end_step      save where it is due ─▶ heartbeat
      end           the last step, if a rank lacks it ─▶ commit of all ranks ─▶ upload ─▶ release

    StateCollector  step, epoch, loss scale, position in the data ─▶ the shard of this rank, and
                    weights for inference

``mindresume.saving.checkpoint_manager`` has the parts; what a step consists of is a ``StepState``
of the trainer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import ENDING
from mindresume.events import Event, Resumed
from mindresume.formats.rank_folders import FileName, stem
from mindresume.formatting import ranks_count
from mindresume.mindformers import adapter, heartbeat
from mindresume.mindformers import network_state as live
from mindresume.mindformers.process_group import group_of_job
from mindresume.mindformers.step_proof import StepProof, mean_of
from mindresume.mindformers.training_context import TrainingContext
from mindresume.model.layout import Layouts, Shape
from mindresume.model.training_state import TrainingState
from mindresume.resume.progress import random_state_row, source_rows
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.save_session import SaveSession
from mindresume.saving.shard_writer import (
    ExtraWeights,
    Shard,
    StepState,
    iteration_shard,
    rank_shard,
)
from mindresume.storage.posix import PosixStorage


class TrainingSaves:
    """The saves of one training. When it is made, this rank acquires the checkpoint directory
    together with the others. All ranks have loaded the checkpoint before, so its read lock ends."""

    def __init__(self, context: TrainingContext, options: SaveOptions, monitor: Any = None):
        resources, plan = context.resources, context.plan
        resources.group = group_of_job()
        self.context, self.monitor = context, monitor
        self.manager = CheckpointManager(
            PosixStorage(),
            resources.group,
            context.settings,
            options,
            context.emit,
            resources.pending_load,
            heartbeat,
        )
        self.manager.bad_before = context.progress.bad_steps
        self.manager.window_step = context.progress.origin.window_step
        origin = plan.origin if plan.resumes else None
        self.manager.open(resources.topology, origin, resources.remote)
        resources.release()

    def begin(self, step: int, callbacks: Iterable[object] = ()) -> None:
        """Starts the saver, and ends the resume.

        Args:
            step: the step after which the training begins.
            callbacks: those of MindSpore.
        """
        context, manager = self.context, self.manager
        manager.begin(
            step, context.plan.choice if context.plan.resumes else None, context.resources.remote
        )
        context.saves = self
        if context.group.rank == 0:
            context.proof = StepProof(context, manager.target, step)
        manager.count_hosts()
        if context.plan.resumes:
            restore_random(context, step)
        manager.handle_preemption(callbacks, context.requests)

    def end_step(self, state: StepState) -> bool:
        """Saves the step where it is due: on disk, in memory. Returns whether the training is to
        end after it, because a rank was asked to stop; then the step is saved."""
        self.context.progress.step = state.step
        reason = self.manager.end_step(state)
        if reason:
            self.context.progress.stop_reason = reason
        heartbeat.step(state.step)
        return bool(reason)

    def end(self, state: StepState) -> None:
        """Saves the last step, and waits until everything is committed."""
        heartbeat.enter(ENDING)
        self.manager.save_last(state)
        self.context.saves = None  # no save is possible any more
        self.manager.end(state.step)


def restore_random(context: TrainingContext, step: int) -> None:
    """Restores the random state, the last part of a resume, and emits the summary of the resume."""
    details = context.shard.details if context.shard else None
    restored = live.restore_random(details.random) if details and details.random else []
    if context.proof is not None:
        context.proof.continue_random(bool(restored))
    saved_by = context.plan.choice.chosen.world_size
    size = context.group.size
    lost_steps = context.proof.lost_steps if context.proof is not None else 0
    saved_at = context.plan.origin.chosen.saved_at
    other = f"saved by {ranks_count(saved_by)}, this job has {size}" if saved_by != size else ""
    rows = (
        *context.progress.summary,
        random_state_row(restored, other),
        *source_rows(context.plan.selected),
    )
    context.emit(
        Resumed(
            step,
            tuple(tuple(row) for row in rows),
            context.progress.load_seconds,
            lost_steps or None,
            # clocks of hosts differ
            max(runtime.time() - saved_at, 0.0) if lost_steps and saved_at is not None else None,
        )
    )


# ---- what a save consists of ---------------------------------------------------------------------


class StateCollector:
    """Collects the state of one training of a ``CheckpointMonitor``, whose fields are those of
    mindformers' callback. What mindformers appends to each file (``_append_dict``) is kept up to
    date."""

    def __init__(self, monitor: Any, session: SaveSession, context: TrainingContext):
        self.monitor = monitor
        self.target = session.target
        self.context = context
        self.config = monitor._config  # mindspore's CheckpointConfig
        self.suffix = session.suffix
        # with redundancy removal: the tensors with a layout that this rank writes
        self._share: frozenset[str] | None = None
        self._arrangement: Mapping[str, bool] | None = None
        self._emitted: set[Event] = set()
        # arguments and result of the last ``live.layouts``
        self._laid_out: tuple[dict, dict, dict] | None = None
        self._known = adapter.SavedParameters()

    def shard(self, cb_params: Any, state: TrainingState, emergency: bool = False) -> Shard:
        """Returns everything that a resume needs. Tensors are copied from the device when their
        bytes are read. ``emergency``: other ranks are lost, so this rank writes all that it holds,
        and the device may hang."""
        return (self._iteration if self.target.iterations else self._rank_file)(
            cb_params, state, emergency
        )

    def state(self, cb_params: Any, emergency: bool = False) -> TrainingState:
        """Returns the training state after this step. ``emergency``: without any exchange with
        other ranks."""
        monitor, progress = self.monitor, self.context.progress
        outputs, scale = cb_params.net_outputs, monitor._append_dict.get("loss_scale")
        if (
            "loss_scale" in monitor._append_dict
            and isinstance(outputs, (tuple, list))
            and len(outputs) >= 3
        ):
            scale = outputs[2]
        step, batch = monitor._append_step_num + cb_params.cur_step_num, monitor.global_batch_size
        health = None
        if monitor.use_checkpoint_health_monitor and not emergency:
            health = int(monitor.get_checkpoint_health_info(cb_params) != 0)
        if self._arrangement is None:
            self._arrangement = adapter.arrangement_of(cb_params.train_network)
        metrics = {**(loss_metric(outputs) if adapter.has_loss() else {}), **progress.metrics}
        return TrainingState(
            step,
            int(cb_params.batch_num),
            number(_optimizer(cb_params).global_step, int),
            batch,
            None if scale is None else number(scale, float),
            progress.sink_size,
            progress.dataset_size,
            metrics,
            health,
            *progress.data_at(step, batch),
            self._arrangement,
        )

    def _rank_file(self, cb_params: Any, state: TrainingState, emergency: bool) -> Shard:
        net = (
            self.config.saved_network
            if self.config.saved_network is not None
            else cb_params.train_network
        )
        tensors: dict[str, Any] = live.deferred(
            adapter.rescued_parameters(net, adapter.Wanted())
            if emergency
            else adapter.parameters_to_save(
                net, self.config.integrated_save, self._wanted(net), self._known
            )
        )
        tables = self._layouts(getattr(net, "parameter_layout_dict", None) or {}, _shapes(tensors))
        tensors.update(live.deferred(self._counters(cb_params, state)))
        name = FileName(
            self.monitor.origin_prefix,
            self.target.rank,
            self.suffix,
            state.epoch,
            state.step_in_epoch,
            self.config.format,
        )
        return rank_shard(
            name, state, tensors, tables, live.capture_random(), self._metadata(emergency)
        )

    def _layouts(self, table: Mapping[str, Any], shapes: dict[str, Shape]) -> Layouts:
        """Returns ``live.layouts``. Computes it only if ``table`` or ``shapes`` differ from those
        of the last save: it takes as long as the copy of a small network."""
        if self._laid_out is None or self._laid_out[:2] != (table, shapes):
            self._laid_out = (
                copy.deepcopy(dict(table)),
                shapes,
                live.layouts(table, shapes, self._emit_once),
            )
        return dict(self._laid_out[2])

    def _iteration(self, cb_params: Any, state: TrainingState, emergency: bool) -> Shard:
        """Returns two files: the tensors of the network, and those of the optimizer and the train
        step alone; without save_optimizer only the first."""
        net, model = cb_params.train_network, set(_model(cb_params).parameters_dict())
        save_optimizer = self.monitor.save_optimizer or emergency
        deduplicates = self._deduplicates() and not emergency
        wanted = adapter.Wanted(None if save_optimizer else model)
        tensors: dict[str, Any] = live.deferred(
            adapter.rescued_parameters(net, wanted)
            if emergency
            else adapter.parameters_to_save(net, False, wanted, self._known)
        )
        tables = live.job_layouts(net, _shapes(tensors), self.target.world_size, self._emit_once)
        if deduplicates:
            if self._share is None:
                self._share = live.own_share(tensors, tables, self.target.rank)
            tensors = {
                name: array
                for name, array in tensors.items()
                if name not in tables or name in self._share
            }
        parts = [
            {name: array for name, array in tensors.items() if (name in model) is wanted}
            for wanted in (True, False)
        ]
        return iteration_shard(
            self.monitor.origin_prefix,
            self.target,
            state,
            parts[0],
            parts[1] if save_optimizer else None,
            tables,
            live.capture_random(),
            deduplicates,
        )

    def _emit_once(self, event: Event) -> None:
        if event not in self._emitted:
            self._emitted.add(event)
            self.context.emit(event)

    def _wanted(self, net: Any) -> adapter.Wanted:
        """Returns what this rank saves of a network in Checkpoint 1.0."""
        return (
            adapter.own_share(net, self.target.rank, self.target.world_size)
            if self._deduplicates()
            else adapter.Wanted()
        )

    def _deduplicates(self) -> bool:
        return bool(self.config.remove_redundancy) and self.target.world_size > 1

    def _metadata(self, emergency: bool = False) -> dict[str, str]:
        return {"format": "ms", "remove_redundancy": str(self._deduplicates() and not emergency)}

    def _counters(self, cb_params: Any, state: TrainingState) -> list[tuple[str, Any]]:
        """Returns the counters that mindformers appends to each file, and reads in its resume
        (callback.py:save_checkpoint)."""
        appended = dict(self.monitor._append_dict)
        appended.update(
            epoch_num=state.epoch,
            step_num=state.step,
            global_step=_optimizer(cb_params).global_step,
        )
        if "loss_scale" in appended and state.loss_scale is not None:
            appended["loss_scale"] = state.loss_scale
        if state.global_batch_size is not None:
            appended["global_batch_size"] = state.global_batch_size
        self.monitor._append_dict.update({key: appended[key] for key in ("epoch_num", "step_num")})
        return list(appended.items())

    def extras(self, cb_params: Any, state: TrainingState) -> list[ExtraWeights]:
        """Returns the files of ``checkpoint_network`` and ``checkpoint_trainable``, as far as they
        are asked for. In iteration folders mindformers ignores both settings (callback.py,
        step_end)."""
        monitor = self.monitor
        wanted = [
            (folder, kind)
            for is_wanted, folder, kind in (
                (monitor.save_trainable_params, monitor.trainable_directory, "trainable_params"),
                (monitor.save_network_params, monitor.network_directory, "network"),
            )
            if is_wanted
        ]
        if not wanted or self.target.iterations:
            return []
        net, keep = _model(cb_params), monitor._asked["keep_checkpoint_max"] or 0
        start = stem(monitor.origin_prefix, self.target.rank, self.suffix)
        rows = adapter.parameters_to_save(
            net, self.config.integrated_save, self._wanted(cb_params.train_network)
        )
        trainable = {parameter.name for parameter in net.trainable_params()}
        return [
            ExtraWeights(
                folder,
                f"{start}-{kind}-{state.epoch}_{state.step_in_epoch}.{self.config.format}",
                kind,
                self.config.format,
                live.deferred([row for row in rows if kind == "network" or row[0] in trainable]),
                self._metadata(),
                keep,
            )
            for folder, kind in wanted
        ]


def _optimizer(cb_params: Any) -> Any:
    found = cb_params.optimizer
    return found if found is not None else cb_params.network.optimizer


def _model(cb_params: Any) -> Any:
    """Returns the network without optimizer and train step."""
    net = cb_params.network
    return net.network if getattr(net, "optimizer", None) is not None else net


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tuple(array.shape) for name, array in tensors.items()}


def number(value: Any, kind: type) -> Any:
    """Returns a Python number for a number, or for a tensor or parameter of one element."""
    return kind(live.as_numpy(value).reshape(-1)[0])


def step_values(outputs: Any, skips_overflow: bool) -> dict[str, float]:
    """Returns the ``loss`` and ``grad_norm`` of a step from the outputs of the network: loss,
    overflow, loss scale, learning rate, norm of the gradients (mindformers wrapper/wrapper.py); the
    later ones may be absent. Nothing after an overflow if it is normal (``skips_overflow``)."""
    rows = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    if skips_overflow and len(rows) > 1 and number(rows[1], bool):
        return {}
    found = {"loss": mean_of(rows[0]) if rows and adapter.has_loss() else None}
    found["grad_norm"] = mean_of(rows[4]) if len(rows) > 4 else None
    return {name: value for name, value in found.items() if value is not None}


def loss_metric(outputs: Any) -> dict[str, float]:
    """Returns {"loss": value} from the outputs of the network, as mindformers' loss monitor finds
    it; empty if there is none, or it is not finite."""
    loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    mean = mean_of(loss)
    return {"loss": mean} if mean is not None and math.isfinite(mean) else {}
