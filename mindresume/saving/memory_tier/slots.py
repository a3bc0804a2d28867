"""Decides which save in memory is overwritten next.

The rule: **while one save is overwritten, all ranks hold another one whole.** No message is exchanged for it. It follows from

1. Each step of a training contains a collective of all ranks. So when a rank has finished step ``s``, every rank has begun it,
   and has left the end of the step before. Collecting the state reads the optimizer's counter, and so waits for the device.
2. At the end of each step a rank first waits for the background work (checksums, record) of a save that it began at the end of
   an *earlier* step (``MemoryTier.step_end``).

Let a rank save at the end of step ``s``, and let ``p`` be its save before.

* Some end of a step lies between ``p`` and ``s``: every rank has left that end (1), where it waited for ``p`` (2). So all ranks
  have recorded ``p``, and two slots suffice: the other one is overwritten.
* Saves follow each other at every end of a step: other ranks may still compute the checksums of ``p``, but they have left the end
  of the step of ``p`` (1), where they waited for the save before ``p`` (2). So all ranks have recorded that one. It is kept, and
  so is ``p``: a third slot is overwritten.

If a save fails on a rank, its record never appears. The ranks of the same node see that, as it cannot be late any more, and
overwrite the failed save instead of the older one. Ranks of another node do not see it: then no save may be common to all
ranks, and the next start takes the disk. The same holds for a training whose ranks exchange nothing. What is loaded is never
decided here: a start takes a save only if all ranks find it whole and verify it.

A process may die between any two operations. The record is removed before the first byte is overwritten, and published after
the last checksum, so what is half copied has no record on this rank, and counts on none.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence


def slots_needed(every_steps: int, jump: int) -> int:
    """Returns 2 or 3. ``jump``: steps between two ends of a step (the sink size in sink mode). Multiples of ``every_steps`` that
    are two jumps apart have an end of a step without a save between them."""
    return 2 if every_steps >= 2 * jump else 3


def step_to_overwrite(held: Sequence[int], slots: int, is_whole: Callable[[int], bool]) -> int | None:
    """Returns the step whose slot is overwritten; None: a slot is free.

    Args:
        held: steps in the slots, whole or not, newest first.
        is_whole: whether all ranks of this node have recorded a step.
    """
    if len(held) < slots:
        return None
    common = held[slots - 2]
    return held[-1] if is_whole(common) else common


def common_step(held: Sequence[int], slots: int, is_whole: Callable[[int], bool]) -> int | None:
    """Returns the newest step that all ranks have certainly recorded when a save begins; None: not known. Arguments: see
    ``step_to_overwrite``."""
    return next((step for step in held[slots - 2:] if is_whole(step)), None)
