"""Defines ``CheckpointMonitor``, which replaces mindformers' callback of that name and takes the same 25 arguments.

This module adapts to what mindformers and MindSpore expect of the callback. ``mindresume.saving.checkpoint_manager`` implements
the protocol of saving, ``mindresume.mindformers.state_collector`` collects what is saved. Both formats are supported, rank
folders and (``use_legacy_format: False``) iteration folders; only the content of a shard differs.

It is a subclass of the built-in, because mindformers and MindSpore look for that class and use its ``_append_dict``,
``_append_step_num``, ``_last_triggered_step``, ``_prefix`` and ``_save_ckpt`` (mindspore train/model.py, mindformers
trainer/base_trainer.py). Encrypted saves are left to the built-in.
"""
from __future__ import annotations

import os
from typing import Any

from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import COMPILING, ENDING
from mindresume.errors import SaveError
from mindresume.formats.rank_folder_naming import stem
from mindresume.mindformers import adapter, heartbeat, run_start, training_context, upstream, upstream_check
from mindresume.mindformers.monitor_arguments import checked_arguments
from mindresume.mindformers.process_group import group_of_job
from mindresume.mindformers.state_collector import StateCollector
from mindresume.resume.health import add
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.retention import Policy, policy_of
from mindresume.saving.save_request import SaveOptions, SaveRequest, SupportsSave
from mindresume.saving.save_session import SaveSession
from mindresume.saving.shard_writer import Shard
from mindresume.saving.sync_saver import Save
from mindresume.settings import Settings
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage

_RESCUE = "__exception_save__"          # MindSpore appends this key in an emergency save (train_fault_tolerance.py)


class CheckpointMonitor(BuiltIn):
    """Saves the checkpoints of a training. Its arguments are those of mindformers.core.CheckpointMonitor.

    Raises:
        ConfigError: An argument is wrong.
        SaveError: In a step, if a save failed and ``mindresume.on_save_error`` is ``raise``, or after ``max_failed_saves``
            failures in a row.
        LeaseHeldError: Another job saves into the folder.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._asked = checked_arguments(BuiltIn.__init__, args, kwargs)
        super().__init__(**self._asked)
        self._iterations = not self.use_legacy_format
        self._ours = self._iterations or not self._asked["enc_key"]
        self._checkpoints: CheckpointManager | None = None      # of the training that it saves
        self._collector: StateCollector | None = None
        self._context: training_context.TrainingContext | None = None
        self._since = runtime.monotonic()

    @property
    def storage(self) -> Storage:
        return PosixStorage()

    # ---- callbacks ---------------------------------------------------------------------------------------------------

    def on_train_begin(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_begin(run_context)
        if training_context.current().monitor is self:
            return None                 # MindIO repairs a training in its process, and begins it again: session and state go on
        self._start(training_context.current())
        self._checkpoints.handle_preemption(run_context.original_args().list_callback or (), self._context.requests)
        heartbeat.enter(COMPILING)
        return None

    def step_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().step_end(run_context)
        if self._checkpoints is None:                       # it belongs to no training
            training_context.current().resources.pending_load.end()
            return self._save_ckpt(run_context.original_args())
        request, progress = _MonitorRequest(self, run_context.original_args()), self._context.progress
        progress.step = request.step
        reason = self._checkpoints.step_end(request)
        heartbeat.step(request.step)
        if reason:
            progress.stop_reason = reason
            run_context.request_stop()
        return None

    def finish_after_error(self) -> None:
        """Finishes the save in flight after the training failed, see ``CheckpointManager.finish_after_error``."""
        if self._checkpoints is not None:
            self._checkpoints.finish_after_error()

    def on_train_step_begin(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_step_begin(run_context)
        return super(BuiltIn, self).on_train_step_begin(run_context)        # skips the built-in, which polls its own writer here

    def begin_load_attempt(self) -> None:
        """Records that the first step after the load begins, see ``CheckpointManager.begin_load_attempt``."""
        self._checkpoints.begin_load_attempt()

    def on_train_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_end(run_context)
        return super(BuiltIn, self).on_train_end(run_context)           # skips the built-in, which would save here

    def end(self, run_context: Any) -> None:
        if not self._ours:
            return super().end(run_context)
        if self._checkpoints is not None:
            heartbeat.enter(ENDING)
            self._context.resources.stop_scrub()
            self._checkpoints.end(_MonitorRequest(self, run_context.original_args()), self._close)
        return None

    def _close(self) -> None:
        self._context.monitor = None

    def _save_ckpt(self, cb_params: Any, force_to_save: bool = False) -> None:
        """Saves if the step is due. MindIO TTP calls this with ``__exception_save__`` in ``_append_dict``, on a monitor that
        belongs to no training (mindformers trainer/base_trainer.py, ckpt_save_func); the monitor of the training then saves."""
        if _RESCUE in self._append_dict:
            saving = training_context.current().monitor
            if saving is None or not saving.emergency_save(cb_params):
                return super()._save_ckpt(cb_params, force_to_save)
            self._append_dict.pop(_RESCUE)
            return None
        if not self._saves:
            return super()._save_ckpt(cb_params, force_to_save)
        request = _MonitorRequest(self, cb_params)
        if not self._checkpoints.should_save(request.step, force_to_save):
            return None
        if self._need_flush_from_cache:
            self._flush_from_cache(cb_params)
        self._last_triggered_step = cb_params.cur_step_num
        return self._checkpoints.save_now(request)

    @property
    def _saves(self) -> bool:
        """Returns whether this monitor saves in a training; if not, the built-in does."""
        return self._checkpoints is not None and self._checkpoints.saving

    def save_checkpoint(self, cb_params: Any) -> None:
        """Saves everything that a resume needs (network, optimizer, counters), and the inference weights that were asked for."""
        if not self._saves or _RESCUE in self._append_dict:
            return super().save_checkpoint(cb_params)
        return self._checkpoints.submit(_MonitorRequest(self, cb_params))

    def emergency_save(self, cb_params: Any) -> bool:
        """Saves after ranks were lost, see ``CheckpointManager.emergency_save``. False: the built-in may try."""
        return not upstream_check.is_off(upstream.RESCUE) and self._checkpoints.emergency_save(_MonitorRequest(self, cb_params))

    # ---- start -------------------------------------------------------------------------------------------------------

    def _start(self, context: training_context.TrainingContext) -> None:
        """Opens the save session together with the other ranks, cleans up, and restores the random state."""
        resources = context.resources
        self._context, resources.group = context, group_of_job()
        policy = self._policy(context.settings)             # on every rank, so that contradicting keys stop all ranks
        asked = self._asked
        options = SaveOptions(self._root(), self.origin_prefix, asked["save_checkpoint_steps"], asked["save_checkpoint_seconds"],
                              asked["async_save"], self._iterations, self._directory)
        self._checkpoints = manager = CheckpointManager(self.storage, resources.group, context.settings, options, policy,
                                                        context.emit, resources.pending_load, self._since, heartbeat.writing)
        home = run_start.open_directory(manager, context)
        if not self._iterations:
            self._prefix = stem(self.origin_prefix, resources.group.rank, home.suffix)
        self._collector = self._make_collector(home, context)
        run_start.begin_saving(manager, context, self._append_step_num, self)

    def _root(self) -> str:
        """Returns the checkpoint directory."""
        if not self._iterations:
            return os.path.dirname(self._directory)
        return os.path.realpath(self.directory or os.path.join(adapter.output_root(), "checkpoint"))

    def _make_collector(self, home: SaveSession, context: training_context.TrainingContext) -> StateCollector:
        inference = [(self.save_trainable_params, self.trainable_directory, "trainable_params"),
                     (self.save_network_params, self.network_directory, "network")]
        if self._iterations:                            # mindformers ignores both settings then (callback.py, step_end)
            inference.clear()
        return StateCollector(self._config, home.target, self.origin_prefix, home.suffix, self._append_step_num,
                              self._append_dict,
                        self.global_batch_size, self.save_optimizer, context.progress, context.emit,
                        tuple((folder, kind) for wanted, folder, kind in inference if wanted),
                        self._asked["keep_checkpoint_max"] or 0,
                        self.get_checkpoint_health_info if self.use_checkpoint_health_monitor else None)

    def _policy(self, settings: Settings) -> Policy:
        return policy_of(self._asked["keep_checkpoint_max"], self._asked["keep_checkpoint_per_n_minutes"],
                         settings.keep_every_steps, settings.keep_best, settings.keep_best_metric, settings.keep_best_mode)

    # ---- collecting --------------------------------------------------------------------------------------------------

    def _collect(self, cb_params: Any) -> Save:
        """Collects a save. All ranks call it, because it can be collective."""
        state = self._collector.state(cb_params)
        return Save(self._collector.shard(cb_params, state), tuple(self._collector.extras(cb_params, state)))

    def _collect_local(self, cb_params: Any) -> Shard:
        """Collects everything that this rank holds, when other ranks are lost."""
        state = self._collector.state(cb_params, emergency=True)
        return self._collector.shard(cb_params, state, emergency=True)

    def _record_health(self, health: int, name: str) -> None:
        """Records the health of a checkpoint in the list of mindformers' health monitor, on rank 0."""
        if self._checkpoints.target.rank != 0:
            return
        try:
            add(self.storage, self.health_ckpts_record_dir, name, health, self._checkpoints.target.run)
        except (OSError, ValueError) as error:
            raise SaveError(f"the health of {name} was not recorded in {self.health_ckpts_record_dir}: {error}") from error


class _MonitorRequest(SaveRequest):
    """Implements ``SaveRequest`` for a ``CheckpointMonitor`` at the end of a step. ``cb_params``: from MindSpore."""

    def __init__(self, monitor: CheckpointMonitor, cb_params: Any):
        super().__init__(monitor._append_step_num + cb_params.cur_step_num)
        self.monitor, self.cb_params = monitor, cb_params

    def save(self, manager: SupportsSave, force: bool) -> None:
        self.monitor._save_ckpt(self.cb_params, force)

    def collect(self) -> Save:
        return self.monitor._collect(self.cb_params)

    def on_collected(self, save: Save, name: str) -> None:
        health = save.shard.state.health
        if health is not None and not self.monitor._iterations:
            self.monitor._record_health(health, name)

    def on_submitted(self, save: Save, name: str) -> None:
        monitor = self.monitor
        monitor._latest_ckpt_file_name = os.path.join(
            monitor._checkpoints.target.root if monitor._iterations else monitor._directory, name)

    def collect_local(self) -> Shard:
        return self.monitor._collect_local(self.cb_params)

    def needs_collectives(self) -> bool:
        return adapter.collect_is_collective(self.cb_params.train_network, bool(self.monitor._config.integrated_save))
