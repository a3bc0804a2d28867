"""Defines ``CheckpointMonitor``, which replaces mindformers' callback of that name and takes the
same 25 arguments.

This module adapts to what mindformers and MindSpore expect of the callback.
``mindresume.saving.checkpoint_manager`` implements the protocol of saving,
``mindresume.mindformers.training_saves`` collects what is saved. Both formats are supported, rank
folders and (``use_legacy_format: False``) iteration folders; only the content of a shard differs.

It is a subclass of the built-in, because mindformers and MindSpore look for that class and use its
``_append_dict``, ``_append_step_num``, ``_last_triggered_step``, ``_prefix`` and ``_save_ckpt``
(mindspore train/model.py, mindformers trainer/base_trainer.py). Where saves shall be encrypted, the
built-in itself is made.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable, Mapping, MutableMapping
from functools import partial
from typing import Annotated, Any

from mindformers.core.callback.callback import CheckpointMonitor as BuiltIn
from mindspore.train import Callback

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import COMPILING, FIRST_STEP
from mindresume.errors import ConfigError, RecordError, SaveError
from mindresume.events import NetworkCompiled, warning
from mindresume.formats.rank_folders import stem
from mindresume.mindformers import adapter, heartbeat, training_context, upstream
from mindresume.mindformers.training_saves import StateCollector, TrainingSaves, step_values
from mindresume.model.manifest import FORMATS
from mindresume.model.training_state import DataPosition
from mindresume.resume.eligible import add
from mindresume.saving.checkpoint_manager import CheckpointManager
from mindresume.saving.retention import policy_of
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.shard_writer import Save, Shard, StepState
from mindresume.storage.posix import PosixStorage
from mindresume.typed import Limits, decode

# MindSpore appends this key in an emergency save (train_fault_tolerance.py)
_RESCUE = "__exception_save__"


class CheckpointMonitor(BuiltIn):
    """Saves the checkpoints of a training. Its arguments are those of
    mindformers.core.CheckpointMonitor.

    Raises:
        ConfigError: An argument is wrong.
        SaveError: In a step, if a save failed and ``mindresume.on_save_error`` is ``raise``, or
            after ``max_failed_saves`` failures in a row.
        LeaseHeldError: Another job saves into the folder.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        asked = checked_arguments(args, kwargs)
        return (
            BuiltIn(**asked)
            if asked["use_legacy_format"] and asked["enc_key"]
            else super().__new__(cls)
        )

    def __init__(self, *args: Any, **kwargs: Any):
        self._asked = checked_arguments(args, kwargs)
        super().__init__(**self._asked)
        self._iterations = not self.use_legacy_format
        self._training: TrainingSaves | None = None  # of the training that it saves
        self._collector: StateCollector | None = None
        self._since = runtime.monotonic()

    # ---- callbacks -------------------------------------------------------------------------------

    def on_train_begin(self, run_context: Any) -> None:
        saves = training_context.current().saves
        if saves is not None and saves is self._training:
            # MindIO repairs a training in its process, and begins it again: session and state go on
            return
        self._start(training_context.current(), run_context.original_args().list_callback or ())
        heartbeat.enter(COMPILING)

    def step_end(self, run_context: Any) -> None:
        if self._training is None:  # it belongs to no training
            training_context.current().resources.pending_load.end()
            self._save_ckpt(run_context.original_args())
        elif self._training.end_step(_MonitorState(self, run_context.original_args())):
            run_context.request_stop()

    def on_train_step_begin(self, run_context: Any) -> None:
        # skips the built-in, which polls its own writer here
        super(BuiltIn, self).on_train_step_begin(run_context)
        heartbeat.begin_step()

    def on_train_end(self, run_context: Any) -> None:
        super(BuiltIn, self).on_train_end(run_context)  # skips the built-in, which would save here

    def end(self, run_context: Any) -> None:
        if self._training is not None:
            self._training.end(_MonitorState(self, run_context.original_args()))

    def _save_ckpt(self, cb_params: Any, force_to_save: bool = False) -> None:
        """Saves if the step is due. MindIO TTP calls this with ``__exception_save__`` in
        ``_append_dict``, on a monitor that belongs to no training (mindformers
        trainer/base_trainer.py, ckpt_save_func); the monitor of the training then saves."""
        if _RESCUE in self._append_dict:
            saves = training_context.current().saves
            if saves is None or not saves.monitor.emergency_save(cb_params):
                return super()._save_ckpt(cb_params, force_to_save)
            self._append_dict.pop(_RESCUE)
            return None
        if not self._saves:
            return super()._save_ckpt(cb_params, force_to_save)
        state = _MonitorState(self, cb_params)
        if self._training.manager.is_due(state.step, force_to_save):
            self.save_checkpoint(cb_params)
        return None

    @property
    def _saves(self) -> bool:
        """Returns whether this monitor saves in a training; if not, the built-in does."""
        return self._training is not None and self._training.manager.is_active

    def save_checkpoint(self, cb_params: Any) -> None:
        """Saves everything that a resume needs (network, optimizer, counters), and the inference
        weights that were asked for."""
        if not self._saves or _RESCUE in self._append_dict:
            return super().save_checkpoint(cb_params)
        state, manager = _MonitorState(self, cb_params), self._training.manager
        with manager.saving(state.step):
            state.hand_over(manager)
        return None

    def emergency_save(self, cb_params: Any) -> bool:
        """Saves after ranks were lost, see ``CheckpointManager.emergency_save``. False: the
        built-in may try."""
        if upstream.is_off(upstream.RESCUE):
            return False
        return self._training.manager.emergency_save(_MonitorState(self, cb_params))

    # ---- start -----------------------------------------------------------------------------------

    def _start(
        self, context: training_context.TrainingContext, callbacks: Iterable[object]
    ) -> None:
        """Opens the save session together with the other ranks, cleans up, and restores the random
        state."""
        asked = self._asked
        retention = policy_of(
            asked["keep_checkpoint_max"],
            asked["keep_checkpoint_per_n_minutes"],
            context.settings.retention,
        )
        options = SaveOptions(
            self._root(),
            self.origin_prefix,
            asked["save_checkpoint_steps"],
            asked["save_checkpoint_seconds"],
            asked["async_save"],
            self._iterations,
            self._directory,
            retention=retention,
            since=self._since,
        )
        self._training = TrainingSaves(context, options, self)
        session = self._training.manager.session
        if not self._iterations:
            self._prefix = stem(self.origin_prefix, session.target.rank, session.suffix)
        self._collector = StateCollector(self, session, context)
        self._training.begin(self._append_step_num, callbacks)

    def _root(self) -> str:
        """Returns the checkpoint directory."""
        if not self._iterations:
            return os.path.dirname(self._directory)
        return os.path.realpath(self.directory or os.path.join(adapter.output_root(), "checkpoint"))

    # ---- collecting ------------------------------------------------------------------------------

    def _record_health(self, health: int, name: str) -> None:
        """Records the health of a checkpoint in the list of mindformers' health monitor, on rank
        0."""
        target = self._training.manager.target
        if target.rank != 0:
            return
        try:
            add(PosixStorage(), self.health_ckpts_record_dir, name, health, target.run)
        except (OSError, ValueError) as error:
            raise SaveError(
                f"the health of {name} was not recorded in {self.health_ckpts_record_dir}: {error}"
            ) from error


class _MonitorState(StepState):
    """The state of the training of a ``CheckpointMonitor`` at the end of a step. ``cb_params``:
    from MindSpore."""

    def __init__(self, monitor: CheckpointMonitor, cb_params: Any):
        self.step = monitor._append_step_num + cb_params.cur_step_num
        self.monitor, self.cb_params = monitor, cb_params

    def hand_over(self, manager: CheckpointManager) -> None:
        """Submits the step, as mindformers knows a save: with its health on record, under the
        name of its file."""
        monitor, is_new = self.monitor, self.step not in manager.policy.saved
        if is_new:
            if monitor._need_flush_from_cache:
                monitor._flush_from_cache(self.cb_params)
            monitor._last_triggered_step = self.cb_params.cur_step_num
        save = manager.collected(self.collect())
        if is_new and save.shard.state.health is not None and not monitor._iterations:
            monitor._record_health(save.shard.state.health, save.name)
        manager.submit(save)
        if is_new:
            monitor._latest_ckpt_file_name = os.path.join(
                manager.target.root if monitor._iterations else monitor._directory, save.name
            )

    def collect(self) -> Save:
        collector = self.monitor._collector
        state = collector.state(self.cb_params)
        return Save(
            collector.shard(self.cb_params, state),
            tuple(collector.extras(self.cb_params, state)),
            collector.context.ledger(int(self.cb_params.cur_epoch_num), state),
        )

    def values(self) -> dict[str, float]:
        computation = self.monitor._collector.context.computation
        return step_values(self.cb_params.net_outputs, computation.skips_overflow)

    def window(self, steps: int) -> tuple[int, DataPosition | None, int]:
        progress, batch = self.monitor._collector.context.progress, self.monitor.global_batch_size
        sink = progress.sink_size or 1
        first = self.step - sink + 1
        return first, progress.data_at(first - 1, batch)[1], -(-steps // sink) * sink * (batch or 0)

    def collect_local(self) -> Shard:
        collector = self.monitor._collector
        return collector.shard(
            self.cb_params, collector.state(self.cb_params, emergency=True), emergency=True
        )

    def needs_collectives(self) -> bool:
        return adapter.collect_is_collective(
            self.cb_params.train_network, bool(self.monitor._config.integrated_save)
        )


# ---- the first step ------------------------------------------------------------------------------


class FirstStep(Callback):
    """Begins the first step after a load, when the network is compiled and about to compute:
    compares the parameters with what was loaded, and begins the load attempt. Raises
    AlteredWeightsError as ``Resources.check_loaded``.

    ``patches`` puts it behind all other callbacks of a training of the graph trainer, so that none
    of them changes anything after the comparison, and so that a training without a
    CheckpointMonitor is compared, too. In the PyNative trainer ``checkpoint_load.check_loaded``
    does the same after the callbacks of a step.
    """

    def on_train_begin(self, run_context: Any) -> None:
        context = training_context.current()
        settings = context.settings
        if context.saves is None and (settings.guard.is_on or settings.publish.every_steps):
            context.emit(
                warning(
                    "mindresume.guard and mindresume.publish do nothing in this training: it has "
                    "no CheckpointMonitor. Add one to callbacks"
                )
            )

    def on_train_step_begin(self, run_context: Any) -> None:
        context, cb_params = training_context.current(), run_context.original_args()
        if context.proof is not None and not cb_params.dataset_sink_mode:
            # before the network takes it to the device
            context.seen.batch(cb_params.train_dataset_element or ())
        resources = context.resources
        attempt = resources.pending_load.attempt
        if resources.loaded is not None or attempt is not None and not attempt.begun:
            network, callbacks = cb_params.train_network, cb_params.list_callback or ()
            adapter.call_when_compiled(network, partial(self._begin, network, callbacks))

    def on_train_step_end(self, run_context: Any) -> None:
        context, cb_params = training_context.current(), run_context.original_args()
        progress, saves = context.progress, context.saves
        if context.proof is not None and saves is not None and progress.step is not None:
            samples = progress.samples_at(progress.step, saves.monitor.global_batch_size)
            row = context.seen.row(progress.step, int(cb_params.cur_epoch_num), samples)
            context.proof.end_step(row)
        if context.graph is not None:
            context.graph.seal()

    @staticmethod
    def _begin(network: Any, callbacks: Iterable[object]) -> None:
        context = training_context.current()
        context.resources.check_loaded(
            ((it.name, it) for it in network.get_parameters()), callbacks, context.plan.resumes
        )
        heartbeat.enter(FIRST_STEP)
        if context.saves is not None:
            context.saves.manager.begin_load_attempt()
        context.emit(NetworkCompiled())


# ---- arguments -----------------------------------------------------------------------------------

_PAIRS = (
    ("save_checkpoint_steps", "save_checkpoint_seconds"),
    ("keep_checkpoint_max", "keep_checkpoint_per_n_minutes"),
)


def _is_writer(value: Any) -> bool:
    return value is True or value in (False, "thread", "process") and value is not None


_COUNT = Annotated[int, Limits(0, what="a whole number of at least 0")] | None
_FLAG = bool | None
# {argument: what is allowed}; that of the others mindformers checks
_ALLOWED: Mapping[str, Any] = {
    "save_checkpoint_steps": _COUNT,
    "save_checkpoint_seconds": _COUNT,
    "keep_checkpoint_max": _COUNT,
    "keep_checkpoint_per_n_minutes": _COUNT,
    "integrated_save": _FLAG,
    "save_network_params": _FLAG,
    "save_trainable_params": _FLAG,
    "exception_save": _FLAG,
    "async_save": Annotated[
        Any, Limits(accepts=_is_writer, what="one of False, True, 'thread', 'process'")
    ],
    "checkpoint_format": Annotated[
        Any, Limits(accepts=FORMATS.__contains__, what=f"one of {', '.join(FORMATS)}")
    ],
    "prefix": Annotated[
        str,
        Limits(pattern=r"[^/\\\0]+", what="a text without /, with which file names begin"),
    ],
}


def checked_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of ``CheckpointMonitor`` by name, defaults included. The trainer would
    report a wrong one late, under another name, or not at all.

    If two keys exclude each other, the one that the user wrote counts. MindSpore takes the one that
    has a default (every step, five files), and ignores the other silently.

    Raises:
        ConfigError: It names the key, its value and what is allowed.
        TypeError: There are too many positional arguments, as in Python.
    """
    signature = inspect.signature(BuiltIn.__init__)
    known = [name for name in signature.parameters if name != "self"]
    for name in kwargs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            raise ConfigError(
                f"unknown key {name!r}"
                + (f", did you mean {near[0]!r}?" if near else ".")
                + f" The keys are {', '.join(known)}"
            )
    bound = signature.bind(None, *args, **kwargs)
    given = dict(bound.arguments)
    bound.apply_defaults()
    values = {name: bound.arguments[name] for name in known}
    for name, allowed in _ALLOWED.items():
        try:
            decode(allowed, values[name], name)
        except RecordError as error:
            raise ConfigError(str(error)) from None
    _check_folder(values["directory"])
    for usual, other in _PAIRS:
        if given.get(usual) and given.get(other):
            raise ConfigError(
                f"{usual} ({given[usual]}) and {other} ({given[other]}) contradict each other; set "
                "one of them to 0 or leave it out"
            )
        if given.get(other) and usual not in given:
            # only its default contradicts what the user wrote
            values[usual] = 0
    if given.get("keep_checkpoint_max") == 0 and not given.get("keep_checkpoint_per_n_minutes"):
        raise ConfigError(
            "keep_checkpoint_max is 0, expected at least 1, or null (None) to keep all checkpoints"
        )
    for name, alone in (("exception_save", False), ("enc_key", None)):
        if values.get(name, alone) != alone and values["checkpoint_format"] == "safetensors":
            raise ConfigError(
                f"{name} is set, and checkpoint_format is 'safetensors'; MindSpore saves such "
                f"checkpoints as ckpt only. Leave out {name}, or set checkpoint_format: ckpt"
            )
    return values


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Checks each ``CheckpointMonitor`` of the ``callbacks`` section before mindformers reads it:
    mindformers would report a wrong value under the name of another key.

    ``keep_checkpoint_max: 0`` beside ``keep_checkpoint_per_n_minutes`` becomes None, because
    mindformers 1.9.0 refuses 0 (trainer/utils.py, validate_checkpoint_config).
    """
    for callback in callbacks:
        if not isinstance(callback, MutableMapping) or callback.get("type") != "CheckpointMonitor":
            continue
        try:
            checked_arguments((), {key: value for key, value in callback.items() if key != "type"})
        except ConfigError as error:
            raise ConfigError(f"callbacks: CheckpointMonitor: {error}") from None
        if callback.get("keep_checkpoint_max") == 0:
            callback["keep_checkpoint_max"] = None


def _check_folder(path: Any) -> None:
    if path is not None and not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"directory is {path!r}, expected a path")
    while path and not os.path.isdir(path):
        if os.path.lexists(path):
            raise ConfigError(
                f"directory is {os.fspath(path)!r}, expected a folder, or a path where one can be "
                "created; this is a file"
            )
        path = os.path.dirname(path)
