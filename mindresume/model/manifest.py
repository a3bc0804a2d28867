"""Defines records and manifests, which describe the files that were actually written; ``docs/format.md`` specifies them on one
page.

Each rank publishes one *record* of the files it wrote. Rank 0 makes the *manifest* of a checkpoint from the records of all ranks;
its existence is the commit. Both are text files of a few lines:

    <xxh3_128 of the second line>
    {the head: small, everything that selection and commit need}
    {the details of a record: every tensor, the random state; absent in a manifest}

The checksums reveal a torn or altered file, and committing 8,000 ranks reads 8,000 heads but no list of tensors. A checksum is
not a signature: anyone who can write the file can compute it. So reading stops at a size limit, every field is checked, and every
function that reads raises RecordError for content that mindresume cannot have written.
"""
from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import xxhash

from mindresume import runtime
from mindresume.errors import RecordError
from mindresume.model.layout import MAX_AXES, MAX_RANKS, TensorLayout
from mindresume.model.training_state import TrainingState, is_count, is_number
from mindresume.typed import parse_json

FOLDER = ".mindresume"                 # below the checkpoint root; mindformers lists no hidden folders
MANIFEST = "manifest.json"
SCRUB_RESULT = "scrub.json"            # file beside the records: the result of a scrub (formats/weight_files.py)
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


# ---- lines and fields -------------------------------------------------------------------------------------------------

VERSION = 1                            # newest version of the format that can be read
# Limits of a line in bytes. A head has a few hundred bytes. A manifest has about 200 for each rank; the limit allows 600 for each
# of MAX_RANKS. The details of a tensor are about as long as its entry in a safetensors header, which may have 100 MB.
HEAD_LIMIT, MANIFEST_LIMIT, DETAILS_LIMIT = 1 << 20, 64 << 20, 128 << 20
MAX_TIME = 10**11                      # seconds since 1970 (year 5138); later times cannot be formatted
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


def encode_head(head: Mapping[str, Any], limit: int = HEAD_LIMIT) -> bytes:
    """Returns the checksum line and the head line. Raises ValueError if the head has more than ``limit`` bytes, as it could
    not be read back."""
    line = dump_line(head, limit)
    return xxhash.xxh3_128_hexdigest(line).encode() + b"\n" + line + b"\n"


def read_head(file: BinaryIO, kind: str, limit: int = HEAD_LIMIT) -> tuple[dict[str, Any], bytes]:
    """Reads the checksum line and the head line, and leaves ``file`` after them. Returns the head and its line. Raises
    RecordError unless they are complete, of this kind and of a known version."""
    checksum = file.readline(64).rstrip(b"\n")
    line = read_line(file, limit, kind)
    if xxhash.xxh3_128_hexdigest(line).encode() != checksum:
        raise RecordError(f"not a {kind}: it is empty, truncated or altered")
    with field_errors(kind):
        head = parse_line(line, kind)
        if not isinstance(head, dict):
            raise RecordError(f"expected a {kind}, found {type(head).__name__}")
        if head.get("kind") != kind:
            raise RecordError(f"expected a {kind}, found {head.get('kind')!r}"[:400])
        version = head.get("version")
        if type(version) is not int or version < 1:
            raise RecordError(f"{kind} of version {version!r}"[:400] + ", expected a whole number of at least 1")
        if version > VERSION:
            raise RecordError(f"{kind} of version {version}"[:400] + f", this mindresume reads up to {VERSION}: install a newer "
                              f"one")
        return head, line


def read_line(file: BinaryIO, limit: int, kind: str) -> bytes:
    """Reads one line of at most ``limit`` bytes and returns it without its line break, which the last line may lack."""
    line = file.readline(limit + 1)
    if len(line) > limit and not line.endswith(b"\n"):
        raise RecordError(f"not a {kind}: a line has more than {limit} bytes")
    return line.removesuffix(b"\n")


def parse_line(line: bytes, kind: str) -> Any:
    """Parses one line of JSON. Raises RecordError if it is not JSON, has too many values or keys, is nested too deeply, repeats a
    key, or has a key that UTF-8 cannot encode."""
    try:
        return parse_json(line)
    except ValueError as error:
        raise RecordError(f"{kind}: not JSON as mindresume writes it: {error}"[:400]) from error


def dump_line(value: Any, limit: int) -> bytes:
    """Returns ``value`` as JSON without a line break. Raises ValueError if it has more than ``limit`` bytes."""
    line = json.dumps(value, separators=(",", ":")).encode()
    if len(line) > limit:
        raise ValueError(f"a line of {len(line)} bytes; at most {limit} can be read back")
    return line


@contextmanager
def field_errors(kind: str) -> Iterator[None]:
    """Converts the errors of missing, ill-typed or impossible fields into RecordError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordError(f"{kind}: a field is missing or wrong ({type(error).__name__}: {error}"[:400] + ")") from error


# ---- single fields -------------------------------------------------------------------------------------------------

def expect_list(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Returns ``value`` if it is a list, with ``length`` values if that is given. ``what`` names it in the error."""
    if not isinstance(value, list) or length not in (None, len(value)):
        found = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
        raise RecordError(f"{what}"[:200] + f": expected a list{f' of {length} values' if length else ''}, found {found}")
    return value


def expect_count(head: Mapping[str, Any], field: str, least: int, most: int) -> int:
    """Returns the integer in ``field``, from ``least`` to ``most``."""
    value = head[field]
    if not is_count(value, least, most):
        raise RecordError(f"{field} is {value!r}"[:200] + f", expected a whole number from {least} to {most}")
    return value


def expect_flag(head: Mapping[str, Any], field: str) -> bool:
    """Returns the boolean in ``field``."""
    value = head[field]
    if not isinstance(value, bool):
        raise RecordError(f"{field} is {value!r}"[:200] + ", expected true or false")
    return value


def expect_time(value: Any) -> float:
    """Returns ``value`` if it is a time, in seconds since 1970."""
    if not is_number(value) or not 0 <= value <= MAX_TIME:
        raise RecordError(f"saved_at is {value!r}"[:200] + ", expected seconds since 1970")
    return float(value)


def expect_checksum(value: Any, what: str) -> None:
    """Checks that ``value`` is an xxh3_128 checksum in hex; ``what`` names it in the error."""
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise RecordError(f"{what}"[:200] + f": the checksum is {value!r}"[:200] + ", expected 32 hex digits")


def expect_shape(name: str, value: Any) -> tuple[int, ...]:
    """Returns the shape of tensor ``name``, of at most MAX_AXES dimensions."""
    if not isinstance(value, list) or len(value) > MAX_AXES or not all(map(is_count, value)):
        raise RecordError(f"tensor {name}: the shape is {value!r}"[:400] + f", expected up to {MAX_AXES} sizes")
    return tuple(value)


def set_fields(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not empty. Readers treat an absent field as empty."""
    return {name: value for name, value in fields.items() if value}


def rank_ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Returns [first, last] of each contiguous range of the ascending ``ranks``: short, as thousands of records hold it."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def parse_ranks(value: Any, world_size: int) -> tuple[int, ...]:
    """Returns a proper subset of the ``world_size`` ranks, ascending; () for None. ``value`` lists ranks (in a manifest) or
    ranges (in a record)."""
    if value is None:
        return ()
    bounds = [row if isinstance(row, list) and len(row) == 2 else [row, row] for row in expect_list(value, "part")]
    if not all(is_count(bound, 0, world_size - 1) for row in bounds for bound in row) or any(
            first > last for first, last in bounds) or any(
            last >= first for (_, last), (first, _) in itertools.pairwise(bounds)) or not 0 < sum(
            last - first + 1 for first, last in bounds) < world_size:
        raise RecordError(f"part is {value!r}"[:200] + f", expected some of the {world_size} ranks, ascending")
    return tuple(itertools.chain.from_iterable(range(first, last + 1) for first, last in bounds))


# ---- files and tensors ------------------------------------------------------------------------------------------------

FORMATS = ("safetensors", "ckpt")      # formats of weight files, which are also the extensions of their names
MAX_FILES = 16                         # weight files of one rank
MAX_NAME = 255                         # bytes of a file name: the limit of all known file systems
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+")       # a file name: no folders, no control characters, UTF-8


@dataclass(frozen=True)
class FileRecord:
    """One weight file.

    Attributes:
        path: relative to the checkpoint root, with ``/``.
        format: one of FORMATS; ``json`` for a metadata file.
        size: in bytes; None for a file that mindformers wrote without mindresume.
        checksum: xxh3_128 of all bytes, in hex; None like ``size``.
    """
    path: str
    format: str
    size: int | None = None
    checksum: str | None = None

    def to_json(self) -> list[Any]:
        return [self.path, self.format, self.size, self.checksum]

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Reads the entry of any file below the root, recorded by mindresume or not. Raises RecordError if the path leaves the
        root."""
        path, fmt, size, checksum = expect_list(value, "file", 4)
        if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise RecordError(f"file path {path!r}"[:200] + " leaves the checkpoint folder")
        return cls(path, fmt, size, checksum)

    @classmethod
    def of_rank(cls, value: Any, rank: int) -> FileRecord:
        """Reads the entry of a weight file of ``rank``. Raises RecordError unless the file lies in the folder of that rank or
        beside the records: so no reader opens, and no removal deletes, anything else."""
        file = cls.from_json(value)
        folder, _, name = file.path.rpartition("/")
        if folder not in (f"rank_{rank}", "") or not _NAME.fullmatch(name):
            raise RecordError(f"file path {file.path!r}"[:200] + f" is neither a file in the folder rank_{rank} nor one "
                              f"without a folder")
        if len(name.encode()) > MAX_NAME:
            raise RecordError(f"file path {file.path!r}"[:200] + f" has a name of more than {MAX_NAME} bytes")
        if file.format not in FORMATS or not name.endswith(f".{file.format}"):
            raise RecordError(f"file path {file.path!r}"[:200] + f" has the format {file.format!r}"[:200] + f", expected "
                              f"{' or '.join(FORMATS)} and a name with that extension")
        return file._checked()

    @classmethod
    def metadata_file(cls, value: Any) -> FileRecord:
        """Reads the entry of a JSON file in a manifest. Raises RecordError unless the file lies beside the records."""
        file = cls.from_json(value)
        if not _NAME.fullmatch(file.path) or file.format != "json":
            raise RecordError(f"file path {file.path!r}"[:200] + " is not a metadata file: expected JSON beside the records")
        return file._checked()

    def _checked(self) -> FileRecord:
        """Returns this entry. Raises RecordError unless it has a size and a checksum."""
        if not is_count(self.size):
            raise RecordError(f"the size of {self.path} is {self.size!r}"[:400] + ", expected a number of bytes")
        expect_checksum(self.checksum, self.path)
        return self

    def below(self, folder: str) -> FileRecord:
        """Returns this entry with its path relative to the parent of ``folder``."""
        return replace(self, path=f"{folder}/{self.path}") if folder else self


def files_of_rank(value: Any, rank: int) -> tuple[FileRecord, ...]:
    """Reads the entries of one rank's files. Raises RecordError unless there are 1 to MAX_FILES with different paths."""
    files = tuple(FileRecord.of_rank(row, rank) for row in expect_list(value, "files"))
    if not 1 <= len({file.path for file in files}) == len(files) <= MAX_FILES:
        raise RecordError(f"rank {rank} has {len(files)} files: {', '.join(file.path for file in files)}"[:400] + f"; expected "
                          f"1 to {MAX_FILES} different ones")
    return files


@dataclass(frozen=True)
class TensorRecord:
    """Describes one tensor in a file of one rank.

    Attributes:
        dtype: numpy name.
        shape: of the part in the file, in elements.
        checksum: xxh3_128 of its bytes, in hex.
        layout: how the global tensor is sharded; None if no strategy names it.
        global_shape: of the whole tensor; None without layout.
        file: index into the files of the record.
    """
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    layout: TensorLayout | None = None
    global_shape: tuple[int, ...] | None = None
    file: int = 0


@dataclass(frozen=True)
class Details:
    """Holds every tensor in the files of a rank, and the state of its random number generators."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    random: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        layouts: dict[TensorLayout, int] = {}
        rows = {}
        for name, tensor in self.tensors.items():
            index = None if tensor.layout is None else layouts.setdefault(tensor.layout, len(layouts))
            rows[name] = [tensor.dtype, tensor.shape, tensor.checksum, index, tensor.global_shape, tensor.file]
        return {"tensors": rows, "layouts": [layout.to_json() for layout in layouts], "random": dict(self.random)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Details:
        """Reads the result of ``to_json``. Raises RecordError or ValueError for anything else, and if a shape does not fit its
        layout."""
        layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
        fits: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}   # a model has thousands of tensors but few layouts
        tensors = {}
        for name, row in value["tensors"].items():
            dtype, shape, checksum, index, whole, file = expect_list(row, name, 6)
            if not is_count(file, 0, MAX_FILES - 1):
                raise RecordError(f"tensor {name}: the file is {file!r}"[:400] + f", expected a number below {MAX_FILES}")
            if not isinstance(dtype, str):
                raise RecordError(f"tensor {name}: the dtype is {dtype!r}"[:400] + ", expected a string")
            expect_checksum(checksum, f"tensor {name}")
            shape, whole = expect_shape(name, shape), None if whole is None else expect_shape(name, whole)
            if index is not None:
                if not is_count(index, 0, len(layouts) - 1) or whole is None:
                    raise RecordError(f"tensor {name}: layout {index!r} of global shape {whole}"[:400] + f"; there are "
                                      f"{len(layouts)} layouts")
                if (index, whole) not in fits:
                    fits[index, whole] = layouts[index].local_shape(whole)
                if fits[index, whole] != shape:
                    raise RecordError(f"tensor {name} of shape {shape}: its layout cuts {whole} into {fits[index, whole]}"[:400])
            tensors[name] = TensorRecord(dtype, shape, checksum, None if index is None else layouts[index], whole, file)
        if not isinstance(value["random"], dict):
            raise RecordError(f"random is {type(value['random']).__name__}, expected an object")
        return cls(tensors, value["random"])


# ---- records and manifests --------------------------------------------------------------------------------------------

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
        tail = dump_line(details.to_json(), DETAILS_LIMIT)
        head = {"version": VERSION, "kind": "record", "run": self.run, "rank": self.rank, "world_size": self.world_size,
                "state": self.state.to_json(), "saved_at": self.saved_at, "files": [file.to_json() for file in self.files],
                "deduplicated": self.deduplicated, **set_fields(lineage=self.lineage,
                    part=rank_ranges(self.local_ranks)),
                "details": xxhash.xxh3_128_hexdigest(tail)}
        return encode_head(head) + tail + b"\n"

    @classmethod
    def decode(cls, head: Mapping[str, Any]) -> Record:
        """Makes a record from its parsed head. Raises RecordError if a field is missing or wrong."""
        with field_errors("record"):
            run_sequence(head["run"])
            world_size = expect_count(head, "world_size", 1, MAX_RANKS)
            rank = expect_count(head, "rank", 0, world_size - 1)
            local_ranks = parse_ranks(head.get("part"), world_size)
            if local_ranks and rank not in local_ranks:
                raise RecordError(f"part is {local_ranks!r}"[:200] + f", and this is the record of rank {rank}")
            return cls(head["run"], rank, world_size, TrainingState.from_json(head["state"]), expect_time(head["saved_at"]),
                       files_of_rank(head["files"], rank), expect_flag(head, "deduplicated"), _lineage(head), local_ranks)


def read_record(file: BinaryIO) -> tuple[Record, str]:
    """Returns the head of a record and the checksum of its head line. Raises RecordError if it is torn, altered or of another
    kind."""
    head, line = read_head(file, "record")
    return Record.decode(head), xxhash.xxh3_128_hexdigest(line)


def read_details(file: BinaryIO) -> tuple[Record, Details]:
    """Returns a record and its details. Raises RecordError if either is torn, altered or of another kind."""
    head, _ = read_head(file, "record")
    tail = read_line(file, DETAILS_LIMIT, "record")
    if xxhash.xxh3_128_hexdigest(tail) != head.get("details"):
        raise RecordError("the list of tensors is truncated or altered")
    with field_errors("record"):
        record, details = Record.decode(head), Details.from_json(parse_line(tail, "record"))
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
        return encode_head({"version": VERSION, "kind": "manifest", "run": self.run, "world_size": self.world_size,
                            "state": self.state.to_json(), "saved_at": self.saved_at,
                            "files": [[file.to_json() for file in files] for files in self.files], "records": list(self.records),
                            "small": [file.to_json() for file in self.metadata_files], "deduplicated": self.deduplicated,
                            **set_fields(lineage=self.lineage, part=list(self.local_ranks))}, MANIFEST_LIMIT)

    @classmethod
    def read(cls, file: BinaryIO) -> Manifest:
        """Reads a manifest. Raises RecordError if it is torn, altered or of another kind."""
        head, _ = read_head(file, "manifest", MANIFEST_LIMIT)
        with field_errors("manifest"):
            run_sequence(head["run"])
            world_size = expect_count(head, "world_size", 1, MAX_RANKS)
            rows, records = expect_list(head["files"], "files"), expect_list(head["records"], "records")
            local_ranks = parse_ranks(head.get("part"), world_size)
            ranks = local_ranks or range(world_size)
            if not len(rows) == len(records) == len(ranks):
                raise RecordError(f"manifest: {len(rows)} files and {len(records)} records for {len(ranks)} ranks")
            files = tuple(files_of_rank(row, rank) for rank, row in zip(ranks, rows, strict=True))
            metadata_files = tuple(FileRecord.metadata_file(row) for row in expect_list(head["small"], "small"))
            paths = [file.path for group in (*files, metadata_files) for file in group]
            if len(set(paths)) < len(paths):
                raise RecordError(f"manifest: {Counter(paths).most_common(1)[0][0]} is named twice")
            for rank, checksum in zip(ranks, records, strict=True):
                expect_checksum(checksum, record_name(rank))
            return cls(head["run"], TrainingState.from_json(head["state"]), expect_time(head["saved_at"]), files,
                       tuple(records), metadata_files, expect_flag(head, "deduplicated"), local_ranks,
                       world_size if local_ranks else 0, _lineage(head))


def _lineage(head: Mapping[str, Any]) -> str:
    """Reads the id of a run; empty if the field is absent."""
    if "lineage" not in head:
        return ""
    lineage: str = head["lineage"]
    run_sequence(lineage)
    return lineage
