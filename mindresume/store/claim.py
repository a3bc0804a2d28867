"""Who uses a folder of checkpoints: one job that saves into it, and readers of checkpoints that must not go meanwhile.

    claim = Claim(storage, root, owner)         # acquire.py: of a job that saves; holds.py: of who reads, and of who removes
    claim.publish();  claim.start();  claim.leave()
    fence(storage, root, run)                   # every rank before it writes: FolderInUseError if a later run took over

A claim is a small sealed file ``.mindresume/claim-{run}.json`` that says who and where, and counts up while its owner lives.
Whether an owner lives is never guessed from age: on the same machine its process is looked up; of one elsewhere the count is
watched for some of its own beats. What cannot be known (a claim that cannot be read, an owner elsewhere that does not beat) is
taken for alive, and a person decides. A job that was taken for dead and wakes up again finds the claim of its successor and stops
saving.
"""
from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from mindresume.errors import FolderInUseError, RecordError
from mindresume.formats.iteration_files import parse_iteration
from mindresume.manifest import FOLDER, attempts, run_name, run_sequence, untrashed
from mindresume.record_codec import field_errors, seal, unseal
from mindresume.state import is_count, is_number
from mindresume.store.storage import TEMPORARY, Storage, publish

BEAT = 15.0                     # seconds between two beats
SAVING, LOADING, REMOVING = "saving", "loading", "removing"
READER = 0                     # number in the run of a reader, and of who removes: never later than any job
_LATEST = 4e11                  # seconds: the year 14645; later ones cannot be printed
PREFIX, SUFFIX = "claim-", ".json"
ENDED = "ended-"               # prefix of the claim of a run that is over and left no other trace of its number


@dataclass(frozen=True)
class Owner:
    """A process, and what for. ``machine``: one boot of one kernel and one namespace of processes; a ``pid`` means something
    there only. ``started``: of the process, in the kernel's own ticks, so that a number used again is not taken for it.
    ``holds``: names of attempt folders. ``since``: seconds since 1970, for people. ``step``: that the training had reached at
    this beat, 0: not known. ``every``: seconds between two beats, 0: there are none."""
    purpose: str
    run: str
    host: str
    machine: str
    pid: int
    started: int
    since: float
    world_size: int = 1
    holds: tuple[str, ...] = ()
    beat: int = 0
    step: int = 0
    every: float = BEAT

    @property
    def order(self) -> tuple[int, str]:
        return (run_sequence(self.run), self.run)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"run {self.run} on host {self.host} (process {self.pid}, {self.world_size} rank(s), since {since})"

    def encode(self) -> bytes:
        return seal({"version": 1, "kind": "claim", **asdict(self)})

    @classmethod
    def read(cls, storage: Storage, path: str) -> Owner:
        """RecordError if it is torn, altered, of another kind or of a later version; FileNotFoundError if it is gone, OSError if
        it cannot be read."""
        with storage.open(path) as file:
            head, _ = unseal(file, "claim")
        with field_errors("claim"):
            run_sequence(head["run"])
            texts = [head[name] for name in ("purpose", "run", "host", "machine")]
            counts = [*(head[name] for name in ("pid", "started", "world_size", "beat")), head.get("step", 0)]
            names, since, every = tuple(head["holds"]), head["since"], head.get("every", BEAT)
            if not all(isinstance(text, str) and len(text) < 4096 for text in (*texts, *names)):
                raise RecordError("claim: purpose, run, host, machine and holds are texts")
            if not all(map(is_count, counts)) or not is_number(since) or not 0 <= since < _LATEST:
                raise RecordError("claim: pid, started, world_size, beat and step are counts, since is a time")
            if not is_number(every) or every < 0:
                raise RecordError("claim: every is a number of seconds")
            pid, started, world_size, beat, step = counts
            return cls(*texts, pid, started, float(since), world_size, names, beat, step, float(every))


def owner_of_this_process(purpose: str, world_size: int = 1, holds: Iterable[str] = ()) -> Owner:
    """``run`` is still empty: ``occupy`` finds the next."""
    return Owner(purpose, "", socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or 0, time.time(),
                 world_size, tuple(holds))


def _machine() -> str:
    """Empty where it cannot be told; then no other process is taken for one of the same machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Start of a process in ticks since boot; None if there is none, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def lives(owner: Owner) -> bool | None:
    """None: it ran on another machine, so only its beats can tell."""
    if not owner.machine or owner.machine != _machine():
        return None
    return _started(owner.pid) == owner.started


# ---- the folder ----------------------------------------------------------------------------------------------------

def claim_path(root: str, run: str) -> str:
    return os.path.join(root, FOLDER, f"{PREFIX}{run}{SUFFIX}")


def claimed(names: Iterable[str], prefix: str = PREFIX) -> list[str]:
    """Runs of the claims among ``names``."""
    found = []
    for name in names:
        if name.startswith(prefix) and name.endswith(SUFFIX):
            run = name[len(prefix):-len(SUFFIX)]
            with suppress(RecordError):
                run_sequence(run)
                found.append(run)
    return found


def half_written(names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, run) of the small files among ``names`` that a run has begun to write."""
    found = []
    for name in names:
        run = name.removesuffix(TEMPORARY).rpartition(".")[2]
        with suppress(RecordError):
            if name.endswith(TEMPORARY):
                run_sequence(run)
                found.append((name, run))
    return found


def claims(storage: Storage, root: str, names: list[str] | None = None) -> list[Owner]:
    """Every claim that can be read, for people."""
    return look(storage, root, names)[0]


def look(storage: Storage, root: str, names: list[str] | None = None) -> tuple[list[Owner], dict[str, str]]:
    """Every claim that can be read, and {run: why not} of the others. Those are there all the same: another host has just
    replaced the file (ESTALE), a later version wrote it, or it is damaged. So who decides by claims takes them for alive."""
    found, unreadable = [], {}
    for run in claimed(storage.list(os.path.join(root, FOLDER)) if names is None else names):
        try:
            found.append(Owner.read(storage, claim_path(root, run)))
        except FileNotFoundError:               # its owner has just ended
            continue
        except (RecordError, OSError) as error:
            unreadable[run] = str(error)
    return found, unreadable


def is_of_a_job(run: str) -> bool:
    """Whether a claim is of a job that saves, by its name alone."""
    return run_sequence(run) != READER


def users_of(storage: Storage, root: str) -> list[Owner]:
    """``claims``, for people: none where the folder of records cannot be listed."""
    try:
        return claims(storage, root)
    except OSError:
        return []


def next_run(names: Iterable[str]) -> str:
    """The name of a run later than every one that left a trace among ``names`` of folders of records."""
    names = list(names)
    used = past_runs(names) + claimed(names)
    used += [run for _, run in half_written(names)]        # it died while it claimed the folder; only a later run removes that
    return run_name(max(map(run_sequence, used), default=0) + 1, secrets.token_hex(4))


def past_runs(names: list[str]) -> list[str]:
    """Runs of which folders of records are among ``names``, and those that have left their number alone."""
    return [run for _, _, run in attempts(list(map(untrashed, names)))] + claimed(names, ENDED)


def names_in_iterations(storage: Storage, root: str) -> list[str]:
    """Names of the folders of records in iteration folders, also in those that were copied from elsewhere."""
    found: list[str] = []
    for base in storage.list(root):
        if parse_iteration(base) is not None:
            with suppress(OSError):             # one that cannot be listed forbids no job, and nothing can be removed there
                found += storage.list(os.path.join(root, base, FOLDER))
    return found


def leave_trace(storage: Storage, root: str, run: str) -> None:
    """``run`` saved elsewhere: the next one in ``root`` takes a larger number all the same."""
    storage.make_folder(os.path.join(root, FOLDER))
    publish(storage, os.path.join(root, FOLDER, f"{ENDED}{run}{SUFFIX}"), [b""], run)


def fence(storage: Storage, root: str, run: str) -> None:
    """FolderInUseError if a later run has acquired this folder or saved into it: then this one was taken for dead. One that has
    published its claim and not said yet that it stays gives way."""
    names, mine = storage.list(os.path.join(root, FOLDER)), (run_sequence(run), run)
    later = [other for other in claimed(names, ENDED) + [other for _, _, other in attempts(names)]
             if (run_sequence(other), other) > mine]
    if any((run_sequence(other), other) > mine for other in claimed(names)):
        found, unreadable = look(storage, root, names)
        later += [other for other in (*unreadable, *(owner.run for owner in found if owner.beat))
                  if (run_sequence(other), other) > mine]
    if later:
        newest = max(later, key=lambda other: (run_sequence(other), other))
        who = next((str(owner) for owner in claims(storage, root, names) if owner.run == newest), f"run {newest}")
        me = next((str(owner) for owner in claims(storage, root, names) if owner.run == run), f"run {run}")
        raise FolderInUseError(f"{who} has taken over {root}; this job, {me}, stops saving there. Checkpoints of two jobs are "
                               f"never mixed: end one of them, or give it an output_dir of its own")


def ended(storage: Storage, root: str) -> Callable[[str], bool]:
    """Returns what tells whether a run is over for certain: it left no claim, or its process is seen to be gone. Claims are read
    once, when it is first asked: who makes a plan asks after it has read the folder."""
    living: list[set[str]] = []

    def over(run: str) -> bool:
        if not living:
            found, unreadable = look(storage, root)
            saving = {owner.run for owner in found if owner.purpose == SAVING and lives(owner) is not False}
            living.append(saving | set(unreadable))
        return run not in living[0]
    return over


class Claim:
    """A published claim. ``start`` begins to count up in a thread of its own; a beat that fails is tried again at the next.
    ``traced``: when it is left its name stays, because nothing else in the folder of records tells the number of the run: a
    commit moves iteration folders away from there."""

    def __init__(self, storage: Storage, root: str, owner: Owner, traced: bool = False):
        self.storage, self.root, self.owner, self.traced = storage, root, owner, traced
        self.step = 0                           # that the training has reached; the next beat tells
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def run(self) -> str:
        return self.owner.run

    def publish(self) -> None:
        publish(self.storage, claim_path(self.root, self.run), [self.owner.encode()], self.run)

    def beat(self) -> None:
        """Counts up once; the first time says that the folder is acquired. OSError if it cannot be written."""
        with self._lock:
            if not self._stop.is_set():
                self.owner = replace(self.owner, beat=self.owner.beat + 1, step=self.step)
                self.publish()

    def start(self) -> Claim:
        def work() -> None:
            while not self._stop.wait(self.owner.every):
                with suppress(OSError):
                    self.beat()
        if self.owner.every:
            threading.Thread(target=work, name="mindresume-claim", daemon=True).start()
        return self

    def leave(self) -> None:
        """Removes the claim. Does nothing the second time, and nothing in a child of the process that made it. A beat that hangs
        in the file system does not hang the end of the job: the claim stays then, and the next job finds its owner dead."""
        self._end(self.traced)

    def withdraw(self) -> None:
        """Removes the claim of a job that has not acquired the folder: it leaves no trace, which would tell others that a later
        run was there."""
        self._end(False)

    def _end(self, traced: bool) -> None:
        if self._stop.is_set() or os.getpid() != self._process:
            return
        self._stop.set()
        if self._lock.acquire(timeout=BEAT):
            try:
                path = claim_path(self.root, self.run)
                if traced:
                    self.storage.rename(path, os.path.join(os.path.dirname(path), f"{ENDED}{self.run}{SUFFIX}"))
                else:
                    self.storage.remove(path)
            except OSError:                 # as above
                return
            finally:
                self._lock.release()
