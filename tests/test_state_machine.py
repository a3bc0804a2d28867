"""Saving, dying, resuming, pruning, damaging, rescaling and copying in any order: a model says what
a resume must then do.

The model knows three things of every save: which ranks recorded it (read from the disk right after
the save, which may have been killed at any operation), later changes of its files, and which run
wrote it. These decide which save is selected.
"""

import json
import os
import random
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lease_holders import ManualClock
from rank_folders import RUN, Ranks, by_clock, dir_at, flip_bit, path_of, simulated, write_rank

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import LeaseHolder, read_locks
from mindresume.coordination.lease_acquisition import EndedRuns, acquire
from mindresume.errors import MindResumeError, NoUsableCheckpointError
from mindresume.fault_injection.faults import (
    DEATHS,
    FAULTS,
    Fault,
    FaultInjector,
    Killed,
    Scheduler,
)
from mindresume.formats import CheckpointDir
from mindresume.formats.rank_folders import META, FileName, folder_name, free_suffix, parse_name
from mindresume.formats.records import find_attempts, scan_records
from mindresume.model.manifest import FOLDER, MANIFEST, attempt_name, record_name
from mindresume.model.training_state import TrainingState
from mindresume.resume.eligible import Choice, SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import Committer, SyncSaver
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.retention import KEEP_ALL, KeepEverySteps, KeepLast, Policy, plan
from mindresume.saving.shard_writer import Save, SaveTarget, Shard, clean_own_folder, rank_shard
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header, read_tensor

STORAGE = PosixStorage()
PER_EPOCH = 10
GOOD, ALTERED, CUT, GONE = "good", "altered", "cut", "gone"
POLICIES: list[Policy] = [KEEP_ALL, KeepLast(1), KeepLast(2), KeepEverySteps(6)]
KINDS = sorted({*FAULTS} - {"late"})  # no clock of the model could say what is visible yet


def tensors(sequence: int, step: int, rank: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng([sequence, step, rank])
    return {
        "weight": numbers.standard_normal((4, 3)).astype(np.float32),
        "moment": numbers.standard_normal(5).astype(np.float32),
        "step_num": np.array(step, np.int64),
    }


@dataclass
class Entry:
    """One save. ``sequence``: number of the run that wrote it, over all folders. ``attempt``: None
    once a copy left the records behind. ``weights``, ``records``: the state of each rank's file."""

    sequence: int
    run: str
    step: int
    world: int
    suffix: int
    format: str
    attempt: str | None
    complete: bool
    weights: dict[int, str] = field(default_factory=dict)
    records: dict[int, str] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        return (self.sequence, self.step)

    def path(self, root: str, rank: int) -> str:
        state = TrainingState(self.step, PER_EPOCH, self.step, 8)
        name = FileName("net", rank, self.suffix, state.epoch, state.step_in_epoch, self.format)
        return os.path.join(root, folder_name(rank), str(name))


@dataclass
class Run:
    """The job that is training."""

    sequence: int
    run: str
    world: int
    suffix: int
    step: int
    format: str


class Training(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.base = tempfile.mkdtemp(
            prefix="mindresume-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        )
        self.root = os.path.join(self.base, "checkpoint-0")
        self.entries: list[Entry] = []
        self.run: Run | None = None
        self.world, self.run_count, self.copies, self.ticks = 2, 0, 0, 0
        self.time = ManualClock()

    def teardown(self):
        shutil.rmtree(self.base)

    # ---- the model -------------------------------------------------------------------------------

    def there(self, entry: Entry) -> bool:
        """Returns whether it still counts: retention un-commits by renaming the folder of the
        records."""
        return entry.attempt is None or os.path.isdir(
            os.path.join(self.root, FOLDER, entry.attempt)
        )

    def usable(self, entry: Entry, world: int) -> bool:
        """Returns whether a job of ``world`` ranks can use it."""
        ranks = range(world)
        if entry.attempt is None:  # how many ranks it had, only the files tell that are there
            there = sorted(rank for rank, state in entry.weights.items() if state != GONE)
            return there == list(ranks) and all(entry.weights[rank] == GOOD for rank in ranks)
        return entry.world == world and (
            entry.complete
            and all(entry.weights[rank] == GOOD for rank in ranks)
            and all(entry.records[rank] == GOOD for rank in ranks)
        )

    def maybe_completed(self, entry: Entry) -> bool:
        """Returns whether it may have completed. A missing record proves that it did not, as if it
        had never been written; but not if a manifest existed, or if the number of ranks is
        unknown."""
        if entry.attempt is None:
            return any(state != GONE for state in entry.weights.values())
        there = os.listdir(os.path.join(self.root, FOLDER, entry.attempt))
        if not entry.complete:
            return False
        return (
            MANIFEST in there
            or all(record_name(rank) in there for rank in range(entry.world))
            or (ALTERED in entry.records.values() and GOOD not in entry.records.values())
        )

    def unreadable(self) -> bool:
        """Returns whether there is a file that neither a record nor its own header describes: it
        may be anything, so it counts."""
        return any(
            state != GOOD and entry.records.get(rank) != GOOD
            for entry in self.entries
            for rank, state in entry.weights.items()
        )

    def sized(self, entry: Entry) -> bool:
        """Returns whether it is complete for retention, which does not read the files: committed,
        no file missing, of the recorded sizes."""
        return (
            entry.attempt is not None
            and self.there(entry)
            and entry.complete
            and self.committed(entry)
            and all(state in (GOOD, ALTERED) for state in entry.weights.values())
            and GONE not in entry.records.values()
        )

    def committed(self, entry: Entry) -> bool:
        found, _, _ = scan_records(
            dir_at(self.root), find_attempts(dir_at(self.root), [entry.attempt])
        )
        return found[0].committed

    def living(self) -> list[Entry]:
        return [entry for entry in self.entries if self.there(entry)]

    def expected(self, world: int) -> Entry | None:
        return max(
            (e for e in self.living() if self.usable(e, world)), key=lambda e: e.order, default=None
        )

    # ---- choosing --------------------------------------------------------------------------------

    def select(self, world: int, all_ranks: bool = False) -> Choice | NoUsableCheckpointError:
        """Checked against the model, tensor by tensor."""
        if all_ranks:
            results = Ranks(world).run(lambda group: self._choose(group, world))
            assert (
                len(
                    {
                        (type(r), getattr(r, "chosen", None) and (r.chosen.run, r.chosen.step))
                        for r in results
                    }
                )
                == 1
            ), results
            for result in results[1:]:
                self.check(result, world)
            return self.check(results[0], world)
        return self.check(self._choose(SingleProcess(), world), world)

    def _choose(self, group, world: int) -> Choice | NoUsableCheckpointError:
        try:
            return select_checkpoint(
                STORAGE,
                self.root,
                group,
                SelectionPolicy(world, every_rank=group.size == 1),
            )
        except NoUsableCheckpointError as error:
            return error

    def check(
        self, result: Choice | NoUsableCheckpointError, world: int
    ) -> Choice | NoUsableCheckpointError:
        expected, maybe_completed = (
            self.expected(world),
            [entry for entry in self.living() if self.maybe_completed(entry)],
        )
        if expected is None:
            if isinstance(result, NoUsableCheckpointError):
                assert maybe_completed or self.unreadable(), (
                    f"refused to start where nothing was complete: {result}"
                )
                for entry in maybe_completed:
                    if entry.attempt is None and entry.weights.get(0, GONE) == GONE:
                        # where something is committed, only rank 0 is searched for such files
                        continue
                    assert f"step {entry.step}" in str(result) or "step ?" in str(result), (
                        entry,
                        str(result),
                    )
                    if entry.attempt and self.usable(entry, entry.world):
                        assert f"saved by {entry.world} ranks, this job has {world}" in str(result)
            else:
                assert isinstance(result, Choice), result
                assert result.chosen is None and result.is_fresh_start, (
                    f"took what cannot be used: {result.chosen}"
                )
                assert not maybe_completed, f"a fresh start, though there was {maybe_completed}"
            return result
        assert isinstance(result, Choice), f"{expected} is whole, and: {result}"
        assert result.chosen is not None, f"a fresh start, though there is {expected}"
        chosen = result.chosen
        assert (chosen.run, chosen.step) == (
            expected.run if expected.attempt else None,
            expected.step,
        ), (chosen, expected)
        assert sorted(chosen.files) == list(range(world))
        for proof in result.shards:
            found = {}
            for source in proof.sources:
                path = os.path.join(result.root, source.file.path)
                with open(path, "rb") as file:
                    header = read_header(file, path)
                    found.update(
                        {
                            name: read_tensor(file, header.tensors[name])
                            for name in source.names or header.tensors
                        }
                    )
            for name, array in tensors(expected.sequence, expected.step, proof.rank).items():
                assert found[name].tobytes() == array.tobytes(), (
                    f"{name} of {expected} is not what was saved"
                )
        return result

    @invariant()
    def a_resume_takes_the_newest_whole_one(self):
        self.select(self.world)

    # ---- training --------------------------------------------------------------------------------

    @initialize(world=st.sampled_from([2, 3]), fmt=st.sampled_from(["safetensors", "ckpt"]))
    def begin(self, world, fmt):
        self.world = world
        self._start(0, fmt)

    @precondition(lambda self: self.run is None)
    @rule(
        world=st.sampled_from([None, None, None, 2, 3]),
        fmt=st.sampled_from(["safetensors", "ckpt"]),
        all_ranks=st.booleans(),
        afresh=st.booleans(),
    )
    def resume(self, world, fmt, all_ranks, afresh):
        """``world``: the job was rescaled. ``afresh``: the user begins again in the same folder, as
        where nothing can be used."""
        self.world = world or self.world
        result = self.select(self.world, all_ranks)
        chosen = result.chosen if isinstance(result, Choice) else None
        self._start(chosen.step if chosen and not afresh else 0, fmt)

    def _start(self, step: int, fmt: str) -> None:
        """Starts as ``CheckpointMonitor`` does: lease, suffix, clean-up, commit of complete
        saves."""
        holder = LeaseHolder("saving", "", "simulated", "", 1, 1, 0.0, self.world)
        with by_clock(self.time):
            run = acquire(CheckpointDir(STORAGE, self.root), holder, 1.0).run
        known = [
            parse_name(os.path.basename(path))
            for path in scan_records(CheckpointDir(STORAGE, self.root))[1]
        ]
        suffix = max(
            [name.suffix + 1 for name in known if name]
            + [
                free_suffix(STORAGE.list(os.path.join(self.root, folder_name(rank))), "net", rank)
                for rank in range(self.world)
            ]
        )
        for rank in range(self.world):
            clean_own_folder(SaveTarget(STORAGE, self.root, run, rank, self.world))
        SyncSaver(SaveTarget(STORAGE, self.root, run, 0, self.world), KEEP_ALL).begin()
        self.run_count += 1
        self.run = Run(self.run_count, run, self.world, suffix, step, fmt)

    def _next(self, jump: int) -> Entry:
        now = self.run
        now.step += jump
        return Entry(
            now.sequence,
            now.run,
            now.step,
            now.world,
            now.suffix,
            now.format,
            attempt_name(now.step, now.run),
            False,
        )

    def _shard(self, entry: Entry, rank: int) -> Shard:
        state = TrainingState(entry.step, PER_EPOCH, entry.step, 8)
        name = os.path.basename(entry.path(self.root, rank))
        return rank_shard(
            parse_name(name),
            state,
            tensors(entry.sequence, entry.step, rank),
            metadata={"format": "ms"},
        )

    def _saved(self, entry: Entry, said: set[int], before: Entry | None) -> None:
        """Reads off the disk what became of a save."""
        attempt = os.path.join(self.root, FOLDER, entry.attempt)
        names = os.listdir(attempt) if os.path.isdir(attempt) else []
        entry.complete = all(record_name(rank) in names for rank in range(entry.world))
        assert entry.complete or said != set(range(entry.world)), (
            "all ranks said that they saved, and a record is missing"
        )
        self.ticks += 1
        for rank in range(entry.world):
            path = entry.path(self.root, rank)
            if os.path.exists(path):
                entry.weights[rank] = GOOD
                # the order of files without records must not be a race
                os.utime(path, (self.ticks, self.ticks))
            if record_name(rank) in names:
                entry.records[rank] = GOOD
        self.entries.append(entry)
        self._nothing_lost(before)

    def _newest_sized(self) -> Entry | None:
        return max(
            (entry for entry in self.living() if self.sized(entry)),
            key=lambda e: e.order,
            default=None,
        )

    def _nothing_lost(self, before: Entry | None) -> None:
        """Checks that retention never removes the newest complete one."""
        if before is not None:
            after = self._newest_sized()
            assert after is not None and after.order >= before.order, (
                f"{before} was the newest whole one, now it is {after}"
            )

    @precondition(lambda self: self.run is not None)
    @rule(jump=st.integers(1, 7), policy=st.sampled_from(POLICIES), order=st.integers(0, 99))
    def save(self, jump, policy, order):
        self._save(jump, policy, order, None)
        assert self.entries[-1].complete and self.committed(self.entries[-1])

    @precondition(lambda self: self.run is not None)
    @rule(
        jump=st.integers(1, 7),
        policy=st.sampled_from(POLICIES),
        order=st.integers(0, 99),
        kind=st.sampled_from(KINDS),
        at=st.integers(1, 110),
    )
    def save_with_fault(self, jump, policy, order, kind, at):
        """A kill at any operation ends the run; after an error of the file system it continues."""
        self._save(jump, policy, order, Fault(at, kind))
        if kind in DEATHS:
            self.run = None

    def _save(self, jump: int, policy: Policy, order: int, fault: Fault | None) -> None:
        before, entry, run = self._newest_sized(), self._next(jump), self.run
        chance = random.Random(f"{order} {fault}")
        folder = os.path.dirname(self.root)
        scheduler = Scheduler(run.world, chance)
        machine, said = FaultInjector(STORAGE, scheduler, fault, chance, folder), set()

        def work(rank: int) -> None:
            target = SaveTarget(machine.storage_of(rank), self.root, run.run, rank, run.world)
            saver = SyncSaver(target)
            saver.committer = Committer(target, policy) if rank == 0 else None
            saver.save(Save(self._shard(entry, rank)))
            if all(outcome.saved for outcome in saver.wait(0.0)):
                said.add(rank)
            with suppress(OSError):  # the job ends with this error
                # of simulated seconds: every operation takes some
                saver.finish(60.0)

        with machine.clock():
            errors = machine.scheduler.run(
                [lambda rank=rank: work(rank) for rank in range(run.world)]
            )
        for error in errors:
            assert error is None or isinstance(error, (Killed, MindResumeError)), repr(error)
        self._saved(entry, said, before)

    @precondition(lambda self: self.run is not None)
    @rule(
        jump=st.integers(1, 7),
        policy=st.sampled_from(POLICIES),
        first=st.booleans(),
        dies=st.booleans(),
    )
    def save_in_the_background(self, jump, policy, first, dies):
        """``first``: rank 0 finishes before the others. ``dies``: the job is killed before rank 0
        checks their records again."""
        before, entry, run = self._newest_sized(), self._next(jump), self.run
        said, savers = set(), {}

        def work() -> None:
            for rank in sorted(range(run.world), reverse=not first):
                target = SaveTarget(STORAGE, self.root, run.run, rank, run.world)
                savers[rank] = AsyncSaver(target, policy if rank == 0 else None, "thread")
                savers[rank].save(Save(self._shard(entry, rank)))
                said.update(rank for outcome in savers[rank].wait(600.0) if outcome.saved)
            assert said == set(range(run.world))
            for rank in range(1, run.world):
                assert all(outcome.error is None for outcome in savers[rank].finish(600.0))
            assert all(
                outcome.error is None for outcome in savers[0].finish(0.0 if dies else 600.0)
            )

        simulated(work)
        self._saved(entry, said, before)
        if dies:
            self.run = None

    @precondition(lambda self: self.run is not None)
    @rule()
    def crash(self):
        self.run = None

    # ---- actions of users ------------------------------------------------------------------------

    @rule(policy=st.sampled_from(POLICIES))
    def prune(self, policy):
        before, whole = (
            self._newest_sized(),
            {entry.order for entry in self.living() if self.maybe_completed(entry)},
        )
        made = plan(
            dir_at(self.root),
            policy,
            read_locks(dir_at(self.root)),
            None,
            EndedRuns(dir_at(self.root)),
        )
        carry_out(dir_at(self.root), made)
        self._nothing_lost(before)
        left = {entry.order for entry in self.living()}
        if before is None or policy == KEEP_ALL:
            assert whole <= left, (
                "a checkpoint went though nothing whole is known, or all are to be kept"
            )
        for entry in self.entries:
            if not self.there(entry):
                files = [entry.path(self.root, rank) for rank in range(entry.world)]
                assert not any(map(os.path.exists, files)), (
                    f"{entry} is removed and its files are not"
                )

    @rule(
        number=st.integers(0, 2),
        rank=st.integers(0, 2),
        at=st.integers(0, 2**14),
        how=st.sampled_from([ALTERED, CUT, GONE]),
        what=st.sampled_from(["weights", "record", "manifest"]),
    )
    def damage(self, number, rank, at, how, what):
        """Damages one of the last three; ``at``: the position of the bit, or of the cut."""
        targets = [entry for entry in self.living() if entry.complete or entry.attempt is None][
            ::-1
        ]
        if not targets:
            return
        entry = targets[number % len(targets)]
        rank %= entry.world
        if what == "weights" or entry.attempt is None:
            path = entry.path(self.root, rank)
            if entry.attempt is None and how == ALTERED:
                how = CUT  # not detectable without a checksum
            if entry.weights.get(rank) == GOOD:
                self._damage(path, how, at)
                entry.weights[rank] = how
            return
        folder = os.path.join(self.root, FOLDER, entry.attempt)
        path = os.path.join(folder, MANIFEST if what == "manifest" else record_name(rank))
        if not os.path.exists(path) or (what == "record" and entry.records[rank] != GOOD):
            return
        self._damage(path, how, at)
        if what == "record":
            entry.records[rank] = GONE if how == GONE else ALTERED

    def _damage(self, path: str, how: str, at: int) -> None:
        size = os.path.getsize(path)
        if how == GONE:
            os.remove(path)
        elif how == CUT:
            os.truncate(path, [0, 1, size // 2][at % 3])
        elif size:
            # a manifest may have been emptied before
            with open(path, "r+b") as file:
                first = 0
                # in a tensor, not in the label: see the test below
                if not path.endswith(".json"):
                    first, size = read_header(file, path).tensors["weight"].ranges[0]
                file.seek(first + at // 8 % size)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1 << at % 8]))

    @rule(
        rank=st.integers(0, 2),
        content=st.sampled_from(
            [
                b"",
                b"{",
                b"null",
                b'{"last_ckpt_file": 7}',
                b"\xff\xfe",
                json.dumps({"last_ckpt_file": "../../etc/passwd"}).encode(),
                json.dumps(
                    {
                        "last_epoch": 1,
                        "last_step": 1,
                        "last_ckpt_file": "net_rank_0-1_1.safetensors",
                    }
                ).encode(),
            ]
        ),
    )
    def edit_a_pointer(self, rank, content):
        folder = os.path.join(self.root, folder_name(rank))
        if os.path.isdir(folder):
            with open(os.path.join(folder, META), "wb") as file:
                file.write(content)

    @rule()
    def copy_the_folder(self):
        """``cp -r``, and go on in the copy."""
        self.run = None
        self._go_to_copy(lambda new: shutil.copytree(self.root, new))

    @precondition(
        lambda self: (
            not any(ALTERED in entry.weights.values() for entry in self.entries) and self.copies < 3
        )
    )
    @rule()
    def copy_the_rank_folders(self):
        """``cp -r rank_* elsewhere``: the records are not copied, and only they distinguish an
        altered file."""
        self.run = None

        def copy(new: str) -> None:
            os.mkdir(new)
            for name in os.listdir(self.root):
                if name != FOLDER:
                    shutil.copytree(os.path.join(self.root, name), os.path.join(new, name))

        self._go_to_copy(copy)
        kept = []
        for entry in self.entries:
            paths = {rank: entry.path(self.root, rank) for rank in range(entry.world)}
            there = {
                rank: entry.weights.get(rank, GOOD)
                for rank, path in paths.items()
                if os.path.exists(path)
            }
            # also what never completed, or was just being removed
            if there:
                entry.attempt, entry.weights, entry.records = None, there, {}
                kept.append(entry)
        self.entries = kept

    def _go_to_copy(self, copy) -> None:
        self.copies += 1
        new = os.path.join(self.base, f"checkpoint-{self.copies}")
        if os.path.isdir(self.root):
            copy(new)
            shutil.rmtree(self.root)
        self.root = new


TestTraining = Training.TestCase
TestTraining.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_one_altered_label_does_not_complete_an_incomplete_save(tmp_path, fmt):
    """Found by the machine above, with the bit it flips anywhere in a file: killed after the
    weights, before any record."""
    for rank in range(2):
        write_rank(tmp_path, 5, rank, 2, fmt=fmt)
        os.remove(tmp_path / FOLDER / attempt_name(5, RUN) / record_name(rank))
    policy = SelectionPolicy(2, every_rank=True)
    assert select_checkpoint(STORAGE, str(tmp_path), SingleProcess(), policy).is_fresh_start
    path = path_of(tmp_path, 5, 0, fmt=fmt)
    flip_bit(path, path.read_bytes().index(b"mindresume") + 1)
    with suppress(NoUsableCheckpointError):  # to refuse is right, or to begin afresh
        assert (
            select_checkpoint(
                STORAGE,
                str(tmp_path),
                SingleProcess(),
                SelectionPolicy(2, every_rank=True),
            ).chosen
            is None
        )
