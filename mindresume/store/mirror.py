"""Checkpoints go to an object store behind the training, in a thread of each rank; nothing of it is waited for but at the end.

    mirror = Mirror(remote, place, policy).start()      # policy: on rank 0
    mirror.saved(20)                                    # this rank has written its part of step 20
    for error in mirror.poll(): ...                     # every step
    for error in mirror.finish(600): ...                # the end of the training

    rank 0     the newest committed step ─▶ "step 20 now" ─▶ own share ─▶ the shares of all are there? ─▶ manifest ─▶ retention
    others     what does rank 0 say? ─▶ own share of that step, or word that it is lost

One upload at a time. Rank 0 decides which, or ranks of unequal speed would skip different steps, and none would ever be whole.
Its word is an object too: the store is the one place that all ranks see, also on nodes that share no disk. While rank 0 uploads
a step, its claim keeps retention from removing the files.

Where nodes share no disk, each has a retention of its own. So the exchange in which they learn what all of them have
(``mindresume.store.exchange``) also says what is uploaded next: at that moment each node has it, and holds it from then on.
"""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mindresume.errors import RemoteError
from mindresume.manifest import attempt_name, parse_attempt
from mindresume.store.claim import Claim
from mindresume.store.holds import hold
from mindresume.store.remote import Lost, Mark, Overtaken, Remote, committed_base, ranks_of
from mindresume.store.retention import KEEP_ALL, Policy
from mindresume.store.shard import Place

PAUSE = 2.0                     # seconds between two looks; longer where many ranks look at one object
AGAIN = 30.0                    # seconds until an upload that failed is tried again
LATE = 60.0                     # seconds after which a file that this host does not list on a shared disk is gone, not late
_PER_SECOND = 32                # looks of all ranks together


class Mirror:
    """``patience``: seconds without progress after which rank 0 gives up a step of which objects of others are missing.
    ``pledged``: nodes share no disk, and rank 0 uploads only what ``pledge`` names. ``log(text)``: one line for what was
    uploaded, skipped or removed. ``clock``, ``sleep``: of the worker; ``wait``: how the end of the training waits for it."""

    def __init__(self, remote: Remote, place: Place, policy: Policy | None = None, patience: float = 600.0,
                 log: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic,
                 sleep: Callable[[float], None] = time.sleep, pledged: bool = False,
                 wait: Callable[[threading.Condition, float], object] = threading.Condition.wait):
        self.remote, self.place, self.policy, self.patience, self.log = remote, place, policy, patience, log
        self.clock, self.sleep, self.wait, self.pledged = clock, sleep, wait, pledged
        self.pause = max(PAUSE, place.world_size / _PER_SECOND)
        self.failed = self.skipped = 0
        self.uploaded = 0                               # the newest step of which this rank's part is done
        self._pending: list[int] = []                   # saved here, and not uploaded
        self._settled: set[int] = set()                 # steps of which this rank's part is uploaded, or lost
        self._next = 0                                  # the step that is pledged, on rank 0; 0: none
        self._held: Claim | None = None                 # on what is pledged, on the first rank of each node
        self._errors: list[RemoteError] = []
        self._step: int | None = None                   # being uploaded, since ``_since``
        self._since = 0.0
        self._warned: int | None = None
        self._last = 0                                  # the newest step saved
        self._absent: tuple[int, float] = (0, 0.0)      # a step whose own part is not seen here, and since when
        self._not_before = self._next_fence = 0.0
        self._closing = self._marked = self._heard = False
        self._stopped: str | None = None                # nothing is uploaded any more, and why; empty: rank 0 has ended
        self._over = False                              # the worker has nothing more to do
        self._changed = threading.Condition()

    # ---- the training's side ---------------------------------------------------------------------------------------

    def start(self) -> Mirror:
        threading.Thread(target=self._run, name="mindresume-mirror", daemon=True).start()
        return self

    def saved(self, step: int) -> None:
        with self._changed:
            self._pending.append(step)              # also when nothing is uploaded any more: the end names what is not there
            self._last = max(self._last, step)
            self._changed.notify_all()

    def ready(self) -> bool:
        """Whether rank 0 can begin with another step."""
        with self._changed:
            return not (self._next or self._closing or self._stopped is not None)

    def pledge(self, name: str) -> None:
        """``name``: of the newest checkpoint that all nodes have. Rank 0 uploads it next, and the first rank of each node holds
        it until the next pledge. All of them are told at one exchange, before which rank 0 was ``ready``."""
        step, run = parse_attempt(name) or (0, "")
        if run != self.place.run or self.place.rank == 0 and step in self._settled:
            return
        before, self._held = self._held, None
        if before is not None and before.owner.holds == (name,):
            self._held = before
        else:
            try:
                self._held = hold(self.place.storage, self.place.root, name, self.place.attempt(step))
            except OSError as error:                    # perhaps it stays long enough all the same
                self._say(RemoteError(f"step {step} is not held on the disk of rank {self.place.rank} while it is uploaded: "
                                      f"{error}"))
            if before is not None:
                before.leave()
        with self._changed:
            self._next = step if self.place.rank == 0 else 0
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
        until = self.clock() + deadline
        with self._changed:
            if self.place.rank == 0:                    # what is not committed by now never will be
                with suppress(OSError):
                    self._pending = [step for step in self._pending if committed_base(self.place, step) is not None]
                self._last = max(self._pending, default=self.uploaded)
            self._closing, self._not_before = True, 0.0
            self._changed.notify_all()
            while not self._over and (left := until - self.clock()) > 0:
                self.wait(self._changed, left)
        if self._held is not None:
            self._held.leave()
        found = self.poll()
        if self.uploaded < self._last:
            late = "" if self._over or self._stopped else f", within {deadline:.0f} s"
            found.append(RemoteError(f"step {self._last} is not in {self.remote.url}, not whole{late}: rank {self.place.rank} "
                                     f"{self._what()}. A job on an empty disk would resume from an older step"))
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
        while (worked := self.turn()) is not None:
            with self._changed:
                if not worked and not (self._closing and self._idle()):
                    self._changed.wait(None if self._idle() else self.pause)

    def turn(self) -> bool | None:
        """One look. True if something was done, so that the next can follow at once; None if it was the last."""
        if self._stopped is None:
            worked = self.work()
            with self._changed:
                if self._stopped is None and not (self._closing and not worked and self._idle()):
                    return worked
        return self._end()

    def _idle(self) -> bool:
        """Whether nothing is to be done until the training says something."""
        return self._stopped is None and not self._pending and (self._marked or self.place.rank != 0)

    def _end(self) -> bool | None:
        """Rank 0 tells the others that nothing will follow, and why. If it cannot, it tries again until the training ends."""
        if self.place.rank == 0:
            if self.clock() < self._not_before:
                return False
            mark = Mark(None, ended=True, reason=self._stopped or "")
            if not self._attempt(lambda: self.remote.announce(self.place.run, mark)) and not self._closing:
                return False
        with self._changed:
            self._over = True
            self._changed.notify_all()
        return None

    def work(self) -> bool:
        """As ``turn``, as long as the training goes on."""
        if self._stopped is not None or self.clock() < self._not_before:
            return False
        done: list[bool] = []
        return self._attempt(lambda: done.append(self._lead() if self.place.rank == 0 else self._follow())) and done[0]

    def _attempt(self, work: Callable[[], object], pause: float = AGAIN) -> bool:
        """False if it failed; the error is kept for the training, and the worker pauses."""
        try:
            work()
            return True
        except Exception as error:      # whatever it is, the training hears of it; the worker lives on
            about = "" if self._step is None or isinstance(error, Lost) else f"step {self._step} is not uploaded: "
            with self._changed:
                self.failed += 1
                if isinstance(error, Overtaken):
                    self._stopped = str(error)
                elif isinstance(error, Lost):           # at once: there is nothing to wait for
                    self._settled.add(error.step)
                    self._pending = [other for other in self._pending if other != error.step]
                else:
                    self._not_before = self.clock() + pause
            self._say(RemoteError(f"{about}{error} ({self.failed} failed so far)"))
            return False
        finally:
            with self._changed:
                self._step = None
                self._changed.notify_all()

    def _say(self, error: RemoteError) -> None:
        with self._changed:
            self._errors.append(error)

    def _begin(self, step: int) -> None:
        with self._changed:
            self._step, self._since = step, self.clock()

    def _done(self, step: int, over: int) -> None:
        """``over``: what is older is never uploaded any more."""
        with self._changed:
            self.uploaded, self._step = max(step, self.uploaded), None
            self._settled.add(step)
            self._pending = [other for other in self._pending if other > over and other != step]

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def _lead(self) -> bool:
        if not self._marked:
            self.remote.fence(self.place.run)
            self.remote.announce(self.place.run, Mark())
            self._marked = True
        with self._changed:
            pledge = self._next
            steps = [pledge] if self.pledged and not self._closing else sorted(self._pending, reverse=True)
        step, base = next(((step, base) for step in steps if step and (base := committed_base(self.place, step))), (0, None))
        if base is not None:
            self._begin(step)
            if self._attempt(lambda: self._lead_step(step, base)):
                self._attempt(lambda: self.remote.prune(self.policy or KEEP_ALL, self.place.run, step, self.log), 0)
        with self._changed:
            self._next = self._next if self._next != pledge else 0
        return base is not None

    def _lead_step(self, step: int, base: str) -> None:
        place, attempt, started = self.place, attempt_name(step, self.place.run), self.clock()
        box = base if place.iterations else place.attempt(step)
        held = hold(place.storage, place.root, attempt, box)
        if held is None:
            raise Lost(step, "it was removed from the disk of rank 0 before")
        try:
            self.remote.fence(place.run)
            self.remote.announce(place.run, Mark(step))
            sent = self._put_share(step, base)
            self._others(step, base)
            self.remote.fence(place.run)
            self.remote.commit(place, step, base)
        finally:
            held.leave()
        self._skip(step)
        self._done(step, over=step)
        self.log(f"step {step} is in {self.remote.url}: {sent / 2**20:.1f} MiB of rank 0, all in {self.clock() - started:.1f} s")

    def _put_share(self, step: int, base: str) -> int:
        try:
            return self.remote.put_share(self.place, step, base)
        except FileNotFoundError as error:
            raise Lost(step, f"the part of rank {self.place.rank} is not on its disk any more: {error.filename}") from error

    def _skip(self, step: int) -> None:
        """``step`` is uploaded, and nothing older will be."""
        left_out = sorted(other for other in self._pending if other < step)
        if left_out:
            self.skipped += len(left_out)
            self.log(f"step {', '.join(map(str, left_out))} is not uploaded: uploads are slower than saves ({self.skipped} left "
                     f"out so far)")

    def _others(self, step: int, base: str) -> None:
        """Waits for the objects of the other ranks. RemoteError that names them; Lost if they will not come."""
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
        mark = self.remote.announced(self.place.run)
        if mark is None:                                # not yet there; or a later run has removed it
            if (self._heard or self._closing) and self.clock() >= self._next_fence:
                self._next_fence = self.clock() + AGAIN
                self.remote.fence(self.place.run)
            return False
        self._heard = True
        if mark.ended:
            with self._changed:
                self._stopped = mark.reason
            if mark.reason:
                self._say(RemoteError(mark.reason))
            return True
        if mark.step is None or mark.step in self._settled:
            return False
        base = committed_base(self.place, mark.step) or self.place.base(mark.step)
        if not self.remote.has_share(self.place, mark.step, base):
            return self._lacks(mark.step)
        self._begin(mark.step)
        try:
            sent = self.remote.put_share(self.place, mark.step, base)
        except FileNotFoundError:                       # rank 0 has given it up meanwhile, or renamed its folder, or it is gone
            with self._changed:
                self._step = None
            return self.remote.announced(self.place.run) == mark and self._lacks(mark.step)
        self.log(f"rank {self.place.rank} uploaded its part of step {mark.step}, {sent / 2**20:.1f} MiB")
        # If another node has lost this step, rank 0 may go back to one before it, but not behind one that was whole.
        self._done(mark.step, over=self.uploaded if self.place.part else mark.step)
        return True

    def _lacks(self, step: int) -> bool:
        """Tells rank 0 that this rank's part of ``step`` will never come. On a disk of its own node a rank sees at once what it
        wrote; on a shared one it may see late that a folder has another name."""
        unsaved = step > self._last
        if unsaved and not self._closing:
            return False
        if self._absent[0] != step:
            self._absent = (step, self.clock())
        if self.clock() - self._absent[1] < (0 if unsaved or self.place.part else LATE):
            return False
        reason = "was not saved" if unsaved else "is not on its disk any more"
        self.remote.lose(self.place, step, reason)
        raise Lost(step, f"the part of rank {self.place.rank} {reason}")
