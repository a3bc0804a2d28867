"""Defines the result of a selection."""
from __future__ import annotations

from dataclasses import dataclass

from mindresume.formats import MERGED, MINDFORMERS, Candidate, Refusal, missing_ranks_text
from mindresume.formatting import ranks_count
from mindresume.resume.verified_shard import VerifiedShard


@dataclass(frozen=True)
class Choice:
    """The result of a selection.

    Args:
        chosen: the checkpoint to resume from; None: there is none.
        refused: every newer candidate (every candidate, if none is chosen) with its reason, newest first.
        notes: sentences for the log: what was found and ignored.
        is_fresh_start: no save was ever complete there, so a fresh start loses nothing.
        shards: the files that this process verified, by rank of the checkpoint.
        root: the folder to which the paths of ``chosen`` are relative.
        bytes_verified: every byte was verified; False: only sizes and headers.
        warnings: sentences on defects of the chosen checkpoint that do not prevent its use.
        consolidated: these are consolidated weights, which have no layout of their own.
        directory: the checkpoint directory of the training, if ``root`` is its tier in memory; else empty.
    """
    chosen: Candidate | None
    refused: tuple[Refusal, ...]
    notes: tuple[str, ...]
    is_fresh_start: bool
    shards: tuple[VerifiedShard, ...] = ()
    root: str = ""
    bytes_verified: bool = True
    warnings: tuple[str, ...] = ()
    consolidated: bool = False
    directory: str = ""

    @property
    def in_memory(self) -> bool:
        """Whether the checkpoint lies in a tier in memory."""
        return bool(self.directory)

    @property
    def checkpoint_dir(self) -> str:
        """The checkpoint directory on disk."""
        return self.directory or self.root


def describe_candidate(candidate: Candidate, bytes_verified: bool = True) -> str:
    """Returns a phrase for people: the first file, who wrote it, and what was verified (``bytes_verified``: every byte)."""
    first = candidate.iteration_dir or (candidate.first.path if candidate.first else "no file")
    lost = f"; {text}" if (text := missing_ranks_text(candidate)) else ""
    if candidate.origin == MINDFORMERS:
        return f"{first}, written by mindformers without records: sizes and headers are checked, not every byte{lost}"
    checked = "every byte" if bytes_verified else "sizes and headers"
    if candidate.origin == MERGED:
        return f"{first}, consolidated weights that mindresume wrote, {checked} of the tensors checked"
    return f"{first}, run {candidate.run}, {ranks_count(candidate.world_size)}, {checked} checked{lost}"
