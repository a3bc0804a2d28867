"""Offers the two engines of a conversion, which write target files.

``direct``: ``mindresume.reshard.direct_engine``. ``mindspore``: MindSpore transforms into a scratch folder, and the direct engine
copies the result into the target files, which checks every name, shape and dtype.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from mindresume import runtime
from mindresume.errors import ConfigError, EngineError
from mindresume.events import Emit, Notice, ignore
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.conversion_plan import ConversionPlan, TargetFile
from mindresume.reshard.direct_engine import BUFFERS, TILE, Traffic, transform
from mindresume.reshard.geometry import whole
from mindresume.reshard.region_load import check_tensors
from mindresume.reshard.tensor_checks import check_replicas
from mindresume.reshard.translated_view import TranslatedView
from mindresume.storage.interface import Storage
from mindresume.tensor_files import Checksums

AUTO, DIRECT, BY_MINDSPORE = ENGINES = ("auto", "direct", "mindspore")
MIN_TILE = 64 << 10             # bytes; with less, calls would cost more than data
TIMEOUT = 7200.0                # seconds for MindSpore's engine, as long as mindformers waits for it


def engine_for(engine: str, fmt: str) -> str:
    """Returns the engine that ``auto`` stands for: MindSpore's for ckpt sources, the direct one for safetensors."""
    return engine if engine != AUTO else BY_MINDSPORE if fmt == "ckpt" else DIRECT


def tile_for(memory: int | None, workers: int) -> int:
    """Returns the size of one buffer in bytes, so that all buffers take at most ``memory`` bytes. ConfigError if that is too
    little."""
    if memory is None:
        return TILE
    tile = memory // (BUFFERS * workers)
    if tile < MIN_TILE:
        raise ConfigError(f"{memory} bytes of memory are too little for {workers} workers: each needs at least "
                          f"{BUFFERS * MIN_TILE} bytes")
    return min(tile, TILE)


@dataclass
class Engine:
    """Writes the files of one conversion.

    Args:
        name: DIRECT or BY_MINDSPORE.
        workers: threads of the direct engine, processes of the other one.
        tile: bytes of a buffer.
        traffic: is increased by what is read, verified and written.
        falls_back: what MindSpore cannot convert is converted by the direct engine; ``name`` then says so.
    """
    name: str = DIRECT
    workers: int = 2
    tile: int = TILE
    traffic: Traffic = field(default_factory=Traffic)
    emit: Emit = ignore
    falls_back: bool = False
    _rewritten: CheckpointView | None = field(default=None, repr=False)

    def write(self, plan: ConversionPlan, storage: Storage, files: Sequence[TargetFile], scratch: str) -> list[Checksums]:
        """Writes some files of ``plan``, whose paths are complete, durably. Returns size and checksums of each. Raises
        EngineError, and the errors of ``transform``."""
        if self.name == BY_MINDSPORE and self._rewritten is None:
            self._rewritten = self._rewrite(plan, storage, scratch)
        return transform(self._rewritten or plan.source.weights, storage, files, self.workers, self.tile, self.traffic)

    def _rewrite(self, plan: ConversionPlan, storage: Storage, scratch: str) -> CheckpointView:
        """Lets MindSpore convert all tensors into a folder in ``scratch``, and returns them."""
        from mindresume.reshard.mindspore_engine import rewrite
        folder = os.path.join(scratch, f"mindspore-{os.getpid()}-{runtime.token_hex(4)}")
        storage.make_folder(folder)
        try:
            return rewrite(plan.source.weights, plan.strategy, folder, workers=self.workers, timeout=TIMEOUT, emit=self.emit)
        except EngineError as error:
            if not self.falls_back:
                raise
            self.emit(Notice(f"MindSpore's engine cannot convert this, so the direct engine did: {error}"))
            self.name = DIRECT
            return plan.source.weights


def check_source(weights: CheckpointView, traffic: Traffic, number: int = 0, count: int = 1) -> None:
    """Reads and compares what cannot be compared while it is converted: tensors of several stages, and recorded checksums of
    tensors that are read in parts. Adds what it reads to ``traffic``, without its progress.

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
        recorded = [name for name in weights.composed_sources() if any(
            inner.locate(name, cut).checksum for cut in inner.tensors[name].cuts(whole(inner.tensors[name].shape)))]
        checked = Traffic()
        check_tensors(inner, recorded[number::count], traffic=checked)
        traffic.read += checked.read
        traffic.verified += checked.verified
