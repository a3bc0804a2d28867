"""What a person sees of loading and saving while a training runs: a line every few seconds in the log, and scalars where
mindformers writes for TensorBoard (``tensorboard: tensorboard_dir``), all below ``mindresume/``:

    save-seconds  save-stall-seconds  save-MiB      at each step that was saved; the stall: so long the training stood still
    load-seconds  steps-lost  seconds-lost          at the step behind which a training went on
"""
from __future__ import annotations

from mindresume.agree import Waiting
from mindresume.events.log_lines import LogLines
from mindresume.events.progress import ProgressReporter
from mindresume.plugin import adapter
from mindresume.reshard.direct import Traffic


def gauge(what: str) -> ProgressReporter:
    return ProgressReporter(what, LogLines(adapter.logger()).emit)


def waiting(made: ProgressReporter) -> Waiting:
    """Returns how the ranks wait for work whose progress ``made`` counts."""
    return Waiting(made.what, lambda: made.done)


def traffic_of_load(total: int) -> tuple[Traffic, Waiting]:
    """Returns what says how far the load of ``total`` bytes is, and how the ranks wait for it."""
    made = gauge("loading")
    made.expect(total)
    return Traffic(progress=made.advance), waiting(made)


def scalars(step: int, **values: float | None) -> None:
    """``save_seconds=0.1`` becomes mindresume/save-seconds; None: not known. Nothing without a writer: that is mindformers'."""
    writer = adapter.tensorboard_writer()
    for name, value in values.items() if writer is not None else ():
        if value is not None:
            writer.add_scalar(f"mindresume/{name.replace('_', '-').replace('-mib', '-MiB')}", value, global_step=step)
