"""Defines records and manifests, which describe the files that were actually written; ``docs/format.md`` specifies them on one
page.

Each rank publishes one *record* of the files it wrote. Rank 0 makes the *manifest* of a checkpoint from the records of all ranks;
its existence is the commit. Both are text files of a few lines:

    <xxh3_128 of the second line>
    {the head: small, everything that selection and commit need}
    {the details of a record: every tensor, the random state; absent in a manifest}

The checksums reveal a torn or altered file, and committing 8,000 ranks reads 8,000 heads but no list of tensors. ``record_codec``
reads and writes the lines and checks their fields; ``record_details`` defines the third line.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import xxhash

from mindresume import runtime
from mindresume.errors import RecordError
from mindresume.model import record_codec as codec
from mindresume.model.file_record import FileRecord, files_of_rank
from mindresume.model.layout import MAX_RANKS
from mindresume.model.record_details import Details
from mindresume.model.training_state import TrainingState

FOLDER = ".mindresume"                 # below the checkpoint root; mindformers lists no hidden folders
MANIFEST = "manifest.json"
SCRUB_RESULT = "scrub.json"            # file beside the records: the result of a scrub (formats/scrub_result.py)
EMERGENCY = "emergency"                # file beside the records: ranks of this job were lost, and the others saved their state
TRASH = "trash-"                       # name prefix of an attempt folder that is being removed, which is no checkpoint any more
PROBE = "probe-"                       # name prefix of a short-lived file that tests the folder, or which ranks see it
MAX_SEQUENCE = 10**18 - 1              # of a run
# Accepts only the leading zeros that the writers below produce: else an attempt could have two folders, and a rank two records.
_SEQUENCE = r"(?:[0-9]{4}|[1-9][0-9]{4,17})"
_RUN = re.compile(rf"({_SEQUENCE})-[0-9a-f]{{8}}")
_ATTEMPT = re.compile(rf"step-([0-9]{{10}}|[1-9][0-9]{{10,17}})-run-({_SEQUENCE}-[0-9a-f]{{8}})")
_RECORD = re.compile(r"rank_([0-9]{5}|[1-9][0-9]{5,17})\.json")


def run_name(sequence: int, token: str) -> str:
    """Returns the id of one launch: a number that increases with every launch in a folder, and ``token``, 8 random hex digits.
    Raises RecordError for a number above MAX_SEQUENCE, which only a damaged or foreign name can cause."""
    if sequence > MAX_SEQUENCE:
        raise RecordError(f"the next run would be number {sequence}, at most {MAX_SEQUENCE} are possible: a name in {FOLDER} "
                          f"holds the number before it; mindresume cannot have written it, remove it")
    return f"{sequence:04d}-{token}"


def is_run(name: str) -> bool:
    """Returns whether ``name`` is the id of a run."""
    return _RUN.fullmatch(name) is not None


def run_sequence(run: str) -> int:
    """Returns the number of a run in its folder, from 1. A later run always has a larger number, whatever the clocks say. Raises
    RecordError if ``run`` is not a run id."""
    found = _RUN.fullmatch(run)
    if not found:
        raise RecordError(f"{run!r}"[:200] + " is not a run id")
    return int(found.group(1))


def attempt_name(step: int, run: str) -> str:
    """Returns the name of the records folder of one attempt: one run saving one step."""
    return f"step-{step:010d}-run-{run}"


def parse_attempt(name: str) -> tuple[int, str] | None:
    """Returns (step, run) of an attempt folder, None for any other name."""
    found = _ATTEMPT.fullmatch(name)
    return (int(found.group(1)), found.group(2)) if found else None


def attempts(names: list[str]) -> Iterator[tuple[str, int, str]]:
    """Yields (name, step, run) for every attempt folder in ``names``."""
    for name in names:
        found = parse_attempt(name)
        if found:
            yield name, *found


def trash_name(attempt: str) -> str:
    """Returns a name for an attempt folder that is to be removed; a random nonce makes it unique."""
    return f"{TRASH}{attempt}.{runtime.token_hex(4)}"


def strip_trash(name: str) -> str:
    """Returns the attempt name in a result of ``trash_name``; any other name unchanged."""
    return name.removeprefix(TRASH).partition(".")[0] if name.startswith(TRASH) else name


def is_probe(name: str) -> bool:
    """Returns whether ``name`` is the name of a probe file, complete or temporary (with a leading dot)."""
    return name.removeprefix(".").startswith(PROBE)


def record_name(rank: int) -> str:
    """Returns the file name of the record of ``rank``."""
    return f"rank_{rank:05d}.json"


def record_rank(name: str) -> int | None:
    """Returns the rank whose record has this file name, None for any other name."""
    found = _RECORD.fullmatch(name)
    return int(found.group(1)) if found else None


@dataclass(frozen=True)
class Record:
    """Describes the files that one rank wrote for one step of one run.

    Attributes:
        run: id of the run.
        rank: the writer.
        world_size: ranks of the job.
        state: training state at the save.
        saved_at: seconds since 1970, for display only.
        files: the weight files.
        deduplicated: this rank wrote only its share of the slices that several ranks hold (``remove_redundancy``).
        lineage: id of the run that began this training; empty if unknown.
        local_ranks: where nodes share no disk, the ranks that see this rank's folder; else empty.
    """
    run: str
    rank: int
    world_size: int
    state: TrainingState
    saved_at: float
    files: tuple[FileRecord, ...]
    deduplicated: bool = False
    lineage: str = ""
    local_ranks: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        return self.state.step

    def encode(self, details: Details) -> bytes:
        """Returns the content of the record file."""
        tail = codec.dump_line(details.to_json(), codec.DETAILS_LIMIT)
        head = {"version": codec.VERSION, "kind": "record", "run": self.run, "rank": self.rank, "world_size": self.world_size,
                "state": self.state.to_json(), "saved_at": self.saved_at, "files": [file.to_json() for file in self.files],
                "deduplicated": self.deduplicated, **codec.set_fields(lineage=self.lineage,
                    part=codec.rank_ranges(self.local_ranks)),
                "details": xxhash.xxh3_128_hexdigest(tail)}
        return codec.encode_head(head) + tail + b"\n"

    @classmethod
    def decode(cls, head: Mapping[str, Any]) -> Record:
        """Makes a record from its parsed head. Raises RecordError if a field is missing or wrong."""
        with codec.field_errors("record"):
            run_sequence(head["run"])
            world_size = codec.expect_count(head, "world_size", 1, MAX_RANKS)
            rank = codec.expect_count(head, "rank", 0, world_size - 1)
            local_ranks = codec.parse_ranks(head.get("part"), world_size)
            if local_ranks and rank not in local_ranks:
                raise RecordError(f"part is {local_ranks!r}"[:200] + f", and this is the record of rank {rank}")
            return cls(head["run"], rank, world_size, TrainingState.from_json(head["state"]), codec.expect_time(head["saved_at"]),
                       files_of_rank(head["files"], rank), codec.expect_flag(head, "deduplicated"), _lineage(head), local_ranks)


def read_record(file: BinaryIO) -> tuple[Record, str]:
    """Returns the head of a record and the checksum of its head line. Raises RecordError if it is torn, altered or of another
    kind."""
    head, line = codec.read_head(file, "record")
    return Record.decode(head), xxhash.xxh3_128_hexdigest(line)


def read_details(file: BinaryIO) -> tuple[Record, Details]:
    """Returns a record and its details. Raises RecordError if either is torn, altered or of another kind."""
    head, _ = codec.read_head(file, "record")
    tail = codec.read_line(file, codec.DETAILS_LIMIT, "record")
    if xxhash.xxh3_128_hexdigest(tail) != head.get("details"):
        raise RecordError("the list of tensors is truncated or altered")
    with codec.field_errors("record"):
        record, details = Record.decode(head), Details.from_json(codec.parse_line(tail, "record"))
        beyond = next((name for name, row in details.tensors.items() if row.file >= len(record.files)), None)
        if beyond is not None:
            raise RecordError(f"tensor {beyond} is in file {details.tensors[beyond].file} of {len(record.files)}")
        return record, details


@dataclass(frozen=True)
class Manifest:
    """Commits one checkpoint: names the files of each rank and the checksum of each rank's record, in order of rank.

    Attributes:
        run: id of the run.
        state: training state at the save; its metrics are merged from all ranks.
        saved_at: seconds since 1970, for display only.
        files: weight files of each rank.
        records: checksum of the head line of each record.
        metadata_files: files that rank 0 wrote beside them, such as ``metadata.json``.
        deduplicated: some rank wrote only its share.
        local_ranks: where nodes share no disk, the ranks that ``files`` belongs to; else empty, for all ranks.
        world: ranks of the job if ``local_ranks`` is given; else 0.
        lineage: as in a record.
    """
    run: str
    state: TrainingState
    saved_at: float
    files: tuple[tuple[FileRecord, ...], ...]
    records: tuple[str, ...]
    metadata_files: tuple[FileRecord, ...] = ()
    deduplicated: bool = False
    local_ranks: tuple[int, ...] = ()
    world: int = 0
    lineage: str = ""

    @classmethod
    def from_records(cls, records: Sequence[tuple[Record, str]], local_ranks: tuple[int, ...] = ()) -> Manifest:
        """Makes a manifest from ``records`` with the checksums of their heads, in order of rank. ``local_ranks``: the ranks
        concerned, () for all."""
        first = records[0][0]
        # Under pipeline parallelism only the last stage has the loss; of several values, the lowest rank's counts.
        metrics = {name: value for record, _ in reversed(records) for name, value in record.state.metrics}
        state = replace(first.state, metrics=tuple(sorted(metrics.items())))
        return cls(first.run, state, max(record.saved_at for record, _ in records), tuple(record.files for record, _ in records),
                   tuple(checksum for _, checksum in records), (), any(record.deduplicated for record, _ in records), local_ranks,
                   first.world_size if local_ranks else 0, first.lineage)

    @property
    def world_size(self) -> int:
        return self.world or len(self.files)

    @property
    def ranks(self) -> Sequence[int]:
        """Returns the ranks that ``files`` and ``records`` belong to, in order."""
        return self.local_ranks or range(len(self.files))

    @property
    def step(self) -> int:
        return self.state.step

    def encode(self) -> bytes:
        """Returns the content of the manifest file."""
        return codec.encode_head({"version": codec.VERSION, "kind": "manifest", "run": self.run, "world_size": self.world_size,
                            "state": self.state.to_json(), "saved_at": self.saved_at,
                            "files": [[file.to_json() for file in files] for files in self.files], "records": list(self.records),
                            "small": [file.to_json() for file in self.metadata_files], "deduplicated": self.deduplicated,
                            **codec.set_fields(lineage=self.lineage, part=list(self.local_ranks))}, codec.MANIFEST_LIMIT)

    @classmethod
    def read(cls, file: BinaryIO) -> Manifest:
        """Reads a manifest. Raises RecordError if it is torn, altered or of another kind."""
        head, _ = codec.read_head(file, "manifest", codec.MANIFEST_LIMIT)
        with codec.field_errors("manifest"):
            run_sequence(head["run"])
            world_size = codec.expect_count(head, "world_size", 1, MAX_RANKS)
            rows, records = codec.expect_list(head["files"], "files"), codec.expect_list(head["records"], "records")
            local_ranks = codec.parse_ranks(head.get("part"), world_size)
            ranks = local_ranks or range(world_size)
            if not len(rows) == len(records) == len(ranks):
                raise RecordError(f"manifest: {len(rows)} files and {len(records)} records for {len(ranks)} ranks")
            files = tuple(files_of_rank(row, rank) for rank, row in zip(ranks, rows, strict=True))
            metadata_files = tuple(FileRecord.metadata_file(row) for row in codec.expect_list(head["small"], "small"))
            paths = [file.path for group in (*files, metadata_files) for file in group]
            if len(set(paths)) < len(paths):
                raise RecordError(f"manifest: {Counter(paths).most_common(1)[0][0]} is named twice")
            for rank, checksum in zip(ranks, records, strict=True):
                codec.expect_checksum(checksum, record_name(rank))
            return cls(head["run"], TrainingState.from_json(head["state"]), codec.expect_time(head["saved_at"]), files,
                       tuple(records), metadata_files, codec.expect_flag(head, "deduplicated"), local_ranks,
                       world_size if local_ranks else 0, _lineage(head))


def _lineage(head: Mapping[str, Any]) -> str:
    """Reads the id of a run; empty if the field is absent."""
    if "lineage" not in head:
        return ""
    lineage: str = head["lineage"]
    run_sequence(lineage)
    return lineage
