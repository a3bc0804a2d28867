"""The saves in memory of the nodes: a job takes one if all ranks have it whole and nothing newer
lies on disk or in the bucket.

    each rank    the tier of its node ─▶ whole saves that it could load ─▶ gather their names
    rank 0       the newest checkpoint on disk and in the bucket, by names and records
    all ranks    ``newest``: saves that all ranks have, newest first, as long as none elsewhere is
        newer ─▶ each rank verifies
                 what it will load
    else         the selection on disk; then ``newer_than`` or ``last_resort``: saves that are newer
                 than what it could verify

The order is that of the disk: by the number of the run, then by the step, without clocks. A save
whose bytes are not those that were written is refused, and its record is removed, so no later start
reads it again.

A training that is complete with such a save, and ``mindresume flush``, write it to disk: files and
records have the same format there.

    copy = DiskCopy(directory, tier, candidate)
    copy.write();  copy.commit()
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from xxhash import xxh3_128

from mindresume import runtime
from mindresume.coordination.collectives import (
    Group,
    Watchdog,
    gather_results,
    run_on_all,
    run_on_rank0,
)
from mindresume.coordination.storage_topology import SharedGroups, newest_first, order_of
from mindresume.errors import RemoteError, SaveError, UnusableCheckpointError
from mindresume.events import SILENT, Notice, Progress
from mindresume.formats import OURS, Candidate, CheckpointDir, Refusal
from mindresume.formats.bad_steps import BadStep
from mindresume.formats.iterations import iteration_name
from mindresume.formats.records import scan_records
from mindresume.formats.scan import find_candidates
from mindresume.formats.weight_files import is_as_recorded
from mindresume.formatting import listed, ranks_count
from mindresume.model.manifest import (
    FOLDER,
    FileRecord,
    parse_attempt,
    read_details,
    record_name,
    run_sequence,
)
from mindresume.resume.eligible import Choice, check_files, eligible
from mindresume.resume.partner_source import NOTHING, fetch, offer, transfers
from mindresume.resume.sources import Job, drop_cached_files, verify_on_all_ranks
from mindresume.saving.committer import Committer
from mindresume.saving.crash_loop import failed_loads_by_key, key_of
from mindresume.saving.memory_tier.directory import DiskNote, TierOwner, find_tier, memory_identity
from mindresume.saving.memory_tier.opening import groups_of
from mindresume.saving.memory_tier.slots import path_on_disk
from mindresume.saving.replication import copy_files
from mindresume.saving.shard_writer import SaveTarget, is_committed
from mindresume.storage import Storage, publish
from mindresume.storage.read_cache import ReadCache, uncached
from mindresume.tensor_files.header import CHUNK
from mindresume.typed import decode

# names of saves that one rank sends to the others; a tier holds three of each run
_MAX_OFFERS = 16
_IN_MEMORY = "in memory of the nodes"


@dataclass
class MemorySource:
    """The tiers in memory of the nodes. All ranks use it in the same way: ``newest`` first.

    Args:
        job: who selects.
        root: the checkpoint directory, in which the job saves.
        tier: of this node.
        offers: the saves there, by name.
        names: saves that all ranks may take, newest first.
        least: order of the newest checkpoint elsewhere.
        bad_steps: of the checkpoint directory on disk.
    """

    job: Job
    root: str
    tier: str = ""
    offers: dict[str, Candidate] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)
    note: DiskNote | None = None
    names: list[str] = field(default_factory=list)
    least: tuple[float, ...] = (0, 0)
    bad_steps: tuple[BadStep, ...] = ()

    def newest(self) -> Choice | None:
        """Returns the newest save that all ranks have verified, unless a newer checkpoint lies
        elsewhere."""
        rows = self._rows()
        if self.job.sources.partner:
            rows = self._with_copies(rows)
        for text in dict.fromkeys(row["problem"] for row in rows if row["problem"]):
            self.job.emit(Notice(f"saves {_IN_MEMORY} are not considered: {text}"))
        seen = {name for row in rows for name in row["offers"]}
        if not seen:
            self.refused += [Refusal(**row) for row in rows[0]["refused"]]
            return None
        # A node that has got all parts, at this start or an earlier one, loads its own one, as the
        # others do.
        for name, candidate in self.offers.items():
            if any(row["offers"].get(name) for row in rows):
                self.offers[name] = replace(candidate, local_ranks=tuple(candidate.files))
        nodes = groups_of([row["node"] or f"rank {rank}" for rank, row in enumerate(rows)])
        if self.tier:
            self.job.sources.memory[os.path.realpath(self.tier)] = nodes
        common = []
        for name in newest_first(seen):
            missing = [rank for rank, row in enumerate(rows) if name not in row["offers"]]
            if not missing:
                common.append(name)
            elif not common:
                self.refused.append(
                    Refusal(
                        parse_attempt(name)[0],
                        f"{_IN_MEMORY} rank {listed(missing)} does not have it whole",
                    )
                )
        newest = order_of(common[0])[1] if common else 0
        self.refused += [
            Refusal(**row) for row in rows[0]["refused"] if (row["step"] or 0) > newest
        ]
        if not common:
            return None
        elsewhere = self._elsewhere()
        if elsewhere["reason"]:
            self.job.emit(Notice(f"saves {_IN_MEMORY} are not considered: {elsewhere['reason']}"))
            return None
        self.least = tuple(elsewhere["order"] or (0, 0))
        self.bad_steps = decode(tuple[BadStep, ...], elsewhere["bad_steps"], "bad steps")
        self.names = [name for name in common if self._is_allowed(name, elsewhere["run"])]
        return self._first_verified([name for name in self.names if order_of(name) >= self.least])

    def last_resort(self) -> Choice | None:
        """Returns the newest save that all ranks have verified, as there is nothing else; emits
        why, if there is none."""
        choice = self._first_verified([*self.names, *self.suspected])
        # the error of the disk lists only checkpoints on disk
        if choice is None:
            for row in self.refused:
                self.job.emit(Notice(f"step {row.step}: {row.reason}"))
        return choice

    def newer_than(self, elsewhere: Choice) -> Choice:
        """Returns a save that is newer than the choice ``elsewhere``, or precedes a fresh start;
        else that choice."""
        chosen, choice = elsewhere.chosen, None
        if chosen is None:
            choice = self._first_verified([*self.names, *self.suspected])
        elif chosen.order[:2] < self.least:
            # what is newer on disk cannot be used
            choice = self._first_verified(
                [name for name in self.names if chosen.order[:2] < order_of(name) < self.least]
            )
        if choice is not None:
            return replace(choice, refused=(*choice.refused, *elsewhere.refused))
        newer = [
            row for row in self.refused if chosen is None or (row.step or 0) >= (chosen.step or 0)
        ]
        return replace(elsewhere, refused=(*newer, *elsewhere.refused))

    # ---- what there is ---------------------------------------------------------------------------

    def _rows(self) -> list[Any]:
        """Returns what all ranks find in their tiers, and keeps the newest note."""
        rows = gather_results(self.job.group, self._look, Watchdog("looking at the tier in memory"))
        notes = [DiskNote(**row["note"]) for row in rows if row["note"]]
        self.note = max(notes, key=attrgetter("order"), default=None)
        return rows

    def _with_copies(self, rows: list[Any]) -> list[Any]:
        """Returns ``rows`` after nodes have got from others what they lack of a save that is newer
        than all that they have, and than what lies elsewhere."""
        fetched: set[str] = set()
        if not transfers([row["copies"] or NOTHING for row in rows]):
            return rows
        elsewhere = self._elsewhere()
        # a run that has left a note has given up what earlier runs had in memory
        noted = self.note.order[0] if self.note is not None else 0
        least = max(tuple(elsewhere["order"] or (0, 0)), (noted, 0))
        while not elsewhere["reason"] and (
            plan := transfers([row["copies"] or NOTHING for row in rows], fetched, least)
        ):
            fetched.add(plan[0].name)
            fetch(self.job, self.root, plan)
            rows = self._rows()
        return rows

    def _look(self) -> dict[str, Any]:
        """Returns the saves of this node that this rank can use, and why it refuses others."""
        refused: list[Refusal] = []
        storage = uncached(self.job.storage)
        note = None
        copies = None
        node = ""
        self.offers.clear()
        try:
            directory = CheckpointDir(storage, self.root)
            self.tier, problem = find_tier(directory)
            found = scan_records(CheckpointDir(storage, self.tier))[0] if self.tier else []
            if self.job.sources.partner:
                copies, note = offer(directory, found, self.job.group.size)
            if self.tier:
                for candidate in found[:_MAX_OFFERS]:
                    refusal = candidate.problem or self._why_not(candidate)
                    if refusal is None:
                        self.offers[candidate.name] = candidate
                    elif candidate.files or not candidate.problem:
                        refused.append(replace(refusal, reason=f"{_IN_MEMORY}: {refusal.reason}"))
                notes = filter(None, (note, DiskNote.read(storage, self.tier)))
                note = max(notes, key=attrgetter("order"), default=None)
                node = memory_identity(self.tier)
        except OSError as error:
            # no error of the tier keeps a job from its checkpoints on disk
            self.offers.clear()
            self.tier, copies = "", None
            problem = f"the tier in memory cannot be read: {error}"
            refused = []
        return {
            "node": node,
            # {name: whether other nodes have parts of it}
            "offers": {name: bool(row.local_ranks) for name, row in self.offers.items()},
            "refused": refused,
            "problem": problem,
            "note": asdict(note) if note is not None else None,
            "copies": copies,
        }

    def _why_not(self, candidate: Candidate) -> Refusal | None:
        """Returns why this rank cannot load a whole save of its node."""
        policy, group = self.job.policy, self.job.group
        if candidate.local_ranks and (
            self.job.sources.is_preview or policy.any_layout and not candidate.iteration_dir
        ):
            return candidate.refuse(
                f"this node has rank {listed(candidate.local_ranks)} of {candidate.world_size}"
                + (
                    "; the job takes it if the other nodes have their parts, or copies of them"
                    if self.job.sources.is_preview
                    else ", and regions of tensors are read from all ranks"
                )
            )
        if policy.world_size not in (None, candidate.world_size):
            return candidate.refuse(
                f"saved by {ranks_count(candidate.world_size)}, this job has {policy.world_size}"
            )
        if candidate.local_ranks and (
            candidate.world_size != group.size or group.rank not in candidate.files
        ):
            return candidate.refuse(
                f"this node has rank {listed(candidate.local_ranks)} of {candidate.world_size}, "
                f"not rank {group.rank} of {group.size}"
            )
        return None

    def _elsewhere(self) -> dict[str, Any]:
        """Returns the order of the newest checkpoint on disk or in the object store, and its run;
        None: there is none. ``reason``: why memory must not be used."""
        if not self.job.is_split:
            return run_on_rank0(self.job.group, self._newest, Watchdog("scanning the checkpoints"))
        rows = gather_results(self.job.group, self._newest, Watchdog("scanning the checkpoints"))
        return max(rows, key=lambda row: (bool(row["reason"]), row["order"] or [0, 0]))

    def _newest(self) -> dict[str, Any]:
        storage, note = uncached(self.job.storage), self.note
        try:
            scan = find_candidates(storage, self.job.path, None, self.job.policy.world_size)[0]
            found, bad_steps = scan.candidates, scan.bad_steps
        except UnusableCheckpointError:
            # the selection on disk raises it again
            found, bad_steps = (), ()
        usable = [candidate for candidate in found if candidate.problem is None]
        first = usable[0] if usable else None
        if first is not None and any(candidate.order[:2] > first.order[:2] for candidate in usable):
            return _unwanted(f"the tracker of {self.root} was set back to step {first.step}")
        if (
            first is not None
            and first.origin != OURS
            and first.order[0] < 1
            and (note is None or note.key != key_of(first))
        ):
            return _unwanted(
                f"step {first.step} on disk was saved without mindresume, so it is not known which "
                "is newer"
            )
        order, run = (list(first.order[:2]), first.run) if first is not None else (None, None)
        is_known = True
        if self.job.sources.remote is not None:
            # as on disk: the newest on this machine is taken
            try:
                for name in self.job.sources.remote.scan().committed():
                    if list(order_of(name)) > (order or [0, 0]):
                        order, run = list(order_of(name)), parse_attempt(name)[1]
            except RemoteError:
                is_known = False
        if note is not None and is_known and not self._has(note, found, order):
            return _unwanted(
                f"{note.key}, which their training had on disk, is gone, and nothing newer is "
                f"there: somebody has removed it to go back. mindresume flush {self.root} writes "
                "the newest in memory to disk"
            )
        return {"order": order, "run": run, "reason": "", "bad_steps": bad_steps}

    def _has(self, note: DiskNote, found: Sequence[Candidate], order: list[int] | None) -> bool:
        """Returns whether the disk or the object store has the noted checkpoint, or a newer one.
        ``order``: of the newest that can be used."""
        storage, is_ours = self.job.storage, parse_attempt(note.key) is not None
        least = order_of(note.key) if is_ours else (run_sequence(note.run), 0)
        if (
            order is not None
            and tuple(order) > least
            or any(c.maybe_completed and c.order[:2] > least for c in found)
        ):
            return True
        own = next((candidate for candidate in found if key_of(candidate) == note.key), None)
        if own is None:  # a listing can be late
            places = (
                [
                    os.path.join(folder, FOLDER, note.key)
                    for folder in ("", iteration_name(least[1]))
                ]
                if is_ours
                else []
            )
            return order == list(least) or any(
                storage.status(os.path.join(self.root, place)) is not None for place in places
            )
        # Its weights may be gone, with its records left in their hidden folder.
        return (
            bool(own.listing_error)
            or not own.all_files
            or any(
                storage.status(os.path.join(self.root, file.path)) is not None
                for file in own.all_files
            )
        )

    def _is_allowed(self, name: str, run: str | None) -> bool:
        """Returns whether a save may be taken at all: all ranks get the same answer. ``run``: of
        the newest checkpoint elsewhere."""
        (_, own), candidate = parse_attempt(name), self.offers[name]
        if run is not None and run != own and run_sequence(run) == run_sequence(own):
            refusal = candidate.refuse(
                f"run {run} of the same number has saved on disk, so it is not known which is newer"
            )
        else:
            row = run_on_rank0(self.job.group, lambda: self._refusal(candidate))
            if row is None:
                return True
            refusal = Refusal(**row)
        self.suspected += [name] if refusal.is_last_resort else []
        self.refused.append(candidate.refuse(f"{_IN_MEMORY}: {refusal.reason}"))
        return False

    def _refusal(self, candidate: Candidate) -> Refusal | None:
        """Returns, on rank 0, why a save is refused before its bytes are read."""
        tier, policy = CheckpointDir(uncached(self.job.storage), self.tier), self.job.policy
        refusal = eligible(
            tier, candidate, policy, failed_loads_by_key(tier).get(candidate.name, ())
        )
        if refusal is None and not candidate.local_ranks:
            refusal = check_files(tier, candidate, policy.world_size)
        return refusal

    # ---- verification ----------------------------------------------------------------------------

    def _first_verified(self, names: list[str]) -> Choice | None:
        """Returns the choice of the first of ``names`` that all ranks have verified."""
        job, storage = self.job, uncached(self.job.storage)
        for name in names:
            if name in self.tried:
                continue
            self.tried.add(name)
            candidate = self.offers[name]
            ranks = (
                [job.group.rank]
                if candidate.local_ranks
                else job.policy.ranks_to_verify(job.group, candidate)
            )
            # The load needs this memory anyway. In another layout it reads other regions than this
            # process has verified.
            keep = (
                job.storage
                if isinstance(job.storage, ReadCache) and candidate.world_size == job.group.size
                else None
            )
            verdict = verify_on_all_ranks(
                job, CheckpointDir(storage, self.tier), candidate, ranks, keep
            )
            if isinstance(verdict, Choice):
                return replace(
                    verdict,
                    refused=tuple(self.refused),
                    directory=self.root,
                    bad_steps=self.bad_steps,
                )
            drop_cached_files(job.storage)
            self._distrust(candidate, verdict, ranks)
        return None

    def _distrust(
        self, candidate: Candidate, refusals: list[Refusal], ranks: Collection[int]
    ) -> None:
        """Refuses a save whose bytes are not those that were written, and removes the record of
        each damaged rank: a replica that failed once is never tried again. A living owner may just
        overwrite the save; its records are left alone."""
        self.refused.append(replace(refusals[0], reason=f"{_IN_MEMORY}: {refusals[0].reason}"))
        owner = TierOwner.read(uncached(self.job.storage), self.tier)
        if self.job.sources.is_preview or owner is None or owner.is_alive:
            return
        for refusal in refusals:
            if refusal.rank in ranks:
                with suppress(OSError):
                    self.job.storage.remove(candidate.in_records(record_name(refusal.rank)))


def _unwanted(reason: str) -> dict[str, Any]:
    """Returns what ``_newest`` returns if memory must not be used."""
    return {"order": None, "run": None, "reason": reason}


# ---- to disk -------------------------------------------------------------------------------------


def write_selected(
    storage: Storage,
    choice: Choice,
    group: Group,
    shared: SharedGroups,
    samples_in_common: bool = False,
) -> None:
    """Writes the selected save in memory to disk, on all ranks together: for a training that is
    complete with it, so that nothing saves it later.

    Args:
        shared: the ranks that share a tier.
        samples_in_common: see ``SaveTarget``.
    Raises:
        CollectiveError: on all ranks, if one node fails.
    """
    candidate, writes = choice.chosen, group.rank == 0
    if candidate.world_size == group.size:  # a node can have parts of others, which those write
        own, writes = shared.ranks(group.rank), shared.is_leader(group.rank)
        files = {rank: rows for rank, rows in candidate.files.items() if rank in own}
        candidate = replace(candidate, files=files)
    copy = DiskCopy(
        CheckpointDir(storage, choice.checkpoint_dir), choice.root, candidate, samples_in_common
    )
    run_on_all(group, copy.write, Watchdog("writing the last step to disk"), writes)
    run_on_rank0(group, copy.commit, Watchdog("committing the last step"))


@dataclass(frozen=True)
class DiskCopy:
    """The copy of a verified save on disk: the checkpoint directory as a ``Place``.

    Args:
        tier: the folder in memory that has the save.
        progress: receives the bytes that are written.
    """

    directory: CheckpointDir
    tier: str
    candidate: Candidate
    samples_in_common: bool = False
    progress: Progress = SILENT

    @cached_property
    def target(self) -> SaveTarget:
        return replace(
            SaveTarget.of(self.directory, self.candidate, min(self.candidate.files)),
            local_ranks=(),
            samples_in_common=self.samples_in_common,
        )

    def write(self) -> None:
        """Copies the files and records. It may be called again after a death.

        Raises:
            SaveError: a file of that name holds something else, or the bytes changed meanwhile.
            OSError, RecordError: a file cannot be read or written.
        """
        candidate = self.candidate
        target = self.target
        storage = self.directory.storage
        # its records, which the manifest names, must stay as they are
        if is_committed(target, candidate.step):
            return
        for rank, sources in candidate.files.items():
            with storage.open(candidate.in_records(record_name(rank))) as file:
                record, details = read_details(file)
            rows = tuple(
                row
                if target.iterations
                else row._replace(path=path_on_disk(row.path, candidate.run))
                for row in record.files
            )
            files = [
                (os.path.join(self.tier, source.path), row)
                for source, row in zip(sources, rows, strict=True)
            ]
            copy_files(self, candidate.name, storage, files)
            self.put_record(candidate.name, rank, replace(record, files=rows).encode(details))

    def commit(self) -> bool:
        """Commits and publishes what ``write`` wrote, as the next run would. Returns whether it is
        a checkpoint now; not while parts of other nodes are missing."""
        # also of a step that is committed already: it may not be published
        Committer(self.target).recover()
        return is_committed(self.target, self.candidate.step)

    def has_file(self, attempt: str, file: FileRecord) -> bool:
        """See ``mindresume.saving.replication.Place``."""
        path = os.path.join(self.target.data_dir(self.candidate.step), file.path)
        if self.target.storage.status(path) is None:
            return False
        if not is_as_recorded(self.target.storage, path, file):
            raise SaveError(
                f"{path} exists already, with other content; a file of a checkpoint is never "
                "overwritten"
            )
        return True

    def put_file(self, attempt: str, file: FileRecord, storage: Storage, path: str) -> None:
        """See ``Place``."""
        disk, copied = self.target.storage, xxh3_128()
        target = os.path.join(self.target.data_dir(self.candidate.step), file.path)
        disk.make_folder(os.path.dirname(target))
        # of this process: ``flush`` on another node may be writing the same file
        tag = f"{runtime.token_hex(4)}.{self.target.run}"
        publish(disk, target, self._pieces(storage, path, copied), tag, file.size or 0)
        if copied.hexdigest() != file.checksum:
            disk.remove(target)
            raise SaveError(f"{path} changed while it was written to {target}")

    def _pieces(self, storage: Storage, path: str, copied: Any) -> Iterator[bytes]:
        with storage.open(path) as source:
            while piece := source.read(CHUNK):
                copied.update(piece)
                self.progress.advance(len(piece))
                yield piece

    def put_record(self, attempt: str, rank: int, record: bytes) -> None:
        """See ``Place``."""
        folder = self.target.attempt(self.candidate.step)
        self.target.storage.make_folder(folder)
        publish(
            self.target.storage, os.path.join(folder, record_name(rank)), [record], self.target.run
        )
