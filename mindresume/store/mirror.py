"""Checkpoints go to an object store behind the training, in a thread of each rank; nothing of it is waited for but at the end.

    mirror = Mirror(remote, place, policy).start()      # policy: on rank 0
    mirror.saved(20)                                    # this rank has written its part of step 20
    for error in mirror.poll(): ...                     # every step
    for error in mirror.finish(600): ...                # the end of the training

    rank 0     the newest committed step ─▶ "step 20 now" ─▶ own share ─▶ the shares of all are there? ─▶ manifest ─▶ retention
    others     what does rank 0 say? ─▶ own share of that step

One upload at a time. Rank 0 decides which, or ranks of unequal speed would skip different steps, and none would ever be whole.
Its word is an object too: the store is the one place that all ranks see, also on nodes that share no disk. While rank 0 uploads
a step, its claim keeps retention from removing the files.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mindresume.errors import RemoteError
from mindresume.manifest import attempt_name
from mindresume.store.claim import hold
from mindresume.store.remote import Mark, Overtaken, Remote, committed_base, ranks_of
from mindresume.store.retention import KEEP_ALL, Policy
from mindresume.store.shard import Place

PAUSE = 2.0                     # seconds between two looks; longer where many ranks look at one object
AGAIN = 30.0                    # seconds until an upload that failed is tried again
_PER_SECOND = 32                # looks of all ranks together


class Mirror:
    """``patience``: seconds without progress after which rank 0 gives up a step of which objects of others are missing.
    ``clock``, ``sleep``: of the worker. ``log(text)``: one line for what was uploaded, skipped or removed."""

    def __init__(self, remote: Remote, place: Place, policy: Policy | None = None, patience: float = 600.0,
                 log: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep):
        self.remote, self.place, self.policy, self.patience, self.log = remote, place, policy, patience, log
        self.clock, self.sleep = clock, sleep
        self.pause = max(PAUSE, place.world_size / _PER_SECOND)
        self.failed = self.skipped = 0
        self.uploaded = 0                               # the newest step of which this rank's part is done
        self._pending: list[int] = []                   # saved here, and not uploaded
        self._errors: list[RemoteError] = []
        self._step: int | None = None                   # being uploaded, since ``_since``
        self._since = 0.0
        self._warned: int | None = None
        self._last = 0                                  # the newest step saved
        self._not_before = 0.0
        self._over = self._closing = self._marked = False
        self._changed = threading.Condition()

    # ---- the training's side ---------------------------------------------------------------------------------------

    def start(self) -> Mirror:
        threading.Thread(target=self._run, name="mindresume-mirror", daemon=True).start()
        return self

    def saved(self, step: int) -> None:
        with self._changed:
            if not self._over:
                self._pending.append(step)
                self._last = max(self._last, step)
                self._changed.notify_all()

    def poll(self) -> list[RemoteError]:
        """What failed since the last call; and once a step, that an upload takes unusually long. Does not wait."""
        with self._changed:
            found, self._errors = self._errors, []
            if self._step not in (None, self._warned) and self.clock() - self._since > self.patience:
                self._warned = self._step
                found.append(RemoteError(f"step {self._step} is being uploaded to {self.remote.url} for more than "
                                         f"{self.patience:.0f} s; what is saved since then is on this machine only"))
            return found

    def finish(self, deadline: float) -> list[RemoteError]:
        """Waits until the last committed step is uploaded, at most ``deadline`` seconds. No save follows."""
        until = time.monotonic() + deadline
        with self._changed:
            if self.place.rank == 0:                    # what is not committed by now never will be
                with suppress(OSError):
                    self._pending = [step for step in self._pending if committed_base(self.place, step) is not None]
                self._last = max(self._pending, default=self.uploaded)
            self._closing, self._not_before = True, 0.0
            self._changed.notify_all()
            while not self._over and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
        found = self.poll()
        if self.uploaded < self._last:
            found.append(RemoteError(f"step {self._last} is not in {self.remote.url}, not whole, within {deadline:.0f} s: rank "
                                     f"{self.place.rank} {self._what()}. A job on an empty disk would resume from an older step"))
        return found

    def settle(self, deadline: float) -> None:
        """For the end of a process without ``finish``: what was committed still goes. A rank that rank 0 may never speak to
        again does not wait long."""
        if not self._closing:
            for error in self.finish(deadline if self.place.rank == 0 or self._step is not None else min(deadline, AGAIN)):
                self.log(str(error))

    def _what(self) -> str:
        if self._step is not None:
            return f"is still uploading step {self._step}"
        return "has not uploaded its part" if self.place.rank else "has not put the manifest"

    # ---- the worker ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            worked = self.work()
            with self._changed:
                idle = not self._pending and (self._marked or self.place.rank != 0)
                if self._closing and (idle or self._over):
                    break
                if not worked:
                    self._changed.wait(None if idle else self.pause)
        if self.place.rank == 0 and not self._over:
            self._attempt(lambda: self.remote.announce(self.place.run, Mark(None, ended=True)))
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def work(self) -> bool:
        """One look. True if something was done, so that the next can follow at once."""
        if self.clock() < self._not_before:
            return False
        done: list[bool] = []
        return self._attempt(lambda: done.append(self._lead() if self.place.rank == 0 else self._follow())) and done[0]

    def _attempt(self, work: Callable[[], None]) -> bool:
        """False if it failed; the error is kept for the training."""
        try:
            work()
            return True
        except Exception as error:      # whatever it is, the training hears of it; the worker lives on
            with self._changed:
                self.failed += 1
                self._not_before = self.clock() + AGAIN
                self._over = self._over or isinstance(error, Overtaken)
                about = "" if self._step is None else f"step {self._step} is not uploaded: "
                self._errors.append(RemoteError(f"{about}{error} ({self.failed} failed so far)"))
            return False
        finally:
            with self._changed:
                self._step = None
                self._changed.notify_all()

    def _begin(self, step: int) -> None:
        with self._changed:
            self._step, self._since = step, self.clock()

    def _done(self, step: int) -> None:
        with self._changed:
            self.uploaded, self._step = step, None
            self._pending = [other for other in self._pending if other > step]

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _lead(self) -> bool:
        if not self._marked:
            self._marked = self._attempt(self._mark)
            if not self._marked:
                return False
        with self._changed:
            pending = sorted(self._pending, reverse=True)
        step, base = next(((step, base) for step in pending if (base := committed_base(self.place, step))), (0, None))
        if base is None:
            return False
        left_out = [other for other in sorted(pending) if other < step]
        if left_out:
            self.skipped += len(left_out)
            with self._changed:
                self._pending = [other for other in self._pending if other not in left_out]
            self.log(f"step {', '.join(map(str, left_out))} is not uploaded: uploads are slower than saves ({self.skipped} left "
                     f"out so far)")
        self._begin(step)
        if self._attempt(lambda: self._lead_step(step, base)):
            self._attempt(lambda: self._prune(step))
        return True

    def _mark(self) -> None:
        self.remote.fence(self.place.run)
        self.remote.announce(self.place.run, Mark())

    def _lead_step(self, step: int, base: str) -> None:
        place, attempt, started = self.place, attempt_name(step, self.place.run), self.clock()
        box = base if place.iterations else place.attempt(step)
        held = hold(place.storage, place.root, attempt, box)
        if held is None:
            self.log(f"step {step} is not uploaded: it was removed before")
            return self._done(step)
        try:
            self.remote.fence(place.run)
            self.remote.announce(place.run, Mark(step))
            sent = self.remote.put_share(place, step, base)
            self._others(step, base)
            self.remote.commit(place, step, base)
        finally:
            held.leave()
        self._done(step)
        self.log(f"step {step} is in {self.remote.url}: {sent / 2**20:.1f} MiB of rank 0, all in {self.clock() - started:.1f} s")
        return None

    def _prune(self, step: int) -> None:
        removed = self.remote.prune(self.policy or KEEP_ALL, self.place.run, step, self.log)
        if removed:
            self.log(f"removed step {', '.join(map(str, removed))} from {self.remote.url}: kept {self.policy}")

    def _others(self, step: int, base: str) -> None:
        """Waits for the objects of the other ranks. RemoteError that names them."""
        until, before = self.clock() + self.patience, None
        while missing := self.remote.missing(self.place, step, base):
            if before is not None and len(missing) < before:
                until = self.clock() + self.patience
            if self.clock() >= until:
                manifest = self.remote.local_manifest(self.place, attempt_name(step, self.place.run), base)[0]
                raise RemoteError(f"{len(missing)} objects of {ranks_of(missing, manifest)} did not come within "
                                  f"{self.patience:.0f} s, the first is {missing[0]}")
            before = len(missing)
            self.sleep(self.pause)

    # ---- the others ------------------------------------------------------------------------------------------------

    def _follow(self) -> bool:
        if not self._pending:
            return False
        return self._attempt(self._follow_step)

    def _follow_step(self) -> None:
        mark = self.remote.announced(self.place.run)
        if mark.ended:
            with self._changed:
                self._over = True
            return None
        if mark.step not in self._pending:              # not yet saved here, or rank 0 is not so far
            return self.sleep(self.pause)
        base = committed_base(self.place, mark.step) or self.place.base(mark.step)
        if not self.remote.has_share(self.place, mark.step, base):      # this host lists the folder's new name late
            return self.sleep(self.pause)
        self._begin(mark.step)
        sent = self.remote.put_share(self.place, mark.step, base)
        self.log(f"rank {self.place.rank} uploaded its part of step {mark.step}, {sent / 2**20:.1f} MiB")
        self._done(mark.step)
        return None
