"""Handles events in mindformers: writes log lines to its logger, and scalars to its TensorBoard writer (``tensorboard:
tensorboard_dir``), all below ``mindresume/``:

    save-seconds  save-stall-seconds  save-MiB      at each saved step; stall: how long the training thread waited
    load-seconds  steps-lost  seconds-lost          at the step from which a training resumed
"""
from __future__ import annotations

from mindresume.events import Event, Resumed, SaveWritten
from mindresume.events.emitter import LogLines
from mindresume.mindformers import adapter


class MindFormersLog:
    """Writes log lines to mindformers' logger."""

    def handle(self, event: Event, time_s: float) -> None:
        LogLines(adapter.logger()).handle(event, time_s)

    def close(self) -> None:
        pass


class TensorBoard:
    """Writes scalars with mindformers' writer, which is created while the training is set up; writes nothing if it is
    disabled."""

    def handle(self, event: Event, time_s: float) -> None:
        rows = _scalars(event)
        writer = adapter.tensorboard_writer() if rows else None
        for name, value in rows.items() if writer is not None else ():
            if value is not None:
                writer.add_scalar(f"mindresume/{name}", value, global_step=event.step)

    def close(self) -> None:
        pass


def _scalars(event: Event) -> dict[str, float | None]:
    """Returns {name: value} of the scalars of an event."""
    if isinstance(event, SaveWritten):
        return {"save-seconds": event.write_seconds, "save-stall-seconds": event.stall_seconds,
                "save-MiB": event.size_bytes / 2**20}
    if isinstance(event, Resumed):
        return {"load-seconds": event.load_seconds, "steps-lost": event.lost_steps, "seconds-lost": event.lost_seconds}
    return {}
