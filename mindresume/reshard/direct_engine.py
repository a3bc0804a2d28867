"""The two engines of a conversion, which write target files.

``mindspore``: MindSpore transforms into a scratch folder, and the direct engine copies the result
into the target files, which checks every name, shape and dtype. ``direct``: reads every source byte
once and writes every target byte once, in the order of the files.

    tensors in the order of the target files ─▶ tiles: chunks of one large tensor, or many small
        ones, of bounded size
    a worker per tile: gather it from the source files ─▶ in turn: hash what was read, hash what
        will be written ─▶ write it

All target files keep their tensors in one order, and chunks follow each other in every layout
(``geometry.chunks``). So the bytes of each source tensor and of each target file pass in order, and
their checksums come along without reading anything twice. Memory: three buffers of ``TILE`` bytes a
worker, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from xxhash import xxh3_128

from mindresume import runtime
from mindresume.errors import ConfigError, EngineError, SaveError
from mindresume.events import Emit, Notice, ignore
from mindresume.model.layout import (
    Region,
    chunks,
    elements,
    offset,
    overlap,
    shape_of,
    whole,
    within,
)
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, check_replicas
from mindresume.reshard.conversion_plan import ConversionPlan, TargetFile, in_order
from mindresume.reshard.range_reader import (
    TILE,
    OpenFiles,
    ReadRange,
    Traffic,
    bits_dtype,
    gather,
    view,
)
from mindresume.reshard.region_load import check_tensors
from mindresume.reshard.translated_view import TranslatedView
from mindresume.storage import NewFile, Storage
from mindresume.tensor_files import Checksums, FilePlan
from mindresume.tensor_files.header import DTYPES

MAX_CHUNKS_IN_TILE = 512  # small tensors
BUFFERS = 3  # of TILE bytes, a worker
MIN_TILE = 64 << 10  # bytes; with less, calls would cost more than data
AUTO, DIRECT, BY_MINDSPORE = ENGINES = ("auto", "direct", "mindspore")


def engine_for(engine: str, fmt: str) -> str:
    """Returns the engine that ``auto`` stands for: MindSpore's for ckpt sources, the direct one for
    safetensors."""
    return engine if engine != AUTO else BY_MINDSPORE if fmt == "ckpt" else DIRECT


def tile_for(memory: int | None, workers: int) -> int:
    """Returns the size of one buffer in bytes, so that all buffers take at most ``memory`` bytes.
    ConfigError if that is too little."""
    if memory is None:
        return TILE
    tile = memory // (BUFFERS * workers)
    if tile < MIN_TILE:
        raise ConfigError(
            f"{memory} bytes of memory are too little for {workers} workers: each needs at least "
            f"{BUFFERS * MIN_TILE} bytes"
        )
    return min(tile, TILE)


def check_source(
    weights: CheckpointView, traffic: Traffic, number: int = 0, count: int = 1
) -> None:
    """Reads and compares what cannot be compared while it is converted: tensors of several stages,
    and recorded checksums of tensors that are read in parts. Adds what it reads to ``traffic``,
    without its progress.

    Args:
        number: which of ``count`` shares of the tensors; the stages are compared by the first one.
    Raises:
        LoadError: copies in two stages differ.
        CorruptFileError: a byte of the source differs from what was written.
    """
    inner = weights.inner if isinstance(weights, TranslatedView) else weights
    if number == 0:
        check_replicas(inner, read=True)
    if isinstance(weights, TranslatedView):
        recorded = [
            name
            for name in weights.composed_sources()
            if any(
                inner.locate(name, cut).checksum
                for cut in inner.tensors[name].cuts(whole(inner.tensors[name].shape))
            )
        ]
        checked = Traffic()
        check_tensors(inner, recorded[number::count], traffic=checked)
        traffic.read += checked.read
        traffic.verified += checked.verified


@dataclass
class Engine:
    """Writes the files of one conversion.

    Args:
        name: DIRECT or BY_MINDSPORE.
        workers: threads of the direct engine, processes of the other one.
        tile: bytes of a buffer.
        traffic: is increased by what is read, verified and written.
        falls_back: what MindSpore cannot convert is converted by the direct engine; ``name`` then
            says so.
    """

    name: str = DIRECT
    workers: int = 2
    tile: int = TILE
    traffic: Traffic = field(default_factory=Traffic)
    emit: Emit = ignore
    falls_back: bool = False
    _rewritten: CheckpointView | None = field(default=None, repr=False)

    def write(
        self, plan: ConversionPlan, storage: Storage, files: Sequence[TargetFile], scratch: str
    ) -> list[Checksums]:
        """Writes some files of ``plan``, whose paths are complete, durably. Returns size and
        checksums of each. Raises EngineError, and the errors of ``transform``."""
        if self.name == BY_MINDSPORE and self._rewritten is None:
            self._rewritten = self._rewrite(plan, storage, scratch)
        return transform(
            self._rewritten or plan.source.weights,
            storage,
            files,
            self.workers,
            self.tile,
            self.traffic,
        )

    def _rewrite(self, plan: ConversionPlan, storage: Storage, scratch: str) -> CheckpointView:
        """Lets MindSpore convert all tensors into a folder in ``scratch``, and returns them."""
        from mindresume.reshard.mindspore_engine import rewrite

        folder = os.path.join(scratch, f"mindspore-{os.getpid()}-{runtime.token_hex(4)}")
        storage.make_folder(folder)
        try:
            return rewrite(
                plan.source.weights,
                plan.strategy,
                folder,
                workers=self.workers,
                emit=self.emit,
            )
        except EngineError as error:
            if not self.falls_back:
                raise
            self.emit(
                Notice(f"MindSpore's engine cannot convert this, so the direct engine did: {error}")
            )
            self.name = DIRECT
            return plan.source.weights


def tiles(tensors: Sequence[Tensor], size: int) -> Iterator[list[tuple[Tensor, Region]]]:
    """Yields tiles: chunks of all tensors in order, together at most ``size`` bytes (one element
    may have more)."""
    tile: list[tuple[Tensor, Region]] = []
    used = 0
    for tensor in tensors:
        itemsize = DTYPES[tensor.dtype].itemsize
        for region in chunks(whole(tensor.shape), max(size // itemsize, 1)):
            count = elements(region) * itemsize
            if tile and (used + count > size or len(tile) >= MAX_CHUNKS_IN_TILE):
                yield tile
                tile, used = [], 0
            tile.append((tensor, region))
            used += count + -count % 8  # every chunk begins aligned
    if tile:
        yield tile


def transform(
    weights: CheckpointView,
    storage: Storage,
    targets: Sequence[TargetFile],
    workers: int = 2,
    tile: int = TILE,
    traffic: Traffic | None = None,
) -> list[Checksums]:
    """Writes all ``targets`` durably. Returns size and checksums of each.

    Args:
        targets: their folders exist, the files do not.
        workers: number of threads.
        tile: bytes of a buffer.
        traffic: is increased by the bytes read, verified and written.
    Raises:
        CorruptFileError: a source is truncated or differs from its recorded checksum.
        LoadError: a slice is in no file.
        SaveError, OSError: a target cannot be written. After any error, no target is left.
    """
    names = in_order({name for target in targets for name in target.holds}, weights.tensors)
    outs: list[_OutputFile] = []
    traffic = traffic or Traffic()
    files = OpenFiles(weights.storage, traffic)
    try:
        for target in targets:
            outs.append(_OutputFile(storage, target, target.plan_file(weights.tensors)))
            outs[-1].pass_literals()
        takers: dict[str, dict[Region, list[_OutputFile]]] = {}
        for out in outs:
            for name, region in out.target.holds.items():
                takers.setdefault(name, {}).setdefault(region, []).append(out)
        work = enumerate(tiles([weights.tensors[name] for name in names], tile))
        _Transfer(weights, files, takers, work, tile, traffic).run(workers)
        for out in outs:
            out.finish()
        return [out.sums for out in outs]
    except BaseException:  # Ctrl-C too: no partial file stays
        for out in outs:
            out.file.abandon()
            with suppress(OSError):  # it was finished before another one failed
                storage.remove(out.target.path)
        raise
    finally:
        files.close()


class _OutputFile:
    """Writes one target file, and hashes its bytes, which pass in order."""

    def __init__(self, storage: Storage, target: TargetFile, plan: FilePlan):
        self.target = target
        self.plan = plan
        self.where = plan.tensors
        self.sums = Checksums(size=plan.size)
        self.file: NewFile = storage.create(target.path, plan.size)
        self._whole, self._passed = xxh3_128(), 0
        self._tensor, self._name = xxh3_128(), ""  # the tensor whose bytes pass
        # those that have not passed yet
        self._literals = [part for part in plan.parts if part.name is None and part.data]

    def ranges(
        self, name: str, start: int, data: memoryview
    ) -> Iterator[tuple[_OutputFile, str, int, memoryview]]:
        """Yields (this file, tensor, position, bytes) of a tensor from its byte ``start`` on."""
        for position, first, count in self.where[name]:
            low, high = max(start, first), min(start + len(data), first + count)
            if low < high:
                yield self, name, position + low - first, data[low - start : high - start]

    def hash(self, name: str, position: int, data: memoryview) -> None:
        if position != self._passed:
            raise SaveError(
                f"{self.target.path}: {name} is written at byte {position}, expected {self._passed}"
            )
        if self._name != name:
            self._name, self._tensor = name, xxh3_128()
        self._tensor.update(data)
        self._whole.update(data)
        self._passed += len(data)
        last, _, count = self.where[name][-1]
        if self._passed == last + count:
            self.sums.tensors[name] = self._tensor.hexdigest()
        self.pass_literals()

    def pass_literals(self) -> None:
        """Writes and hashes the bytes that come next and belong to no tensor."""
        while self._literals and self._literals[0].offset == self._passed:
            part = self._literals.pop(0)
            self.file.write_at(part.offset, memoryview(part.data))
            self._whole.update(part.data)
            self._passed += len(part.data)

    def finish(self) -> None:
        """Flushes and renames the file. SaveError if not every byte was written."""
        if self._passed != self.plan.size:
            raise SaveError(
                f"{self.target.path}: {self._passed} bytes were written, expected {self.plan.size}"
            )
        for name in self.where:  # the empty ones
            self.sums.tensors.setdefault(name, xxh3_128().hexdigest())
        self.sums.file = self._whole.hexdigest()
        self.file.finish()


@dataclass
class _Transfer:
    """Runs workers that take one tile after the other. ``_turn``: tiles are hashed in order."""

    weights: CheckpointView
    files: OpenFiles
    takers: Mapping[str, Mapping[Region, list[_OutputFile]]]
    work: Iterator[tuple[int, list[tuple[Tensor, Region]]]]
    tile: int
    traffic: Traffic
    _taking: runtime.Lock = field(default_factory=runtime.Lock)
    _turn: runtime.Condition = field(default_factory=runtime.Condition)
    _done: int = 0
    _ended: int = 0
    _error: BaseException | None = None

    def run(self, workers: int) -> None:
        begun = 0
        try:
            for _ in range(workers - 1):
                runtime.Thread(target=self._help, daemon=True).start()
                begun += 1
            self._serve()
        except BaseException as error:  # Ctrl-C reaches this thread only, here or below
            self._fail(error)
        # no join: after an interrupt, join takes a running thread for ended
        while self._ended < begun:
            try:
                with self._turn:
                    if self._ended < begun:
                        self._turn.wait()
            except BaseException as error:
                self._fail(error)
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # any error: the other threads wait for this tile
            self._fail(error)
        with self._turn:
            self._ended += 1
            self._turn.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            self._error = self._error or error
            self._turn.notify_all()

    def _serve(self) -> None:
        """Takes one tile after the other: reads it, hashes it in its turn, and writes it."""
        largest = max(self.tile, 8)
        tile, staged, packed = (
            np.empty(largest + 8 * MAX_CHUNKS_IN_TILE, np.uint8) for _ in range(BUFFERS)
        )
        while self._error is None:
            with self._taking:
                number, chunks_of_tile = next(self.work, (None, None))
            if chunks_of_tile is None:
                return
            read: list[ReadRange] = []
            filled: list[tuple[Tensor, Region, np.ndarray]] = []
            used = 0
            for tensor, region in chunks_of_tile:
                dtype = bits_dtype(tensor.dtype)
                count = elements(region) * dtype.itemsize
                out = tile[used : used + count].view(dtype).reshape(shape_of(region))
                read += gather(
                    self.weights, self.files, tensor.name, region, out, staged[used : used + count]
                )
                filled.append((tensor, region, out))
                used += count + -count % 8
            written = list(self._packed(filled, packed))
            with self._turn:
                while self._done != number and self._error is None:
                    self._turn.wait()
                if self._error is not None:
                    return
                for row in read:
                    self.files.compare(*row)
                for file, name, position, data in written:
                    file.hash(name, position, data)
                self._done += 1
                self._turn.notify_all()
            for file, _, position, data in written:
                file.file.write_at(position, data)
            count = sum(len(data) for _, _, _, data in written)
            with self._taking:
                self.traffic.written += count
            self.traffic.progress(count)

    def _packed(
        self, filled: list[tuple[Tensor, Region, np.ndarray]], packed: np.ndarray
    ) -> Iterator[tuple[_OutputFile, str, int, memoryview]]:
        """Yields (file, tensor, position, contiguous bytes) of what each target file takes."""
        used = 0
        for tensor, region, chunk in filled:
            for wanted, outs in self.takers[tensor.name].items():
                part = overlap(wanted, region) if region else ()
                if part is None:
                    continue
                found = view(chunk, within(part, region))
                if not found.flags.c_contiguous:
                    # too small only for a great many tiny parts
                    room = packed[used : used + found.nbytes]
                    flat = (
                        room.view(found.dtype)
                        if room.nbytes == found.nbytes
                        else np.empty(found.size, found.dtype)
                    )
                    np.copyto(flat.reshape(found.shape), found)
                    used += found.nbytes + -found.nbytes % 8
                    found = flat
                data = memoryview(found.reshape(-1).view(np.uint8))
                start = offset(within(part, wanted), shape_of(wanted)) * chunk.itemsize
                for out in outs:
                    yield from out.ranges(tensor.name, start, data)
