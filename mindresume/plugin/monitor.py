"""``CheckpointMonitor``: takes the place of mindformers' callback of that name, with the same 25 arguments.

    step_end ─▶ what became of the saves so far ─▶ a multiple of save_checkpoint_steps crossed? ─▶ snapshot ─▶ saver
    end      ─▶ the last step, if it is not saved yet ─▶ the saver waits (with a deadline) until all ranks are committed
    saver    Foreground, or with async_save Background: write_shard ─▶ rank 0: commit, pointers, prune

Both formats: rank folders, or with ``use_legacy_format: False`` iteration folders. Only what a shard consists of differs.

A subclass of the built-in, because mindformers and MindSpore look for its class and reach into it: ``_append_dict``,
``_append_step_num``, ``_last_triggered_step``, ``_prefix``, ``_save_ckpt`` (mindspore train/model.py, mindformers
trainer/base_trainer.py). Encryption is left to the built-in.
"""
from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn

from mindresume import network as live
from mindresume.agree import Group, decide, report
from mindresume.errors import ConfigError, FolderInUseError, RemoteError, SaveError
from mindresume.formats.iteration_files import iteration_name
from mindresume.formats.names import FileName, free_suffix, parse_name, stem
from mindresume.formats.records import listed, ranks_count, scan_records
from mindresume.plugin import adapter, modelarts, session
from mindresume.plugin.arguments import checked
from mindresume.plugin.group import group_of_job
from mindresume.plugin.leaving import Leaving
from mindresume.resume.account import random_item, table
from mindresume.resume.health import LIST
from mindresume.state import TrainingState, crosses_multiple, is_transient
from mindresume.store.background import Background, work_for
from mindresume.store.claim import SAVING, Claim, occupy, owner_of_this_process
from mindresume.store.mirror import Mirror
from mindresume.store.probe import examine
from mindresume.store.retention import Policy, policy_of
from mindresume.store.saver import Extra, Foreground, Outcome, Save, Saver
from mindresume.store.shard import (
    Place,
    Shard,
    blind_ranks,
    clean_own_folder,
    iteration_shard,
    mark_emergency,
    rank_shard,
    write_shard,
)
from mindresume.store.storage import PosixStorage, Storage, publish_json, read_bytes

_RESCUE = "__exception_save__"          # MindSpore's sign in the appended values: an emergency save (train_fault_tolerance.py)
_CLAIMS: dict[str, Claim] = {}          # of this process, by folder: it trains one thing at a time


class CheckpointMonitor(BuiltIn):
    """Arguments: those of mindformers.core.CheckpointMonitor. ConfigError (TypeError for an unknown one) if one is wrong.

    Raises SaveError out of a step if a save failed and ``mindresume.on_save_error`` is ``raise``, or after
    ``max_failed_saves`` failures in a row; FolderInUseError if another job saves into the folder.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self._asked = checked(BuiltIn.__init__, args, kwargs)
        super().__init__(**self._asked)
        self._iterations = not self.use_legacy_format
        self._ours = self._iterations or not self._asked["enc_key"]
        self._group: Group | None = None
        self._place: Place | None = None
        self._saver: Saver | None = None
        self._mirror: Mirror | None = None
        self._claim: Claim | None = None
        self._leaving: Leaving | None = None
        self._suffix = 0
        self._share: frozenset[str] | None = None           # with redundancy removal: what this rank writes of what has a layout
        self._saved: set[int] = set()
        self._warned: set[str] = set()
        self._failed_in_a_row = 0
        self._skipped = 0
        self._seen = 0
        self._seconds_since = time.monotonic()

    @property
    def storage(self) -> Storage:
        return PosixStorage()

    # ---- callbacks -------------------------------------------------------------------------------------------------

    def on_train_begin(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_begin(run_context)
        self._start(session.current())
        callbacks = run_context.original_args().list_callback
        self._leaving = Leaving(self._group, session.current().settings.leave_check, callbacks or ())
        self._leaving.listen()
        return None

    def step_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().step_end(run_context)
        session.current().end_trial(passed=True)
        if self._saver is not None:
            self._learn(self._saver.poll())
        if self._mirror is not None:
            self._heed(self._mirror.poll())
        self._save_ckpt(run_context.original_args())
        self._leave_if_asked(run_context)
        return None

    def _leave_if_asked(self, run_context: Any) -> None:
        """SIGTERM, or a graceful exit: all ranks save this step, and the training stops."""
        if self._leaving is None or self._saver is None:
            return
        cb_params = run_context.original_args()
        step = self._append_step_num + cb_params.cur_step_num
        reason = self._leaving.at(step)
        if not reason:
            return
        adapter.logger().warning("mindresume: %s: the training saves step %d and ends", reason, step)
        self._save_ckpt(cb_params, True)
        session.current().left = reason
        run_context.request_stop()

    def on_train_step_begin(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_step_begin(run_context)
        return super(BuiltIn, self).on_train_step_begin(run_context)    # the built-in polls its own writer here

    def on_train_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_end(run_context)
        return super(BuiltIn, self).on_train_end(run_context)           # and here it would save by itself

    def end(self, run_context: Any) -> None:
        if not self._ours:
            return super().end(run_context)
        deadline = session.current().settings.commit_timeout
        if self._saver is not None:
            self._learn(self._saver.wait(deadline))         # the last step may have to be saved again
        self._save_ckpt(run_context.original_args(), True)
        if self._saver is not None:
            self._learn(self._saver.finish(deadline))
            self._saver = session.current().monitor = None
        mirror, self._mirror = self._mirror, None
        errors = mirror.finish(deadline) if mirror is not None else []
        if self._leaving is not None:
            self._leaving.close()
        self._heed(errors)
        self._leave()
        return None

    def _save_ckpt(self, cb_params: Any, force_to_save: bool = False) -> None:
        """MindIO TTP calls this with ``__exception_save__`` in ``_append_dict``, of a monitor that is in no training (mindformers
        trainer/base_trainer.py, ckpt_save_func); the one that is knows where and what to save."""
        if _RESCUE in self._append_dict:
            saving = session.current().monitor
            if saving is None or not saving.rescue(cb_params):
                return super()._save_ckpt(cb_params, force_to_save)
            self._append_dict.pop(_RESCUE)
            return None
        if not self._ours or self._saver is None:
            return super()._save_ckpt(cb_params, force_to_save)
        step = self._append_step_num + cb_params.cur_step_num
        before, self._seen = (self._seen if self._seen < step else step - 1), step
        if step in self._saved or not (force_to_save or self._is_due(before, step)):
            return None
        if not force_to_save and self._is_skipped(step):
            return None
        if self._need_flush_from_cache:
            self._flush_from_cache(cb_params)
        self._last_triggered_step = cb_params.cur_step_num
        try:
            self.save_checkpoint(cb_params)
        except FolderInUseError:                            # no later save can succeed
            raise
        except SaveError as error:                          # what could not even be handed to the saver
            self._failed(error)
        if isinstance(self._saver, Foreground):             # it is written already
            self._learn(self._saver.poll())
        return None

    # ---- start -----------------------------------------------------------------------------------------------------

    def _start(self, current: session.Session) -> None:
        """Agrees with the other ranks on the run and on the suffix of the names, cleans up, restores random states."""
        group, root, log = group_of_job(), self._root(), adapter.logger()
        policy = self._policy()                         # on every rank: keys that contradict each other stop all of them
        run, used = decide(group, lambda: self._occupy(root, group))
        suffixes = report(group, lambda: free_suffix(self.storage.list(self._directory), self.origin_prefix, group.rank))
        current.release()                               # every rank has loaded before it comes here
        self._group, self._place = group, Place(self.storage, root, run, group.rank, group.size, self._iterations)
        if not self._iterations:
            self._suffix = max(used, *suffixes)
            self._prefix = stem(self.origin_prefix, group.rank, self._suffix)
        self._seen = self._append_step_num
        blind = blind_ranks(self._place, group)
        if blind and self._iterations:
            raise ConfigError(f"Checkpoint 2.0 is not supported in non-shared storage environments with multiple hosts: rank "
                              f"{listed(blind)} cannot see what rank 0 writes to {root}. Put save_path (output_dir) on a disk "
                              f"that all nodes share, and name it in SHARED_PATHS; or set use_legacy_format: True")
        if blind:
            log.error("mindresume: rank %s cannot see what rank 0 writes to %s: the folder is not shared. Saves will not be "
                      "committed and cannot be resumed; put output_dir on a disk that all nodes share", listed(blind), root)
        try:
            for name in clean_own_folder(self._place):
                log.info("mindresume: removed %s, left half-written by an earlier run", name)
        except OSError as error:
            log.warning("mindresume: cleaning up %s: %s", self._directory, error)
        self._saver = self._make_saver(policy if group.rank == 0 else None, current)
        self._mirror = modelarts.mirror_of(current.remote, self._place, policy, current.settings.commit_timeout)
        current.monitor = self
        if current.resumes:
            details = current.shard.details if current.shard else None
            restored = live.restore_random(details.random) if details and details.random else []
            saved_by = current.choice.chosen.world_size
            other = f"saved by {ranks_count(saved_by)}, this job has {group.size}" if saved_by != group.size else ""
            log.info("mindresume: the state of the training:\n%s", table([*current.account, random_item(restored, other)]))
        log.info("mindresume: run %s saves to %s as %s-...", run, root, self.origin_prefix if self._iterations else self._prefix)

    def _root(self) -> str:
        if not self._iterations:
            return os.path.dirname(self._directory)
        return os.path.realpath(self.directory or os.path.join(adapter.output_root(), "checkpoint"))

    def _occupy(self, root: str, group: Group) -> tuple[str, int]:
        """Rank 0 claims the folder for this job. Returns the name of the run, and the smallest suffix that no record knows: rank
        folders can have been deleted by hand, and names with records are never used again."""
        beat = session.current().settings.heartbeat
        if root in _CLAIMS:                                 # an earlier training of this process, which is over
            _CLAIMS.pop(root).leave()
        examine(self.storage, root)
        modelarts.number_runs(session.current().remote, self.storage, root)
        claim = occupy(self.storage, root, owner_of_this_process(SAVING, group.size), beat,
                       lambda text: adapter.logger().info("mindresume: %s", text), traced=self._iterations)
        self._claim = claim.start(beat) if beat else claim
        _CLAIMS[root] = self._claim
        atexit.register(self._leave)
        names = [parse_name(os.path.basename(path)) for path in scan_records(self.storage, root)[1]]
        return claim.run, max((name.suffix + 1 for name in names if name and name.prefix == self.origin_prefix), default=0)

    def _make_saver(self, policy: Policy | None, current: session.Session) -> Saver:
        """``policy``: on rank 0, which commits what earlier runs completed right away."""
        settings, kind = current.settings, self._asked["async_save"]
        work = work_for(self._place, policy, self._log)
        work.begin()
        if not kind:
            return Foreground(work)
        saver = Background(self._place, policy, kind if isinstance(kind, str) else "thread", int(settings.staging_gib * 2**30),
                           settings.commit_timeout, self._log)
        atexit.register(saver.settle, settings.commit_timeout)      # a training that ends with an error: the save it had begun
        return saver

    @staticmethod
    def _log(text: str) -> None:
        adapter.logger().info("mindresume: %s", text)

    def _leave(self) -> None:
        if self._claim is not None:
            self._claim.leave()

    def _policy(self) -> Policy:
        settings = session.current().settings
        return policy_of(self._asked["keep_checkpoint_max"], self._asked["keep_checkpoint_per_n_minutes"],
                         settings.keep_every_steps, settings.keep_best, settings.keep_best_metric, settings.keep_best_mode)

    # ---- when ------------------------------------------------------------------------------------------------------

    def _is_due(self, before: int, step: int) -> bool:
        if self._asked["save_checkpoint_steps"] and self._asked["save_checkpoint_steps"] > 0:
            return crosses_multiple(before, step, self._asked["save_checkpoint_steps"])
        seconds = self._asked["save_checkpoint_seconds"]
        if not seconds or seconds <= 0:
            return False
        due = time.monotonic() - self._seconds_since > seconds
        if self._group is not None and self._group.size > 1:       # clocks differ: rank 0 decides for all
            due = self._group.broadcast(b"1" if due else b"0") == b"1"
        if due:
            self._seconds_since = time.monotonic()
        return due

    def _is_skipped(self, step: int) -> bool:
        """``async_when_busy: skip``: left out by all ranks as soon as one of them is still writing, or none of the following
        saves would ever be complete on all of them. The only exchange in a save, in the training thread, like a step's own."""
        if session.current().settings.async_when_busy != "skip" or not self._asked["async_save"]:
            return False
        busy = any(report(self._group, self._saver.busy))
        if busy:
            self._skipped += 1
            adapter.logger().warning("mindresume: step %d is not saved: the save before is still being written (%d skipped so "
                                     "far)", step, self._skipped)
        return busy

    def _learn(self, outcomes: list[Outcome]) -> None:
        """What became of saves. SaveError as configured."""
        for outcome in outcomes:
            if outcome.saved:
                if self._mirror is not None:
                    self._mirror.saved(outcome.step)
                adapter.logger().info("mindresume: saved step %d, %.1f MiB in %.2f s", outcome.step, outcome.size / 2**20,
                                      outcome.seconds)
            else:
                self._saved.discard(outcome.step)
            if outcome.error is not None:
                self._failed(outcome.error)
            else:
                self._failed_in_a_row = 0

    def _failed(self, error: SaveError) -> None:
        settings = session.current().settings
        self._failed_in_a_row += 1
        adapter.logger().error("mindresume: %s (%d failed in a row)", error, self._failed_in_a_row)
        if settings.on_save_error == "raise" or 0 < settings.max_failed_saves <= self._failed_in_a_row:
            raise error

    @staticmethod
    def _heed(errors: list[RemoteError]) -> None:
        """What became of uploads: the checkpoints themselves are good, so only who asks for it is stopped by them."""
        for error in errors:
            adapter.logger().warning("mindresume: %s", error)
            if session.current().settings.on_save_error == "raise":
                raise error

    # ---- what ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, cb_params: Any) -> None:
        """Everything a resume needs: network, optimizer, counters; and the weights for inference that were asked for."""
        if self._saver is None or _RESCUE in self._append_dict:
            return super().save_checkpoint(cb_params)
        started = time.monotonic()
        state = self._state(cb_params)
        if self._iterations:
            name, save = iteration_name(state.step), Save(self._iteration(cb_params, state))
        else:
            named = self._file_name(state)
            name, save = str(named), Save(self._rank_file(cb_params, state, named), tuple(self._extras(cb_params, state)))
            if state.health is not None:
                self._record_health(state.health, name)
        self._saved.add(state.step)
        self._saver.save(save)
        self._latest_ckpt_file_name = os.path.join(self._place.root if self._iterations else self._directory, name)
        if not isinstance(self._saver, Foreground):
            adapter.logger().info("mindresume: step %d is being saved as %s; training stopped for %.3f s", state.step, name,
                                  time.monotonic() - started)
        return None

    def rescue(self, cb_params: Any) -> bool:
        """Ranks were lost, and each that is left saves all it holds of the last step, which becomes a checkpoint if that is
        everything. In a thread of MindIO: no exchange between ranks, nothing is removed, nothing waits for others. False if it
        fails; then the built-in may try."""
        step = self._append_step_num + cb_params.cur_step_num
        try:
            for outcome in self._saver.wait(session.current().settings.commit_timeout):
                if not outcome.saved:
                    self._saved.discard(outcome.step)
            mark_emergency(self._place, step)
            if step not in self._saved:
                state = self._state(cb_params, rescue=True)
                write_shard(self._place, self._iteration(cb_params, state, rescue=True) if self._iterations else
                            self._rank_file(cb_params, state, self._file_name(state), rescue=True))
                self._saved.add(step)
        except Exception as error:          # whatever it is: these ranks have nothing else left
            adapter.logger().error("mindresume: step %d was not saved before the end: %s; mindformers saves it", step, error)
            return False
        adapter.logger().warning("mindresume: other ranks are lost; rank %d saved step %d", self._place.rank, step)
        return True

    def _file_name(self, state: TrainingState) -> FileName:
        return FileName(self.origin_prefix, self._place.rank, self._suffix, state.epoch, state.step_in_epoch, self._config.format)

    def _rank_file(self, cb_params: Any, state: TrainingState, name: FileName, rescue: bool = False) -> Shard:
        net = self._config.saved_network if self._config.saved_network is not None else cb_params.train_network
        if rescue:
            tensors: dict[str, Any] = live.deferred(adapter.rescued_parameters(net, _lasting))
        else:
            tensors = live.deferred(adapter.parameters_to_save(net, self._config.integrated_save, self._chooser(net)))
        tables = live.layouts(getattr(net, "parameter_layout_dict", None), _shapes(tensors), self._warn_once)
        tensors.update(live.snapshot(self._counters(cb_params, state)))
        return rank_shard(name, state, tensors, tables, live.capture_random(),
                          {**self._metadata(), **({"remove_redundancy": "False"} if rescue else {})})

    def _iteration(self, cb_params: Any, state: TrainingState, rescue: bool = False) -> Shard:
        """Two files: what the network has, and what only the optimizer and the train step have; without save_optimizer the
        first. ``rescue``: nothing is left to other ranks."""
        net, model = cb_params.train_network, set(self._model(cb_params).parameters_dict())
        save_optimizer, deduplicates = self.save_optimizer or rescue, self._deduplicates() and not rescue

        def wanted_here(name: str) -> bool:
            return _lasting(name) and (save_optimizer or name in model)
        tensors: dict[str, Any] = live.deferred(adapter.rescued_parameters(net, wanted_here) if rescue else
                                                adapter.parameters_to_save(net, False, wanted_here))
        tables = live.job_layouts(net, _shapes(tensors), self._place.world_size, self._warn_once)
        if deduplicates:
            if self._share is None:
                self._share = live.own_share(tensors, tables, self._place.rank)
            tensors = {name: array for name, array in tensors.items() if name not in tables or name in self._share}
        parts = [{name: array for name, array in tensors.items() if (name in model) is wanted} for wanted in (True, False)]
        return iteration_shard(self.origin_prefix, self._place, state, parts[0], parts[1] if save_optimizer else None,
                               tables, live.capture_random(), deduplicates)

    @staticmethod
    def _model(cb_params: Any) -> Any:
        """The network without optimizer and train step."""
        net = cb_params.network
        return net.network if getattr(net, "optimizer", None) is not None else net

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            adapter.logger().warning("mindresume: %s", text)

    def _state(self, cb_params: Any, rescue: bool = False) -> TrainingState:
        optimizer = cb_params.optimizer if cb_params.optimizer is not None else cb_params.network.optimizer
        outputs, scale = cb_params.net_outputs, self._append_dict.get("loss_scale")
        if "loss_scale" in self._append_dict and isinstance(outputs, (tuple, list)) and len(outputs) >= 3:
            scale = outputs[2]
        step = self._append_step_num + cb_params.cur_step_num
        current = session.current()
        health = None
        if self.use_checkpoint_health_monitor and not rescue:       # it asks other ranks
            health = int(self.get_checkpoint_health_info(cb_params) != 0)
        return TrainingState(step, int(cb_params.batch_num), _number(optimizer.global_step, int), self.global_batch_size,
                             None if scale is None else _number(scale, float), current.sink_size, current.dataset_size,
                             tuple({**(_loss(outputs) if adapter.has_loss() else {}), **current.metrics}.items()), health,
                             *current.data_at(step, self.global_batch_size))

    def _counters(self, cb_params: Any, state: TrainingState) -> list[tuple[str, Any]]:
        """What mindformers appends to each file; its resume reads them (callback.py:save_checkpoint)."""
        append = dict(self._append_dict)
        optimizer = cb_params.optimizer if cb_params.optimizer is not None else cb_params.network.optimizer
        append.update(epoch_num=state.epoch, step_num=state.step, global_step=optimizer.global_step)
        if "loss_scale" in append and state.loss_scale is not None:
            append["loss_scale"] = state.loss_scale
        if self.global_batch_size is not None:
            append["global_batch_size"] = self.global_batch_size
        self._append_dict.update({key: append[key] for key in ("epoch_num", "step_num")})
        return list(append.items())

    def _chooser(self, net: Any) -> Any:
        if self._deduplicates():
            mine = adapter.own_share(net, self._place.rank, self._place.world_size)
            return lambda name: mine(name) and _lasting(name)
        return _lasting

    def _deduplicates(self) -> bool:
        return bool(self._config.remove_redundancy) and self._place.world_size > 1

    def _metadata(self) -> dict[str, str]:
        return {"format": "ms", "remove_redundancy": str(self._deduplicates())}

    def _extras(self, cb_params: Any, state: TrainingState) -> list[Extra]:
        """``checkpoint_network`` and ``checkpoint_trainable``. Both may be asked for."""
        if not self.save_trainable_params and not self.save_network_params:
            return []
        net = self._model(cb_params)
        rows = adapter.parameters_to_save(net, self._config.integrated_save, self._chooser(cb_params.train_network))
        trainable = {parameter.name for parameter in net.trainable_params()}
        found = []
        for wanted, folder, kind in ((self.save_trainable_params, self.trainable_directory, "trainable_params"),
                                     (self.save_network_params, self.network_directory, "network")):
            chosen = [row for row in rows if kind == "network" or row[0] in trainable]
            name = f"{self._prefix}-{kind}-{state.epoch}_{state.step_in_epoch}.{self._config.format}"
            if wanted:
                found.append(Extra(folder, name, kind, self._config.format, live.deferred(chosen), self._metadata(),
                                   self._asked["keep_checkpoint_max"] or 0))
        return found

    def _record_health(self, health: int, name: str) -> None:
        """The list as mindformers keeps it (``mindresume.resume.health``), replaced atomically."""
        if self._place.rank != 0:
            return
        path = os.path.join(self.health_ckpts_record_dir, LIST)
        try:
            known = json.loads(read_bytes(self.storage, path) or b"[]") if self.storage.status(path) is not None else []
            publish_json(self.storage, path, [*known, {"is_health": health, "ckpt_name": name}], self._place.run)
        except (OSError, ValueError) as error:
            raise SaveError(f"the health of {name} was not recorded in {path}: {error}") from error


def _lasting(name: str) -> bool:
    return not is_transient(name)


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in tensors.items()}


def _number(value: Any, kind: type) -> Any:
    """A Python number of a number, a tensor or a parameter of one element."""
    return kind(np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value).reshape(-1)[0])


def _loss(outputs: Any) -> dict[str, float]:
    """The loss of a step out of the outputs of the network, as mindformers' loss monitor finds it; empty if there is none
    or it is not finite."""
    loss = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    values = np.asarray(loss.asnumpy() if hasattr(loss, "asnumpy") else loss)
    if values.dtype.kind in "OSUb" or not values.size:
        return {}
    mean = float(np.mean(values.astype(np.float64)))            # numpy has no mean of bfloat16
    return {"loss": mean} if np.isfinite(mean) else {}
