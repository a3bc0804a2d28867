"""The policy of a selection, the rule by which it refuses a candidate before its contents are read,
and its result."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindresume.coordination.collectives import Group
from mindresume.formats import (
    MERGED,
    MINDFORMERS,
    Candidate,
    CheckpointDir,
    Refusal,
    missing_ranks_text,
)
from mindresume.formats.bad_steps import BadStep
from mindresume.formats.weight_files import file_sizes, is_weights_only, known_damage
from mindresume.formatting import listed, ranks_count
from mindresume.resume.replicas import replica_files
from mindresume.resume.verifier import VerifiedShard, stored_slices, wrong_size
from mindresume.saving.crash_loop import FailedLoad, suspicion
from mindresume.storage import Storage, publish_json, read_bytes
from mindresume.typed import parse_json

# the message of mindformers
NONE_HEALTHY = "The training has no healthy checkpoints yet, please start training again"
UNHEALTHY = "it was unhealthy when it was saved"


@dataclass(frozen=True)
class SelectionPolicy:
    """What a selection accepts. If ranks have different policies, the one of rank 0 decides which
    candidates are offered.

    Args:
        world_size: number of ranks of the job that would resume. None: any number; the number of
            ranks of a checkpoint is then taken from its manifest, else from the strategy files,
            else it is estimated (``Scan.expected_ranks``).
        requested: file name, iteration folder or step that the user asked for (``resume_training:
            NAME``). Nothing else is considered, and health and failed loads are ignored. None: the
            newest usable checkpoint.
        full: every byte is read and compared with its checksum; False: only names, sizes and
            headers are checked.
        every_rank: the processes together verify the files of all ranks; False: each those of its
            own rank, which it loads.
        any_layout: the checkpoint may be loaded in another layout, so a single file counts as
            consolidated weights.
        unhealthy: names of files that mindformers' health monitor found unhealthy. They are
            refused, and so is a checkpoint whose own state says so. None: health is ignored.
        max_failed_loads: a checkpoint is taken last if so many jobs in a row died after they loaded
            it (``saving.crash_loop``). 0: no limit.
        require_counters: refuse files that hold no step number. False: weights alone are wanted.
    """

    world_size: int | None = None
    requested: str | None = None
    full: bool = True
    every_rank: bool = False
    any_layout: bool = False
    unhealthy: Collection[str] | None = None
    max_failed_loads: int = 0
    require_counters: bool = True

    def ranks_to_verify(self, group: Group, candidate: Candidate) -> Sequence[int]:
        """Returns the ranks of the checkpoint whose files this process verifies. Checkpoints of
        mindformers keep their counters only in the files, so each process also verifies the first
        rank of them."""
        if not self.every_rank:
            return [group.rank]
        own = [rank for rank in candidate.files if rank % group.size == group.rank]
        return own if candidate.state else sorted({min(candidate.files), *own})


def eligible(
    directory: CheckpointDir,
    candidate: Candidate,
    policy: SelectionPolicy,
    failed_loads: Sequence[FailedLoad] = (),
    is_explicit: bool = False,
) -> Refusal | None:
    """Returns why the candidate is not taken wherever its files lie; None if it may be. This is the
    one rule of every source, and of what opens a checkpoint; which ranks have its files, and of
    which size, is for ``check_files``.

    Args:
        failed_loads: the jobs in a row that died after they had loaded it.
        is_explicit: the user asked for this candidate, so health and failed loads are ignored.
    """
    if candidate.problem is not None and (
        policy.require_counters or not is_weights_only(candidate)
    ):
        return candidate.problem
    if candidate.has_scrub_result and (damage := known_damage(directory, candidate)):
        return damage
    if is_explicit:
        return None
    if policy.unhealthy is not None and is_unhealthy(candidate, policy.unhealthy):
        return candidate.refuse(UNHEALTHY)
    if failed_loads and (reason := suspicion(failed_loads, policy.max_failed_loads)):
        return replace(candidate.refuse(reason), is_last_resort=True)
    return None


def none_usable(place: str, refused: Sequence[Refusal]) -> str:
    """Returns the message for a place of which every checkpoint was refused."""
    unhealthy = (
        f"{NONE_HEALTHY}. "
        if any(refusal.reason.startswith(UNHEALTHY) for refusal in refused)
        else ""
    )
    return "\n".join(
        [
            f"{unhealthy}{place} holds checkpoints, but none can be used:",
            *(f"  {refusal}" for refusal in refused),
        ]
    )


def check_files(
    directory: CheckpointDir, candidate: Candidate, world_size: int | None, files: bool = True
) -> Refusal | None:
    """Returns why a candidate without a problem cannot be used; None if the files of all ranks
    exist and their layouts are known.

    Args:
        world_size: ranks of the job that would resume. None: any number.
        files: False: existence and sizes are not checked, because each rank verifies its own files
            anyway.
    """
    if candidate.origin == MINDFORMERS:
        problem = _wrong_ranks(candidate, world_size)
    elif candidate.local_ranks:
        problem = _wrong_files(directory, candidate) if files else None
        return problem or candidate.refuse(
            f"only the files of rank {listed(candidate.local_ranks)} of {candidate.world_size} are "
            "here: nodes that share no disk saved it. A job on these nodes takes the newest step "
            "that all of them have; for any other job, copy the folders of all nodes to one shared "
            "disk"
        )
    elif (
        world_size is not None
        and candidate.world_size != world_size
        and not candidate.iteration_dir
    ):
        problem = candidate.refuse(
            f"saved by {ranks_count(candidate.world_size)}, this job has {world_size}; to change "
            "the number of ranks set auto_trans_ckpt: True"
        )
    else:
        problem = None
    if (
        problem is None
        and candidate.origin == MINDFORMERS
        and candidate.iteration_dir
        and candidate.problem is None
    ):
        stored = stored_slices(directory, candidate)
        problem = stored if isinstance(stored, Refusal) else None
    if problem is not None or not files:
        return problem
    return _wrong_files(directory, candidate)


def _wrong_files(directory: CheckpointDir, candidate: Candidate) -> Refusal | None:
    """Returns a refusal for the first file that is missing without replicas, or has another
    size."""
    try:
        found = file_sizes(directory, candidate.all_files)
    except OSError as error:
        return candidate.refuse(f"its files cannot be checked: {error}", error=error)
    rows = [(rank, file) for rank, files in candidate.files.items() for file in files]
    for (rank, file), size in zip(rows, found, strict=True):
        if size is None and candidate.records_dir:
            replicas = replica_files(directory, candidate, rank)
            if isinstance(replicas, Refusal):
                return replicas
            continue
        if size is None:
            return candidate.refuse(f"the file of rank {rank} is missing", file.path, rank)
        if size == 0 or file.size not in (None, size):
            return wrong_size(candidate, rank, file, size)
    return None


def _wrong_ranks(candidate: Candidate, world_size: int | None) -> Refusal | None:
    """Returns a refusal if files of mindformers in rank folders are of fewer or more ranks than the
    job has."""
    if world_size is None or candidate.iteration_dir:
        return None
    missing = [
        rank
        for rank in range(world_size)
        if rank not in candidate.files and rank not in candidate.missing_ranks
    ]
    if missing:
        name = candidate.first.path
        return candidate.refuse(
            f"no file of rank {listed(missing)} for this step of this run (others have {name}); "
            "without "
            f"strategy files of that job it is unknown whether the other files hold all tensors",
            rank=missing[0],
        )
    more = [rank for rank in candidate.files if rank >= world_size]
    if more:
        return candidate.refuse(
            f"saved by at least {max(more) + 1} ranks, this job has {world_size}; to change the "
            "number of ranks set auto_trans_ckpt: True",
            candidate.files[more[0]][0].path,
            more[0],
        )
    return None


# ---- the result ----------------------------------------------------------------------------------


def read_size(candidate: Candidate, ranks: Iterable[int]) -> int:
    """Returns the size of the files that ``Verifier`` reads for these ranks, in bytes."""
    return sum(file.size or 0 for rank in ranks for file in candidate.files.get(rank, ()))


@dataclass(frozen=True)
class Choice:
    """The result of a selection.

    Args:
        chosen: the checkpoint to resume from; None: there is none.
        refused: every newer candidate (every candidate, if none is chosen) with its reason, newest
            first.
        notes: sentences for the log: what was found and ignored.
        is_fresh_start: no save was ever complete there, so a fresh start loses nothing.
        shards: the files that this process verified, by rank of the checkpoint.
        root: the folder to which the paths of ``chosen`` are relative.
        bytes_verified: every byte was verified; False: only sizes and headers.
        warnings: sentences on defects of the chosen checkpoint that do not prevent its use.
        consolidated: these are consolidated weights, which have no layout of their own.
        directory: the checkpoint directory of the training, if ``root`` is its tier in memory; else
            empty.
        bad_steps: of the checkpoint directory on disk, oldest first.
    """

    chosen: Candidate | None
    refused: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    is_fresh_start: bool = False
    shards: tuple[VerifiedShard, ...] = ()
    root: str = ""
    bytes_verified: bool = True
    warnings: tuple[str, ...] = ()
    consolidated: bool = False
    directory: str = ""
    bad_steps: tuple[BadStep, ...] = ()

    @property
    def in_memory(self) -> bool:
        """Whether the checkpoint lies in a tier in memory."""
        return bool(self.directory)

    @property
    def is_in_parts(self) -> bool:
        """Whether its parts lie in memory of several nodes: each rank sees those of its own."""
        return self.in_memory and self.chosen is not None and bool(self.chosen.local_ranks)

    @property
    def checkpoint_dir(self) -> str:
        """The checkpoint directory on disk."""
        return self.directory or self.root


def describe_candidate(candidate: Candidate, bytes_verified: bool = True) -> str:
    """Returns a phrase for people: the first file, who wrote it, and what was verified
    (``bytes_verified``: every byte)."""
    first = candidate.iteration_dir or (candidate.first.path if candidate.first else "no file")
    lost = f"; {text}" if (text := missing_ranks_text(candidate)) else ""
    if candidate.origin == MINDFORMERS:
        return (
            f"{first}, written by mindformers without records: sizes and headers are checked, not "
            f"every byte{lost}"
        )
    checked = "every byte" if bytes_verified else "sizes and headers"
    if candidate.origin == MERGED:
        return (
            f"{first}, consolidated weights that mindresume wrote, {checked} of the tensors checked"
        )
    saved_by = ranks_count(candidate.world_size)
    return f"{first}, run {candidate.run}, {saved_by}, {checked} checked{lost}"


# ---- mindformers' health monitor -----------------------------------------------------------------

# Whether the local norm of the embedding was within its threshold. In Checkpoint 2.0 the state of a
# checkpoint holds the result (``ckpt_status``). For rank folders, a list in the output folder has
# one entry per save, which names the file of rank 0 (mindformers core/callback/callback.py,
# tools/resume_ckpt.py); 0 means healthy:
#
#     [{"is_health": 0, "ckpt_name": "llama2_7b_rank_0-2_5.safetensors"}, ...]

LIST = "health_ckpts.json"  # in the output folder
MAX_LIST = 64 << 20  # bytes; one entry has about 80


def add(storage: Storage, folder: str, name: str, health: int, tag: str) -> None:
    """Appends an entry, in the format of mindformers; the list is replaced atomically. Raises
    OSError or ValueError."""
    path = os.path.join(folder, LIST)
    known = read_list(storage, folder) if storage.status(path) is not None else []
    publish_json(storage, path, [*known, {"is_health": health, "ckpt_name": name}], tag)


def unhealthy_files(storage: Storage, folder: str) -> tuple[frozenset[str], str]:
    """Returns the names whose newest entry in the list of ``folder`` is unhealthy, and a problem.
    If the list cannot be used, there are no names and the problem says why; else the problem is
    empty."""
    path = os.path.join(folder, LIST)
    try:
        if storage.status(path) is None:
            return frozenset(), ""
        newest = {row["ckpt_name"]: row["is_health"] for row in read_list(storage, folder)}
        return frozenset(
            os.path.basename(name) for name, health in newest.items() if health != 0
        ), ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return frozenset(), (
            f"{path} cannot be used ({type(error).__name__}: {error}"[:300] + "); no checkpoint is "
            "taken for unhealthy by it"
        )


def read_list(storage: Storage, folder: str) -> list[Any]:
    """Returns the entries of the list in ``folder``. Raises OSError, and ValueError if it is not a
    list."""
    found = parse_json(read_bytes(storage, os.path.join(folder, LIST), MAX_LIST) or b"[]")
    if not isinstance(found, list):
        raise ValueError(f"expected a list, found {type(found).__name__}")
    return found


def is_unhealthy(candidate: Candidate, names: Collection[str]) -> bool:
    """Returns whether the candidate was unhealthy when it was saved, by its own state or by the
    list (``names`` of unhealthy files)."""
    if candidate.state is not None and candidate.state.health:
        return True
    return not candidate.iteration_dir and any(
        os.path.basename(file.path) in names for file in candidate.all_files
    )
