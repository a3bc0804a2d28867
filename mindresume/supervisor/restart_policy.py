"""Decides what follows the end of a job: a pure function of the policy and of all starts so far.

A start makes *progress* if it leaves a later checkpoint than all starts before it: one that it
committed, or one that it resumed from. Steps that no checkpoint holds are lost again, so they are
none; nor is what a start resumed from whose saves to disk failed until its end: else memory would
carry a job with a full disk from start to start for ever. ``max_restarts`` counts restarts in a row
without progress; a job that fails every hour and saves every ten minutes is started again for ever,
one that dies at the same step is not.

    status 0                                  ─▶ exit
    all ranks have finished the training       ─▶ exit with the status: another start would find
                                                  nothing to train
    stopped by a signal, preempted, Ctrl-C     ─▶ exit with 143 or 130: somebody wants the job to
                                                  end
    status 2: a wrong argument or setting      ─▶ exit: another start would fail in the same way;
                                                  but restart if no rank began and an earlier
                                                  start had one: the script or interpreter is
                                                  away for now
    the command cannot be started              ─▶ the same
    status 65: a callback loads other weights  ─▶ exit: the same
    status 66: a step done again differs       ─▶ exit: a person has to look at both trainings
    status 68: the guard stopped at a bad step ─▶ exit: a person has to look at the data
    status 67: the guard rolls a bad step back ─▶ restart at once. It does not count, because the
                                                  job itself counts its rollbacks; if a hundred in
                                                  a row make no progress, its note is lost
    progress                                   ─▶ restart at once
    no progress                                ─▶ restart after 1, 2, 4 ... 60 s; after
                                                  ``max_restarts`` of them give up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import ENDED, NONE
from mindresume.formatting import shown

# kinds of ends of a start
EXITED = "exited"
DIED = "died"
HUNG = "hung"
STOPPED = "stopped"
PEER = "peer"
NOT_STARTED = "not started"
EXIT, RESTART, GIVE_UP = "exit", "restart", "give up"  # what follows
WRONG_USE = 2
ALTERED_WEIGHTS = 65
RESUME_DIFFERS = 66
ROLLBACK = 67
BAD_STEP = 68
HANG_STATUS = 124
INTERRUPTED = 130
KILLED = 137
TERMINATED = 143
MAX_DELAY = 60.0  # seconds
MAX_ROLLBACKS = 100  # in a row without progress
# any program can end with one of these; a rank of mindresume means this
_OURS = {ALTERED_WEIGHTS, RESUME_DIFFERS, ROLLBACK, BAD_STEP}
_FINAL = {
    0: "it finished",
    WRONG_USE: "status 2 means a wrong argument or setting: another start would fail in the same "
    "way",
    ALTERED_WEIGHTS: "status 65 means that a callback or another loader has put other weights into "
    "the network than the loaded ones: another start would fail in the same way",
    RESUME_DIFFERS: "status 66 means that a step trained again differs from what an earlier run "
    "had trained: one of the two is wrong, and a person has to say which",
    BAD_STEP: "status 68 means that the guard has stopped the training at a bad step: a person has "
    "to look at the data and the settings",
    INTERRUPTED: "it was interrupted",
}


@dataclass(frozen=True)
class JobEnd:
    """Says why a start ends.

    Attributes:
        kind: EXITED (the command ended), DIED (a rank ended badly), HUNG, STOPPED (this supervisor
            got a signal), PEER (another node ended it), NOT_STARTED (there was no process).
        status: exit status, as of a shell.
        cause: for people.
        leave: the ranks may save before they end.
        is_last: another node ended the job: nothing is started any more, and ``status`` is that of
            the job.
        rank: the rank that ended it; None: none, or not known.
        phase: of that rank; empty: not known.
        noticed: ``time.monotonic``.
        log: the last lines of that rank's log that look like its error.
    """

    kind: str
    status: int
    cause: str
    leave: bool = False
    rank: int | None = None
    phase: str = ""
    noticed: float = field(default_factory=runtime.monotonic)
    log: tuple[str, ...] = ()
    is_last: bool = False


@dataclass(frozen=True)
class StartOutcome:
    """Describes one start of the command and its end.

    Attributes:
        number: from 1.
        started: seconds since 1970.
        seconds: how long it lasted.
        host: of the rank that ended it.
        is_preempted: the ranks were asked to stop, saved and stopped.
        has_begun: a rank has got as far as a heartbeat.
        has_finished: all ranks finished the training and saved, before the command or a rank ended
            badly.
        resumed: step that it continued after; NONE: from the beginning, or not known.
        last_step: the last finished step of any rank; NONE: none, or not known.
        committed: the newest step that it committed; NONE: none, or not known.
        failed_saves: saves to disk that had failed in a row when it ended.
        log_folders: where the logs of this start are, if the next one would have overwritten them.
    """

    number: int
    started: float
    seconds: float
    end: JobEnd
    host: str = ""
    is_preempted: bool = False
    has_begun: bool = False
    has_finished: bool = False
    resumed: int = NONE
    last_step: int = NONE
    committed: int = NONE
    failed_saves: int = 0
    log_folders: tuple[str, ...] = ()

    @property
    def reached(self) -> int:
        """Returns the newest step that a later start can continue after, as far as known."""
        return max(self.committed, self.resumed)

    @property
    def is_rollback(self) -> bool:
        """Returns whether the guard has ended it, and the next start goes on before a bad step."""
        return self.has_begun and self.end.kind in (EXITED, DIED) and self.end.status == ROLLBACK


@dataclass(frozen=True)
class Decision:
    """Says what follows. ``status``: of the supervisor, unless it restarts. ``delay``: seconds
    before the restart. ``reason``: for people. ``fruitless``: starts in a row without progress."""

    action: str
    status: int
    delay: float = 0.0
    reason: str = ""
    fruitless: int = 0


def fruitless_starts(starts: Sequence[StartOutcome]) -> int:
    """Returns how many of the last starts in a row made no progress, without rollbacks."""
    count, rollbacks, best = 0, 0, None
    for start in starts:
        reached = start.committed if start.failed_saves else start.reached
        progress = start.committed > start.resumed if best is None else reached > best
        best = start.reached if best is None else max(best, start.reached)
        if progress:
            count = rollbacks = 0
            continue
        rollbacks += start.is_rollback
        count += not start.is_rollback or rollbacks > MAX_ROLLBACKS
    return count


def decide(max_restarts: int, starts: Sequence[StartOutcome]) -> Decision:
    """Returns what follows the last of ``starts``, at least one. ``max_restarts``: in a row without
    progress; 0: the job is never started again."""
    last = starts[-1]
    end = starts[-1].end
    fruitless = fruitless_starts(starts)
    # Status 2, although the same command has worked before: its script or interpreter cannot be
    # read now.
    is_away = (
        end.status == WRONG_USE and not last.has_begun and any(start.has_begun for start in starts)
    )
    final = None
    if end.kind == STOPPED:
        final = end.cause
    elif last.is_preempted:
        final = "the ranks were asked to stop and have saved"
    elif last.has_finished:
        final = f"all ranks have finished the training; {end.cause}"
    elif end.kind == NOT_STARTED and end.status == WRONG_USE and not is_away:
        final = end.cause
    elif end.kind in (EXITED, DIED) and not is_away and (end.status not in _OURS or last.has_begun):
        final = _FINAL.get(end.status)
    if final is not None:
        return Decision(EXIT, end.status, reason=final, fruitless=fruitless)
    status = end.status or 1
    if not max_restarts:
        return Decision(EXIT, status, reason="--max-restarts 0", fruitless=fruitless)
    if fruitless > max_restarts:
        reason = (
            f"{fruitless} starts in a row made no progress: none left a later checkpoint "
            "than the starts before it"
        )
        if last.failed_saves:
            reason += "; free space or mend the disk, then start the same command again"
        return Decision(GIVE_UP, status, reason=reason, fruitless=fruitless)
    if last.is_rollback:
        reason = f"{end.cause}: the guard goes back before a bad step"
        return Decision(RESTART, status, 0.0, reason, fruitless)
    delay = min(MAX_DELAY, 2.0 ** min(fruitless - 1, 30)) if fruitless else 0.0
    return Decision(RESTART, status, delay, end.cause, fruitless)


# ---- the page of a job that is given up ----------------------------------------------------------

# starts on a page: a job that makes progress is started again thousands of times
SHOWN = 20
# characters of a line of a log, except of the last start: the page is one event
_WIDTH = 300


def failure_page(starts: Sequence[StartOutcome]) -> tuple[str, ...]:
    """Returns what each start did and died of, in lines. Lines of logs are escaped, because they
    can hold anything."""
    lines = (
        [f"{len(starts) - SHOWN} earlier starts are left out; the event file has them"]
        if len(starts) > SHOWN
        else []
    )
    for start in starts[-SHOWN:]:
        when = runtime.strftime("%Y-%m-%d %H:%M:%S", runtime.localtime(start.started))
        lines += [
            f"start {start.number}, {when}, {start.seconds:.0f} s: {_work(start)}",
            f"    {_death(start)}",
        ]
        width = None if start is starts[-1] else _WIDTH
        lines += [f"      | {shown(line)[:width]}" for line in start.end.log]
        lines += [f"    logs: {shown(folder)}" for folder in start.log_folders]
    return tuple(lines)


def _work(start: StartOutcome) -> str:
    began = "from the beginning" if start.resumed == NONE else f"resumed after step {start.resumed}"
    if start.last_step == NONE:
        return f"{began if start.resumed != NONE else 'nothing was resumed'}, no step was finished"
    saved = (
        "no checkpoint"
        if start.committed <= start.resumed
        else f"checkpoints up to step {start.committed}"
    )
    return f"{began}, last step {start.last_step}, {saved}"


def _death(start: StartOutcome) -> str:
    host = f" on {start.host}" if start.host else ""
    phase = f" while {start.end.phase}" if start.end.phase not in ("", ENDED) else ""
    return f"{start.end.cause}{phase}{host}; status {start.end.status}"
