"""How an iteration folder is published, replaced and removed, and how the next run repairs an
interruption."""

import errno
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import iteration_folders
import pytest
import rank_folders
from iteration_folders import (
    folder_of,
    foreign,
    hidden,
    intend,
    listing,
    making,
    records_of,
    save,
    target_of,
    track,
    tracker,
    write_all,
    write_rank,
)
from rank_folders import RUN, STORAGE, dir_at
from storages import Hooked, os_error

from mindresume import runtime
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.lease import ReadLocks, acquire_read_lock, holder_of_this_process
from mindresume.coordination.lease_acquisition import acquire
from mindresume.events import CommitDelayed, ignore
from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import COMMON, METADATA, TRACKER, parse_common
from mindresume.formats.metadata import read_metadata
from mindresume.formats.records import scan_records
from mindresume.formats.scan import scan
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import (
    FOLDER,
    TRASH,
    attempt_name,
    record_name,
    run_name,
)
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer
from mindresume.saving.garbage_collector import carry_out, empty_trash
from mindresume.saving.iteration_publisher import finish_tracker
from mindresume.saving.retention import KeepLast, plan
from mindresume.storage import temporary_name
from mindresume.storage.posix import PosixStorage

NEXT, THIRD = run_name(2, "0000bbbb"), run_name(3, "0000cccc")
VISIBLE = "iteration_00000010"


@pytest.fixture
def tmp_path(tmp_path):
    """Returns a folder in memory if possible: kills are simulated, so no disk is needed."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    path = tempfile.mkdtemp(prefix="mindresume-", dir="/dev/shm")
    yield Path(path)
    shutil.rmtree(path)


def adopting(root, run=NEXT, emit=ignore):
    return Committer(target_of(root, 0, 2, run), emit=emit).recover()


def chosen(root):
    choice = select_checkpoint(
        STORAGE, str(root), SingleProcess(), SelectionPolicy(every_rank=True)
    )
    return choice.chosen and (choice.chosen.step, choice.chosen.run)


def committed(root):
    return [(c.step, c.run) for c in scan_records(dir_at(root))[0] if c.committed]


class Dying(Hooked):
    """Is killed before the changing operation ``at``."""

    width = 1

    def __init__(self, at=None):
        super().__init__(self._count)
        self.at, self.done = at, []

    def _count(self, name, path):
        if name in ("rename", "write", "remove"):
            self.done.append((name, os.path.basename(path)))
            if len(self.done) == self.at:
                raise KeyboardInterrupt


def interrupted_at_each_operation(act):
    """Calls ``act(storage, number)`` once per changing operation, killed before it. Yields (number,
    operation)."""
    calm = Dying()
    act(calm, 0)
    for at in range(1, len(calm.done) + 1):
        with pytest.raises(KeyboardInterrupt):
            act(Dying(at), at)
        yield at, calm.done[at - 1]


def failing_once(operation, name):
    """Returns a disk on which this operation fails once on a path that ends with ``name``."""
    left = [1]

    def before(what, path):
        if what == operation and path.endswith(name) and left:
            left.clear()
            raise os_error(errno.EIO, path)

    return Hooked(before)


# ---- a save --------------------------------------------------------------------------------------


def test_a_commit_leaves_only_the_files_that_mindformers_needs(tmp_path):
    save(tmp_path, 10)
    assert (
        listing(tmp_path) == [VISIBLE, TRACKER]
        and hidden(tmp_path) == []
        and tracker(tmp_path) == "10"
    )
    folder = folder_of(tmp_path, 10)
    assert sorted(os.listdir(folder)) == [
        FOLDER,
        COMMON,
        METADATA,
        *(
            f"net-{kind}-{rank:07d}-0000002.safetensors"
            for kind in ("model", "opt")
            for rank in range(2)
        ),
    ]
    common = parse_common((folder / COMMON).read_bytes(), COMMON)
    assert (common.step_num, common.global_step, common.global_batch_size, common.ckpt_status) == (
        10,
        10,
        8,
        None,
    )
    assert "ckpt_status" not in json.loads((folder / COMMON).read_text())
    rows = read_metadata((folder / METADATA).read_bytes(), METADATA)
    assert set(rows) == {"embedding.weight", "adam_m.embedding.weight"}
    assert rows["embedding.weight"].layout == TensorLayout((2,), (0, -1)) and rows[
        "embedding.weight"
    ].shape == (8, 4)
    assert [copies[0].file for copies in rows["embedding.weight"].stored.values()] == [
        f"net-model-{rank:07d}-0000002.safetensors" for rank in range(2)
    ]


def test_a_layout_that_does_not_divide_the_ranks_is_no_commit(tmp_path):
    events = []
    for rank in range(2):
        target = target_of(tmp_path, rank)
        shard = iteration_folders.iteration_shard(
            "net",
            target,
            rank_folders.state_of(10),
            iteration_folders.tensors_of(rank, 10),
            None,
            {"embedding.weight": (TensorLayout((3,), (-1, -1)), (4, 4))},
        )
        iteration_folders.write_shard(target, shard)
    committer = Committer(target_of(tmp_path), emit=events.append)
    committer.poll(10)
    assert committer.pending == [10] and listing(tmp_path) == []
    assert [(type(event), event.step) for event in events] == [
        (CommitDelayed, 10)
    ] and "3 ranks" in events[0].reason


# ---- the next run --------------------------------------------------------------------------------


def test_an_intent_of_a_missing_or_older_iteration_is_only_removed(tmp_path):
    save(tmp_path, 5, 10)
    for step in (5, 7):
        intend(tmp_path, step)
    adopting(tmp_path)
    assert tracker(tmp_path) == "10" and hidden(tmp_path) == []


def test_a_save_repeated_by_a_later_run_is_not_replaced(tmp_path):
    """Run 1 was killed before it published step 10; run 2 could not adopt it and saved that step
    itself."""
    write_all(tmp_path, 10)
    save(tmp_path, 10, run=NEXT)
    assert adopting(tmp_path, THIRD) == []
    assert committed(tmp_path) == [(10, NEXT), (10, RUN)] and chosen(tmp_path) == (10, NEXT)
    assert (folder_of(tmp_path, 10) / FOLDER / attempt_name(10, NEXT)).is_dir() and tracker(
        tmp_path
    ) == "10"


def test_a_save_that_a_damaged_record_makes_doubtful_is_neither_adopted_nor_lost(tmp_path):
    save(tmp_path, 5)
    write_all(tmp_path, 10)
    (records_of(making(tmp_path, 10), 10) / record_name(1)).write_bytes(b"torn")
    assert (
        adopting(tmp_path) == [] and making(tmp_path, 10).is_dir() and chosen(tmp_path) == (5, RUN)
    )


def test_a_file_that_is_not_as_recorded_is_not_adopted(tmp_path):
    events = []
    write_all(tmp_path, 10)
    (making(tmp_path, 10) / "net-opt-0000001-0000002.safetensors").write_bytes(b"short")
    assert adopting(tmp_path, emit=events.append) == [] and listing(tmp_path) == []
    (delayed,) = events
    assert (type(delayed), delayed.step, delayed.run_id) == (
        CommitDelayed,
        10,
        RUN,
    ) and "net-opt-0000001" in delayed.reason


def test_saves_before_one_that_cannot_be_adopted_are_not_skipped(tmp_path):
    save(tmp_path, 5)
    for step in (10, 15):
        write_all(tmp_path, step)
    (making(tmp_path, 15) / "net-opt-0000001-0000002.safetensors").write_bytes(b"short")
    assert chosen(tmp_path) == (10, RUN)
    assert (
        adopting(tmp_path) == [10] and tracker(tmp_path) == "10" and chosen(tmp_path) == (10, RUN)
    )


def test_a_save_is_adopted_although_a_newer_one_never_completed(tmp_path):
    save(tmp_path, 10)
    write_all(tmp_path, 20)
    write_rank(tmp_path, 30, 0)
    assert adopting(tmp_path) == [20]
    assert tracker(tmp_path) == "20" and chosen(tmp_path) == (20, RUN)


def test_an_adoption_does_not_undo_a_tracker_that_was_set_back(tmp_path):
    save(tmp_path, 5, 10)
    write_all(tmp_path, 15)
    track(tmp_path, 5)
    assert chosen(tmp_path) == (5, RUN)
    adopting(tmp_path)
    assert chosen(tmp_path) == (5, RUN)


def test_half_written_trackers_of_earlier_runs_are_removed_and_those_of_others_kept(tmp_path):
    save(tmp_path, 10, run=NEXT)
    names = [temporary_name(str(tmp_path / TRACKER), run) for run in (RUN, NEXT, THIRD)]
    names += [str(tmp_path / f".{TRACKER}.swp")]
    for name in names:
        Path(name).write_bytes(b"1")
    finish_tracker(dir_at(tmp_path), [], NEXT)
    assert [*map(os.path.exists, names)] == [False, True, True, True]


def test_a_kill_at_every_operation_of_replacing_our_only_folder(tmp_path):
    """The tracker never names a folder that is incomplete or missing."""

    def act(storage, number):
        root = tmp_path / str(number)
        save(root, 20)
        write_all(root, 20, run=NEXT)
        Committer(target_of(root, run=NEXT, storage=storage)).poll(20)

    trackers = set()
    for number, operation in interrupted_at_each_operation(act):
        root = tmp_path / str(number)
        assert chosen(root) == (20, NEXT), operation
        trackers.add(tracker(root))
        assert tracker(root) is None or (folder_of(root, int(tracker(root))) / COMMON).exists(), (
            operation
        )
        adopting(root, THIRD)
        Committer(target_of(root, run=THIRD)).prune()
        assert chosen(root) == (20, NEXT) and tracker(root) == "20", operation
        assert hidden(root) == [] and (20, RUN) not in committed(root), operation
    assert trackers == {"20", None}


# ---- a step is saved once more -------------------------------------------------------------------


def test_a_folder_of_mindformers_is_replaced_completely(tmp_path):
    """Our folder has two files per rank under another prefix: no file of the other folder may
    remain."""
    foreign(tmp_path, steps=(10, 15))
    save(tmp_path, 15, run=NEXT)
    assert sorted(name for name in os.listdir(folder_of(tmp_path, 15)) if "qwen" in name) == []
    assert chosen(tmp_path) == (15, NEXT) and tracker(tmp_path) == "15"
    assert hidden(tmp_path) == [] and (folder_of(tmp_path, 10) / METADATA).exists()


def test_a_kill_at_every_operation_of_replacing_a_folder_of_mindformers(tmp_path):
    def act(storage, number):
        root = tmp_path / str(number)
        foreign(root, "mf190_20_single", (10, 15))
        write_all(root, 15, world=1, run=NEXT, at=3e9)  # later than the files of the fixture
        Committer(target_of(root, 0, 1, NEXT, storage)).poll(15)

    for number, operation in interrupted_at_each_operation(act):
        root = tmp_path / str(number)
        assert chosen(root) == (15, NEXT), operation
        Committer(target_of(root, 0, 1, THIRD)).recover()
        Committer(target_of(root, 0, 1, THIRD)).prune()
        assert chosen(root) == (15, NEXT) and tracker(root) == "15" and hidden(root) == [], (
            operation
        )


@pytest.mark.parametrize("trouble", ["tracker-0000000010", VISIBLE, TRACKER])
def test_a_kill_at_every_operation_of_a_save_after_an_unpublished_one(tmp_path, trouble):
    """The earlier one is named first; the tracker follows before anything else is done."""

    def act(storage, number):
        failed, rename = [], storage.rename

        def once(old, new):
            if new.endswith(trouble) and not failed:
                failed.append(new)
                raise OSError(5, "Input/output error", new)
            rename(old, new)

        storage.rename, root = once, tmp_path / str(number)
        save(root, 5)
        committer = Committer(target_of(root, storage=storage))
        for step in (10, 20):
            write_all(root, step)
            committer.poll(step)
        assert failed and tracker(root) == "20" and hidden(root) == []

    for number, operation in interrupted_at_each_operation(act):
        root = tmp_path / str(number)
        newest = 20 if making(root, 20).exists() or folder_of(root, 20).exists() else 10
        assert chosen(root) == (newest, RUN), operation
        adopting(root)
        assert (
            chosen(root) == (newest, RUN) and tracker(root) == str(newest) and hidden(root) == []
        ), operation


def test_a_leftover_intent_is_removed_by_the_next_save(tmp_path):
    """A tracker that a user sets back would otherwise count as late once the newer ones are
    removed."""
    save(tmp_path, 5)
    write_all(tmp_path, 10)
    storage = failing_once("remove", "tracker-0000000010")
    Committer(target_of(tmp_path, storage=storage)).poll(10)
    intend(tmp_path, 30)  # not ours to remove: of a later step
    assert hidden(tmp_path) == ["tracker-0000000010", "tracker-0000000030"]
    save(tmp_path, 20)
    assert hidden(tmp_path) == ["tracker-0000000030"] and tracker(tmp_path) == "20"


# ---- retention -----------------------------------------------------------------------------------


def test_an_iteration_that_the_tracker_names_by_hand_is_never_removed(tmp_path):
    save(tmp_path, 5, 10, 15)
    track(tmp_path, 5)
    made = plan(dir_at(tmp_path), KeepLast(1))
    assert [c.step for c in made.to_delete] == [10] and made.reasons[
        str(folder_of(tmp_path, 5))
    ] == f"{TRACKER} names it"
    assert carry_out(dir_at(tmp_path), made) == [*made.to_delete]
    assert listing(tmp_path) == ["iteration_00000005", "iteration_00000015", TRACKER] and chosen(
        tmp_path
    ) == (5, RUN)


def test_the_newest_complete_iteration_is_kept_when_a_newer_one_lost_a_metadata_file(tmp_path):
    save(tmp_path, 5, 10, 15)
    os.remove(folder_of(tmp_path, 15) / COMMON)
    made = plan(dir_at(tmp_path), KeepLast(1))
    assert [c.step for c in made.kept] == [15, 10] and [c.step for c in made.to_delete] == [5]


def test_the_tracker_never_names_a_stale_folder_while_a_step_is_replaced(tmp_path):
    """Another host has removed it, and this one still lists it."""
    save(tmp_path, 5, 10)
    write_all(tmp_path, 10, run=NEXT)
    trackers = []

    class Late(PosixStorage):
        def list(self, folder):
            stale = ["iteration_00000007"] if folder == str(tmp_path) else []
            return [*super().list(folder), *stale]

        def rename(self, old, new):
            super().rename(old, new)
            if new.endswith(TRACKER):
                trackers.append(tracker(tmp_path))

    assert Committer(target_of(tmp_path, run=NEXT, storage=Late())).poll(10) == []
    assert trackers == ["5", "10"]


@pytest.mark.parametrize("at", range(1, 25))
def test_a_removal_moves_nothing_under_a_reader_that_starts_at_any_operation(tmp_path, at):
    """A locked iteration folder was renamed until the removing process saw the lock: files were
    missing meanwhile."""
    save(tmp_path, 10, 20)
    commit_dir, held, waited, moved = str(folder_of(tmp_path, 10)), [], [], []

    def before(operation, path):
        if len(storage.asked) == at:
            with runtime.answers({runtime.sleep: waited.append}):
                held.append(acquire_read_lock(dir_at(tmp_path), attempt_name(10, RUN), commit_dir))
        if held and operation == "rename" and TRASH in path:
            moved.append(path)

    storage = Hooked(before)
    carry_out(
        CheckpointDir(storage, str(tmp_path)),
        plan(dir_at(tmp_path), KeepLast(1)),
        ReadLocks(CheckpointDir(storage, str(tmp_path))),
    )
    assert held and (held[0] is not None) == os.path.exists(commit_dir)
    assert waited or not moved
    if held[0] is not None:
        held[0].release()


# ---- folders are identified by content, not by the name of their records -------------------------


def orphan(root, step, run=RUN):
    """Saves a committed step again by one rank, as former versions did: a second folder of that
    name."""
    other = root.parent / f"orphan-{root.name}"
    write_rank(other, step, 1, run=run)
    shutil.move(making(other, step, run), making(root, step, run))
    return making(root, step, run)


def test_a_copy_by_hand_is_neither_counted_nor_removed_and_does_not_interfere(tmp_path):
    root = tmp_path / "root"
    save(root, 10)
    shutil.copytree(folder_of(root, 10), folder_of(root, 11))
    assert chosen(root) == (10, RUN)
    save(root, 20, 30, policy=KeepLast(2))
    assert (
        listing(root) == ["iteration_00000011", "iteration_00000020", "iteration_00000030", TRACKER]
        and hidden(root) == []
    )
    made = plan(dir_at(root), KeepLast(2))
    assert "iteration_00000011 is a copy" in made.reasons[str(folder_of(root, 11))]
    # newer by its name than everything
    shutil.copytree(folder_of(root, 30), folder_of(root, 99))
    save(root, 40, policy=KeepLast(1))
    assert listing(root) == [
        "iteration_00000011",
        "iteration_00000040",
        "iteration_00000099",
        TRACKER,
    ]
    assert chosen(root) == (40, RUN) and adopting(root) == []


# ---- readers -------------------------------------------------------------------------------------


def candidate_of(root, step):
    return next(c for c in scan(dir_at(root)).candidates if c.step == step)


def test_a_restored_iteration_does_not_replace_one_of_the_same_name(tmp_path):
    save(tmp_path, 10)
    found = candidate_of(tmp_path, 10)
    lease = acquire_read_lock(dir_at(tmp_path), found.name, found.commit_dir)
    os.rename(found.commit_dir, tmp_path / FOLDER / f"{TRASH}{found.name}")
    write_all(tmp_path, 10, run=NEXT)
    Committer(target_of(tmp_path, run=NEXT)).poll(10)
    assert (
        committed(tmp_path) == [(10, NEXT)]
        and (tmp_path / FOLDER / f"{TRASH}{found.name}").is_dir()
    )
    lease.release()
    empty_trash(dir_at(tmp_path), ReadLocks(dir_at(tmp_path)))
    assert hidden(tmp_path) == [] and chosen(tmp_path) == (10, NEXT)


# ---- two jobs ------------------------------------------------------------------------------------


def acquire_lease(root, run=""):
    holder = holder_of_this_process("saving", 2)
    return acquire(dir_at(root), replace(holder, run=run), 0.0, keep_run_marker=True)


def test_a_run_is_later_than_iterations_that_were_copied_without_their_root(tmp_path):
    save(tmp_path / "old", 10, run=THIRD)
    (tmp_path / "new").mkdir()
    shutil.copytree(folder_of(tmp_path / "old", 10), folder_of(tmp_path / "new", 10))
    lease = acquire_lease(tmp_path / "new")
    save(tmp_path / "new", 20, run=lease.run)
    lease.release()
    assert lease.run > THIRD and [
        c.step for c in plan(dir_at(tmp_path / "new"), KeepLast(1)).to_delete
    ] == [10]


def test_details_that_are_damaged_are_an_error_of_the_commit_not_of_the_training(tmp_path):
    write_all(tmp_path, 10)
    path = records_of(making(tmp_path, 10), 10) / record_name(0)
    path.write_bytes(path.read_bytes()[:-20])
    events = []
    committer = Committer(target_of(tmp_path), emit=events.append)
    assert committer.poll(10) == [10] and listing(tmp_path) == []
    assert "truncated" in events[0].reason
