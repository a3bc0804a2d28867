"""``CheckpointMonitor``: takes the place of mindformers' callback of that name, with the same 25 arguments.

    step_end ─▶ a multiple of save_checkpoint_steps crossed? ─▶ snapshot ─▶ write_shard ─▶ rank 0: commit, meta.json, prune
    end      ─▶ the last step, if it is not saved yet ─▶ rank 0 waits (with a deadline) until all ranks are committed

A subclass of the built-in, because mindformers and MindSpore look for its class and reach into it: ``_append_dict``,
``_append_step_num``, ``_last_triggered_step``, ``_prefix``, ``_save_ckpt`` (mindspore train/model.py, mindformers
trainer/base_trainer.py). Checkpoint 2.0, encryption and the emergency saves of MindIO TTP are left to the built-in.
"""
from __future__ import annotations

import inspect
import json
import os
import secrets
import time
from typing import Any

import numpy as np
from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn

from mindresume import network as live
from mindresume.agree import Group, report
from mindresume.errors import RecordError, SaveError
from mindresume.files import encode
from mindresume.formats.names import FileName, free_suffix, parse_name, stem
from mindresume.formats.rank_folders import ranks_text
from mindresume.manifest import FOLDER, TRASH, attempts, run_name, run_sequence
from mindresume.plugin import adapter, session
from mindresume.plugin.group import group_of_job
from mindresume.state import TrainingState, crosses_multiple, epoch_of, step_in_epoch
from mindresume.store.commit import Committer, Place, Shard, blind_ranks, clean_own_folder, write_shard
from mindresume.store.retention import policy_of
from mindresume.store.storage import PosixStorage, Storage, publish, publish_json, read_bytes


class CheckpointMonitor(BuiltIn):
    """Arguments: those of mindformers.core.CheckpointMonitor. An unknown one is a TypeError, as there.

    Raises SaveError out of a step if a save failed and ``mindresume.on_save_error`` is ``raise``, or after
    ``max_failed_saves`` failures in a row.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        bound = inspect.signature(BuiltIn.__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        self._asked = bound.arguments
        self._ours = bool(self.use_legacy_format) and not self._asked["enc_key"]
        self._group: Group | None = None
        self._place: Place | None = None
        self._committer: Committer | None = None
        self._suffix = 0
        self._saved: set[int] = set()
        self._warned: set[str] = set()
        self._failed_in_a_row = 0
        self._seen = 0
        self._seconds_since = time.monotonic()
        if self._asked["async_save"] and self._ours:
            adapter.logger().info("mindresume: async_save is set; this version saves Checkpoint 1.0 synchronously")

    @property
    def storage(self) -> Storage:
        return PosixStorage()

    # ---- callbacks -------------------------------------------------------------------------------------------------

    def on_train_begin(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_begin(run_context)
        self._start(session.current())
        return None

    def step_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().step_end(run_context)
        cb_params = run_context.original_args()
        self._save_ckpt(cb_params)
        if self._committer is not None:
            self._committer.poll()
        return None

    def end(self, run_context: Any) -> None:
        if not self._ours:
            return super().end(run_context)
        self._save_ckpt(run_context.original_args(), True)
        if self._committer is not None:
            self._committer.finish(session.current().settings.commit_timeout)
        return None

    def _save_ckpt(self, cb_params: Any, force_to_save: bool = False) -> None:
        """MindIO TTP calls this with ``__exception_save__`` in ``_append_dict``: that is the built-in's business."""
        if not self._ours or self._place is None or "__exception_save__" in self._append_dict:
            return super()._save_ckpt(cb_params, force_to_save)
        step = self._append_step_num + cb_params.cur_step_num
        before, self._seen = (self._seen if self._seen < step else step - 1), step
        if step in self._saved or not (force_to_save or self._is_due(before, step)):
            return None
        if self._need_flush_from_cache:
            self._flush_from_cache(cb_params)
        self._last_triggered_step = cb_params.cur_step_num
        try:
            self.save_checkpoint(cb_params)
            self._saved.add(step)                   # also if one of the files beside it fails now
            self.save_checkpoint_network(cb_params)
        except SaveError as error:
            self._failed(error)
        else:
            self._failed_in_a_row = 0
        return None

    # ---- start -----------------------------------------------------------------------------------------------------

    def _start(self, current: session.Session) -> None:
        """Agrees with the other ranks on the run and on the suffix of the names, cleans up, restores random states."""
        group, root, log = group_of_job(), os.path.dirname(self._directory), adapter.logger()
        views = report(group, lambda: {"suffix": free_suffix(self.storage.list(self._directory), self.origin_prefix, group.rank),
                                       "run": self._new_run(root) if group.rank == 0 else None})
        self._suffix, run = max(view["suffix"] for view in views), views[0]["run"]
        self._prefix = stem(self.origin_prefix, group.rank, self._suffix)
        self._group, self._place = group, Place(self.storage, root, run, group.rank, group.size)
        self._seen = self._append_step_num
        blind = blind_ranks(self._place, group)
        if blind:
            log.error("mindresume: rank %s cannot see what rank 0 writes to %s: the folder is not shared. Saves will not be "
                      "committed and cannot be resumed; put output_dir on a disk that all nodes share", ranks_text(blind), root)
        try:
            for name in clean_own_folder(self._place):
                log.info("mindresume: removed %s, left half-written by an earlier run", name)
            if group.rank == 0:
                self._committer = Committer(self._place, self._policy(),
                                            log=lambda text: log.info("mindresume: %s", text))
                for step in self._committer.adopt():
                    log.info("mindresume: step %d of an earlier run was complete and is committed now", step)
        except (OSError, RecordError) as error:
            log.warning("mindresume: cleaning up %s: %s", root, error)
        if current.resumes:
            details = current.shard.details if current.shard else None
            restored = live.restore_random(details.random) if details and details.random else []
            log.info("mindresume: random state %s", f"restored ({', '.join(restored)})" if restored else
                     "not in the checkpoint: the seeds of the configuration apply")
        log.info("mindresume: run %s saves to %s as %s-...", run, root, self._prefix)

    def _new_run(self, root: str) -> str:
        names = [name.removeprefix(TRASH) for name in self.storage.list(os.path.join(root, FOLDER))]
        last = max((run_sequence(run) for _, _, run in attempts(names)), default=0)
        return run_name(last + 1, secrets.token_hex(4))

    def _policy(self) -> Any:
        return policy_of(self._asked["keep_checkpoint_max"], self._asked["keep_checkpoint_per_n_minutes"])

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

    def _failed(self, error: SaveError) -> None:
        settings = session.current().settings
        self._failed_in_a_row += 1
        adapter.logger().error("mindresume: %s (%d failed in a row)", error, self._failed_in_a_row)
        if settings.on_save_error == "raise" or 0 < settings.max_failed_saves <= self._failed_in_a_row:
            raise error

    # ---- what ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, cb_params: Any) -> None:
        """Everything a resume needs: network, optimizer, counters. SaveError if it could not be written."""
        if self._place is None or "__exception_save__" in self._append_dict:
            return super().save_checkpoint(cb_params)
        started = time.monotonic()
        state = self._state(cb_params)
        name = FileName(self.origin_prefix, self._place.rank, self._suffix, state.epoch, state.step_in_epoch,
                        self._config.format)
        if self.use_checkpoint_health_monitor:
            self._record_health(cb_params, str(name))
        net = self._config.saved_network if self._config.saved_network is not None else cb_params.train_network
        tensors = live.snapshot(adapter.parameters_to_save(net, self._config.integrated_save, self._chooser(net)))
        tables = live.layouts(getattr(net, "parameter_layout_dict", None),
                              {key: tuple(array.shape) for key, array in tensors.items()},
                              self._warn_once)
        tensors.update(live.snapshot(self._counters(cb_params, state)))
        record = write_shard(self._place, Shard(name, state, tensors, tables, live.capture_random(), self._metadata()))
        self._latest_ckpt_file_name = os.path.join(self._directory, str(name))
        adapter.logger().info("mindresume: saved step %d as %s, %.1f MiB in %.2f s", state.step, name,
                              (record.file.size or 0) / 2**20, time.monotonic() - started)
        if self._committer is not None:
            self._committer.saved(state.step)
        return None

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            adapter.logger().warning("mindresume: %s", text)

    def _state(self, cb_params: Any) -> TrainingState:
        optimizer = cb_params.optimizer if cb_params.optimizer is not None else cb_params.network.optimizer
        outputs, scale = cb_params.net_outputs, self._append_dict.get("loss_scale")
        if "loss_scale" in self._append_dict and isinstance(outputs, (tuple, list)) and len(outputs) >= 3:
            scale = outputs[2]
        step = self._append_step_num + cb_params.cur_step_num
        current = session.current()
        return TrainingState(step, int(cb_params.batch_num), _number(optimizer.global_step, int), self.global_batch_size,
                             None if scale is None else _number(scale, float), current.sink_size, current.dataset_size)

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
            return lambda name: mine(name) and not live.is_transient(name)
        return lambda name: not live.is_transient(name)

    def _deduplicates(self) -> bool:
        return bool(self._config.remove_redundancy) and self._place.world_size > 1

    def _metadata(self) -> dict[str, str]:
        return {"format": "ms", "remove_redundancy": str(self._deduplicates())}

    def save_checkpoint_network(self, cb_params: Any) -> None:
        """``checkpoint_network`` and ``checkpoint_trainable``: weights alone, for inference. They are no candidates of a
        resume and have no records; each file appears complete or not at all. Both may be asked for."""
        if self._place is None:
            return super().save_checkpoint_network(cb_params)
        net = cb_params.network
        if getattr(net, "optimizer", None) is not None:
            net = net.network
        rows = adapter.parameters_to_save(net, self._config.integrated_save, self._chooser(cb_params.train_network))
        if self.save_trainable_params:
            trainable = {parameter.name for parameter in net.trainable_params()}
            self._write_extra(cb_params, self.trainable_directory, "trainable_params",
                              [row for row in rows if row[0] in trainable])
        if self.save_network_params:
            self._write_extra(cb_params, self.network_directory, "network", rows)
        return None

    def _write_extra(self, cb_params: Any, folder: str, kind: str, rows: list[tuple[str, Any]]) -> None:
        step = self._append_step_num + cb_params.cur_step_num
        batch_num, fmt = int(cb_params.batch_num), self._config.format
        name = f"{self._prefix}-{kind}-{epoch_of(step, batch_num)}_{step_in_epoch(step, batch_num)}.{fmt}"
        path = os.path.join(folder, name)
        try:
            self.storage.make_folder(folder)
            publish(self.storage, path, (piece for _, piece in encode(fmt, live.snapshot(rows), self._metadata())),
                    self._place.run)
            limit = self._asked["keep_checkpoint_max"]
            ours = [entry for entry in self.storage.list(folder) if f"-{kind}-" in entry and _position(entry, kind, fmt)]
            oldest_first = sorted(ours, key=lambda entry: _position(entry, kind, fmt))
            for entry in oldest_first[:-limit] if limit else []:
                self.storage.remove(os.path.join(folder, entry))
        except (OSError, ValueError) as error:
            raise SaveError(f"{path} was not written: {getattr(error, 'strerror', None) or error}") from error

    def _record_health(self, cb_params: Any, name: str) -> None:
        """``health_ckpts.json`` as mindformers keeps it, replaced atomically."""
        health = self.get_checkpoint_health_info(cb_params)
        if self._place.rank != 0:
            return
        path = os.path.join(self.health_ckpts_record_dir, "health_ckpts.json")
        try:
            known = json.loads(read_bytes(self.storage, path) or b"[]") if self.storage.status(path) is not None else []
            publish_json(self.storage, path, [*known, {"is_health": health, "ckpt_name": name}], self._place.run)
        except (OSError, ValueError) as error:
            raise SaveError(f"the health of {name} was not recorded in {path}: {error}") from error


def _number(value: Any, kind: type) -> Any:
    """A Python number of a number, a tensor or a parameter of one element."""
    return kind(np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value).reshape(-1)[0])


def _position(entry: str, kind: str, fmt: str) -> tuple[int, int, int] | None:
    """(suffix, epoch, step) of ``{stem}-{kind}-{epoch}_{step}.{fmt}``, None for another name."""
    parsed = parse_name(entry.replace(f"-{kind}-", "-", 1))
    return (parsed.suffix, parsed.epoch, parsed.step) if parsed and parsed.format == fmt else None



