"""What retention removes and what it never removes, and a removal that is killed before each of its
operations."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rank_folders
from rank_folders import (
    EVERY_RUN,
    RUN,
    STORAGE,
    dir_at,
    name_of,
    path_of,
    save,
    write_rank,
)
from storages import Hooked, failing, os_error

from mindresume.coordination.collectives import SingleProcess
from mindresume.events import RemovalPostponed, ignore
from mindresume.formats import CheckpointDir
from mindresume.formats.rank_folders import META, meta_json
from mindresume.formats.scan import scan
from mindresume.model.manifest import (
    FOLDER,
    TRASH,
    attempt_name,
    run_name,
    trash_name,
)
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.retention import (
    KEEP_ALL,
    NEWEST_HEALTHY,
    NEWEST_WHOLE,
    KeepEverySteps,
    KeepLast,
    Plan,
    plan,
)

NEXT_RUN = run_name(2, "0000bbbb")


def steps(candidates):
    return [candidate.step for candidate in candidates]


def planned(root, policy, **more):
    return plan(dir_at(root), policy, **more)


def prune(root, policy, storage=STORAGE, locks=None, emit=ignore, **more):
    return carry_out(CheckpointDir(storage, str(root)), planned(root, policy, **more), locks, emit)


def committed(root):
    return steps(c for c in scan(dir_at(root)).candidates if c.committed)


def why(made):
    """{name of the attempt: reason}; there are no two of one name."""
    rows = [*made.kept, *made.to_delete, *made.orphans, *made.unfinished, *made.read_locked]
    assert sorted(c.commit_dir for c in rows) == sorted(made.reasons)
    return {candidate.name: made.reasons[candidate.commit_dir] for candidate in rows}


@pytest.fixture
def saved(tmp_path):
    """Saves steps 5 to 20 of 2 ranks, and step 25 of rank 0 alone."""
    root = tmp_path / "checkpoint"
    for step in (5, 10, 15, 20):
        save(root, step, world=2)
    write_rank(root, 25, 0, 2)
    return root


# ---- deciding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ended, active, orphans",
    [(EVERY_RUN, None, [25]), ((), None, []), ({NEXT_RUN}, None, []), (EVERY_RUN, RUN, [])],
)
def test_an_incomplete_save_is_removed_only_if_its_run_has_ended(saved, ended, active, orphans):
    made = planned(saved, KEEP_ALL, ended=ended, active=active)
    assert steps(made.orphans) == orphans and steps(made.unfinished) == [
        step for step in [25] if step not in orphans
    ]
    assert made.to_delete == () and steps(made.kept) == [20, 15, 10, 5]


def test_an_incomplete_save_of_the_active_run_is_removed_after_its_newest_commit(saved):
    assert planned(saved, KEEP_ALL, active=RUN).orphans == ()
    write_rank(saved, 18, 0, 2)  # 20 is committed
    assert steps(planned(saved, KEEP_ALL, active=RUN).orphans) == [18]
    assert planned(saved, KEEP_ALL, active=NEXT_RUN).orphans == ()


def cut_short(root, step):
    os.truncate(path_of(root, step, 1), 10)


def delete_file(root, step):
    path_of(root, step, 1).unlink()


def delete_record(root, step):
    (root / FOLDER / attempt_name(step, RUN) / "rank_00001.json").unlink()


@pytest.mark.parametrize("spoil", [cut_short, delete_file, delete_record])
def test_the_newest_complete_checkpoint_is_never_removed_and_newer_ones_do_not_count(saved, spoil):
    for step in (15, 20):
        spoil(saved, step)
    # a lost file may have replicas on other ranks, so a resume may take 15
    for count, kept, gone in ((1, [20, 15, 10], [5]), (2, [20, 15, 10, 5], [])):
        made = planned(saved, KeepLast(count))
        assert (steps(made.kept), steps(made.to_delete)) == (kept, gone)
        assert why(made)[attempt_name(10, RUN)].startswith(NEWEST_WHOLE)
    prune(saved, KeepLast(1))
    policy = SelectionPolicy(2, every_rank=True)
    assert select_checkpoint(STORAGE, str(saved), SingleProcess(), policy).chosen.step == 10


def test_the_checkpoint_that_meta_json_names_is_kept(saved):
    """A job has committed a newer one and not pointed to it yet; meanwhile a user prunes the
    folder."""
    meta = saved / "rank_0" / "meta.json"
    older, gone = (json.dumps(meta_json(name_of(0, step))) for step in (10, 11))
    for text, kept in ((older, [20, 10]), (gone, [20]), ("[1]", [20]), ("", [20]), (None, [20])):
        meta.unlink() if text is None else meta.write_text(text)
        made = planned(saved, KeepLast(1), ended=EVERY_RUN)
        assert steps(made.kept) == kept, text
        if len(kept) > 1:
            assert why(made)[attempt_name(10, RUN)] == "rank_0/meta.json names it"


def test_nothing_is_removed_while_the_target_of_meta_json_is_unknown(saved):
    with pytest.raises(OSError, match="Stale"):
        plan(CheckpointDir(failing(META, "open"), str(saved)), KeepLast(1))


@pytest.fixture
def healths(monkeypatch):
    """{step: health that the monitor reported at the save}"""
    found, plain = {}, rank_folders.state_of
    monkeypatch.setattr(
        rank_folders,
        "state_of",
        lambda step, batch=8: replace(plain(step, batch), health=found.get(step)),
    )
    return found


@pytest.mark.parametrize(
    "unhealthy, kept, extra",
    [
        ((), [25], None),
        ((25, 20), [25, 15], 15),
        ((25, 20, 15, 10, 5), [25], None),
        ((20,), [25], None),
    ],
)
def test_the_newest_healthy_checkpoint_is_kept(tmp_path, healths, unhealthy, kept, extra):
    healths.update({step: int(step in unhealthy) for step in (5, 10, 15, 20, 25)})
    for step in (5, 10, 15, 20, 25):
        save(tmp_path, step, world=2)
    made = planned(tmp_path, KeepLast(1))
    assert steps(made.kept) == kept
    if extra:
        assert why(made)[attempt_name(extra, RUN)] == NEWEST_HEALTHY


# ---- carrying out --------------------------------------------------------------------------------


class Died(Exception):
    """Is not an OSError: nothing in the product catches it, like a SIGKILL."""


class Counting(Hooked):
    """Is killed before operation ``limit`` (from 0)."""

    width = 1

    def __init__(self, limit=None):
        super().__init__(self._count)
        self.limit = limit

    def _count(self, *what):
        if len(self.asked) - 1 == self.limit:
            raise Died(what)


def test_weights_of_an_interrupted_removal_are_synced_by_the_next(saved):
    """The first process may have been killed before its flush; a power loss now must not restore
    the weights without their records."""
    made, dying = planned(saved, KeepLast(3)), Counting()
    dying.limit = 1 + next(
        i for i, what in enumerate(counted(saved)) if what == ("remove", str(path_of(saved, 5, 1)))
    )
    with pytest.raises(Died):
        carry_out(CheckpointDir(dying, str(saved)), made)
    assert not path_of(saved, 5, 1).exists()
    storage = Counting()
    prune(saved, KeepLast(3), storage=storage)
    trash = str(saved / FOLDER / (TRASH + attempt_name(5, RUN)))  # with whatever nonce
    first_record = next(
        i
        for i, what in enumerate(storage.asked)
        if what[0] == "remove" and what[1].startswith(trash)
    )
    assert ("sync", str(saved / "rank_0")) in storage.asked[:first_record]
    assert ("sync", str(saved / "rank_1")) in storage.asked[:first_record]


def counted(root):
    """Returns the operations of removing step 5, on a copy, with the paths of ``root``."""
    copy = root.parent / "counted"
    shutil.copytree(root, copy)
    storage = Counting()
    prune(copy, KeepLast(3), storage=storage)
    return [tuple(text.replace(str(copy), str(root)) for text in what) for what in storage.asked]


def test_a_checkpoint_is_removed_although_a_file_stands_where_a_rank_folder_should(saved):
    shutil.rmtree(saved / "rank_1")
    (saved / "rank_1").write_text("x")
    said = []
    prune(saved, KeepLast(1), ended=EVERY_RUN, emit=said.append)
    assert said == [] and not [
        name for name in os.listdir(saved / FOLDER) if name.startswith(TRASH)
    ]


def test_checkpoints_that_vanished_before_their_removal_are_no_error(saved):
    made = planned(saved, KeepLast(1), ended=EVERY_RUN)
    shutil.rmtree(saved / FOLDER / attempt_name(10, RUN))
    path_of(saved, 15, 0).unlink()
    assert steps(carry_out(dir_at(saved), made)) == [15, 5, 25]
    assert committed(saved) == [20]


def test_a_later_file_of_the_same_name_is_kept(tmp_path):
    """The rank folders were deleted by hand and their hidden records were not: the next run uses
    the names again."""
    for step in (5, 10, 15):
        save(tmp_path, step, world=2)
    for rank in range(2):
        shutil.rmtree(tmp_path / f"rank_{rank}")
    save(tmp_path, 5, world=2, run=NEXT_RUN)
    made = planned(tmp_path, KeepLast(1), active=NEXT_RUN, ended=EVERY_RUN)
    assert [(c.step, c.run) for c in made.to_delete] == [(15, RUN), (10, RUN), (5, RUN)]
    carry_out(CheckpointDir(STORAGE, str(tmp_path)), made)
    chosen = select_checkpoint(
        STORAGE, str(tmp_path), SingleProcess(), SelectionPolicy(2, every_rank=True)
    ).chosen
    assert (chosen.step, chosen.run) == (5, NEXT_RUN) and os.listdir(tmp_path / FOLDER) == [
        attempt_name(5, NEXT_RUN)
    ]


# ---- holds ---------------------------------------------------------------------------------------

HELD = {attempt_name(10, RUN): "loading by process 7 on host a"}


def test_a_read_lock_taken_after_the_plan_is_respected(saved):
    before, events = (
        {p: p.stat().st_mtime_ns for p in (saved / FOLDER / attempt_name(10, RUN)).iterdir()},
        [],
    )
    removed = prune(saved, KeepLast(1), ended=EVERY_RUN, locks=lambda: HELD, emit=events.append)
    assert steps(removed) == [15, 5, 25] and committed(saved) == [20, 10]
    assert before == {p: p.stat().st_mtime_ns for p in before} and path_of(saved, 10, 1).exists()
    assert events == [
        RemovalPostponed(
            str(saved / FOLDER / attempt_name(10, RUN)), HELD[attempt_name(10, RUN)], 10
        )
    ]
    # let go: the next one takes it
    assert steps(prune(saved, KeepLast(1))) == [10]


def test_the_next_removal_restores_a_locked_checkpoint_if_the_first_is_killed(saved):
    with pytest.raises(Died):
        prune(saved, KeepLast(3), storage=Counting(2), locks=lambda: {})
    assert committed(saved) == [20, 15, 10]
    held = {attempt_name(5, RUN): "loading"}
    prune(saved, KeepLast(3), held=held, locks=lambda: held)
    assert committed(saved) == [20, 15, 10, 5]
    prune(saved, KeepLast(3))
    assert committed(saved) == [20, 15, 10] and not path_of(saved, 5, 0).exists()


def test_a_kill_during_the_restoring_rename_loses_nothing(saved):
    held = {attempt_name(5, RUN): "loading"}
    # before the rename back, before its sync
    for limit in (3, 4):
        with pytest.raises(Died):
            prune(saved, KeepLast(3), storage=Counting(limit), locks=lambda: held)
        prune(saved, KeepLast(3), held=held, locks=lambda: held)
        assert committed(saved) == [20, 15, 10, 5]


def test_a_locked_checkpoint_that_lost_files_is_not_restored_and_waits_for_its_reader(saved):
    attempt = saved / FOLDER / attempt_name(5, RUN)
    attempt.rename(attempt.with_name(TRASH + attempt.name))
    path_of(saved, 5, 0).unlink()
    held = {attempt_name(5, RUN): "loading"}
    prune(saved, KeepLast(3), held=held, locks=lambda: held)
    assert committed(saved) == [20, 15, 10] and path_of(saved, 5, 1).exists()
    prune(saved, KeepLast(3))
    assert not path_of(saved, 5, 1).exists() and not list((saved / FOLDER).glob(TRASH + "*"))


def test_another_process_may_finish_the_removal_before_the_lock_is_seen(saved):
    def read_locks():
        for trash in (saved / FOLDER).glob(TRASH + attempt_name(5, RUN) + ".*"):
            shutil.rmtree(trash)
        return {attempt_name(5, RUN): "loading"}

    assert prune(saved, KeepLast(3), locks=read_locks) == []
    assert committed(saved) == [20, 15, 10]


# ---- each fails for itself -----------------------------------------------------------------------


def stuck(operation, name):
    """Returns a disk on which this operation fails on paths with this name, or in a folder of that
    name."""

    def before(what, path):
        if what == operation and name in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    storage = Hooked(before)
    storage.width = 1
    return storage


@pytest.mark.parametrize(
    "operation, name, left",
    [
        ("rename", attempt_name(15, RUN), [20, 15]),
        ("remove", str(Path(path_of("", 15, 1)).name), [20]),
        ("sync", "rank_1", [20]),
        ("open", "rank_00000.json", [20]),
    ],
)
def test_one_failed_removal_does_not_stop_the_others(saved, operation, name, left):
    events, old = [], saved / FOLDER / trash_name(attempt_name(3, RUN))
    old.mkdir()
    storage = stuck(operation, name)
    removed = prune(saved, KeepLast(1), ended=EVERY_RUN, storage=storage, emit=events.append)
    assert committed(saved) == left and not old.exists()
    assert steps(removed) == [step for step in (15, 10, 5, 25) if step not in left]
    # then other records tell what it wrote
    if operation != "open":
        assert events and {(type(event), event.reason) for event in events} == {
            (RemovalPostponed, "Permission denied")
        }
        assert not path_of(saved, 5, 0).exists() and not path_of(saved, 10, 0).exists()
    prune(saved, KeepLast(1), ended=EVERY_RUN)
    assert (
        os.listdir(saved / FOLDER) == [attempt_name(20, RUN)] and not path_of(saved, 15, 1).exists()
    )


@pytest.mark.parametrize("next_run_saved", [25, 20], ids=["later", "the same step"])
def test_the_last_commit_of_each_run_is_flushed_before_a_removal(saved, next_run_saved):
    """A run that died may have left its last manifest renamed and not flushed."""
    save(saved, next_run_saved, world=2, run=NEXT_RUN, suffix=1)
    last = {attempt_name(20, RUN), attempt_name(next_run_saved, NEXT_RUN)}
    storage = Counting()
    removed = prune(saved, KeepLast(3), storage=storage)
    operations = [what[0] for what in storage.asked]
    flushed = storage.asked[: operations.index("rename")]
    assert {Path(path).name for what, path in flushed if what == "sync"} == last
    assert steps(removed) == [10, 5]

    events, storage = [], stuck("sync", attempt_name(20, RUN))
    made = planned(saved, KeepLast(2))
    assert carry_out(CheckpointDir(storage, str(saved)), made, emit=events.append) == []
    assert events == [
        RemovalPostponed(str(saved / FOLDER / attempt_name(20, RUN)), "Permission denied")
    ]


def test_a_failed_removal_is_emitted_once(saved):
    events, storage = [], stuck("rename", attempt_name(5, RUN))
    target = rank_folders.target_of(saved, 0, 2)
    committer = Committer(
        type(target)(storage, target.root, target.run, 0, 2), KeepLast(3), events.append
    )
    assert committer.prune() == committer.prune() == []
    assert events == [
        RemovalPostponed(str(saved / FOLDER / attempt_name(5, RUN)), "Permission denied", 5)
    ]


def test_unreadable_read_locks_keep_what_may_be_locked(saved):
    def read_locks():
        raise OSError(errno.EIO, "Input/output error")

    events = []
    assert prune(saved, KeepLast(3), locks=read_locks, emit=events.append) == []
    assert path_of(saved, 5, 0).exists() and len(events) == 2
    held = {attempt_name(5, RUN): "loading"}
    prune(saved, KeepLast(3), locks=lambda: held)
    # it was held, and comes back
    assert committed(saved) == [20, 15, 10, 5]


# ---- the committer -------------------------------------------------------------------------------


def test_the_committer_never_considers_a_later_run_ended(saved):
    """The run started later: the listing of runs at the start says nothing about it."""
    write_rank(saved, 40, 0, 2, run=NEXT_RUN, suffix=1)
    Committer(rank_folders.target_of(saved, 0, 2), KeepLast(1)).prune()
    assert (
        path_of(saved, 40, 0, 1).exists() and (saved / FOLDER / attempt_name(40, NEXT_RUN)).exists()
    )


def test_a_pointer_that_may_not_be_read_stops_no_removal(tmp_path):
    for step in (5, 6, 7):
        save(tmp_path, step, world=1)

    private = failing(META, "open", number=errno.EACCES)
    made = plan(CheckpointDir(private, str(tmp_path)), KeepLast(1), {}, ended=EVERY_RUN)
    assert steps(made.to_delete) == [6, 5]


# ---- what cannot be read now ---------------------------------------------------------------------


def unreadable(names):
    """Reports EIO for files with one of ``names`` in their path, and folders of such a name."""

    def before(what, path):
        if (
            what == "open"
            and any(name in path for name in names)
            or what == "list"
            and os.path.basename(path) in names
        ):
            raise os_error(errno.EIO, path)

    return Hooked(before)


WEIGHTS, RECORDS = "-1_5.safetensors", f"{FOLDER}/{TRASH}"


@pytest.mark.parametrize(
    "names",
    [
        # neither the records nor the labels of the weights
        (RECORDS, WEIGHTS),
        # and not all saves are known, so the labels would have to decide
        (WEIGHTS, attempt_name(20, RUN)),
    ],
)
def test_a_removal_whose_files_cannot_be_told_from_others_is_postponed(saved, names):
    """Without its records nobody would ever find its weights: they would fill the disk."""
    made, events = planned(saved, KeepEverySteps(10)), []
    assert steps(made.to_delete) == [15, 5]
    carry_out(
        CheckpointDir(unreadable(names), str(saved)),
        Plan(to_delete=made.to_delete[1:]),
        emit=events.append,
    )
    assert path_of(saved, 5, 0).exists() and any(
        name.startswith(TRASH) for name in os.listdir(saved / FOLDER)
    )
    assert [type(event) for event in events] == [
        RemovalPostponed
    ] and "Input/output error" in events[0].reason
    carry_out(dir_at(saved), Plan())
    assert not path_of(saved, 5, 0).exists() and not any(
        name.startswith(TRASH) for name in os.listdir(saved / FOLDER)
    )
