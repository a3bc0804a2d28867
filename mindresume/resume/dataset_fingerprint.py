"""Identifies a data set by its section of the configuration, with the names and sizes of its files
instead of their paths.

    identity = dataset_identity(storage, config.train_dataset, config.seed) {"type": "MindDataset",
    "dataset_dir": "1 file, 1234 bytes: mcore.mindrecord", "shuffle": "True", ...}
    dataset_differences(recorded, identity)             # ["shuffle: True, now False"]

Two trainings with equal identities read the same samples in the same order. The identity does not
depend on the speed of reading, the number of ranks, the batch size, or the location of the files: a
data set can be moved. It leaves out files that loaders write themselves (indices, caches, states of
an iterator), in any folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from mindresume.formatting import counted
from mindresume.storage import Storage

# Folders that loaders write (mindformers dataset/, Hugging Face datasets).
_WRITTEN = {
    "path_to_cache",
    "s3_cache_path",
    "cache_dir",
    "dataset_state_dir",
    "save_indices_npz_path",
    "filepath_prefix",
}
# Keys of train_dataset that do not affect which samples are read, or that follow from other keys
# (batch sizes, devices), and credentials, which must not be recorded.
_IGNORED = _WRITTEN | {
    "num_parallel_workers",
    "python_multiprocessing",
    "prefetch_size",
    "numa_enable",
    "batch_size",
    "autotune_per_step",
    "auto_tune",
    "profile",
    "max_rowsize",
    "num_shards",
    "shard_id",
    "device_num",
    "rank_id",
    "do_eval",
    "dynamic_batch",
    "use_broadcast_data",
    "construct_args_key",
    "create_attention_mask",
    "mmap_bin_files",
    "num_dataset_builder_threads",
    "num_proc",
    "keep_in_memory",
    "load_from_cache_file",
    "cache_file_name",
    "writer_batch_size",
    "download_mode",
    "download_config",
    "verification_mode",
    "save_step",
    "resume_step",
    "token_monitor",
    "token_monitor_config",
    "token",
    "use_auth_token",
    "storage_options",
}
# Files that loaders write into the folder of a data set: indices of Megatron
# ({prefix}/cache/GPTDataset_indices, path_to_cache), caches, unfinished files, locks and iterator
# states of Hugging Face, and a table that mindformers writes beside its weights.
_MADE = re.compile(
    r"(^|/)(cache/\w+_indices/|[0-9a-f]{32}-\w+-\w+-(description\.txt|\w+_index\.npy)$|"
    r"cache-[^/]*\.arrow$|tmp[a-z0-9_]{8}$|[^/]*\.(lock|incomplete)(/|$)|"
    r"dataset_state_rank\d+\.json$|param_name_map\.json$|__pycache__/)"
)
_LISTED = re.compile(r"\d+ files?, \d+ bytes[^:]*: ")  # how a text of ``_named`` begins
# keys that end so (data_path, train_data_path, ...) name files of Megatron
_PREFIXES = "data_path"
# the configuration names a data set of Megatron without its suffixes
_SUFFIXES = ("", ".bin", ".idx")
_MOST_FILES = 100_000
MAX_IDENTITY = 64  # keys of an identity
MAX_TEXT = 256  # characters of one value: every rank records them


def dataset_identity(storage: Storage, section: Any, seed: Any = None) -> dict[str, str]:
    """Returns {key: value} of ``section``, the ``train_dataset`` of the configuration; {} for None.
    Lists files, but does not read them. Raises OSError."""
    if not isinstance(section, Mapping):
        return {}
    rows = dict(_rows(_Files(storage, frozenset(_written(section))), section, ""))
    if seed is not None:
        rows.setdefault("seed", str(seed))
    if len(rows) > MAX_IDENTITY:  # a blend of hundreds of data sets
        kept = dict(list(rows.items())[: MAX_IDENTITY - 1])
        rest = [row for row in rows.items() if row[0] not in kept]
        rows = {**kept, "others": f"{len(rest)} keys, {_digest(rest)}"}
    return {key: _bounded(value) for key, value in rows.items()}


def dataset_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Returns one phrase for each difference of two data sets; an empty list if there is none or
    one data set is unknown. Ignores caches and states of loaders, which earlier versions
    recorded."""
    if not before or not now:
        return []
    return [
        f"{key}: {_short(before.get(key))}, now {_short(now.get(key))}"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
        and _IGNORED.isdisjoint(key.split("."))
        and not any(_names_made(value) for value in (before.get(key), now.get(key)))
    ]


def _names_made(value: str | None) -> bool:
    listed = _LISTED.match(value or "")
    return listed is not None and any(
        _MADE.search(name) for name in value[listed.end() :].split(", ")
    )


def _short(text: str | None) -> str:
    text = "nothing" if text is None else text
    return text if len(text) <= 120 else text[:117] + "..."


def _written(value: Any) -> Iterator[str]:
    """Yields the folders in ``train_dataset`` that loaders are configured to write."""
    for key, inner in (
        value.items()
        if isinstance(value, Mapping)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        if key in _WRITTEN and isinstance(inner, str) and inner:
            yield os.path.abspath(inner)
        yield from _written(inner)


def _rows(files: _Files, value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _IGNORED:
                yield from _rows(files, inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and any(
        isinstance(inner, (Mapping, list, tuple)) for inner in value
    ):
        for number, inner in enumerate(value):
            yield from _rows(files, inner, f"{path}.{number}")
    elif value is not None:
        yield path.removeprefix("data_loader."), _of_value(files, value, path.endswith(_PREFIXES))


def _of_value(files: _Files, value: Any, prefix: bool) -> str:
    if isinstance(value, (list, tuple)):
        texts = list(map(str, value))
        found = {text: files.of(text, prefix) for text in texts}
        every = [row for text in texts for row in found[text]]
        rest = [text for text in texts if not found[text]]  # weights of a blend
        return (
            _named(every) + (f"; {', '.join(rest)}" if rest else "") if every else ", ".join(texts)
        )
    rows = files.of(value, prefix) if isinstance(value, str) else []
    return _named(rows) if rows else str(value)


@dataclass(frozen=True)
class _Files:
    """Finds the files that values of the configuration name. ``written``: folders that loaders
    write; they may be in a folder of the data, and are left out."""

    storage: Storage
    written: frozenset[str]

    def of(self, text: str, prefix: bool) -> list[tuple[str, int]]:
        """Returns (name, bytes) of each file that a value names, sorted within a folder; [] if it
        names none. ``prefix``: the value may be the path of a Megatron data set, also in the
        working directory. If there are files with this prefix, a folder of the same name is
        ignored: mindformers keeps their indices there."""
        text = text.strip() if prefix else text
        if not prefix and os.sep not in text and "." not in text:
            return []
        rows = [
            (path, self.storage.status(path)) for path in (text + suffix for suffix in _SUFFIXES)
        ]
        found = [
            (os.path.basename(path), status.size)
            for path, status in rows
            if status is not None and not status.is_folder
        ]
        folder = rows[0][1]
        return found or (
            list(self._within(text, "")) if folder is not None and folder.is_folder else []
        )

    def _within(self, folder: str, below: str) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for name in sorted(self.storage.list(folder)):
            path = os.path.join(folder, name)
            status = self.storage.status(path)
            if (
                status is None
                or name.startswith(".")
                or len(found) > _MOST_FILES
                or os.path.abspath(path) in self.written
            ):
                continue
            if status.is_folder:
                found += self._within(path, below + name + "/")
            elif not _MADE.search(below + name):
                found.append((below + name, status.size))
        return found


def _named(files: list[tuple[str, int]]) -> str:
    count, size = len(files), sum(size for _, size in files)
    names = ", ".join(name for name, _ in files[:3]) + (", ..." if count > 3 else "")
    digest = "" if count <= 3 else f" ({_digest(files)})"
    sizes = "" if count == 1 or count > 3 else " of " + ", ".join(str(size) for _, size in files)
    return f"{counted(count, 'file')}, {size} bytes{sizes}: {names}{digest}"


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 40]}... {_digest(text)}"


def _digest(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(repr(value).encode())
