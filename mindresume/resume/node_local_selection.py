"""Selects the checkpoint of a resume where nodes share no storage: the newest that every rank finds in its own folder.

    each rank    scan of its own folder ─▶ candidates whose files for this rank pass the cheap checks ─▶ their names to all
    all ranks    the first name, in the order of rank 0, that all ranks have ─▶ each verifies its files ─▶ all verdicts to all
    all ranks    every verdict good: take it; else the next name that all have

``mindresume.resume.selector`` selects in a folder that all ranks see. Both return a ``Choice``.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from mindresume.coordination.collectives import Group, Waiting, report
from mindresume.errors import MissingCheckpointError, NoUsableCheckpointError
from mindresume.formats import Candidate, Refusal, Scan
from mindresume.formats.rank_folder_naming import parse_name
from mindresume.formatting import listed
from mindresume.resume.health import is_unhealthy
from mindresume.resume.selection_policy import SelectionPolicy
from mindresume.resume.selector import Choice, advisories_of, candidates_for, forget_kept, verify_on_all_ranks
from mindresume.storage.interface import Storage

_NEWEST = 64                    # names of checkpoints that one rank sends to the others


@dataclass
class _LocalCheckpoints:
    """The checkpoints in the folder of one rank. ``offers``: usable ones by name, newest first. ``is_explicit``: as of
    ``candidates_for``."""
    found: Scan
    is_explicit: bool
    offers: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)


def select_node_local(storage: Storage, path: str, group: Group, policy: SelectionPolicy | None = None) -> Choice:
    """Selects the newest checkpoint that every rank finds in its own ``path`` and has verified.

    Args:
        policy: as of ``select.select``. The job has as many ranks as the checkpoint, each verifies its own, and failed loads are
            not counted. Of ``unhealthy`` the names that rank 0 knows count.
    Raises:
        NoUsableCheckpointError: on all ranks, if there are checkpoints, but none that all ranks can use.
        MissingCheckpointError: on all ranks, if the requested checkpoint is not one of those.
    """
    policy, complete = policy or SelectionPolicy(), (policy or SelectionPolicy()).verifies_bytes
    local: list[_LocalCheckpoints] = []

    def look() -> dict[str, object]:
        here = _look(storage, path, group, policy)
        local.append(here)
        return {"offers": list(here.offers)[:_NEWEST], "maybe_completed": any(c.maybe_completed for c in here.found.candidates),
                "is_explicit": here.is_explicit, "fresh_start_refusal": here.found.fresh_start_refusal}
    rows = report(group, look, Waiting(f"looking at the checkpoints below {path}"))
    mine, tried = local[0], []
    common = set.intersection(*(set(row["offers"]) for row in rows))
    for name in [name for name in rows[0]["offers"] if name in common]:
        candidate = mine.offers[name]
        forget_kept(storage)
        verdicts, shards, lost = verify_on_all_ranks(storage, mine.found.root, candidate, [group.rank], group, None, complete)
        if not verdicts:
            return Choice(candidate, tuple(tried), tuple(mine.found.notes), False, shards, mine.found.root, complete,
                          advisories_of(storage, mine.found.root, candidate, lost, group))
        tried.append(verdicts[0])
    lacking = [*tried, *_lacking(rows, mine.refused)]
    if rows[0]["is_explicit"]:
        raise MissingCheckpointError(_text("the requested checkpoint cannot be used by all ranks", lacking),
                                     tuple(lacking))
    if any(row["maybe_completed"] for row in rows):
        raise NoUsableCheckpointError(
            _text(f"nodes share no disk, and no checkpoint below {path} is there for all ranks", lacking) +
            "\nStart the nodes in the order of the job that saved, bring the folders of all of them together on a shared disk, "
            "or, to start afresh, set resume_training: False", tuple(lacking))
    for rank, row in enumerate(rows):
        if row["fresh_start_refusal"]:
            raise MissingCheckpointError(f"rank {rank}: {row['fresh_start_refusal']}")
    return Choice(None, tuple(mine.refused), tuple(mine.found.notes), True, (), mine.found.root, complete)


def _look(storage: Storage, path: str, group: Group, policy: SelectionPolicy) -> _LocalCheckpoints:
    try:
        found, is_explicit = candidates_for(storage, path, policy.requested, group.size)
    except MissingCheckpointError:                          # other ranks may have it
        return _LocalCheckpoints(Scan(path, exists=False), True)
    own = _LocalCheckpoints(found, is_explicit)
    for candidate in found.candidates:
        refusal = candidate.problem or _for_rank(candidate, group)
        if candidate.records_dir is None:                       # the scan counted only the files of this node
            candidate = replace(candidate, world_size=group.size)
        if refusal is None and policy.unhealthy is not None and not is_explicit and is_unhealthy(candidate, policy.unhealthy):
            refusal = candidate.refuse("it was unhealthy when it was saved")
        if refusal is None:
            own.offers.setdefault(_name(candidate), candidate)
        else:
            own.refused.append(refusal)
    return own


def _for_rank(candidate: Candidate, group: Group) -> Refusal | None:
    if candidate.iteration_dir:
        return candidate.refuse("an iteration folder needs a disk that all nodes share", candidate.iteration_dir)
    if candidate.records_dir and candidate.world_size != group.size:
        return candidate.refuse(f"saved by {candidate.world_size} ranks, this job has {group.size}; another number of ranks "
                                f"needs a disk that all nodes share")
    if candidate.records_dir is None and max(candidate.files) >= group.size:
        return candidate.refuse(f"saved by at least {max(candidate.files) + 1} ranks, this job has {group.size}; another number "
                                f"of ranks needs a disk that all nodes share", rank=max(candidate.files))
    if group.rank not in candidate.files:
        return candidate.refuse(f"this node holds files of rank {listed(sorted(candidate.files))}, none of rank {group.rank}",
                                rank=group.rank)
    return None


def _name(candidate: Candidate) -> str:
    """Returns a name that is the same on all nodes: that of the folder of records, or of mindformers' files without the rank."""
    if candidate.records_dir:
        return candidate.name
    name = os.path.basename(candidate.first.path)
    parsed = parse_name(name)
    return f"{candidate.step} {parsed._replace(rank=0) if parsed else ''}"


def _lacking(rows: list[dict[str, object]], refused: list[Refusal]) -> list[Refusal]:
    """Returns what each group of ranks has, where it differs, then why this rank refused its newest checkpoints."""
    by_offers: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        by_offers.setdefault(", ".join(row["offers"][:3]) or "nothing usable", []).append(rank)
    groups = [Refusal(None, f"rank {listed(ranks)}: {offers}", rank=ranks[0]) for offers, ranks in by_offers.items()]
    return [*(groups if len(groups) > 1 else ()), *refused[:3]]


def _text(what: str, refusals: list[Refusal]) -> str:
    return f"{what}:\n" + "\n".join(f"  {refusal}" for refusal in refusals)
