"""Repeats a look at a folder of checkpoints and shows what changed: ``mindresume ls --watch``.

    look (in a thread: the disk may hang) ─▶ History: changes, speed, next save ─▶ a view: watch_screen.Screen, or Lines below
"""
from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mindresume import runtime
from mindresume.api.observation import Heartbeat, Observation, observe
from mindresume.api.results import COMPLETE, INCOMPLETE, NODE_LOCAL, CheckpointInfo, Listing
from mindresume.cli.common import say, step_text
from mindresume.cli.ls import print_listing
from mindresume.errors import ConfigError
from mindresume.storage.operations import call_within, error_text
from mindresume.typed import json_value

PATIENCE = 3.0                  # seconds that one look may take before the view goes on without it
_SLOWER = 4                     # a disk does not answer if a look takes so many times as long as the one before
EVERY = 5.0                     # seconds between two looks
_SHARE, _LONGEST = 4, 60.0      # a pause is so many times as long as the look before it, as the disk has other work; at most
_BEATS = 9                      # heartbeats that give the speed: with one each 15 s, those of two minutes
_STEPS = 4                      # last saves, whose distance is that of the next one
_LATE = 3                       # heartbeats that a job may be late
NEW, COMPLETED, COMMITTED, CHANGED, REMOVED = "new", "completed", "committed", "changed", "removed"
JOB, NOTES = "job", "notes"

WHOLE = (COMPLETE, NODE_LOCAL)

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Change:
    """Describes one difference between two listings.

    Attributes:
        kind: NEW, COMPLETED (all ranks have written it), COMMITTED (its manifest is there), CHANGED or REMOVED, of a checkpoint;
            JOB: a process began or ended to use the folder; NOTES: there are other notes on the folder.
        text: The change as a phrase.
        step: Of the checkpoint; None for JOB and NOTES.
        key: Identifies the checkpoint in its listing.
    """
    kind: str
    text: str
    step: int | None = None
    key: Key = ()

    def to_json(self) -> dict[str, Any]:
        """Returns kind, step and text."""
        return {"kind": self.kind, "step": self.step, "text": self.text}


# ---- what changed ----------------------------------------------------------------------------------------------------

def rows_of(listing: Listing | None, place: str = "") -> dict[Key, CheckpointInfo]:
    """Returns {key: row} of ``place``, "disk" or "memory", else of both; empty for None. A save keeps its key from its first file
    to its removal. The first item of a key is the place."""
    found: dict[Key, CheckpointInfo] = {}
    same: Counter[Key] = Counter()
    for where, rows in (("disk", listing.checkpoints), ("memory", listing.memory)) if listing is not None else ():
        for row in rows if place in ("", where) else ():
            key = (where, row.origin, row.run_id, row.step, "" if row.run_id else row.iteration_dir)
            found[(*key, same[key])] = row
            same[key] += 1
    return found


def _name(key: Key, row: CheckpointInfo) -> str:
    return f"step {step_text(row.step)}" + (" in memory" if key[0] == "memory" else "")


def changes_between(before: Listing | None, after: Listing | None) -> tuple[Change, ...]:
    """Returns what is different in ``after``. None: the folder does not exist. Sizes and heartbeats are no change, and neither
    is one more rank that has written its part of a save: a log would be full of them."""
    old, new = rows_of(before), rows_of(after)
    found = []
    for key, row in new.items():
        was, name = old.get(key), _name(key, row)
        if was is None:
            found.append(Change(NEW, f"{name}: new, {row.state}", row.step, key))
        elif row.committed and not was.committed and row.state in WHOLE:
            found.append(Change(COMMITTED, f"{name}: committed", row.step, key))
        elif was.state == INCOMPLETE and row.state in WHOLE:
            found.append(Change(COMPLETED, f"{name}: {row.state}", row.step, key))
        elif _condition(was) != _condition(row):
            reason = row.problem.reason if row.problem else "; ".join(row.warnings)
            found.append(Change(CHANGED, f"{name}: {row.state}{', ' if reason else ''}{reason}", row.step, key))
    found += [Change(REMOVED, f"{_name(key, row)}: removed", row.step, key) for key, row in old.items() if key not in new]
    users, others = ({(user.holder.purpose, user.holder.run, user.holder.host, user.holder.pid): user for user in
                      (() if listing is None else listing.in_use_by)} for listing in (before, after))
    for key in [*users, *(key for key in others if key not in users)]:
        name = f"{key[0]}: run {key[1]} on host {key[2]} (process {key[3]})"
        if key not in others:
            found.append(Change(JOB, f"{name} ended"))
        elif key not in users:
            found.append(Change(JOB, f"{name} began"))
        elif users[key].alive != others[key].alive:
            found.append(Change(JOB, f"{name} is {'alive' if others[key].alive else 'dead'}"))
    if before is not None and after is not None and set(before.notes) != set(after.notes):
        found.append(Change(NOTES, "; ".join(after.notes) or "no notes any more"))
    return tuple(found)


def _condition(row: CheckpointInfo) -> tuple[Any, ...]:
    """Returns what matters of a row. The reason of an incomplete save names the ranks that are missing, so it does not count."""
    return row.state, row.committed, row.warnings, row.state != INCOMPLETE and row.problem


# ---- history ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Failure:
    """Says why a look failed."""
    error: Exception


@dataclass(frozen=True)
class Look:
    """Holds one finished look: what it found (None: the folder does not exist), when it began, in seconds since 1970, and its
    duration in seconds."""
    found: Observation | Failure | None
    at: float
    seconds: float


class History:
    """Collects looks.

    Attributes:
        observation: The newest one; None: the folder does not exist, or nothing was seen yet.
        before: The listing before the newest one.
        seen_at: When the newest look began that reached the folder; None: none did.
        seconds: Duration of the last look.
        error: Why there is no newer observation, as a sentence; empty if there is one.
        changes: What the last look changed; empty for the first one.
    """

    def __init__(self) -> None:
        self.observation: Observation | None = None
        self.before: Listing | None = None
        self.seen_at: float | None = None
        self.seconds = 0.0
        self.error = ""
        self.changes: tuple[Change, ...] = ()
        self._late_since: float | None = None
        self._beats: dict[str, list[tuple[Heartbeat, float]]] = {}
        self._complete: dict[str | None, set[int]] = {}

    @property
    def listing(self) -> Listing | None:
        return self.observation.listing if self.observation else None

    def take(self, look: Look | None, now: float) -> bool:
        """Adds a look; None: it has not ended yet. Returns whether something is different for a reader of a log."""
        error, first = self.error, self.seen_at is None
        self.changes = ()
        self._late_since = None if look else self._late_since
        if look is None:
            self._late_since = self._late_since or now
            if PATIENCE + now - self._late_since >= _SLOWER * self.seconds:     # else it is a slow disk, as it was before
                self.error = "the disk does not answer"
        elif isinstance(look.found, Failure):
            self.seconds, self.error = look.seconds, error_text(look.found.error)
        else:
            self.error = "" if look.found else "does not exist"
            self.before, self.observation = self.listing, look.found
            self.changes = () if first else changes_between(self.before, self.listing)
            self.seen_at, self.seconds = look.at, look.seconds
            if look.found:
                self._remember(look.found, now)
        return first and self.seen_at is not None or bool(self.changes) or self.error != error

    def _remember(self, found: Observation, now: float) -> None:
        runs = {user.holder.run for user in found.listing.in_use_by if user.alive is not False}
        self._beats = {run: rows for run, rows in self._beats.items() if run in runs}
        for beat in found.heartbeats:
            rows = self._beats.setdefault(beat.run_id, [])
            if not rows or rows[-1][0].count != beat.count:
                rows.append((beat, now))
                del rows[:-_BEATS]
        for row in found.listing:
            if row.usable and row.step is not None:
                self._complete.setdefault(row.run_id, set()).add(row.step)
        self._complete = {run: set(sorted(steps)[-_STEPS:]) for run, steps in self._complete.items()}

    def heartbeat(self, run: str) -> tuple[Heartbeat, float | None] | None:
        """Returns the last heartbeat of a run, and when it was first seen; None for a time before this view began."""
        rows = self._beats.get(run)
        return None if not rows else (rows[-1][0], rows[-1][1] if len(rows) > 1 else None)

    def silence(self, run: str) -> float | None:
        """Returns for how many seconds looks have found no new heartbeat of a run, if that is too long for a job that is well."""
        rows = self._beats.get(run)
        seconds = self.seen_at - rows[-1][1] if rows and self.seen_at is not None else 0.0
        return seconds if rows and rows[-1][0].every and seconds > _LATE * rows[-1][0].every else None

    def speed(self, run: str) -> float | None:
        """Returns the optimizer steps per second between the heartbeats of the last two minutes; None if it is unknown."""
        beats = [beat for beat, _ in self._beats.get(run, []) if beat.step]
        seconds = beats[-1].written_at - beats[0].written_at if len(beats) > 1 else 0.0
        return (beats[-1].step - beats[0].step) / seconds if seconds > 0 else None

    def last_save(self) -> CheckpointInfo | None:
        """Returns the newest complete checkpoint on disk."""
        rows = self.observation.listing.checkpoints if self.observation else ()
        return next((row for row in rows if row.state in WHOLE), None)

    def save_interval(self, run: str) -> int | None:
        """Returns the steps between two saves: the distance of the last ones, of this run if there are two; None if these are
        not the same."""
        steps = sorted(self._complete.get(run, set()))
        if len(steps) < 2:
            steps = sorted(set().union(*self._complete.values()))
        last = steps[-_STEPS:]
        gaps = {after - before for before, after in zip(last, last[1:], strict=False)}
        return gaps.pop() if len(gaps) == 1 else None

    def next_save(self, run: str, now: float) -> tuple[int, float | None] | None:
        """Returns the step of the next save, and the seconds until then (None: unknown); None if the interval is unknown."""
        last, interval, beat = self.last_save(), self.save_interval(run), self.heartbeat(run)
        if last is None or last.step is None or interval is None:
            return None
        step, speed = last.step + interval, self.speed(run)
        if beat is None or not speed or beat[1] is None:
            return step, None
        return step, max(0.0, (step - beat[0].step) / speed - (now - beat[1]))


# ---- the loop --------------------------------------------------------------------------------------------------------

class View(Protocol):
    """Shows a history. ``tick``: seconds after which it wants to be shown again without a new look; None: never."""
    tick: float | None

    def show(self, history: History, now: float, is_different: bool) -> None:
        """Shows it. ``is_different``: the last look found something different."""


class BoundedLook:
    """Looks in a thread, one at a time, and waits only ``PATIENCE`` seconds for it. A look that ends later is returned by the
    next call."""

    def __init__(self, folder: str, world_size: int | None = None):
        self._folder, self._world_size = folder, world_size
        self._running = runtime.Lock()
        self._ended: list[Look] = []

    def __call__(self) -> Look | None:
        """Returns the look that has ended, or None."""
        if not self._ended:
            call_within(PATIENCE, None, self._work)
        newest = None
        while self._ended:                      # two, if a thread was started and did not run before the one before it ended
            newest = self._ended.pop(0)
        return newest

    def _work(self) -> None:
        if not self._running.acquire(blocking=False):       # an earlier one still waits for the disk
            return
        try:
            began = runtime.time()
            found: Observation | Failure | None
            try:
                found = observe(self._folder, self._world_size)
            except Exception as error:                      # whatever is wrong there now: a later look may succeed
                found = Failure(error)
            self._ended.append(Look(found, began, max(runtime.time() - began, 0.0)))
        finally:
            self._running.release()


def watch(folder: str, view: View, world_size: int | None = None, every: float = EVERY) -> None:
    """Looks into ``folder``, shows what it found, and waits ``every`` seconds, or longer where a look takes long, until a signal
    ends it.

    Raises:
        ConfigError: The path is a file of another kind, which no wait mends.
    """
    bounded, history = BoundedLook(folder, world_size), History()
    while True:
        found = bounded()
        if found and isinstance(found.found, Failure) and isinstance(found.found.error, ConfigError) and history.seen_at is None:
            raise found.found.error
        is_different = history.take(found, runtime.time())
        view.show(history, runtime.time(), is_different)
        left = max(every, min(_SHARE * history.seconds, _LONGEST))
        while left > 0:
            pause = left if view.tick is None else min(left, view.tick)
            runtime.sleep(pause)
            left -= pause
            if view.tick is not None and left > 0:
                view.show(history, runtime.time(), False)


# ---- a log or a pipe -------------------------------------------------------------------------------------------------

class Lines:
    """Prints a listing whenever something changed: as text, or as JSON with one object a line."""
    tick = None

    def __init__(self, path: str, as_json: bool):
        self._path, self._as_json = path, as_json

    def show(self, history: History, now: float, is_different: bool) -> None:
        if not is_different:
            return
        if self._as_json:
            print(json.dumps(json_value(_document(history, now)), allow_nan=False))
        else:
            say(f"---- {runtime.strftime('%Y-%m-%d %H:%M:%S', runtime.localtime(now))}")
            for text in _sentences(history, self._path):
                say(text)
            if history.listing is not None and not history.error:
                print_listing(history.listing)
        sys.stdout.flush()                      # a log is read while this goes on


def _document(history: History, now: float) -> dict[str, Any]:
    found = history.observation.to_json() if history.observation else {"listing": None, "saves": [], "heartbeats": [],
                                                                       "free_bytes": None}
    return {"at": now, "seen_at": history.seen_at, "error": history.error,
            "changes": [change.to_json() for change in history.changes], **found}


def _sentences(history: History, path: str) -> Iterator[str]:
    if history.error:
        yield error_sentence(history, path)
    yield from (change.text for change in history.changes)


def error_sentence(history: History, path: str) -> str:
    """Returns why the listing is old or missing, and since when."""
    if history.seen_at is None or history.observation is None:
        return f"{path}: {history.error}; waiting for it"
    return f"{path}: {history.error}; the listing is from {runtime.strftime('%H:%M:%S', runtime.localtime(history.seen_at))}"
