"""One job acquires a folder to save into it.

    claim = occupy(storage, root, owner_of_this_process("saving", world_size))     # rank 0; FolderInUseError if somebody is there

Of jobs that start at the same moment one stays: each publishes its claim and then looks. Whoever sees no claim beside its own has
acquired the folder, and says so with its first beat: of any two the one that published later sees the other. Who sees an earlier
name (number, run) gives way; who sees later names only waits until those have given way, or one of them has acquired the folder.
"""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from mindresume.errors import FolderInUseError
from mindresume.events import Emit, LeaseWatched, StaleLeaseRemoved, ignore
from mindresume.manifest import FOLDER, run_sequence
from mindresume.store.claim import (
    BEAT,
    ENDED,
    PREFIX,
    READER,
    SAVING,
    SUFFIX,
    Claim,
    Owner,
    claim_path,
    claimed,
    claims,
    half_written,
    is_of_a_job,
    lives,
    look,
    names_in_iterations,
    next_run,
    owner_of_this_process,
    past_runs,
)
from mindresume.store.stale import remove_stale
from mindresume.store.storage import Storage

PATIENCE = 3                    # beats that an owner elsewhere is watched before it counts as dead
LONGEST = 600.0                 # seconds that anybody is watched; whose beats are too rare for that is not taken for dead


def occupy(storage: Storage, root: str, owner: Owner, beat: float = BEAT, emit: Emit = ignore,
           clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
           traced: bool = False) -> Claim:
    """Claims ``root`` for a job that saves there, as a run later than all before. FolderInUseError if another one lives, or if
    nothing can tell whether it does. ``beat``: seconds between two beats of this job. ``traced``: see ``Claim``.

    Waits only if another claim is there whose owner was not seen dead: ``PATIENCE`` beats of that owner, at most ``LONGEST``."""
    folder = os.path.join(root, FOLDER)
    storage.make_folder(folder)

    def watch(*besides: str) -> list[Owner]:
        return _watch(storage, root, owner, emit, clock, sleep, besides)
    dead = watch()
    names = storage.list(folder)
    run = owner.run or next_run([*names, *names_in_iterations(storage, root)])
    claim = Claim(storage, root, replace(owner, run=run, every=beat), traced)
    try:
        dead = _acquire(claim, dead, watch)
        used = [other for other in past_runs(storage.list(folder)) if run_sequence(other) >= run_sequence(run) and other != run]
        if not used:
            claim.beat()
    except BaseException:                           # an error is not an undo: it may be there
        claim.withdraw()
        raise
    if used:                                        # names were listed late, or another job has come and gone meanwhile
        claim.withdraw()
        if owner.run:
            raise FolderInUseError(_in_use(root, f"run {used[0]}", owner))
        again = next_run([*names, *storage.list(folder), *names_in_iterations(storage, root)])
        return occupy(storage, root, replace(owner, run=again), beat, emit, clock, sleep, traced)
    for other in dead:
        emit(StaleLeaseRemoved(other.run, other.host, other.pid))
    half = half_written(names)
    over = [f"{PREFIX}{other.run}{SUFFIX}" for other in dead]
    over += [f"{ENDED}{run}{SUFFIX}" for run in claimed(names, ENDED)]                  # ours tells the number now
    over += [name for name, run in half if READER < run_sequence(run) < claim.owner.order[0]]
    for name in over:
        with suppress(OSError):                     # it stops no job, and is left to the next
            storage.remove(os.path.join(folder, name))
    # The number of a reader tells nothing.
    remove_stale(storage, [os.path.join(folder, name) for name, run in half if not is_of_a_job(run)], claim_path(root, claim.run))
    return claim


def see_dead(storage: Storage, root: str, emit: Emit = ignore, clock: Callable[[], float] = time.monotonic,
             sleep: Callable[[float], None] = time.sleep) -> None:
    """Waits as ``occupy`` does, and claims nothing. FolderInUseError if a job that saves into ``root`` lives, or may live. One
    that failed in this process, and has left its claim, is none."""
    me = owner_of_this_process(SAVING)
    own = [owner.run for owner in claims(storage, root)
           if (owner.machine, owner.pid, owner.started) == (me.machine, me.pid, me.started)]
    _watch(storage, root, me, emit, clock, sleep, own)


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
        rivals = sorted((run_sequence(run), run) for run in others if is_of_a_job(run) and run not in known)
        if rivals and (failed is not None or rivals[0] < claim.owner.order):
            raise FolderInUseError(_in_use(claim.root, others[rivals[0][1]], claim.owner)) from failed
        if failed is not None:
            raise failed
        if not rivals:
            return dead
        dead = dead + watch(*known)


def _in_use(root: str, other: str, me: Owner) -> str:
    return f"{root} is in use: {other} is saving there. {_refused(me)}: wait for the other to end, or set another output_dir"


def _not_known(root: str, path: str, why: str, me: Owner) -> str:
    return (f"{root} may be in use: {why}, so whether that job still saves there cannot be told. {_refused(me)}. If the other "
            f"has ended for certain, remove {path} and start again; or set another output_dir")


def _refused(me: Owner) -> str:
    return f"This job (host {me.host}, process {me.pid}, {me.world_size} rank(s)) does not start, or their checkpoints would mix"


def _is_told_by_beats(owner: Owner) -> bool:
    return 0 < owner.every * PATIENCE <= LONGEST


def _watch(storage: Storage, root: str, me: Owner, emit: Emit, clock: Callable[[], float], sleep: Callable[[float], None],
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
        unreadable = {run: why for run, why in unreadable.items() if is_of_a_job(run) and run not in besides}
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
            run, host = (alive[0].run, alive[0].host) if alive else (next(iter(unreadable)), None)
            emit(LeaseWatched(claim_path(root, run), run, host, left))
            said = True
        sleep(min(1.0, max(0.01, left)))
    for owner in alive:
        path = claim_path(root, owner.run)
        if states[owner.run]:
            raise FolderInUseError(_in_use(root, str(owner), me))
        if not _is_told_by_beats(owner):
            rare = f"only every {owner.every:g} s" if owner.every else "none"
            raise FolderInUseError(_not_known(root, path, f"{owner} did not say that it ended, and of its signs of life "
                                              f"(mindresume.heartbeat) there are {rare}", me))
    for run, why in unreadable.items():
        path = claim_path(root, run)
        raise FolderInUseError(_not_known(root, path, f"{path}, by which run {run} says that it saves there, cannot be read "
                                          f"({why})", me))
    return owners
