"""Lists every saved step of a folder and what a resume would say of it, by names, records and sizes; contents are not read."""
from __future__ import annotations

from dataclasses import dataclass

from mindresume.formats import Candidate, Refusal, Scan, missing_ranks_text
from mindresume.formats.weight_files import file_sizes, status_of
from mindresume.resume.advisories import manifest_text, replica_text
from mindresume.resume.missing_ranks import StrategyOf, complete_missing_ranks
from mindresume.resume.selector import candidates_for
from mindresume.resume.verifier import check_files
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

COMPLETE, INCOMPLETE, UNUSABLE, NODE_LOCAL = "complete", "incomplete", "unusable", "of this node"


@dataclass(frozen=True)
class CheckpointStatus:
    """A saved step. ``problem``: why a resume refuses it; None: it can be used. ``remarks``: sentences on what is wrong with it
    though it can be used."""
    candidate: Candidate
    problem: Refusal | None
    remarks: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """COMPLETE; INCOMPLETE: the save never completed, so nothing is lost with it; UNUSABLE; or NODE_LOCAL: where nodes share
        no storage, the files of this node are there."""
        candidate, problem = self.candidate, self.problem
        if candidate.local_ranks and candidate.problem is None and problem is not None and problem.file is None:
            return NODE_LOCAL
        return COMPLETE if self.problem is None else UNUSABLE if self.candidate.maybe_completed else INCOMPLETE

    @property
    def kind(self) -> str:
        """"iteration" (Checkpoint 2.0) or the format of the files."""
        return "iteration" if self.candidate.iteration_dir else self.candidate.format


def list_checkpoints(storage: Storage, path: str, strategy_of: StrategyOf, world_size: int | None = None
                     ) -> tuple[Scan, tuple[CheckpointStatus, ...]]:
    """Returns the scan, and the status of each step in the order in which a resume tries them, newest first.

    Args: as of ``mindresume.resume.selector.select``.
    Raises: MissingCheckpointError, ConfigError.
    """
    found, _ = candidates_for(storage, path)
    return found, tuple(status_of_candidate(storage, found, candidate, strategy_of, world_size) for candidate in found.candidates)


def status_of_candidate(storage: Storage, found: Scan, candidate: Candidate, strategy_of: StrategyOf,
                        world_size: int | None = None) -> CheckpointStatus:
    """Returns the row of ``list_checkpoints`` for one candidate of the scan ``found``."""
    candidate, ranks = complete_missing_ranks(storage, found.root, candidate, strategy_of, world_size, found.expected_ranks)
    problem = check_files(storage, found.root, candidate, ranks)
    return CheckpointStatus(candidate, problem, _remarks(storage, found.root, candidate) if problem is None else ())


def _remarks(storage: Storage, root: str, candidate: Candidate) -> tuple[str, ...]:
    """Returns the remarks that are known without reading contents."""
    rows = [(rank, file) for rank, files in candidate.files.items() for file in files] if candidate.records_dir else []
    found = file_sizes(storage, root, [file for _, file in rows])
    lost = [(rank, file.path) for (rank, file), size in zip(rows, found, strict=True) if size is None]
    return (*replica_text(lost), *manifest_text(candidate), *filter(None, [missing_ranks_text(candidate)]))


def size_of(storage: Storage, root: str, candidate: Candidate) -> int:
    """Returns the bytes of its files, as far as they are there."""
    found = parallel(storage, lambda file: status_of(storage, root, file), candidate.all_files)
    return sum(status.size for status in found if status)
