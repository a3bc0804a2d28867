"""Mutation test of the simulation: it finds each known protocol error, put back into the product one at a time.

    pytest -s tests/simulation/test_teeth.py                            # each from a seed that finds it soon, with a table
    python tests/simulation/test_teeth.py [PART OF A NAME [SECONDS]]    # each from seed 0: the table of docs/reliability.md

A mutant is the product with some text of it replaced. It counts as found only if the product as it is passes with the same seeds.
"""
from __future__ import annotations
import __future__

import inspect
import random
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from mindresume import formats
from mindresume.coordination import lease, lease_acquisition, preemption, read_locks
from mindresume.fault_injection.faults import Fault
from mindresume.formats import iteration_scan, records, scrub_result
from mindresume.model import manifest
from mindresume.resume import bucket_source, job_selection, memory_source, repair, scrub, sources
from mindresume.saving import (
    background_writer,
    checkpoint_manager,
    committer,
    crash_loop,
    garbage_collector,
    iteration_publisher,
    protection,
    remote_checkpoints,
    save_session,
    shard_writer,
    staging,
    uploader,
)
from mindresume.saving.memory_tier import directory, opening, slots
from mindresume.storage import atomic_publish
from mindresume.supervisor import event_recorder, node_states, rendezvous, restart_policy, supervisor
from sim.oracle import INCONSISTENT, LEFTOVER, LOST, MISREPORTED, STUCK, WRONG
from sim.schedule import OWN_SIGNAL, UNREADABLE_DISK, UNREADABLE_FILE, Schedule, random_schedule
from sim.search import SCENARIOS, SHARE, Counts, Failure, KnownStates, count_operations, replay, run

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Edit:
    """Replaces ``old`` by ``new`` in the source of ``name``, a function of ``owner`` (a module or a class)."""
    owner: Any
    name: str
    old: str
    new: str


def mutate(patch: Patch, edits: Sequence[Edit]) -> None:
    for owner, name in dict.fromkeys((edit.owner, edit.name) for edit in edits):
        function = vars(owner)[name]
        source = textwrap.dedent(inspect.getsource(function))
        for edit in edits:
            if (edit.owner, edit.name) == (owner, name):
                assert source.count(edit.old) == 1, f"{name} is not as this mutant wants it: {edit.old!r}"
                source = source.replace(edit.old, edit.new)
        code = compile(source, f"<mutant of {name}>", "exec", __future__.annotations.compiler_flag)
        made: dict[str, Any] = {}
        exec(code, function.__globals__, made)
        if isinstance(owner, type):
            patch.setattr(owner, name, made[name])
            continue
        for module in [module for module_name, module in sys.modules.items() if module_name.startswith(("mindresume.", "sim."))]:
            for key, value in list(vars(module).items()):
                if value is function:                           # whoever has imported it
                    patch.setattr(module, key, made[name])


@dataclass(frozen=True)
class Draws:
    """Maps a seed to a schedule. ``schedule(seed, operations, kinds)``: the run has ``operations`` operations; ``kinds`` of
    faults are allowed."""
    about: str
    schedule: Callable[[int, int, Sequence[str]], Schedule]


AT_RANDOM = Draws("at random", lambda seed, operations, kinds: random_schedule(random.Random(seed), operations, kinds))
SWITCHES = Draws("switches at random", lambda seed, operations, _: _switches(random.Random(seed), operations))
ONE_SWITCH = Draws("one switch", lambda seed, operations, _: Schedule(switches=((1 + seed % operations, 1),)))


def _switches(rng: random.Random, operations: int) -> Schedule:
    moments = sorted(rng.sample(range(1, operations + 1), rng.randrange(8, 30)))
    return Schedule(switches=tuple((at, rng.randrange(1, 4)) for at in moments))


def each(kind: str, amount: int = 0, then: int = 0, later: tuple[int, str] | None = None, **more: Any) -> Draws:
    """Returns schedules with one fault, at the operation with the number of the seed. ``then``: another task runs right after it.
    ``later``: (operations, kind) of a second fault. ``more``: fields of the schedule."""
    def schedule(seed: int, operations: int, _: Sequence[str]) -> Schedule:
        at = 1 + seed % operations
        faults = (Fault(at, kind, amount), *([Fault(at + later[0], later[1])] if later else []))
        return Schedule(faults=faults, switches=((at + 1, then),) if then else (), **more)
    return Draws(f"one {kind}{f', then {later[1]}' if later else ''}", schedule)


def undisturbed(lag: float = 0.0) -> Draws:
    """Returns schedules without faults. A scenario may depend on the seed."""
    return Draws(f"listings lag by {lag:.0f} s" if lag else "nothing strikes", lambda seed, *_: Schedule(seed, lag=lag))


@dataclass(frozen=True)
class Mutant:
    """``kinds``: the expected kinds of finding in ``scenario``. ``first``: the first seed of the test, which finds it ``within``
    that many. ``deaths``: as in ``search.run``. ``draws``: the schedule of a seed."""
    name: str
    edits: tuple[Edit, ...]
    scenario: str
    format: str
    way: str
    kinds: tuple[str, ...]
    first: int = 0
    within: int = 5
    deaths: bool = True
    draws: Draws = AT_RANDOM


def mutant(name: str, edits: list[Edit], where: tuple[str, str, str], kinds: str, **how: Any) -> Mutant:
    return Mutant(name, tuple(edits), *where, tuple(kinds.split()), **how)


MUTANTS = [
    # ---- defects of earlier versions -----------------------------------------------------------------------------------
    mutant("files are removed after the rename of their record was attempted", [
        Edit(shard_writer, "write_shard", "return _resolve_unconfirmed(target, step, error)",
             "raise target.storage.remove(where) or error")],
        ("prune", "safetensors", ""), f"{LOST} {STUCK}", deaths=False, first=53, within=25,
        draws=each("EIO after", then=3, tick=0.05)),
    mutant("a save that was committed meanwhile is reported as failed", [
        Edit(shard_writer, "_resolve_unconfirmed", "found = _read_own_record(target, step, target.data_dirs(step))",
             "found = None"),
        Edit(shard_writer, "_resolve_unconfirmed", "may not be saved", "was not saved")],
        ("save", "iteration", ""), MISREPORTED, deaths=False, first=40, within=25, draws=each("ESTALE after")),
    mutant("retention removes checkpoints of another training", [
        Edit(committer.Committer, "prune", "self.target.lineage,", "None,")],
        ("afresh", "safetensors", ""), LOST),
    mutant("trash names are not unique, and one failed removal stops the rest", [
        Edit(manifest, "trash_name", ".{runtime.token_hex(4)}", ""), Edit(garbage_collector, "carry_out", "continue", "raise")],
        ("orphan", "iteration", ""), LEFTOVER, deaths=False),
    mutant("a load attempt is counted as soon as the checkpoint is selected", [
        Edit(checkpoint_manager.CheckpointManager, "begin", "run_on_all(self.group",
             "self.count_hosts(); self.begin_load_attempt(); run_on_all(self.group")],
        ("restarts", "safetensors", ""), LOST),
    mutant("selection does not wait for the listings of other ranks", [
        Edit(job_selection.CheckpointSelector, "select", "visibility = wait_until_visible(disk, path, group, shared_groups)",
             "from mindresume.coordination.visibility import Visibility; visibility = Visibility()")],
        ("same hosts", "safetensors", ""), LOST, deaths=False, first=155, within=25,
        draws=each("kill host", lag=60.0)),
    mutant("the heartbeat of another job is expected as often as that of this job", [
        Edit(lease_acquisition._Others, "watch", "holder.every if _has_usable_heartbeat(holder) else BEAT", "BEAT")],
           ("rare beats", "safetensors", ""),
        STUCK, deaths=False, draws=undisturbed()),
    mutant("retention removes the newest healthy checkpoint", [
        Edit(protection, "protected", "for rule in RULES:", "for rule in set(RULES) - {newest_healthy}:")],
        ("health", "safetensors", ""), f"{LOST} {STUCK}", deaths=False, first=1),
    mutant("nodes without shared storage each upload their own newest step", [
        Edit(checkpoint_manager.CheckpointManager, "_start_uploader",
             "only_scheduled=apart and self.settings.preemption_check_interval > 0",
             "only_scheduled=False")],
        ("bucket slow", "safetensors", ""), LOST, deaths=False, draws=undisturbed()),
    mutant("an unreadable manifest in the bucket aborts the start", [
        Edit(bucket_source.BucketSource, "_offer", "except (RecordError, RemoteError) as error:",
             "except RecordError as error:")],
        ("bucket archived", "safetensors", ""), STUCK, deaths=False),
    mutant("an unreadable manifest in the bucket stops retention there", [
        Edit(remote_checkpoints.RemoteCheckpoints, "_known", "except (RecordError, RemoteError) as error:",
             "except RecordError as error:")],
        ("bucket archived", "safetensors", ""), LEFTOVER, deaths=False),
    mutant("rank 0 is superseded at the URL and does not notify the other ranks", [
        Edit(uploader.Uploader, "_end", "if self.target.rank == 0:", "if self.target.rank == 0 and not self._stopped:")],
        ("two pods", "safetensors", ""), MISREPORTED, deaths=False, draws=undisturbed(lag=30.0)),
    mutant("a save attempt without inner folders is ignored", [
        Edit(records, "find_attempts", "attempts_within(directory, making) or [",
             "attempts_within(directory, making) or 0 * [")], ("prune", "iteration", ""), LEFTOVER),
    mutant("a lagging tracker counts as set back while a later save is unpublished", [
        Edit(iteration_scan, "_from_tracker", " and (c.step in intended or parse_iteration(c.iteration_dir) is not None)", "")],
        ("prune", "iteration", ""), LOST, deaths=False, first=135, within=25,
        draws=each("EIO", later=(27, "power"))),
    mutant("released staging memory is mapped again", [
        Edit(staging.Staging, "unpack", "if self.fd < 0:", "if False:")],
        ("save", "safetensors", "thread"), WRONG, deaths=False, within=25, draws=each("slow", 100)),

    mutant("a file that cannot be read counts as one of another save, and its records are removed", [
        Edit(garbage_collector, "_may_be_of_another", "raise OSError(errno.EIO, error.reason, path) from error", "return True")],
        ("twice", "safetensors", ""), LEFTOVER, deaths=False, first=405, within=25,
        draws=each("EIO", later=(9, "EIO"), seed=2)),
    mutant("the lease in a copy of a folder counts as that of the job which still runs in the original", [
        Edit(lease, "read_leases", "is_copy=bool(here and holder.folder) and holder.folder != here", "is_copy=False")],
        ("copy", "safetensors", ""), STUCK, deaths=False, draws=undisturbed()),

    mutant("a process that cannot be looked at counts as dead", [
        Edit(lease_acquisition._Others, "watch", "if states[holder.run] is not False]", "if states[holder.run]]"),
        Edit(lease_acquisition._Others, "watch", "if states[holder.run] is None and watch.see(holder.run, holder.beat).advances:",
             "if False:")],
        ("hidden", "safetensors", ""), f"{LOST} {STUCK} {WRONG} {MISREPORTED}", deaths=False, within=60),

    # ---- committing ----------------------------------------------------------------------------------------------------
    mutant("writers are not fenced", [
        Edit(shard_writer, "write_shard", "fence(target, target.run)", "pass"),
        Edit(committer.Committer, "try_commit", "fence(self.target, self.target.run)", "pass")],
        ("twice", "iteration", ""), LOST, deaths=False, first=140, within=25,
        draws=each("pause", 100, seed=967630889)),
    mutant("the manifest is written before all records exist", [
        Edit(committer.Committer, "try_commit", "if missing:", "if 0 in missing:"),
        Edit(committer.Committer, "_manifest", "read, target.ranks)",
             "read, [r for r in target.ranks if r not in self._missing(step)])"),
        Edit(committer.Committer, "_manifest", "zip(target.ranks, records, strict=True)", "zip(target.ranks, records)")],
        ("prune", "safetensors", ""), f"{LOST} {STUCK} {WRONG}"),
    mutant("files are published without a flush of their folder", [
        Edit(atomic_publish, "publish", "storage.sync(folder)", "pass")], ("save", "ckpt", ""), LOST, first=2),
    mutant("a save is reported before it is written", [
        Edit(background_writer, "serve", "outcome = saver.write(",
             "send((\"outcome\", Outcome(step, True))); outcome = saver.write(")],
        ("save", "safetensors", "thread"), LOST, first=1),
    mutant("a save in doubt is reported as saved", [
        Edit(committer.SyncSaver, "write", "written.durability_error is None", "True")], ("save", "ckpt", ""), LOST,
        first=25, within=10, draws=each("EIO")),
    mutant("earlier runs' complete saves are not adopted", [
        Edit(committer.Committer, "recover", "storage, root, recovered = self.target.storage, self.target.root, []",
             "return []")],
        ("save", "iteration", ""), LEFTOVER),
    mutant("the oldest save is adopted last", [
        Edit(committer.Committer, "recover", "reversed(found)", "found")], ("uncommitted", "iteration", ""), LOST),
    mutant("an existing iteration folder is not moved away", [
        Edit(iteration_publisher, "publish_iteration", "if storage.status(iteration_dir) is not None:", "if False:")],
           ("afresh", "iteration", ""),
        LOST, deaths=False),
    mutant("the tracker update that a dead job intended is not finished", [
        Edit(committer.Committer, "recover",
             "iteration_publisher.finish_tracker(self.target, scan_records(self.target)[0], self.target.run)",
             "pass")], ("save", "iteration", ""), LEFTOVER),
    mutant("the intent is removed before the tracker is changed", [
        Edit(iteration_publisher, "publish_iteration", "set_tracker(target, step, target.run)",
             "storage.remove(intent); set_tracker(target, step, target.run)")], ("save", "iteration", ""), LOST, first=2),

    # ---- removing ------------------------------------------------------------------------------------------------------
    mutant("retention runs before the pointers change and does not protect their target", [
        Edit(protection, "protected", "for rule in RULES:", "for rule in set(RULES) - {named_by_meta}:"),
        Edit(committer.Committer, "_point", "self._update_pointers(self.target, step, manifest.files[0][0].path)",
             "self.prune(); self._update_pointers(self.target, step, manifest.files[0][0].path)")],
        ("prune", "safetensors", ""), LOST),
    mutant("retention policies count uncommitted saves", [
        Edit(garbage_collector, "plan", "committed = [c for c in counted if c.committed]", "committed = list(counted)")],
        ("restarts", "safetensors", ""), LOST, deaths=False, first=205, within=25, draws=each("EIO")),
    mutant("read locks are not checked after the rename", [
        Edit(garbage_collector, "_uncommit", "who = read_locks().get(candidate.name)", "who = None")],
        ("a reader", "safetensors", ""), WRONG, deaths=False, first=80, within=100, draws=SWITCHES),
    mutant("weights are removed before the rename un-commits them", [
        Edit(garbage_collector, "_uncommit", "rename(candidate.commit_dir, os.path.join(records, name))",
             "rename(_clear_weights(directory, candidate.records_dir, ()) or candidate.commit_dir, "
             "os.path.join(records, name))")],
        ("a reader", "safetensors", ""), WRONG, deaths=False, first=60, within=50, draws=SWITCHES),
    mutant("a reader checks the checkpoint before it takes the read lock", [
        Edit(read_locks, "acquire_read_lock", "lease = _lease_without_number(",
             "early = directory.storage.status(commit_dir) is not None; lease = _lease_without_number("),
        Edit(read_locks, "acquire_read_lock", "there = directory.storage.status(commit_dir) is not None", "there = early")],
        ("a reader", "safetensors", ""), WRONG, deaths=False, first=129, within=25, draws=ONE_SWITCH),
    mutant("a running job counts as ended", [
        Edit(lease, "ended", "return run not in living[0]", "return True")], ("readers", "safetensors", ""),
        LOST, deaths=False, first=410, within=30, draws=each("pause", 20)),
    mutant("the newest step common to all nodes is not protected", [
        Edit(protection, "protected", "for rule in RULES:", "for rule in set(RULES) - {common_to_all_nodes}:")],
        ("nodes", "safetensors", ""), f"{LOST} {STUCK}", first=1),

    mutant("a save whose folder cannot be listed now counts as one that never completed", [
        Edit(formats, "unlisted_candidate", "listing_error=reason", "maybe_completed=False"),
        Edit(protection, "protected", "for rule in RULES:", "for rule in set(RULES) - {not_looked_into}:")],
        ("unreadable", "safetensors", ""), LOST, deaths=False, first=365, within=25,
        draws=each(UNREADABLE_DISK, 2)),

    # ---- common starts and ends ----------------------------------------------------------------------------------------
    mutant("an unreadable lease is ignored", [
        Edit(lease, "read_leases", "return str(error) or type(error).__name__", 'return ""')],
        ("twice", "safetensors", ""), STUCK, deaths=False, first=200, within=200,
        draws=each("EIO", later=(11, "EIO"), seed=2)),
    mutant("a load attempt record stays while the training continues from another checkpoint", [
        Edit(crash_loop.LoadAttempt, "_clear_others", "if self.limit else ()", "if False else ()")],
        ("damaged", "safetensors", ""), LEFTOVER, deaths=False),
    mutant("a run number is reused", [
        Edit(lease, "next_run", "max(map(run_sequence, used), default=0) + 1", "max(map(run_sequence, used), default=1)")],
        ("restarts", "safetensors", ""), f"{STUCK} {LEFTOVER} {LOST} {WRONG}"),
    mutant("ranks do not agree on a file suffix", [
        Edit(save_session, "open_save_session", "[row[1] for row in rows if row] + suffixes)",
             "[row[1] for row in rows if row] + [suffixes[group.rank]])")], ("restarts", "safetensors", ""), f"{LEFTOVER} {LOST}",
        first=4),
    mutant("only the verification by rank 0 decides", [
        Edit(sources, "refusals_of", "for row in rows if", "for row in rows[:1] if")],
        ("job", "safetensors", ""), WRONG, deaths=False, first=59, within=25, draws=each("ESTALE")),
    mutant("a preempted rank exits without the others", [
        Edit(preemption.PreemptionHandler, "check", "if self.group.size == 1", "if True")],
        ("job", "safetensors", ""), STUCK, deaths=False, first=125, within=25, draws=each("term")),
    mutant("the last step is saved again by one rank alone", [
        Edit(checkpoint_manager.CheckpointManager, "is_last_missing", "return not all(is_saved for is_saved, _ in rows)",
             "return step not in self.policy.saved")],
        ("job", "safetensors", ""), STUCK, deaths=False, first=226, within=25, draws=each("EIO")),

    mutant("SIGTERM of a rank's own counts as a request of others", [
        Edit(preemption.PreemptionHandler, "local_request", "if sender != OWN:", "if True:"),
        Edit(preemption.PreemptionHandler, "local_request", "BY_SIGNAL if sender == OTHER else BY_UNKNOWN", "BY_SIGNAL"),
        Edit(preemption.PreemptionHandler, "_end_by_own_signal", "self._is_decided = True", "return")],
        ("own signal", "safetensors", ""), STUCK, deaths=False, first=135, within=25, draws=each(OWN_SIGNAL)),
    mutant("nobody learns of SIGTERM of its own before the next step, which never comes", [
        Edit(preemption.PreemptionHandler, "__init__", "SignalSenders(self._end_by_own_signal)", "SignalSenders(lambda: None)")],
        ("own signal", "safetensors", ""), STUCK, deaths=False, first=135, within=25, draws=each(OWN_SIGNAL, 1)),
    mutant("who was asked to stop is started again", [
        Edit(restart_policy, "decide", "if last.is_preempted:", "if False:"),
        Edit(restart_policy, "decide", "end.status in _FINAL and", "False and")],
        ("own signal", "safetensors", ""), WRONG, deaths=False, first=125, within=25, draws=each("term")),

    # ---- supervisors ---------------------------------------------------------------------------------------------------
    mutant("a node starts in a generation that counts on its dead supervisor", [
        Edit(rendezvous.Rendezvous, "_admits", "state.members.get(self.node) == self.states.mine.session",
             "self.node in state.members"),
        Edit(rendezvous.Rendezvous, "_check", "if state.session != session:", "if False:")],
        ("supervisors", "safetensors", ""), f"{STUCK} {WRONG}", deaths=False, first=150, within=10, draws=each("kill")),
    mutant("a node that is not heard of is not missed", [
        Edit(rendezvous.Rendezvous, "_check", "if not self._is_fresh(seen) and state.state != FINISHED:", "if False:")],
        ("fewer nodes", "safetensors", ""), STUCK, deaths=False, first=105, within=10, draws=each("kill host")),
    mutant("the leader does not say that the job is over", [
        Edit(supervisor.Supervisor, "supervise", "self.nodes.leave(decision.status, decision.reason)", "return decision")],
        ("supervisors", "safetensors", ""), f"{STUCK} {WRONG}", deaths=False, within=40, draws=undisturbed()),
    mutant("another node's end is noticed only while its last state says so", [
        Edit(rendezvous.Rendezvous, "_check",
             "if state.state == READY and state.generation >= self.generation or state.generation > self.generation:",
             "if False:"),
        Edit(rendezvous.Rendezvous, "_check", "if state.state in (FAILED, READY) and", "if state.state == FAILED and")],
        ("supervisors", "safetensors", ""), f"{STUCK} {WRONG}", deaths=False, within=40, draws=undisturbed(30.0)),
    mutant("a node that is ready does not say why its part has ended", [
        Edit(rendezvous.Rendezvous, "agree", "self.states.set(state=READY, members={})",
             "self.states.set(state=READY, members={}, status=0, reason='', kind='')")],
        ("supervisors", "safetensors", ""), f"{STUCK} {WRONG}", deaths=False, within=60, draws=undisturbed(30.0)),
    mutant("a node is ready before its processes have ended", [
        Edit(supervisor.Supervisor, "_one_start", "outcome, left = job.end(end, self)",
             "self.nodes.states.set(state='ready'); outcome, left = job.end(end, self)")],
        ("supervisors", "safetensors", ""), WRONG, deaths=False, within=40, draws=undisturbed()),

    mutant("the supervisor waits for its disk", [
        Edit(node_states.BackgroundStates, "_ask", "_MOMENT)", "None)")],
        ("hanging disk", "safetensors", ""), f"{STUCK} {WRONG}", deaths=False, first=120, within=40, draws=each("slow", 1000)),
    mutant("the supervisor prints what it says by itself", [
        Edit(event_recorder.BackgroundHandler, "handle", "self._waiting.append((event, time_s))",
             "self._handler.handle(event, time_s)")],
        ("hanging disk", "safetensors", ""), STUCK, deaths=False, draws=undisturbed()),

    # ---- the tier in memory ----------------------------------------------------------------------------------------------
    mutant("memory: the newest save is overwritten", [
        Edit(slots, "step_to_overwrite", "held[-1] if is_whole(common) else common", "held[0]")],
        ("tier", "safetensors", ""), LOST, deaths=False, first=395, within=10, draws=each("kill")),
    mutant("memory: a save that all ranks have is not found", [
        Edit(memory_source.MemorySource, "_common", "if not missing:", "if missing:")],
        ("tier", "safetensors", ""), f"{LOST} {STUCK}", deaths=False, first=395, within=10, draws=each("kill")),
    mutant("memory: a newer checkpoint on disk is missed", [
        Edit(memory_source.MemorySource, "newest", 'least = tuple(elsewhere.get("order") or (0, 0))', "least = (0, 0)")],
        ("tier", "safetensors", ""), LOST, deaths=False, first=258, within=10, draws=each("kill")),
    mutant("memory: the bytes of a save are not verified", [
        Edit(memory_source.MemorySource, "_first_verified", "verify_on_all_ranks(job,",
             "verify_on_all_ranks(replace(job, policy=replace(job.policy, verify='quick')),")],
        ("rot in memory", "safetensors", ""), WRONG, deaths=False, first=264, within=12, draws=each("kill")),

    mutant("memory: a tier belongs to every directory that has its token", [
        Edit(directory, "find_tier", "not identity or (owner.token, owner.identity) != (mark.token, identity) or (", "(")],
        ("copy with a tier", "safetensors", ""), WRONG, deaths=False, within=1, draws=undisturbed()),
    mutant("memory: a copy keeps the token of the original", [
        Edit(opening, "open_tier", "any(found[rank] for rank in session.shared_groups.ranks(group.rank))", "True")],
        ("copy with a tier", "safetensors", ""), WRONG, deaths=False, first=2115, within=6, draws=each("kill")),

    # ---- scrubs and repairs ----------------------------------------------------------------------------------------------
    mutant("repair: the damaged file is written in place", [
        Edit(repair, "_replace", "temporary = temporary_name(path, tag)", "temporary = path"),
        Edit(repair, "_replace", "storage.write(temporary, hashed(), file.size or 0)",
             'storage.write(temporary, [b"".join(hashed())], file.size or 0)'),
        Edit(repair, "_replace", "directory.storage.remove(temporary)", "pass")],
        ("rot and scrub", "safetensors", ""), f"{LOST} {STUCK}", first=0, within=2),
    mutant("repair: the copy is not verified", [
        Edit(repair, "_intact_in", "if tensor_checksum(opened, entry) == row.checksum:", "if True:"),
        Edit(repair, "_replace", "if (whole.hexdigest(), size) != (file.checksum, file.size) or not is_as_recorded("
             "directory.storage, temporary, file):", "if False:")],
        ("rot and scrub", "safetensors", ""), f"{LOST} {STUCK} {WRONG}", deaths=False, first=11, within=4),
    mutant("repair: the file has its name before it is flushed", [
        Edit(repair, "_replace", "_put(directory.storage, temporary, path)", "made.finish()"),
        Edit(repair, "_replace", "storage.write(temporary, hashed(), file.size or 0)",
             'made = directory.storage.create(temporary, file.size or 0); made.write_at(0, memoryview(b"".join(hashed()))); '
             "storage.rename(temporary, path)"),
        Edit(repair, "_replace", "not is_as_recorded(directory.storage, temporary, file)", "False")],
        ("rot and scrub", "ckpt", ""), f"{LOST} {INCONSISTENT} {STUCK}", first=0, within=2),
    mutant("scrub: a result is not bound to the times of the file", [
        Edit(scrub_result.DamagedFile, "is_unchanged",
             "(status.size, status.mtime, status.changed) == (self.size, self.mtime, self.changed)",
             "status.size == self.size")],
        ("rot and scrub", "safetensors", ""), f"{LOST} {STUCK} {WRONG}", first=19, within=2),
    mutant("scrub: an error of reading is recorded as damage", [
        Edit(scrub.Scrubber, "_read", "found = [row for row in left if not row.is_unreadable]", "found = left")],
        ("unreadable", "safetensors", ""), f"{LOST} {WRONG}", deaths=False, first=225, within=25,
        draws=each(UNREADABLE_FILE, 1000)),
    mutant("scrub: only the files of one rank are read", [
        Edit(scrub.Scrubber, "_read", "seen = [row for rank in candidate.files for row",
             "seen = [row for rank in list(candidate.files)[:1] for row")],
        ("rot and scrub", "iteration", ""), WRONG, deaths=False, within=10),
]


# ---- hunting -------------------------------------------------------------------------------------------------------

@contextmanager
def mutated(one: Mutant) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, one.edits)
        yield


def run_search(one: Mutant, seeds: range, changed: bool = True, share: int = 1) -> tuple[int | None, Failure | None, Counts]:
    """Returns the first of ``seeds`` that finds something; what; and the counts until then. ``changed`` False: of the product
    as it is. ``share``: as for ``search.run``."""
    scenario, counts, known = SCENARIOS[one.scenario], Counts(), KnownStates()
    size = count_operations(scenario, one.format, one.way)  # and the past, by the product as it is
    with mutated(one) if changed else pytest.MonkeyPatch.context():
        for seed in seeds:
            schedule = one.draws.schedule(seed, size, scenario.kinds)
            failure = run(scenario, one.format, one.way, schedule, known, counts, one.deaths, share)
            if failure is not None:
                return seed, failure, counts
    return None, None, counts


def row_of(one: Mutant, failure: Failure, counts: Counts, spent: float) -> str:
    where = ", ".join(filter(None, (one.scenario, one.format, one.way)))
    return f"| {one.name} | {failure.findings[0].kind} | {where} | {one.draws.about} | {counts.schedules:,} | {spent:.1f} s |"


STRIDE = 5                      # seeds that share what is known to be well
HEAD = "| mutant | found by | in | schedules drawn | needed | CPU |\n|---|---|---|---|---|---|"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    rows: list[str] = []
    yield rows
    print("\n" + "\n".join([HEAD, *rows]))


@pytest.mark.parametrize("one", MUTANTS, ids=lambda one: one.name)
def test_a_mutant_is_found(one, table, soak):
    began = time.process_time()
    seed, failure, counts = run_search(one, range(one.first, one.first + one.within))
    assert failure is not None, "the mutant survives"
    assert failure.findings[0].kind in one.kinds, failure.findings
    table.append(row_of(one, failure, counts, time.process_time() - began))
    # ... and it was the mutant: the product as it is passes with the schedule that failed, and after all deaths of that seed
    assert not replay(failure)
    assert run_search(one, range(seed, seed + 1), changed=False, share=1 if soak else 4 * SHARE)[1] is None


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
            print(f"| {one.name} | SURVIVES | | {one.draws.about} | {counts.schedules:,} | {spent:.1f} s |", flush=True)
            continue
        wrong = [] if failure.findings[0].kind in one.kinds else [f"found as {failure.findings[0]}"]
        control = run_search(one, range(first, found + 1), changed=False)[1]
        wrong += [f"without the mutant: {control.to_json()}"] if control else []
        print(f"{row_of(one, failure, counts, spent)} seed {found} {' '.join(wrong)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(float, sys.argv[2:3]))
