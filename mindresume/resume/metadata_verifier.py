"""Verifies an iteration folder without records: ``metadata.json``, and the headers of all files against it. Such folders have no
checksums, so nothing else is known about their contents.

    all ranks at once    metadata.json can be read, and a file exists for every slice that it names
    each rank            the headers of its files hold every slice that they should, in the dtype and shape of the layout
"""
from __future__ import annotations

import os
from collections.abc import Mapping

from mindresume import runtime
from mindresume.errors import CorruptFileError
from mindresume.formats import MINDFORMERS, Candidate, CheckpointDir, Refusal
from mindresume.formats.iterations import METADATA
from mindresume.formats.metadata import TensorMetadata, load_metadata
from mindresume.formats.weight_files import header_of
from mindresume.formatting import listed
from mindresume.model.layout import is_scalar, region_of
from mindresume.model.manifest import FileRecord
from mindresume.model.training_state import is_transient
from mindresume.tensor_files import Header


def needs_metadata(candidate: Candidate) -> bool:
    """Returns whether only ``metadata.json`` holds the layouts of its tensors."""
    return candidate.origin == MINDFORMERS and bool(candidate.iteration_dir) and candidate.problem is None


class MetadataVerifier:
    """Verifies with ``metadata.json`` of one candidate, which is read once for all ranks that one process verifies. Several
    threads may use it."""

    def __init__(self, directory: CheckpointDir, candidate: Candidate):
        self.storage, self.root, self.candidate = directory.storage, directory.root, candidate
        self._lock = runtime.Lock()
        self._read = False
        self._rows: Mapping[str, TensorMetadata] = {}
        self._by_file: dict[str, list[tuple[TensorMetadata, int]]] = {}      # {file name: [(tensor, number of the slice)]}
        self._problem: Refusal | None = None

    def problem(self) -> Refusal | None:
        """Returns why the metadata cannot be used; None if it can. Weight files are not opened."""
        with self._lock:
            if not self._read:
                self._problem, self._read = self._open(), True
            return self._problem

    def _open(self) -> Refusal | None:
        folder, path = os.path.join(self.root, self.candidate.iteration_dir), f"{self.candidate.iteration_dir}/{METADATA}"
        try:
            if self.storage.status(os.path.join(folder, METADATA)) is None:
                return None                                             # optional for one rank; else the scan refuses it
            self._rows = load_metadata(self.storage, folder)
        except CorruptFileError as error:
            return self.candidate.refuse(f"{METADATA}: {error.reason}", path, error=error)
        except OSError as error:
            return self.candidate.refuse(f"{METADATA}: it cannot be read: {error.strerror or error}", path, error=error)
        present = {os.path.basename(file.path) for file in self.candidate.all_files}
        for row in self._rows.values():
            for number, copies in row.stored.items():
                files = {copy.file for copy in copies}
                if present.isdisjoint(files):
                    return self.candidate.refuse(f"{METADATA} names {listed(sorted(files), 3)} for slice {number} "
                                                 f"of {row.name}, and no such file exists", path)
                for file in files:
                    self._by_file.setdefault(file, []).append((row, number))
        return None

    def mismatch(self, rank: int, headers: Mapping[FileRecord, Header]) -> Refusal | None:
        """Returns how the files of ``rank`` differ from the metadata; None if they do not.

        Raises:
            CorruptFileError: a file of another rank, which holds a copy, is damaged.
        """
        if problem := self.problem():
            return problem
        for file, header in headers.items():
            for row, number in self._by_file.get(os.path.basename(file.path), ()):
                entry = header.tensors.get(row.name)
                if entry is None and not any(self._has(copy.file, row.name) for copy in row.stored[number]):
                    return self.candidate.refuse(f"rank {rank}: {row.name} is not in the file that {METADATA} names for it: "
                                                 f"the two are of different saves", file.path, rank)
                expected = tuple(part.stop - part.start for part in region_of(row.layout, row.shape, number))
                if entry is not None and (entry.dtype, entry.shape) != (row.dtype, expected):
                    return self.candidate.refuse(f"rank {rank} holds {row.name} as {entry.dtype} of shape {entry.shape}, by "
                                                 f"{METADATA} it is {row.dtype} of shape {expected}", file.path, rank)
        return self._find_unnamed(rank, headers)

    def _find_unnamed(self, rank: int, headers: Mapping[FileRecord, Header]) -> Refusal | None:
        """Returns a refusal if the metadata does not name some tensors, so their layouts are unknown. It never names counters."""
        if self.candidate.world_size == 1 or rank != min(self.candidate.files):
            return None
        for file, header in headers.items():
            unnamed = [name for name, entry in header.tensors.items()
                    if name not in self._rows and not is_transient(name) and not is_scalar(entry.shape)]
            if unnamed:
                return self.candidate.refuse(f"{METADATA} does not name {listed(unnamed, 5)}, so their layouts are unknown",
                                             file.path, rank)
        return None

    def _has(self, file: str, name: str) -> bool:
        record = FileRecord(f"{self.candidate.iteration_dir}/{file}", "safetensors")
        if self.storage.status(os.path.join(self.root, record.path)) is None:
            return False
        return name in header_of(CheckpointDir(self.storage, self.root), record).tensors
