"""Records and manifests: what was really written. ``docs/format.md`` is the specification on one page.

Each rank publishes one *record* of the file it wrote; the *manifest* of a checkpoint is made from the records of all ranks, and
its existence is the commit. Both are text files of a few lines:

    <xxh3_128 of the second line>
    {the head: small, all that choosing and committing need}
    {the details of a record: every tensor, the random state; absent in a manifest}

so that a torn or altered one is recognised by itself, and committing 8,000 ranks reads 8,000 heads and no tensor list.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import xxhash

from mindresume.errors import RecordError
from mindresume.layout import TensorLayout
from mindresume.state import TrainingState

VERSION = 1
FOLDER = ".mindresume"                 # below the checkpoint root; no mindformers code lists dot folders
MANIFEST = "manifest.json"
TRASH = "trash-"                       # an attempt folder under this name is no checkpoint any more, only work left to do
HEAD_LIMIT = 1 << 20                   # a head is some hundred bytes; a manifest of 8,000 ranks about 1.5 MB is read whole
_RUN = re.compile(r"(\d{4,})-([0-9a-f]{8})")
_ATTEMPT = re.compile(r"step-(\d{10,})-run-(\d{4,}-[0-9a-f]{8})")
_RECORD = re.compile(r"rank_(\d{5,})\.json")


def run_name(sequence: int, token: str) -> str:
    """Identity of one launch: a number that grows with every launch in a folder, and 8 random hex digits."""
    return f"{sequence:04d}-{token}"


def run_sequence(run: str) -> int:
    """Position of a run among all runs of its folder, from 1. No clocks: a later run always has a larger one."""
    found = _RUN.fullmatch(run)
    if not found:
        raise RecordError(f"{run!r} is not the name of a run")
    return int(found.group(1))


def attempt_name(step: int, run: str) -> str:
    """Folder of one attempt of one run to save one step."""
    return f"step-{step:010d}-run-{run}"


def parse_attempt(name: str) -> tuple[int, str] | None:
    """(step, run) of an attempt folder, None for any other name."""
    found = _ATTEMPT.fullmatch(name)
    return (int(found.group(1)), found.group(2)) if found else None


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
        path, fmt, size, checksum = value
        if not isinstance(path, str) or not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise RecordError(f"file path {path!r} leaves the checkpoint folder")
        return cls(path, fmt, size, checksum)


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as it lies in the file of one rank. ``layout``: how the global tensor is cut, None outside the strategy."""
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    layout: TensorLayout | None = None
    global_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Details:
    """The long part of a record: every tensor of the file, and the state of the random generators of this rank."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    random: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        layouts: dict[TensorLayout, int] = {}
        rows = {}
        for name, tensor in self.tensors.items():
            index = None if tensor.layout is None else layouts.setdefault(tensor.layout, len(layouts))
            rows[name] = [tensor.dtype, tensor.shape, tensor.checksum, index, tensor.global_shape]
        return {"tensors": rows, "layouts": [layout.to_json() for layout in layouts], "random": dict(self.random)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Details:
        layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
        return cls({name: TensorRecord(dtype, tuple(shape), checksum, None if index is None else layouts[index],
                                       None if global_shape is None else tuple(global_shape))
                    for name, (dtype, shape, checksum, index, global_shape) in value["tensors"].items()},
                   value["random"])


@dataclass(frozen=True)
class Record:
    """What one rank wrote for one step of one run. ``saved_at``: seconds since 1970, for people only."""
    run: str
    rank: int
    world_size: int
    state: TrainingState
    saved_at: float
    file: FileRecord

    @property
    def step(self) -> int:
        return self.state.step

    def encode(self, details: Details) -> bytes:
        tail = _dump(details.to_json())
        head = {"version": VERSION, "kind": "record", "run": self.run, "rank": self.rank, "world_size": self.world_size,
                "state": self.state.to_json(), "saved_at": self.saved_at, "file": self.file.to_json(),
                "details": xxhash.xxh3_128_hexdigest(tail)}
        return seal(head) + tail + b"\n"

    @classmethod
    def decode(cls, head: Mapping[str, Any]) -> Record:
        with _field_errors("record"):
            run_sequence(head["run"])
            return cls(head["run"], int(head["rank"]), int(head["world_size"]), TrainingState.from_json(head["state"]),
                       float(head["saved_at"]), FileRecord.from_json(head["file"]))


def read_record(file: BinaryIO) -> tuple[Record, str]:
    """The head of a record, and the checksum of its head line. RecordError if it is torn, altered or of another kind."""
    head, line = unseal(file, "record")
    return Record.decode(head), xxhash.xxh3_128_hexdigest(line)


def read_details(file: BinaryIO) -> tuple[Record, Details]:
    """A whole record. RecordError as for ``read_record``, also when the details are torn or altered."""
    head, _ = unseal(file, "record")
    tail = file.readline().rstrip(b"\n")
    if xxhash.xxh3_128_hexdigest(tail) != head.get("details"):
        raise RecordError("the list of tensors is cut short or altered")
    with _field_errors("record"):
        return Record.decode(head), Details.from_json(json.loads(tail))


@dataclass(frozen=True)
class Manifest:
    """The commit of one checkpoint: the files of all ranks in order of rank, and the checksum of each rank's record."""
    run: str
    state: TrainingState
    saved_at: float
    files: tuple[FileRecord, ...]
    records: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return len(self.files)

    @property
    def step(self) -> int:
        return self.state.step

    def encode(self) -> bytes:
        return seal({"version": VERSION, "kind": "manifest", "run": self.run, "world_size": self.world_size,
                     "state": self.state.to_json(), "saved_at": self.saved_at,
                     "files": [file.to_json() for file in self.files], "records": list(self.records)})

    @classmethod
    def read(cls, file: BinaryIO) -> Manifest:
        """RecordError if it is torn, altered or of another kind."""
        head, _ = unseal(file, "manifest")
        with _field_errors("manifest"):
            run_sequence(head["run"])
            files = tuple(FileRecord.from_json(value) for value in head["files"])
            if not len(files) == len(head["records"]) == head["world_size"]:
                raise RecordError(f"manifest: {len(files)} files and {len(head['records'])} records for "
                                  f"{head['world_size']} ranks")
            return cls(head["run"], TrainingState.from_json(head["state"]), float(head["saved_at"]), files,
                       tuple(head["records"]))


def seal(head: Mapping[str, Any]) -> bytes:
    """Checksum line and head line."""
    line = _dump(head)
    return xxhash.xxh3_128_hexdigest(line).encode() + b"\n" + line + b"\n"


def unseal(file: BinaryIO, kind: str) -> tuple[dict[str, Any], bytes]:
    """Reads checksum line and head line; ``file`` then stands behind them. Returns the head and its line."""
    checksum = file.readline(HEAD_LIMIT).rstrip(b"\n")
    line = file.readline().rstrip(b"\n")
    if xxhash.xxh3_128_hexdigest(line).encode() != checksum:
        raise RecordError(f"not a {kind}: it is empty, cut short or altered")
    head = json.loads(line)
    if not isinstance(head, dict):
        raise RecordError(f"expected a {kind}, found {type(head).__name__}")
    if head.get("kind") != kind:
        raise RecordError(f"expected a {kind}, found {head.get('kind')!r}")
    version = head.get("version")
    if type(version) is not int:
        raise RecordError(f"{kind} of version {version!r}, expected a whole number")
    if version > VERSION:
        raise RecordError(f"{kind} of version {version}, this mindresume reads up to {VERSION}: install a newer one")
    return head, line


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class _field_errors:                                    # noqa: N801  a context manager, used as a statement
    """Turns the errors of missing or ill-typed fields into RecordError."""

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (LookupError, TypeError, ValueError, AttributeError)) and not isinstance(error, RecordError):
            raise RecordError(f"{self.kind}: a field is missing or wrong ({type(error).__name__}: {error})") from error


def attempts(names: list[str]) -> Iterator[tuple[str, int, str]]:
    """(name, step, run) of every attempt folder among ``names``."""
    for name in names:
        found = parse_attempt(name)
        if found:
            yield name, *found
