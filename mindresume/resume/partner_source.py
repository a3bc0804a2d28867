"""Partner copies at a start: a node that has lost its part of a save in memory gets it from a node
that keeps a copy.

    row, note = offer(directory, candidates, size)      # on each rank, for the others
    plan = transfers(rows, tried)                       # the same on all ranks
    fetch(job, root, plan)                              # all ranks: into the tiers of the receivers

What a node keeps of others, and what it has in its own tier of ranks that run elsewhere now, are
the same kind of offer. A received save lies in the tier of its new node as if that had saved it, so
everything that follows - selection, verification, load - knows no copies.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from mindresume import runtime
from mindresume.coordination.channel import Endpoint, Listener, connect, listen
from mindresume.coordination.collectives import Watchdog, gather_results
from mindresume.coordination.storage_topology import newest_first, order_of
from mindresume.events import Counted, Notice, PartnerFetched
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.model.manifest import parse_attempt
from mindresume.resume.sources import Job
from mindresume.saving.memory_tier.directory import (
    OWNER,
    PARTNER,
    DiskNote,
    TierOwner,
    find_tier,
    make_tier,
    memory_identity,
    owner_of,
    read_mark,
    tier_path,
)
from mindresume.saving.memory_tier.opening import groups_of
from mindresume.saving.memory_tier.partner import Keeper, push
from mindresume.storage import TEMPORARY, publish_json
from mindresume.storage.read_cache import uncached

# the offer of a node that has no memory for this training
NOTHING: dict[str, Any] = {"place": "", "receives": False, "parts": {}}
_MOST = 16  # names that one rank sends to the others


@dataclass(frozen=True)
class Transfer:
    """One part of a save that goes from one node to another. ``holder``, ``receiver``: the first
    ranks of the nodes. ``folder``: of the holder: its tier (empty), or PARTNER. ``ranks``: of whom
    the part is. ``turn``: parts that its receiver gets before it."""

    name: str
    holder: int
    folder: str
    receiver: int
    ranks: tuple[int, ...]
    turn: int = 0


def offer(
    directory: CheckpointDir, candidates: Sequence[Candidate], size: int
) -> tuple[dict[str, Any], DiskNote | None]:
    """Returns what this node has and may get, for all ranks: {``place``: its memory; ``receives``:
    whether a part can be put into its tier; ``parts``: {name of a save: {folder: ranks}}}; and the
    note of the node whose saves it keeps. Raises OSError.

    Args:
        candidates: the saves in the tier of this node.
        size: ranks of the job, which must be those of a save.
    """
    mark = read_mark(directory)
    if mark is None:
        return NOTHING, None
    kept, _ = find_tier(directory, PARTNER)
    copies = scan_records(CheckpointDir(directory.storage, kept))[0] if kept else []
    parts: dict[str, dict[str, list[int]]] = {}
    for folder, rows in (("", candidates), (PARTNER, copies)):
        for row in rows[:_MOST]:
            if row.problem is None and row.world_size == size:
                parts.setdefault(row.name, {})[folder] = sorted(row.files)
    place = ""
    with suppress(OSError):
        place = memory_identity(mark.dir)
    return (
        {"place": place, "receives": _receives(directory), "parts": parts},
        DiskNote.read(directory.storage, kept) if kept else None,
    )


def _receives(directory: CheckpointDir) -> bool:
    """Returns whether a save can be put into the tier of this node: no job is known to live that
    has it, and it belongs to ``root`` or has no content."""
    tier, problem = find_tier(directory)
    if tier:
        owner = TierOwner.read(directory.storage, tier)
        return owner is not None and not owner.is_alive
    mark = read_mark(directory)
    return (
        not problem
        or mark is not None
        and all(name.endswith(TEMPORARY) for name in directory.storage.list(tier_path(mark)))
    )


def transfers(
    rows: Sequence[dict[str, Any]],
    tried: Collection[str] = (),
    least: tuple[float, ...] = (0, 0),
) -> list[Transfer]:
    """Returns what has to be sent so that each rank finds its part of the newest save in the tier
    of its node. Empty if all ranks have it, or no node has some part.

    Args:
        rows: of ``offer``, of all ranks.
        tried: names that are not tried again.
        least: order of the oldest save that is wanted.
    """
    nodes = groups_of([row["place"] or f"rank {rank}" for rank, row in enumerate(rows)])
    names = {name for row in rows for name in row["parts"]}
    for name in newest_first(names):
        lacking = [
            rank
            for rank, row in enumerate(rows)
            if rank not in row["parts"].get(name, {}).get("", ())
        ]
        if not lacking or order_of(name) < least:
            return []
        if name not in tried and (plan := _plan(rows, nodes.leaders, name, lacking)):
            return plan
    return []


def _plan(
    rows: Sequence[dict[str, Any]], leaders: Sequence[int], name: str, lacking: Sequence[int]
) -> list[Transfer]:
    """Returns the transfers of one save; empty if some part cannot be had."""
    plan: list[Transfer] = []
    for rank in lacking:
        receiver = leaders[rank]
        if any(row.receiver == receiver and rank in row.ranks for row in plan):
            continue
        turn = sum(row.receiver == receiver for row in plan)
        holders = [
            Transfer(name, holder, folder, receiver, tuple(ranks), turn)
            for holder in sorted(set(leaders))
            for folder, ranks in rows[holder]["parts"].get(name, {}).items()
            if rank in ranks
        ]
        if not holders or not rows[receiver]["receives"]:
            return []
        # the node itself, if it kept what is its own now
        plan.append(min(holders, key=lambda row: (row.holder != row.receiver, row.holder)))
    return plan


def fetch(job: Job, root: str, plan: Sequence[Transfer]) -> None:
    """Carries out ``plan``, on all ranks together. Raises no error but those of the exchange: what
    is not fetched is not offered at the next look."""
    node = _Node(job, CheckpointDir(uncached(job.storage), root), plan)
    try:
        node.endpoints = gather_results(job.group, node.listen)
        rows: list[Any] = []
        # a node receives one part after the other
        for turn in range(max(row.turn for row in plan) + 1):
            watchdog = Watchdog("fetching saves from partner nodes", node.sent)
            rows += gather_results(job.group, partial(node.send, turn), watchdog)
    finally:
        if node.listener is not None:
            node.listener.close()
    for row in rows:
        for text, event in row or ():
            if text:
                job.emit(Notice(text))
            else:
                job.emit(PartnerFetched(**{**event, "ranks": tuple(event["ranks"])}))


@dataclass
class _Node:
    """What one rank does for a plan. ``endpoints``: by rank, of the receivers; a text: why not.
    ``sent``: bytes."""

    job: Job
    directory: CheckpointDir
    plan: Sequence[Transfer]
    listener: Listener | None = None
    endpoints: Sequence[Any] = ()
    sent: Counted = field(default_factory=Counted)

    def listen(self) -> Any:
        rank = self.job.group.rank
        if all(row.receiver != rank for row in self.plan):
            return None
        try:
            keeper = Keeper(self._tier(), keeps_last=False)
            self.listener = listen(keeper.serve, self.job.sources.partner_port)
        except Exception as error:  # any error: the disk is taken
            return str(error)
        return self.listener.endpoint

    def _tier(self) -> CheckpointDir:
        """Returns the tier of this node, which may have to be made. Its owner counts as dead."""
        storage, (tier, _), mark = (
            self.directory.storage,
            find_tier(self.directory),
            read_mark(self.directory),
        )
        if not tier and mark is not None:
            tier = tier_path(mark)
            make_tier(tier)
            _, run = parse_attempt(self.plan[0].name) or (0, "")
            owner = owner_of(self.directory, mark, run, [])
            publish_json(storage, os.path.join(tier, OWNER), asdict(owner), run)
        return CheckpointDir(storage, tier)

    def send(self, turn: int) -> list[Any]:
        """Returns (why it was not sent, else the fields of an event) of each part that this rank
        has to send in this turn."""
        rank = self.job.group.rank
        return [self._send(row) for row in self.plan if (row.holder, row.turn) == (rank, turn)]

    def _send(self, row: Transfer) -> tuple[str, dict[str, Any]]:
        step, _ = parse_attempt(row.name) or (0, "")
        began = runtime.monotonic()
        try:
            tier, problem = find_tier(self.directory, row.folder)
            source = CheckpointDir(self.directory.storage, tier)
            found = scan_records(source)[0] if tier else []
            candidate = next((one for one in found if one.name == row.name), None)
            endpoint = self.endpoints[row.receiver]
            if candidate is None or isinstance(endpoint, str):
                raise OSError(problem or (endpoint if candidate else f"{row.name} is gone"))
            # that node may just have got other parts
            files = {rank: candidate.files[rank] for rank in row.ranks}
            channel = connect(Endpoint(*endpoint))
            try:
                candidate = replace(candidate, files=files)
                size = push(channel, source, candidate, progress=self.sent)
            finally:
                channel.close()
        except Exception as error:  # any error: the disk is taken
            return (
                f"step {step}: the node of rank {row.receiver} does not get its part from the node "
                f"of rank {row.holder}: {error}",
                {},
            )
        seconds = runtime.monotonic() - began
        return "", asdict(PartnerFetched(step, row.ranks, row.holder, size, seconds))
