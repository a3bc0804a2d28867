"""Saves one rank's part of a training into memory of the node.

    # all ranks together; None: no tier
    tier = open_tier(session, group, settings, emit, share, resumed)
    tier.begin(step)
    tier.step_end(request)              # at the end of each step, on all ranks
    tier.stop();  tier.remove()         # the training ended, and the disk has its last step

    training    remove the record of an older save ─▶ rename its files away ─▶ copy the arrays into
        them ─▶ next step
    background  checksums of the copy ─▶ final names ─▶ record: from then on the save counts

The first end of a step reserves the memory in the background and saves nothing, so that no save
waits for new pages. Files that an earlier run left are never written into, because a loaded network
may still map them; they are removed once a newer save is common to all ranks. A save that fails
costs this tier alone: the training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mindresume import runtime
from mindresume.coordination import host_memory
from mindresume.coordination.collectives import Group, gather_results
from mindresume.coordination.lease import fence
from mindresume.errors import SaveError
from mindresume.events import Emit, PartnerCopyFailed, TierRefused, TierSaved
from mindresume.formats import Candidate
from mindresume.model.training_state import crosses_multiple
from mindresume.saving.memory_tier.directory import DiskNotes
from mindresume.saving.memory_tier.partner import Partner
from mindresume.saving.memory_tier.slots import (
    FormerSaves,
    Slot,
    TierSlots,
    common_step,
    shard_in,
    slots_needed,
    step_to_overwrite,
)
from mindresume.saving.shard_writer import Save, SaveTarget, Shard, StepState
from mindresume.settings import Settings
from mindresume.storage import remove_tree

_FAILURES = 3  # consecutive failures after which this rank saves nothing more here
# seconds: between two looks at the records of other ranks, and for all of them
_PAUSE, _SETTLE = 0.05, 5.0


class BackgroundThread:
    """Runs one piece of work after the other in one thread, which begins with the first work and
    ends with ``close``.

    A new thread for each piece would delay the training: ``Thread.start`` returns when the new
    thread runs, and on a node whose cores are all busy that takes longer than the copy of a small
    network.
    """

    def __init__(self, name: str):
        self.name = name
        self._waiting: runtime.SimpleQueue[Any] | None = None

    def start(self, work: Callable[..., None], *arguments: Any) -> runtime.Event:
        """Calls ``work(*arguments)``, which raises no error, after what was started before. Returns
        an event that is set once it has ended: at once, if no thread can be made."""
        done = runtime.Event()
        if self._waiting is None:
            waiting: runtime.SimpleQueue[Any] = runtime.SimpleQueue()
            try:
                runtime.Thread(target=_serve, name=self.name, daemon=True, args=(waiting,)).start()
            except RuntimeError:  # the limit of threads is reached
                work(*arguments)
                done.set()
                return done
            self._waiting = waiting
        self._waiting.put((done, work, arguments))
        return done

    def close(self) -> None:
        """Ends the thread after all work. A later ``start`` makes another one."""
        if self._waiting is not None:
            self._waiting.put(None)
            self._waiting = None


def _serve(waiting: runtime.SimpleQueue[Any]) -> None:
    while (row := waiting.get()) is not None:
        done, work, arguments = row
        try:
            work(*arguments)
        finally:
            done.set()
        del row, work, arguments  # they refer to the memory of a save


class MemoryTier:
    """The saves of one rank in memory. All ranks call the methods at the same points, except
    ``stop`` and ``newest``.

    Args:
        target: see ``TierSlots``.
        settings: ``memory_tier``; ``commit_timeout``: seconds that the training waits for the
            background.
        share: bytes of host memory for this rank.
        loaded: the save in this tier that the training has loaded. It stays until a newer one is
            common to all ranks.
        on_disk: key of the checkpoint in the checkpoint directory that the training has loaded;
            empty: none.
        partner: also keeps these saves. None: no other node does.
    """

    def __init__(
        self,
        target: SaveTarget,
        group: Group,
        settings: Settings,
        emit: Emit,
        share: int = host_memory.UNKNOWN,
        loaded: Candidate | None = None,
        on_disk: str = "",
        partner: Partner | None = None,
    ):
        self.group = group
        self.settings = settings
        self.emit = emit
        self.slots = TierSlots(target, settings.memory_tier, share)
        self.former = FormerSaves(target, loaded)
        self.notes = DiskNotes(target.storage, target.root, target.run, on_disk)
        self.partner = partner
        self._last_step = 0
        self._saved_at_last_end = self._is_off = False
        self._failures = self._failed_in_a_row = 0
        self._background = BackgroundThread("mindresume-memory-tier")
        self._work: runtime.Event | None = None  # checksums and record of a save
        self._reserving: runtime.Event | None = None
        # by the background, emitted by the training thread
        self._done: list[TierSaved | TierRefused] = []

    # ---- each step -------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Sets the step after which the training begins."""
        self._last_step = step

    def step_end(self, request: StepState, save: Save | Exception | None = None) -> None:
        """Saves the step if it is due. ``save``: what was collected for a save to disk at the same
        step, or why it could not be: a second attempt could be a collective that the other ranks do
        not join. Raises only the error of a collective."""
        step, before = request.step, self._last_step
        self._last_step = step
        after_save = self._saved_at_last_end
        self._saved_at_last_end = False
        # see slots.py: no rank begins a step before this work is done
        self._join(self._work)
        self._emit_done()
        if not self.slots.count:
            if not self._is_off:
                self._reserve(request, save, max(step - before, 1))
            return
        if not crosses_multiple(before, step, self.settings.memory_tier.every_steps) or (
            after_save and self.slots.count == 2
        ):
            return
        self._saved_at_last_end = True
        if self._is_off and not request.needs_collectives():
            return
        try:
            # all ranks, also those that do not save any more
            found = _collected(request, save)
            if not self._is_off:
                self._save(found.shard)
        except (SaveError, OSError, ValueError, MemoryError) as error:
            self._failed(step, str(error))

    def _save(self, shard: Shard) -> None:
        """Copies ``shard`` into a slot, and starts the background work."""
        started, slots = runtime.monotonic(), self.slots
        self._join(self._reserving)
        self._emit_done()
        if self._is_off:
            return
        fence(slots.target, slots.target.run)
        held = slots.held()
        whole = set(filter(slots.is_whole, held[slots.count - 2 :]))
        if common_step(held, slots.count, whole) is not None:
            self.former.remove_loaded()
        slot = slots.copy(shard, step_to_overwrite(held, slots.count, whole))
        self._work = self._background.start(self._finish, slot, runtime.monotonic() - started)

    def _finish(self, slot: Slot, stall: float) -> None:
        """Runs in the background: makes the copy a save. ``stall``: seconds that the training has
        waited for it."""
        started, step = runtime.monotonic(), slot.step
        try:
            size = self.slots.record(slot)
            self._done.append(TierSaved(step, size, stall, runtime.monotonic() - started))
            if self.partner is not None:
                self.partner.offer(step)
            self.slots.plan_next(slot)
        except Exception as error:  # any error: it costs this save alone
            self._done.append(TierRefused(step, str(error)))

    def _reserve(self, request: StepState, save: Save | Exception | None, jump: int) -> None:
        """Decides with all ranks whether there is memory for the slots, and reserves it in the
        background."""
        problem = ""
        sizes: list[int] = []
        room = 0
        count = slots_needed(self.settings.memory_tier.every_steps, jump)
        try:
            sizes = self.slots.sizes(_collected(request, save).shard)
            former = self.former.size()
            problem = self.slots.why_not(count * sum(sizes), former)
            room = self.partner.room(self.slots.target, former) if self.partner else 0
        except (SaveError, OSError, ValueError, MemoryError) as error:
            problem = str(error)
        rows = gather_results(self.group, lambda: [problem, sum(sizes), room])
        refused = next(((rank, row[0]) for rank, row in enumerate(rows) if row[0]), None)
        # all ranks or none: a save without one of them is worth nothing
        if refused is not None:
            self._is_off = True
            self.emit(TierRefused(None, f"rank {refused[0]}: {refused[1]}"))
            self._end_partner()
            return
        if self.partner is not None:
            _, of_ranks, rooms = zip(*rows, strict=True)
            if problem := self.partner.ring.why_not(count, of_ranks, rooms):
                self.emit(PartnerCopyFailed(None, problem))
                self._end_partner()
            else:
                self.partner.begin(self.slots, of_ranks, self.emit)
        self.slots.count, stale = count, ""
        if self._is_leader():
            stale = self.former.set_aside(self.emit)
            if self.former.loaded is None:
                self.notes.loaded()
        self._reserving = self._background.start(self._make_slots, sizes, stale)

    def _make_slots(self, sizes: Sequence[int], stale: str) -> None:
        """Runs in the background. ``stale``: a folder to be removed before; empty: none."""
        try:
            if stale:
                remove_tree(self.slots.target.storage, stale)
            if self.partner is not None:
                with suppress(OSError):  # older copies cost their memory alone
                    self.partner.set_aside(self.former.loaded)
            self.slots.reserve(sizes)
        except Exception as error:  # any error: it costs the tier alone
            self._done.append(TierRefused(None, f"its memory cannot be reserved: {error}"))

    def _end_partner(self) -> None:
        if self.partner is not None:
            self.partner.close()
            self.partner = None

    def _is_leader(self) -> bool:
        """Returns whether this rank, the first of its node, removes what earlier runs left."""
        return self.slots.target.rank == self.slots.target.ranks[0]

    # ---- the end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Waits for the background work. No save follows."""
        self._join(self._reserving)
        self._join(self._work)
        self._background.close()
        if self.partner is not None:
            self.partner.stop()
        self._emit_done()
        self._is_off = True

    def pause(self) -> None:
        """Saves nothing any more. Before the memory is reserved, which all ranks do together, it
        does nothing; no save comes before that."""
        self._is_off = self._is_off or bool(self.slots.count)

    def newest(self, after: int, before: float = math.inf) -> Shard | None:
        """Returns the newest save after step ``after``, and before step ``before``, that all ranks
        of this node have recorded, with its arrays in the memory of the tier; None if there is
        none. Waits some seconds for other ranks. Called after ``stop``."""
        saves, until = self.slots.recorded(after), runtime.monotonic() + _SETTLE
        saves = [slot for slot in saves if slot.step < before]
        while saves and not self.slots.is_whole(saves[0].step) and runtime.monotonic() < until:
            runtime.sleep(_PAUSE)
        found = next((slot for slot in saves if self.slots.is_whole(slot.step)), None)
        return None if found is None else shard_in(found)

    def remove(self) -> None:
        """Releases the memory, and removes the tier on the first rank of the node: the disk has the
        last step. Raises no error."""
        self.slots.close()
        with suppress(OSError):
            if self._is_leader():
                remove_tree(self.slots.target.storage, self.slots.target.root)
            if self.partner is not None:
                self.partner.remove()

    # ---- the background --------------------------------------------------------------------------

    def _join(self, work: runtime.Event | None) -> None:
        if work is None:
            return
        timeout = self.settings.commit_timeout
        if not work.wait(timeout) and not self._is_off:
            self._is_off = True
            self.emit(TierRefused(None, f"the background work takes more than {timeout:.0f} s"))

    def _emit_done(self) -> None:
        done, self._done = self._done, []
        for event in done:
            if isinstance(event, TierRefused) and event.step is not None:
                self._failed(event.step, event.reason)
                continue
            self._failed_in_a_row = 0
            self._is_off = self._is_off or isinstance(event, TierRefused)
            self.emit(event)

    def _failed(self, step: int, reason: str) -> None:
        self._failures += 1
        self._failed_in_a_row += 1
        self._is_off = self._is_off or self._failed_in_a_row >= _FAILURES
        self.emit(TierRefused(step, reason, self._failures))


def _collected(request: StepState, save: Save | Exception | None) -> Save:
    if isinstance(save, Exception):
        raise SaveError(str(save))
    return save or request.collect()
