"""Runs a conversion as one transaction: the target folder appears complete or not at all, and
nothing else is touched.

    prepare   is the target finished, free, is there room?
              ─▶ work folder beside the target, with a lock
    write     group by group (a pipeline stage, a file of consolidated weights): files ─▶ flush
              ─▶ mark of the finished group
    commit    records and manifest (rank folders) or index (consolidated weights)
              ─▶ rename the work folder to the target

The name of the work folder identifies everything that determines the bytes. So the same conversion,
started again after a kill, continues with the missing groups, and a finished conversion is not
repeated. An error or Ctrl-C removes the work folder.

Several processes may write a share of the groups each. They exchange no messages: the name leads
all of them to one work folder, and whoever finds all marks there commits.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mindresume import runtime
from mindresume.errors import (
    ConfigError,
    CorruptFileError,
    LoadError,
    OutOfSpaceError,
    ProcessLostError,
    RecordError,
    SaveError,
    StrategyError,
)
from mindresume.events import Emit, Event, Notice, ignore, warning
from mindresume.formats.consolidated import CONVERSION, MAX_CONVERSION, read_conversion_manifest
from mindresume.formats.iterations import iteration_name
from mindresume.formatting import listed
from mindresume.model.layout import shape_of
from mindresume.model.manifest import (
    Details,
    FileRecord,
    Record,
    TensorRecord,
    encode_head,
    read_head,
    record_name,
)
from mindresume.reshard.conversion_plan import ConversionPlan
from mindresume.reshard.direct_engine import Engine, check_source
from mindresume.saving.committer import publish_manifest, publish_meta
from mindresume.saving.iteration_publisher import publish_iteration
from mindresume.saving.retention import continued
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage import TEMPORARY, Storage, parallel, publish, publish_json, remove_tree
from mindresume.tensor_files import Checksums, file_checksum

LOCK = ".lock"  # suffix of the name of the work folder
_SPARE = 1 << 20  # bytes for records, manifest and index
NOTE_EVERY = 30.0  # seconds between two notices of what is waited for
# seconds between two looks at the work folder
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# of a share, each after _FIRST_PAUSE, to begin; seconds while another one commits:
_TRIES = 100
_PATIENCE = 1800.0
# a second try would find the same
_FINAL = (ConfigError, CorruptFileError, LoadError, StrategyError)
# Folders for intermediate files, removed at the commit: of a process that works alone, and of
# shares.
_SCRATCH = ("scratch-of-one", "scratch")


@dataclass(frozen=True)
class Share:
    """What one process writes of a conversion that several share: every ``count``-th group of
    files.

    Args:
        number: which of them, from 1.
        timeout: seconds without a sign of the others, whose shares are missing, after which waiting
            for them ends with an error; 0: nobody waits for the others.
    """

    number: int = 1
    count: int = 1
    timeout: float = 0.0

    def groups(self, plan: ConversionPlan) -> range:
        """Returns the numbers of the groups."""
        return range(self.number - 1, len(plan.groups), self.count)

    def __str__(self) -> str:
        return f"part {self.number} of {self.count}"


@dataclass
class Conversion:
    """Writes the files of ``plan`` into the folder ``target``, which must not exist or be empty.
    Symbolic links in its path are followed."""

    storage: Storage
    plan: ConversionPlan
    target: str
    emit: Emit = ignore
    share: Share = field(default_factory=Share)
    _lock: int = field(default=-1, repr=False)
    # whether this object holds the work folder and may remove it
    _owns_work: bool = field(default=False, repr=False)
    # of the file system; else a commit that died needs a person
    _has_locks: bool = field(default=True, repr=False)
    # of the work folder: another share can remove it
    _identity: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        self.target = os.path.realpath(self.target)
        folder, name = os.path.split(self.target)
        self._base = os.path.join(folder, f".{name}.{self.plan.fingerprint[:16]}")
        self.work = f"{self._base}{TEMPORARY}"
        self._lock_path = f"{self.work}{LOCK}"
        self._scratch = _SCRATCH[self.share.count > 1]
        # the work folder while one of several processes commits it
        self._claimed = f"{self._base}-commit{TEMPORARY}"

    def run(self, engine: Engine, checks_source: bool = False) -> bool:
        """Writes the share of this process, and commits when all shares are there. Returns whether
        the target is complete.

        A process that works alone leaves nothing behind after any error or signal. One of several
        removes the work of all after an error that a second try would find again; after any other
        error what is finished stays for the next try.

        Args:
            checks_source: what the engine cannot compare while it copies is read and compared
                before (``check_source``).
        """
        try:
            # locks the work folder beside the target, where everything is written
            if not self.prepare():
                return True
            # nobody waits for the check of one that writes nothing
            sharers = min(self.share.count, len(self.plan.groups))
            if checks_source and self.share.number <= sharers:
                check_source(
                    self.plan.source.weights, engine.traffic, self.share.number - 1, sharers
                )
            self.write(engine)
            if self.share.count == 1:
                self.commit()
                return True
            # nothing of this share is open any more: others may commit
            self._release()
            return self._commit_or_wait()
        except BaseException as error:  # Ctrl-C too
            if self.share.count == 1 or isinstance(error, _FINAL):
                self.abandon()
            self._release()
            # Another share has removed the work folder below this one: that is the error to tell.
            if (
                self.share.count > 1
                and isinstance(error, (OSError, SaveError))
                and self._identity
                and not self._is_there()
                and self.storage.status(self.target) is None
            ):
                raise self._lost_work() from error
            raise

    # ---- prepare ---------------------------------------------------------------------------------

    def finished(self) -> bool:
        """Returns whether the target is the result of this very conversion; False if it is empty.
        ConfigError if it holds anything else."""
        if self.target in (os.getcwd(), os.path.dirname(self.target)):
            raise ConfigError(
                f"{self.target} cannot be replaced by a new folder; give one that does not exist"
            )
        if not self.storage.list(self.target):
            if (
                self.storage.status(self.target) is not None
                and not self.storage.status(self.target).is_folder
            ):
                raise ConfigError(f"{self.target} is a file; give a folder that does not exist")
            return False
        try:
            made = read_conversion_manifest(self.storage, self.target)
        except CorruptFileError:
            made = None
        if made is None or made.fingerprint != self.plan.fingerprint:
            raise ConfigError(
                f"{self.target} is not empty"
                + ("" if made is None else f": it was converted from {made.what}")
                + "; give a folder that does not exist. Nothing was changed"
            )
        for file in made.files:
            found = self.storage.status(os.path.join(self.target, file.path))
            if found is None or found.size != file.size:
                state = (
                    "is gone" if found is None else f"has {found.size} bytes instead of {file.size}"
                )
                raise ConfigError(
                    f"{self.target} was converted from {made.what}, but its file {file.path} "
                    f"{state}; remove the folder"
                )
        if self._lock < 0 and self.storage.status(self._lock_path) is not None:
            # left by a process that died right after the rename
            with suppress(OSError):
                self.storage.remove(self._lock_path)
        return True

    def prepare(self) -> bool:
        """Creates the work folder. Returns False if there is nothing to do, because another process
        has committed all shares.

        Raises:
            ConfigError: the target is impossible.
            OutOfSpaceError: the disk has no room.
            SaveError: the same conversion is running.
        """
        root = os.path.realpath(self.plan.source.folder) if self.plan.source.folder else None
        if root and os.path.commonpath([self.target, root]) == root:
            raise ConfigError(
                f"{self.target} lies in {root}, the source, into which nothing is written; give "
                "another folder"
            )
        self.storage.make_folder(os.path.dirname(self.work))
        alone = self.share.count == 1
        tries = 1
        until = runtime.monotonic() + max(self.share.timeout, _PATIENCE)
        while not self._take_lock(fcntl.LOCK_EX):
            if not alone:
                if self._take_lock(fcntl.LOCK_SH):
                    break
                if self.finished():
                    return False
            if alone or tries == _TRIES or runtime.monotonic() > until:
                raise SaveError(
                    f"the same conversion to {self.target} is running in another process; wait for "
                    "it, and then start this one again"
                )
            # else another share commits, or puts that in order
            tries += self.storage.status(self._claimed) is None
            runtime.sleep(_FIRST_PAUSE)
        else:
            self._put_in_order()
        if self.finished():
            if not alone:
                self._release()
                return False
            self.abandon()
            raise SaveError(
                f"the same conversion to {self.target} was just finished by another process; "
                "nothing is left to do"
            )
        self.storage.make_folder(self.work)
        self._identity = self.storage.status(self.work).identity
        # The first share asks for room for all, so that there is enough or none begins.
        is_first = self.storage.status(self._in_work(self._scratch)) is None
        numbers = range(len(self.plan.groups)) if is_first else self.share.groups(self.plan)
        missing = [number for number in numbers if self.done(number) is None]
        needed = _SPARE + self.plan.size(missing)
        room = self.storage.free_space(self.work)
        if room < needed:
            if not self.storage.list(self.work) or alone and len(missing) == len(self.plan.groups):
                self.abandon()
            self._release()  # keep groups that a killed process finished
            raise OutOfSpaceError(
                f"{self.target} needs {needed / 2**20:.1f} MiB, there is room for "
                f"{room / 2**20:.1f} MiB. Nothing was written"
            )
        return True

    def _put_in_order(self) -> None:
        """Makes the work folder of a process that died in its commit one that can be continued,
        while no other process uses it. A share then lets the others in."""
        if self._has_locks and self.storage.status(self._claimed) is not None:
            if self.storage.status(self.work) is None:
                self.storage.rename(self._claimed, self.work)
            else:
                remove_tree(self.storage, self._claimed)
        if self.plan.iteration_dir and self.storage.status(
            self._in_work(iteration_name(self.plan.source.state.step))
        ):
            remove_tree(self.storage, self.work)  # its files have their final names already
        for name in _SCRATCH[:1] if self.share.count > 1 else _SCRATCH:
            # left by a killed process, whose workers may still write
            with suppress(OSError):
                remove_tree(self.storage, self._in_work(name))
        if self.share.count > 1:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _take_lock(self, kind: int) -> bool:
        """Locks the work folder: shared by the processes that write shares, exclusive by one that
        works alone or commits. Returns False if the lock is held."""
        path = self._lock_path
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            self._owns_work = os.path.exists(path) and os.path.samestat(
                os.fstat(self._lock), os.stat(path)
            )
        except BlockingIOError:
            self._owns_work = False
        except OSError as error:
            # a file system without locks: a process alone needs a unique name
            self.emit(warning(f"{self.work} cannot be locked: {error}"))
            self._has_locks = False
            with suppress(OSError):
                self.storage.remove(path)
            if self.share.count == 1:
                self.work = f"{self._base}-{os.getpid()}-{os.urandom(4).hex()}{TEMPORARY}"
            self._owns_work = True
        # or it finished between our open and our flock
        if not self._owns_work:
            self._release()
        return self._owns_work

    def _in_work(self, *names: str) -> str:
        """Returns the path of a file in the work folder."""
        return os.path.join(self.work, *names)

    # ---- write -----------------------------------------------------------------------------------

    def done(self, number: int, reads: bool = False) -> list[Checksums] | None:
        """Returns the checksums of a finished group; None if it is not finished. ``reads``:
        compares the bytes of its files, too: a process that was cut off from the others can still
        have written into them."""
        try:
            with self.storage.open(self._in_work("done", f"{number}.json")) as file:
                head = read_head(file, "group", MAX_CONVERSION)[0]
        except (FileNotFoundError, RecordError):
            return None
        rows, parts = head["files"], head.get("parts", 1)
        paths = [file.path for file in self.plan.files_of([number])]
        if [row[0] for row in rows] != paths:
            return None  # the groups were cut differently
        if self.share.count > 1 and parts not in (1, self.share.count):
            return None  # the checks of the source were cut differently
        found = [Checksums(checksum, size, sums) for _, size, checksum, sums in rows]
        for path, sums in zip(paths, found, strict=True):
            status = self.storage.status(self._in_work(path))
            if status is None or status.size != sums.size:
                return None
            if reads:
                with self.storage.open(self._in_work(path)) as file:
                    if file_checksum(file) != (sums.file, sums.size):
                        self.emit(
                            warning(
                                f"{path} of an earlier start is not what was written; it is "
                                "written again"
                            )
                        )
                        return None
        return found

    def write(self, engine: Engine) -> None:
        """Writes those groups of the share that are not finished, or whose files are not what was
        written. Raises the errors of ``engine``."""
        scratch = self._in_work(self._scratch)
        for number in self.share.groups(self.plan):
            if self.done(number, reads=True) is not None:
                self.emit(Notice(f"part {number + 1} of {len(self.plan.groups)} is there already"))
                continue
            if self.share.count > 1 and not self._is_there():
                raise self._lost_work()
            files = self.plan.files_of([number])
            mark = self._in_work("done", f"{number}.json")
            folders = {os.path.dirname(self._in_work(file.path)) for file in files}
            # another try of this share may run: a file has its name once it is whole
            aside = os.path.join(scratch, f"{number}-{runtime.token_hex(4)}")
            for folder in (*folders, aside, os.path.dirname(mark)):
                self.storage.make_folder(folder)
            # first: nobody commits what is written again
            self.storage.remove(mark)
            # makes room; of shares, another try may have written them
            for file in files if self.share.count == 1 else ():
                self.storage.remove(self._in_work(file.path))
            begun = [
                replace(file, path=os.path.join(aside, f"{i}-{os.path.basename(file.path)}"))
                for i, file in enumerate(files)
            ]
            sums = engine.write(self.plan, self.storage, begun, scratch)
            for before, file in zip(begun, files, strict=True):
                self.storage.rename(before.path, self._in_work(file.path))
            for folder in folders:
                self.storage.sync(folder)
            rows = [
                [file.path, s.size, s.file, s.tensors] for file, s in zip(files, sums, strict=True)
            ]
            head = {"version": 1, "kind": "group", "files": rows, "parts": self.share.count}
            publish(self.storage, mark, [encode_head(head, MAX_CONVERSION)], self.plan.run)

    # ---- the other shares ------------------------------------------------------------------------

    def _commit_or_wait(self) -> bool:
        """Commits if all groups are there, else waits for whoever completes them. Returns whether
        the target is complete. Raises ProcessLostError if the others give no sign for ``timeout``
        seconds."""
        left, sign = list(range(len(self.plan.groups))), None
        pause = _FIRST_PAUSE
        since = runtime.monotonic()
        noted = runtime.monotonic()
        while not self.finished():
            # one listing: there may be a thousand groups
            marked = set(self.storage.list(self._in_work("done")))
            left = [number for number in left if f"{number}.json" not in marked] or [
                number for number in range(len(self.plan.groups)) if self.done(number) is None
            ]
            if not left and self._commit_alone():
                return True
            if self.share.timeout <= 0:
                if self.finished() or self._is_there():
                    return self.storage.status(self.target) is not None
                raise self._lost_work()
            if not self._is_there() and not self.finished():
                raise self._lost_work()
            now = runtime.monotonic()
            before = sign
            sign = (left, self._stamps(left))
            if sign != before:
                since = now
            text = "the process that commits"
            if left:
                parts = sorted({f"part {number % self.share.count + 1}" for number in left})
                text = f"{listed(parts, 3)} of {self.share.count}"
            if now - since > self.share.timeout:
                raise ProcessLostError(
                    f"waited {now - since:.0f} s for {text} ({self.work}): it must run, with the "
                    "same arguments, and see this folder. Was a step saved meanwhile? Give --step. "
                    "The same command, started again, continues"
                )
            if now - noted >= NOTE_EVERY:
                noted = now
                # at once: ``emit`` may collect
                logging.getLogger("mindresume").warning("waiting for %s", text)
            runtime.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _commit_alone(self) -> bool:
        """Commits if no other process writes or commits. Returns whether it did. The lock keeps out
        those of this machine; the rename lets one alone pass where locks do not reach."""
        if not self._take_lock(fcntl.LOCK_EX):
            return False
        try:
            if self.finished() or any(
                self.done(number) is None for number in range(len(self.plan.groups))
            ):
                return False
            try:
                self.storage.rename(self.work, self._claimed)
            except FileNotFoundError:
                return False
            self.work = self._claimed
            self.commit()
            return True
        finally:
            self.work = f"{self._base}{TEMPORARY}"
            self._release()

    def _is_there(self) -> bool:
        """Returns whether the work folder is the one that this process began with, also while
        another process commits it."""
        found = [self.storage.status(path) for path in (self.work, self._claimed)]
        return any(status is not None and status.identity == self._identity for status in found)

    def _lost_work(self) -> ProcessLostError:
        return ProcessLostError(
            f"{self.work} was removed: another process of this conversion found an error"
        )

    def _stamps(self, groups: list[int]) -> list[tuple[int, float] | None]:
        """Returns what changes while another process writes these groups."""
        paths = [self._in_work(file.path) for file in self.plan.files_of(groups)]
        return [
            status and (status.size, status.mtime)
            for status in parallel(self.storage, self.storage.status, paths)
        ]

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Publishes the complete target durably. SaveError if a group is missing."""
        plan = self.plan
        sums: dict[int, Checksums] = {}
        for number, group in enumerate(plan.groups):
            found = self.done(number)
            if found is None:
                raise SaveError(
                    f"{self.work}: part {number + 1} of {len(plan.groups)} was not written"
                )
            sums.update(zip(group, found, strict=True))
        if plan.shards and plan.source.state is not None:
            self._commit_records(sums)
        for name, document in plan.documents:
            publish_json(self.storage, self._in_work(name), document, plan.run)
        paths = [file.path for file in plan.files]
        if plan.iteration_dir:  # it has its final name
            paths = [
                path.replace(plan.iteration_dir, iteration_name(plan.source.state.step), 1)
                for path in paths
            ]
        rows = [[path, sums[i].size, sums[i].file] for i, path in enumerate(paths)]
        value = {
            "version": 1,
            "kind": "conversion",
            "fingerprint": plan.fingerprint,
            "what": plan.source.what,
            "files": rows,
        }
        if not plan.shards:
            value["tensors"] = {
                name: checksum
                for found in sums.values()
                for name, checksum in found.tensors.items()
            }
            written = plan.source.weights.tensors
            value["shapes"] = {
                name: [written[name].dtype, written[name].shape] for name in value["tensors"]
            }
            if plan.source.arrangement:
                value["arrangement"] = plan.source.arrangement
        publish(
            self.storage,
            self._in_work(CONVERSION),
            [encode_head(value, MAX_CONVERSION)],
            plan.run,
        )
        remove_tree(self.storage, self._in_work("done"))
        for name in _SCRATCH:
            if self.storage.status(self._in_work(name)) is not None:
                remove_tree(self.storage, self._in_work(name))
        self.storage.sync(self.work)
        self.storage.rename(self.work, self.target)
        self._release()
        self.storage.sync(os.path.dirname(self.target))

    def _commit_records(self, sums: Mapping[int, Checksums]) -> None:
        """Writes the records of all ranks and commits them."""
        plan, state = self.plan, self.plan.source.state
        place = SaveTarget(
            self.storage, self.work, plan.run, 0, len(plan.shards), bool(plan.iteration_dir)
        )
        attempt = place.attempt(state.step)
        self.storage.make_folder(attempt)
        for rank, numbers in enumerate(plan.shards):
            layouts = plan.strategy.of_rank(rank) if plan.strategy is not None else {}
            rows, records = {}, []
            for index, number in enumerate(numbers):
                file = plan.files[number]
                for name, region in file.holds.items():
                    tensor, layout = plan.source.weights.tensors[name], layouts.get(name)
                    rows[name] = TensorRecord(
                        tensor.dtype,
                        shape_of(region),
                        sums[number].tensors[name],
                        layout,
                        tensor.shape if layout else None,
                        index,
                    )
                path = file.path.removeprefix(f"{plan.iteration_dir}/")
                records.append(FileRecord(path, file.format, sums[number].size, sums[number].file))
            record = Record(
                plan.run,
                rank,
                len(plan.shards),
                state,
                runtime.time(),
                tuple(records),
                False,
                continued(plan.source.candidate, "", same_folder=False),
            )
            publish(
                self.storage,
                os.path.join(attempt, record_name(rank)),
                [record.encode(Details(rows))],
                plan.run,
            )
        manifest = publish_manifest(place, state.step, emit=self._notice)
        try:
            if plan.iteration_dir:
                publish_iteration(place, state.step, emit=self.emit)
            else:
                publish_meta(place, manifest.files[0][0].path, plan.run)
        except OSError as error:  # hours of work are not thrown away for a pointer
            final = self._in_work(iteration_name(state.step))
            if plan.iteration_dir and self.storage.status(final) is None:
                raise
            self.emit(
                warning(
                    f"step {state.step} is committed, but its pointers are not updated: {error}"
                )
            )

    def _notice(self, event: Event) -> None:
        """Emits an event of the commit as a notice: it is no save of a training."""
        if text := event.line():
            self.emit(Notice(text, event.log_level))

    # ---- the end ---------------------------------------------------------------------------------

    def discard(self) -> None:
        """Removes the work folder unless another process uses it. Raises nothing."""
        with suppress(OSError):
            if self._take_lock(fcntl.LOCK_EX):
                self._put_in_order()  # a commit that failed has renamed it
                self.abandon()

    def abandon(self) -> None:
        """Removes the work folder if this object holds it, and the lock. Raises nothing."""
        if self._owns_work:
            # rename first: the same conversion may start again at once
            gone = f"{self.work}-{runtime.token_hex(4)}"
            with suppress(OSError):
                self.storage.rename(self.work, gone)
                remove_tree(self.storage, gone)
        self._identity = ""
        self._release()

    def _release(self) -> None:
        # while the lock is held, so that no other process locks a removed file
        if self._owns_work:
            with suppress(OSError):
                if self.share.count > 1:
                    # other shares may hold it too
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.storage.remove(self._lock_path)
        self._owns_work = False
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
