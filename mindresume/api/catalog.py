"""Reads a folder of checkpoints, of mindresume or mindformers, and answers as a resume would.

catalog = mindresume.open("output/checkpoint")
catalog.steps()                         # (100, 200, 300)
catalog.latest()                        # the newest complete Checkpoint
# what a resume on 8 ranks would take; .refused says why nothing newer
catalog.select(world_size=8).chosen
catalog.verify(step=300).damaged        # compares every byte with what was written
catalog[300].read("embedding.weight")
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mindresume import runtime
from mindresume.api.checkpoint import Checkpoint, check_part, existing
from mindresume.api.results import (
    DAMAGED,
    UNREADABLE,
    UNVERIFIABLE,
    VERIFIED,
    CheckpointInfo,
    CheckpointVerification,
    DirectoryUser,
    Listing,
    Problem,
    Result,
    VerificationReport,
    info_of,
    problem_of,
)
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import is_alive, known_lease_holders
from mindresume.errors import MissingCheckpointError
from mindresume.events import DISK, MEMORY, SILENT, Counted, Progress
from mindresume.formats import (
    MINDFORMERS,
    Candidate,
    CheckpointDir,
    Refusal,
    Scan,
    missing_ranks_text,
    steps_text,
)
from mindresume.formats.records import scan_records
from mindresume.formats.scan import CONSOLIDATED, find_candidates, kind_of, locate
from mindresume.reshard.open_checkpoint import (
    ConsolidatedSource,
    survey_consolidated,
    verify_consolidated,
)
from mindresume.reshard.strategy_store import StrategyLookup
from mindresume.resume.candidates import (
    INCOMPLETE,
    WHOLE,
    CheckpointStatus,
    status_of_candidate,
    verify_checkpoints,
    world_size_notes,
)
from mindresume.resume.eligible import SelectionPolicy, describe_candidate, read_size
from mindresume.resume.selection import preview_selection
from mindresume.resume.sources import CheckpointSources
from mindresume.saving.memory_tier.directory import PARTNER, find_tier
from mindresume.settings import Settings
from mindresume.storage import Storage
from mindresume.storage.posix import PosixStorage


@dataclass(frozen=True)
class Selection(Result):
    """Holds the checkpoint that a resume would take, and why it takes nothing newer.

    Attributes:
        root: The checkpoint folder.
        chosen: The checkpoint; None if none can be used.
        refused: Newer checkpoints (all, without a chosen one), each with the reason, newest first.
        notes: What was assumed or ignored, as sentences.
        fresh: True if no save was ever complete there: a resume starts the training afresh.
        verified: Whether every byte of the chosen one was read.
        description: The chosen one in a phrase: who wrote it, and what was checked; empty without
            one.
        local: Where nodes share no disk and none is chosen: the newest checkpoint of which this
            node has its part. The job takes the newest step that all nodes have.
        error: Why a resume would stop with an error, as sentences; empty if it would not.
        source: Where the chosen one lies: "disk", or "memory": a job whose setting ``memory_tier``
            is on takes it from memory of this node.
        code: The code of that error, as in docs/messages.md; empty without one.
    """

    root: str
    chosen: Checkpoint | None
    refused: tuple[Problem, ...]
    notes: tuple[str, ...] = ()
    fresh: bool = False
    verified: bool = True
    description: str = ""
    local: CheckpointInfo | None = None
    error: str = ""
    source: str = DISK
    code: str = ""


def open(
    path: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    strategy: str | os.PathLike[str] | None = None,
    hold: bool = True,
    missing_ok: bool = False,
) -> Catalog:
    """Opens a folder of checkpoints for reading: of Checkpoint 1.0 or 2.0, written by mindresume or
    mindformers.

    Args:
        path: The checkpoint folder; or the output folder or run folder above it, a rank folder, an
            iteration folder, consolidated (merged) weights, or one file.
        world_size: Number of ranks of the job that would resume. None: that of the manifest, else
            of the folder ``strategy`` beside it, else the number of rank folders.
        strategy: Strategy file or folder with which mindformers saved, if neither records nor the
            folder ``strategy`` beside the checkpoints describe the layouts.
        hold: Whether a checkpoint is held while it is read, so that no job removes it; see
            ``Checkpoint``. False: nothing is written.
        missing_ok: Whether ``path`` may be missing, because nothing was saved yet.

    Returns:
        A Catalog. It keeps no state: each call reads the folder again.

    Raises:
        FileNotFoundError: ``path`` does not exist.
    """
    path = os.fspath(path) if missing_ok else existing(path)
    return Catalog(
        PosixStorage(), path, world_size, None if strategy is None else os.fspath(strategy), hold
    )


class _Location(NamedTuple):
    """Says where the checkpoints are; ``is_consolidated``: they are consolidated weights."""

    path: str
    is_consolidated: bool


class Catalog:
    """Gives access to the checkpoints of a folder. ``mindresume.open`` returns it; it changes
    nothing.

    ``len(catalog)``, ``500 in catalog`` and iteration refer to ``steps()``. As a context manager it
    releases everything that its checkpoints hold, at the end of the block.

    Every method raises MissingCheckpointError if the path is no folder of checkpoints, or if
    several folders below it are; ``select`` returns that as an error of the resume. Every method
    raises ConfigError if the path is a file of another kind.
    """

    def __init__(
        self,
        storage: Storage,
        path: str,
        world_size: int | None = None,
        strategy: str | None = None,
        hold: bool = True,
    ):
        self.path, self.world_size = path, world_size
        self._storage = storage
        self._strategy = strategy
        self._hold = hold
        self._checkpoints: weakref.WeakSet[Checkpoint] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<mindresume.Catalog of {self.path}>"

    # ---- listing ---------------------------------------------------------------------------------

    def list(self) -> Listing:
        """Lists every saved step, complete or not, in the order in which a resume tries them,
        newest first.

        It checks names, records and sizes, and does not read contents (``verify`` does).
        """
        found, rows = self._scan(self._locate())
        steps = tuple(info_of(found.directory, row) for row in rows)
        users = tuple(
            DirectoryUser(holder, is_alive(holder))
            for holder in known_lease_holders(found.directory)
        )
        return Listing(
            found.root,
            steps,
            self._notes(found),
            users,
            tuple(
                info_of(tier, row)
                for tier in self._tiers(found.directory)
                for row in self._in_memory(tier)
            ),
        )

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that a resume could take, as far as names, records and sizes show,
        ascending."""
        return tuple(
            sorted(
                {
                    row.candidate.step
                    for row in self._scan(self._locate())[1]
                    if row.problem is None and row.candidate.step is not None
                }
            )
        )

    def latest(self) -> Checkpoint | None:
        """Returns the first complete checkpoint that a resume would try; None if there is none.

        It does not read contents; ``select`` does, and returns what a resume would take.
        """
        location = self._locate()
        found, rows = self._scan(location)
        return next(
            (self._checkpoint(location, found.root, row) for row in rows if row.problem is None),
            None,
        )

    def __getitem__(self, step: int) -> Checkpoint:
        """Returns the checkpoint of ``step``; if several runs saved it, the one that a resume would
        take.

        Raises:
            MissingCheckpointError: There is no such step; the message names the existing ones.
        """
        location, first = self._locate(), None
        found, rows = self._scan(location, step)
        for row in rows:
            if row.problem is None:
                return self._checkpoint(location, found.root, row)
            first = first or row
        if first is None:
            raise self._missing_step(step, found)
        return self._checkpoint(location, found.root, first)

    def __contains__(self, step: object) -> bool:
        return step in self.steps()

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps())

    def __len__(self) -> int:
        return len(self.steps())

    # ---- selection -------------------------------------------------------------------------------

    def select(
        self,
        world_size: int | None = None,
        *,
        name: str | None = None,
        verify: bool = True,
        progress: Progress = SILENT,
    ) -> Selection:
        """Selects the checkpoint as a job does at its start, for all ranks at once.

        Args:
            world_size: Number of ranks of the job; None: as given to ``open``.
            name: Requests one checkpoint, as ``resume_training: NAME`` does: a file of any rank, an
                iteration folder or a step.
            verify: Whether every byte of the chosen one is compared with what was written. False:
                sizes and headers only.
            progress: Receives the numbers of bytes to read, and of bytes read.

        Returns:
            A Selection. If a resume would stop with an error, ``error`` and ``refused`` say why.

        Raises:
            ConfigError: The path is a file of another kind.
            CollectiveError: The path cannot be read.
        """
        world_size = self.world_size if world_size is None else world_size
        policy = SelectionPolicy(
            world_size,
            name,
            verify,
            True,
            max_failed_loads=Settings.load().max_failed_loads,
        )
        sources = CheckpointSources(
            StrategyLookup(self._storage),
            ConsolidatedSource(SingleProcess(), verify, resume=True),
            memory={},
        )
        preview = preview_selection(self._storage, self.path, policy, sources, progress)
        choice = preview.choice
        root = choice.root
        chosen = CheckpointStatus(choice.chosen, None, choice.warnings) if choice.chosen else None
        local = preview.node_local
        location = _Location(preview.place, kind_of(self._storage, preview.place) in CONSOLIDATED)
        return Selection(
            root,
            self._checkpoint(location, root, chosen) if chosen else None,
            tuple(problem_of(root, refusal) for refusal in choice.refused),
            choice.notes,
            choice.is_fresh_start,
            choice.bytes_verified,
            describe_candidate(choice.chosen, choice.bytes_verified) if choice.chosen else "",
            info_of(CheckpointDir(self._storage, root), local) if local else None,
            preview.error,
            MEMORY if choice.in_memory else DISK,
            preview.code,
        )

    # ---- verification ----------------------------------------------------------------------------

    def verify(
        self, step: int | None = None, *, progress: Progress = SILENT, part: tuple[int, int] = WHOLE
    ) -> VerificationReport:
        """Reads every byte, and names the damaged files and tensors.

        What mindformers wrote has no checksums: its headers, sizes and counters are checked. What a
        job removes meanwhile is no damage. Nothing is held, so a running job continues to remove
        old checkpoints.

        Args:
            step: Only this step; None: all.
            progress: Receives the numbers of bytes to read, and of bytes read.
            part: (K, N): only the K-th of N shares of the files, K from 1. Other calls verify the
                other ones.

        Returns:
            A VerificationReport; ``damaged`` and ``unreadable`` are the answer.

        Raises:
            MissingCheckpointError: There is no such step.
            ConfigError: There is no such part.
        """
        check_part(part)
        started = runtime.monotonic()
        read = Counted(progress)
        location = self._locate()
        found, rows = self._scan(location, step)
        wanted = [*rows]
        if step is not None and not wanted:
            raise self._missing_step(step, found)
        progress.expect(
            sum(
                read_size(row.candidate, [*row.candidate.files])
                for row in wanted
                if row.candidate.maybe_completed
            )
            // part[1]
        )
        if location.is_consolidated:
            verdicts = [
                verify_consolidated(self._storage, location.path, row, read.advance, part)
                for row in wanted
            ]
        else:
            verdicts = verify_checkpoints(
                found.directory, wanted, partial(self._present, location, step), read.advance, part
            )
        held: list[CheckpointVerification] = []
        for tier in self._tiers(found.directory) if part[0] == 1 else ():
            asked = [
                row for row in self._in_memory(tier) if step is None or row.candidate.step == step
            ]
            checked = verify_checkpoints(tier, asked, partial(self._in_memory, tier), read.advance)
            held += [_verification(tier.root, candidate, bad) for candidate, bad in checked]
        there = {candidate.step for candidate, _ in verdicts}
        removed = {step for row in wanted if (step := row.candidate.step) is not None} - there
        results = tuple(_verification(found.root, candidate, bad) for candidate, bad in verdicts)
        states = {result.state for result in results}
        of_part = (
            [f"part {part[0]} of {part[1]}: only this share of the files was read"]
            if part[1] > 1
            else []
        )
        return VerificationReport(
            found.root,
            DAMAGED in states,
            results,
            tuple(sorted(removed)),
            read.done,
            round(runtime.monotonic() - started, 3),
            (*self._notes(found), *of_part),
            tuple(held),
            UNREADABLE in states,
        )

    # ---- release ---------------------------------------------------------------------------------

    def release(self) -> None:
        """Releases everything that checkpoints of this catalog hold."""
        for checkpoint in [*self._checkpoints]:
            checkpoint.release()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    # ---- reading ---------------------------------------------------------------------------------

    def _locate(self) -> _Location:
        path = locate(self._storage, self.path)
        return _Location(path, kind_of(self._storage, path) in CONSOLIDATED)

    def _scan(
        self, location: _Location, step: int | None = None
    ) -> tuple[Scan, Iterator[CheckpointStatus]]:
        """Returns the present scan, and a row for each step of it, or for ``step``; the files of a
        step are examined when its row is asked for."""
        if location.is_consolidated:
            found, rows = survey_consolidated(self._storage, location.path)
            return found, (row for row in rows if step is None or row.candidate.step == step)
        found, _ = find_candidates(self._storage, location.path)
        if found.fresh_start_refusal:
            raise MissingCheckpointError(found.fresh_start_refusal)
        strategy_of = StrategyLookup(self._storage)
        return found, (
            status_of_candidate(found, candidate, strategy_of, self.world_size)
            for candidate in found.candidates
            if step is None or candidate.step == step
        )

    def _present(self, location: _Location, step: int | None) -> Iterator[CheckpointStatus]:
        return self._scan(location, step)[1]

    def _tiers(self, directory: CheckpointDir) -> Sequence[CheckpointDir]:
        """Returns what memory of this node has of ``directory``: its tier, and the copies that this
        node keeps for another one."""
        found = [find_tier(directory, folder)[0] for folder in ("", PARTNER)]
        return [CheckpointDir(self._storage, tier) for tier in found if tier]

    def _in_memory(self, tier: CheckpointDir) -> tuple[CheckpointStatus, ...]:
        """Returns a row for each save in memory."""
        found = Scan(tier, tuple(scan_records(tier)[0]))
        strategy_of = StrategyLookup(self._storage)
        return tuple(
            status_of_candidate(found, candidate, strategy_of) for candidate in found.candidates
        )

    def _checkpoint(self, location: _Location, root: str, row: CheckpointStatus) -> Checkpoint:
        checkpoint = Checkpoint(
            CheckpointDir(self._storage, root),
            row,
            self._strategy,
            self._hold,
            location.path if location.is_consolidated else "",
        )
        self._checkpoints.add(checkpoint)
        return checkpoint

    def _notes(self, found: Scan) -> tuple[str, ...]:
        return (*found.notes, *world_size_notes(found, self.world_size))

    def _missing_step(self, step: int, found: Scan) -> MissingCheckpointError:
        return MissingCheckpointError(
            f"{found.root} has no step {step}; {steps_text(found.candidates)}"
        )


def _verification(root: str, candidate: Candidate, bad: list[Refusal]) -> CheckpointVerification:
    if not candidate.maybe_completed:
        state = INCOMPLETE
    else:
        state = UNVERIFIABLE if candidate.origin == MINDFORMERS else VERIFIED
        # what cannot be read now may be as it was written
        if bad:
            state = UNREADABLE if all(refusal.is_unreadable for refusal in bad) else DAMAGED
    return CheckpointVerification(
        candidate.step,
        candidate.run,
        candidate.origin,
        state,
        candidate.world_size,
        candidate.missing_ranks,
        candidate.local_ranks,
        tuple(problem_of(root, refusal) for refusal in bad),
        tuple(filter(None, [missing_ranks_text(candidate)])),
        state != INCOMPLETE and all(row.is_harmless for row in bad),
    )
