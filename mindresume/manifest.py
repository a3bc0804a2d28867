"""Records and manifests: what was really written. ``docs/format.md`` is the specification on one page.

Each rank publishes one *record* of the file it wrote; the *manifest* of a checkpoint is made from the records of all ranks, and
its existence is the commit. Both are text files of a few lines:

    <xxh3_128 of the second line>
    {the head: small, all that choosing and committing need}
    {the details of a record: every tensor, the random state; absent in a manifest}

so that a torn or altered one is recognised by itself, and committing 8,000 ranks reads 8,000 heads and no tensor list.

A checksum is no signature: whoever can write here can compute it. So every field is checked when it is read, and nothing is read
beyond a limit. What comes out of a reader here is a record that one rank could have written, or RecordError.
"""
from __future__ import annotations

import itertools
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import xxhash

from mindresume.documents import MAX_VALUES, parse_json
from mindresume.errors import RecordError
from mindresume.files import FORMATS
from mindresume.layout import MAX_AXES, MAX_RANKS, TensorLayout
from mindresume.state import TrainingState, is_count, is_number

VERSION = 1
FOLDER = ".mindresume"                 # below the checkpoint root; no mindformers code lists dot folders
MANIFEST = "manifest.json"
EMERGENCY = "emergency"                # beside the records: ranks of this job were lost, those that were left saved what they had
TRASH = "trash-"                       # an attempt folder under this name is no checkpoint any more, only work left to do
PROBE = "probe-"                       # a file that is there for a moment: what can this folder do, and who sees it?
# Bytes of a line. A head is some hundred bytes; a manifest about 200 a rank, and there is room for 600 of each of MAX_RANKS; the
# details of a tensor are about as long as its entry in the header of a safetensors file, which may have 100 MB.
HEAD_LIMIT, MANIFEST_LIMIT, DETAILS_LIMIT = 1 << 20, 64 << 20, 128 << 20
MAX_DETAILS = 1 << 24                  # values of JSON in them; a tensor has 13
MAX_FILES = 16                         # of weights, of one rank
MAX_NAME = 255                         # bytes of a file name, on every file system we know
MAX_SEQUENCE = 10**18 - 1              # of runs
MAX_TIME = 10**11                      # seconds since 1970, in the year 5138: more is no time that can be shown
# No more zeros than the writers below put there: else one attempt could have two folders, one rank two records.
_SEQUENCE = r"(?:[0-9]{4}|[1-9][0-9]{4,17})"
_RUN = re.compile(rf"({_SEQUENCE})-[0-9a-f]{{8}}")
_ATTEMPT = re.compile(rf"step-([0-9]{{10}}|[1-9][0-9]{{10,17}})-run-({_SEQUENCE}-[0-9a-f]{{8}})")
_RECORD = re.compile(r"rank_([0-9]{5}|[1-9][0-9]{5,17})\.json")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[^/\\\x00-\x1f\x7f\ud800-\udfff]+")       # of a file: no folders, no control characters, UTF-8


def run_name(sequence: int, token: str) -> str:
    """Identity of one launch: a number that grows with every launch in a folder, and 8 random hex digits. RecordError if the
    number is so large that only a damaged or foreign name can have led to it."""
    if sequence > MAX_SEQUENCE:
        raise RecordError(f"run {sequence} would be beyond {MAX_SEQUENCE}: a name in {FOLDER} claims to be of the run before; "
                          f"mindresume cannot have written it, remove it")
    return f"{sequence:04d}-{token}"


def run_sequence(run: str) -> int:
    """Position of a run among all runs of its folder, from 1. No clocks: a later run always has a larger one."""
    found = _RUN.fullmatch(run)
    if not found:
        raise RecordError(f"{run!r}"[:200] + " is not the name of a run")
    return int(found.group(1))


def attempt_name(step: int, run: str) -> str:
    """Folder of one attempt of one run to save one step."""
    return f"step-{step:010d}-run-{run}"


def parse_attempt(name: str) -> tuple[int, str] | None:
    """(step, run) of an attempt folder, None for any other name."""
    found = _ATTEMPT.fullmatch(name)
    return (int(found.group(1)), found.group(2)) if found else None


def trash_name(attempt: str) -> str:
    """A new name for a folder of records that is to be removed: free, whatever else has or had records of that attempt."""
    return f"{TRASH}{attempt}.{secrets.token_hex(4)}"


def untrashed(name: str) -> str:
    """The attempt that trash is of; any other name as it is."""
    return name.removeprefix(TRASH).partition(".")[0] if name.startswith(TRASH) else name


def is_probe(name: str) -> bool:
    """Whether ``name`` is that of a probe, also of one that is half-written."""
    return name.removeprefix(".").startswith(PROBE)


def record_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def record_rank(name: str) -> int | None:
    found = _RECORD.fullmatch(name)
    return int(found.group(1)) if found else None


@dataclass(frozen=True)
class FileRecord:
    """One file of weights. ``path``: relative to the checkpoint root, with ``/``. ``size`` in bytes and ``checksum``
    (xxh3_128 of all bytes, hex) are None for a file that mindformers wrote without us."""
    path: str
    format: str
    size: int | None = None
    checksum: str | None = None

    def to_json(self) -> list[Any]:
        return [self.path, self.format, self.size, self.checksum]

    @classmethod
    def from_json(cls, value: Any) -> FileRecord:
        """Any file below the root, with or without a record of ours: how one rank tells another."""
        path, fmt, size, checksum = _row(value, 4, "file")
        if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise RecordError(f"file path {path!r}"[:200] + " leaves the checkpoint folder")
        return cls(path, fmt, size, checksum)

    @classmethod
    def of_rank(cls, value: Any, rank: int) -> FileRecord:
        """What a record or manifest may name as a file of weights of ``rank``: one in the folder of that rank, or right where the
        records are, so that no reader looks elsewhere and whoever removes the checkpoint removes nothing else."""
        file = cls.from_json(value)
        folder, _, name = file.path.rpartition("/")
        if folder not in (f"rank_{rank}", "") or not _NAME.fullmatch(name):
            raise RecordError(f"file path {file.path!r}"[:200] + f" is not that of a file in the folder rank_{rank}, or of one "
                              f"without a folder")
        if len(name.encode()) > MAX_NAME:
            raise RecordError(f"file path {file.path!r}"[:200] + f" has a name of more than {MAX_NAME} bytes")
        if file.format not in FORMATS or not name.endswith(f".{file.format}"):
            raise RecordError(f"file path {file.path!r}"[:200] + f" has the format {file.format!r}"[:200] + f", expected "
                              f"{' or '.join(FORMATS)} and a name that ends so")
        return file._checked()

    @classmethod
    def small(cls, value: Any) -> FileRecord:
        """What a manifest may name beside the weights: a JSON file right where the records are."""
        file = cls.from_json(value)
        if not _NAME.fullmatch(file.path) or file.format != "json":
            raise RecordError(f"file path {file.path!r}"[:200] + " is not that of a small file of a checkpoint")
        return file._checked()

    def _checked(self) -> FileRecord:
        if not is_count(self.size):
            raise RecordError(f"the size of {self.path} is {self.size!r}"[:400] + ", expected a number of bytes")
        _check_checksum(self.checksum, self.path)
        return self

    def below(self, folder: str) -> FileRecord:
        """With a path relative to the folder that holds ``folder``."""
        return replace(self, path=f"{folder}/{self.path}") if folder else self


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as it lies in a file of one rank. ``layout``: how the global tensor is cut, None outside the strategy. ``file``:
    index into the files of the record."""
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    layout: TensorLayout | None = None
    global_shape: tuple[int, ...] | None = None
    file: int = 0


@dataclass(frozen=True)
class Details:
    """The long part of a record: every tensor of the files, and the state of the random generators of this rank."""
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
        """RecordError or ValueError if it is not what ``to_json`` gives, or the shapes do not fit the layouts."""
        layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
        fits: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}   # a model has thousands of tensors, but few kinds of them
        tensors = {}
        for name, row in value["tensors"].items():
            dtype, shape, checksum, index, whole, file = _row(row, 6, name)
            if not is_count(file, 0, MAX_FILES - 1):
                raise RecordError(f"tensor {name}: the file is {file!r}"[:400] + f", expected a number below {MAX_FILES}")
            if not isinstance(dtype, str):
                raise RecordError(f"tensor {name}: the dtype is {dtype!r}"[:400] + ", expected a text")
            _check_checksum(checksum, f"tensor {name}")
            shape, whole = _shape(name, shape), None if whole is None else _shape(name, whole)
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


@dataclass(frozen=True)
class Record:
    """What one rank wrote for one step of one run. ``saved_at``: seconds since 1970, for people only. ``deduplicated``: of the
    pieces that several ranks hold, it wrote its share (``remove_redundancy``). ``lineage``: the run that began this training;
    empty: not known. ``part``: where nodes share no disk, the ranks that see the folder of this one; else empty."""
    run: str
    rank: int
    world_size: int
    state: TrainingState
    saved_at: float
    files: tuple[FileRecord, ...]
    deduplicated: bool = False
    lineage: str = ""
    part: tuple[int, ...] = ()

    @property
    def step(self) -> int:
        return self.state.step

    def encode(self, details: Details) -> bytes:
        tail = _dump(details.to_json(), DETAILS_LIMIT)
        head = {"version": VERSION, "kind": "record", "run": self.run, "rank": self.rank, "world_size": self.world_size,
                "state": self.state.to_json(), "saved_at": self.saved_at, "files": [file.to_json() for file in self.files],
                "deduplicated": self.deduplicated, **_named("lineage", self.lineage), **_named("part", _ranges(self.part)),
                "details": xxhash.xxh3_128_hexdigest(tail)}
        return seal(head) + tail + b"\n"

    @classmethod
    def decode(cls, head: Mapping[str, Any]) -> Record:
        with field_errors("record"):
            run_sequence(head["run"])
            world_size = _counted(head, "world_size", 1, MAX_RANKS)
            rank, part = _counted(head, "rank", 0, world_size - 1), _part(head.get("part"), world_size)
            if part and rank not in part:
                raise RecordError(f"part is {part!r}"[:200] + f", and this is the record of rank {rank}")
            return cls(head["run"], rank, world_size, TrainingState.from_json(head["state"]), _time(head["saved_at"]),
                       _files(head["files"], rank), _flag(head, "deduplicated"), _lineage(head), part)


def read_record(file: BinaryIO) -> tuple[Record, str]:
    """The head of a record, and the checksum of its head line. RecordError if it is torn, altered or of another kind."""
    head, line = unseal(file, "record")
    return Record.decode(head), xxhash.xxh3_128_hexdigest(line)


def read_details(file: BinaryIO) -> tuple[Record, Details]:
    """A whole record. RecordError as for ``read_record``, also when the details are torn or altered."""
    head, _ = unseal(file, "record")
    tail = _line(file, DETAILS_LIMIT, "record")
    if xxhash.xxh3_128_hexdigest(tail) != head.get("details"):
        raise RecordError("the list of tensors is cut short or altered")
    with field_errors("record"):
        record, details = Record.decode(head), Details.from_json(_parse(tail, "record", MAX_DETAILS))
        beyond = next((name for name, row in details.tensors.items() if row.file >= len(record.files)), None)
        if beyond is not None:
            raise RecordError(f"tensor {beyond} is in file {details.tensors[beyond].file} of {len(record.files)}")
        return record, details


@dataclass(frozen=True)
class Manifest:
    """The commit of one checkpoint: the files of each rank in order of rank, and the checksum of each rank's record. ``small``:
    what rank 0 wrote beside them, such as ``metadata.json``. ``deduplicated``: some rank wrote only its share. ``part``: of nodes
    that share no disk, the ranks of a job of ``world`` whose files these are; else all. ``lineage``: as of a record."""
    run: str
    state: TrainingState
    saved_at: float
    files: tuple[tuple[FileRecord, ...], ...]
    records: tuple[str, ...]
    small: tuple[FileRecord, ...] = ()
    deduplicated: bool = False
    part: tuple[int, ...] = ()
    world: int = 0
    lineage: str = ""

    @classmethod
    def of(cls, records: Sequence[tuple[Record, str]], part: tuple[int, ...] = ()) -> Manifest:
        """``records`` with the checksums of their heads, in order of rank: of all ranks, or of ``part``."""
        first = records[0][0]
        # Under pipeline parallelism the loss is known to the last stage only; what rank 0 knows goes first.
        metrics = {name: value for record, _ in reversed(records) for name, value in record.state.metrics}
        state = replace(first.state, metrics=tuple(sorted(metrics.items())))
        return cls(first.run, state, max(record.saved_at for record, _ in records), tuple(record.files for record, _ in records),
                   tuple(checksum for _, checksum in records), (), any(record.deduplicated for record, _ in records), part,
                   first.world_size if part else 0, first.lineage)

    @property
    def world_size(self) -> int:
        return self.world or len(self.files)

    @property
    def ranks(self) -> Sequence[int]:
        """Those of ``files`` and ``records``, in order."""
        return self.part or range(len(self.files))

    @property
    def step(self) -> int:
        return self.state.step

    def encode(self) -> bytes:
        return seal({"version": VERSION, "kind": "manifest", "run": self.run, "world_size": self.world_size,
                     "state": self.state.to_json(), "saved_at": self.saved_at,
                     "files": [[file.to_json() for file in files] for files in self.files], "records": list(self.records),
                     "small": [file.to_json() for file in self.small], "deduplicated": self.deduplicated,
                     **_named("lineage", self.lineage), **_named("part", list(self.part))}, MANIFEST_LIMIT)

    @classmethod
    def read(cls, file: BinaryIO) -> Manifest:
        """RecordError if it is torn, altered or of another kind."""
        head, _ = unseal(file, "manifest", MANIFEST_LIMIT)
        with field_errors("manifest"):
            run_sequence(head["run"])
            world_size = _counted(head, "world_size", 1, MAX_RANKS)
            rows, records = _row(head["files"], None, "files"), _row(head["records"], None, "records")
            part = _part(head.get("part"), world_size)
            ranks = part or range(world_size)
            if not len(rows) == len(records) == len(ranks):
                raise RecordError(f"manifest: {len(rows)} files and {len(records)} records for {len(ranks)} ranks")
            files = tuple(_files(row, rank) for rank, row in zip(ranks, rows, strict=True))
            small = tuple(FileRecord.small(row) for row in _row(head["small"], None, "small"))
            paths = [file.path for group in (*files, small) for file in group]
            if len(set(paths)) < len(paths):
                raise RecordError(f"manifest: {Counter(paths).most_common(1)[0][0]} is named twice")
            for rank, checksum in zip(ranks, records, strict=True):
                _check_checksum(checksum, record_name(rank))
            return cls(head["run"], TrainingState.from_json(head["state"]), _time(head["saved_at"]), files, tuple(records), small,
                       _flag(head, "deduplicated"), part, world_size if part else 0, _lineage(head))


def _named(name: str, value: Any) -> dict[str, Any]:
    """A field that is there only if it says something."""
    return {name: value} if value else {}


def _lineage(head: Mapping[str, Any]) -> str:
    """Name of a run; empty where there is no such field."""
    if "lineage" not in head:
        return ""
    run_sequence(head["lineage"])
    return head["lineage"]


def _ranges(ranks: Sequence[int]) -> list[list[int]]:
    """[first, last] of each unbroken range of ``ranks``, which ascend: every record has them, of thousands of ranks."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def _part(value: Any, world_size: int) -> tuple[int, ...]:
    """Some ranks, ascending, not all: as they are in a manifest, as ranges in a record. Empty where there is no such field."""
    if value is None:
        return ()
    bounds = [row if isinstance(row, list) and len(row) == 2 else [row, row] for row in _row(value, None, "part")]
    if not all(is_count(bound, 0, world_size - 1) for row in bounds for bound in row) or any(
            first > last for first, last in bounds) or any(
            last >= first for (_, last), (first, _) in itertools.pairwise(bounds)) or not 0 < sum(
            last - first + 1 for first, last in bounds) < world_size:
        raise RecordError(f"part is {value!r}"[:200] + f", expected some of the {world_size} ranks, ascending")
    return tuple(itertools.chain.from_iterable(range(first, last + 1) for first, last in bounds))


def seal(head: Mapping[str, Any], limit: int = HEAD_LIMIT) -> bytes:
    """Checksum line and head line. ValueError if the head has more than ``limit`` bytes: it could not be read back."""
    line = _dump(head, limit)
    return xxhash.xxh3_128_hexdigest(line).encode() + b"\n" + line + b"\n"


def unseal(file: BinaryIO, kind: str, limit: int = HEAD_LIMIT) -> tuple[dict[str, Any], bytes]:
    """Reads checksum line and head line; ``file`` then stands behind them. Returns the head and its line. RecordError unless they
    are whole, of this kind and of a version we know."""
    checksum = file.readline(64).rstrip(b"\n")
    line = _line(file, limit, kind)
    if xxhash.xxh3_128_hexdigest(line).encode() != checksum:
        raise RecordError(f"not a {kind}: it is empty, cut short or altered")
    with field_errors(kind):
        head = _parse(line, kind)
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


def _line(file: BinaryIO, limit: int, kind: str) -> bytes:
    """One line without its line break, which may be missing at the end of the file. No more than ``limit`` bytes are read."""
    line = file.readline(limit + 1)
    if len(line) > limit and not line.endswith(b"\n"):
        raise RecordError(f"not a {kind}: a line has more than {limit} bytes")
    return line.removesuffix(b"\n")


def _parse(line: bytes, kind: str, values: int = MAX_VALUES) -> Any:
    """JSON of one line. RecordError if it is none, is nested too deeply, or has a key twice or one that UTF-8 cannot hold."""
    try:
        return parse_json(line, values)
    except ValueError as error:
        raise RecordError(f"{kind}: not JSON as mindresume writes it: {error}"[:400]) from error


def _dump(value: Any, limit: int) -> bytes:
    line = json.dumps(value, separators=(",", ":")).encode()
    if len(line) > limit:
        raise ValueError(f"a line of {len(line)} bytes; at most {limit} can be read back")
    return line


# ---- rules of single fields ----------------------------------------------------------------------------------------

def _row(value: Any, length: int | None, what: str) -> list[Any]:
    if not isinstance(value, list) or length not in (None, len(value)):
        found = f"{len(value)} values" if isinstance(value, list) else type(value).__name__
        raise RecordError(f"{what}"[:200] + f": expected a list{f' of {length} values' if length else ''}, found {found}")
    return value


def _files(value: Any, rank: int) -> tuple[FileRecord, ...]:
    """Of one rank: at least one, and no two with the same path."""
    files = tuple(FileRecord.of_rank(row, rank) for row in _row(value, None, "files"))
    if not 1 <= len({file.path for file in files}) == len(files) <= MAX_FILES:
        raise RecordError(f"rank {rank} has {len(files)} files: {', '.join(file.path for file in files)}"[:400] + f"; expected "
                          f"1 to {MAX_FILES} different ones")
    return files


def _counted(head: Mapping[str, Any], field: str, least: int, most: int) -> int:
    if not is_count(head[field], least, most):
        raise RecordError(f"{field} is {head[field]!r}"[:200] + f", expected a whole number from {least} to {most}")
    return head[field]


def _flag(head: Mapping[str, Any], field: str) -> bool:
    if not isinstance(head[field], bool):
        raise RecordError(f"{field} is {head[field]!r}"[:200] + ", expected true or false")
    return head[field]


def _time(value: Any) -> float:
    if not is_number(value) or not 0 <= value <= MAX_TIME:
        raise RecordError(f"saved_at is {value!r}"[:200] + ", expected seconds since 1970")
    return float(value)


def _check_checksum(value: Any, what: str) -> None:
    if not isinstance(value, str) or not _CHECKSUM.fullmatch(value):
        raise RecordError(f"{what}"[:200] + f": the checksum is {value!r}"[:200] + ", expected 32 hex digits")


def _shape(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_AXES or not all(map(is_count, value)):
        raise RecordError(f"tensor {name}: the shape is {value!r}"[:400] + f", expected up to {MAX_AXES} sizes")
    return tuple(value)


class field_errors:                                    # noqa: N801  a context manager, used as a statement
    """Turns the errors of missing, ill-typed or absurd fields into RecordError."""

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)):
            raise RecordError(f"{self.kind}: a field is missing or wrong ({type(error).__name__}: {error}"[:400] + ")") from error


def attempts(names: list[str]) -> Iterator[tuple[str, int, str]]:
    """(name, step, run) of every attempt folder among ``names``."""
    for name in names:
        found = parse_attempt(name)
        if found:
            yield name, *found
