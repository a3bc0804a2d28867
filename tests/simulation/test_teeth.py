"""Mutation test of the simulation: it finds each known protocol error, put back into the product
one at a time.

    pytest -s tests/simulation/test_teeth.py  # each from a seed that finds it soon, with a table
    # each from seed 0: the table of docs/reliability.md
    PYTHONPATH=.:tests python tests/simulation/test_teeth.py [PART OF A NAME [SECONDS]]

A mutant is the product with another decision: ``Instead`` replaces a named function, method or
value of it, so that a redesign of what is around it keeps the mutant; ``Edit`` replaces text, where
the decision has no name. It counts as found only if the product as it is passes with the same
seeds. A redesign also moves operations, so the seeds around the known one are tried too.
"""

import __future__

import inspect
import os
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from simulation import wrong

from mindresume import formats
from mindresume import storage as storage_room
from mindresume.coordination import (
    lease,
    lease_acquisition,
    preemption,
    storage_topology,
)
from mindresume.fault_injection.faults import Fault
from mindresume.formats import iterations, records, weight_files
from mindresume.maintenance import repair, scrub
from mindresume.model import manifest
from mindresume.resume import bucket_source, memory_source, progress, sources
from mindresume.saving import (
    async_saver,
    checkpoint_manager,
    committer,
    crash_loop,
    garbage_collector,
    iteration_publisher,
    remote_checkpoints,
    retention,
    save_session,
    shard_writer,
    staging,
)
from mindresume.saving.memory_tier import directory, opening, partner, tier
from mindresume.supervisor import evidence, rendezvous, restart_policy, supervisor
from sim.oracle import INCONSISTENT, LEFTOVER, LOST, MISREPORTED, STUCK, WRONG
from sim.schedule import (
    GARBLED,
    OWN_SIGNAL,
    UNREADABLE_DISK,
    UNREADABLE_FILE,
    Schedule,
    random_schedule,
)
from sim.search import SCENARIOS, Counts, Failure, KnownStates, count_operations, replay, run

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Edit:
    """Replaces ``old`` by ``new`` in the source of ``name``, a function of ``owner`` (a module or a
    class)."""

    owner: Any
    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Instead:
    """Replaces ``name`` of ``owner`` (a module or a class), wherever it was imported, by
    ``wrong(right)``."""

    owner: Any
    name: str
    wrong: Callable[[Any], Any]


def nothing(right: Any) -> Any:
    """A decision that does nothing."""
    return lambda *_, **__: None


def _put_in_place(self: repair.Repair, file: Any, pieces: Any) -> bool:
    storage, path = self.directory.storage, self.directory.path(file.path)
    storage.write(path, iter([b"".join(pieces)]), file.size)
    return repair.is_as_recorded(storage, path, file)


def _put_unflushed(self: repair.Repair, file: Any, pieces: Any) -> bool:
    storage, path = self.directory.storage, self.directory.path(file.path)
    temporary = storage_room.temporary_name(path, self.tag)
    storage.make_folder(os.path.dirname(path))
    made = storage.create(temporary, file.size)
    made.write_at(0, memoryview(b"".join(pieces)))
    storage.rename(temporary, path)
    made.finish()
    return True


def without(rule: str) -> Instead:
    """Retention without one of its rules."""
    assert rule in [known.__name__ for known in retention.RULES]
    return Instead(
        retention,
        "RULES",
        lambda rules: tuple(known for known in rules if known.__name__ != rule),
    )


def put(patch: Patch, owner: Any, name: str, wrong: Any) -> None:
    right = vars(owner)[name]
    patch.setattr(owner, name, wrong)
    modules = [
        module
        for module_name, module in sys.modules.items()
        if module_name.startswith(("mindresume.", "sim."))
    ]
    for module in modules if callable(right) and not isinstance(owner, type) else ():
        for key, value in list(vars(module).items()):
            if value is right:  # whoever has imported it
                patch.setattr(module, key, wrong)


def mutate(patch: Patch, edits: Sequence[Edit | Instead]) -> None:
    for edit in [edit for edit in edits if isinstance(edit, Instead)]:
        put(patch, edit.owner, edit.name, edit.wrong(vars(edit.owner)[edit.name]))
    edits = [edit for edit in edits if isinstance(edit, Edit)]
    for owner, name in dict.fromkeys((edit.owner, edit.name) for edit in edits):
        function = vars(owner)[name]
        source = textwrap.dedent(inspect.getsource(function))
        for edit in edits:
            if (edit.owner, edit.name) == (owner, name):
                assert source.count(edit.old) == 1, (
                    f"{name} is not as this mutant wants it: {edit.old!r}"
                )
                source = source.replace(edit.old, edit.new)
        code = compile(source, f"<mutant of {name}>", "exec", __future__.annotations.compiler_flag)
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        put(patch, owner, name, made[name])


@dataclass(frozen=True)
class Draws:
    """Maps a seed to a schedule. ``schedule(seed, operations, kinds)``: the run has ``operations``
    operations; ``kinds`` of faults are allowed."""

    about: str
    schedule: Callable[[int, int, Sequence[str]], Schedule]


AT_RANDOM = Draws(
    "at random",
    lambda seed, operations, kinds: random_schedule(random.Random(seed), operations, kinds),
)
SWITCHES = Draws(
    "switches at random", lambda seed, operations, _: _switches(random.Random(seed), operations)
)
ONE_SWITCH = Draws(
    "one switch", lambda seed, operations, _: Schedule(switches=((1 + seed % operations, 1),))
)


def _switches(rng: random.Random, operations: int) -> Schedule:
    moments = sorted(rng.sample(range(1, operations + 1), rng.randrange(8, 30)))
    return Schedule(switches=tuple((at, rng.randrange(1, 4)) for at in moments))


def each(
    kind: str, amount: int = 0, then: int = 0, later: tuple[int, str] | None = None, **more: Any
) -> Draws:
    """Returns schedules with one fault, at the operation with the number of the seed. ``then``:
    another task runs right after it. ``later``: (operations, kind) of a second fault. ``more``:
    fields of the schedule."""

    def schedule(seed: int, operations: int, _: Sequence[str]) -> Schedule:
        at = 1 + seed % operations
        faults = (Fault(at, kind, amount), *([Fault(at + later[0], later[1])] if later else []))
        return Schedule(faults=faults, switches=((at + 1, then),) if then else (), **more)

    return Draws(f"one {kind}{f', then {later[1]}' if later else ''}", schedule)


def undisturbed(lag: float = 0.0) -> Draws:
    """Returns schedules without faults. A scenario may depend on the seed."""
    return Draws(
        f"listings lag by {lag:.0f} s" if lag else "nothing strikes",
        lambda seed, *_: Schedule(seed, lag=lag),
    )


@dataclass(frozen=True)
class Mutant:
    """``kinds``: the expected kinds of finding in ``scenario``. ``first``: the first seed of the
    test, which found it ``within`` that many; then those around are tried. ``deaths``: as in
    ``search.run``. ``draws``: the schedule of a seed."""

    name: str
    edits: tuple[Edit | Instead, ...]
    scenario: str
    format: str
    way: str
    kinds: tuple[str, ...]
    first: int = 0
    within: int = 5
    deaths: bool = True
    draws: Draws = AT_RANDOM


def mutant(
    name: str, edits: list[Edit | Instead], where: tuple[str, str, str], kinds: str, **how: Any
) -> Mutant:
    return Mutant(name, tuple(edits), *where, tuple(kinds.split()), **how)


MUTANTS = [
    # ---- defects of earlier versions -------------------------------------------------------------
    mutant(
        "files are removed after the rename of their record was attempted",
        [
            Edit(
                shard_writer,
                "write_shard",
                "except UnknownOutcomeError as error:\n"
                "                return _resolve_unconfirmed(target, step, error)",
                "except UnknownOutcomeError as error:\n"
                "                raise target.storage.remove(where) or error",
            )
        ],
        ("prune", "safetensors", ""),
        f"{LOST} {STUCK}",
        deaths=False,
        first=62,
        within=25,
        draws=each("EIO after", then=3, tick=0.05),
    ),
    mutant(
        "a save that was committed meanwhile is reported as failed",
        [
            Edit(
                shard_writer,
                "_resolve_unconfirmed",
                "found = _read_own_record(target, step, target.data_dirs(step))",
                "found = None",
            ),
            Edit(shard_writer, "_resolve_unconfirmed", "may not be saved", "was not saved"),
        ],
        ("save", "iteration", ""),
        MISREPORTED,
        deaths=False,
        first=49,
        within=25,
        draws=each("ESTALE after"),
    ),
    mutant(
        "retention removes checkpoints of another training",
        [Instead(committer, "plan", wrong.with_argument("lineage", None))],
        ("afresh", "safetensors", ""),
        LOST,
    ),
    mutant(
        "trash names are not unique, and one failed removal stops the rest",
        [
            Instead(
                manifest, "trash_name", lambda right: lambda attempt: f"{manifest.TRASH}{attempt}"
            ),
            Instead(garbage_collector, "_postponed", lambda right: wrong.raised),
        ],
        ("orphan", "iteration", ""),
        LEFTOVER,
        deaths=False,
    ),
    mutant(
        "a load attempt is counted as soon as the checkpoint is selected",
        [Instead(checkpoint_manager.CheckpointManager, "begin", wrong.attempt_at_once)],
        ("restarts", "safetensors", ""),
        LOST,
    ),
    mutant(
        "selection does not wait for the listings of other ranks",
        [
            Instead(
                storage_topology,
                "wait_until_visible",
                lambda right: lambda *_: storage_topology.Visibility(),
            )
        ],
        ("same hosts", "safetensors", ""),
        LOST,
        deaths=False,
        first=155,
        within=25,
        draws=each("kill host", lag=60.0),
    ),
    mutant(
        "the heartbeat of another job is expected as often as that of this job",
        [
            Edit(
                lease_acquisition._Others,
                "watch",
                "holder.every if _has_usable_heartbeat(holder) else BEAT",
                "BEAT",
            )
        ],
        ("rare beats", "safetensors", ""),
        STUCK,
        deaths=False,
        draws=undisturbed(),
    ),
    mutant(
        "retention removes the newest healthy checkpoint",
        [without("newest_healthy")],
        ("health", "safetensors", ""),
        f"{LOST} {STUCK}",
        deaths=False,
        first=1,
    ),
    mutant(
        "nodes without shared storage each upload their own newest step",
        [Instead(checkpoint_manager, "Uploads", wrong.with_argument("only_scheduled", False))],
        ("bucket slow", "safetensors", ""),
        LOST,
        deaths=False,
        draws=undisturbed(),
    ),
    mutant(
        "an unreadable manifest in the bucket aborts the start",
        [
            Edit(
                bucket_source.BucketSource,
                "_offer",
                "except (RecordError, RemoteError) as error:",
                "except RecordError as error:",
            )
        ],
        ("bucket archived", "safetensors", ""),
        STUCK,
        deaths=False,
    ),
    mutant(
        "an unreadable manifest in the bucket stops retention there",
        [
            Edit(
                remote_checkpoints.RemoteCheckpoints,
                "_known",
                "except (RecordError, RemoteError) as error:",
                "except RecordError as error:",
            )
        ],
        ("bucket archived", "safetensors", ""),
        LEFTOVER,
        first=1,
        deaths=False,
    ),
    mutant(
        "rank 0 is superseded at the URL and does not notify the other ranks",
        [
            Instead(
                remote_checkpoints.RemoteCheckpoints,
                "publish_status",
                lambda right: (
                    lambda self, run, status: None if status.reason else right(self, run, status)
                ),
            )
        ],
        ("two pods", "safetensors", ""),
        MISREPORTED,
        deaths=False,
        draws=undisturbed(lag=30.0),
    ),
    mutant(
        "a save attempt without inner folders is ignored",
        [
            Edit(
                records,
                "find_attempts",
                "attempts_within(directory, making) or [",
                "attempts_within(directory, making) or 0 * [",
            )
        ],
        ("prune", "iteration", ""),
        LEFTOVER,
    ),
    mutant(
        "a lagging tracker counts as set back while a later save is unpublished",
        [Instead(iterations, "_is_announced", lambda right: lambda *_: True)],
        ("prune", "iteration", ""),
        LOST,
        deaths=False,
        first=144,
        within=25,
        draws=each("EIO", later=(27, "power")),
    ),
    mutant(
        "released staging memory is mapped again",
        [Edit(staging.Staging, "unpack", "if self.fd < 0:", "if False:")],
        ("save", "safetensors", "thread"),
        WRONG,
        deaths=False,
        within=25,
        draws=each("slow", 100),
    ),
    mutant(
        "a file that cannot be read counts as one of another save, and its records are removed",
        [Instead(garbage_collector, "_may_be_of_another", wrong.unreadable_is_of_another)],
        ("twice", "safetensors", ""),
        LEFTOVER,
        deaths=False,
        first=374,
        within=25,
        draws=each("EIO", later=(9, "EIO"), seed=2),
    ),
    mutant(
        "the lease in a copy of a folder counts as that of the job which still runs in the "
        "original",
        [Instead(lease, "_identity", lambda right: lambda *_: "")],
        ("copy", "safetensors", ""),
        STUCK,
        deaths=False,
        draws=undisturbed(),
    ),
    mutant(
        "a process that cannot be looked at counts as dead",
        [
            Edit(
                lease_acquisition._Others,
                "watch",
                "if states[holder.run] is not False]",
                "if states[holder.run]]",
            ),
            Edit(
                lease_acquisition._Others,
                "watch",
                "if states[holder.run] is None and watch.see(holder.run, holder.beat).advances:",
                "if False:",
            ),
        ],
        ("hidden", "safetensors", ""),
        f"{LOST} {STUCK} {WRONG} {MISREPORTED}",
        deaths=False,
        first=6,
        within=60,
    ),
    # ---- committing ------------------------------------------------------------------------------
    mutant(
        "writers are not fenced",
        [Instead(lease, "fence", nothing)],
        ("twice", "iteration", ""),
        LOST,
        deaths=False,
        first=140,
        within=25,
        draws=each("pause", 100, seed=967630889),
    ),
    mutant(
        "the manifest is written before all records exist",
        [
            Edit(committer.Committer, "poll", "if missing:", "if 0 in missing:"),
            Edit(
                committer,
                "publish_manifest",
                "step), target.ranks)",
                "step), [r for r in target.ranks if r not in missing_ranks(target, step)])",
            ),
            Edit(
                committer,
                "publish_manifest",
                "zip(target.ranks, records, strict=True)",
                "zip(target.ranks, records)",
            ),
        ],
        ("prune", "safetensors", ""),
        f"{LOST} {STUCK} {WRONG}",
        deaths=False,
        first=1,
    ),
    mutant(
        "files are published without a flush of their folder",
        [
            Instead(
                storage_room,
                "publish",
                lambda right: (
                    lambda storage, *more, **how: right(wrong.NoSync(storage), *more, **how)
                ),
            )
        ],
        ("save", "ckpt", ""),
        LOST,
        first=2,
    ),
    mutant(
        "a save is reported before it is written",
        [
            Edit(
                async_saver,
                "serve",
                "outcome = saver.write(",
                'training.send(("outcome", Outcome(step, True))); outcome = saver.write(',
            )
        ],
        ("save", "safetensors", "thread"),
        LOST,
        first=1,
    ),
    mutant(
        "a save in doubt is reported as saved",
        [Edit(committer.SyncSaver, "write", "written.durability_error is None", "True")],
        ("save", "ckpt", ""),
        LOST,
        first=30,
        within=10,
        draws=each("EIO"),
    ),
    mutant(
        "earlier runs' complete saves are not adopted",
        [Instead(committer.Committer, "recover", lambda right: lambda self: [])],
        ("save", "iteration", ""),
        LEFTOVER,
    ),
    mutant(
        "the oldest save is adopted last",
        [Edit(committer.Committer, "recover", "reversed(found)", "found")],
        ("uncommitted", "iteration", ""),
        LOST,
    ),
    mutant(
        "an existing iteration folder is not moved away",
        [Instead(iteration_publisher, "_free_iteration_name", nothing)],
        ("afresh", "iteration", ""),
        LOST,
        deaths=False,
    ),
    mutant(
        "the tracker update that a dead job intended is not finished",
        [Instead(iteration_publisher, "finish_tracker", nothing)],
        ("save", "iteration", ""),
        LEFTOVER,
    ),
    mutant(
        "the intent is removed before the tracker is changed",
        [Instead(iteration_publisher, "set_tracker", wrong.intent_removed_first)],
        ("save", "iteration", ""),
        LOST,
        first=2,
    ),
    # ---- removing --------------------------------------------------------------------------------
    mutant(
        "retention runs before the pointers change and does not protect their target",
        [
            without("named_by_meta"),
            Instead(
                committer.Committer,
                "_update_pointers",
                lambda right: lambda self, *more: (self.prune(), right(self, *more))[1],
            ),
        ],
        ("prune", "safetensors", ""),
        LOST,
    ),
    mutant(
        "retention policies count uncommitted saves",
        [
            Edit(
                retention,
                "plan",
                "committed = [c for c in counted if c.committed]",
                "committed = list(counted)",
            )
        ],
        ("restarts", "safetensors", ""),
        LOST,
        deaths=False,
        first=205,
        within=25,
        draws=each("EIO"),
    ),
    mutant(
        "read locks are not checked after the rename",
        [Instead(garbage_collector, "_uncommit", wrong.with_argument("read_locks", lambda: {}))],
        ("a reader", "safetensors", ""),
        WRONG,
        deaths=False,
        first=134,
        within=100,
        draws=SWITCHES,
    ),
    mutant(
        "weights are removed before the rename un-commits them",
        [Instead(garbage_collector, "_uncommit", wrong.weights_removed_first)],
        ("a reader", "safetensors", ""),
        WRONG,
        deaths=False,
        first=60,
        within=50,
        draws=SWITCHES,
    ),
    mutant(
        "a reader checks the checkpoint before it takes the read lock",
        [
            Edit(
                lease,
                "acquire_read_lock",
                "lease = _lease_without_number(",
                "early = directory.storage.status(commit_dir) is not None; lease = "
                "_lease_without_number(",
            ),
            Edit(
                lease,
                "acquire_read_lock",
                "there = directory.storage.status(commit_dir) is not None",
                "there = early",
            ),
        ],
        ("a reader", "safetensors", ""),
        WRONG,
        deaths=False,
        first=143,
        within=25,
        draws=ONE_SWITCH,
    ),
    mutant(
        "a running job counts as ended",
        [
            Instead(
                lease_acquisition.EndedRuns, "__contains__", lambda right: lambda self, run: True
            )
        ],
        ("readers", "safetensors", ""),
        LOST,
        deaths=False,
        first=404,
        within=30,
        draws=each("pause", 20),
    ),
    mutant(
        "the newest step common to all nodes is not protected",
        [without("common_to_all_nodes")],
        ("nodes", "safetensors", ""),
        f"{LOST} {STUCK}",
        first=1,
    ),
    mutant(
        "a save whose folder cannot be listed now counts as one that never completed",
        [
            without("not_looked_into"),
            Instead(
                formats,
                "unlisted_candidate",
                lambda right: (
                    lambda *args, **how: replace(
                        right(*args, **how), listing_error="", maybe_completed=False
                    )
                ),
            ),
        ],
        ("unreadable", "safetensors", ""),
        LOST,
        deaths=False,
        first=359,
        within=25,
        draws=each(UNREADABLE_DISK, 2),
    ),
    # ---- common starts and ends ------------------------------------------------------------------
    mutant(
        "an unreadable lease is ignored",
        [Instead(lease, "read_leases", lambda right: lambda *args: (right(*args)[0], {}))],
        ("twice", "safetensors", ""),
        STUCK,
        deaths=False,
        first=265,
        within=200,
        draws=each("EIO", later=(11, "EIO"), seed=2),
    ),
    mutant(
        "a load attempt record stays while the training continues from another checkpoint",
        [Instead(crash_loop.LoadAttempt, "_clear_others", nothing)],
        ("damaged", "safetensors", ""),
        LEFTOVER,
        deaths=False,
    ),
    mutant(
        "a run number is reused",
        [Instead(lease_acquisition, "next_run", wrong.run_number_reused)],
        ("restarts", "safetensors", ""),
        f"{STUCK} {LEFTOVER} {LOST} {WRONG}",
    ),
    mutant(
        "ranks do not agree on a file suffix",
        [Edit(save_session, "open_save_session", "max(suffixes)", "suffixes[group.rank]")],
        ("restarts", "safetensors", ""),
        f"{LEFTOVER} {LOST}",
        first=4,
    ),
    mutant(
        "only the verification by rank 0 decides",
        [Instead(sources, "refusals_of", lambda right: lambda rows: right(rows[:1]))],
        ("job", "safetensors", ""),
        WRONG,
        deaths=False,
        first=52,
        within=25,
        draws=each("ESTALE"),
    ),
    mutant(
        "a preempted rank exits without the others",
        [
            Instead(
                preemption.PreemptionHandler,
                "_exchange",
                lambda right: lambda self, step: self.local_request(),
            )
        ],
        ("job", "safetensors", ""),
        STUCK,
        deaths=False,
        first=125,
        within=25,
        draws=each("term"),
    ),
    mutant(
        "the last step is saved again by one rank alone",
        [
            Instead(
                checkpoint_manager.CheckpointManager,
                "is_last_missing",
                lambda right: (
                    lambda self, step: right(self, step) and step not in self.policy.saved
                ),
            )
        ],
        ("job", "safetensors", ""),
        STUCK,
        deaths=False,
        first=226,
        within=25,
        draws=each("EIO"),
    ),
    mutant(
        "SIGTERM of a rank's own counts as a request of others",
        [Instead(preemption.SignalSenders, "look", lambda right: lambda self: preemption.OTHER)],
        ("own signal", "safetensors", ""),
        STUCK,
        deaths=False,
        first=135,
        within=25,
        draws=each(OWN_SIGNAL),
    ),
    mutant(
        "nobody learns of SIGTERM of its own before the next step, which never comes",
        [Instead(preemption.SignalSenders, "begin", nothing)],
        ("own signal", "safetensors", ""),
        STUCK,
        deaths=False,
        first=130,
        within=25,
        draws=each(OWN_SIGNAL, 1),
    ),
    mutant(
        "who was asked to stop is started again",
        [
            Instead(restart_policy, "_FINAL", lambda right: {}),
            Instead(
                restart_policy,
                "decide",
                lambda right: (
                    lambda policy, starts: right(
                        policy, [replace(start, is_preempted=False) for start in starts]
                    )
                ),
            ),
        ],
        ("own signal", "safetensors", ""),
        WRONG,
        deaths=False,
        first=125,
        within=25,
        draws=each("term"),
    ),
    # ---- supervisors -----------------------------------------------------------------------------
    mutant(
        "a node starts in a generation that counts on its dead supervisor",
        [
            Edit(
                rendezvous.Rendezvous,
                "_admits",
                "state.members.get(self.node) == self.states.mine.session",
                "self.node in state.members",
            ),
            Edit(rendezvous.Rendezvous, "_check", "if state.session != session:", "if False:"),
        ],
        ("supervisors", "safetensors", ""),
        f"{STUCK} {WRONG}",
        deaths=False,
        first=155,
        within=10,
        draws=each("kill"),
    ),
    mutant(
        "a node that is not heard of is not missed",
        [
            Instead(rendezvous.Rendezvous, "_is_silent", lambda right: lambda self, seen: False),
        ],
        ("fewer nodes", "safetensors", ""),
        STUCK,
        deaths=False,
        first=109,
        within=10,
        draws=each("kill host"),
    ),
    mutant(
        "the leader does not say that the job is over",
        [Instead(rendezvous.Rendezvous, "leave", nothing)],
        ("supervisors", "safetensors", ""),
        f"{STUCK} {WRONG}",
        deaths=False,
        within=40,
        draws=undisturbed(),
    ),
    mutant(
        "another node's end is noticed only while its last state says so",
        [
            Instead(rendezvous.Rendezvous, "_has_ended", lambda right: lambda self, state: False),
            Instead(
                rendezvous.Rendezvous,
                "_says_why",
                lambda right: (
                    lambda self, state: state.state != rendezvous.READY and right(self, state)
                ),
            ),
        ],
        ("supervisors", "safetensors", ""),
        f"{STUCK} {WRONG}",
        deaths=False,
        first=5,
        within=40,
        draws=undisturbed(30.0),
    ),
    mutant(
        "a node that is ready does not say why its part has ended",
        [
            Edit(
                rendezvous.Rendezvous,
                "agree",
                "self.states.set(state=READY, members={})",
                "self.states.set(state=READY, members={}, status=0, reason='', kind='')",
            )
        ],
        ("supervisors", "safetensors", ""),
        f"{STUCK} {WRONG}",
        deaths=False,
        first=17,
        within=60,
        draws=undisturbed(30.0),
    ),
    mutant(
        "a node is ready before its processes have ended",
        [
            Edit(
                supervisor.Supervisor,
                "_one_start",
                "outcome, left = job.end(end, self)",
                "self.nodes.states.set(state='ready'); outcome, left = job.end(end, self)",
            )
        ],
        ("supervisors", "safetensors", ""),
        WRONG,
        deaths=False,
        first=7,
        within=40,
        draws=undisturbed(),
    ),
    mutant(
        "the supervisor waits for its disk",
        [Instead(rendezvous, "_MOMENT", lambda right: None)],
        ("hanging disk", "safetensors", ""),
        f"{STUCK} {WRONG}",
        deaths=False,
        first=157,
        within=40,
        draws=each("slow", 1000),
    ),
    mutant(
        "the supervisor prints what it says by itself",
        [
            Instead(
                evidence.BackgroundHandler,
                "handle",
                lambda right: lambda self, event, time_s: self._handler.handle(event, time_s),
            )
        ],
        ("hanging disk", "safetensors", ""),
        STUCK,
        deaths=False,
        draws=undisturbed(),
    ),
    # ---- the tier in memory ----------------------------------------------------------------------
    mutant(
        "memory: the newest save is overwritten",
        [
            Instead(
                tier,
                "step_to_overwrite",
                lambda right: lambda held, count, whole: held[0] if len(held) >= count else None,
            )
        ],
        ("tier", "safetensors", ""),
        LOST,
        deaths=False,
        first=395,
        within=10,
        draws=each("kill"),
    ),
    mutant(
        "memory: a save that all ranks have is not found",
        [Edit(memory_source.MemorySource, "newest", "if not missing:", "if missing:")],
        ("tier", "safetensors", ""),
        f"{LOST} {STUCK}",
        deaths=False,
        first=395,
        within=10,
        draws=each("kill"),
    ),
    mutant(
        "memory: a newer checkpoint on disk is missed",
        [
            Instead(
                memory_source.MemorySource,
                "_elsewhere",
                lambda right: lambda self: {**right(self), "order": None},
            )
        ],
        ("tier", "safetensors", ""),
        LOST,
        deaths=False,
        first=251,
        within=10,
        draws=each("kill"),
    ),
    mutant(
        "memory: the bytes of a save are not verified",
        [
            Instead(
                memory_source,
                "verify_on_all_ranks",
                lambda right: (
                    lambda job, *more: right(
                        replace(job, policy=replace(job.policy, full=False)), *more
                    )
                ),
            )
        ],
        ("rot in memory", "safetensors", ""),
        WRONG,
        deaths=False,
        first=264,
        within=12,
        draws=each("kill"),
    ),
    mutant(
        "memory: a tier belongs to every directory that has its token",
        [
            Instead(
                directory.TierOwner,
                "is_of",
                lambda right: lambda self, _, mark: self.token == mark.token,
            ),
        ],
        ("copy with a tier", "safetensors", ""),
        WRONG,
        deaths=False,
        within=1,
        draws=undisturbed(),
    ),
    mutant(
        "memory: a copy keeps the token of the original",
        [
            Instead(opening._Node, "keeps_mark", lambda right: lambda self, found: True),
        ],
        ("copy with a tier", "safetensors", ""),
        WRONG,
        deaths=False,
        first=2115,
        within=6,
        draws=each("kill"),
    ),
    # ---- partner copies --------------------------------------------------------------------------
    mutant(
        "partner: what has arrived is not compared with its checksums",
        [
            Edit(
                partner,
                "_pieces",
                "checksum is not None and arrived.hexdigest() != checksum",
                "False",
            )
        ],
        ("partners", "safetensors", ""),
        INCONSISTENT,
        deaths=False,
        first=415,
        within=12,
        draws=each(GARBLED, 500, later=(40, "kill")),
    ),
    mutant(
        "partner: each node takes its newest save, whatever the lost one got back",
        [
            Edit(
                memory_source.MemorySource,
                "_first_verified",
                "candidate = self.offers[name]",
                "candidate = max(self.offers.values(), key=lambda row: row.order)",
            )
        ],
        ("partners", "safetensors", ""),
        f"{WRONG} {STUCK} {LOST} {MISREPORTED}",
        deaths=False,
        first=345,
        within=10,
        draws=each("kill host"),
    ),
    mutant(
        "partner: the records of a copy are published before its files",
        [
            Edit(
                partner.Keeper,
                "_keep",
                "self._take_over(offer.note)\n",
                "self._take_over(offer.note)\n"
                "    storage.make_folder(target.attempt(step))\n"
                "    for head, record in zip(heads, records):\n"
                "        path = os.path.join(target.attempt(step), record_name(head.rank))\n"
                "        publish(storage, path, [record], run)\n",
            )
        ],
        ("partners", "safetensors", ""),
        INCONSISTENT,
        deaths=False,
        first=338,
        within=10,
        draws=each("kill"),
    ),
    mutant(
        "partner: the copy before is removed before the next one is whole",
        [Edit(partner.Keeper, "_remove", "but[0] if but else None", "None")],
        ("partners", "safetensors", ""),
        LOST,
        deaths=False,
        first=385,
        within=10,
        draws=each("kill host"),
    ),
    # ---- bad steps -------------------------------------------------------------------------------
    mutant(
        "bad steps: their samples are not skipped",
        [Instead(progress, "skip_windows", lambda right: lambda position, *_: (position, 0, None))],
        ("bad steps", "safetensors", ""),
        STUCK,
        deaths=False,
        draws=undisturbed(),
    ),
    mutant(
        "bad steps: a good batch is skipped with them",
        [Edit(progress, "skip_windows", "math.ceil((end - now) / unit)", "(end - now + 1)")],
        ("bad steps of nodes", "safetensors", ""),
        WRONG,
        deaths=False,
        draws=undisturbed(),
    ),
    mutant(
        "bad steps: a rank that has found one saves on",
        [
            Edit(
                checkpoint_manager.CheckpointManager,
                "submit",
                "if self._is_bad:",
                "if False:",
            )
        ],
        ("bad steps", "safetensors", ""),
        WRONG,
        draws=undisturbed(),
    ),
    mutant(
        "bad steps: the tier in memory collects a second time",
        [
            Edit(
                checkpoint_manager.CheckpointManager,
                "submit",
                "self._collected = save",
                "self._collected = None if self._is_bad else save",
            )
        ],
        ("bad steps and a tier", "safetensors", ""),
        STUCK,
        deaths=False,
        draws=undisturbed(),
    ),
    # ---- scrubs and repairs ----------------------------------------------------------------------
    mutant(
        "repair: the damaged file is written in place",
        [Instead(repair.Repair, "put", lambda right: _put_in_place)],
        ("rot and scrub", "safetensors", ""),
        f"{LOST} {STUCK}",
        deaths=False,
        first=534,
        within=25,
        draws=each("power"),
    ),
    mutant(
        "repair: the copy is not verified",
        [
            Instead(repair, "is_recorded", lambda right: lambda *_: True),
            Instead(repair, "is_as_recorded", lambda right: lambda *_: True),
        ],
        ("rot and scrub", "safetensors", ""),
        f"{LOST} {STUCK} {WRONG}",
        deaths=False,
        first=11,
        within=4,
    ),
    mutant(
        "repair: the file has its name before it is flushed",
        [Instead(repair.Repair, "put", lambda right: _put_unflushed)],
        ("rot and scrub", "ckpt", ""),
        f"{LOST} {INCONSISTENT} {STUCK}",
        deaths=False,
        first=540,
        within=25,
        draws=each("power"),
    ),
    mutant(
        "scrub: a result is not bound to the times of the file",
        [
            Instead(
                weight_files.DamagedFile,
                "is_unchanged",
                lambda right: lambda self, status: status is not None and status.size == self.size,
            )
        ],
        ("rot and scrub", "safetensors", ""),
        f"{LOST} {STUCK} {WRONG}",
        deaths=False,
        first=545,
        within=25,
        draws=each("power"),
    ),
    mutant(
        "scrub: an error of reading is recorded as damage",
        [Instead(scrub, "rotten", lambda right: list)],
        ("unreadable", "safetensors", ""),
        f"{LOST} {WRONG}",
        deaths=False,
        first=225,
        within=25,
        draws=each(UNREADABLE_FILE, 1000),
    ),
    mutant(
        "scrub: only the files of one rank are read",
        [
            Edit(
                scrub.Scrubber,
                "_read",
                "for rank in candidate.files for row in",
                "for rank in [*candidate.files][:1] for row in",
            )
        ],
        ("rot and scrub", "iteration", ""),
        WRONG,
        deaths=False,
        within=10,
    ),
]


# ---- hunting -------------------------------------------------------------------------------------


@contextmanager
def mutated(one: Mutant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, one.edits)
        yield


def seeds_of(one: Mutant) -> list[int]:
    """Returns the seeds of the test, the likeliest first."""
    near = range(one.first, one.first + one.within)
    return [
        *near,
        *sorted(
            set(range(max(one.first - REACH, 0), near.stop + REACH)) - set(near),
            key=lambda seed: abs(seed - one.first),
        ),
    ]


def run_search(
    one: Mutant, seeds: Sequence[int], changed: bool = True
) -> tuple[int | None, Failure | None, Counts]:
    """Returns the first of ``seeds`` that finds something; what; and the counts until then.
    ``changed`` False: of the product as it is."""
    scenario, counts, known = SCENARIOS[one.scenario], Counts(), KnownStates()
    size = count_operations(scenario, one.format, one.way)  # and the past, by the product as it is
    with mutated(one) if changed else pytest.MonkeyPatch.context():
        for seed in seeds:
            schedule = one.draws.schedule(seed, size, scenario.kinds)
            failure = run(scenario, one.format, one.way, schedule, known, counts, one.deaths)
            if failure is not None:
                return seed, failure, counts
    return None, None, counts


def row_of(one: Mutant, failure: Failure, counts: Counts, spent: float) -> str:
    where = ", ".join(filter(None, (one.scenario, one.format, one.way)))
    return (
        f"| {one.name} | {failure.findings[0].kind} | {where} | {one.draws.about} | "
        f"{counts.schedules:,} | {spent:.1f} s |"
    )


REACH = 60  # seeds around the known ones
STRIDE = 5  # seeds that share what is known to be well
HEAD = "| mutant | found by | in | schedules drawn | needed | CPU |\n|---|---|---|---|---|---|"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    print("\n" + "\n".join([HEAD, *rows]))


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_found(one, table, soak):
    began = time.process_time()
    seed, failure, counts = run_search(one, seeds_of(one))
    assert failure is not None, "the mutant survives"
    assert failure.findings[0].kind in one.kinds, failure.findings
    table.append(row_of(one, failure, counts, time.process_time() - began))
    # ... and it was the mutant: the product as it is passes with the schedule that failed
    assert not replay(failure)
    if soak and one.deaths:
        assert run_search(one, range(seed, seed + 1), changed=False)[1] is None


def main(part: str = "", seconds: float = 60.0) -> None:
    """Searches for each mutant from seed 0, for at most ``seconds`` of CPU each."""
    print(HEAD, flush=True)
    for one in [one for one in MUTANTS if part in one.name]:
        began, seed, counts, failure = time.process_time(), 0, Counts(), None
        while failure is None and time.process_time() - began < seconds:
            first, (found, failure, more) = seed, run_search(one, range(seed, seed + STRIDE))
            counts.add(more)
            seed += STRIDE
        spent = time.process_time() - began
        if failure is None:
            print(
                f"| {one.name} | SURVIVES | | {one.draws.about} | {counts.schedules:,} | "
                f"{spent:.1f} s |",
                flush=True,
            )
            continue
        wrong = [] if failure.findings[0].kind in one.kinds else [f"found as {failure.findings[0]}"]
        control = run_search(one, range(first, found + 1), changed=False)[1]
        wrong += [f"without the mutant: {control.to_json()}"] if control else []
        print(f"{row_of(one, failure, counts, spent)} seed {found} {' '.join(wrong)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(float, sys.argv[2:3]))
