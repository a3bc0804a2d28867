"""Runs a conversion as one transaction: the target folder appears complete or not at all, and nothing else is touched.

    prepare   is the target finished, free, is there room? ─▶ work folder beside the target, with a lock
    write     group by group (a pipeline stage, a part of consolidated weights): files ─▶ flush ─▶ mark of the finished group
    commit    records and manifest (rank folders) or index (consolidated weights) ─▶ rename the work folder to the target

The name of the work folder identifies everything that determines the bytes. So the same conversion, started again after a kill,
continues with the missing groups, and a finished conversion is not repeated. An error or Ctrl-C removes the work folder.
Several processes may share the groups: one prepares and commits, the others ``join`` and write.
"""
from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mindresume import runtime
from mindresume.errors import ConfigError, CorruptFileError, OutOfSpaceError, RecordError, SaveError
from mindresume.events import Emit, Event, Notice, ignore, warning
from mindresume.events.log_lines import line_of
from mindresume.formats.iteration_naming import iteration_name
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import Details, FileRecord, Record, TensorRecord, encode_head, read_head, record_name
from mindresume.reshard.checkpoint_view import CheckpointView
from mindresume.reshard.conversion_manifest import CONVERSION, LIMIT, read_conversion_manifest
from mindresume.reshard.conversion_plan import ConversionPlan
from mindresume.reshard.geometry import shape_of
from mindresume.reshard.target_files import TargetFile
from mindresume.saving.committer import Committer
from mindresume.saving.lineage import continued
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.atomic_publish import TEMPORARY, publish, publish_json
from mindresume.storage.interface import Storage
from mindresume.storage.operations import remove_tree
from mindresume.tensor_files.checksum import Checksums, file_checksum

LOCK = ".lock"                      # suffix of the name of the work folder
_SPARE = 1 << 20                    # bytes for records, manifest and index

Writer = Callable[[CheckpointView, Storage, Sequence[TargetFile]], list[Checksums]]


@dataclass
class Conversion:
    """Writes the files of ``plan`` into the folder ``target``, which must not exist or be empty. Symbolic links in its path are
    followed."""
    storage: Storage
    plan: ConversionPlan
    target: str
    emit: Emit = ignore
    clock: Callable[[], float] = runtime.time
    _lock: int = field(default=-1, repr=False)
    _owns_work: bool = field(default=False, repr=False)     # whether this object made the work folder and may remove it
    _suffix: str = field(default="", repr=False)            # makes its name unique

    def __post_init__(self) -> None:
        self.target = os.path.realpath(self.target)

    @property
    def work(self) -> str:
        folder, name = os.path.split(self.target)
        return os.path.join(folder, f".{name}.{self.plan.fingerprint[:16]}{self._suffix}{TEMPORARY}")

    @property
    def scratch(self) -> str:
        """Folder for intermediate files, removed at the commit."""
        return os.path.join(self.work, "scratch")

    def run(self, write: Callable[[], None]) -> None:
        """Prepares the work folder, calls ``write`` to fill it, and commits. Any error removes the work folder."""
        try:
            self.prepare()
            write()
            self.commit()
        except BaseException:                       # Ctrl-C too
            self.abandon()
            raise

    # ---- prepare ---------------------------------------------------------------------------------------------------

    def finished(self) -> bool:
        """Returns whether the target is the result of this very conversion; False if it is empty. ConfigError if it holds
        anything else."""
        if self.target in (os.getcwd(), os.path.dirname(self.target)):
            raise ConfigError(f"{self.target} cannot be replaced by a new folder; give one that does not exist")
        if not self.storage.list(self.target):
            if self.storage.status(self.target) is not None and not self.storage.status(self.target).is_folder:
                raise ConfigError(f"{self.target} is a file; give a folder that does not exist")
            return False
        try:
            made = read_conversion_manifest(self.storage, self.target)
        except CorruptFileError:
            made = None
        if made is None or made.fingerprint != self.plan.fingerprint:
            raise ConfigError(f"{self.target} is not empty" + ("" if made is None else f": it was converted from {made.what}")
                              + "; give a folder that does not exist. Nothing was changed")
        for file in made.files:
            found = self.storage.status(os.path.join(self.target, file.path))
            if found is None or found.size != file.size:
                state = "is gone" if found is None else f"has {found.size} bytes instead of {file.size}"
                raise ConfigError(f"{self.target} was converted from {made.what}, but its file {file.path} {state}; remove the "
                                  f"folder")
        if self._lock < 0 and self.storage.status(self.work + LOCK) is not None:
            with suppress(OSError):                 # left by a process that died right after the rename
                self.storage.remove(self.work + LOCK)
        return True

    def prepare(self) -> str:
        """Creates the work folder.

        Returns:
            The value that other processes pass to ``join``.
        Raises:
            ConfigError: the target is impossible.
            OutOfSpaceError: the disk has no room.
            SaveError: the same conversion is running.
        """
        root = os.path.realpath(self.plan.source.folder) if self.plan.source.folder else None
        if root and os.path.commonpath([self.target, root]) == root:
            raise ConfigError(f"{self.target} lies in {root}, the source, into which nothing is written; give another folder")
        self.storage.make_folder(os.path.dirname(self.work))
        self._take_lock()
        if self.plan.iteration_dir and self.storage.list(self.work) and not self.storage.list(os.path.join(self.work,
            self.plan.iteration_dir)):
            remove_tree(self.storage, self.work)    # left by a process that died during its commit
        self.storage.make_folder(self.work)
        missing = [group for number, group in enumerate(self.plan.groups) if self.done(number) is None]
        needed = _SPARE + self.plan.size(missing)
        room = self.storage.free_space(self.work)
        if room < needed:
            if len(missing) == len(self.plan.groups):
                self.abandon()
            self._release()                         # keep groups that a killed process finished
            raise OutOfSpaceError(f"{self.target} needs {needed / 2**20:.1f} MiB, there is room for {room / 2**20:.1f} MiB. "
                                  f"Nothing was written")
        return self._suffix

    def join(self, prepared: str) -> None:
        """Joins a conversion that another process prepared, and will commit or abandon."""
        self._suffix = prepared

    def _take_lock(self) -> None:
        path = self.work + LOCK
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = os.path.exists(path) and os.path.samestat(os.fstat(self._lock), os.stat(path))
        except BlockingIOError:
            is_locked = False
        except OSError as error:                    # a file system without locks needs a unique name
            self.emit(warning(f"{self.work} cannot be locked: {error}"))
            with suppress(OSError):
                self.storage.remove(path)
            is_locked, self._suffix = True, f"-{os.getpid()}-{os.urandom(4).hex()}"
        if not is_locked:                               # or it finished between our open and our flock
            self._release()
            raise SaveError(f"the same conversion to {self.target} is running in another process; wait for it, and then start "
                            f"this one again")
        self._owns_work = True
        if self.finished():
            self.abandon()
            raise SaveError(f"the same conversion to {self.target} was just finished by another process; nothing is left to do")

    # ---- write -----------------------------------------------------------------------------------------------------

    def done(self, number: int) -> list[Checksums] | None:
        """Returns the checksums of a finished group; None if it is not finished."""
        try:
            with self.storage.open(self._mark(number)) as file:
                rows = read_head(file, "group", LIMIT)[0]["files"]
        except (FileNotFoundError, RecordError):
            return None
        if [row[0] for row in rows] != [self.plan.files[i].path for i in self.plan.groups[number]]:
            return None                             # the groups were cut differently
        found = [Checksums(checksum, size, sums) for _, size, checksum, sums in rows]
        for i, sums in zip(self.plan.groups[number], found, strict=True):
            status = self.storage.status(os.path.join(self.work, self.plan.files[i].path))
            if status is None or status.size != sums.size:
                return None
        return found

    def write(self, writer: Writer, numbers: Sequence[int] | None = None) -> None:
        """Writes those of the groups ``numbers`` (default: all) that are not finished, or whose files are not what was written.
        Raises any error of ``writer``."""
        for number in range(len(self.plan.groups)) if numbers is None else numbers:
            if self._is_intact(number):
                self.emit(Notice(f"part {number + 1} of {len(self.plan.groups)} is there already"))
                continue
            files = [replace(self.plan.files[i], path=os.path.join(self.work, self.plan.files[i].path))
                     for i in self.plan.groups[number]]
            folders = {os.path.dirname(file.path) for file in files}
            for folder in folders:
                self.storage.make_folder(folder)
            for file in files:
                self.storage.remove(file.path)      # left by a killed process
            found = writer(self.plan.source.weights, self.storage, files)
            for folder in folders:
                self.storage.sync(folder)
            self.storage.make_folder(os.path.dirname(self._mark(number)))
            publish(self.storage, self._mark(number), [encode_head(
                {"version": 1, "kind": "group", "files": [[self.plan.files[i].path, s.size, s.file, s.tensors] for i, s in
                                                          zip(self.plan.groups[number], found, strict=True)]}, LIMIT)],
                    self.plan.run)

    def _is_intact(self, number: int) -> bool:
        """Returns whether a group is finished, after reading its files: a process that was cut off from the others can still have
        written into them."""
        found = self.done(number)
        for i, sums in zip(self.plan.groups[number], found or (), strict=False):
            with self.storage.open(os.path.join(self.work, self.plan.files[i].path)) as file:
                if file_checksum(file) != (sums.file, sums.size):
                    self.emit(warning(f"{self.plan.files[i].path} of an earlier start is not what was written; it is written "
                                      f"again"))
                    return False
        return found is not None

    def _mark(self, number: int) -> str:
        return os.path.join(self.work, "done", f"{number}.json")

    # ---- commit ----------------------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Publishes the complete target durably. SaveError if a group is missing."""
        sums: dict[int, Checksums] = {}
        for number, group in enumerate(self.plan.groups):
            found = self.done(number)
            if found is None:
                raise SaveError(f"{self.work}: part {number + 1} of {len(self.plan.groups)} was not written")
            sums.update(zip(group, found, strict=True))
        if self.plan.shards and self.plan.source.state is not None:
            self._commit_records(sums)
        if self.plan.index is not None:
            publish_json(self.storage, os.path.join(self.work, self.plan.index[0]), self.plan.index[1], self.plan.run)
        rows = [[self.plan.path(i), sums[i].size, sums[i].file] for i in range(len(self.plan.files))]
        value = {"version": 1, "kind": "conversion", "fingerprint": self.plan.fingerprint, "what": self.plan.source.what,
                 "files": rows}
        if not self.plan.shards:
            value["tensors"] = {name: checksum for found in sums.values() for name, checksum in found.tensors.items()}
            written = self.plan.source.weights.tensors
            value["shapes"] = {name: [written[name].dtype, written[name].shape] for name in value["tensors"]}
            if self.plan.source.arrangement:
                value["arrangement"] = self.plan.source.arrangement
        publish(self.storage, os.path.join(self.work, CONVERSION), [encode_head(value, LIMIT)], self.plan.run)
        remove_tree(self.storage, os.path.join(self.work, "done"))
        if self.storage.status(self.scratch) is not None:
            remove_tree(self.storage, self.scratch)
        self.storage.sync(self.work)
        self.storage.rename(self.work, self.target)
        self._release()
        self.storage.sync(os.path.dirname(self.target))

    def _commit_records(self, sums: Mapping[int, Checksums]) -> None:
        """Writes the records of all ranks and commits them."""
        plan, state = self.plan, self.plan.source.state
        place = SaveTarget(self.storage, self.work, plan.run, 0, len(plan.shards), bool(plan.iteration_dir))
        attempt = place.attempt(state.step)
        self.storage.make_folder(attempt)
        for rank, numbers in enumerate(plan.shards):
            layouts, rows, records = self._layouts(rank), {}, []
            for index, number in enumerate(numbers):
                file = plan.files[number]
                for name, region in file.holds.items():
                    tensor, layout = plan.source.weights.tensors[name], layouts.get(name)
                    rows[name] = TensorRecord(tensor.dtype, shape_of(region), sums[number].tensors[name], layout,
                                              tensor.shape if layout else None, index)
                path = file.path.removeprefix(f"{plan.iteration_dir}/") if plan.iteration_dir else file.path
                records.append(FileRecord(path, file.format, sums[number].size, sums[number].file))
            record = Record(plan.run, rank, len(plan.shards), state, self.clock(), tuple(records),
                            lineage=continued(plan.source.candidate, "", same_folder=False))
            publish(self.storage, os.path.join(attempt, record_name(rank)), [record.encode(Details(rows))], plan.run)
        left = Committer(place, emit=self._note).try_commit(state.step)
        if left:
            raise SaveError(f"{self.work}: no record of rank {left}")
        if plan.iteration_dir and self.storage.status(os.path.join(self.work, iteration_name(state.step))) is None:
            raise SaveError(f"{self.work}: {iteration_name(state.step)} could not be made")

    def _note(self, event: Event) -> None:
        """Emits an event of the commit as a notice: it is no save of a training."""
        level, text = line_of(event)
        if text:
            self.emit(Notice(text, level))

    def _layouts(self, rank: int) -> Mapping[str, TensorLayout]:
        if self.plan.strategy is None:
            return {}
        return self.plan.strategy.of_rank(rank)

    def keep(self) -> None:
        """Leaves the work folder to the next start of the same conversion, and releases the lock."""
        self._release()

    def abandon(self) -> None:
        """Removes the work folder if this object made it, and the lock. Raises nothing."""
        if self._owns_work:
            # rename first: the same conversion may start again at once
            gone = f"{self.work}-{runtime.token_hex(4)}"
            with suppress(OSError):
                self.storage.rename(self.work, gone)
                remove_tree(self.storage, gone)
        self._release()

    def _release(self) -> None:
        if self._owns_work:                              # while the lock is held, so that no other process locks a removed file
            with suppress(OSError):
                self.storage.remove(self.work + LOCK)
        self._owns_work = False
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
