"""Finds defects of a checkpoint that do not prevent its use. They are reported when it is selected, listed or verified.

    a file of a rank is missing           other ranks hold every tensor of it, by the records
    the manifest cannot be read           the records of all ranks exist and agree: they are the commit
    common.json or metadata.json differ   the records hold the same facts. The manifest holds their checksums; if it is damaged,
                                          the expected contents are derived from the records
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from mindresume.errors import CorruptFileError, RecordError
from mindresume.formats import Candidate, CheckpointDir, Refusal
from mindresume.formats.iterations import COMMON, METADATA, common_from_state, load_common
from mindresume.formats.metadata import encode_metadata, load_metadata, metadata_from_records, read_metadata
from mindresume.formats.records import details_of
from mindresume.formats.weight_files import is_as_recorded
from mindresume.formatting import listed
from mindresume.model.manifest import MANIFEST
from mindresume.storage.interface import Storage

_Problem = tuple[str, str, Exception | None]        # (text, file, error from which it follows)


def replica_warning(missing: Iterable[tuple[int, str]]) -> list[str]:
    """Returns one sentence about missing files that replicas replace; an empty list without such files. ``missing``: (rank,
    path)."""
    rows = list(missing)
    return [f"the file of rank {listed(list(dict.fromkeys(rank for rank, _ in rows)))} is missing "
            f"({listed([path for _, path in rows], 2)}); other ranks hold every tensor of it, so a resume uses those"
            ] if rows else []


def manifest_warning(candidate: Candidate) -> list[str]:
    """Returns one sentence if the manifest cannot be used but the records can; else an empty list."""
    if not candidate.manifest_problem or candidate.problem is not None:
        return []
    return [f"{MANIFEST} of step {candidate.step}: {candidate.manifest_problem}; the records of all ranks exist and agree, "
            f"so a resume uses them"]


def damaged_metadata_files(directory: CheckpointDir, candidate: Candidate) -> list[Refusal]:
    """Returns a refusal for each of the manifest, ``common.json`` and ``metadata.json`` that differs from what was written. A
    resume by mindresume does not need them; mindformers without mindresume needs the last two."""
    path = os.path.relpath(os.path.join(candidate.records_dir or "", MANIFEST), directory.root)
    found = [replace(candidate.refuse(text, path), is_unreadable=candidate.manifest_unreadable)
             for text in manifest_warning(candidate)]
    if not found:
        damaged = _by_checksums(directory, candidate)
    else:
        damaged = _by_records(directory, candidate) if candidate.iteration_dir else []
    return found + [candidate.refuse(f"{text}; a resume uses the records, mindformers without mindresume cannot", file,
                                     error=error) for text, file, error in damaged]


def _by_checksums(directory: CheckpointDir, candidate: Candidate) -> list[_Problem]:
    """Returns a row for each metadata file whose checksum differs from the one in the manifest."""
    found: list[_Problem] = []
    for file in candidate.metadata_files:
        path = directory.path(file.path)
        try:
            if not is_as_recorded(directory.storage, path, file):
                status = directory.storage.status(path)
                found.append((f"{file.path} is not what was written: it has {status.size if status else 0} bytes, "
                              f"{file.size} bytes of checksum {file.checksum} were written", file.path, None))
        except OSError as error:
            found.append((f"{file.path} cannot be read: {error.strerror or error}", file.path, error))
    return found


def _by_records(directory: CheckpointDir, candidate: Candidate) -> list[_Problem]:
    """Returns a row for each metadata file that contradicts the records. Values are compared, not bytes: another version may have
    encoded them differently."""
    common, metadata = f"{candidate.iteration_dir}/{COMMON}", f"{candidate.iteration_dir}/{METADATA}"
    found: list[_Problem] = []
    try:
        there, expected = load_common(directory, candidate.iteration_dir), common_from_state(candidate.state)
        if there != expected:
            found.append((f"{common} is not what was written: it holds {there}, the records {expected}", common, None))
    except CorruptFileError as error:
        found.append((f"{common}: {error.reason}", common, error))
    try:
        if candidate.world_size > 1 and (load_metadata(directory.storage, directory.path(candidate.iteration_dir)) !=
                                         _metadata_by_records(directory.storage, candidate)):
            found.append((f"{metadata} is not what was written: the records hold other values", metadata, None))
    except CorruptFileError as error:
        found.append((f"{metadata}: {error.reason}", metadata, error))
    except (RecordError, ValueError, OSError) as error:
        found.append((f"{metadata} cannot be compared with the records: {error}", metadata, error))
    return found


def _metadata_by_records(storage: Storage, candidate: Candidate) -> object:
    """Returns the parsed ``metadata.json`` that the records imply."""
    files = [[os.path.basename(file.path) for file in candidate.files[rank]] for rank in range(candidate.world_size)]
    pieces = encode_metadata(metadata_from_records(files, candidate.deduplicated,
                                       lambda rank: details_of(storage, candidate.records_dir or "", rank)))
    return read_metadata(b"".join(pieces), METADATA)
