"""What is being read must not go: readers hold it, and whoever removes looks for holds.

    claim = hold(storage, root, attempt, box)   # while a checkpoint is read; None: it is gone, choose again
    holds(storage, root)                        # {name of an attempt folder: who holds it}
    with who removes:  about_to_remove(storage, root, names)

Both are claims whose run has the number 0: ``mindresume.store.claim``.
"""
from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from mindresume.manifest import FOLDER, attempts, run_name, untrashed
from mindresume.store.claim import (
    BEAT,
    LOADING,
    READER,
    REMOVING,
    Claim,
    Owner,
    claim_path,
    is_of_a_job,
    lives,
    look,
    names_in_iterations,
    owner_of_this_process,
)
from mindresume.store.storage import Storage

GIVEN_UP = 40                   # beats after which a reader elsewhere that stands still holds nothing any more
_LOOKS, _PAUSE = 20, 0.5        # of a reader while somebody is about to remove what it wants to hold: how often, seconds between


def hold(storage: Storage, root: str, attempt: str, box: str, beat: float = BEAT,
         sleep: Callable[[float], None] = time.sleep) -> Claim | None:
    """Keeps ``attempt`` (the name of its folder of records) from being removed while it is read. ``box``: the folder whose
    renaming would remove it. None if it is gone: choose again.

    OSError if nothing can be written there."""
    claim = _claim_without_number(storage, root, LOADING, (attempt,), beat)
    try:
        for _ in range(_LOOKS):
            if not _is_going(storage, root, attempt):
                break
            sleep(_PAUSE)                 # who removes it may have looked for holds before this one was there
        there = storage.status(box) is not None
    except BaseException:
        claim.leave()
        raise
    if not there:                         # it was faster
        claim.leave()
        return None
    return claim.start()


def about_to_remove(storage: Storage, root: str, names: Iterable[str]) -> Claim:
    """Tells readers that the attempts ``names`` are about to go; to be left when they have. Whoever says this and then looks for
    holds, and readers, who publish their hold and then look for this, never miss each other: nothing moves under a reader, not
    even for a moment. OSError if it cannot be written."""
    return _claim_without_number(storage, root, REMOVING, tuple(names), 0.0)


def _claim_without_number(storage: Storage, root: str, purpose: str, names: tuple[str, ...], beat: float) -> Claim:
    owner = replace(owner_of_this_process(purpose, holds=names), run=run_name(READER, secrets.token_hex(4)), every=beat)
    claim = Claim(storage, root, owner)
    try:
        claim.publish()
    except BaseException:                 # an error is not an undo: it may be there
        claim.leave()
        raise
    return claim


def _is_going(storage: Storage, root: str, attempt: str) -> bool:
    """Whether somebody is about to remove it. A claim that cannot be read may say so, and counts."""
    found, unreadable = look(storage, root)
    return any(owner.purpose == REMOVING and attempt in owner.holds and lives(owner) is not False for owner in found) or any(
        not is_of_a_job(run) for run in unreadable)


class Holds:
    """What readers hold, for who removes: {name of an attempt folder: who holds it}. Call it each time; it remembers the beats it
    saw, so that a reader elsewhere that died in silence does not hold its checkpoint for ever. A claim that cannot be read may
    hold any of them, for as long."""

    def __init__(self, storage: Storage, root: str, clock: Callable[[], float] = time.monotonic):
        self.storage, self.root, self.clock = storage, root, clock
        self._seen: dict[str, tuple[int | None, float]] = {}

    def __call__(self) -> Mapping[str, str]:
        held: dict[str, str] = {}
        found, unreadable = look(self.storage, self.root)
        for run, why in unreadable.items():
            if not is_of_a_job(run) and not self._silent(run, None, BEAT):
                held.update({name: f"perhaps, by a reader: {claim_path(self.root, run)} cannot be read ({why})"
                             for name in self._all_attempts()})
        for owner in found:
            if owner.holds and self._counts(owner) and owner.purpose != REMOVING:
                held.update({name: f"{owner.purpose} by process {owner.pid} on host {owner.host}" for name in owner.holds})
        return held

    def _counts(self, owner: Owner) -> bool:
        silent, state = self._silent(owner.run, owner.beat, max(owner.every, BEAT)), lives(owner)
        if state is False or (state is None and silent):
            with suppress(OSError):
                self.storage.remove(claim_path(self.root, owner.run))
            return False
        return True

    def _silent(self, run: str, beat: int | None, every: float) -> bool:
        """Whether it has stood still for long. ``beat``: None while it cannot be read."""
        before, since = self._seen.get(run, (-1, 0.0))
        if before != beat:
            since = self.clock()
            self._seen[run] = beat, since
        return self.clock() - since > every * GIVEN_UP

    def _all_attempts(self) -> set[str]:
        names = [*self.storage.list(os.path.join(self.root, FOLDER)), *names_in_iterations(self.storage, self.root)]
        return {name for name, _, _ in attempts(list(map(untrashed, names)))}


def holds(storage: Storage, root: str) -> Mapping[str, str]:
    """What is held now, for a process that looks once."""
    return Holds(storage, root)()
