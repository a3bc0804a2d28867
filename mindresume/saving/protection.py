"""Protects checkpoints from retention, whatever its policy says, each with a reason.

    not_counted(found, lineage)                # {commit_dir of a candidate: reasons}; ``found``: saves with records, newest first
    protected(storage, root, counted)          # the same, of the others

A rule yields the candidates that must stay, each with a reason that reads well after "kept:". For a new reason, write a rule and
add it to RULES: every removal (after a commit, by ``mindresume prune``) obeys it. Policies count protected checkpoints like
others; ``not_counted`` returns those that they do not count. A file that a rule cannot read protects every checkpoint that it may
be about.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mindresume.coordination.storage_topology import protected_by_peers
from mindresume.formats import Candidate
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.formats.iteration_naming import TRACKER, parse_iteration
from mindresume.formats.iteration_scan import tracked
from mindresume.formats.rank_folder_naming import META, folder_name
from mindresume.formats.scrub_result import known_damage
from mindresume.formats.weight_files import sizes_match
from mindresume.saving.crash_loop import load_attempts
from mindresume.saving.lineage import others
from mindresume.storage.operations import read_json

Reasons = Mapping[str, list[str]]
Rule = Callable[[CheckpointDir, Sequence[Candidate]], Iterable[tuple[Candidate, str]]]

NEWEST_WHOLE = "the newest one that is whole"
NEWEST_HEALTHY = "the newest one that is healthy"
ANOTHER_TRAINING = "of another training"


def not_counted(found: Sequence[Candidate], lineage: str | None) -> Reasons:
    """Returns the candidates that no policy counts: iteration folders copied or renamed by hand, which no resume selects and a
    person may need, and checkpoints of another training than ``lineage`` (None: of any)."""
    aside = {c.commit_dir: [f"{c.iteration_dir} is a copy, or was renamed by hand: it holds step {c.step}"] for c in found
             if parse_iteration(c.iteration_dir) not in (None, c.step)}
    for candidate in others(found, lineage) if lineage is not None else ():
        aside.setdefault(candidate.commit_dir, []).append(ANOTHER_TRAINING)
    return aside


def is_whole(directory: CheckpointDir, candidate: Candidate) -> bool:
    """Returns whether it is committed, its files have the recorded sizes, and no scrub found one of them damaged. Reads no
    contents."""
    return candidate.committed and candidate.problem is None and sizes_match(
        directory, [*candidate.all_files, *candidate.metadata_files]) and known_damage(directory, candidate) is None


def newest_whole(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields the newest whole one. Where directories of several nodes were merged, also the newest whole one of all ranks."""
    candidate = next((c for c in found if is_whole(directory, c)), None)
    if candidate is not None:
        yield candidate, NEWEST_WHOLE
    if candidate is not None and candidate.local_ranks:
        of_all = next((c for c in found if not c.local_ranks and is_whole(directory, c)), None)
        if of_all is not None:
            yield of_all, "the newest one of all ranks"


def newest_healthy(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields the newest healthy one, if mindformers' health monitor has marked some as unhealthy: a resume skips those."""
    if any(c.health for c in found if c.committed):
        candidate = next((c for c in found if not c.health and is_whole(directory, c)), None)
        if candidate is not None:
            yield candidate, NEWEST_HEALTHY


def named_by_tracker(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields the one that the tracker names: it may have been set back by hand."""
    step = tracked(directory)
    for candidate in found if step is not None else ():
        if candidate.iteration_dir and candidate.committed and candidate.step == step:
            yield candidate, f"{TRACKER} names it"


def named_by_meta(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields the one that ``meta.json`` names, which mindformers without mindresume loads. A job updates it after the commit."""
    committed = [c for c in found if c.committed and c.files and not c.iteration_dir]
    for rank in sorted({min(c.files) for c in committed}):
        folder = folder_name(rank)
        try:
            path = f"{folder}/{read_json(directory.storage, directory.path(folder, META))['last_ckpt_file']}"
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ValueError, KeyError, TypeError):
            continue                                            # it names no checkpoint, or cannot be read
        # A name can have been used twice: the newest. The newest of all stays in any case.
        candidate = next((c for c in committed if any(file.path == path for file in c.files.get(rank, ()))), None)
        if candidate not in (None, committed[0]):
            yield candidate, f"{folder}/{META} names it"


def common_to_all_nodes(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields those that are common to all nodes, or newer. An incomplete save is a checkpoint on no node."""
    names = protected_by_peers(directory)
    for candidate in found:
        if candidate.maybe_completed and candidate.name in names:
            yield candidate, names[candidate.name]


def with_failed_loads(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields those with failed loads: a suspicion may be wrong, so a person has to check it first."""
    rows = load_attempts(directory)
    for candidate in found:
        if rows.get(candidate.name, ()) != ():
            yield candidate, "a job died right after it had loaded it"


def not_looked_into(directory: CheckpointDir, found: Sequence[Candidate]) -> Iterator[tuple[Candidate, str]]:
    """Yields those that cannot be read: each may be whole and the newest."""
    for candidate in found:
        if candidate.listing_error:
            yield candidate, candidate.listing_error


RULES: tuple[Rule, ...] = (newest_whole, newest_healthy, named_by_tracker, named_by_meta, common_to_all_nodes, with_failed_loads,
                           not_looked_into)


def protected(directory: CheckpointDir, found: Sequence[Candidate]) -> Reasons:
    """Returns {commit_dir: reasons} by all rules. Raises OSError if the directory cannot be read: then nothing is removed now."""
    stays: dict[str, list[str]] = {}
    for rule in RULES:
        for candidate, why in rule(directory, found):
            stays.setdefault(candidate.commit_dir, []).append(why)
    return stays
