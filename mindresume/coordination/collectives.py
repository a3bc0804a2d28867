"""The ranks of a job come to one result. An error on one rank reaches all of them as text, so that none is left waiting."""
from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mindresume.errors import CollectiveError

Result = TypeVar("Result")


class Group(Protocol):
    """The ranks of the job."""
    rank: int
    size: int

    def broadcast(self, message: bytes) -> bytes:
        """The message of rank 0, on every rank."""

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks in order, on every rank."""


@dataclass(frozen=True)
class SingleProcess:
    """A job of one process."""
    rank: int = 0
    size: int = 1

    def broadcast(self, message: bytes) -> bytes:
        return message

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


@dataclass(frozen=True)
class Waiting:
    """How the ranks follow work that may take minutes. Nobody sits in a collective meanwhile, which HCCL would end: each rank
    works in a thread, and every few seconds all exchange who is done.

    ``progress()``: any number that changes while the work of this rank goes on. ``patience``: after so many seconds (of rank 0)
    in which no number changed and no rank became done, all ranks get an CollectiveError that names those that are not.
    ``pause(done, seconds)`` waits, at most until the event ``done`` is set."""
    what: str = "long work"
    progress: Callable[[], float] = lambda: 0
    patience: float = 1800.0
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[threading.Event, float], object] = lambda done, seconds: done.wait(seconds)


FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0              # seconds between two exchanges; doubled each time


def watched() -> float:
    """The progress of work that has a deadline of its own."""
    return time.monotonic()


def decide(group: Group, work: Callable[[], Any], waiting: Waiting | None = None) -> Any:
    """Rank 0 does ``work``; every rank gets its result (a JSON value). CollectiveError on all if it raises there. ``waiting``:
    for work that may take long."""
    own = _followed(group, work if group.rank == 0 else _nothing, waiting)
    reply = json.loads(group.broadcast(json.dumps(own() if group.rank == 0 else None).encode()))
    if "error" in reply:
        raise CollectiveError(f"rank 0: {reply['error']}")
    return reply["value"]


def report(group: Group, work: Callable[[], Any], waiting: Waiting | None = None) -> list[Any]:
    """Every rank does ``work``; every rank gets all results (JSON values) in order. CollectiveError on all if it raises on one,
    with the first rank that failed. ``waiting``: for work that may take long."""
    own = _followed(group, work, waiting)
    replies = [json.loads(reply) for reply in group.gather(json.dumps(own()).encode())]
    for rank, reply in enumerate(replies):
        if "error" in reply:
            raise CollectiveError(f"rank {rank}: {reply['error']}")
    return [reply["value"] for reply in replies]


def agreed(group: Group, work: Callable[[], Result], waiting: Waiting | None = None) -> Result:
    """The result of ``work``, which stays on its rank. CollectiveError on all ranks if it fails on one: none goes on without the
    others."""
    found: list[Result] = []
    report(group, lambda: found.append(work()), waiting)
    return found[0]


def followed(group: Group, work: Callable[[], object], waiting: Waiting) -> None:
    """Every rank does ``work``, which must not raise, and all of them are done when this returns. If an exchange fails, that is
    raised as soon as this rank is done, or after the patience of ``waiting``: what others do not hear of is finished too."""
    done = threading.Event()

    def run() -> None:
        try:
            work()
        finally:
            done.set()
    try:
        report(group, run, waiting)
    except Exception:
        waiting.pause(done, waiting.patience)
        raise


def _nothing() -> None:
    return None


def _attempt(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except Exception as error:          # whatever it is: the other ranks are waiting for this message
        return {"error": f"{type(error).__name__}: {error}"}


def _followed(group: Group, work: Callable[[], Any], waiting: Waiting | None) -> Callable[[], dict[str, Any]]:
    """Returns what gives the result of ``work`` as of ``_attempt``: later, or with ``waiting`` now, when all ranks are done."""
    if waiting is None or group.size == 1:
        return lambda: _attempt(work)
    found: list[dict[str, Any]] = []
    done, idle = threading.Event(), threading.Event()

    def run() -> None:
        try:
            found.append(_attempt(work))
        except BaseException as error:      # noqa: B036  SystemExit: nobody may wait for this rank in vain
            found.append({"error": f"the work was broken off: {error!r}"})
        done.set()
    try:
        threading.Thread(target=run, name="mindresume-work", daemon=True).start()
    except RuntimeError:                        # the limit of processes is reached; the others wait for this rank all the same
        run()
    pause, before, since = FIRST_PAUSE, None, 0.0
    while True:
        waiting.pause(idle if done.is_set() else done, pause)
        now = waiting.clock()
        rows = [json.loads(row) for row in group.gather(json.dumps([done.is_set(), waiting.progress(), now]).encode())]
        busy = [rank for rank, (is_done, _, _) in enumerate(rows) if not is_done]
        if not busy:
            return lambda: found[0]
        state, now = [row[:2] for row in rows], rows[0][2]
        if state != before:
            before, since = state, now
        elif now - since > waiting.patience:
            raise CollectiveError(f"rank {', '.join(map(str, busy[:10]))}: {waiting.what}: no progress for {now - since:.0f} s; "
                                 f"its host or its disk does not answer. Look at that host, then start the job again")
        pause = min(2 * pause, LONGEST_PAUSE)
