"""Which committed checkpoints stay. Policies are values: each answers which of the checkpoints, newest first, it keeps.

They count every checkpoint committed in the folder, those of earlier runs too (mindformers counts only its own process).
The newest one is always kept.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Saved(Protocol):
    """What a policy looks at."""
    @property
    def step(self) -> int | None: ...

    @property
    def saved_at(self) -> float | None: ...


class Policy(Protocol):
    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        """Indices into ``newest_first``."""


@dataclass(frozen=True)
class KeepAll:
    """Neither ``keep_checkpoint_max`` nor ``keep_checkpoint_per_n_minutes`` is set."""

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        return set(range(len(newest_first)))


KEEP_ALL = KeepAll()


@dataclass(frozen=True)
class KeepLast:
    """``keep_checkpoint_max``."""
    count: int

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        return set(range(min(self.count, len(newest_first))))


@dataclass(frozen=True)
class KeepPerMinutes:
    """``keep_checkpoint_per_n_minutes``: the newest, and going back in time one per ``minutes``."""
    minutes: float

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        kept, last = set(), None
        for index, saved in reversed(list(enumerate(newest_first))):      # oldest first: it opens its interval
            if last is None or (saved.saved_at or 0.0) - last >= self.minutes * 60:
                kept.add(index)
                last = saved.saved_at or 0.0
        return kept


def policy_of(keep_checkpoint_max: int | None, keep_checkpoint_per_n_minutes: int | None) -> Policy:
    """As mindspore's CheckpointConfig: the maximum wins, the minutes count only without it, neither keeps all."""
    if keep_checkpoint_max and keep_checkpoint_max > 0:
        return KeepLast(keep_checkpoint_max)
    if keep_checkpoint_per_n_minutes and keep_checkpoint_per_n_minutes > 0:
        return KeepPerMinutes(keep_checkpoint_per_n_minutes)
    return KEEP_ALL


def surplus(policy: Policy, newest_first: Sequence[Saved]) -> list[int]:
    """Indices of the checkpoints to remove; never 0, the newest."""
    kept = policy.keeps(newest_first) | {0}
    return [index for index in range(len(newest_first)) if index not in kept]
