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
import os
import socket
import time
from typing import Any

from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn

from mindresume import network as live
from mindresume.agree import Group, Waiting, report, watched
from mindresume.errors import FolderInUseError, RemoteError, SaveError
from mindresume.formats.names import stem
from mindresume.formats.records import listed, ranks_count
from mindresume.host_memory import UNKNOWN, share_of_rank
from mindresume.plugin import adapter, modelarts, session, telling
from mindresume.plugin.arguments import checked
from mindresume.plugin.content import Contents
from mindresume.plugin.group import group_of_job
from mindresume.plugin.leaving import Leaving
from mindresume.plugin.residence import Residence, move_in
from mindresume.resume.account import random_item, table
from mindresume.resume.health import add
from mindresume.state import crosses_multiple
from mindresume.store.background import Background, work_for
from mindresume.store.mirror import Mirror
from mindresume.store.retention import Policy, policy_of
from mindresume.store.saver import Foreground, Outcome, Save, Saver
from mindresume.store.shard import (
    Place,
    clean_own_folder,
    mark_emergency,
    write_shard,
)
from mindresume.store.storage import PosixStorage, Storage

_OTHERS = 10.0                          # seconds for the records of other ranks after an error
_RESCUE = "__exception_save__"          # MindSpore's sign in the appended values: an emergency save (train_fault_tolerance.py)


class CheckpointMonitor(BuiltIn):
    """Arguments: those of mindformers.core.CheckpointMonitor. ConfigError if one is wrong or unknown.

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
        self._home: Residence | None = None
        self._contents: Contents | None = None
        self._mirror: Mirror | None = None
        self._leaving: Leaving | None = None
        self._saved: set[int] = set()
        self._stalls: dict[int, float] = {}                 # seconds that the training stood still, of saves not heard of yet
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
        self._leaving = Leaving(self._group, session.current().settings.leave_check, callbacks or (),
                                news=self._home.exchange.news, told=self._home.told, before=session.current().requests)
        if self._leaving.ignored:
            adapter.logger().warning("mindresume: %s", self._leaving.ignored)
        self._leaving.listen()
        return None

    def step_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().step_end(run_context)
        session.current().end_trial()
        if self._saver is not None:
            self._learn(self._saver.poll())
        if self._home is not None:
            self._home.reached(self._append_step_num + run_context.original_args().cur_step_num)
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
        self._save_last(cb_params)
        session.current().left = reason
        run_context.request_stop()

    def settle(self) -> None:
        """The training ended with an error. What it had begun to save is finished, and rank 0 waits some seconds for the records
        of the others: on the same error they save the same step. Raises nothing, because the training's error is on its way."""
        atexit.unregister(self.settle)
        saver, self._saver = self._saver, None
        try:
            if saver is not None and saver.busy():
                adapter.logger().warning("mindresume: the training ended with an error; the save in flight is finished first")
            outcomes = saver.finish(session.current().settings.commit_timeout, _OTHERS) if saver is not None else []
            for outcome in outcomes:
                self._hear(outcome)
                if outcome.error is not None:
                    adapter.logger().error("mindresume: %s", outcome.error)
        except Exception as error:
            adapter.logger().error("mindresume: the last save was not finished: %s", error)
        finally:
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        """SIGTERM ends the process again."""
        if self._leaving is not None:
            self._leaving.close()

    def on_train_step_begin(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_step_begin(run_context)
        trial = session.current().trial
        if trial is not None and not trial.begun:
            adapter.when_compiled(run_context.original_args().train_network, self._begin_trial)
        return super(BuiltIn, self).on_train_step_begin(run_context)        # the built-in polls its own writer here

    def _begin_trial(self) -> None:
        """The first step is about to be computed. A job that was asked to leave before, and is killed because that takes too
        long, does not die of the checkpoint."""
        trial = session.current().trial
        if trial is None or trial.begun or (self._leaving is not None and self._leaving.signalled):
            return
        try:
            trial.begin()
        except OSError as error:
            adapter.logger().info("mindresume: if this job dies of the checkpoint, the next will not know: %s", error)

    def on_train_end(self, run_context: Any) -> None:
        if not self._ours:
            return super().on_train_end(run_context)
        return super(BuiltIn, self).on_train_end(run_context)           # and here it would save by itself

    def end(self, run_context: Any) -> None:
        if not self._ours:
            return super().end(run_context)
        deadline = session.current().settings.commit_timeout
        if self._saver is not None:
            self._save_last(run_context.original_args())
            saver, self._saver, session.current().monitor = self._saver, None, None
            atexit.unregister(self.settle)
            self._learn(saver.finish(deadline))
        mirror, self._mirror = self._mirror, None
        errors = mirror.finish(deadline) if mirror is not None else []
        self._listen_no_more()
        if self._home is not None:
            self._home.leave()
        self._heed(errors)
        return None

    def _save_last(self, cb_params: Any) -> None:
        """On all ranks: the step they are at is saved by those that have not saved it, or whose save of it failed. Collecting
        parameters can be an exchange, so the others take part in it, and write nothing. If one of them is going to end with an
        error, nobody begins, and all end: the next exchange would wait for the one that is gone."""
        step, deadline = self._append_step_num + cb_params.cur_step_num, session.current().settings.commit_timeout
        errors: list[SaveError] = []

        def written() -> list[bool]:
            try:
                self._learn(self._saver.wait(deadline))
            except SaveError as error:
                errors.append(error)
            return [step in self._saved, bool(errors)]
        rows = report(self._group, written, Waiting(f"writing what was begun before step {step}", watched))
        if errors:
            raise errors[0]
        failing = [rank for rank, (_, fails) in enumerate(rows) if fails]
        if failing:
            raise SaveError(f"the training ends at step {step}, because rank {listed(failing)} ends with an error of a save, "
                            f"which the log of that rank tells. What all ranks have written counts; start the same command again")
        if all(saved for saved, _ in rows):
            return
        if step in self._saved:
            self._collect(cb_params)
        else:
            self._save_ckpt(cb_params, True)

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
        log, current.group = adapter.logger(), group_of_job()
        group, policy = current.group, self._policy()   # on every rank: keys that contradict each other stop all of them
        self._home = home = move_in(self.storage, self._root(), self.origin_prefix, current, self._iterations)
        current.release()                               # every rank has loaded before it comes here
        share = share_of_rank(group) if self._asked["async_save"] else UNKNOWN      # before rank 0 works on files alone
        self._group, self._place = group, home.place
        if not self._iterations:
            self._prefix = stem(self.origin_prefix, group.rank, home.suffix)
        self._contents = self._make_contents(home)
        self._seen = self._append_step_num
        home.begin(current)
        try:
            for name in clean_own_folder(self._place):
                log.info("mindresume: removed %s, left half-written by an earlier run", name)
        except OSError as error:
            log.warning("mindresume: cleaning up %s: %s", self._directory, error)
        self._saver = self._make_saver(policy if home.leads else None, current, share)
        self._mirror = home.exchange.uploads = modelarts.mirror_of(
            current.remote, self._place, policy, current.settings.commit_timeout,
            pledged=home.islands.apart and current.settings.leave_check > 0)
        atexit.register(self.settle)            # where no hook sees how the training ends; before the end of the mirror
        current.monitor = self
        hosts = len(set(report(group, socket.gethostname)))
        if current.trial is not None:
            current.trial.run, current.trial.hosts = home.place.run, hosts
        if current.resumes:
            details = current.shard.details if current.shard else None
            restored = live.restore_random(details.random) if details and details.random else []
            saved_by = current.choice.chosen.world_size
            other = f"saved by {ranks_count(saved_by)}, this job has {group.size}" if saved_by != group.size else ""
            log.info("mindresume: the state of the training:\n%s", table([*current.account, random_item(restored, other)]))
            self._say_lost(current)
        log.info("mindresume: run %s saves to %s as %s-...", home.place.run, home.place.root,
                 self.origin_prefix if self._iterations else self._prefix)

    def _say_lost(self, current: session.Session) -> None:
        now, lost = time.time(), current.lost
        if lost is not None:
            adapter.logger().info("mindresume: %s", lost.sentence(self._append_step_num, now))
        telling.scalars(self._append_step_num, load_seconds=current.load_seconds, steps_lost=lost and lost.steps,
                        seconds_lost=lost and lost.seconds(now))

    def _root(self) -> str:
        if not self._iterations:
            return os.path.dirname(self._directory)
        return os.path.realpath(self.directory or os.path.join(adapter.output_root(), "checkpoint"))

    def _make_contents(self, home: Residence) -> Contents:
        inference = [(self.save_trainable_params, self.trainable_directory, "trainable_params"),
                     (self.save_network_params, self.network_directory, "network")]
        if self._iterations:                            # mindformers ignores them there (callback.py, step_end)
            inference.clear()
        return Contents(self._config, home.place, self.origin_prefix, home.suffix, self._append_step_num, self._append_dict,
                        self.global_batch_size, self.save_optimizer,
                        tuple((folder, kind) for wanted, folder, kind in inference if wanted),
                        self._asked["keep_checkpoint_max"] or 0,
                        self.get_checkpoint_health_info if self.use_checkpoint_health_monitor else None)

    def _make_saver(self, policy: Policy | None, current: session.Session, share: int) -> Saver:
        """``policy``: on rank 0, which commits what earlier runs completed right away. ``share``: bytes for a copy."""
        settings, kind = current.settings, self._asked["async_save"]
        work = work_for(self._place, policy, self._log)
        work.begin()
        if not kind:
            return Foreground(work)
        return Background(self._place, policy, kind if isinstance(kind, str) else "thread", int(settings.staging_gib * 2**30),
                          settings.commit_timeout, self._log, share)

    @staticmethod
    def _log(text: str) -> None:
        adapter.logger().info("mindresume: %s", text)

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
            self._hear(outcome)
            if outcome.error is not None:
                self._failed(outcome.error)
            else:
                self._failed_in_a_row = 0

    def _hear(self, outcome: Outcome) -> None:
        if not outcome.saved:
            self._saved.discard(outcome.step)
            return
        if self._mirror is not None:
            self._mirror.saved(outcome.step)
        adapter.logger().info("mindresume: saved step %d, %.1f MiB in %.2f s", outcome.step, outcome.size / 2**20,
                              outcome.seconds)
        telling.scalars(outcome.step, save_seconds=outcome.seconds, save_mib=outcome.size / 2**20,
                        save_stall_seconds=self._stalls.pop(outcome.step, None))

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
        save = self._collect(cb_params)
        state = save.shard.state
        name = self._contents.name(state)
        if state.health is not None and not self._iterations:
            self._record_health(state.health, name)
        self._saved.add(state.step)
        self._saver.save(save)
        self._stalls[state.step] = time.monotonic() - started
        self._latest_ckpt_file_name = os.path.join(self._place.root if self._iterations else self._directory, name)
        if not isinstance(self._saver, Foreground):
            adapter.logger().info("mindresume: step %d is being saved as %s; training stopped for %.3f s", state.step, name,
                                  self._stalls[state.step])
        return None

    def _collect(self, cb_params: Any) -> Save:
        """On all ranks, because it can be an exchange."""
        state = self._contents.state(cb_params)
        return Save(self._contents.shard(cb_params, state), tuple(self._contents.extras(cb_params, state)))

    def rescue(self, cb_params: Any) -> bool:
        """Ranks were lost, and each that is left saves all it holds of the last step, which becomes a checkpoint if that is
        everything. In a thread of MindIO: no exchange between ranks, nothing is removed, nothing waits for others. False if it
        fails; then the built-in may try. SaveError if that would wait for the ranks that are lost."""
        step = self._append_step_num + cb_params.cur_step_num
        try:
            for outcome in self._saver.wait(session.current().settings.commit_timeout):
                if not outcome.saved:
                    self._saved.discard(outcome.step)
            mark_emergency(self._place, step)
            if step not in self._saved:
                state = self._contents.state(cb_params, rescue=True)
                write_shard(self._place, self._contents.shard(cb_params, state, rescue=True))
                self._saved.add(step)
        except Exception as error:          # whatever it is: these ranks have nothing else left
            if adapter.collecting_exchanges(cb_params.train_network, bool(self._config.integrated_save)):
                raise SaveError(f"step {step} was not saved before the end on rank {self._place.rank}: {error}") from error
            adapter.logger().error("mindresume: step %d was not saved before the end: %s; mindformers saves it", step, error)
            return False
        adapter.logger().warning("mindresume: other ranks are lost; rank %d saved step %d", self._place.rank, step)
        return True

    def _record_health(self, health: int, name: str) -> None:
        if self._place.rank != 0:
            return
        try:
            add(self.storage, self.health_ckpts_record_dir, name, health, self._place.run)
        except (OSError, ValueError) as error:
            raise SaveError(f"the health of {name} was not recorded in {self.health_ckpts_record_dir}: {error}") from error
