"""Reports the progress of a load, as events and to the ranks that wait for it."""
from __future__ import annotations

from mindresume.coordination.collectives import Watchdog
from mindresume.events import Emit
from mindresume.events.progress import ProgressReporter
from mindresume.reshard.direct_engine import Traffic


def waiting_for(reporter: ProgressReporter) -> Watchdog:
    """Returns how the ranks wait for work that ``reporter`` counts."""
    return Watchdog(reporter.what, lambda: reporter.done)


def load_traffic(total: int, emit: Emit) -> tuple[Traffic, Watchdog]:
    """Returns the byte counter of a load of ``total`` bytes, and how the ranks wait for the load."""
    reporter = ProgressReporter("loading", emit)
    reporter.expect(total)
    return Traffic(progress=reporter.advance), waiting_for(reporter)
