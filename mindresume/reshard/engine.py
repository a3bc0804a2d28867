"""The two engines behind one interface: a writer of target files.

``direct``: ``mindresume.reshard.direct``. ``mindspore``: MindSpore transforms into a scratch folder, and the direct engine puts
what it made into the target files, which checks every name, shape and dtype of it.
"""
from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress

from mindresume.errors import ConfigError
from mindresume.events import Emit, Notice, ignore
from mindresume.files.checksum import Checksums
from mindresume.reshard.conversion import Conversion, Writer
from mindresume.reshard.direct import BUFFERS, TILE, TargetFile, Traffic, transform
from mindresume.reshard.weights import CheckpointView
from mindresume.store.storage import Storage, remove_tree

ENGINES = ("auto", "direct", "mindspore")
LEAST_TILE = 64 << 10           # bytes; less would be all calls and no data
TIMEOUT = 7200.0                # seconds for MindSpore's engine, as mindformers waits for it


def engine_for(engine: str, fmt: str) -> str:
    """``auto``: MindSpore's own for ckpt sources, the direct one for safetensors."""
    return engine if engine != "auto" else "mindspore" if fmt == "ckpt" else "direct"


def tile_for(memory: int | None, workers: int) -> int:
    """Size of the buffers, in bytes, so that all of them together take at most ``memory`` bytes. ConfigError if that is too
    little."""
    if memory is None:
        return TILE
    tile = memory // (BUFFERS * workers)
    if tile < LEAST_TILE:
        raise ConfigError(f"{memory} bytes of memory are too little for {workers} workers: each needs at least "
                          f"{BUFFERS * LEAST_TILE}")
    return min(tile, TILE)


def writer(engine: str, conversion: Conversion, workers: int = 2, tile: int = TILE, traffic: Traffic | None = None,
           emit: Emit = ignore) -> Writer:
    """``engine``: direct or mindspore. What is returned writes the groups of ``conversion``."""
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
        with suppress(OSError):         # of a process that was killed; its workers may not have noticed yet, and write on
            remove_tree(conversion.storage, conversion.scratch)
    scratch = os.path.join(conversion.scratch, f"mindspore-{os.getpid()}-{secrets.token_hex(4)}")
    conversion.storage.make_folder(scratch)
    return rewrite(weights, conversion.plan.strategy, scratch, workers=workers, timeout=TIMEOUT,
                   log=lambda text: emit(Notice(text)))
