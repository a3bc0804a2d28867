"""Reports how far the load of a checkpoint is, as events and to the ranks that wait for it."""
from __future__ import annotations

from mindresume.coordination.collectives import Waiting
from mindresume.events import Emit
from mindresume.events.progress import ProgressReporter
from mindresume.reshard.direct_engine import Traffic


def waiting(reporter: ProgressReporter) -> Waiting:
    """Returns how the ranks wait for work whose progress ``reporter`` counts."""
    return Waiting(reporter.what, lambda: reporter.done)


def traffic_of_load(total: int, emit: Emit) -> tuple[Traffic, Waiting]:
    """Returns what counts the bytes of a load of ``total`` bytes, and how the ranks wait for it."""
    reporter = ProgressReporter("loading", emit)
    reporter.expect(total)
    return Traffic(progress=reporter.advance), waiting(reporter)
