"""The ranks of a job come to one result. An error on one rank reaches all of them as text, so that none is left waiting."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from mindresume.errors import AgreementError

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
class Solo:
    """A job of one process."""
    rank: int = 0
    size: int = 1

    def broadcast(self, message: bytes) -> bytes:
        return message

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


def decide(group: Group, work: Callable[[], Any]) -> Any:
    """Rank 0 does ``work``; every rank gets its result (a JSON value). AgreementError on all if it raises there."""
    reply = json.loads(group.broadcast(json.dumps(_attempt(work) if group.rank == 0 else None).encode()))
    if "error" in reply:
        raise AgreementError(f"rank 0: {reply['error']}")
    return reply["value"]


def report(group: Group, work: Callable[[], Any]) -> list[Any]:
    """Every rank does ``work``; every rank gets all results (JSON values) in order. AgreementError on all if it raises on one,
    with the first rank that failed."""
    replies = [json.loads(reply) for reply in group.gather(json.dumps(_attempt(work)).encode())]
    for rank, reply in enumerate(replies):
        if "error" in reply:
            raise AgreementError(f"rank {rank}: {reply['error']}")
    return [reply["value"] for reply in replies]


def agreed(group: Group, work: Callable[[], Result]) -> Result:
    """The result of ``work``, which stays on its rank. AgreementError on all ranks if it fails on one: none goes on without the
    others."""
    found: list[Result] = []
    report(group, lambda: found.append(work()))
    return found[0]


def _attempt(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": work()}
    except Exception as error:          # whatever it is: the other ranks are waiting for this message
        return {"error": f"{type(error).__name__}: {error}"}
