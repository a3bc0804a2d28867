"""Defines records and manifests, which describe the files that were actually written;
``docs/format.md`` specifies them on one page.

Each rank publishes one *record* of the files it wrote. Rank 0 makes the *manifest* of a checkpoint
from the records of all ranks; its existence is the commit. Both are text files of a few lines:

    <xxh3_128 of the second line>
    {the head: small, everything that selection and commit need}
    {the details of a record: every tensor, the random state; absent in a manifest}

The checksums reveal a torn or altered file, and committing 8,000 ranks reads 8,000 heads but no
list of tensors. A checksum is not a signature: anyone who can write the file can compute it. So
reading stops at a size limit, every field is checked, and every function that reads raises
RecordError for content that mindresume cannot have written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, BinaryIO, NamedTuple

import xxhash

from mindresume import runtime
from mindresume.errors import RecordError
from mindresume.formatting import listed
from mindresume.model.layout import MAX_AXES, MAX_RANKS, TensorLayout
from mindresume.model.training_state import TrainingState
from mindresume.typed import Checksum, Count, Limits, Time, decode, is_count, parse_json

# below the checkpoint root; mindformers lists no hidden folders
FOLDER = ".mindresume"
MANIFEST = "manifest.json"
# file beside the records: the result of a scrub (formats/weight_files.py)
SCRUB_RESULT = "scrub.json"
# file beside the records: ranks of this job were lost, and the others saved their state
EMERGENCY = "emergency"
# file beside the records: the last rows of the step ledger (resume/step_ledger.py)
LAST_STEPS = "last.steps"
# name prefix of a file that counts the loads of a checkpoint (saving/crash_loop.py)
LOAD_ATTEMPTS = "trial-"
# name prefix of an attempt folder that is being removed, which is no checkpoint any more
TRASH = "trash-"
# name prefix of a short-lived file that tests the folder, or which ranks see it
PROBE = "probe-"
MAX_SEQUENCE = 10**18 - 1  # of a run
# Accepts only the leading zeros that the writers below produce: else an attempt could have two
# folders, and a rank two records.
_SEQUENCE = r"(?:[0-9]{4}|[1-9][0-9]{4,17})"
RUN = rf"{_SEQUENCE}-[0-9a-f]{{8}}"  # the id of a run
_RUN = re.compile(rf"({_SEQUENCE})-[0-9a-f]{{8}}")
_ATTEMPT = re.compile(rf"step-([0-9]{{10}}|[1-9][0-9]{{10,17}})-run-({RUN})")
_RECORD = re.compile(r"rank_([0-9]{5}|[1-9][0-9]{5,17})\.json")


def run_name(sequence: int, token: str) -> str:
    """Returns the id of one launch: a number that increases with every launch in a folder, and
    ``token``, 8 random hex digits. Raises RecordError for a number above MAX_SEQUENCE, which only a
    damaged or foreign name can cause."""
    if sequence > MAX_SEQUENCE:
        raise RecordError(
            f"the next run would be number {sequence}, at most {MAX_SEQUENCE} are possible: a name "
            f"in {FOLDER} holds the number before it; mindresume cannot have written it, remove it"
        )
    return f"{sequence:04d}-{token}"


def is_run(name: str) -> bool:
    """Returns whether ``name`` is the id of a run."""
    return _RUN.fullmatch(name) is not None


def run_sequence(run: str) -> int:
    """Returns the number of a run in its folder, from 1. A later run always has a larger number,
    whatever the clocks say. Raises RecordError if ``run`` is not a run id."""
    found = _RUN.fullmatch(run)
    if not found:
        raise RecordError(f"{run!r}"[:200] + " is not a run id")
    return int(found.group(1))


def attempt_name(step: int, run: str) -> str:
    """Returns the name of the records folder of one attempt: one run saving one step."""
    return f"step-{step:010d}-run-{run}"


def parse_attempt(name: str) -> tuple[int, str] | None:
    """Returns (step, run) of an attempt folder, None for any other name."""
    return next(((step, run) for _, step, run in attempts([name])), None)


def attempts(names: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """Yields (name, step, run) for every attempt folder in ``names``."""
    for name in names:
        if found := _ATTEMPT.fullmatch(name):
            yield name, int(found[1]), found[2]


def trash_name(attempt: str) -> str:
    """Returns a name for an attempt folder that is to be removed; a random nonce makes it
    unique."""
    return f"{TRASH}{attempt}.{runtime.token_hex(4)}"


def strip_trash(name: str) -> str:
    """Returns the attempt name in a result of ``trash_name``; any other name unchanged."""
    return name.removeprefix(TRASH).partition(".")[0] if name.startswith(TRASH) else name


def is_probe(name: str) -> bool:
    """Returns whether ``name`` is the name of a probe file, complete or temporary (with a leading
    dot)."""
    return name.removeprefix(".").startswith(PROBE)


def record_name(rank: int) -> str:
    """Returns the file name of the record of ``rank``."""
    return f"rank_{rank:05d}.json"


def record_rank(name: str) -> int | None:
    """Returns the rank whose record has this file name, None for any other name."""
    found = _RECORD.fullmatch(name)
    return int(found.group(1)) if found else None


# ---- lines and fields ----------------------------------------------------------------------------

VERSION = 1  # newest version of the format that can be read
# Limits of a line in bytes. A head has a few hundred bytes. A manifest has about 200 for each rank;
# the limit allows 600 for each of MAX_RANKS. The details of a tensor are about as long as its entry
# in a safetensors header, which may have 100 MB.
HEAD_LIMIT = 1 << 20
MANIFEST_LIMIT = 64 << 20
DETAILS_LIMIT = 128 << 20
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


def encode_head(
    head: Mapping[str, Any], limit: int = HEAD_LIMIT, details: Mapping[str, Any] | None = None
) -> bytes:
    """Returns the checksum line and the head line; with ``details``, the head has the checksum of
    their line, which follows. Raises ValueError if the head has more than ``limit`` bytes, or the
    details have more than theirs: they could not be read back."""
    tail = b"" if details is None else json.dumps(details, separators=(",", ":")).encode()
    if details is not None:
        head = {**head, "details": xxhash.xxh3_128_hexdigest(tail)}
    line = json.dumps(head, separators=(",", ":")).encode()
    for found, most in ((line, limit), (tail, DETAILS_LIMIT)):
        if len(found) > most:
            raise ValueError(f"a line of {len(found)} bytes; at most {most} can be read back")
    return b"\n".join(
        [xxhash.xxh3_128_hexdigest(line).encode(), line, *([] if details is None else [tail]), b""]
    )


def read_head(file: BinaryIO, kind: str, limit: int = HEAD_LIMIT) -> tuple[dict[str, Any], str]:
    """Reads the checksum line and the head line, and leaves ``file`` after them. Returns the head
    and its checksum. Raises RecordError unless they are complete, of this kind and of a known
    version."""
    checksum = file.readline(64).rstrip(b"\n").decode(errors="replace")
    head = _read_line(
        file, kind, limit, checksum, f"not a {kind}: it is empty, truncated or altered"
    )
    found = head.get("kind") if isinstance(head, dict) else type(head).__name__
    if not isinstance(head, dict) or found != kind:
        raise RecordError(f"expected a {kind}, found {found!r}"[:400])
    version = head.get("version")
    if type(version) is not int or version < 1:
        raise RecordError(
            f"{kind} of version {version!r}"[:400] + ", expected a whole number of at least 1"
        )
    if version > VERSION:
        raise RecordError(
            f"{kind} of version {version}"[:400]
            + f", this mindresume reads up to {VERSION}: install a newer one"
        )
    return head, checksum


def _read_line(file: BinaryIO, kind: str, limit: int, checksum: Any, damage: str) -> Any:
    """Reads a line of at most ``limit`` bytes, whose line break may be missing, and returns its
    JSON value. Raises RecordError: ``damage`` unless it has this checksum; also if it is not JSON,
    has too many values or keys, is nested too deeply, repeats a key, or has a key that UTF-8 cannot
    encode."""
    line = file.readline(limit + 1)
    if len(line) > limit and not line.endswith(b"\n"):
        raise RecordError(f"not a {kind}: a line has more than {limit} bytes")
    line = line.removesuffix(b"\n")
    if xxhash.xxh3_128_hexdigest(line) != checksum:
        raise RecordError(damage)
    try:
        return parse_json(line)
    except ValueError as error:
        raise RecordError(f"{kind}: not JSON as mindresume writes it: {error}"[:400]) from error


def rank_ranges(ranks: Sequence[int]) -> list[list[int]]:
    """Returns [first, last] of each contiguous range of the ascending ``ranks``: short, as
    thousands of records hold it."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def ranks_of_node(head: Mapping[str, Any]) -> list[int]:
    """Returns the ranks of one node that a head names as its ``part``, a proper subset, ascending:
    a list of ranks in a manifest, of ranges in a record."""
    ranks: list[int] = []
    world_size = head.get("world_size")
    # another number of ranks is refused with the other fields
    if not is_count(world_size, 1, MAX_RANKS):
        return ranks
    value = head["part"]
    for row in value if isinstance(value, list) else [None]:
        first, last = row if isinstance(row, list) and len(row) == 2 else (row, row)
        if not is_count(first, ranks[-1] + 1 if ranks else 0) or not is_count(
            last, first, world_size - 1
        ):
            break
        ranks += range(first, last + 1)
    else:
        if 0 < len(ranks) < world_size:
            return ranks
    raise RecordError(
        f"part is {value!r}"[:200] + f", expected some of the {world_size} ranks, ascending"
    )


# ---- files and tensors ---------------------------------------------------------------------------

# formats of weight files, which are also the extensions of their names
FORMATS = ("safetensors", "ckpt")
MAX_FILES = 16  # weight files of one rank
MAX_NAME = 255  # bytes of a file name: the limit of all known file systems
# the path of a file: perhaps the folder of a rank; a name without control characters, of UTF-8; the
# extension
_PATH = re.compile(r"(?:rank_([0-9]+)/)?([^/\\\x00-\x1f\x7f\ud800-\udfff]*\.([a-z]+))")


class FileRecord(NamedTuple):
    """One weight file. In a record and a manifest it is a list of these four.

    Attributes:
        path: relative to the checkpoint root, with ``/``.
        format: one of FORMATS; ``json`` for a metadata file.
        size: in bytes; None for a file that mindformers wrote without mindresume.
        checksum: xxh3_128 of all bytes, in hex; None like ``size``.
    """

    path: str
    format: str
    size: Count | None = None
    checksum: Checksum | None = None

    def below(self, folder: str) -> FileRecord:
        """Returns this entry with its path relative to the parent of ``folder``."""
        return self._replace(path=f"{folder}/{self.path}") if folder else self


Files = Annotated[tuple[FileRecord, ...], Limits(1, MAX_FILES)]
Run = Annotated[str, Limits(pattern=_RUN.pattern, what="the id of a run")]


def _check_files(groups: Iterable[tuple[int | None, Sequence[FileRecord]]]) -> None:
    """Raises RecordError unless the files, of a rank or the metadata files (None), are different
    ones, each with size and checksum, in the folder of that rank or beside the records: so no
    reader opens, and no removal deletes, anything else."""
    paths = []
    for rank, files in groups:
        formats, folders = ("json",) if rank is None else FORMATS, (None, str(rank))
        for path, extension, size, checksum in files:
            found = _PATH.fullmatch(path)
            folder, name, ending = found.groups() if found else (None, "", None)
            if (
                folder not in folders
                or ending != extension
                or extension not in formats
                or size is None
                or checksum is None
                or len(name.encode()) > MAX_NAME
            ):
                where = "" if rank is None else f" or in the folder rank_{rank}"
                raise RecordError(
                    f"file path {path!r}"[:200]
                    + f" of format {extension!r}"[:200]
                    + f": expected size, checksum, and a file without a folder{where}, with this "
                    f"extension and at most {MAX_NAME} bytes in its name"
                )
            paths.append(path)
    if len(set(paths)) < len(paths):
        raise RecordError(f"{Counter(paths).most_common(1)[0][0]} is named twice")


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


# ---- records and manifests -----------------------------------------------------------------------


def _head_of(value: Record | Manifest, kind: str) -> dict[str, Any]:
    """Returns the head line of a record or manifest, without its optional fields that are empty."""
    rows = {
        each.metadata.get("key", each.name): getattr(value, each.name)
        for each in fields(value)
        if each.compare and (getattr(value, each.name) or each.default is MISSING)
    }
    return {"version": VERSION, "kind": kind, **rows, "state": value.state.to_json()}


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
        deduplicated: this rank wrote only its share of the slices that several ranks hold
            (``remove_redundancy``).
        lineage: id of the run that began this training; empty if unknown.
        local_ranks: where nodes share no disk, the ranks that see this rank's folder; else empty.
        details: checksum of the line with its details; None before it was read.
        checksum: of its head line; empty before it was read.
    """

    run: Run
    rank: Count
    world_size: Annotated[int, Limits(1, MAX_RANKS)]
    state: TrainingState
    saved_at: Time
    files: Files
    deduplicated: bool
    lineage: Run = ""
    local_ranks: tuple[int, ...] = field(default=(), metadata={"key": "part"})
    details: str | None = field(default=None, compare=False, repr=False)
    checksum: str = field(default="", compare=False, repr=False)

    def encode(self, details: Details) -> bytes:
        """Returns the content of the record file."""
        layouts: dict[TensorLayout, int] = {}
        tensors = {}
        for name, tensor in details.tensors.items():
            index = (
                None if tensor.layout is None else layouts.setdefault(tensor.layout, len(layouts))
            )
            tensors[name] = [
                tensor.dtype,
                tensor.shape,
                tensor.checksum,
                index,
                tensor.global_shape,
                tensor.file,
            ]
        head = _head_of(self, "record")
        if self.local_ranks:
            head["part"] = rank_ranges(self.local_ranks)
        return encode_head(
            head,
            details={
                "tensors": tensors,
                "layouts": [layout.to_json() for layout in layouts],
                "random": dict(details.random),
            },
        )


def read_record(file: BinaryIO) -> Record:
    """Returns the head of a record. Raises RecordError if it is torn, altered or of another
    kind, or a field is missing or wrong."""
    head, checksum = read_head(file, "record")
    if "part" in head:
        head["part"] = ranks_of_node(head)
    record = decode(Record, head | {"checksum": checksum}, "record")
    if record.rank not in (record.local_ranks or range(record.world_size)):
        part = f" in its part, rank {listed(record.local_ranks)}" if record.local_ranks else ""
        raise RecordError(f"rank is {record.rank}, expected one below {record.world_size}{part}")
    _check_files([(record.rank, record.files)])
    return record


def read_details(file: BinaryIO) -> tuple[Record, Details]:
    """Returns a record and its details. Raises RecordError if either is torn, altered or of another
    kind, and if the shape of a tensor does not fit its layout."""
    record = read_record(file)
    value = _read_line(
        file, "record", DETAILS_LIMIT, record.details, "the list of tensors is truncated or altered"
    )
    tensors = {}
    try:
        layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
        # a model has thousands of tensors but few layouts
        fits: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for name, row in value["tensors"].items():
            dtype, shape, checksum, index, whole, number = row
            if not (
                isinstance(dtype, str)
                and isinstance(checksum, str)
                and _CHECKSUM.fullmatch(checksum)
                and (index is None or whole is not None and is_count(index, 0, len(layouts) - 1))
                and all(
                    isinstance(sizes, list) and len(sizes) <= MAX_AXES and all(map(is_count, sizes))
                    for sizes in ((shape,) if whole is None else (shape, whole))
                )
                and is_count(number, 0, len(record.files) - 1)
            ):
                raise RecordError(
                    f"tensor {name} is {row!r}"[:400]
                    + f", expected dtype, shape, checksum, layout of {len(layouts)}, global shape "
                    f"and file of {len(record.files)}"
                )
            shape = tuple(shape)
            layout, full = None, None if whole is None else tuple(whole)
            if index is not None and full is not None:
                layout = layouts[index]
                if (index, full) not in fits:
                    fits[index, full] = layout.local_shape(full)
                if fits[index, full] != shape:
                    raise RecordError(
                        f"tensor {name} of shape {shape}: its layout cuts {full} into "
                        f"{fits[index, full]}"[:400]
                    )
            tensors[name] = TensorRecord(dtype, shape, checksum, layout, full, number)
        if not isinstance(value["random"], dict):
            raise RecordError(f"random is {type(value['random']).__name__}, expected an object")
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise RecordError(
            f"record: a field is missing or wrong ({type(error).__name__}: {error}"[:400] + ")"
        ) from error
    return record, Details(tensors, value["random"])


@dataclass(frozen=True)
class Manifest:
    """Commits one checkpoint: names the files of each rank and the checksum of each rank's record,
    in order of rank.

    Attributes:
        run: id of the run.
        world_size: ranks of the job.
        state: training state at the save; its metrics are merged from all ranks.
        saved_at: seconds since 1970, for display only.
        files: weight files of each rank.
        records: checksum of the head line of each record.
        metadata_files: files that rank 0 wrote beside them, such as ``metadata.json``.
        deduplicated: some rank wrote only its share.
        lineage: as in a record.
        local_ranks: where nodes share no disk, the ranks that ``files`` belongs to; else empty, for
            all ranks.
    """

    run: Run
    world_size: Annotated[int, Limits(1, MAX_RANKS)]
    state: TrainingState
    saved_at: Time
    files: tuple[Files, ...]
    records: tuple[Checksum, ...]
    metadata_files: tuple[FileRecord, ...] = field(metadata={"key": "small"})
    deduplicated: bool
    lineage: Run = ""
    local_ranks: tuple[int, ...] = field(default=(), metadata={"key": "part"})

    @classmethod
    def from_records(cls, records: Sequence[Record], local_ranks: tuple[int, ...] = ()) -> Manifest:
        """Makes a manifest from ``records`` that were read, in order of rank. ``local_ranks``: the
        ranks concerned, () for all."""
        first = records[0]
        # Under pipeline parallelism only the last stage has the loss; of several values, the lowest
        # rank's counts.
        metrics = {
            name: value
            for record in reversed(records)
            for name, value in record.state.metrics.items()
        }
        state = replace(first.state, metrics=dict(sorted(metrics.items())))
        return cls(
            first.run,
            first.world_size,
            state,
            max(record.saved_at for record in records),
            tuple(record.files for record in records),
            tuple(record.checksum for record in records),
            (),
            deduplicated=any(record.deduplicated for record in records),
            local_ranks=local_ranks,
            lineage=first.lineage,
        )

    @property
    def ranks(self) -> Sequence[int]:
        """Returns the ranks that ``files`` and ``records`` belong to, in order."""
        return self.local_ranks or range(len(self.files))

    def encode(self) -> bytes:
        """Returns the content of the manifest file."""
        return encode_head(_head_of(self, "manifest"), MANIFEST_LIMIT)

    @classmethod
    def read(cls, file: BinaryIO) -> Manifest:
        """Reads a manifest. Raises RecordError if it is torn, altered or of another kind."""
        head, _ = read_head(file, "manifest", MANIFEST_LIMIT)
        if "part" in head:
            head["part"] = ranks_of_node(head)
        manifest = decode(cls, head, "manifest")
        ranks = manifest.local_ranks or range(manifest.world_size)
        if not len(manifest.files) == len(manifest.records) == len(ranks):
            raise RecordError(
                f"manifest: {len(manifest.files)} files and {len(manifest.records)} records for "
                f"{len(ranks)} ranks"
            )
        _check_files(zip((*ranks, None), (*manifest.files, manifest.metadata_files), strict=True))
        return manifest
