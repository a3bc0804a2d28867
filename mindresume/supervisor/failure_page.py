"""Makes the page of a job that is not started again: what each start did and died of."""
from __future__ import annotations

from collections.abc import Sequence

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import ENDED, NONE
from mindresume.formatting import shown
from mindresume.supervisor.restart_policy import StartOutcome

SHOWN = 20                      # starts on a page: a job that makes progress is started again thousands of times
_WIDTH = 300                    # characters of a line of a log, except of the last start: the page is one event


def page(starts: Sequence[StartOutcome], advice: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the lines of the page. Lines of logs are escaped, because they can hold anything."""
    lines = [f"{len(starts) - SHOWN} earlier starts are left out; the event file has them"] if len(starts) > SHOWN else []
    for start in starts[-SHOWN:]:
        when = runtime.strftime("%Y-%m-%d %H:%M:%S", runtime.localtime(start.started))
        lines += [f"start {start.number}, {when}, {start.seconds:.0f} s: {_work(start)}", f"    {_death(start)}"]
        width = None if start is starts[-1] else _WIDTH
        lines += [f"      | {shown(line)[:width]}" for line in start.log]
        lines += [f"    logs: {shown(folder)}" for folder in start.log_folders]
    return (*lines, *advice)


def _work(start: StartOutcome) -> str:
    began = "from the beginning" if start.resumed == NONE else f"resumed after step {start.resumed}"
    if start.last_step == NONE:
        return f"{began if start.resumed != NONE else 'nothing was resumed'}, no step was finished"
    saved = "no checkpoint" if start.committed <= start.resumed else f"checkpoints up to step {start.committed}"
    return f"{began}, last step {start.last_step}, {saved}"


def _death(start: StartOutcome) -> str:
    host = f" on {start.host}" if start.host else ""
    phase = f" while {start.phase}" if start.phase not in ("", ENDED) else ""
    return f"{start.cause}{phase}{host}; status {start.status}"
