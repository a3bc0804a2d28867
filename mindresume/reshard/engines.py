"""Offers the two conversion engines as writers of target files.

``direct``: ``mindresume.reshard.direct_engine``. ``mindspore``: MindSpore transforms into a scratch folder, and the direct engine
copies the result into the target files, which checks every name, shape and dtype.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from mindresume import runtime
from mindresume.errors import ConfigError
from mindresume.events import Emit, ignore
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.converter import Conversion, Writer
from mindresume.reshard.direct_engine import BUFFERS, TILE, Traffic, transform
from mindresume.reshard.target_files import TargetFile
from mindresume.storage.interface import Storage
from mindresume.storage.operations import remove_tree
from mindresume.tensor_files.checksum import Checksums

ENGINES = ("auto", "direct", "mindspore")
MIN_TILE = 64 << 10             # bytes; with less, calls would cost more than data
TIMEOUT = 7200.0                # seconds for MindSpore's engine, as long as mindformers waits for it


def engine_for(engine: str, fmt: str) -> str:
    """Returns the engine that ``auto`` stands for: MindSpore's for ckpt sources, the direct one for safetensors."""
    return engine if engine != "auto" else "mindspore" if fmt == "ckpt" else "direct"


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


def writer(engine: str, conversion: Conversion, workers: int = 2, tile: int = TILE, traffic: Traffic | None = None,
           emit: Emit = ignore) -> Writer:
    """Returns a function that writes the groups of ``conversion``. ``engine``: direct or mindspore."""
    made: list[CheckpointView] = []

    def write(weights: CheckpointView, storage: Storage, files: Sequence[TargetFile]) -> list[Checksums]:
        if engine == "mindspore":
            if not made:
                made.append(_transformed(weights, conversion, workers, emit))
            weights = made[0]
        return transform(weights, storage, files, workers, tile, traffic)
    return write


def _transformed(weights: CheckpointView, conversion: Conversion, workers: int, emit: Emit) -> CheckpointView:
    from mindresume.reshard.mindspore_engine import rewrite
    if conversion.storage.status(conversion.scratch) is not None:
        with suppress(OSError):         # left by a killed process, whose workers may still write
            remove_tree(conversion.storage, conversion.scratch)
    scratch = os.path.join(conversion.scratch, f"mindspore-{os.getpid()}-{runtime.token_hex(4)}")
    conversion.storage.make_folder(scratch)
    return rewrite(weights, conversion.plan.strategy, scratch, workers=workers, timeout=TIMEOUT, emit=emit)
