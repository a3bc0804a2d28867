"""Names that other hosts have created can appear late (NFS: up to a minute). So before the choice the ranks tell each other what
they see, and whoever looks for checkpoints waits until it lists all of that; a checkpoint is neither taken for incomplete nor for
absent because one host lists it later than another.

    all    newest folders of records and iterations that each lists ─▶ the newest of all of them
    all    what of those each finds by name: manifests, its own record ─▶ expected
    again and again, all together: who chooses tells what of it it does not list ─▶ the others look whether it is still there
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mindresume.agree import Group, report
from mindresume.formats.iteration_files import COMMON, METADATA, TRACKER, iteration_name, parse_iteration
from mindresume.formats.iterations import tracked
from mindresume.formats.names import folder_name, folder_rank, parse_name
from mindresume.manifest import EMERGENCY, FOLDER, MANIFEST, attempts, record_name
from mindresume.store.common import order_of
from mindresume.store.islands import Islands
from mindresume.store.storage import Storage, parallel

PATIENCE = 65                   # looks, one a second: Linux believes a listing of a folder for at most 60 s (nfs(5), acdirmax)
_NEWEST = 3                     # saves of each kind that are looked at
_LISTING = 64                   # ranks, about, that list the root, in which Checkpoint 1.0 has a folder for each rank
_TOLD = 5                       # sentences


@dataclass(frozen=True)
class Settled:
    """The same on all ranks. ``seconds`` were waited. ``unseen``: a sentence on each name that one rank sees and one that chooses
    still does not list."""
    seconds: int = 0
    unseen: tuple[str, ...] = ()


def settle(storage: Storage, path: str, group: Group, islands: Islands, sleep: Callable[[float], None] = time.sleep) -> Settled:
    """Waits, on all ranks together, until those that choose among what is in ``path`` list everything that any rank sees of the
    newest saves: rank 0, or where nodes share no disk every rank, of its own node. At most ``PATIENCE`` seconds, and not at all
    where names appear at once."""
    if group.size == 1:
        return Settled()
    root = os.path.dirname(os.path.abspath(path)) if folder_rank(os.path.basename(path)) is not None else path
    listed = report(group, lambda: _newest(storage, root, group))
    boxes = _latest(name for ranks in listed for name in ranks)

    def see() -> list[str]:
        """A bit for each mark, and where there are no records the newest file of weights."""
        bits = "".join("1" if _there(storage, root, mark) else "0" for mark in _marks(boxes, group.rank))
        return [bits, "" if boxes else _own_weights(storage, root, group.rank)]

    def lack() -> list[list[object]]:
        """[path, a rank that sees it] of what this rank should list, if it chooses, and does not."""
        if group.rank and not islands.apart:
            return []
        witnesses: dict[str, int] = {}
        for rank in sorted(islands.ranks(group.rank), key=lambda rank: rank == group.rank):
            for mark in _expected(boxes, rank, seen[rank]):
                witnesses.setdefault(mark, rank)
        return [[mark, witnesses[mark]] for mark in _not_listed(storage, root, witnesses)]

    seen = report(group, see)
    for seconds in range(PATIENCE + 1):
        lacks = report(group, lack)
        if not any(lacks) or seconds == PATIENCE:
            break
        sleep(1.0)
        seen = [_both(before, now) for before, now in zip(seen, report(group, see), strict=True)]      # it may have been removed
    return Settled(seconds, tuple(_sentences(root, lacks))[:_TOLD])


def _newest(storage: Storage, root: str, group: Group) -> list[str]:
    """Folders, relative to ``root``, that this rank lists or that the tracker names."""
    found = []
    with suppress(OSError):
        names = [name for name, _, _ in attempts(storage.list(os.path.join(root, FOLDER)))]
        for name in sorted(names, key=order_of)[-_NEWEST:]:
            inner = f"{FOLDER}/{name}/{FOLDER}/{name}"                      # of an iteration folder in the making
            found.append(inner if _there(storage, root, inner) else f"{FOLDER}/{name}")
    bases = []
    with suppress(OSError, ValueError):
        step = tracked(storage, root)
        bases += [iteration_name(step)] if step is not None else []
    if group.rank % max(1, group.size // _LISTING) == 0:
        with suppress(OSError):
            names = [name for name in storage.list(root) if parse_iteration(name) is not None]
            bases += sorted(names, key=parse_iteration)[-_NEWEST:]
    for base in dict.fromkeys(bases):
        with suppress(OSError):
            within = [f"{base}/{FOLDER}/{name}" for name, _, _ in attempts(storage.list(os.path.join(root, base, FOLDER)))]
            if within or _there(storage, root, base):
                found += within or [base]
    return found


def _latest(folders: Iterable[str]) -> list[str]:
    """The newest of each kind: in the folder of records, and iterations, whose order is their number."""
    rows = sorted(set(folders))
    in_records = [row for row in rows if row.startswith(FOLDER)]
    iterations = [row for row in rows if not row.startswith(FOLDER)]
    return [*sorted(in_records, key=lambda row: order_of(os.path.basename(row)))[-_NEWEST:],
            *sorted(iterations, key=lambda row: parse_iteration(row.partition("/")[0]) or 0)[-_NEWEST:]]


def _marks(boxes: Sequence[str], rank: int) -> Iterator[str]:
    """What ``rank`` looks for: of saves with records its own and what makes them a checkpoint, else mindformers' small files."""
    for box in boxes:
        for name in (MANIFEST, EMERGENCY, record_name(rank)) if FOLDER in box.split("/") else (COMMON, METADATA):
            yield f"{box}/{name}"
    yield TRACKER


def _expected(boxes: Sequence[str], rank: int, row: Sequence[str]) -> list[str]:
    """``row``: as told by ``rank``."""
    bits, weights = row
    return [mark for mark, bit in zip(_marks(boxes, rank), bits, strict=True) if bit == "1"] + ([weights] if weights else [])


def _both(before: Sequence[str], now: Sequence[str]) -> list[str]:
    bits = "".join("1" if one == two == "1" else "0" for one, two in zip(before[0], now[0], strict=True))
    return [bits, before[1] if before[1] == now[1] else ""]


def _own_weights(storage: Storage, root: str, rank: int) -> str:
    """The newest file that mindformers wrote for ``rank``, by its name; empty if there is none."""
    folder, names = folder_name(rank), []
    with suppress(OSError):
        names = [parsed for parsed in map(parse_name, storage.list(os.path.join(root, folder))) if parsed]
    newest = max(names, key=lambda name: (name.suffix, name.epoch, name.step), default=None)
    return f"{folder}/{newest}" if newest else ""


def _there(storage: Storage, root: str, path: str) -> bool:
    try:
        return storage.status(os.path.join(root, path)) is not None
    except OSError:                                     # also ESTALE: it is just being replaced; the next look tells
        return False


def _not_listed(storage: Storage, root: str, paths: Iterable[str]) -> list[str]:
    """Those that whoever goes from ``root`` downwards, from listing to listing, does not come to."""
    ways = {path: [os.path.split(step) for step in _downwards(path)] for path in paths}
    folders = sorted({folder for way in ways.values() for folder, _ in way})

    def names(folder: str) -> frozenset[str]:
        try:
            return frozenset(storage.list(os.path.join(root, folder)))
        except OSError:
            return frozenset()
    listings = dict(zip(folders, parallel(storage, names, folders), strict=True))
    return [path for path, way in ways.items() if not all(name in listings[folder] for folder, name in way)]


def _downwards(path: str) -> list[str]:
    """"a", "a/b" and "a/b/c" of "a/b/c"."""
    return [path[:index] for index, letter in enumerate(path) if letter == "/"] + [path]


def _sentences(root: str, lacks: Sequence[Sequence[Sequence[object]]]) -> Iterator[str]:
    for rank, rows in enumerate(lacks):
        for mark, witness in rows:
            yield f"rank {witness} sees {os.path.join(root, str(mark))}, and rank {rank} does not list it, after {PATIENCE} s"
