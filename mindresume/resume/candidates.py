"""Finds the candidates that a path means, as ``load_checkpoint`` and ``resume_training`` of a job name them, and lists whether a
resume could use each of them, by names, records and sizes. Contents are not read."""
from __future__ import annotations

import os
from dataclasses import dataclass, replace

from mindresume.errors import ConfigError, CorruptFileError, MissingCheckpointError
from mindresume.formats import MINDFORMERS, Candidate, CheckpointDir, Refusal, Scan, missing_ranks_text
from mindresume.formats.iterations import is_iteration, parse_iteration, parse_weight_file
from mindresume.formats.rank_folders import folder_rank, name_for_rank
from mindresume.formats.scan import below, fresh_start_refusal, scan, scan_one
from mindresume.formats.weight_files import file_sizes, header_of, no_step, scalars_of, status_of
from mindresume.formatting import ranks_count
from mindresume.model.manifest import FORMATS, FileRecord
from mindresume.model.training_state import is_count
from mindresume.resume.checkpoint_warnings import manifest_warning, replica_warning
from mindresume.resume.eligible import SelectionPolicy, check_files, eligible
from mindresume.resume.replicas import StrategyOf, complete_missing_ranks
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel
from mindresume.tensor_files import format_of


def find_candidates(storage: Storage, path: str, requested: str | None = None, world_size: int | None = None
                    ) -> tuple[Scan, bool]:
    """Returns the candidates that ``path`` means, and whether the user asked for a single one explicitly.

    Args:
        path: ``load_checkpoint``: a root folder, a folder above one, a rank folder, an iteration folder or a file.
        requested: ``resume_training``: the name of a file or an iteration folder, or a step.
        world_size: the number of ranks that read a file outside of rank folders.
    Raises:
        MissingCheckpointError: the requested checkpoint does not exist, or several folders below ``path`` hold checkpoints.
        ConfigError: ``path`` is a file of another kind.
    """
    status = storage.status(path)
    if status is not None and not status.is_folder:
        return _of_file(storage, path, world_size), True
    path = path.rstrip("/") or path
    if is_iteration(storage, path):
        return scan_one(storage, path), True
    root = os.path.dirname(os.path.abspath(path)) if folder_rank(os.path.basename(path)) is not None else path
    found = scan(CheckpointDir(storage, root))
    if found.exists and not any(candidate.maybe_completed for candidate in found.candidates):
        found = scan(CheckpointDir(storage,
                                   root))     # a job may have saved later ones, and removed what was listed, while it was read
    if found.exists and not any(candidate.maybe_completed for candidate in found.candidates):
        inner = below(storage, path)
        if inner:
            found, is_explicit = find_candidates(storage, inner, requested, world_size)
            notes = (f"{path} holds no checkpoints itself; those in {inner} are used", *found.notes)
            return replace(found, notes=notes), is_explicit
        found = replace(found, fresh_start_refusal=fresh_start_refusal(storage, root, bool(found.candidates)))
    if requested is None:
        return found, False
    matching = [c for c in found.candidates if is_requested(c, requested)]
    if not matching:
        offered = sorted({c.iteration_dir or os.path.basename(c.first.path) for c in found.candidates if c.first})
        where = f"no rank folder of {root} has such a file" if any(
            not c.iteration_dir for c in found.candidates) or not found.candidates else f"{root} has no such iteration"
        there = f"There are: {', '.join(offered)}" if offered else "There is no checkpoint"
        raise MissingCheckpointError(f"resume_training names {requested!r}: {where}. {there}")
    return replace(found, candidates=tuple(matching[:1]), notes=(), fresh_start_refusal=""), True


def is_requested(candidate: Candidate, requested: str) -> bool:
    """Returns whether ``resume_training: requested`` means this candidate."""
    if candidate.iteration_dir:
        step = int(requested) if requested.isascii() and requested.isdigit() else parse_iteration(requested.rstrip("/"))
        return candidate.step == step is not None
    return any(os.path.basename(file.path) == name_for_rank(requested, rank, candidate.format)
               for rank, (file, *_) in candidate.files.items())


def _of_file(storage: Storage, path: str, world_size: int | None) -> Scan:
    """Returns the candidate that a single file means: in a rank folder, the files of all ranks with its name; in an iteration
    folder, the iteration; elsewhere this file, which every rank reads."""
    folder, name = os.path.split(os.path.abspath(path))
    if folder_rank(os.path.basename(folder)) is not None:
        return find_candidates(storage, os.path.dirname(folder), name)[0]
    if parse_weight_file(name) is not None and is_iteration(storage, folder):
        return scan_one(storage, folder)
    if not name.endswith(tuple(f".{fmt}" for fmt in FORMATS)):
        raise ConfigError(f"{path} is no checkpoint: expected a folder, or a file that ends in .{' or .'.join(FORMATS)}")
    file = FileRecord(name, format_of(name))
    ranks, directory = world_size or 1, CheckpointDir(storage, folder)
    candidate = Candidate(None, MINDFORMERS, file.format, dict.fromkeys(range(ranks), (file,)), ranks)
    try:
        scalars = scalars_of(directory, file, header_of(directory, file))
    except CorruptFileError as error:
        return Scan(directory, (replace(candidate, problem=candidate.refuse(error.reason, name, error=error)),))
    except OSError as error:
        return Scan(directory, (replace(candidate, problem=candidate.refuse(f"cannot be read: {error.strerror or error}", name,
                                                                         error=error)),))
    step, epoch = scalars.get("step_num"), scalars.get("epoch_num")
    if not is_count(step):
        return Scan(directory, (replace(candidate, problem=no_step(name)),))
    return Scan(directory, (replace(candidate, step=step, epoch=epoch if is_count(epoch) else None),))


def world_size_notes(found: Scan, world_size: int | None) -> list[str]:
    """Returns one sentence that states the assumed number of ranks; none if the user or the manifests give it."""
    foreign = any(candidate.origin == MINDFORMERS and not candidate.iteration_dir for candidate in found.candidates)
    if world_size is not None or not foreign or found.expected_ranks is None:
        return []
    return [f"{ranks_count(found.expected_ranks)} assumed from {found.expected_source}, because mindformers writes no "
            f"manifest"]


_LISTED = SelectionPolicy()
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
        strategy_of, world_size: see ``complete_missing_ranks``.
    Raises:
        MissingCheckpointError, ConfigError: see ``candidates.find_candidates``.
    """
    found, _ = find_candidates(storage, path)
    return found, tuple(status_of_candidate(found, candidate, strategy_of, world_size) for candidate in found.candidates)


def status_of_candidate(found: Scan, candidate: Candidate, strategy_of: StrategyOf, world_size: int | None = None
                        ) -> CheckpointStatus:
    """Returns the row of ``list_checkpoints`` for one candidate of the scan ``found``."""
    directory = found.directory
    candidate, ranks = complete_missing_ranks(directory, candidate, strategy_of, world_size, found.expected_ranks)
    problem = eligible(directory, candidate, _LISTED) or check_files(directory, candidate, ranks)
    return CheckpointStatus(candidate, problem, _warnings(directory, candidate) if problem is None else ())


def _warnings(directory: CheckpointDir, candidate: Candidate) -> tuple[str, ...]:
    """Returns the warnings that are known without reading contents."""
    rows = [(rank, file) for rank, files in candidate.files.items() for file in files] if candidate.records_dir else []
    found = file_sizes(directory, [file for _, file in rows])
    lost = [(rank, file.path) for (rank, file), size in zip(rows, found, strict=True) if size is None]
    return (*replica_warning(lost), *manifest_warning(candidate), *filter(None, [missing_ranks_text(candidate)]))


def size_of(directory: CheckpointDir, candidate: Candidate) -> int:
    """Returns the size of those of its files that exist, in bytes."""
    found = parallel(directory.storage, lambda file: status_of(directory, file), candidate.all_files)
    return sum(status.size for status in found if status)
