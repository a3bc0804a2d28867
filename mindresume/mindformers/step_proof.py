"""Keeps the step ledger of a training, and proves a resume by the steps that it trains again.

    seen_by_monitor(loss, ...)      what mindformers' own loss monitor has copied from the device
    seen_batch(tensors)             the input of the step, while it is on the host
    StepProof.end_step(...)         after each step, on rank 0: ledger row, comparison

Nothing here copies from a device or waits for it: a value that mindformers itself does not bring to
the host stays unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import xxhash

from mindresume.errors import ResumeDifferenceError
from mindresume.events import ResumeDiffers, ResumeProved, warning
from mindresume.events.event_file import FOLDER
from mindresume.events.step_ledger import LedgerRun, StepLedger, StepRow, ledger_path
from mindresume.mindformers import adapter
from mindresume.resume.redone_steps import RedoneSteps, StepDifference, earlier_rows
from mindresume.saving.shard_writer import SaveTarget

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
                array = tensor.asnumpy() if hasattr(tensor, "asnumpy") else np.asarray(tensor)
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
        self.values = {name: _number(value) for name, value in values.items()}

    def row(self, step: int, epoch: int | None, samples: int | None) -> StepRow:
        """Returns the row of a finished step, and forgets what was seen of it."""
        batch = None if self._batch is None else self._batch.intdigest() or 1
        row = StepRow(step, epoch, samples, batch, **self.values)
        self.clear()
        return row


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _number(value: Any) -> float | None:
    """Returns the mean as mindformers prints it; None if it is no number."""
    if value is None or isinstance(value, (bool, str)):
        return None
    array = np.asarray(value.asnumpy() if hasattr(value, "asnumpy") else value)
    if array.dtype.kind in "OSUb" or not array.size:
        return None
    # numpy has no mean of bfloat16
    return float(array.item() if array.size == 1 else np.mean(array.astype(np.float64)))


@dataclass(frozen=True)
class Computation:
    """Says what the losses of a training depend on besides its state; see ``LedgerRun``."""

    layout: str = ""
    dtype: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Computation:
        """Reads the configuration of mindformers."""
        parts = {key: config.get(key) for key in ("parallel", "parallel_config", "parallelism")}
        runner = config.get("runner_config") or {}
        parts["batch"] = [
            runner.get(key) for key in ("batch_size", "gradient_accumulation_steps", "sink_size")
        ]
        model = (config.get("model") or {}).get("model_config") or {}
        return cls(
            xxhash.xxh3_64_hexdigest(repr(_plain(parts)).encode()),
            str(model.get("compute_dtype") or ""),
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        rows = ((str(key), _plain(item)) for key, item in value.items())
        # where files are written changes nothing
        return sorted(row for row in rows if "file" not in row[0] and "path" not in row[0])
    return str(value)


class StepProof:
    """The ledger of this training, and the comparison of its first steps with those of earlier
    runs. Only rank 0 has one.

    Args:
        context: of the training.
        target: where it saves; names the run.
        step: the step after which it begins.
    """

    def __init__(self, context: Any, target: SaveTarget, step: int):
        self.context, self.emit = context, context.emit
        output, computation = adapter.output_root(), context.computation
        run = LedgerRun(
            target.run,
            target.lineage,
            step,
            target.world_size,
            computation.layout,
            f"mindformers {version('mindformers')}, mindspore {version('mindspore')}",
            adapter.is_deterministic(),
            computation.dtype,
        )
        # how many steps after the checkpoint earlier runs had trained
        self.lost_steps = 0
        self._redone: RedoneSteps | None = None
        self._unproved = ""
        if context.plan.resumes:
            origin = context.progress.origin
            self._unproved = (
                "steps done again are not compared: the global batch size has changed"
                if origin.step_scale != 1
                else "steps done again are not compared: the data set has changed"
                if origin.changed or origin.starts_data_set
                else ""
            )
            # as the run that saved it counted
            saved = context.plan.origin.chosen.step or 0
            earlier = earlier_rows(os.path.join(output, FOLDER), run, saved)
            self.lost_steps = len(earlier)
            if not earlier and not self._unproved:
                self._unproved = "no step is done again, as far as the step ledgers show"
            if self._unproved:
                earlier = {}
            self._redone = RedoneSteps(run, earlier, context.settings.proof_tolerance or None)
        self._ledger: StepLedger | None = None
        try:
            self._ledger = StepLedger(ledger_path(output, 0), run)
        except OSError as error:
            self._give_up(error)

    def end_step(self, row: StepRow) -> None:
        """Records a finished step, and compares it if an earlier run has trained it.

        Raises:
            ResumeDifferenceError: It differs, and ``on_resume_difference`` is ``stop``.
        """
        if self._ledger is not None:
            try:
                self._ledger.add(row)
            except OSError as error:
                self._give_up(error)
        if self._redone is None:
            return
        redone = self._redone
        difference = redone.add(row)
        if difference is not None and len(redone.differences) == 1:
            self._report(difference)
        if row.step >= redone.last:
            self._conclude()

    def close(self) -> None:
        """Ends the ledger; tells how far the comparison came."""
        if self._redone is not None and self._redone.steps:
            self._conclude()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _report(self, difference: StepDifference) -> None:
        self.emit(
            ResumeDiffers(
                difference.step,
                difference.name,
                difference.first_run,
                difference.expected.text(),
                difference.found.text(),
            )
        )
        if self.context.settings.on_resume_difference == "stop":
            raise ResumeDifferenceError(difference.text())

    def _conclude(self) -> None:
        redone, self._redone = self._redone, None
        self.emit(
            ResumeProved(
                redone.run.resumed,
                self.context.resources.proved_tensors,
                redone.steps,
                len(redone.earlier),
                len(redone.differences),
                redone.largest,
                self._unproved,
            )
        )

    def _give_up(self, error: OSError) -> None:
        self.emit(warning(f"the step ledger is not written any more: {error}"))
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
