"""What a data set is known by: its entry in the configuration, with files in the place of their paths.

    identity = identity_of(storage, config.train_dataset, config.seed)
    {"type": "MindDataset", "dataset_dir": "1 file, 1234 bytes: mcore.mindrecord", "shuffle": "True", ...}

Two trainings read the same samples in the same order if these are equal. How fast they are read, by how many ranks and in which
batches is left out, and where the files lie, too: a data set can be moved.
"""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import xxhash

from mindresume.data import MAX_IDENTITY, MAX_TEXT
from mindresume.store.storage import Storage

# of train_dataset: what does not decide which samples come, or follows from other keys (batch sizes, devices)
_IGNORED = {"num_parallel_workers", "python_multiprocessing", "prefetch_size", "numa_enable", "batch_size", "autotune_per_step",
            "auto_tune", "filepath_prefix", "profile", "max_rowsize", "num_shards", "shard_id", "device_num", "rank_id",
            "do_eval", "dynamic_batch", "use_broadcast_data", "construct_args_key", "create_attention_mask"}
_SUFFIXES = ("", ".bin", ".idx")            # a data set of Megatron is named without them
_MOST_FILES = 100_000


def identity_of(storage: Storage, section: Any, seed: Any = None) -> dict[str, str]:
    """``section``: ``train_dataset`` of the configuration; None: {}. Files are looked at, not read. OSError."""
    if not isinstance(section, Mapping):
        return {}
    rows = dict(_rows(storage, section, ""))
    if seed is not None:
        rows.setdefault("seed", str(seed))
    if len(rows) > MAX_IDENTITY:                # a blend of hundreds of data sets
        kept = dict(list(rows.items())[:MAX_IDENTITY - 1])
        rest = [row for row in rows.items() if row[0] not in kept]
        rows = {**kept, "others": f"{len(rest)} keys, {_digest(rest)}"}
    return {key: _bounded(value) for key, value in rows.items()}


def _rows(storage: Storage, value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _IGNORED:
                yield from _rows(storage, inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, (Mapping, list, tuple)) for inner in value):
        for number, inner in enumerate(value):
            yield from _rows(storage, inner, f"{path}.{number}")
    elif value is not None:
        yield path.removeprefix("data_loader."), _of_value(storage, value)


def _of_value(storage: Storage, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        texts = list(map(str, value))
        found = [row for text in texts for row in _files(storage, text)]
        return _named(found) + _others(storage, texts) if found else ", ".join(texts)
    text = str(value)
    found = _files(storage, text) if isinstance(value, str) else []
    return _named(found) if found else text


def _others(storage: Storage, texts: list[str]) -> str:
    """What stands beside the files in a list: weights of a blend."""
    rest = [text for text in texts if not _files(storage, text)]
    return f"; {', '.join(rest)}" if rest else ""


def _files(storage: Storage, text: str) -> list[tuple[str, int]]:
    """(name, bytes) of the files that a value names, sorted within a folder; [] if it names none."""
    if os.sep not in text and "." not in text:
        return []
    status = storage.status(text)
    if status is not None and status.is_folder:
        return _within(storage, text, "")
    rows = [(path, storage.status(path)) for path in (text + suffix for suffix in _SUFFIXES)]
    return [(os.path.basename(path), status.size) for path, status in rows if status is not None and not status.is_folder]


def _within(storage: Storage, folder: str, below: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for name in sorted(storage.list(folder)):
        status = storage.status(os.path.join(folder, name))
        if status is None or name.startswith(".") or len(found) > _MOST_FILES:
            continue
        found += _within(storage, os.path.join(folder, name), below + name + "/") if status.is_folder else [
            (below + name, status.size)]
    return found


def _named(files: list[tuple[str, int]]) -> str:
    count, size = len(files), sum(size for _, size in files)
    names = ", ".join(name for name, _ in files[:3]) + (", ..." if count > 3 else "")
    digest = "" if count <= 3 else f" ({_digest(files)})"
    sizes = "" if count == 1 or count > 3 else " of " + ", ".join(str(size) for _, size in files)
    return f"{count} file{'' if count == 1 else 's'}, {size} bytes{sizes}: {names}{digest}"


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT - 40]}... {_digest(text)}"


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
