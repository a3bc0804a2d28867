"""Says what a supervised job does now, from the event file of its supervisor and, on its host, from
the heartbeats of the ranks, which tell what happens before the first event of a start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mindresume import runtime
from mindresume.coordination.liveness import is_running
from mindresume.coordination.rank_heartbeat import PHASES, STARTING, read_heartbeats
from mindresume.events import (
    JobStarted,
    LogsKept,
    Notice,
    StartupMeasured,
    SupervisorEnded,
    SupervisorStarted,
)
from mindresume.formatting import counted, span_text
from mindresume.report.log_reader import find_supervisor_logs, read_events
from mindresume.supervisor.job_end import heartbeats_of


def supervised_state(folders: Iterable[str]) -> str:
    """Returns a line on the newest supervisor in ``folders`` (output folders): "start 4, 12 s: 3 of
    4 ranks joining"; empty if there is none, or it has ended."""
    logs = find_supervisor_logs(folders)
    rows = read_events(logs[-1]) if logs else ()
    events = [row for row in rows if not isinstance(row.event, (LogsKept, Notice))]
    if not events or isinstance(events[-1].event, SupervisorEnded):
        return ""
    number, process = 0, None
    for at, event in events:
        if isinstance(event, SupervisorStarted):
            process = event.process_id if event.host == runtime.gethostname() else None
        elif isinstance(event, JobStarted):
            number, started = event.start, at
    now = runtime.time()
    if process is not None and is_running(process, 0) is False:
        return f"its supervisor, process {process}, is gone"
    if not number or not isinstance(event, (JobStarted, StartupMeasured)):
        return f"{span_text(now - at)} ago: {event.line().partition(chr(10))[0]}"
    phases = "" if process is None else _phases(heartbeats_of(process, number))
    return f"start {number}, {span_text(now - started)}: {phases or event.line()}"


def _phases(folder: str) -> str:
    """Returns the phase of the ranks that are behind the others."""
    ranks = read_heartbeats(folder)
    phases = Counter(rank.phase for rank in ranks)
    if not phases:
        return "starting, importing"  # a heartbeat begins when the imports are done
    behind = min(phases, key=PHASES.index)
    step = max(rank.step for rank in ranks)
    return (
        f"{phases[behind]} of {counted(len(ranks), 'rank')} "
        f"{'importing' if behind == STARTING else behind}" + f", step {step}" * (step >= 0)
    )
