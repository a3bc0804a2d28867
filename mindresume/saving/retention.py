"""Decides which checkpoints stay and which are removed, each with a reason. Reads only.

    policy = KeepAny((KeepLast(3), KeepEverySteps(1000), KeepBest("loss", 2)))
    str(policy)  # "the last 3, one every 1000 steps, the best 2 by loss (smallest)"
    surplus(policy, newest_first)  # indices of the checkpoints to remove; never 0

    made = plan(directory, policy, read_locks(), active=run)  # garbage_collector.carry_out removes

A policy counts every committed checkpoint in the directory, those of earlier runs too (mindformers
counts only those of its own process). The newest one always stays. A policy without a meaning (a
count below 1) raises ConfigError.

Whatever the policy says, some checkpoints stay. A rule yields those, each with a reason that reads
well after "kept:". For a new reason, write a rule and add it to RULES: every removal (after a
commit, by ``mindresume prune``) obeys it. Policies count protected checkpoints like others;
``not_counted`` returns those that they do not count. A file that a rule cannot read protects every
checkpoint that it may be about.

A training is a lineage, which is named after the run that began it. A resume inherits the name, a
fresh start has its own. Early versions recorded no name, and neither did runs that resumed from
their checkpoints: then it is empty, and in one directory all of these are one lineage. A resume in
another directory uses the run that it resumed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from mindresume.coordination.storage_topology import protected_by_peers
from mindresume.errors import ConfigError, RecordError
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.bad_steps import BAD_STEPS, read_bad_steps, refuse_bad
from mindresume.formats.iterations import TRACKER, parse_iteration, tracked
from mindresume.formats.rank_folders import META, folder_name
from mindresume.formats.records import ReadManifests, find_attempts, scan_records
from mindresume.formats.weight_files import known_damage, sizes_match
from mindresume.model.manifest import FOLDER
from mindresume.saving.crash_loop import load_attempts
from mindresume.settings import RetentionSettings
from mindresume.storage import read_json


class Saved(Protocol):
    """The properties of a checkpoint that policies use. ``saved_at``: seconds since 1970.
    ``metrics``: {name: value} at the save."""

    step: int | None
    saved_at: float | None
    metrics: Mapping[str, float]


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
                "expected a number above 0"
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
            "keep_checkpoint_per_n_minutes of CheckpointMonitor: every checkpoint is kept anyway. "
            f"Set keep_checkpoint_max, or remove {keys}"
        )
    return any_of([base, *more])


def surplus(policy: Policy, newest_first: Sequence[Saved]) -> list[int]:
    """Returns the indices of the checkpoints to remove; never 0, the newest."""
    kept = policy.keeps(newest_first) | {0}
    return [index for index in range(len(newest_first)) if index not in kept]


# ---- the plan of a removal -----------------------------------------------------------------------

Reasons = Mapping[str, list[str]]
Rule = Callable[[CheckpointDir, Sequence[Candidate]], Iterable[tuple[Candidate, str]]]

NEWEST_WHOLE = "the newest one that is whole"
NEWER_THAN_WHOLE = "newer than the newest one that is whole"
NEWEST_HEALTHY = "the newest one that is healthy"
ANOTHER_TRAINING = "of another training"
NEWEST = "the newest one"
NOT_COMMITTED = "complete, not committed yet"
NOT_COMPLETE = "not complete yet; its run may still go on"
NOTHING_WHOLE = "no checkpoint is whole, so none is removed"


@dataclass(frozen=True)
class Plan:
    """Says for each save in one directory whether it is removed. Each group is sorted, newest
    first.

    Attributes:
        kept: checkpoints that stay.
        to_delete: checkpoints to remove.
        orphans: saves that never completed and never will, to remove.
        unfinished: incomplete saves that stay, because their run may be alive.
        read_locked: checkpoints that stay only because they are being read.
        reasons: {``commit_dir``: why}; not by name, because two folders can have records of one
            name.
    """

    kept: tuple[Candidate, ...] = ()
    to_delete: tuple[Candidate, ...] = ()
    orphans: tuple[Candidate, ...] = ()
    unfinished: tuple[Candidate, ...] = ()
    read_locked: tuple[Candidate, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def plan(
    directory: CheckpointDir,
    policy: Policy,
    held: Mapping[str, str] | None = None,
    active: str | None = None,
    ended: Container[str] = (),
    lineage: str | None = None,
    manifests: ReadManifests | None = None,
) -> Plan:
    """Plans what to remove from ``root``. Checkpoints that mindformers wrote alone are neither
    counted nor removed.

    Args:
        held: {name of an attempt folder: reader}.
        active: the run that saves now. Its incomplete saves before its newest commit are orphans,
            because every rank is past them.
        ended: the runs that are certainly over (``EndedRuns``). It is asked after the directory was
            read, so that a run that began meanwhile does not count as over. Incomplete saves of
            other runs stay, whatever their age.
        lineage: checkpoints of earlier runs of this training count; None: of any training.
        manifests: those that the caller has read before.

    Saves that a rule names are never removed, and some of them do not count. Committed checkpoints
    newer than the newest whole one stay, and the policy is applied to the others as if these did
    not exist. Without a whole checkpoint nothing is removed.
    """
    names = directory.storage.list(directory.path(FOLDER))
    found, _, _ = scan_records(directory, find_attempts(directory, names), manifests=manifests)
    aside = not_counted(found, lineage)
    if BAD_STEPS in names:
        with suppress(RecordError, ValueError):  # no resume refuses anything because of it, either
            refused = refuse_bad(found, read_bad_steps(directory))
            for before, bad in zip(found, refused, strict=True):
                if bad.committed and bad is not before:
                    aside.setdefault(bad.commit_dir, []).append(bad.problem.reason)
    counted = [c for c in found if c.commit_dir not in aside]
    stays = {**protected(directory, counted), **aside}
    committed = [c for c in counted if c.committed]
    good = next(
        (index for index, c in enumerate(committed) if NEWEST_WHOLE in stays.get(c.commit_dir, ())),
        None,
    )
    kept_by, going = _apply_policy(policy, committed, good)
    # A complete save of a run that is over cannot be committed any more. It counts, but displaces
    # no committed checkpoint.
    over = {
        run
        for run in {c.run for c in found if c.run not in (None, active) and not c.committed}
        if run in ended
    }
    places = [c for c in counted if c.committed or (c.maybe_completed and c.run in over)]
    for index in surplus(policy, places) if good is not None else ():
        if not places[index].committed:
            going[places[index].commit_dir] = f"not committed, and none of: {policy}"
    newest = max((c.step or 0 for c in committed if c.run == active), default=0)
    for candidate in found:
        if not candidate.maybe_completed and (
            candidate.run in over or (candidate.run == active and (candidate.step or 0) < newest)
        ):
            going[candidate.commit_dir] = "the save never completed"

    reasons: dict[str, str] = {}
    groups: dict[str, list[Candidate]] = {
        name: [] for name in ("kept", "to_delete", "orphans", "unfinished", "read_locked")
    }
    for candidate in found:
        commit_dir, who = candidate.commit_dir, (held or {}).get(candidate.name)
        if commit_dir not in going or commit_dir in stays:
            otherwise = (
                NEWEST
                if candidate.committed
                else NOT_COMMITTED
                if candidate.maybe_completed
                else NOT_COMPLETE
            )
            why = ", ".join([*stays.get(commit_dir, ()), *kept_by.get(commit_dir, ())]) or otherwise
            group = "kept" if candidate.maybe_completed else "unfinished"
        elif who is not None:
            why, group = f"held: {who}", "read_locked"
        else:
            why, group = going[commit_dir], "to_delete" if candidate.maybe_completed else "orphans"
        reasons[commit_dir] = why
        groups[group].append(candidate)
    return Plan(**{name: tuple(rows) for name, rows in groups.items()}, reasons=reasons)


def _apply_policy(
    policy: Policy, committed: Sequence[Candidate], good: int | None
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns ({commit_dir: why it stays}, {commit_dir: why it is removed}) for ``committed``,
    which is sorted newest first. ``good``: index of the newest whole one."""
    if good is None:
        return {c.commit_dir: [NOTHING_WHOLE] for c in committed}, {}
    # A resume may still take one of these: replicas of other ranks can stand in for a lost file.
    kept = {c.commit_dir: [NEWER_THAN_WHOLE] for c in committed[:good]}
    counted = committed[good:]
    keepers, gone = _keepers(policy, counted), set(surplus(policy, counted))
    going: dict[str, str] = {}
    for index, candidate in enumerate(counted):
        if index in gone:
            going[candidate.commit_dir] = f"none of: {policy}"
        else:
            kept[candidate.commit_dir] = keepers.get(index, [])
    return kept, going


def _keepers(policy: Policy, newest_first: Sequence[Candidate]) -> dict[int, list[str]]:
    """Returns {index: the parts of ``policy`` that keep it}."""
    found: dict[int, list[str]] = {}
    for part in policy.policies if isinstance(policy, KeepAny) else (policy,):
        for index in part.keeps(newest_first):
            found.setdefault(index, []).append(str(part))
    return found


# ---- what stays whatever the policy says ---------------------------------------------------------


def not_counted(found: Sequence[Candidate], lineage: str | None) -> Reasons:
    """Returns the candidates that no policy counts: iteration folders copied or renamed by hand,
    which no resume selects and a person may need, and checkpoints of another training than
    ``lineage`` (None: of any)."""
    aside = {
        c.commit_dir: [
            f"{c.iteration_dir} is a copy, or was renamed by hand: it holds step {c.step}"
        ]
        for c in found
        if parse_iteration(c.iteration_dir) not in (None, c.step)
    }
    for candidate in others(found, lineage) if lineage is not None else ():
        aside.setdefault(candidate.commit_dir, []).append(ANOTHER_TRAINING)
    return aside


def is_whole(directory: CheckpointDir, candidate: Candidate) -> bool:
    """Returns whether it is committed, its files have the recorded sizes, and no scrub found one of
    them damaged. Reads no contents."""
    return (
        candidate.committed
        and candidate.problem is None
        and sizes_match(directory, [*candidate.all_files, *candidate.metadata_files])
        and known_damage(directory, candidate) is None
    )


def newest_whole(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields the newest whole one. Where directories of several nodes were merged, also the newest
    whole one of all ranks."""
    candidate = next((c for c in found if is_whole(directory, c)), None)
    if candidate is not None:
        yield candidate, NEWEST_WHOLE
    if candidate is not None and candidate.local_ranks:
        of_all = next((c for c in found if not c.local_ranks and is_whole(directory, c)), None)
        if of_all is not None:
            yield of_all, "the newest one of all ranks"


def newest_healthy(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields the newest healthy one, if mindformers' health monitor has marked some as unhealthy: a
    resume skips those."""
    if any(c.health for c in found if c.committed):
        candidate = next((c for c in found if not c.health and is_whole(directory, c)), None)
        if candidate is not None:
            yield candidate, NEWEST_HEALTHY


def named_by_tracker(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields the one that the tracker names: it may have been set back by hand."""
    step = tracked(directory)
    for candidate in found if step is not None else ():
        if candidate.iteration_dir and candidate.committed and candidate.step == step:
            yield candidate, f"{TRACKER} names it"


def named_by_meta(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields the one that ``meta.json`` names, which mindformers without mindresume loads. A job
    updates it after the commit."""
    committed = [c for c in found if c.committed and c.files and not c.iteration_dir]
    for rank in sorted({min(c.files) for c in committed}):
        folder = folder_name(rank)
        try:
            meta = read_json(directory.storage, directory.path(folder, META))
            path = f"{folder}/{meta['last_ckpt_file']}"
        except (
            FileNotFoundError,
            NotADirectoryError,
            IsADirectoryError,
            PermissionError,
            ValueError,
            KeyError,
            TypeError,
        ):
            # it names no checkpoint, or cannot be read
            continue
        # A name can have been used twice: the newest. The newest of all stays in any case.
        candidate = next(
            (c for c in committed if any(file.path == path for file in c.files.get(rank, ()))), None
        )
        if candidate not in (None, committed[0]):
            yield candidate, f"{folder}/{META} names it"


def common_to_all_nodes(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields those that are common to all nodes, or newer. An incomplete save is a checkpoint on no
    node."""
    names = protected_by_peers(directory)
    for candidate in found:
        if candidate.maybe_completed and candidate.name in names:
            yield candidate, names[candidate.name]


def with_failed_loads(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields those with failed loads: a suspicion may be wrong, so a person has to check it
    first."""
    rows = load_attempts(directory)
    for candidate in found:
        if rows.get(candidate.name, ()) != ():
            yield candidate, "a job died right after it had loaded it"


def not_looked_into(
    directory: CheckpointDir, found: Sequence[Candidate]
) -> Iterator[tuple[Candidate, str]]:
    """Yields those that cannot be read: each may be whole and the newest."""
    for candidate in found:
        if candidate.listing_error:
            yield candidate, candidate.listing_error


RULES: tuple[Rule, ...] = (
    newest_whole,
    newest_healthy,
    named_by_tracker,
    named_by_meta,
    common_to_all_nodes,
    with_failed_loads,
    not_looked_into,
)


def protected(directory: CheckpointDir, found: Sequence[Candidate]) -> Reasons:
    """Returns {commit_dir: reasons} by all rules. Raises OSError if the directory cannot be read:
    then nothing is removed now."""
    stays: dict[str, list[str]] = {}
    for rule in RULES:
        for candidate, why in rule(directory, found):
            stays.setdefault(candidate.commit_dir, []).append(why)
    return stays


# ---- the checkpoints of one training -------------------------------------------------------------


def continued(chosen: Candidate | None, run: str, same_folder: bool) -> str:
    """Returns the lineage of ``run``, which resumes from ``chosen`` (None: a fresh start), in the
    same directory or in another one. A checkpoint of mindformers has no known lineage."""
    if chosen is None or chosen.run is None:
        return run
    return chosen.lineage or ("" if same_folder else chosen.run)


def with_lineages(found: Sequence[Candidate]) -> list[tuple[Candidate, str]]:
    """Returns the candidates of one scan, each with its lineage; one with unreadable records with
    that of its run."""
    by_run = {candidate.run: candidate.lineage for candidate in found if candidate.lineage}
    return [(candidate, candidate.lineage or by_run.get(candidate.run, "")) for candidate in found]


def others(found: Sequence[Candidate], lineage: str) -> list[Candidate]:
    """Returns the candidates of other trainings that may have completed."""
    return [
        candidate
        for candidate, own in with_lineages(found)
        if candidate.maybe_completed and not candidate.listing_error and own != lineage
    ]


def newest_lineage(found: Sequence[Candidate]) -> str:
    """Returns the lineage of the training that saved last."""
    return next((own for candidate, own in with_lineages(found) if candidate.committed), "")
