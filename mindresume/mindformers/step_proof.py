"""Keeps the step ledger of a training, and proves a resume by the steps that it trains again.

    SeenValues.monitor(loss=...)    takes what mindformers' own loss monitor has on the host
    SeenValues.batch(tensors)       takes the input of the step, while it is on the host
    StepProof.end_step(row)         after each step, on rank 0: adds it to the ledger, compares it

Nothing here copies from a device or waits for it: a value that mindformers itself does not bring to
the host stays unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash

from mindresume.errors import ResumeDifferenceError
from mindresume.events import ResumeDiffers, ResumeProved, warning
from mindresume.events.event_file import FOLDER
from mindresume.formats import CheckpointDir
from mindresume.mindformers import adapter
from mindresume.mindformers.network_state import OFF, as_numpy
from mindresume.resume.eligible import Choice
from mindresume.resume.progress import ResumeProgress
from mindresume.resume.step_ledger import (
    LedgerRun,
    RedoneSteps,
    StepDifference,
    StepLedger,
    StepRow,
    earlier_ledger,
    ledger_path,
)
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.posix import PosixStorage

# bytes of each tensor of a batch that are hashed, at its beginning and at its end
_EDGE = 1 << 15


class SeenValues:
    """Collects what the host sees of a step, until it ends."""

    def __init__(self) -> None:
        # False: the input is of a kind that cannot be compared
        self.batches_are_seen = True
        self.clear()

    def clear(self) -> None:
        self._batch: xxhash.xxh3_64 | None = None
        self.values: dict[str, float | None] = {}

    def batch(self, tensors: Iterable[Any]) -> None:
        """Adds the input of a step, or of a part of it. Tensors that are on the device already are
        not copied back: call this before the network computes."""
        if not self.batches_are_seen:
            return
        if self._batch is None:
            self._batch = xxhash.xxh3_64()
        try:
            for tensor in tensors:
                array = as_numpy(tensor)
                if array.nbytes > 2 * _EDGE:
                    array = array.reshape(-1)
                    count = _EDGE // array.itemsize
                    self._batch.update(_bytes_of(array[:count]))
                    array = array[-count:]
                self._batch.update(_bytes_of(array))
        # an input of another kind, such as nested tuples or texts, is not compared
        except (TypeError, ValueError, AttributeError, RuntimeError):
            self._batch, self.batches_are_seen = None, False

    def monitor(self, **values: Any) -> None:
        """Takes numbers, or arrays of one element, that the loss monitor has on the host."""
        self.values = {name: mean_of(value) for name, value in values.items()}

    def row(self, step: int, epoch: int | None, samples: int | None) -> StepRow:
        """Returns the row of a finished step."""
        batch = None if self._batch is None else self._batch.intdigest() or 1
        return StepRow(step, epoch, samples, batch, **self.values)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    if array.dtype.hasobject:  # its bytes are addresses
        raise TypeError(array.dtype)
    return np.ascontiguousarray(array).view(np.uint8)


def mean_of(value: Any) -> float | None:
    """Returns the mean as mindformers prints it; None if it is no number."""
    if value is None or isinstance(value, (bool, str)):
        return None
    array = as_numpy(value)
    if array.dtype.kind in "OSUbc" or not array.size:
        return None
    # numpy has no mean of bfloat16
    return float(array.item() if array.size == 1 else np.mean(array.astype(np.float64)))


# spellings of mindformers (parallel_core/transformer_config.py)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# the only dropout whose random numbers a resume continues; others keep counters of their own
_CONTINUED = {"hidden_dropout"}


@dataclass(frozen=True)
class Computation:
    """Says what the losses of a training depend on besides its state; see ``LedgerRun``.

    Attributes:
        dropouts: the keys of the configuration that are above 0.
        skips_overflow: gradients that overflow are normal, and that step updates nothing: the loss
            scale is dynamic, or the PyNative trainer skips it (``use_skip_step_on_nan``).
    """

    layout: str = ""
    dtype: str = ""
    dropouts: frozenset[str] = frozenset()
    skips_overflow: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Computation:
        """Reads the configuration of mindformers; what is of another type says nothing."""
        parts = {key: config.get(key) for key in ("parallel", "parallel_config", "parallelism")}
        runner, training = _section(config, "runner_config"), _section(config, "training")
        is_sink = bool(runner.get("sink_mode"))
        parts["batch"] = [
            runner.get("batch_size"),
            runner.get("gradient_accumulation_steps"),
            runner.get("sink_size") if is_sink else None,
            is_sink,
            training.get("local_batch_size"),
            training.get("global_batch_size"),
        ]
        # of the graph trainer; of the PyNative trainer
        model = _section(config, "model")
        model = _section(model, "model_config") or model
        dtype = str(model.get("compute_dtype") or "").lower()
        return cls(
            xxhash.xxh3_64_hexdigest(repr(_plain(parts)).encode()),
            _DTYPES.get(dtype, dtype)[:32],
            frozenset(
                key for key, value in model.items() if "dropout" in str(key) and _is_above_0(value)
            ),
            bool(
                _section(_section(config, "runner_wrapper"), "scale_sense").get("scale_window")
                or training.get("use_skip_step_on_nan")
            ),
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_above_0(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        rows = ((str(key), _plain(item)) for key, item in value.items())
        # where files are written changes nothing
        return sorted(row for row in rows if "file" not in row[0] and "path" not in row[0])
    return str(value)


def _change(origin: ResumeProgress) -> str:
    """Returns why the steps after a checkpoint are others than those after it before; empty: they
    are the same."""
    if origin.step_scale != 1:
        return "the global batch size has changed"
    if (
        origin.changed
        or origin.starts_data_set
        or origin.moved_passes
        or origin.repeated
        or origin.skipped
    ):
        return "the data has changed"
    return ""


class StepProof:
    """The ledger of this training, and the comparison of its first steps with those of the run
    before. Only rank 0 has one. What goes wrong in it ends no training: it is switched off.

    Args:
        context: of the training.
        target: where it saves; names the run.
        step: the step after which it begins.

    Attributes:
        lost_steps: how many steps after the checkpoint the run before had trained.
    """

    def __init__(self, context: Any, target: SaveTarget, step: int):
        self.context, self.emit = context, context.emit
        self._folder = os.path.join(adapter.output_root(), FOLDER)
        computation = context.computation
        change = _change(context.progress.origin) if context.plan.resumes else ""
        self._run = LedgerRun(
            target.run,
            target.lineage,
            step,
            target.world_size,
            computation.layout,
            f"mindformers {version('mindformers')}, mindspore {version('mindspore')}",
            adapter.is_deterministic(),
            computation.dtype,
            bool(computation.dropouts),
            bool(change),
        )
        self.lost_steps = 0
        self._ledger: StepLedger | None = None  # until the first step
        self._is_off = False
        self._redone: RedoneSteps | None = None
        # why no step is compared; empty: the result is not said yet, or all were
        self._unproved = ""
        self._is_said = not context.plan.resumes
        if not self._is_said:
            # the other ranks wait for this one soon
            try:
                self._begin(context.plan.origin, change)
            except Exception as error:
                self._give_up(error)

    def _begin(self, choice: Choice, change: str) -> None:
        """Finds the steps that are trained again. ``choice``: the checkpoint that was loaded.
        ``change``: what is not as in the run that saved it."""
        earlier = earlier_ledger(
            self._folder,
            CheckpointDir(PosixStorage(), choice.checkpoint_dir),
            self._run,
            choice.chosen.step or 0,
            choice.chosen.run,
        )
        self.lost_steps = len(earlier.rows) if earlier else 0
        if change:
            self._unproved = f"no step is compared: {change}"
        elif earlier is None:
            self._unproved = "no step is done again, as far as the step ledgers show"
        elif earlier.run.branches:
            self._unproved = (
                "no step is compared: a run since then had other data or another batch size"
            )
        else:
            tolerance = self.context.settings.proof_tolerance or None
            self._redone = RedoneSteps(self._run, earlier, tolerance)

    def end_step(self, row: StepRow) -> None:
        """Records a finished step, and compares it if the run before has trained it. What the host
        saw of it is forgotten.

        Raises:
            ResumeDifferenceError: It differs, and ``on_resume_difference`` is ``stop``.
        """
        self.context.seen.clear()
        if self._is_off:
            return
        try:
            self._opened().add(row)
            difference = self._compare(row)
        except Exception as error:
            self._give_up(error)
            return
        if difference is not None and self.context.settings.on_resume_difference == "stop":
            raise ResumeDifferenceError(difference.text())

    def copy(self, row: StepRow) -> bytes:
        """Returns the last rows of the ledger for the save of a step, ``row``, that is not recorded
        yet; empty: there is no ledger."""
        if self._is_off:
            return b""
        try:
            return self._opened().copy(row)
        except Exception as error:
            self._give_up(error)
            return b""

    def _opened(self) -> StepLedger:
        if self._ledger is None:
            self._ledger = StepLedger(ledger_path(self._folder), self._run)
        return self._ledger

    def _compare(self, row: StepRow) -> StepDifference | None:
        """Compares a row, and says the result after the last one. Returns the first difference of
        this resume."""
        redone, first = self._redone, None
        if redone is not None:
            if not redone.steps and row.step not in redone.earlier.rows:
                self._redone = None
                self._unproved = f"no step is compared: the step ledger has no step {row.step}"
            elif difference := redone.add(row):
                first = difference if len(redone.differences) == 1 else None
        if first is not None:
            self.emit(
                ResumeDiffers(
                    row.step, first.name, first.first_run, first.expected.text(), row.text()
                )
            )
        if self._redone is None or row.step >= self._redone.last:
            self._say()
        return first

    def _give_up(self, error: Exception) -> None:
        self._is_off, self._redone = True, None
        self.emit(warning(f"the step ledger is off, and no step is compared any more: {error}"))

    def continue_random(self, restored: bool) -> None:
        """Notes whether the random state was restored."""
        if self._redone is not None:
            dropouts = self.context.computation.dropouts
            self._redone.random_is_restored = restored and dropouts <= _CONTINUED

    def close(self) -> None:
        """Ends the ledger; says how far the comparison came, if the training ended before its
        end."""
        if self._redone is not None and self._redone.steps:
            self._unproved = self._unproved or "then the training ended"
            self._say()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _say(self) -> None:
        """Emits the result, once."""
        if self._is_said:
            return
        self._is_said = True
        redone, self._redone = self._redone, None
        is_off = self.context.settings.proof == OFF
        reasons = ("the weights are not compared (proof: off)" if is_off else "", self._unproved)
        proved = ResumeProved(
            self._run.resumed,
            **self.context.resources.proved,
            unproved=", ".join(filter(None, reasons)),
        )
        if redone is not None:
            proved = replace(
                proved,
                steps=redone.steps,
                expected_steps=len(redone.earlier.rows),
                differences=len(redone.differences),
                largest_loss_difference=redone.largest,
                compared=tuple(sorted(redone.compared)),
            )
        self.emit(proved)
