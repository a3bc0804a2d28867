"""Saves one rank's part of a training into memory of the node.

    tier = open_tier(session, group, settings, emit, loaded)    # all ranks together; None: no tier
    tier.begin(step)
    tier.step_end(request)              # at the end of each step, on all ranks
    tier.stop();  tier.remove()         # the training ended, and the disk has its last step

    training    remove the record of an older save ─▶ rename its files away ─▶ copy the arrays into them ─▶ next step
    background  checksums of the copy ─▶ final names ─▶ record: from then on the save counts

The first end of a step reserves the memory in the background and saves nothing, so that no save waits for new pages. Files that
an earlier run left are never written into, because a loaded network may still map them; they are removed once a newer save is
common to all ranks. A save that fails costs this tier alone: the training goes on.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from mindresume import runtime
from mindresume.coordination import host_memory
from mindresume.coordination.collectives import Group, gather_results
from mindresume.coordination.lease import fence
from mindresume.coordination.read_locks import ReadLocks
from mindresume.errors import SaveError
from mindresume.events import Emit, Notice, TierRefused, TierSaved
from mindresume.formats import Candidate
from mindresume.formats.rank_folders import LABEL, folder_rank, label
from mindresume.model.manifest import FOLDER, FileRecord, Record, attempt_name, parse_attempt, record_name, record_rank
from mindresume.model.training_state import crosses_multiple
from mindresume.saving.memory_tier.background_thread import BackgroundThread, Work
from mindresume.saving.memory_tier.directory import SLOTS
from mindresume.saving.memory_tier.disk_note import DiskNotes
from mindresume.saving.memory_tier.file_plans import FilePlans
from mindresume.saving.memory_tier.mapped_file import MappedFile, mapped_file
from mindresume.saving.memory_tier.slots import common_step, slots_needed, step_to_overwrite
from mindresume.saving.shard_writer import Save, SaveTarget, Shard, StepState, details_of_shard
from mindresume.settings import MemoryTierSettings
from mindresume.storage.atomic_publish import TEMPORARY, publish
from mindresume.storage.operations import remove_tree
from mindresume.tensor_files.checksum import Checksums, checksummed
from mindresume.tensor_files.header import DTYPES, FilePlan, chunks, tensor_bytes, tensor_spec

_FAILURES = 3                   # consecutive failures after which this rank saves nothing more here
_PAUSE, _SETTLE = 0.05, 5.0     # seconds: between two looks at the records of other ranks, and for all of them


@dataclass
class _Slot:
    """The files of one save of this rank. ``step``: of the content; None: nothing that could count. ``shard``: what was saved,
    with the plan of each file; ``recorded``: the record is published."""
    files: list[MappedFile]
    step: int | None = None
    shard: Shard | None = None
    plans: tuple[FilePlan, ...] = ()
    recorded: bool = False


class MemoryTier:
    """The saves of one rank in memory. All ranks call the methods at the same points, except ``stop`` and ``newest``.

    Args:
        target: the tier as a checkpoint directory; ``local_ranks``: the ranks of this node, if there are several nodes.
        share: bytes of host memory for this rank.
        loaded: the save in this tier that the training has loaded. It stays until a newer one is common to all ranks.
        is_leader: this rank removes what earlier runs left.
        timeout: seconds that the training waits for the background.
        on_disk: key of the checkpoint in the checkpoint directory that the training has loaded; empty: none.
    """

    def __init__(self, target: SaveTarget, group: Group, settings: MemoryTierSettings, emit: Emit,
                 share: int = host_memory.UNKNOWN, loaded: Candidate | None = None, is_leader: bool = True,
                 timeout: float = 600.0, on_disk: str = "", make_file: Callable[[str, int], MappedFile] = mapped_file,
                 clock: Callable[[], float] = runtime.monotonic, sleep: Callable[[float], None] = runtime.sleep):
        self.target, self.group, self.settings, self.emit, self.share = target, group, settings, emit, share
        self.loaded, self.is_leader, self.timeout = loaded, is_leader, timeout
        self.notes = DiskNotes(target.storage, target.root, target.run, on_disk)
        self._make_file, self._clock, self._sleep = make_file, clock, sleep
        self._read_locks = ReadLocks(target)
        self._slots: list[_Slot] = []
        self._count = 0                                     # slots to have; 0: nothing is reserved yet
        self._plans = FilePlans()
        self._last_step = self._last_save = self._interval = 0
        self._saved_at_last_end = False
        self._is_off = False
        self._names = 0                                     # of slot files so far
        self._failures = self._failed_in_a_row = 0
        self._background = BackgroundThread("mindresume-memory-tier")
        self._start = self._background.start
        self._work: Work | None = None                      # checksums and record of a save
        self._reserving: Work | None = None
        self._done: list[TierSaved | TierRefused] = []      # by the background, emitted by the training thread

    # ---- each step -------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Sets the step after which the training begins."""
        self._last_step = step

    def step_end(self, request: StepState, save: Save | Exception | None = None) -> None:
        """Saves the step if it is due. ``save``: what was collected for a save to disk at the same step, or why it could not be:
        a second attempt could be a collective that the other ranks do not join. Raises only the error of a collective."""
        step, before = request.step, self._last_step
        self._last_step, after_save, self._saved_at_last_end = step, self._saved_at_last_end, False
        self._join(self._work)                      # see slots.py: no rank begins a step before this work is done
        self._emit_done()
        if not self._count:
            if not self._is_off:
                self._reserve(request, save, max(step - before, 1))
            return
        if not crosses_multiple(before, step, self.settings.every_steps) or (after_save and self._count == 2):
            return
        self._saved_at_last_end = True
        if self._is_off and not request.needs_collectives():
            return
        try:
            found = _collected(request, save)       # all ranks, also those that do not save any more
            if not self._is_off:
                self._save(found.shard)
        except (SaveError, OSError, ValueError, MemoryError) as error:
            self._failed(step, str(error))

    def _save(self, shard: Shard) -> None:
        """Copies ``shard`` into a slot, and starts the background work."""
        started, target = self._clock(), self.target
        self._join(self._reserving)
        self._emit_done()
        if self._is_off:
            return
        fence(target, target.run)
        held = sorted((slot.step for slot in self._slots if slot.step is not None), reverse=True)
        if common_step(held, self._count, self.is_whole) is not None:
            self._remove_loaded()
        oldest = step_to_overwrite(held, self._count, self.is_whole)
        slot = next(slot for slot in self._slots if slot.step == oldest)
        files = [replace(file, path=file.path if target.iterations else path_in_tier(file.path, target.run),
                         metadata={**file.metadata, **label(target.run, shard.state.step)}) for file in shard.files]
        plans = self._plans.of(files)
        self._vacate(slot, [plan.size for plan in plans])
        for file, plan, mapped in zip(files, plans, slot.files, strict=True):
            _copy(plan, file.tensors, mapped.data)
        # The arrays of the training change from here on: only their names, dtypes and shapes are used.
        slot.step, slot.shard, slot.plans = shard.state.step, replace(shard, files=tuple(files)), plans
        self._interval, self._last_save = shard.state.step - self._last_save, shard.state.step
        stall = self._clock() - started
        self._work = self._start(lambda: self._finish(slot, stall))

    def _vacate(self, slot: _Slot, sizes: Sequence[int]) -> None:
        """Makes the files of a slot writable: nothing refers to their content any more. Gives each its new size."""
        storage, target = self.target.storage, self.target
        if slot.step is not None:
            step, slot.recorded = slot.step, False
            storage.remove(os.path.join(target.attempt(step), record_name(target.rank)))
            # A reader publishes its lock and then looks for the record: one of the two sees the other. Its files are left to it.
            is_read = attempt_name(step, target.run) in self._read_locks()
            for number, mapped in enumerate(slot.files):
                if is_read or storage.status(mapped.path) is None:
                    storage.remove(mapped.path)
                    mapped.close()
                    slot.files[number] = self._make_file(self._slot_path(), mapped.size)
                elif os.path.dirname(mapped.path) != os.path.join(target.root, SLOTS):
                    free = self._slot_path()
                    storage.rename(mapped.path, free)
                    mapped.path = free
            self._remove_empty(step)
            slot.step = None                        # last: after an error the next save begins here again
        for mapped, size in zip(slot.files, sizes, strict=True):
            mapped.resize(size)

    def _finish(self, slot: _Slot, stall: float) -> None:
        """Runs in the background: computes the checksums of the copy, gives the files their names, publishes the record."""
        started, target, shard, step = self._clock(), self.target, slot.shard, slot.step
        sums, rows = [Checksums() for _ in slot.files], []
        try:
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
            record = Record(target.run, target.rank, target.world_size, shard.state, runtime.time(), tuple(rows),
                            shard.deduplicated, target.lineage, target.local_ranks)
            publish(target.storage, os.path.join(target.attempt(step), record_name(target.rank)),
                    [record.encode(details_of_shard(shard, sums))], target.run)
            slot.recorded = True
            self._done.append(TierSaved(step, sum(plan.size for plan in slot.plans), stall, self._clock() - started))
            self._plans.prepare(shard.files, target.run, step + self._interval)
        except Exception as error:              # any error: it costs this save alone
            self._done.append(TierRefused(step, str(error)))

    def is_whole(self, step: int) -> bool:
        """Returns whether all ranks of this node have recorded ``step`` of this run."""
        try:
            there = set(map(record_rank, self.target.storage.list(self.target.attempt(step))))
        except OSError:
            return False
        return there.issuperset(self.target.ranks)

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _reserve(self, request: StepState, save: Save | Exception | None, jump: int) -> None:
        """Decides with all ranks whether there is memory for the slots, and reserves it in the background."""
        problem, sizes, count = "", [], slots_needed(self.settings.every_steps, jump)
        try:
            shard = _collected(request, save).shard
            sizes = [plan.size for plan in self._plans.of([
                replace(file, metadata={**file.metadata, **label(self.target.run, shard.state.step)}) for file in shard.files])]
            problem = self._why_not(count * sum(sizes))
        except (SaveError, OSError, ValueError, MemoryError) as error:
            problem = str(error)
        rows = gather_results(self.group, lambda: problem)
        refused = next(((rank, row) for rank, row in enumerate(rows) if row), None)
        if refused is not None:                     # all ranks or none: a save without one of them is worth nothing
            self._is_off = True
            self.emit(TierRefused(None, f"rank {refused[0]}: {refused[1]}"))
            return
        self._count = count
        stale = self._set_aside() if self.is_leader else ""
        if self.is_leader and self.loaded is None:
            self.notes.loaded()
        self._reserving = self._start(lambda: self._make_slots(sizes, stale))

    def _why_not(self, needed: int) -> str:
        """Returns why ``needed`` bytes cannot be had; empty if they can."""
        storage, ranks = self.target.storage, len(self.target.ranks)
        freed = sum(map(self._size_of, self._stale_paths())) // ranks           # soon
        free = storage.free_space(self.target.root)
        free -= free // host_memory.RESERVE                     # semaphores and buffers of other programs lie in /dev/shm, too
        limits = [(int(self.settings.limit_gib * 2**30) or host_memory.UNKNOWN, "mindresume.memory_tier.limit_gib is"),
                  (free // ranks + freed, f"each of {ranks} ranks has in {self.settings.dir}"),
                  (self.share + freed, "the share of this rank in the free memory of the host, or its container, is"),
                  (host_memory.left() + freed, "the host, or its container, has left")]
        return next((f"its slots need {needed / 2**20:.0f} MiB; {what} {most / 2**20:.0f} MiB" for most, what in limits
                     if needed > most), "")

    def _make_slots(self, sizes: Sequence[int], stale: str) -> None:
        try:
            if stale:
                remove_tree(self.target.storage, stale)
            while len(self._slots) < self._count:
                self._slots.append(_Slot([self._make_file(self._slot_path(), size) for size in sizes]))
        except Exception as error:              # any error: it costs the tier alone
            self._done.append(TierRefused(None, f"its memory cannot be reserved: {error}"))

    def _slot_path(self) -> str:
        """Returns a new name for a file without a valid content."""
        folder = os.path.join(self.target.root, SLOTS)
        self.target.storage.make_folder(folder)
        self._names += 1
        return os.path.join(folder, f".{self.target.rank}-{self._names}.{self.target.run}{TEMPORARY}")

    def _set_aside(self) -> str:
        """Renames what earlier runs left here into one folder, to be removed. Returns it. No rank of this run has saved yet; the
        removal itself can be late, when a rank uses one of the names again."""
        storage, stale = self.target.storage, os.path.join(self.target.root, f"stale-{self.target.run}")
        try:
            paths = self._stale_paths()
            storage.make_folder(stale)
            for number, path in enumerate(paths):
                storage.rename(path, os.path.join(stale, str(number)))
        except OSError as error:
            self.emit(Notice(f"{self.target.root}: saves of earlier runs are not removed now: {error}"))
        return stale

    def _stale_paths(self) -> list[str]:
        """Returns the files and folders of earlier runs here, except those of the loaded save."""
        storage, root, loaded = self.target.storage, self.target.root, self.loaded
        kept = {file.path for file in loaded.all_files} if loaded is not None else set()
        if loaded is not None:
            kept.add(os.path.join(FOLDER, loaded.name))
        found = [entry for entry in storage.list(root) if entry.startswith("stale-") and entry != f"stale-{self.target.run}"]
        for folder in [FOLDER, SLOTS, *(entry for entry in storage.list(root) if folder_rank(entry) is not None)]:
            found += [os.path.join(folder, entry) for entry in storage.list(os.path.join(root, folder))
                      if (folder != FOLDER or parse_attempt(entry)) and not entry.endswith(f".{self.target.run}{TEMPORARY}")]
        return [os.path.join(root, path) for path in found if path not in kept]

    def _size_of(self, path: str) -> int:
        """Returns the bytes of a file, or of all files in a folder."""
        storage = self.target.storage
        status = storage.status(path)
        if status is None or not status.is_folder:
            return status.size if status is not None else 0
        return sum(self._size_of(os.path.join(path, entry)) for entry in storage.list(path))

    def _remove_loaded(self) -> None:
        """Removes the save that the training has loaded: a newer one is common to all ranks. Each rank removes its files."""
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        storage, ranks = self.target.storage, list(self.target.ranks)
        for rank in sorted(loaded.files)[ranks.index(self.target.rank)::len(ranks)]:
            storage.remove(os.path.join(loaded.records_dir or "", record_name(rank)))
            for file in loaded.files[rank]:
                storage.remove(os.path.join(self.target.root, file.path))
        self._remove_folders([loaded.records_dir or "", os.path.dirname(loaded.records_dir or ""), loaded.commit_dir])

    def _remove_empty(self, step: int) -> None:
        attempt = self.target.attempt(step)
        self._remove_folders([attempt, os.path.dirname(attempt), self.target.data_dir(step)])

    def _remove_folders(self, folders: Sequence[str]) -> None:
        root = self.target.root
        for folder in dict.fromkeys(folders):
            with suppress(OSError):                 # other ranks still have files in it
                if folder not in (root, os.path.join(root, FOLDER)):
                    self.target.storage.remove(folder)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Waits for the background work. No save follows."""
        self._join(self._reserving)
        self._join(self._work)
        self._background.close()
        self._emit_done()
        self._is_off = True

    def newest(self, after: int) -> Shard | None:
        """Returns the newest save after step ``after`` that all ranks of this node have recorded, with its arrays in the memory
        of the tier; None if there is none. Waits some seconds for other ranks. Called after ``stop``."""
        slots = sorted((slot for slot in self._slots if slot.recorded and (slot.step or 0) > after),
                       key=lambda slot: slot.step or 0, reverse=True)
        until = self._clock() + _SETTLE
        while slots and not self.is_whole(slots[0].step) and self._clock() < until:
            self._sleep(_PAUSE)
        found = next((slot for slot in slots if self.is_whole(slot.step)), None)
        return None if found is None else _stored(found)

    def remove(self) -> None:
        """Releases the memory, and removes the tier on the first rank of the node: the disk has the last step. Raises no
        error."""
        for slot in self._slots:
            for mapped in slot.files:
                mapped.close()
        self._slots.clear()
        with suppress(OSError):
            if self.is_leader:
                remove_tree(self.target.storage, self.target.root)

    # ---- the background --------------------------------------------------------------------------------------------

    def _join(self, work: Work | None) -> None:
        if work is None:
            return
        work.join(self.timeout)
        if work.is_alive() and not self._is_off:
            self._is_off = True
            self.emit(TierRefused(None, f"the background work takes more than {self.timeout:.0f} s"))

    def _emit_done(self) -> None:
        done, self._done = self._done, []
        for event in done:
            if isinstance(event, TierRefused) and event.step is not None:
                self._failed(event.step, event.reason)
                continue
            self._failed_in_a_row = 0
            self._is_off = self._is_off or isinstance(event, TierRefused)
            self.emit(event)

    def _failed(self, step: int, reason: str) -> None:
        self._failures += 1
        self._failed_in_a_row += 1
        self._is_off = self._is_off or self._failed_in_a_row >= _FAILURES
        self.emit(TierRefused(step, reason, self._failures))


def _collected(request: StepState, save: Save | Exception | None) -> Save:
    if isinstance(save, Exception):
        raise SaveError(str(save))
    return save or request.collect()


def path_in_tier(path: str, run: str) -> str:
    """Returns the path of a file of a rank folder in the tier: the run is a part of the name, so that the files of two runs, of
    which one has loaded a save of the other, never have the same name."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f"{run}.{name}")


def path_on_disk(path: str, run: str) -> str:
    """Returns the path that ``path_in_tier`` was made of."""
    folder, name = os.path.split(path)
    return os.path.join(folder, name.removeprefix(f"{run}."))


def _copy(plan: FilePlan, tensors: Mapping[str, np.ndarray], memory: np.ndarray) -> None:
    """Copies the content of a file into ``memory``, each array from its device at most once."""
    name, data = None, np.empty(0, np.uint8)
    for part in plan.parts:
        if part.name is None:
            memory[part.offset:part.offset + part.count] = np.frombuffer(part.data, np.uint8)
            continue
        if part.name != name:
            name, data = part.name, np.frombuffer(tensor_bytes(tensors[part.name]), np.uint8)
        memory[part.offset:part.offset + part.count] = data[part.start:part.start + part.count]


def _pieces(plan: FilePlan, memory: np.ndarray):
    for part in plan.parts:
        for piece in chunks(memoryview(memory[part.offset:part.offset + part.count])):
            yield part.name, piece


def _stored(slot: _Slot) -> Shard:
    """Returns the shard of a slot with its arrays in the memory of the slot."""
    files, (run, _) = [], slot.shard.files[0].metadata[LABEL].split(" ")
    for file, plan, mapped in zip(slot.shard.files, slot.plans, slot.files, strict=True):
        tensors = {}
        for name, ranges in plan.tensors.items():
            spec = tensor_spec(name, file.tensors[name])
            parts = [mapped.data[offset:offset + count] for offset, _, count in ranges]
            raw = parts[0] if len(parts) == 1 else np.concatenate(parts)
            tensors[name] = file.tensors[name] if spec.dtype == "str" else raw.view(DTYPES[spec.dtype]).reshape(spec.shape)
        files.append(replace(file, path=path_on_disk(file.path, run), tensors={name: tensors[name] for name in file.tensors},
                             metadata={key: text for key, text in file.metadata.items() if key != LABEL}))
    return replace(slot.shard, files=tuple(files))
