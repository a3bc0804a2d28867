"""The step ledger of a run, one row for each step, and the comparison with it of the steps that a
resume trains for the second time.

    ledger = StepLedger(path, LedgerRun("0003-5e1a77bd", lineage="0001-1c9e22d0", resumed=1200))
    ledger.add(StepRow(1201, 3, 307456, loss=2.1875))
    ledger.copy(StepRow(1202, 3, 307712))           # for the save of a step that ends
    read_ledger(file, path).rows[1201]

    lost = earlier_ledger(folder, saves, run, 1200, "0003-5e1a77bd")  # after step 1200, or None
    redone = RedoneSteps(run, lost)
    redone.add(row)                              # after each step: a StepDifference, or None
    redone.steps, redone.compared, redone.largest

    {output}/mindresume_events/20261123T052200.250-rank_0-4711.steps, beside the event file
    4,096 bytes   magic, JSON of the LedgerRun, zeros
    64 bytes      one row: 7 numbers and their checksum; a ring of CAPACITY rows

A row is one write of 64 bytes into the cache of the kernel, a few microseconds, so it survives a
SIGKILL. It is no mapped memory: a store into a mapped file that somebody cuts, or that a full disk
cannot hold, would kill the process (SIGBUS). A row that was not written whole fails its checksum,
and is skipped. The file is written by rank 0, and no other process waits for it. Whoever reads it
trusts nothing in it: see ``read_ledger``.

A job that died at step 1,234 and resumes after step 1,200 trains 34 steps again. Samples, learning
rate and loss scale must be equal; in the same layout also epoch and batch. The loss must be equal
to the last bit where layout and release are the same and the computation is deterministic; else it
may differ by a tolerance, because sums are added in another order (``TOLERANCES``). If the first
run had itself diverged in these steps, for example after a flipped bit in the memory of a device,
the comparison shows that, too: it cannot say which of the two is right.

Only one run is compared: the newest one that trained a step after the checkpoint. It may be the run
that saved the checkpoint, or a later one. Earlier runs do not count: the training may have gone
another way since, with another batch size, other data or another learning rate.

Its rows are those beside its event file, in the output folder of this training; in another one, or
on another disk, those that newer saves of the checkpoint directory have copied (``LAST_STEPS``).
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import BinaryIO, NamedTuple

import xxhash

from mindresume import runtime
from mindresume.coordination.lease import run_order
from mindresume.errors import RecordError
from mindresume.events.event_file import LEDGER, file_of_run
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import parse_iteration
from mindresume.formats.records import find_attempts
from mindresume.model.manifest import FOLDER, LAST_STEPS, attempts, is_run, run_sequence
from mindresume.storage import Storage
from mindresume.typed import Count, decode, parse_json

CAPACITY = 16_384  # rows; a file has 1 MiB
COPIED = 960  # rows of a copy, which has 64 KiB
_MAGIC = b"MRSTEPS1"
_HEADER = 4096
_NUMBERS = struct.Struct("<qqqQddd")
# what the file has for None, by field; a loss can be NaN or infinite
_UNKNOWN = (-1, -1, -1, 0, *[-sys.float_info.max] * 3)
_ROW = _NUMBERS.size + 8  # and the checksum


class StepRow(NamedTuple):
    """Describes one finished step; in sink mode, the last step of a sink. None: not known.

    Attributes:
        step: number of the step in the training, from 1.
        epoch: number of the epoch, as the trainer counts it.
        samples: samples that the training has seen after this step.
        batch: fingerprint of the input of this step on this rank, from 1; in sink mode the host
            does not see it.
        learning_rate: as the loss monitor has it.
        loss_scale: likewise.
        loss: likewise.
    """

    step: int
    epoch: int | None = None
    samples: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    loss_scale: float | None = None
    loss: float | None = None

    def text(self) -> str:
        """Returns what is known, for people."""
        return ", ".join(
            f"{name.replace('_', ' ')} {value!r}"
            for name, value in self._asdict().items()
            if value is not None
        )


@dataclass(frozen=True)
class LedgerRun:
    """Says which run wrote a ledger, and what its losses depend on.

    Attributes:
        run_id: of this run.
        lineage: the run that began its training.
        resumed: the step after which this run began.
        world_size: ranks of the job.
        layout: a text that is the same for the same parallel layout and the same batch.
        release: versions of mindformers and MindSpore.
        deterministic: whether the same step gives the same bits again, if the random state does.
        dtype: of the network's computation; empty: not known.
        draws: the network draws random numbers in a step: dropout.
        branches: it began with other data, or another batch size, than the checkpoint that it
            loaded.
    """

    run_id: str
    lineage: str = ""
    resumed: Count = 0
    world_size: Count = 1
    layout: str = ""
    release: str = ""
    deterministic: bool = False
    dtype: str = ""
    draws: bool = False
    branches: bool = False


@dataclass(frozen=True)
class Ledger:
    """Holds what was read from a file. ``rows``: {step: row}, by step."""

    run: LedgerRun
    rows: Mapping[int, StepRow] = field(default_factory=dict)


class StepLedger:
    """Writes the ledger of this run. Raises OSError if the file exists or cannot be made."""

    def __init__(self, path: str, run: LedgerRun, capacity: int = CAPACITY):
        header = _MAGIC + json.dumps(asdict(run)).encode()
        if len(header) > _HEADER:
            raise RecordError(f"{path}: the description of the run has {len(header)} bytes")
        self.path, self.run, self.capacity = path, run, capacity
        self._header = header.ljust(_HEADER, b"\0")
        self._newest = deque[bytes](maxlen=COPIED)
        self._count = self._step = 0
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        os.pwrite(self._file, self._header, 0)

    def add(self, row: StepRow) -> None:
        """Writes a row; the oldest one goes if the ring is full. Raises OSError."""
        slot = self._count % self.capacity
        encoded = encode_row(row)
        os.pwrite(self._file, encoded, _HEADER + slot * _ROW)
        self._newest.append(encoded)
        self._count, self._step = self._count + 1, row.step

    def copy(self, row: StepRow) -> bytes:
        """Returns the file with its last ``COPIED`` rows. ``row``: the last one of them, if it was
        not added yet."""
        last = [encode_row(row)] if row.step > self._step else []
        return self._header + b"".join([*self._newest, *last][-COPIED:])

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)


def ledger_path(folder: str) -> str:
    """Returns the path of the ledger that this process, rank 0, begins in ``folder``."""
    return file_of_run(folder, "rank_0", LEDGER, runtime.time())


def encode_row(row: StepRow) -> bytes:
    """Returns the 64 bytes of a row."""
    numbers = _NUMBERS.pack(
        *(none if value is None else value for value, none in zip(row, _UNKNOWN, strict=True))
    )
    return numbers + xxhash.xxh3_64_digest(numbers)


def read_ledger(file: BinaryIO, path: str) -> Ledger:
    """Reads a ledger, also one that is being written. Rows without their checksum are skipped: they
    were not written whole. Rows of a step that the run cannot have made are skipped, too.

    Args:
        path: of ``file``, for messages.

    Raises:
        OSError: The file cannot be read.
        RecordError: It is no ledger, or of a newer version.
    """
    header, rest = file.read(_HEADER), file.read(CAPACITY * _ROW)
    if header[: len(_MAGIC) - 1] != _MAGIC[:-1]:
        raise RecordError(f"{path}: it is no step ledger")
    if header[: len(_MAGIC)] != _MAGIC:
        raise RecordError(f"{path}: a newer version of mindresume wrote it")
    try:
        run = decode(LedgerRun, parse_json(header[len(_MAGIC) :].rstrip(b"\0")), path)
    except ValueError as error:
        raise RecordError(f"{path}: its header cannot be read: {error}") from error
    rows: dict[int, StepRow] = {}
    for start in range(0, len(rest) - _ROW + 1, _ROW):
        numbers, check = rest[start : start + _NUMBERS.size], rest[start + _NUMBERS.size :][:8]
        if xxhash.xxh3_64_digest(numbers) == check:
            values = zip(_NUMBERS.unpack(numbers), _UNKNOWN, strict=True)
            row = StepRow(*(None if value == none else value for value, none in values))
            if row.step > run.resumed:
                rows[row.step] = row
    return Ledger(run, dict(sorted(rows.items())))


# ---- the comparison ------------------------------------------------------------------------------


# Relative difference of a loss between two layouts, by the dtype of the computation. Ten steps on a
# CPU (benchmarks/tolerances.py): 7e-8 to 4e-5 in float32, 1e-5 to 5e-5 in float16. bfloat16 by its
# precision. Ten steps of a training with other gradients, from other micro-batches: 1e-2.
TOLERANCES = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 2e-2}
LARGEST = max(TOLERANCES.values())
_MOST_RUNS = 8  # whose saves are looked at, two of each


@dataclass(frozen=True)
class StepDifference:
    """Says what differs in a step that was trained twice.

    Attributes:
        name: the field of the StepRow.
        expected: the row of the run that trained the step first.
        found: the row of this run.
        first_run: that run.
    """

    name: str
    expected: StepRow
    found: StepRow
    first_run: str

    def text(self) -> str:
        """Returns the sentence for a log."""
        return (
            f"step {self.found.step} was trained by run {self.first_run} before, with another "
            f"{self.name.replace('_', ' ')}: {getattr(self.expected, self.name)!r}; now "
            f"{getattr(self.found, self.name)!r}"
        )


def earlier_ledger(
    folder: str, saves: CheckpointDir, run: LedgerRun, after: int, since: str | None
) -> Ledger | None:
    """Returns the rows after step ``after`` of the newest earlier run of the training of ``run``
    that recorded one, in ``folder`` or in a save; None: there is none. Files that are no ledgers
    are ignored. Its run ``branches`` if it or one between it and ``since`` does: then it trained
    other steps.

    Args:
        folder: of the event files of this training.
        saves: the checkpoint directory that the resume reads. Another one than that of this
            training numbers its runs in its own way.
        after: the step of the checkpoint, as the run that saved it counted.
        since: that run; older ones do not count. None: mindformers saved it.
    """
    found = []
    with suppress(OSError):
        for name in os.listdir(folder):
            ledger = name.endswith(LEDGER) and ledger_of(saves.storage, os.path.join(folder, name))
            if ledger and run_order(ledger.run.run_id) < run_order(run.run_id):
                found.append(ledger)
    with suppress(OSError):
        found += filter(None, [ledger_of(saves.storage, path) for path in _copies(saves, after)])
    lineage, rows, branches = run.lineage or run.run_id, [], []
    for ledger in found:
        first = ledger.run
        is_older = since is not None and run_order(first.run_id) < run_order(since)
        is_other = (first.lineage or first.run_id) != lineage or first.run_id == run.run_id
        if is_older or is_other:
            continue
        if first.branches and first.run_id != since:
            branches.append(run_order(first.run_id))
        later = {step: row for step, row in ledger.rows.items() if after < step <= after + CAPACITY}
        # it was told to begin before the checkpoint, which was there: it may have gone another way
        went_back = since not in (None, first.run_id) and first.resumed < after
        if later and not went_back:
            rows.append(replace(ledger, rows=later))
    if not rows:
        return None
    newest = max(rows, key=_preference)
    is_branch = any(order <= run_order(newest.run.run_id) for order in branches)
    return replace(newest, run=replace(newest.run, branches=is_branch))


def _preference(ledger: Ledger) -> tuple[tuple[int, str], int, int]:
    """Returns a key that is larger for what is compared rather: the newest run, then the ledger
    that reaches back further, then the longer one."""
    return run_order(ledger.run.run_id), -min(ledger.rows), len(ledger.rows)


def _copies(saves: CheckpointDir, after: int) -> list[str]:
    """Returns the paths of the ledgers in a few saves after step ``after``: of each of the newest
    runs the save next to it, and the last one, which tells more if it reaches back so far. An
    iteration folder does not tell its run by its name. Raises OSError."""
    storage = saves.storage
    later = sorted(
        (run_sequence(run), step, name)
        for name, step, run in attempts(storage.list(saves.path(FOLDER)))
        if step > after
    )
    first = {run: name for run, _, name in reversed(later)}
    last = {run: name for run, _, name in later}
    runs = sorted(last)[-_MOST_RUNS:]
    names = {saved[run] for run in runs for saved in (first, last)}
    steps = {name: parse_iteration(name) or 0 for name in storage.list(saves.root)}
    top = sorted((name for name, step in steps.items() if step > after), key=steps.__getitem__)
    found = find_attempts(saves, sorted(names), {*top[:_MOST_RUNS], *top[-_MOST_RUNS:]})
    return [saves.path(it.place, LAST_STEPS) for it in found if LAST_STEPS in it.content]


def ledger_of(storage: Storage, path: str) -> Ledger | None:
    """Returns the ledger at ``path`` if a run wrote it."""
    try:
        with storage.open(path) as file:
            ledger = read_ledger(file, path)
    except (OSError, RecordError):
        return None
    return ledger if is_run(ledger.run.run_id) else None


@dataclass
class RedoneSteps:
    """Compares the rows of ``run`` with those of ``earlier`` while they come.

    Attributes:
        run: this run.
        earlier: as ``earlier_ledger`` returns it.
        tolerance: relative difference that a loss may have; None: by layout, release and dtype.
        random_is_restored: else a network with dropout draws anew, and its losses are others.
        steps: how many steps were compared.
        compared: the fields that were compared, in one step at least.
        largest: largest relative difference of a loss so far; None: no loss was compared.
        differences: of the steps so far.
    """

    run: LedgerRun
    earlier: Ledger
    tolerance: float | None = None
    random_is_restored: bool = True
    steps: int = 0
    compared: set[str] = field(default_factory=set)
    largest: float | None = None
    differences: list[StepDifference] = field(default_factory=list)

    @cached_property
    def last(self) -> int:
        """Returns the last step that the earlier run trained."""
        return max(self.earlier.rows)

    @cached_property
    def allowed(self) -> dict[str, float]:
        """Returns {field: relative difference that it may have}; other fields are not compared. In
        another layout rank 0 has another part of the batch, and an epoch can be another number of
        steps."""
        run, first = self.run, self.earlier.run
        same_layout = (first.layout, first.world_size) == (run.layout, run.world_size)
        same = same_layout and (first.release, first.dtype) == (run.release, run.dtype)
        exact = same and first.deterministic and run.deterministic
        loss = max(TOLERANCES.get(dtype, LARGEST) for dtype in (first.dtype, run.dtype))
        allowed = {
            "samples": 0.0,
            "learning_rate": 0.0 if first.release == run.release else 1e-6,
            "loss_scale": 0.0,
        }
        if same_layout:
            allowed |= {"epoch": 0.0, "batch": 0.0}
        if self.random_is_restored or not (first.draws or run.draws):
            allowed["loss"] = (0.0 if exact else loss) if self.tolerance is None else self.tolerance
        return allowed

    def add(self, row: StepRow) -> StepDifference | None:
        """Compares a row. Returns the first difference of this step; None: there is none, or the
        earlier run did not record the step."""
        expected = self.earlier.rows.get(row.step)
        if expected is None:
            return None
        differing = []
        for name, allowed in self.allowed.items():
            pair = getattr(expected, name), getattr(row, name)
            if None in pair:
                continue
            self.compared.add(name)
            difference = _relative(*pair)
            if difference > allowed:
                differing.append(name)
            if name == "loss":
                self.largest = max(self.largest or 0.0, difference)
        self.steps += 1
        if not differing:
            return None
        first_run = self.earlier.run.run_id
        self.differences.append(StepDifference(differing[0], expected, row, first_run))
        return self.differences[-1]


def _relative(expected: float, found: float) -> float:
    """Returns the relative difference; 0 for equal ones, also if both are NaN; else infinite where
    one of them is not finite."""
    if expected == found or math.isnan(expected) and math.isnan(found):
        return 0.0
    if not (math.isfinite(expected) and math.isfinite(found)):
        return math.inf
    return abs(found - expected) / max(abs(expected), abs(found))
