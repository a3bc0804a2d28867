"""Choosing the checkpoint of a resume where nodes share no disk: the newest that every rank finds on its own.

    each   scan of its own folder ─▶ what passes the cheap proof for its own rank ─▶ names of these to all
    all    the first, in the order of rank 0, that all ranks have ─▶ complete proof of own files ─▶ all verdicts to all
    all    every verdict good: take it; else the next one that all have

``mindresume.resume.select`` is for a folder that all ranks see; this gives the same ``Choice``.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from mindresume.agree import Group, Waiting, report
from mindresume.errors import MissingCheckpointError, NoUsableCheckpointError
from mindresume.formats import Candidate, Refusal, Scan
from mindresume.formats.names import parse_name
from mindresume.formats.records import listed
from mindresume.resume.health import is_sick
from mindresume.resume.select import Choice, candidates_for, forget_kept, proven_by_all, remarks_of
from mindresume.resume.selection_policy import SelectionPolicy
from mindresume.store.storage import Storage

_NEWEST = 64                    # checkpoints of one rank that the others are told of


@dataclass
class _Own:
    """What one rank finds. ``offers``: by name, newest first."""
    found: Scan
    insists: bool
    offers: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)


def select_apart(storage: Storage, path: str, group: Group, policy: SelectionPolicy | None = None) -> Choice:
    """Chooses the newest checkpoint that every rank finds in its own ``path`` and has verified.

    Args:
        policy: as of ``select.select``. The job has as many ranks as the checkpoint, each verifies its own, and failed loads are
            not counted. Of ``unhealthy`` the names that rank 0 knows count.
    Raises:
        NoUsableCheckpointError: on all ranks, if there are checkpoints, but none that all ranks can use.
        MissingCheckpointError: on all ranks, if the requested checkpoint is not one of those.
    """
    policy, complete = policy or SelectionPolicy(), (policy or SelectionPolicy()).verifies_bytes
    own: list[_Own] = []

    def look() -> dict[str, object]:
        own.append(_look(storage, path, group, policy))
        return {"offers": list(own[0].offers)[:_NEWEST], "existed": any(c.existed for c in own[0].found.candidates),
                "insists": own[0].insists, "strange": own[0].found.strange}
    rows = report(group, look, Waiting(f"looking at the checkpoints below {path}"))
    mine, tried = own[0], []
    common = set.intersection(*(set(row["offers"]) for row in rows))
    for name in [name for name in rows[0]["offers"] if name in common]:
        candidate = mine.offers[name]
        forget_kept(storage)
        verdicts, shards, lost = proven_by_all(storage, mine.found.root, candidate, [group.rank], group, None, complete)
        if not verdicts:
            return Choice(candidate, tuple(tried), tuple(mine.found.notes), False, shards, mine.found.root, complete,
                          remarks_of(storage, mine.found.root, candidate, lost, group))
        tried.append(verdicts[0])
    lacking = [*tried, *_lacking(rows, mine.refused)]
    if rows[0]["insists"]:
        raise MissingCheckpointError(_text("the checkpoint that was asked for cannot be used by all ranks", lacking),
                                     tuple(lacking))
    if any(row["existed"] for row in rows):
        raise NoUsableCheckpointError(
            _text(f"nodes share no disk, and no checkpoint below {path} is there for all ranks", lacking) +
            "\nStart the nodes in the order of the job that saved, bring the folders of all of them together on a shared disk, "
            "or, to start afresh, set resume_training: False", tuple(lacking))
    for rank, row in enumerate(rows):
        if row["strange"]:
            raise MissingCheckpointError(f"rank {rank}: {row['strange']}")
    return Choice(None, tuple(mine.refused), tuple(mine.found.notes), True, (), mine.found.root, complete)


def _look(storage: Storage, path: str, group: Group, policy: SelectionPolicy) -> _Own:
    try:
        found, insists = candidates_for(storage, path, policy.requested, group.size)
    except MissingCheckpointError:                          # others may have it; the common choice tells
        return _Own(Scan(path, exists=False), True)
    own = _Own(found, insists)
    for candidate in found.candidates:
        refusal = candidate.problem or _for_rank(candidate, group)
        if candidate.attempt is None:                       # only files were counted, and those of this node
            candidate = replace(candidate, world_size=group.size)
        if refusal is None and policy.unhealthy is not None and not insists and is_sick(candidate, policy.unhealthy):
            refusal = candidate.refuse("it was unhealthy when it was saved")
        if refusal is None:
            own.offers.setdefault(_name(candidate), candidate)
        else:
            own.refused.append(refusal)
    return own


def _for_rank(candidate: Candidate, group: Group) -> Refusal | None:
    if candidate.base:
        return candidate.refuse("an iteration folder needs a disk that all nodes share", candidate.base)
    if candidate.attempt and candidate.world_size != group.size:
        return candidate.refuse(f"saved by {candidate.world_size} ranks, this job has {group.size}; another number of ranks "
                                f"needs a disk that all nodes share")
    if candidate.attempt is None and max(candidate.files) >= group.size:
        return candidate.refuse(f"saved by at least {max(candidate.files) + 1} ranks, this job has {group.size}; another number "
                                f"of ranks needs a disk that all nodes share", rank=max(candidate.files))
    if group.rank not in candidate.files:
        return candidate.refuse(f"this node holds files of rank {listed(sorted(candidate.files))}, none of rank {group.rank}",
                                rank=group.rank)
    return None


def _name(candidate: Candidate) -> str:
    """The same on all nodes: of its folder of records, or of mindformers' the name of its files without the rank."""
    if candidate.attempt:
        return candidate.name
    name = os.path.basename(candidate.first.path)
    parsed = parse_name(name)
    return f"{candidate.step} {parsed._replace(rank=0) if parsed else ''}"


def _lacking(rows: list[dict[str, object]], refused: list[Refusal]) -> list[Refusal]:
    """What each group of ranks has, where it differs; then why this rank refused its newest."""
    by_offers: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        by_offers.setdefault(", ".join(row["offers"][:3]) or "nothing that it can use", []).append(rank)
    groups = [Refusal(None, f"rank {listed(ranks)}: {offers}", rank=ranks[0]) for offers, ranks in by_offers.items()]
    return [*(groups if len(groups) > 1 else ()), *refused[:3]]


def _text(what: str, refusals: list[Refusal]) -> str:
    return f"{what}:\n" + "\n".join(f"  {refusal}" for refusal in refusals)
