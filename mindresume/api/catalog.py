"""A folder of checkpoints, of mindresume or of mindformers, and the answers that a resume would give.

    catalog = mindresume.open("output/checkpoint")
    catalog.steps()                         # (100, 200, 300)
    catalog.latest()                        # the newest complete Checkpoint
    catalog.select(world_size=8).chosen     # what a resume on 8 ranks would take; .refused says why nothing newer
    catalog.verify(step=300).damaged        # every byte compared with what was written
    catalog[300].read("embedding.weight")
"""
from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from mindresume.api.checkpoint import Checkpoint
from mindresume.api.progress import SILENT, Progress
from mindresume.api.results import (
    DAMAGED,
    INCOMPLETE,
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
from mindresume.errors import MissingCheckpointError, UnusableCheckpointError
from mindresume.formats import MINDFORMERS, Candidate, Refusal, Scan, missing_ranks_text, steps_text
from mindresume.formats.consolidated import is_complete
from mindresume.formats.location import locate
from mindresume.reshard import consolidated_checkpoint
from mindresume.reshard.strategy_store import strategy_lookup
from mindresume.resume import listing as surveys
from mindresume.resume.candidates import find_candidates, world_size_notes
from mindresume.resume.choice import describe_candidate
from mindresume.resume.folder_verification import verify_checkpoints
from mindresume.resume.listing import CheckpointStatus
from mindresume.resume.selection import CheckpointSources, preview_selection
from mindresume.resume.selection_policy import FULL, QUICK, SelectionPolicy, every_rank
from mindresume.resume.verified_shard import read_size
from mindresume.settings import Settings
from mindresume.storage.interface import Storage
from mindresume.storage.posix import PosixStorage


@dataclass(frozen=True)
class Selection(Result):
    """What a resume would take, and why nothing newer.

    Attributes:
        root: The folder of checkpoints.
        chosen: The checkpoint; None if there is none that can be used.
        refused: Newer checkpoints (without a chosen one: all), each with the reason, newest first.
        notes: What was assumed or ignored, as sentences.
        fresh: True if no save was ever complete there: a resume begins a training afresh.
        verified: Whether every byte of the chosen one was read.
        description: The chosen one in a phrase: who wrote it, and what was checked of it; empty without one.
        local: Where nodes share no disk and none is chosen: the newest checkpoint of which this node has its part. Their job
            takes the newest step that all nodes have.
        error: Why a resume would stop with an error, as sentences; empty if it would not.
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


def open(path: str | os.PathLike[str], *, world_size: int | None = None, strategy: str | os.PathLike[str] | None = None,
         hold: bool = True, missing_ok: bool = False) -> Catalog:
    """Opens a folder of checkpoints for reading: of Checkpoint 1.0 or 2.0, written by mindresume or by mindformers.

    Args:
        path: The checkpoint folder; or the output folder or the folder of the run above it, a rank folder, an iteration folder,
            complete (merged) weights, or one file.
        world_size: Number of ranks of the job that would resume. None: that of the manifest, else of the folder ``strategy``
            beside, else the number of rank folders.
        strategy: Strategy file or folder with which mindformers saved, where neither records nor the folder ``strategy`` beside
            say how its ranks cut the tensors.
        hold: Whether a checkpoint is held while it is read, so that no job removes it; see ``Checkpoint``. False: nothing is
            written anywhere.
        missing_ok: Whether ``path`` need not exist (the first save may still be to come).

    Returns:
        A Catalog. It remembers nothing: each call looks at the folder anew.

    Raises:
        FileNotFoundError: ``path`` does not exist.
    """
    path = os.fspath(path)
    if not missing_ok and not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist")
    return Catalog(PosixStorage(), path, world_size, None if strategy is None else os.fspath(strategy), hold)


class _Place(NamedTuple):
    """Where the checkpoints lie; ``is_complete``: they are complete weights."""
    path: str
    is_complete: bool


class Catalog:
    """The checkpoints of a folder. Made by ``mindresume.open``; changes nothing.

    ``len(catalog)``, ``500 in catalog`` and iterating are about ``steps()``. As a context manager it lets go, at the end of the
    block, of everything that its checkpoints hold.

    Every method raises MissingCheckpointError if the path is no folder of checkpoints, or several folders below it hold some;
    ``select`` returns that as an error of the resume.
    """

    def __init__(self, storage: Storage, path: str, world_size: int | None = None, strategy: str | None = None,
                 hold: bool = True):
        self.path, self.world_size = path, world_size
        self._storage, self._strategy, self._hold = storage, strategy, hold
        self._given: weakref.WeakSet[Checkpoint] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<mindresume.Catalog of {self.path}>"

    # ---- what is there -----------------------------------------------------------------------------------------------

    def list(self) -> Listing:
        """Lists every saved step, complete or not, in the order in which a resume tries them, newest first.

        Names, records and sizes are checked, contents are not (``verify`` does that).
        """
        found, rows = self._survey(self._locate())
        users = tuple(DirectoryUser(holder, is_alive(holder)) for holder in known_lease_holders(self._storage, found.root))
        return Listing(found.root, tuple(info_of(self._storage, found.root, row) for row in rows), self._notes(found), users)

    def steps(self) -> tuple[int, ...]:
        """Returns the steps that a resume could take as far as names, records and sizes tell, ascending."""
        return tuple(sorted({row.candidate.step for row in self._survey(self._locate())[1] if row.problem is None}
                            - {None}))

    def latest(self) -> Checkpoint | None:
        """Returns the first checkpoint that a resume would try and that is complete; None if there is none.

        Contents are not read: ``select`` does, and is what a resume would take.
        """
        place = self._locate()
        rows = ((found.root, row) for found, row in self._rows(place) if row.problem is None)
        return next((self._checkpoint(place, *found) for found in rows), None)

    def __getitem__(self, step: int) -> Checkpoint:
        """Returns the checkpoint of ``step``; of several runs that saved it, the one that a resume would take.

        Raises:
            MissingCheckpointError: There is no such step; the message names those that there are.
        """
        place, rows = self._locate(), []
        for found, row in self._rows(place, step):
            rows.append((found.root, row))
            if row.problem is None:
                return self._checkpoint(place, *rows[-1])
        if not rows:
            raise self._no_step(step, self._survey(place)[0])
        return self._checkpoint(place, *rows[0])

    def __contains__(self, step: object) -> bool:
        return step in self.steps()

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps())

    def __len__(self) -> int:
        return len(self.steps())

    # ---- what a resume would take ------------------------------------------------------------------------------------

    def select(self, world_size: int | None = None, *, name: str | None = None, verify: bool = True, progress: Progress = SILENT
               ) -> Selection:
        """Chooses the checkpoint as a job does at its start, for all ranks at once.

        Args:
            world_size: Number of ranks of the job; None: as given to ``open``.
            name: Ask for this checkpoint, as ``resume_training: NAME`` does: a file of any rank, an iteration folder or a step.
            verify: Whether every byte of the chosen one is compared with what was written. False: sizes and headers only.
            progress: Receives how many bytes are to be read, and were read.

        Returns:
            A Selection. It is an answer also where a resume would stop with an error: ``error`` and ``refused`` say why.

        Raises:
            CollectiveError: The path is a file of another kind, or cannot be looked at.
        """
        world_size = self.world_size if world_size is None else world_size
        policy = SelectionPolicy(world_size, name, FULL if verify else QUICK, every_rank,
                                 max_failed_loads=Settings.load().max_failed_loads)
        strategy_of = strategy_lookup(self._storage)
        sources = CheckpointSources(strategy_of, lambda storage, path: consolidated_checkpoint.choose_complete(
            storage, path, SingleProcess(), verify, resume=True)[0])
        preview = preview_selection(self._storage, self.path, policy, sources, progress)
        choice, root, local = preview.choice, preview.choice.root, None
        chosen = CheckpointStatus(choice.chosen, None, choice.warnings) if choice.chosen else None
        if preview.error:                                   # then its root is the path, and not what is below it
            with suppress(UnusableCheckpointError):
                found, _ = find_candidates(self._storage, self.path)
                root = found.root
                local = preview.node_local and info_of(self._storage, root, surveys.status_of_candidate(
                    self._storage, found, preview.node_local, strategy_of))
        return Selection(
            root, self._checkpoint(self._locate(), root, chosen) if chosen else None,
            tuple(problem_of(root, refusal)
                  for refusal in choice.refused), choice.notes, choice.is_fresh_start, choice.bytes_verified,
            describe_candidate(choice.chosen, choice.bytes_verified) if choice.chosen else "", local, preview.error)

    # ---- is every byte as written ------------------------------------------------------------------------------------

    def verify(self, step: int | None = None, *, progress: Progress = SILENT) -> VerificationReport:
        """Reads every byte, and names the damaged files and tensors.

        What mindformers wrote has no checksums: there headers, sizes and counters are checked. What a job removes meanwhile is no
        damage. Nothing is held, so a job beside goes on removing.

        Args:
            step: Only this step; None: all.
            progress: Receives how many bytes are to be read, and were read.

        Returns:
            A VerificationReport; ``damaged`` is the answer.

        Raises:
            MissingCheckpointError: There is no such step.
        """
        started, read, place = time.monotonic(), [0], self._locate()
        found, rows = self._survey(place)
        wanted = [row for row in rows if step is None or row.candidate.step == step]
        if step is not None and not wanted:
            raise self._no_step(step, found)
        progress.expect(sum(read_size(row.candidate, [*row.candidate.files]) for row in wanted if row.candidate.maybe_completed))

        def counted(count: int) -> None:
            read[0] += count
            progress.advance(count)

        def again() -> Iterator[CheckpointStatus]:
            return (row for row in self._survey(place)[1] if step is None or row.candidate.step == step)
        if place.is_complete:
            verdicts = [consolidated_checkpoint.verify(self._storage, place.path, counted) for _ in wanted]
        else:
            verdicts = verify_checkpoints(self._storage, found.root, wanted, again, counted)
        removed = {row.candidate.step for row in wanted} - {candidate.step for candidate, _ in verdicts} - {None}
        return VerificationReport(
            found.root, any(bad for candidate, bad in verdicts if candidate.maybe_completed),
            tuple(_verification(found.root, candidate, bad) for candidate, bad in verdicts), tuple(sorted(removed)), read[0],
            round(time.monotonic() - started, 3), self._notes(found))

    # ---- life --------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Lets go of everything that checkpoints of this catalog hold."""
        for checkpoint in [*self._given]:
            checkpoint.release()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    # ---- looking -----------------------------------------------------------------------------------------------------

    def _locate(self) -> _Place:
        path = locate(self._storage, self.path)
        return _Place(path, is_complete(self._storage, path))

    def _survey(self, place: _Place) -> tuple[Scan, tuple[CheckpointStatus, ...]]:
        """Returns what is there now, and a row for each step of it."""
        if place.is_complete:
            return consolidated_checkpoint.survey(self._storage, place.path)
        found, rows = surveys.list_checkpoints(self._storage, place.path, strategy_lookup(self._storage), self.world_size)
        if found.fresh_start_refusal:
            raise MissingCheckpointError(found.fresh_start_refusal)
        return found, rows

    def _rows(self, place: _Place, step: int | None = None) -> Iterator[tuple[Scan, CheckpointStatus]]:
        """Yields the rows of ``_survey``, of ``step`` alone if it is given; files are looked at one candidate after the other."""
        if place.is_complete:
            found, rows = consolidated_checkpoint.survey(self._storage, place.path)
            yield from ((found, row) for row in rows if step is None or row.candidate.step == step)
            return
        found, _ = find_candidates(self._storage, place.path)
        if found.strange:
            raise MissingCheckpointError(found.strange)
        strategy_of = strategy_lookup(self._storage)
        for candidate in found.candidates:
            if step is None or candidate.step == step:
                yield found, surveys.status_of_candidate(self._storage, found, candidate, strategy_of, self.world_size)

    def _checkpoint(self, place: _Place, root: str, row: CheckpointStatus) -> Checkpoint:
        checkpoint = Checkpoint(self._storage, root, info_of(self._storage, root, row), row.candidate, self._strategy, self._hold,
                                place.path if place.is_complete else "")
        self._given.add(checkpoint)
        return checkpoint

    def _notes(self, found: Scan) -> tuple[str, ...]:
        return (*found.notes, *world_size_notes(found, self.world_size))

    def _no_step(self, step: int, found: Scan) -> MissingCheckpointError:
        return MissingCheckpointError(f"{found.root} has no step {step}; {steps_text(found.candidates)}")


def _verification(root: str, candidate: Candidate, bad: list[Refusal]) -> CheckpointVerification:
    if not candidate.maybe_completed:
        state = INCOMPLETE
    else:
        state = DAMAGED if bad else UNVERIFIABLE if candidate.origin == MINDFORMERS else VERIFIED
    return CheckpointVerification(candidate.step, candidate.run, candidate.origin, state, candidate.world_size,
                                  candidate.missing_ranks,
                                  candidate.local_ranks, tuple(problem_of(root, refusal) for refusal in bad),
                                  tuple(filter(None, [missing_ranks_text(candidate)])))

