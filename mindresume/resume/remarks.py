"""What is wrong with a checkpoint that a resume can use all the same: said wherever it is chosen, listed or verified.

    a file of a rank is missing       other ranks hold every tensor of it, proven by the records
    the manifest cannot be read       the records of all ranks are there and agree: they are the commit
    common.json, metadata.json        records say the same. Their checksums are in the manifest; where that is damaged, what they
                                      should say is derived from the records anew
"""
from __future__ import annotations

import os
from collections.abc import Iterable

from mindresume.errors import DamagedFileError, RecordError
from mindresume.files.checksum import file_checksum
from mindresume.formats import Candidate, Refusal
from mindresume.formats.described import described
from mindresume.formats.iteration_files import COMMON, METADATA
from mindresume.formats.iterations import common_from, common_of, metadata_of
from mindresume.formats.metadata import encode_metadata, read_metadata
from mindresume.formats.records import details_of, listed
from mindresume.manifest import MANIFEST
from mindresume.store.storage import Storage


def replica_text(lost: Iterable[tuple[int, str]]) -> list[str]:
    """One sentence on files that replicas stand in for; none without. ``lost``: (rank, path of its file)."""
    rows = list(lost)
    return [f"the file of rank {listed(list(dict.fromkeys(rank for rank, _ in rows)))} is missing "
            f"({listed([path for _, path in rows], 2)}); other ranks hold every tensor of it, so a resume goes on with those"
            ] if rows else []


def manifest_text(candidate: Candidate) -> list[str]:
    """One sentence if its manifest cannot be used though its records can."""
    if not candidate.manifest_problem or candidate.problem is not None:
        return []
    return [f"{MANIFEST} of step {candidate.step}: {candidate.manifest_problem}; the records of all ranks are there and agree, "
            f"so a resume goes by them"]


def damaged_metadata_files(storage: Storage, root: str, candidate: Candidate) -> list[Refusal]:
    """Files beside the weights that are not as they were written: the manifest, ``common.json`` and ``metadata.json``. A resume
    can do without them; mindformers alone cannot do without the latter."""
    path = os.path.relpath(os.path.join(candidate.attempt or "", MANIFEST), root)
    found = [candidate.refuse(text, path) for text in manifest_text(candidate)]
    if not found:
        small = _by_checksums(storage, root, candidate)
    else:
        small = _by_records(storage, root, candidate) if candidate.base else []
    return found + [candidate.refuse(f"{text}; a resume goes by the records, mindformers alone could not", file)
                    for text, file in small]


def _by_checksums(storage: Storage, root: str, candidate: Candidate) -> list[tuple[str, str]]:
    """(what is wrong, file)."""
    found = []
    for file in candidate.small:
        try:
            with storage.open(os.path.join(root, file.path)) as opened:
                checksum, size = file_checksum(opened)
        except OSError as error:
            found.append((f"{file.path} cannot be read: {error.strerror or error}", file.path))
            continue
        if (checksum, size) != (file.checksum, file.size):
            found.append((f"{file.path} is not what was written: {size} bytes, checksum {checksum}, recorded {file.size} bytes, "
                          f"{file.checksum}", file.path))
    return found


def _by_records(storage: Storage, root: str, candidate: Candidate) -> list[tuple[str, str]]:
    """(what is wrong, file). By what they say: another version may have written it in other words."""
    common, metadata, found = f"{candidate.base}/{COMMON}", f"{candidate.base}/{METADATA}", []
    try:
        there, expected = common_of(storage, root, candidate.base), common_from(candidate.state)
        if there != expected:
            found.append((f"{common} is not what was written: {there}, by the records {expected}", common))
    except DamagedFileError as error:
        found.append((f"{common}: {error.reason}", common))
    try:
        if candidate.world_size > 1 and metadata_of(storage, os.path.join(root, candidate.base)) != _recorded(storage, candidate):
            found.append((f"{metadata} is not what was written: the records say something else", metadata))
    except DamagedFileError as error:
        found.append((f"{metadata}: {error.reason}", metadata))
    except (RecordError, ValueError, OSError) as error:
        found.append((f"{metadata} cannot be compared with the records: {error}", metadata))
    return found


def _recorded(storage: Storage, candidate: Candidate) -> object:
    """What ``metadata.json`` should say, as if it had been read."""
    files = [[os.path.basename(file.path) for file in candidate.files[rank]] for rank in range(candidate.world_size)]
    pieces = encode_metadata(described(files, candidate.deduplicated,
                                       lambda rank: details_of(storage, candidate.attempt or "", rank)))
    return read_metadata(b"".join(pieces), METADATA)
