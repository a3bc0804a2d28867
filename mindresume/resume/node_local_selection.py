"""Selects the checkpoint of a resume where nodes share no storage: the newest that every rank finds in its own folder.

    each rank    scan its own folder ─▶ candidates whose files for this rank pass the cheap checks ─▶ gather their names
    all ranks    the first name, in the order of rank 0, that all ranks have ─▶ each verifies its files ─▶ gather the refusals
    all ranks    no refusal: take it; else the next name that all ranks have

``mindresume.resume.shared_selection`` selects in a folder that all ranks see. Both return a ``Choice``.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from mindresume.coordination.collectives import Group, Watchdog, gather_results
from mindresume.errors import MissingCheckpointError, NoUsableCheckpointError
from mindresume.formats import Candidate, Refusal, Scan
from mindresume.formats.rank_folder_naming import parse_name
from mindresume.formats.scrub_result import known_damage
from mindresume.formatting import listed, ranks_count
from mindresume.resume.candidates import find_candidates
from mindresume.resume.choice import Choice
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.group_verification import collect_warnings, drop_cached_files, verify_on_all_ranks
from mindresume.resume.health import is_unhealthy
from mindresume.storage.interface import Storage

_MAX_OFFERS = 64                # names of checkpoints that one rank sends to the others


@dataclass
class _LocalCheckpoints:
    """The checkpoints in the folder of one rank. ``offers``: usable ones by name, newest first. ``is_explicit``: see
    ``find_candidates``."""
    found: Scan
    is_explicit: bool
    offers: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)


def select_node_local(storage: Storage, path: str, group: Group, policy: SelectionPolicy | None = None) -> Choice:
    """Selects the newest checkpoint that every rank finds in its own ``path`` and has verified.

    Args:
        policy: see ``SelectionPolicy``. The job must have as many ranks as the checkpoint, each rank verifies its own files, and
            failed loads are not counted. ``unhealthy`` is known to rank 0 only.
    Raises:
        NoUsableCheckpointError: on all ranks, if there are checkpoints, but none that all ranks can use.
        MissingCheckpointError: on all ranks, unless all of them can use the requested checkpoint.
    """
    policy = policy or SelectionPolicy()
    local: list[_LocalCheckpoints] = []

    def scan_local() -> dict[str, object]:
        here = _scan_local(storage, path, group, policy)
        local.append(here)
        return {"offers": list(here.offers)[:_MAX_OFFERS], "maybe_completed": any(c.maybe_completed
            for c in here.found.candidates),
                "is_explicit": here.is_explicit, "fresh_start_refusal": here.found.fresh_start_refusal}
    rows = gather_results(group, scan_local, Watchdog(f"scanning the checkpoints below {path}"))
    mine, refused = local[0], []
    common = set.intersection(*(set(row["offers"]) for row in rows))
    for name in [name for name in rows[0]["offers"] if name in common]:
        candidate = mine.offers[name]
        drop_cached_files(storage)
        refusals, shards, missing = verify_on_all_ranks(storage, mine.found.root, candidate, [group.rank], group, None,
                                                         policy.verifies_bytes)
        if not refusals:
            return Choice(candidate, tuple(refused), tuple(mine.found.notes), False, shards, mine.found.root,
                          policy.verifies_bytes, collect_warnings(storage, mine.found.root, candidate, missing, group))
        refused.append(refusals[0])
    refused += _differences(rows, mine.refused)
    if rows[0]["is_explicit"]:
        raise MissingCheckpointError(_text("the requested checkpoint cannot be used by all ranks", refused),
                                     tuple(refused))
    if any(row["maybe_completed"] for row in rows):
        raise NoUsableCheckpointError(
            _text(f"nodes share no disk, and no checkpoint below {path} exists for all ranks", refused) +
            "\nStart the nodes in the same order as in the job that saved, copy the folders of all nodes to one shared disk, "
            "or, to start afresh, set resume_training: False", tuple(refused))
    for rank, row in enumerate(rows):
        if row["fresh_start_refusal"]:
            raise MissingCheckpointError(f"rank {rank}: {row['fresh_start_refusal']}")
    return Choice(None, tuple(mine.refused), tuple(mine.found.notes), True, (), mine.found.root, policy.verifies_bytes)


def _scan_local(storage: Storage, path: str, group: Group, policy: SelectionPolicy) -> _LocalCheckpoints:
    """Returns the checkpoints below ``path`` as this rank sees them, split into usable and refused ones."""
    try:
        found, is_explicit = find_candidates(storage, path, policy.requested, group.size)
    except MissingCheckpointError:                          # other ranks may have it
        return _LocalCheckpoints(Scan(path, exists=False), True)
    own = _LocalCheckpoints(found, is_explicit)
    for candidate in found.candidates:
        refusal = candidate.problem or known_damage(storage, found.root, candidate) or _refuse_for_rank(candidate, group)
        if candidate.records_dir is None:                       # the scan counted only the files of this node
            candidate = replace(candidate, world_size=group.size)
        if refusal is None and policy.unhealthy is not None and not is_explicit and is_unhealthy(candidate, policy.unhealthy):
            refusal = candidate.refuse("it was unhealthy when it was saved")
        if refusal is None:
            own.offers.setdefault(_name(candidate), candidate)
        else:
            own.refused.append(refusal)
    return own


def _refuse_for_rank(candidate: Candidate, group: Group) -> Refusal | None:
    """Returns why this rank cannot load the candidate from a disk that other nodes do not see; None if it can."""
    if candidate.iteration_dir:
        return candidate.refuse("an iteration folder needs a disk that all nodes share", candidate.iteration_dir)
    if candidate.records_dir and candidate.world_size != group.size:
        return candidate.refuse(f"saved by {ranks_count(candidate.world_size)}, this job has {group.size}; another number of "
                                f"ranks needs a disk that all nodes share")
    if candidate.records_dir is None and max(candidate.files) >= group.size:
        return candidate.refuse(f"saved by at least {max(candidate.files) + 1} ranks, this job has {group.size}; another number "
                                f"of ranks needs a disk that all nodes share", rank=max(candidate.files))
    if group.rank not in candidate.files:
        return candidate.refuse(f"this node holds files of rank {listed(sorted(candidate.files))}, none of rank {group.rank}",
                                rank=group.rank)
    return None


def _name(candidate: Candidate) -> str:
    """Returns a name that is the same on all nodes: the name of the folder of records, or of mindformers' files without the
    rank."""
    if candidate.records_dir:
        return candidate.name
    name = os.path.basename(candidate.first.path)
    parsed = parse_name(name)
    return f"{candidate.step} {parsed._replace(rank=0) if parsed else ''}"


def _differences(rows: list[dict[str, object]], refused: list[Refusal]) -> list[Refusal]:
    """Returns which checkpoints each group of ranks has, if they differ, then why this rank refused its newest ones."""
    by_offers: dict[str, list[int]] = {}
    for rank, row in enumerate(rows):
        by_offers.setdefault(", ".join(row["offers"][:3]) or "nothing usable", []).append(rank)
    groups = [Refusal(None, f"rank {listed(ranks)}: {offers}", rank=ranks[0]) for offers, ranks in by_offers.items()]
    return [*(groups if len(groups) > 1 else ()), *refused[:3]]


def _text(problem: str, refusals: list[Refusal]) -> str:
    return f"{problem}:\n" + "\n".join(f"  {refusal}" for refusal in refusals)
