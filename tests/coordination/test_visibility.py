"""The selecting rank waits until it lists every checkpoint that another rank lists."""

import errno
import os
import shutil

import pytest
from iteration_folders import foreign, write_all
from iteration_folders import save as save_iteration
from rank_folders import STORAGE, Ranks, name_of, save, write_rank
from storages import Hooked, os_error

from mindresume import runtime
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import (
    PATIENCE,
    SharedGroups,
    Visibility,
    single_group,
    wait_until_visible,
)
from mindresume.formats.iterations import TRACKER, iteration_name
from mindresume.model.manifest import FOLDER, attempt_name, run_name
from mindresume.storage.posix import PosixStorage


def attempt(step, run=1):
    return attempt_name(step, run_name(run, "0000aaaa"))


class Late(PosixStorage):
    """A host that caches its first listing for ``seconds``. ``hidden``: by folder, names that are
    not in that listing. ``also`` is called each second."""

    def __init__(self, root=None, hidden=(), seconds=30, also=lambda now: None):
        self.now, self.seconds, self.also = 0.0, seconds, also
        self.hidden = {os.path.join(root, path) for path in hidden}

    def list(self, folder):
        if runtime.monotonic() >= self.now + 1:
            self.now = runtime.monotonic()
            self.also(self.now)
        names = super().list(folder)
        return (
            names
            if self.now >= self.seconds
            else [name for name in names if os.path.join(folder, name) not in self.hidden]
        )


def ask(root, late, ranks=3, late_ranks=(0,)):
    """Returns the result that all ranks get. ``late``: the storage of ``late_ranks``."""
    hosts = [late if rank in late_ranks else Late() for rank in range(ranks)]
    found = Ranks(ranks).run(
        lambda group: wait_until_visible(hosts[group.rank], str(root), group, single_group(ranks))
    )
    assert all(one == found[0] for one in found), found
    return found[0]


def waits(root, *hidden, **keys):
    """Returns whether the ranks wait until no name is hidden, and not longer."""
    return ask(root, Late(root, hidden), **keys) == Visibility(30)


def waits_for_nothing(root, **keys):
    return ask(root, Late(), **keys) == Visibility()


def test_nothing_is_waited_for_if_nothing_is_late(tmp_path):
    save(tmp_path, 5, 3)
    assert waits_for_nothing(tmp_path) and waits_for_nothing(tmp_path / "none")
    alone = wait_until_visible(STORAGE, str(tmp_path), SingleProcess(), single_group(1))
    assert alone == Visibility()
    # rank 0 would have begun afresh
    assert waits(tmp_path, FOLDER)


@pytest.mark.parametrize("name", ["", "/rank_00001.json", "/rank_00000.json", "/manifest.json"])
def test_a_complete_step_that_only_other_ranks_list_is_waited_for(tmp_path, name):
    """Rank 0 took step 5, after 0 seconds."""
    save(tmp_path, 5, 3)
    save(tmp_path, 10, 3)
    assert waits(tmp_path, f"{FOLDER}/{attempt(10)}{name}")
    # one rank lists it
    assert waits(tmp_path, f"{FOLDER}/{attempt(10)}{name}", late_ranks=(0, 1))


def test_a_save_that_never_completed_is_not_waited_for(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path, 5, rank, 3)
    assert waits_for_nothing(tmp_path)


def test_another_number_of_ranks_than_saved_it(tmp_path):
    save(tmp_path, 5, 4)
    assert waits_for_nothing(tmp_path, ranks=2)
    assert waits(tmp_path, f"{FOLDER}/{attempt(5)}", ranks=2)


def test_load_checkpoint_may_name_the_folder_of_a_rank(tmp_path):
    save(tmp_path, 5, 3)
    assert waits(tmp_path / "rank_0", tmp_path / FOLDER)


# ---- Checkpoint 2.0 ------------------------------------------------------------------------------


def test_an_unpublished_iteration_that_other_ranks_list_is_waited_for(tmp_path):
    save_iteration(tmp_path, 5)
    write_all(tmp_path, 10)
    name = attempt(10)
    assert waits_for_nothing(tmp_path, ranks=2)
    for late in (name, f"{name}/{FOLDER}/{name}/rank_00001.json"):
        assert waits(tmp_path, f"{FOLDER}/{late}", ranks=2)


def test_an_iteration_named_by_the_tracker_is_waited_for(tmp_path):
    save_iteration(tmp_path, 5, 10)
    assert waits(tmp_path, iteration_name(10), ranks=2, late_ranks=(0, 1))


# ---- checkpoints of mindformers alone ------------------------------------------------------------


def test_an_iteration_of_mindformers(tmp_path):
    foreign(tmp_path)
    for late in (iteration_name(15), f"{iteration_name(15)}/common.json", TRACKER):
        assert waits(tmp_path, late, ranks=2)


def test_rank_folders_of_mindformers(tmp_path):
    save(tmp_path, 5, 3)
    shutil.rmtree(tmp_path / FOLDER)
    assert waits_for_nothing(tmp_path)
    for late in ("rank_2", f"rank_1/{name_of(1, 5)}"):
        assert waits(tmp_path, late)


# ---- an end --------------------------------------------------------------------------------------


def test_the_wait_ends_when_no_listing_can_be_that_old(tmp_path):
    """The result names what is still not listed: rank, folder and the missing name."""
    save(tmp_path, 5, 3)
    save(tmp_path, 10, 3)
    found = ask(tmp_path, Late(tmp_path, [f"{FOLDER}/{attempt(10)}"], seconds=1e9))
    assert found.wait_seconds == PATIENCE
    assert f"{tmp_path}/{FOLDER}/{attempt(10)}/manifest.json" in found.missing[0]
    assert "rank 1" in found.missing[0] and "rank 0" in found.missing[0]


def test_a_checkpoint_removed_meanwhile_is_not_waited_for(tmp_path):
    save(tmp_path, 5, 3)
    save(tmp_path, 10, 3)
    late = Late(
        tmp_path,
        [f"{FOLDER}/{attempt(10)}"],
        1e9,
        also=lambda now: shutil.rmtree(tmp_path / FOLDER / attempt(10), True) if now >= 7 else None,
    )
    found = ask(tmp_path, late)
    # the others look before or after that
    assert found.missing == () and found.wait_seconds in (7, 8)


def test_a_host_that_cannot_list_for_a_moment(tmp_path):
    def stale(operation, path):
        if runtime.monotonic() < 5 and operation in ("list", "status"):
            raise os_error(errno.ESTALE, path)

    save(tmp_path, 5, 3)
    assert ask(tmp_path, Hooked(stale)) == Visibility(5)


# ---- nodes that share no disk --------------------------------------------------------------------


def test_each_node_waits_only_for_its_own_ranks(tmp_path):
    """Ranks 0 and 1 have nothing; of 2 and 3, which share a disk, one lists late."""
    (tmp_path / "a").mkdir()
    save(tmp_path / "b", 5, 4)
    shared_groups, late = SharedGroups((0, 0, 2, 2)), Late(tmp_path / "b", [FOLDER])
    hosts = [Late(), Late(), Late(), late]
    found = Ranks(4).run(
        lambda group: wait_until_visible(
            hosts[group.rank], str(tmp_path / "aabb"[group.rank]), group, shared_groups
        )
    )
    assert found == [Visibility(30)] * 4
