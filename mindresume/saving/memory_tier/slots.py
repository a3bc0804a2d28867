"""Keeps the saves of one rank in memory, and decides which of them is overwritten next.

    slots = TierSlots(target, settings, share)      # no memory yet
    slots.reserve(sizes)                            # in the background, once
    slot = slots.copy(shard, step)  # into the slot of ``step``, in the training thread
    slots.record(slot)  # in the background: checksums, final names, record

The rule: **while one save is overwritten, all ranks hold another one whole.** No message is
exchanged for it. It follows from

1. Each step of a training contains a collective of all ranks. So when a rank has finished step
   ``s``, every rank has begun it, and has left the end of the step before. Collecting the state
   reads the optimizer's counter, and so waits for the device.
2. At the end of each step a rank first waits for the background work (checksums, record) of a save
   that it began at the end of an *earlier* step (``MemoryTier.step_end``).

Let a rank save at the end of step ``s``, and let ``p`` be its save before.

* Some end of a step lies between ``p`` and ``s``: every rank has left that end (1), where it waited
  for ``p`` (2). So all ranks have recorded ``p``, and two slots suffice: the other one is
  overwritten.
* Saves follow each other at every end of a step: other ranks may still compute the checksums of
  ``p``, but they have left the end of the step of ``p`` (1), where they waited for the save before
  ``p`` (2). So all ranks have recorded that one. It is kept, and so is ``p``: a third slot is
  overwritten.

If a save fails on a rank, its record never appears. The ranks of the same node see that, as it
cannot be late any more, and overwrite the failed save instead of the older one. Ranks of another
node do not see it: then no save may be common to all ranks, and the next start takes the disk. The
same holds for a training whose ranks exchange nothing. What is loaded is never decided here: a
start takes a save only if all ranks find it whole and verify it.

A process may die between any two operations. The record is removed before the first byte is
overwritten, and published after the last checksum, so what is half copied has no record on this
rank, and counts on none.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from mindresume import runtime
from mindresume.coordination import host_memory
from mindresume.coordination.lease import ReadLocks
from mindresume.events import Emit, Notice
from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.rank_folders import LABEL, folder_rank, label
from mindresume.model.manifest import (
    FOLDER,
    FileRecord,
    attempt_name,
    parse_attempt,
    record_name,
    record_rank,
)
from mindresume.saving.memory_tier.directory import SLOTS
from mindresume.saving.shard_writer import SaveTarget, Shard, ShardFile, publish_record
from mindresume.saving.staging import map_memory
from mindresume.settings import MemoryTierSettings
from mindresume.storage import TEMPORARY
from mindresume.tensor_files import (
    Checksums,
    FilePlan,
    TensorSpec,
    checksummed,
    encode_plan,
    pieces_of,
    plan_file,
    tensor_spec,
)
from mindresume.tensor_files.header import DTYPES

# ---- the rule ------------------------------------------------------------------------------------


def slots_needed(every_steps: int, jump: int) -> int:
    """Returns 2 or 3. ``jump``: steps between two ends of a step (the sink size in sink mode).
    Multiples of ``every_steps`` that are two jumps apart have an end of a step without a save
    between them."""
    return 2 if every_steps >= 2 * jump else 3


def step_to_overwrite(held: Sequence[int], slots: int, whole: Collection[int]) -> int | None:
    """Returns the step whose slot is overwritten; None: a slot is free.

    Args:
        held: steps in the slots, whole or not, newest first.
        whole: those of them that all ranks of this node have recorded.
    """
    if len(held) < slots:
        return None
    common = held[slots - 2]
    return held[-1] if common in whole else common


def common_step(held: Sequence[int], slots: int, whole: Collection[int]) -> int | None:
    """Returns the newest step that all ranks have certainly recorded when a save begins; None: not
    known. Arguments: see ``step_to_overwrite``."""
    return next((step for step in held[slots - 2 :] if step in whole), None)


# ---- files ---------------------------------------------------------------------------------------


class MappedFile:
    """A new file of ``size`` bytes in memory, all of whose pages exist, mapped for as long as the
    training runs. Writing through the mapping is a plain copy in memory; ``pwrite`` into the same
    pages takes about three times as long. A page that does not exist yet takes ten times as long,
    so a file is used again for later saves.

    All memory is reserved before it is mapped: a write to a page that a full tmpfs cannot provide
    would kill the process (SIGBUS) instead of raising an error. ``path``: where it lies now; a
    rename does not concern the mapping.
    Raises OSError (ENOSPC: the tmpfs is full) and leaves nothing then.
    """

    def __init__(self, path: str, size: int):
        self.path, self.size = path, 0
        self._memory = np.empty(0, np.uint8)
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # maps room for a longer header
            self.resize(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE)
            self.resize(size)
        except BaseException:
            self.close()
            with suppress(OSError):
                os.remove(path)
            raise

    def resize(self, size: int) -> None:
        """Sets the size of the file: headers of successive saves differ by a few bytes. Raises
        OSError; the size is then as before."""
        if size > self.size:
            os.posix_fallocate(self._handle, self.size, size - self.size)
        elif size < self.size:
            os.ftruncate(self._handle, size)
        self.size = size
        # a forked worker of the data set needs no page tables for it
        if size > len(self._memory):
            self._memory = map_memory(
                self._handle, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, "MADV_DONTFORK"
            )

    @property
    def data(self) -> np.ndarray:
        """Returns the bytes of the file, as the memory that they lie in."""
        return self._memory[: self.size]

    def close(self) -> None:
        """Releases the mapping, once no array uses it any more. The file stays."""
        self._memory = np.empty(0, np.uint8)
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            os.close(handle)


@runtime.asks_machine
def mapped_file(path: str, size: int) -> MappedFile:
    """Returns a new file. Raises OSError."""
    return MappedFile(path, size)


_Row = tuple[str, dict[str, TensorSpec], dict[str, str]]  # all that a plan depends on


class FilePlans:
    """The plans of one rank's files. The next save usually differs only in its step, so it is
    planned ahead."""

    def __init__(self) -> None:
        self._ahead: tuple[list[_Row], tuple[FilePlan, ...]] = [], ()

    def of(self, files: Sequence[ShardFile]) -> tuple[FilePlan, ...]:
        """Returns the plan of each file. Raises ValueError."""
        rows, (known, plans) = _rows(files), self._ahead
        return plans if rows == known else tuple(plan_file(*row) for row in rows)

    def prepare(self, files: Sequence[ShardFile]) -> None:
        """Plans a save that may never come. Raises no error: ``of`` will."""
        with suppress(ValueError):
            self._ahead = _rows(files), self.of(files)


def _rows(files: Sequence[ShardFile]) -> list[_Row]:
    return [
        (
            file.format,
            {name: tensor_spec(name, array) for name, array in file.tensors.items()},
            dict(file.metadata),
        )
        for file in files
    ]


def _labelled(files: Sequence[ShardFile], run: str, step: int) -> list[ShardFile]:
    return [replace(file, metadata={**file.metadata, **label(run, step)}) for file in files]


def path_in_tier(path: str, run: str) -> str:
    """Returns the path of a file of a rank folder in the tier: the run is a part of the name, so
    that the files of two runs, of which one has loaded a save of the other, never have the same
    name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{run}.{name}")


def path_on_disk(path: str, run: str) -> str:
    """Returns the path that ``path_in_tier`` was made of."""
    folder, name = os.path.split(path)
    return os.path.join(folder, name.removeprefix(f"{run}."))


# ---- saves of earlier runs -----------------------------------------------------------------------


class FormerSaves:
    """The saves of earlier runs in a tier. ``loaded``: the one from which this training resumes;
    None: none, or it is removed."""

    def __init__(self, target: SaveTarget, loaded: Candidate | None = None):
        self.target, self.loaded = target, loaded

    def paths(self) -> list[str]:
        """Returns the files and folders of earlier runs, except those of the loaded save. Raises
        OSError."""
        storage = self.target.storage
        root = self.target.root
        run = self.target.run
        loaded = self.loaded
        kept = set()
        if loaded is not None:
            kept = {os.path.join(FOLDER, loaded.name), *(file.path for file in loaded.all_files)}
        entries = storage.list(root)
        found = [
            entry for entry in entries if entry.startswith("stale-") and entry != f"stale-{run}"
        ]
        for folder in [
            FOLDER,
            SLOTS,
            *(entry for entry in entries if folder_rank(entry) is not None),
        ]:
            found += [
                os.path.join(folder, entry)
                for entry in storage.list(os.path.join(root, folder))
                if (folder != FOLDER or parse_attempt(entry))
                and not entry.endswith(f".{run}{TEMPORARY}")
            ]
        return [os.path.join(root, path) for path in found if path not in kept]

    def size(self) -> int:
        """Returns the bytes of ``paths``. Raises OSError."""
        storage = self.target.storage
        size = 0
        paths = self.paths()
        while paths:
            path = paths.pop()
            status = storage.status(path)
            if status is not None and status.is_folder:
                paths += [os.path.join(path, entry) for entry in storage.list(path)]
            elif status is not None:
                size += status.size
        return size

    def set_aside(self, emit: Emit) -> str:
        """Renames these saves into one folder, to be removed. Returns it. No rank of this run has
        saved yet; the removal itself can be late, when a rank uses one of the names again."""
        storage = self.target.storage
        stale = os.path.join(self.target.root, f"stale-{self.target.run}")
        try:
            paths = self.paths()
            storage.make_folder(stale)
            for number, path in enumerate(paths):
                storage.rename(path, os.path.join(stale, str(number)))
        except OSError as error:
            emit(Notice(f"{self.target.root}: saves of earlier runs are not removed now: {error}"))
        return stale

    def remove_loaded(self) -> None:
        """Removes the save that the training has loaded: a newer one is common to all ranks. Each
        rank removes its files."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        storage, ranks = self.target.storage, list(self.target.ranks)
        for rank in sorted(loaded.files)[ranks.index(self.target.rank) :: len(ranks)]:
            storage.remove(loaded.in_records(record_name(rank)))
            for file in loaded.files[rank]:
                storage.remove(os.path.join(self.target.root, file.path))
        records_dir = loaded.records_dir or ""
        remove_empty_folders(
            self.target, [records_dir, os.path.dirname(records_dir), loaded.commit_dir]
        )


def remove_empty_folders(tier: CheckpointDir, folders: Iterable[str]) -> None:
    """Removes those of ``folders`` in which no rank has files any more. The tier itself and its
    folder of records stay."""
    for folder in dict.fromkeys(folders):
        if folder not in (tier.root, tier.path(FOLDER)):
            with suppress(OSError):  # other ranks still have files in it
                tier.storage.remove(folder)


# ---- slots ---------------------------------------------------------------------------------------


@dataclass
class Slot:
    """The files of one save of this rank. ``step``: of the content; None: nothing that could count.
    ``shard``: what was saved, with the plan of each file; ``recorded``: the record is published."""

    files: list[MappedFile]
    step: int | None = None
    shard: Shard | None = None
    plans: tuple[FilePlan, ...] = ()
    recorded: bool = False


class TierSlots:
    """The slots of one rank.

    Args:
        target: the tier as a checkpoint directory; ``local_ranks``: the ranks of this node, if
            there are several nodes.
        share: bytes of host memory for this rank.

    Attributes:
        count: slots to have; 0: nothing is reserved yet.
    """

    def __init__(
        self, target: SaveTarget, settings: MemoryTierSettings, share: int = host_memory.UNKNOWN
    ):
        self.target = target
        self.settings = settings
        self.share = share
        self.count = 0
        self._slots: list[Slot] = []
        self._plans = FilePlans()
        self._read_locks = ReadLocks(target)
        self._last_save = self._interval = 0
        self._names = 0  # of slot files so far

    def sizes(self, shard: Shard) -> list[int]:
        """Returns the sizes of the files of a save. Raises ValueError."""
        return [
            plan.size
            for plan in self._plans.of(_labelled(shard.files, self.target.run, shard.state.step))
        ]

    def why_not(self, needed: int, freed: int) -> str:
        """Returns why ``needed`` bytes cannot be had; empty if they can. ``freed``: bytes of
        earlier runs here that are removed soon."""
        ranks = len(self.target.ranks)
        freed //= ranks
        free = self.target.storage.free_space(self.target.root)
        # semaphores and buffers of other programs lie in /dev/shm, too
        free -= free // host_memory.RESERVE
        limits = [
            (
                int(self.settings.limit_gib * 2**30) or host_memory.UNKNOWN,
                "mindresume.memory_tier.limit_gib is",
            ),
            (free // ranks + freed, f"each of {ranks} ranks has in {self.settings.dir}"),
            (
                self.share + freed,
                "the share of this rank in the free memory of the host, or its container, is",
            ),
            (host_memory.left() + freed, "the host, or its container, has left"),
        ]
        return next(
            (
                f"its slots need {needed / 2**20:.0f} MiB; {what} {most / 2**20:.0f} MiB"
                for most, what in limits
                if needed > most
            ),
            "",
        )

    def reserve(self, sizes: Sequence[int]) -> None:
        """Reserves the memory of all slots. Raises OSError."""
        while len(self._slots) < self.count:
            self._slots.append(Slot([mapped_file(self._free_path(), size) for size in sizes]))

    def held(self) -> list[int]:
        """Returns the steps in the slots, whole or not, newest first."""
        return sorted((slot.step for slot in self._slots if slot.step is not None), reverse=True)

    def is_whole(self, step: int) -> bool:
        """Returns whether all ranks of this node have recorded ``step`` of this run."""
        try:
            there = set(map(record_rank, self.target.storage.list(self.target.attempt(step))))
        except OSError:
            return False
        return there.issuperset(self.target.ranks)

    def copy(self, shard: Shard, replaced: int | None) -> Slot:
        """Copies ``shard`` into the slot of the step ``replaced``; None: into a free one."""
        target, step = self.target, shard.state.step
        slot = next(slot for slot in self._slots if slot.step == replaced)
        files = _labelled(
            [
                file
                if target.iterations
                else replace(file, path=path_in_tier(file.path, target.run))
                for file in shard.files
            ],
            target.run,
            step,
        )
        plans = self._plans.of(files)
        self._vacate(slot)
        for file, plan, mapped in zip(files, plans, slot.files, strict=True):
            mapped.resize(plan.size)
            memory, position = memoryview(mapped.data), 0
            # each array from its device at most once
            for _, piece in encode_plan(plan, file.tensors):
                memory[position : position + len(piece)] = piece
                position += len(piece)
        # The arrays of the training change from here on: only their names, dtypes and shapes are
        # used.
        slot.step = step
        slot.shard = replace(shard, files=tuple(files))
        slot.plans = plans
        self._interval, self._last_save = step - self._last_save, step
        return slot

    def _vacate(self, slot: Slot) -> None:
        """Makes the files of a slot writable: nothing refers to their content any more."""
        storage = self.target.storage
        target = self.target
        step = slot.step
        if step is None:
            return
        slot.recorded = False
        storage.remove(os.path.join(target.attempt(step), record_name(target.rank)))
        # A reader publishes its lock and then looks for the record: one of the two sees the other.
        # Its files are left to it.
        is_read = attempt_name(step, target.run) in self._read_locks()
        for number, mapped in enumerate(slot.files):
            if is_read or storage.status(mapped.path) is None:
                storage.remove(mapped.path)
                mapped.close()
                slot.files[number] = mapped_file(self._free_path(), mapped.size)
            elif os.path.dirname(mapped.path) != os.path.join(target.root, SLOTS):
                free = self._free_path()
                storage.rename(mapped.path, free)
                mapped.path = free
        attempt = target.attempt(step)
        remove_empty_folders(target, [attempt, os.path.dirname(attempt), target.data_dir(step)])
        # last: after an error the next save begins here again
        slot.step = None

    def record(self, slot: Slot) -> int:
        """Computes the checksums of a copy, gives its files their names, publishes the record.
        Returns the bytes of the files."""
        target = self.target
        shard = slot.shard
        step = slot.step
        sums, rows = [Checksums() for _ in slot.files], []
        for file, plan, mapped, into in zip(shard.files, slot.plans, slot.files, sums, strict=True):
            for _ in checksummed(_pieces(plan, mapped.data), into):
                pass
            rows.append(FileRecord(file.path, file.format, plan.size, into.file))
        paths = [os.path.join(target.data_dir(step), file.path) for file in shard.files]
        for folder in dict.fromkeys([target.attempt(step), *map(os.path.dirname, paths)]):
            target.storage.make_folder(folder)
        for mapped, path in zip(slot.files, paths, strict=True):
            target.storage.rename(mapped.path, path)
            mapped.path = path
        publish_record(target, shard, rows, sums, runtime.time())
        slot.recorded = True
        return sum(plan.size for plan in slot.plans)

    def plan_next(self, slot: Slot) -> None:
        """Plans the files of the save that probably follows that in ``slot``."""
        self._plans.prepare(
            _labelled(slot.shard.files, self.target.run, slot.step + self._interval)
        )

    def recorded(self, after: int) -> list[Slot]:
        """Returns the saves after step ``after`` that this rank has recorded, newest first."""
        slots = [
            slot
            for slot in self._slots
            if slot.recorded and slot.step is not None and slot.step > after
        ]
        return sorted(slots, key=attrgetter("step"), reverse=True)

    def close(self) -> None:
        """Releases the memory."""
        for slot in self._slots:
            for mapped in slot.files:
                mapped.close()
        self._slots.clear()

    def _free_path(self) -> str:
        """Returns a new name for a file without a valid content."""
        folder = os.path.join(self.target.root, SLOTS)
        self.target.storage.make_folder(folder)
        self._names += 1
        return os.path.join(
            folder, f".{self.target.rank}-{self._names}.{self.target.run}{TEMPORARY}"
        )


def _pieces(plan: FilePlan, memory: np.ndarray) -> Iterator[tuple[str | None, memoryview]]:
    for part in plan.parts:
        yield from pieces_of(part, memoryview(memory[part.offset : part.offset + part.count]))


def shard_in(slot: Slot) -> Shard:
    """Returns the shard of a slot with its arrays in the memory of the slot."""
    files, (run, _) = [], slot.shard.files[0].metadata[LABEL].split(" ")
    for file, plan, mapped in zip(slot.shard.files, slot.plans, slot.files, strict=True):
        tensors = {}
        for name, ranges in plan.tensors.items():
            spec = tensor_spec(name, file.tensors[name])
            parts = [mapped.data[offset : offset + count] for offset, _, count in ranges]
            raw = parts[0] if len(parts) == 1 else np.concatenate(parts)
            tensors[name] = (
                file.tensors[name]
                if spec.dtype == "str"
                else raw.view(DTYPES[spec.dtype]).reshape(spec.shape)
            )
        files.append(
            replace(
                file,
                path=path_on_disk(file.path, run),
                tensors={name: tensors[name] for name in file.tensors},
                metadata={key: text for key, text in file.metadata.items() if key != LABEL},
            )
        )
    return replace(slot.shard, files=tuple(files))
