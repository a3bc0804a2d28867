"""Silent bit rot: a bit of a file of a kept checkpoint flips, and neither its size nor a time
changes.

    rot(disks, seed)                # flips a bit of one file that the seed draws
    rotted_saves(disks)             # the saves of which a file is not as it was written

A file remembers what was written (``File.written``), so what rotted is known exactly, after deaths
and power losses too. A repair puts another file in its place.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mindresume.errors import RecordError
from mindresume.formats.iterations import COMMON, METADATA
from mindresume.model.manifest import FOLDER, MANIFEST, parse_attempt, read_record, record_rank
from mindresume.saving.memory_tier.directory import SLOTS
from sim.disk import Disk, File

_WEIGHTS = (".safetensors", ".ckpt")
_WEIGHTS_RATIO = 0.7  # of the files that rot, so many hold weights
# bytes at the end of a file, which is where the tensors of a small safetensors file are
_TAIL = 64


class Rot(NamedTuple):
    """A file that has rotted. ``saves``: (run, step) of the saves that it was of."""

    disk: Disk
    path: str
    file: File
    saves: tuple[tuple[str, int], ...] = ()


def rot(disks: Iterable[Disk], seed: int) -> list[Rot]:
    """Flips a bit of a flushed file of a checkpoint: of weights, a record, a manifest or metadata.
    Half of the bits are in the last bytes of the file. Returns the file; nothing if there is
    none."""
    rng = random.Random(seed)
    found = [
        Rot(disk, path, file)
        for disk in disks
        for path, file in sorted(disk.walk(), key=lambda row: row[0])
        if file.whole and file.data and is_of_checkpoint(path)
    ]
    if not found:
        return []
    weights = [row for row in found if row.path.endswith(_WEIGHTS)]
    chosen = rng.choice(weights if weights and rng.random() < _WEIGHTS_RATIO else found)
    back = rng.random() < 0.5
    size = len(chosen.file.data)
    chosen.file.rot(
        size - 1 - rng.randrange(min(size, _TAIL)) if back else rng.randrange(size),
        rng.randrange(8),
    )
    chosen.disk.rots += 1
    chosen.disk.changed += 1
    return [
        chosen._replace(
            saves=tuple(
                {saved for saved, paths in _files_of_saves(chosen.disk) if chosen.path in paths}
            )
        )
    ]


def is_of_checkpoint(path: str) -> bool:
    """Returns whether ``path`` names a file of a save: no temporary file, tracker, lease or
    result."""
    folder, name = os.path.split(path)
    if name.startswith(".") or os.path.basename(folder) == SLOTS:
        return False
    return (
        name.endswith(_WEIGHTS)
        or name in (MANIFEST, COMMON, METADATA)
        or record_rank(name) is not None
    )


def rotted_files(disks: Iterable[Disk]) -> dict[str, File]:
    """Returns the files that have rotted, by path."""
    return {
        path: file
        for disk in disks
        if disk.rots
        for path, file in disk.walk()
        if file.written is not None
    }


def rotted_saves(disks: Iterable[Disk]) -> set[tuple[str, int]]:
    """Returns (run, step) of the saves with a file that has rotted."""
    disks = list(disks)
    rotted = set(rotted_files(disks))
    if not rotted:
        return set()
    return {
        saved
        for disk in disks
        for saved, paths in _files_of_saves(disk)
        if not rotted.isdisjoint(paths)
    }


def saves_on(disks: Iterable[Disk]) -> set[tuple[str, int]]:
    """Returns (run, step) of the saves of which a record is there."""
    return {saved for disk in disks for saved, _ in _files_of_saves(disk)}


def unreadable_saves(disks: Iterable[Disk]) -> set[str]:
    """Returns the paths of all files of saves with a record that has rotted. Nothing tells what
    such a save is, so it is kept."""
    disks = list(disks)
    rotted = rotted_files(disks)
    rows = [row for disk in disks if rotted for row in _files_of_saves(disk)]
    saves = {saved for saved, paths in rows if paths[0] in rotted}
    return {path for saved, paths in rows if saved in saves for path in paths}


def _files_of_saves(disk: Disk) -> Iterator[tuple[tuple[str, int], list[str]]]:
    """Yields, for each record, its save and the paths of its files, its own first."""
    for path, file in disk.walk():
        folder, name = os.path.split(path)
        attempt = parse_attempt(os.path.basename(folder))
        if attempt is None or record_rank(name) is None:
            continue
        base = folder.rpartition(f"/{FOLDER}/")[0]
        paths = [path, f"{folder}/{MANIFEST}", f"{base}/{COMMON}", f"{base}/{METADATA}"]
        try:
            record = read_record(io.BytesIO(file.data if file.written is None else file.written))
            paths += [f"{base}/{row.path}" for row in record.files]
        except RecordError:
            pass  # torn by a power loss: no save
        yield (attempt[1], attempt[0]), paths
