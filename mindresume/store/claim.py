"""Who uses a folder of checkpoints: one job that saves into it, and readers of checkpoints that must not go meanwhile.

    claim = occupy(storage, root, owner_of_this_process("saving", world_size))     # rank 0; FolderInUseError if somebody is there
    fence(storage, root, claim.run)              # every rank before it writes: FolderInUseError if a later run took over
    hold = claim_of_reader(storage, root, ...)   # while a checkpoint is read
    claim.leave()

A claim is a small sealed file ``.mindresume/claim-{run}.json`` that says who and where, and counts up while its owner lives.
Whether an owner lives is never guessed from age: on the same machine its process is looked up; of one elsewhere the count is
watched for some of its own beats. What cannot be known (a claim that cannot be read, an owner elsewhere that does not beat) is
taken for alive, and a person decides. A job that was taken for dead and wakes up again finds the claim of its successor and stops
saving.

Of jobs that start at the same moment one stays: each publishes its claim and then looks. Whoever sees no claim beside its own has
acquired the folder, and says so with its first beat: of any two the one that published later sees the other. Who sees an earlier
name (number, run) gives way; who sees later names only waits until those have given way, or one of them has acquired the folder.
"""
from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from mindresume.errors import FolderInUseError, RecordError
from mindresume.formats.iteration_files import parse_iteration
from mindresume.manifest import FOLDER, attempts, field_errors, run_name, run_sequence, seal, unseal, untrashed
from mindresume.state import is_count, is_number
from mindresume.store.stale import remove_stale
from mindresume.store.storage import TEMPORARY, Storage, publish

BEAT = 15.0                     # seconds between two beats
PATIENCE = 3                    # beats that an owner elsewhere is watched before it counts as dead
LONGEST = 600.0                 # seconds that anybody is watched; whose beats are too rare for that is not taken for dead
GIVEN_UP = 40                   # beats after which a reader elsewhere that stands still holds nothing any more
SAVING, LOADING, REMOVING = "saving", "loading", "removing"
_READER = 0                     # number in the run of a reader, and of who removes: never later than any job
_LOOKS, _PAUSE = 20, 0.5        # of a reader while somebody is about to remove what it wants to hold: how often, seconds between
_LATEST = 4e11                  # seconds: the year 14645; later ones cannot be printed
_PREFIX, _SUFFIX = "claim-", ".json"
_ENDED = "ended-"               # prefix of the claim of a run that is over and left no other trace of its number

Text = Callable[[str], None]


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

def _path(root: str, run: str) -> str:
    return os.path.join(root, FOLDER, f"{_PREFIX}{run}{_SUFFIX}")


def _claimed(names: Iterable[str], prefix: str = _PREFIX) -> list[str]:
    """Runs of the claims among ``names``."""
    found = []
    for name in names:
        if name.startswith(prefix) and name.endswith(_SUFFIX):
            run = name[len(prefix):-len(_SUFFIX)]
            with suppress(RecordError):
                run_sequence(run)
                found.append(run)
    return found


def _half_written(names: Iterable[str]) -> list[tuple[str, str]]:
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
    for run in _claimed(storage.list(os.path.join(root, FOLDER)) if names is None else names):
        try:
            found.append(Owner.read(storage, _path(root, run)))
        except FileNotFoundError:               # its owner has just ended
            continue
        except (RecordError, OSError) as error:
            unreadable[run] = str(error)
    return found, unreadable


def _saves(run: str) -> bool:
    """Whether a claim is of a job that saves, by its name alone."""
    return run_sequence(run) != _READER


def users_of(storage: Storage, root: str) -> list[Owner]:
    """``claims``, for people: none where the folder of records cannot be listed."""
    try:
        return claims(storage, root)
    except OSError:
        return []


def next_run(names: Iterable[str]) -> str:
    """The name of a run later than every one that left a trace among ``names`` of folders of records."""
    names = list(names)
    used = _past(names) + _claimed(names)
    used += [run for _, run in _half_written(names)]        # it died while it claimed the folder; only a later run removes that
    return run_name(max(map(run_sequence, used), default=0) + 1, secrets.token_hex(4))


def _past(names: list[str]) -> list[str]:
    """Runs of which folders of records are among ``names``, and those that have left their number alone."""
    return [run for _, _, run in attempts(list(map(untrashed, names)))] + _claimed(names, _ENDED)


def leave_trace(storage: Storage, root: str, run: str) -> None:
    """``run`` saved elsewhere: the next one in ``root`` takes a larger number all the same."""
    storage.make_folder(os.path.join(root, FOLDER))
    publish(storage, os.path.join(root, FOLDER, f"{_ENDED}{run}{_SUFFIX}"), [b""], run)


def fence(storage: Storage, root: str, run: str) -> None:
    """FolderInUseError if a later run has acquired this folder or saved into it: then this one was taken for dead. One that has
    published its claim and not said yet that it stays gives way."""
    names, mine = storage.list(os.path.join(root, FOLDER)), (run_sequence(run), run)
    later = [other for other in _claimed(names, _ENDED) + [other for _, _, other in attempts(names)]
             if (run_sequence(other), other) > mine]
    if any((run_sequence(other), other) > mine for other in _claimed(names)):
        found, unreadable = look(storage, root, names)
        later += [other for other in (*unreadable, *(owner.run for owner in found if owner.beat))
                  if (run_sequence(other), other) > mine]
    if later:
        newest = max(later, key=lambda other: (run_sequence(other), other))
        who = next((str(owner) for owner in claims(storage, root, names) if owner.run == newest), f"run {newest}")
        me = next((str(owner) for owner in claims(storage, root, names) if owner.run == run), f"run {run}")
        raise FolderInUseError(f"{who} has taken over {root}; this job, {me}, stops saving there. Checkpoints of two jobs are "
                               f"never mixed: end one of them, or give it an output_dir of its own")


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
        publish(self.storage, _path(self.root, self.run), [self.owner.encode()], self.run)

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
                path = _path(self.root, self.run)
                if traced:
                    self.storage.rename(path, os.path.join(os.path.dirname(path), f"{_ENDED}{self.run}{_SUFFIX}"))
                else:
                    self.storage.remove(path)
            except OSError:                 # as above
                return
            finally:
                self._lock.release()


def occupy(storage: Storage, root: str, owner: Owner, beat: float = BEAT, log: Text = lambda text: None,
           clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
           traced: bool = False) -> Claim:
    """Claims ``root`` for a job that saves there, as a run later than all before. FolderInUseError if another one lives, or if
    nothing can tell whether it does. ``beat``: seconds between two beats of this job. ``traced``: see ``Claim``.

    Waits only if another claim is there whose owner was not seen dead: ``PATIENCE`` beats of that owner, at most ``LONGEST``."""
    folder = os.path.join(root, FOLDER)
    storage.make_folder(folder)

    def watch(*besides: str) -> list[Owner]:
        return _watch(storage, root, owner, log, clock, sleep, besides)
    dead = watch()
    names = storage.list(folder)
    run = owner.run or next_run([*names, *_in_iterations(storage, root)])
    claim = Claim(storage, root, replace(owner, run=run, every=beat), traced)
    try:
        dead = _acquire(claim, dead, watch)
        used = [other for other in _past(storage.list(folder)) if run_sequence(other) >= run_sequence(run) and other != run]
        if not used:
            claim.beat()
    except BaseException:                           # an error is not an undo: it may be there
        claim.withdraw()
        raise
    if used:                                        # names were listed late, or another job has come and gone meanwhile
        claim.withdraw()
        if owner.run:
            raise FolderInUseError(_in_use(root, f"run {used[0]}", owner))
        return occupy(storage, root, owner, beat, log, clock, sleep, traced)
    for other in dead:
        log(f"{other} ended without a word")
    half = _half_written(names)
    over = [f"{_PREFIX}{other.run}{_SUFFIX}" for other in dead]
    over += [f"{_ENDED}{run}{_SUFFIX}" for run in _claimed(names, _ENDED)]                  # ours tells the number now
    over += [name for name, run in half if _READER < run_sequence(run) < claim.owner.order[0]]
    for name in over:
        with suppress(OSError):                     # it stops no job, and is left to the next
            storage.remove(os.path.join(folder, name))
    # The number of a reader tells nothing.
    remove_stale(storage, [os.path.join(folder, name) for name, run in half if not _saves(run)], _path(root, claim.run))
    return claim


def see_dead(storage: Storage, root: str, log: Text = lambda text: None, clock: Callable[[], float] = time.monotonic,
             sleep: Callable[[float], None] = time.sleep) -> None:
    """Waits as ``occupy`` does, and claims nothing. FolderInUseError if a job that saves into ``root`` lives, or may live."""
    _watch(storage, root, owner_of_this_process(SAVING), log, clock, sleep)


def _acquire(claim: Claim, dead: list[Owner], watch: Callable[..., list[Owner]]) -> list[Owner]:
    """Publishes ``claim``, and looks until no other job that saves has one, besides those of ``dead``. Returns all that were seen
    dead. FolderInUseError if it is for this job to give way."""
    while True:
        failed: OSError | None = None
        try:
            claim.publish()                         # before each look: a listing is new where this host has changed the folder
        except OSError as error:                    # a job that starts at the same moment may have removed it half-written
            failed = error
        known = [claim.run, *(owner.run for owner in dead)]
        found, unreadable = look(claim.storage, claim.root)
        others = {owner.run: str(owner) for owner in found} | {run: f"run {run}" for run in unreadable}
        rivals = sorted((run_sequence(run), run) for run in others if _saves(run) and run not in known)
        if rivals and (failed is not None or rivals[0] < claim.owner.order):
            raise FolderInUseError(_in_use(claim.root, others[rivals[0][1]], claim.owner)) from failed
        if failed is not None:
            raise failed
        if not rivals:
            return dead
        dead = dead + watch(*known)


def _in_iterations(storage: Storage, root: str) -> list[str]:
    """Names of the folders of records in iteration folders, also in those that were copied from elsewhere."""
    found: list[str] = []
    for base in storage.list(root):
        if parse_iteration(base) is not None:
            with suppress(OSError):             # one that cannot be listed forbids no job, and nothing can be removed there
                found += storage.list(os.path.join(root, base, FOLDER))
    return found


def _in_use(root: str, other: str, me: Owner) -> str:
    return f"{root} is in use: {other} is saving there. {_refused(me)}: wait for the other to end, or set another output_dir"


def _not_known(root: str, path: str, why: str, me: Owner) -> str:
    return (f"{root} may be in use: {why}, so whether that job still saves there cannot be told. {_refused(me)}. If the other "
            f"has ended for certain, remove {path} and start again; or set another output_dir")


def _refused(me: Owner) -> str:
    return f"This job (host {me.host}, process {me.pid}, {me.world_size} rank(s)) does not start, or their checkpoints would mix"


def _is_told_by_beats(owner: Owner) -> bool:
    return 0 < owner.every * PATIENCE <= LONGEST


def _watch(storage: Storage, root: str, me: Owner, log: Text, clock: Callable[[], float], sleep: Callable[[float], None],
           besides: Collection[str] = ()) -> list[Owner]:
    """Those that saved into ``root`` and are dead, but for the runs ``besides``. Of an owner elsewhere every beat is a sign of
    life, and silence for ``PATIENCE`` of its own beats is none; a process of this machine may use that time to end, and a claim
    that cannot be read to become readable. FolderInUseError if one lives, or may live."""
    beats: dict[str, int] = {}                      # of each claim when it was first read
    since: dict[tuple[str, bool], float] = {}       # when each was first read (True), or could first not be read (False)
    said = False
    while True:
        now, (found, unreadable) = clock(), look(storage, root)
        owners = [owner for owner in found if owner.purpose == SAVING and owner.run not in besides]
        unreadable = {run: why for run, why in unreadable.items() if _saves(run) and run not in besides}
        states = {owner.run: lives(owner) for owner in owners}
        beating = [owner for owner in owners if states[owner.run] is None and
                   beats.setdefault(owner.run, owner.beat) != owner.beat]
        if beating:
            raise FolderInUseError(_in_use(root, str(beating[0]), me))
        alive = [owner for owner in owners if states[owner.run] is not False]
        waits = {run: PATIENCE * BEAT - (now - since.setdefault((run, False), now)) for run in unreadable}
        waits |= {owner.run: PATIENCE * (owner.every if _is_told_by_beats(owner) else BEAT) -
                  (now - since.setdefault((owner.run, True), now)) for owner in alive}
        left = max(waits.values(), default=0.0)
        if left <= 0:
            break
        if not said:
            who = f"{alive[0]} did not say that it ended" if alive else f"{_path(root, next(iter(unreadable)))} cannot be read"
            log(f"{who}; watching for {left:.0f} s whether it lives")
            said = True
        sleep(min(1.0, max(0.01, left)))
    for owner in alive:
        path = _path(root, owner.run)
        if states[owner.run]:
            raise FolderInUseError(_in_use(root, str(owner), me))
        if not _is_told_by_beats(owner):
            rare = f"only every {owner.every:g} s" if owner.every else "none"
            raise FolderInUseError(_not_known(root, path, f"{owner} did not say that it ended, and of its signs of life "
                                              f"(mindresume.heartbeat) there are {rare}", me))
    for run, why in unreadable.items():
        path = _path(root, run)
        raise FolderInUseError(_not_known(root, path, f"{path}, by which run {run} says that it saves there, cannot be read "
                                          f"({why})", me))
    return owners


# ---- readers -------------------------------------------------------------------------------------------------------

def hold(storage: Storage, root: str, attempt: str, box: str, beat: float = BEAT,
         sleep: Callable[[float], None] = time.sleep) -> Claim | None:
    """Keeps ``attempt`` (the name of its folder of records) from being removed while it is read. ``box``: the folder whose
    renaming would remove it. None if it is gone: choose again.

    OSError if nothing can be written there."""
    claim = _claim_without_number(storage, root, LOADING, (attempt,), beat)
    try:
        for _ in range(_LOOKS):
            if not _is_going(storage, root, attempt):
                break
            sleep(_PAUSE)                 # who removes it may have looked for holds before this one was there
        there = storage.status(box) is not None
    except BaseException:
        claim.leave()
        raise
    if not there:                         # it was faster
        claim.leave()
        return None
    return claim.start()


def about_to_remove(storage: Storage, root: str, names: Iterable[str]) -> Claim:
    """Tells readers that the attempts ``names`` are about to go; to be left when they have. Whoever says this and then looks for
    holds, and readers, who publish their hold and then look for this, never miss each other: nothing moves under a reader, not
    even for a moment. OSError if it cannot be written."""
    return _claim_without_number(storage, root, REMOVING, tuple(names), 0.0)


def _claim_without_number(storage: Storage, root: str, purpose: str, names: tuple[str, ...], beat: float) -> Claim:
    owner = replace(owner_of_this_process(purpose, holds=names), run=run_name(_READER, secrets.token_hex(4)), every=beat)
    claim = Claim(storage, root, owner)
    try:
        claim.publish()
    except BaseException:                 # an error is not an undo: it may be there
        claim.leave()
        raise
    return claim


def _is_going(storage: Storage, root: str, attempt: str) -> bool:
    return any(owner.purpose == REMOVING and attempt in owner.holds and lives(owner) is not False
               for owner in claims(storage, root))


class Holds:
    """What readers hold, for who removes: {name of an attempt folder: who holds it}. Call it each time; it remembers the beats it
    saw, so that a reader elsewhere that died in silence does not hold its checkpoint for ever. A claim that cannot be read may
    hold any of them, for as long."""

    def __init__(self, storage: Storage, root: str, clock: Callable[[], float] = time.monotonic):
        self.storage, self.root, self.clock = storage, root, clock
        self._seen: dict[str, tuple[int | None, float]] = {}

    def __call__(self) -> Mapping[str, str]:
        held: dict[str, str] = {}
        found, unreadable = look(self.storage, self.root)
        for run, why in unreadable.items():
            if not _saves(run) and not self._silent(run, None, BEAT):
                held.update({name: f"perhaps, by a reader: {_path(self.root, run)} cannot be read ({why})"
                             for name in self._all_attempts()})
        for owner in found:
            if owner.holds and self._counts(owner) and owner.purpose != REMOVING:
                held.update({name: f"{owner.purpose} by process {owner.pid} on host {owner.host}" for name in owner.holds})
        return held

    def _counts(self, owner: Owner) -> bool:
        silent, state = self._silent(owner.run, owner.beat, max(owner.every, BEAT)), lives(owner)
        if state is False or (state is None and silent):
            with suppress(OSError):
                self.storage.remove(_path(self.root, owner.run))
            return False
        return True

    def _silent(self, run: str, beat: int | None, every: float) -> bool:
        """Whether it has stood still for long. ``beat``: None while it cannot be read."""
        before, since = self._seen.get(run, (-1, 0.0))
        if before != beat:
            since = self.clock()
            self._seen[run] = beat, since
        return self.clock() - since > every * GIVEN_UP

    def _all_attempts(self) -> set[str]:
        names = [*self.storage.list(os.path.join(self.root, FOLDER)), *_in_iterations(self.storage, self.root)]
        return {name for name, _, _ in attempts(list(map(untrashed, names)))}


def holds(storage: Storage, root: str) -> Mapping[str, str]:
    """What is held now, for a process that looks once."""
    return Holds(storage, root)()


def ended(storage: Storage, root: str) -> Callable[[str], bool]:
    """Whether a run is over for certain: it left no claim, or its process is seen to be gone."""
    found, unreadable = look(storage, root)
    living = {owner.run for owner in found if owner.purpose == SAVING and lives(owner) is not False} | set(unreadable)
    return lambda run: run not in living
