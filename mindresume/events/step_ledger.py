"""The step ledger of a run: one row for each step, beside the event file of rank 0.

    ledger = StepLedger(path, LedgerRun("0003-5e1a77bd", lineage="0001-1c9e22d0", resumed=1200))
    ledger.add(StepRow(1201, 3, 307456, loss=2.1875))
    ledger.copy(StepRow(1202, 3, 307712))           # for the save of a step that ends
    read_ledger(file, path).rows[1201]

    {output}/mindresume_events/20261123T052200.250-rank_0-4711.steps
    4,096 bytes   magic, JSON of the LedgerRun, zeros
    64 bytes      one row: 7 numbers and their checksum; a ring of CAPACITY rows

A row is one write of 64 bytes into the cache of the kernel, a few microseconds, so it survives a
SIGKILL. It is no mapped memory: a store into a mapped file that somebody cuts, or that a full disk
cannot hold, would kill the process (SIGBUS). A row that was not written whole fails its checksum,
and is skipped.

The file is written by rank 0, and no other process waits for it. Whoever reads it trusts nothing in
it: see ``read_ledger``.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import BinaryIO, NamedTuple

import xxhash

from mindresume import runtime
from mindresume.errors import RecordError
from mindresume.events.event_file import FOLDER, LEDGER, file_of_run
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


def ledger_path(output: str, rank: int) -> str:
    """Returns the path of the ledger that this process begins, for the output folder of its
    training."""
    return file_of_run(os.path.join(output, FOLDER), f"rank_{rank}", LEDGER, runtime.time())


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
