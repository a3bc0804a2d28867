"""Checks that the files of all ranks of a candidate exist and have the recorded sizes. Contents are not read."""
from __future__ import annotations

from mindresume.formats import MINDFORMERS, Candidate, Refusal
from mindresume.formats.scrub_result import known_damage
from mindresume.formats.weight_files import file_sizes
from mindresume.formatting import listed, ranks_count
from mindresume.model.file_record import FileRecord
from mindresume.resume.metadata_verifier import MetadataVerifier, needs_metadata
from mindresume.resume.replica_files import replica_files
from mindresume.storage.interface import Storage


def check_files(storage: Storage, root: str, candidate: Candidate, world_size: int | None,
                files: bool = True) -> Refusal | None:
    """Returns why the candidate cannot be used; None if the files of all ranks exist and their layouts are known.

    Args:
        world_size: ranks of the job that would resume. None: any number.
        files: False: existence and sizes are not checked, because each rank verifies its own files anyway.
    """
    found = candidate.problem or known_damage(storage, root, candidate)
    if found is not None:
        return found
    if candidate.origin == MINDFORMERS:
        problem = _wrong_ranks(candidate, world_size)
    elif candidate.local_ranks:
        problem = _wrong_files(storage, root, candidate) if files else None
        return problem or candidate.refuse(
            f"only the files of rank {listed(candidate.local_ranks)} of {candidate.world_size} are here: nodes that share no "
            f"disk saved it. A job on these nodes takes the newest step that all of them have; for any other job, copy the "
            f"folders of all nodes to one shared disk")
    elif world_size is not None and candidate.world_size != world_size and not candidate.iteration_dir:
        problem = candidate.refuse(f"saved by {ranks_count(candidate.world_size)}, this job has {world_size}; to change the "
                                   f"number of ranks set auto_trans_ckpt: True")
    else:
        problem = None
    if problem is None and needs_metadata(candidate):
        problem = MetadataVerifier(storage, root, candidate).problem()
    if problem is not None or not files:
        return problem
    return _wrong_files(storage, root, candidate)


def _wrong_files(storage: Storage, root: str, candidate: Candidate) -> Refusal | None:
    """Returns a refusal for the first file that is missing without replicas, or has another size."""
    try:
        found = file_sizes(storage, root, candidate.all_files)
    except OSError as error:
        return candidate.refuse(f"its files cannot be checked: {error}", error=error)
    rows = [(rank, file) for rank, files in candidate.files.items() for file in files]
    for (rank, file), size in zip(rows, found, strict=True):
        if size is None and candidate.records_dir:
            replicas = replica_files(storage, root, candidate, rank)
            if isinstance(replicas, Refusal):
                return replicas
            continue
        if size is None:
            return candidate.refuse(f"the file of rank {rank} is missing", file.path, rank)
        if size == 0 or file.size not in (None, size):
            return wrong_size(candidate, rank, file, size)
    return None


def wrong_size(candidate: Candidate, rank: int, file: FileRecord, size: int) -> Refusal:
    """Returns the refusal of a file that has ``size`` bytes instead of the recorded ones."""
    return candidate.refuse(f"the file of rank {rank} is empty (0 bytes)" if size == 0 else
                            f"the file of rank {rank} has {size} bytes, {file.size} were written", file.path, rank)


def _wrong_ranks(candidate: Candidate, world_size: int | None) -> Refusal | None:
    """Returns a refusal if files of mindformers in rank folders are of fewer or more ranks than the job has."""
    if world_size is None or candidate.iteration_dir:
        return None
    missing = [rank for rank in range(world_size) if rank not in candidate.files and rank not in candidate.missing_ranks]
    if missing:
        name = candidate.first.path
        return candidate.refuse(f"no file of rank {listed(missing)} for this step of this run (others have {name}); without "
                                f"strategy files of that job it is unknown whether the other files hold all tensors",
                                rank=missing[0])
    more = [rank for rank in candidate.files if rank >= world_size]
    if more:
        return candidate.refuse(f"saved by at least {max(more) + 1} ranks, this job has {world_size}; to change the number "
                                f"of ranks set auto_trans_ckpt: True", candidate.files[more[0]][0].path, more[0])
    return None
