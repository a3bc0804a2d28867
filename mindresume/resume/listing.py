"""Lists every saved step of a folder, and whether a resume could use it, by names, records and sizes. Contents are not read."""
from __future__ import annotations

from dataclasses import dataclass

from mindresume.formats import Candidate, Refusal, Scan, missing_ranks_text
from mindresume.formats.weight_files import file_sizes, status_of
from mindresume.resume.candidates import find_candidates
from mindresume.resume.checkpoint_warnings import manifest_warning, replica_warning
from mindresume.resume.file_checks import check_files
from mindresume.resume.missing_ranks import StrategyOf, complete_missing_ranks
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel

COMPLETE, INCOMPLETE, UNUSABLE, NODE_LOCAL = "complete", "incomplete", "unusable", "node-local"


@dataclass(frozen=True)
class CheckpointStatus:
    """A saved step. ``problem``: why a resume refuses it; None: it can be used. ``warnings``: sentences on defects that do not
    prevent its use."""
    candidate: Candidate
    problem: Refusal | None
    warnings: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """COMPLETE; INCOMPLETE: the save never completed, so nothing is lost; UNUSABLE; or NODE_LOCAL: nodes share no storage,
        and all files of this node are present."""
        candidate, problem = self.candidate, self.problem
        if candidate.local_ranks and candidate.problem is None and problem is not None and problem.file is None:
            return NODE_LOCAL
        return COMPLETE if self.problem is None else UNUSABLE if self.candidate.maybe_completed else INCOMPLETE


def list_checkpoints(storage: Storage, path: str, strategy_of: StrategyOf, world_size: int | None = None
                     ) -> tuple[Scan, tuple[CheckpointStatus, ...]]:
    """Returns the scan, and the status of each step in the order in which a resume tries them, newest first.

    Args:
        strategy_of, world_size: see ``missing_ranks.complete_missing_ranks``.
    Raises:
        MissingCheckpointError, ConfigError: see ``candidates.find_candidates``.
    """
    found, _ = find_candidates(storage, path)
    return found, tuple(status_of_candidate(storage, found, candidate, strategy_of, world_size) for candidate in found.candidates)


def status_of_candidate(storage: Storage, found: Scan, candidate: Candidate, strategy_of: StrategyOf,
                        world_size: int | None = None) -> CheckpointStatus:
    """Returns the row of ``list_checkpoints`` for one candidate of the scan ``found``."""
    candidate, ranks = complete_missing_ranks(storage, found.root, candidate, strategy_of, world_size, found.expected_ranks)
    problem = check_files(storage, found.root, candidate, ranks)
    return CheckpointStatus(candidate, problem, _warnings(storage, found.root, candidate) if problem is None else ())


def _warnings(storage: Storage, root: str, candidate: Candidate) -> tuple[str, ...]:
    """Returns the warnings that are known without reading contents."""
    rows = [(rank, file) for rank, files in candidate.files.items() for file in files] if candidate.records_dir else []
    found = file_sizes(storage, root, [file for _, file in rows])
    lost = [(rank, file.path) for (rank, file), size in zip(rows, found, strict=True) if size is None]
    return (*replica_warning(lost), *manifest_warning(candidate), *filter(None, [missing_ranks_text(candidate)]))


def size_of(storage: Storage, root: str, candidate: Candidate) -> int:
    """Returns the size of those of its files that exist, in bytes."""
    found = parallel(storage, lambda file: status_of(storage, root, file), candidate.all_files)
    return sum(status.size for status in found if status)
