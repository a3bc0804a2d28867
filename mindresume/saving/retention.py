"""Defines retention policies: values that decide which committed checkpoints stay.

    policy = KeepAny((KeepLast(3), KeepEverySteps(1000), KeepBest("loss", 2)))
    str(policy)  # "the last 3, one every 1000 steps, the best 2 by loss (smallest)"
    surplus(policy, newest_first)      # indices of the checkpoints to remove; never 0

A policy counts every committed checkpoint in the directory, those of earlier runs too (mindformers
counts only those of its own process). The newest one always stays. A policy without a meaning (a
count below 1) raises ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from mindresume.errors import ConfigError
from mindresume.settings import RetentionSettings


class Saved(Protocol):
    """The properties of a checkpoint that policies use. ``saved_at``: seconds since 1970.
    ``metrics``: {name: value} at the save."""

    @property
    def step(self) -> int | None: ...

    @property
    def saved_at(self) -> float | None: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class Policy(Protocol):
    """Chooses the checkpoints that stay. ``str(policy)`` describes it for a log or a table."""

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        """Returns the indices into ``newest_first`` that stay."""


@dataclass(frozen=True)
class KeepAll:
    """Keeps all checkpoints: neither ``keep_checkpoint_max`` nor ``keep_checkpoint_per_n_minutes``
    is set."""

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        return set(range(len(newest_first)))

    def __str__(self) -> str:
        return "all"


KEEP_ALL = KeepAll()


@dataclass(frozen=True)
class KeepLast:
    """Keeps the last checkpoints, as ``keep_checkpoint_max`` does.

    Attributes:
        count: How many.

    Raises:
        ConfigError: ``count`` is no whole number of at least 1.
    """

    count: int

    def __post_init__(self) -> None:
        _at_least_one("the number of last checkpoints to keep", self.count)

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        return set(range(min(self.count, len(newest_first))))

    def __str__(self) -> str:
        return "the last one" if self.count == 1 else f"the last {self.count}"


@dataclass(frozen=True)
class KeepPerMinutes:
    """Keeps the oldest checkpoint, and from there one per interval, as
    ``keep_checkpoint_per_n_minutes`` does.

    If the clock was set back, a checkpoint that seems older than the one kept before it stays and
    begins a new interval.

    Attributes:
        minutes: Length of the interval in minutes.

    Raises:
        ConfigError: ``minutes`` is no finite number above 0.
    """

    minutes: float

    def __post_init__(self) -> None:
        if (
            isinstance(self.minutes, bool)
            or not isinstance(self.minutes, (int, float))
            or not 0 < self.minutes < math.inf
        ):
            raise ConfigError(
                f"retention: the minutes between checkpoints to keep are {self.minutes!r}; "
                "expected a number "
                f"above 0"
            )

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        kept: set[int] = set()
        last = None
        # oldest first: each kept one begins an interval
        for index, saved in reversed(list(enumerate(newest_first))):
            at = saved.saved_at or 0.0
            if last is None or at < last or at - last >= self.minutes * 60:
                kept.add(index)
                last = at
        return kept

    def __str__(self) -> str:
        return "one a minute" if self.minutes == 1 else f"one every {self.minutes:g} minutes"


@dataclass(frozen=True)
class KeepEverySteps:
    """Keeps, for every multiple of ``interval``, the first checkpoint at or after it and before the
    next multiple (in sink mode steps arrive in jumps). If several runs saved that step, keeps the
    newest. Checkpoints before the first multiple are not kept.

    Attributes:
        interval: Number of steps.

    Raises:
        ConfigError: ``interval`` is no whole number of at least 1.
    """

    interval: int

    def __post_init__(self) -> None:
        _at_least_one("the number of steps between checkpoints to keep", self.interval)

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        first: dict[int, int] = {}
        for index, saved in enumerate(newest_first):
            if saved.step is None or saved.step < self.interval:
                continue
            known = first.setdefault(saved.step // self.interval, index)
            # not on a tie: the newer one was seen first
            if saved.step < (newest_first[known].step or 0):
                first[saved.step // self.interval] = index
        return set(first.values())

    def __str__(self) -> str:
        return "one every step" if self.interval == 1 else f"one every {self.interval} steps"


@dataclass(frozen=True)
class KeepBest:
    """Keeps the best checkpoints by a recorded metric; of equal ones the newer. Checkpoints without
    that metric are not best.

    Attributes:
        metric: "loss", or a name that was given to ``mindresume.plugin.report_metric``.
        count: How many.
        mode: "min": small values are better; "max": large ones.

    Raises:
        ConfigError: ``count`` is no whole number of at least 1, ``mode`` is another text, or
            ``metric`` is empty.
    """

    metric: str
    count: int
    mode: str = "min"

    def __post_init__(self) -> None:
        _at_least_one("the number of best checkpoints to keep", self.count)
        if self.mode not in ("min", "max"):
            raise ConfigError(
                f"retention: the mode of the best is {self.mode!r}; choose one of min, max"
            )
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(
                f"retention: the metric of the best is {self.metric!r}; expected its name, such as "
                "loss"
            )

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        sign = 1 if self.mode == "min" else -1
        values = [
            (index, saved.metrics.get(self.metric)) for index, saved in enumerate(newest_first)
        ]
        ranked = sorted(
            (sign * value, index)
            for index, value in values
            if value is not None and not math.isnan(value)
        )
        return {index for _, index in ranked[: self.count]}

    def __str__(self) -> str:
        return (
            f"the best {self.count} by " if self.count > 1 else "the best one by "
        ) + f"{self.metric} ({'smallest' if self.mode == 'min' else 'largest'})"


@dataclass(frozen=True)
class KeepAny:
    """Keeps what at least one of several policies keeps.

    Attributes:
        policies: The policies.

    Raises:
        ConfigError: There is no policy.
    """

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", tuple(self.policies))
        if not self.policies:
            raise ConfigError("retention: no policy at all would keep nothing; give at least one")

    def keeps(self, newest_first: Sequence[Saved]) -> set[int]:
        return set().union(*(policy.keeps(newest_first) for policy in self.policies))

    def __str__(self) -> str:
        return ", ".join(map(str, self.policies))


def _at_least_one(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"retention: {what} is {value!r}; expected a whole number of at least 1")


def any_of(policies: Sequence[Policy]) -> Policy:
    """Returns one policy that keeps what any of ``policies`` keeps."""
    return policies[0] if len(policies) == 1 else KeepAny(tuple(policies))


def policy_of(
    keep_checkpoint_max: int | None,
    keep_checkpoint_per_n_minutes: int | None,
    keep: RetentionSettings,
) -> Policy:
    """Returns the policy of these settings. The first two are those of mindspore's
    CheckpointConfig: the minutes count only without a maximum, and without both all checkpoints
    stay. ``keep`` keeps more than those two.

    Raises ConfigError if ``keep`` keeps more and both of the first two are not set: then all stay
    anyway. It does so on every rank.
    """
    if keep_checkpoint_max and keep_checkpoint_max > 0:
        base: Policy = KeepLast(keep_checkpoint_max)
    elif keep_checkpoint_per_n_minutes and keep_checkpoint_per_n_minutes > 0:
        base = KeepPerMinutes(keep_checkpoint_per_n_minutes)
    else:
        base = KEEP_ALL
    more: list[Policy] = [KeepEverySteps(keep.keep_every_steps)] if keep.keep_every_steps else []
    more += (
        [KeepBest(keep.keep_best_metric, keep.keep_best, keep.keep_best_mode)]
        if keep.keep_best
        else []
    )
    if more and base == KEEP_ALL:
        keys = " and ".join(
            name for name in ("keep_every_steps", "keep_best") if getattr(keep, name)
        )
        raise ConfigError(
            f"mindresume: {keys} is set, but neither keep_checkpoint_max nor "
            "keep_checkpoint_per_n_minutes of "
            "CheckpointMonitor: every checkpoint is kept anyway. Set keep_checkpoint_max, or "
            f"remove {keys}"
        )
    return any_of([base, *more])


def surplus(policy: Policy, newest_first: Sequence[Saved]) -> list[int]:
    """Returns the indices of the checkpoints to remove; never 0, the newest."""
    kept = policy.keeps(newest_first) | {0}
    return [index for index in range(len(newest_first)) if index not in kept]
