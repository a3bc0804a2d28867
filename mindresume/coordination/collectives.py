"""Runs work on the ranks of a job and exchanges the results.

    run_on_rank0(group, work)           # broadcast: every rank gets the result of rank 0
    gather_results(group, work)         # all-gather: every rank gets the results of all ranks
    gather_values(group, value)         # the same, of what each rank has already
    run_on_all(group, work)  # every rank keeps its own result, after all ranks have succeeded

Results are JSON values; of an object, its attributes are sent. An error on one rank reaches all
ranks as text and is raised there as CollectiveError, so that no rank waits for it in vain.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from mindresume import runtime
from mindresume.errors import CollectiveError

Result = TypeVar("Result")


class Group(Protocol):
    """The ranks of a job. ``rank``: of this process. ``size``: number of ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def broadcast(self, message: bytes) -> bytes:
        """Returns the message of rank 0, on every rank."""

    def gather(self, message: bytes) -> list[bytes]:
        """Returns the messages of all ranks in order, on every rank."""


@dataclass(frozen=True)
class SingleProcess:
    """A job of one process."""

    rank: int = 0
    size: int = 1

    def broadcast(self, message: bytes) -> bytes:
        return message

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class Progress(Protocol):
    """``done``: any number that changes while work goes on."""

    @property
    def done(self) -> float: ...


@dataclass(frozen=True)
class Watchdog:
    """Supervises work that may take minutes. No rank waits in a collective meanwhile, which HCCL
    would end: each rank works in a thread, and every few seconds all ranks exchange which of them
    are done.

    Attributes:
        what: the work, for the error.
        progress: counts the work of this rank while it goes on; None: it does not say.
        stall_timeout: seconds, by the clock of rank 0, without a changed number or another rank
            done, after which all ranks raise CollectiveError that names the ranks that are not
            done; infinite: the work has a timeout of its own.
    """

    what: str = "long work"
    progress: Progress | None = None
    stall_timeout: float = 1800.0


# seconds between two exchanges; doubled each time
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0


def run_on_rank0(group: Group, work: Callable[[], Any], watchdog: Watchdog | None = None) -> Any:
    """Runs ``work`` on rank 0. Returns its result, a JSON value, on every rank. ``watchdog``: for
    work that may take minutes. Raises CollectiveError on all ranks if it fails."""
    own = _reply_of(group, work, watchdog, group.rank == 0)
    reply = json.loads(
        group.broadcast(json.dumps(own if group.rank == 0 else None, default=vars).encode())
    )
    if "error" in reply:
        raise CollectiveError(f"rank 0: {reply['error']}")
    return reply["value"]


def gather_results(
    group: Group,
    work: Callable[[], Any],
    watchdog: Watchdog | None = None,
    takes_part: bool = True,
) -> list[Any]:
    """Runs ``work`` on every rank. Returns the results, JSON values, of all ranks in order.
    ``watchdog``: for work that may take minutes. Raises CollectiveError on all ranks, with the
    first rank that failed. ``takes_part``: else this rank works nothing, and its result is None."""
    return _gather(group, _reply_of(group, work, watchdog, takes_part))


def gather_values(group: Group, value: Any) -> list[Any]:
    """Returns the values, JSON values, of all ranks in order."""
    return _gather(group, {"value": value})


def run_on_all(
    group: Group,
    work: Callable[[], Result],
    watchdog: Watchdog | None = None,
    takes_part: bool = True,
) -> Result:
    """Runs ``work`` on every rank. Returns the result of this rank. Raises CollectiveError on all
    ranks if one of them failed. ``takes_part``: as for ``gather_results``."""
    own = _reply_of(group, work, watchdog, takes_part)
    _gather(group, own if "error" in own else {"value": None})
    result: Result = own["value"]
    return result


def run_until_all_done(group: Group, work: Callable[[], object], watchdog: Watchdog) -> None:
    """Runs ``work``, which must not raise, on every rank, and returns when all ranks are done.
    Raises the error of a failed exchange only when this rank is done, or after ``stall_timeout``:
    its work must end, whether or not other ranks know."""
    done = runtime.Event()

    def run() -> None:
        try:
            work()
        finally:
            done.set()

    try:
        gather_results(group, run, watchdog)
    except Exception:
        done.wait(min(watchdog.stall_timeout, 1e6))
        raise


def _nothing() -> None:
    return None


@dataclass
class _Work:
    """The work of this rank in a thread, and what came of it. ``reply``: {"value": its result} or
    {"error": text}."""

    work: Callable[[], Any]
    reply: dict[str, Any] = field(default_factory=dict)
    done: runtime.Event = field(default_factory=runtime.Event)

    def run(self) -> None:
        try:
            self.reply = {"value": self.work()}
        except Exception as error:  # any error: the other ranks wait for this message
            self.reply = {"error": f"{type(error).__name__}: {error}"}
        # SystemExit, too: no rank may wait for this one in vain
        except BaseException as error:  # noqa: B036
            self.reply = {"error": f"the work was interrupted: {error!r}"}
        self.done.set()


def _reply_of(
    group: Group, work: Callable[[], Any], watchdog: Watchdog | None, takes_part: bool = True
) -> dict[str, Any]:
    """Runs ``work`` on this rank. Returns {"value": its result} or {"error": text}; with
    ``watchdog`` once all ranks are done."""
    work = work if takes_part else _nothing
    if watchdog is None or group.size == 1:
        try:
            return {"value": work()}
        except Exception as error:  # any error: the other ranks wait for this message
            return {"error": f"{type(error).__name__}: {error}"}
    own = _Work(work)
    try:
        runtime.Thread(target=own.run, name="mindresume-work", daemon=True).start()
    except RuntimeError:
        # the limit of threads is reached; the other ranks wait all the same
        own.run()
    _wait_for_all(group, own.done, watchdog)
    return own.reply


def _gather(group: Group, own: dict[str, Any]) -> list[Any]:
    """Returns the results of all ranks; ``own``: of this one, as of ``_reply_of``."""
    replies = [json.loads(reply) for reply in group.gather(json.dumps(own, default=vars).encode())]
    for rank, reply in enumerate(replies):
        if "error" in reply:
            raise CollectiveError(f"rank {rank}: {reply['error']}")
    return [reply["value"] for reply in replies]


def _wait_for_all(group: Group, done: runtime.Event, watchdog: Watchdog) -> None:
    """Waits until the work of all ranks is ``done``. Raises CollectiveError on all ranks if nothing
    goes on any more."""
    idle = runtime.Event()
    pause = FIRST_PAUSE
    before = None
    since = 0.0
    while True:
        # the first exchange is due when the slowest rank is done, or after the pause
        (idle if before is not None and done.is_set() else done).wait(pause)
        own = [
            done.is_set(),
            watchdog.progress.done if watchdog.progress else 0,
            runtime.monotonic(),
        ]
        rows = [json.loads(row) for row in group.gather(json.dumps(own, default=vars).encode())]
        busy = [rank for rank, (is_done, _, _) in enumerate(rows) if not is_done]
        if not busy:
            return
        state, now = [row[:2] for row in rows], rows[0][2]
        if state != before:
            before, since = state, now
        elif now - since > watchdog.stall_timeout:
            raise CollectiveError(
                f"rank {', '.join(map(str, busy[:10]))}: {watchdog.what}: no progress for "
                f"{now - since:.0f} s; "
                f"its host or its disk does not answer. Check that host, then start the job again"
            )
        pause = min(2 * pause, LONGEST_PAUSE)
