"""Locates the tier in memory of a checkpoint directory, and tells whether a tier still belongs to
it.

    mark = read_mark(storage, root)             # None: no training here has a tier
    find_tier(storage, root)                    # its folder on this node, if it belongs to ``root``

A tier belongs to one directory, and to no copy of it, at whatever path and in whatever container: a
copy is another training, and so is what a person restores in the place of the directory. So the
directory holds a random token, from which the name of the tier follows, and the owner file of the
tier has what cannot be copied: device and inode of the directory and of the file with the token,
and the time of the last change of that file, because what is restored often gets the same inodes. A
training that finds no tier of its directory makes a new token, so no two directories ever use one
tier.

Nor must it bring back what a person has removed to go back: a note in the tier names the newest
checkpoint that its training is known to have on disk. The saves in memory that followed it do not
count once it is gone.

    # on the first rank of a node; ``key``: of the checkpoint that was loaded
    notes = DiskNotes(storage, tier, run, key)
    notes.loaded();  notes.committed(100)           # the training
    DiskNote.read(storage, tier)                    # the next start
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated

from mindresume import runtime
from mindresume.coordination.lease import LeaseHolder, holder_of_this_process, is_alive
from mindresume.coordination.liveness import boot_id, namespace
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, Run, attempt_name, run_sequence
from mindresume.storage import Storage, publish_json, read_document
from mindresume.storage.posix import filesystem_type
from mindresume.typed import Count, Limits, Number

MARK = "memory-tier"
OWNER = "owner.json"
SLOTS = "slots"
# suffix of the folder of a tier: what this node keeps for another one
PARTNER = ".partner"
_VERSION = 2
NOTE = "on-disk.json"
_PRECISION = 2.0  # seconds: some file systems forget fractions of the time of a change


@dataclass(frozen=True)
class TierMark:
    """Content of the file in a checkpoint directory that says where its tier lies. ``dir``: the
    tmpfs."""

    token: Annotated[str, Limits(pattern="[0-9a-f]{16}")]
    dir: Annotated[str, Limits(pattern="(?s)/.*")]


@dataclass(frozen=True)
class TierOwner:
    """Content of the owner file of a tier.

    Attributes:
        directory: real path of the checkpoint directory.
        token: of its mark.
        identity: of the checkpoint directory and the file with the token (``identity_of``).
        marked: time of the last change of the file with the token; 0: not known.
        mount: mount point of the disk that holds it.
        namespace: of mounts, in which ``directory`` and ``mount`` are valid; 0: not known.
        run: the run that saves into the tier, or did last.
        machine: as in a lease.
        processes: (pid, start in ticks) of the ranks on this node.
    """

    version: Annotated[int, Limits(_VERSION, _VERSION)]
    directory: str
    token: str
    identity: str
    mount: str
    namespace: Count
    run: Run
    machine: str
    processes: tuple[tuple[Count, Count], ...]
    marked: Number = 0.0

    @classmethod
    def read(cls, storage: Storage, tier: str) -> TierOwner | None:
        """Returns the owner of a tier; None if the file is missing or has another form."""
        return read_document(storage, os.path.join(tier, OWNER), cls)

    @property
    def is_alive(self) -> bool | None:
        """Whether a rank of the owner runs on this node. None: it is in another container, or
        cannot be looked at."""
        states = [
            is_alive(LeaseHolder("", self.run, "", self.machine, pid, started, 0.0))
            for pid, started in self.processes
        ]
        return True if True in states else None if None in states else False

    def is_of(self, directory: CheckpointDir, mark: TierMark) -> bool:
        """Returns whether the tier belongs to a directory as it is now. Raises OSError."""
        identity, marked = identity_of(directory)
        return (
            identity != ""
            and (self.token, self.identity) == (mark.token, identity)
            and (not self.marked or abs(self.marked - marked) <= _PRECISION)
        )

    @property
    def sees_directory(self) -> bool:
        """Whether this process finds the checkpoint directory under its path. In another container
        it can be another folder."""
        return self.namespace != 0 and self.namespace == namespace("mnt")

    @property
    def directory_is_gone(self) -> bool:
        """Whether the checkpoint directory does not exist any more. A disk that is not mounted now,
        or fails, proves nothing."""
        try:
            os.lstat(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return os.path.ismount(self.mount)
        except OSError:
            return False
        return False


def read_mark(directory: CheckpointDir) -> TierMark | None:
    """Returns the mark of a checkpoint directory; None if it has none that can be read."""
    return read_document(directory.storage, directory.path(FOLDER, MARK), TierMark)


def make_mark(directory: CheckpointDir, folder: str, tag: str, keep: bool) -> TierMark:
    """Returns the mark of ``root`` for a tier in ``folder``: the one that is there with ``keep``,
    else a new one, which it publishes. Raises OSError.

    Args:
        keep: some node has a tier with this mark that belongs to ``root``.
    """
    found = read_mark(directory) if keep else None
    if found is not None and found.dir == folder:
        return found
    mark = TierMark(runtime.token_hex(8), folder)
    directory.storage.make_folder(directory.path(FOLDER))
    publish_json(directory.storage, directory.path(FOLDER, MARK), asdict(mark), tag)
    return mark


def parent_of_tiers(folder: str) -> str:
    """Returns the folder of all tiers of this user in the tmpfs ``folder``."""
    return os.path.join(folder, f"mindresume-{os.getuid()}")


def tier_path(mark: TierMark) -> str:
    """Returns the folder of the tier with this mark on this node, whether it exists or not."""
    return os.path.join(parent_of_tiers(mark.dir), mark.token)


def identity_of(directory: CheckpointDir) -> tuple[str, float]:
    """Returns what no copy of ``root`` has: the identities (``Status.identity``) of the folder and
    of the file with its mark, empty if one of them is not known, and the time of the last change of
    that file, 0 if it is not known. Raises OSError."""
    folder = directory.storage.status(directory.root)
    mark = directory.storage.status(directory.path(FOLDER, MARK))
    if folder is None or mark is None or not (folder.identity and mark.identity):
        return "", 0.0
    return f"{folder.identity} {mark.identity}", mark.changed


def owner_of(
    directory: CheckpointDir, mark: TierMark, run: str, processes: list[list[int]]
) -> TierOwner:
    """Returns the owner file of a training that saves to ``root``. Raises OSError."""
    real = mount = os.path.realpath(directory.root)
    while not os.path.ismount(mount):
        mount = os.path.dirname(mount)
    identity, marked = identity_of(directory)
    return TierOwner(
        _VERSION,
        real,
        mark.token,
        identity,
        mount,
        namespace("mnt"),
        run,
        holder_of_this_process("").machine,
        tuple((pid, started) for pid, started in processes),
        marked,
    )


def this_process() -> list[int]:
    """Returns [pid, start in ticks] of this process."""
    holder = holder_of_this_process("")
    return [holder.pid, holder.started]


def find_tier(directory: CheckpointDir, suffix: str = "") -> tuple[str, str]:
    """Returns (folder of the tier of ``root`` on this node, why it is not used). Both are empty if
    there is none. ``suffix``: PARTNER for the tier of copies."""
    mark = read_mark(directory)
    tier = tier_path(mark) + suffix if mark is not None else ""
    if not tier or directory.storage.status(os.path.dirname(tier)) is None:
        return "", ""
    # before a look into it: another user's may be closed
    if problem := foreign_folder(parent_of_tiers(mark.dir)):
        return "", problem
    if directory.storage.status(tier) is None:
        return "", ""
    owner = TierOwner.read(directory.storage, tier)
    if owner is None:
        return "", f"{tier} has no owner file that can be read"
    if not owner.is_of(directory, mark):
        return "", (
            f"{tier} belongs to another checkpoint directory than {directory.root} is now, which "
            "is a copy, or was restored or replaced"
        )
    return tier, ""


@runtime.asks_machine
def foreign_folder(path: str) -> str:
    """Returns why a folder in a place that all users write to is not trusted; empty if it is of
    this user alone."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return f"{path} is not a folder that only this user can write to"
    return ""


@runtime.asks_machine
def make_tier(path: str) -> None:
    """Creates the folder of a tier, for this user alone. Raises OSError, also if it would not lie
    in memory."""
    parent = os.path.dirname(path)
    folder = os.path.dirname(parent)
    kind = filesystem_type(os.path.realpath(folder))
    if not os.path.isdir(folder) or kind != "tmpfs":
        raise OSError(errno.ENOTDIR, f"is no tmpfs but {kind or 'missing'}", folder)
    os.makedirs(parent, mode=0o700, exist_ok=True)
    if problem := foreign_folder(parent):
        raise OSError(errno.EPERM, problem, parent)
    os.makedirs(path, mode=0o700, exist_ok=True)


@runtime.asks_machine
def memory_identity(tier: str) -> str:
    """Returns a text that is the same on all ranks that see the same folder in memory, and on no
    other: boot, tmpfs, inode. Raises OSError if it is not there."""
    found = os.stat(tier)
    return f"{boot_id()}/{found.st_dev}/{found.st_ino}"


# ---- what is on disk -----------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskNote:
    """Names the newest checkpoint that the training of a tier is known to have on disk. Retention
    never removes the newest one.

    Attributes:
        key: name of its folder of records; of a checkpoint of mindformers its iteration folder or
            first file.
        run: the run that wrote the note.
        step: the step that was committed then; 0: ``run`` has loaded it.
    """

    key: Annotated[str, Limits(1)]
    run: Run
    step: Count = 0

    @property
    def order(self) -> tuple[int, int]:
        """Returns the sort key of notes."""
        return run_sequence(self.run), self.step

    @classmethod
    def read(cls, storage: Storage, tier: str) -> DiskNote | None:
        """Returns the note in a tier; None if there is none that can be read."""
        return read_document(storage, os.path.join(tier, NOTE), cls)

    def write(self, storage: Storage, tier: str) -> None:
        """Publishes the note. Raises OSError."""
        publish_json(storage, os.path.join(tier, NOTE), asdict(self), self.run)


class DiskNotes:
    """Writes the notes of one run. No error is raised: without a note memory is used as if nothing
    had been removed.

    Args:
        key: of the checkpoint in the checkpoint directory that the training has loaded; empty:
            none.
    """

    def __init__(self, storage: Storage, tier: str, run: str, key: str = ""):
        self.storage = storage
        self.tier = tier
        self.run = run
        self.key = key
        self._has_committed = False

    def committed(self, step: int) -> None:
        """Notes that this rank has committed ``step``. Called in any thread."""
        self._has_committed = True
        with suppress(OSError):
            DiskNote(attempt_name(step, self.run), self.run, step).write(self.storage, self.tier)

    def loaded(self) -> None:
        """Notes what the training has loaded. Not to be called before the saves of earlier runs are
        set aside: the former note may say that they do not count."""
        if self._has_committed:
            return
        with suppress(OSError):
            if self.key:
                DiskNote(self.key, self.run).write(self.storage, self.tier)
            else:
                self.storage.remove(os.path.join(self.tier, NOTE))
