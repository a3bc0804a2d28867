"""A training acquires its folder."""
import errno
import os
from dataclasses import replace

import iteration_folders
import pytest
from rank_folders import RUN, STORAGE, Ranks, folder_contents, target_of

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.common_checkpoint import COMMON, protected_by_peers, record
from mindresume.coordination.lease import record_run_number
from mindresume.coordination.peer_state import PeerState
from mindresume.coordination.storage_topology import SharedGroups, single_group
from mindresume.events import ignore
from mindresume.model.manifest import FOLDER, MANIFEST, attempt_name, run_sequence
from mindresume.resume.selection_policy import SelectionPolicy, every_rank
from mindresume.resume.shared_selection import select_shared
from mindresume.saving.save_session import SaveSession, open_save_session, publish_completed
from mindresume.storage.posix import PosixStorage


class Stuck(PosixStorage):
    def remove(self, path):
        if path.endswith(COMMON):
            raise OSError(errno.EIO, "Input/output error", path)
        super().remove(path)


def test_an_old_common_record_that_cannot_be_removed_is_kept_without_an_error(tmp_path):
    (tmp_path / ".mindresume").mkdir()
    record(STORAGE, str(tmp_path), "", RUN)
    for storage, there in ((Stuck(), [COMMON]), (STORAGE, [])):
        peer_state = PeerState(storage, str(tmp_path), RUN, single_group(2), 0)
        home = SaveSession(replace(target_of(tmp_path, 0, 2), storage=storage), 0, single_group(2), None, peer_state,
                           ignore)
        home.begin(None)
        assert [path.name for path in (tmp_path / ".mindresume").iterdir()] == there
    assert protected_by_peers(STORAGE, str(tmp_path)) == {}


def test_the_run_of_nodes_that_share_no_disk_is_later_than_all_at_another_place(tmp_path):
    """Both nodes restart with empty disks. A run with the number of the previous one counted as the older of two in half of the
    cases and then uploaded nothing."""
    roots = [str(tmp_path / "node0"), str(tmp_path / "node1")]

    def opened(group):
        root = roots[group.rank]
        session = open_save_session(STORAGE, root, "sim", group, ignore, 0.0, shared_groups={root: SharedGroups((0, 1))},
                                    number_runs=lambda storage, root: record_run_number(storage, root, "0007-1111aaaa"),
                                    leases={})
        session.release()
        return session.target.run
    first, second = Ranks(2).run(opened)
    assert first == second and run_sequence(first) == 8


# ---- a training that is complete -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("died", ["before the rename", "before the tracker", "before the manifest", "not at all"])
def test_the_last_step_of_a_training_that_is_complete_is_published(tmp_path, died):
    """mindformers alone, an evaluation and an export would take the step before for ever."""
    for step in (15, 20):
        iteration_folders.save(tmp_path, step)
    if died == "before the rename":
        iteration_folders.unname(tmp_path, 20)
    elif died == "before the manifest":
        os.remove(iteration_folders.unname(tmp_path, 20) / FOLDER / attempt_name(20, iteration_folders.RUN) / MANIFEST)
    if died != "not at all":
        iteration_folders.track(tmp_path, 15)
        iteration_folders.intend(tmp_path, 20)
    before = folder_contents(tmp_path)

    def start(group):
        choice = select_shared(STORAGE, str(tmp_path), group)
        publish_completed(STORAGE, choice, group, {}, 0.0, ignore)
        return choice.chosen.step
    assert Ranks(2).run(start) == [20, 20]
    assert (tmp_path / "iteration_00000020").is_dir() and iteration_folders.tracker(tmp_path) == "20"
    assert died != "not at all" or folder_contents(tmp_path) == before
    published = folder_contents(tmp_path)
    assert Ranks(2).run(start) == [20, 20] and folder_contents(tmp_path) == published


def test_a_complete_training_in_a_folder_that_nobody_can_write_is_complete(tmp_path):
    iteration_folders.save(tmp_path, 20)
    iteration_folders.unname(tmp_path, 20)

    class ReadOnly(PosixStorage):
        def make_folder(self, path):
            raise OSError(errno.EROFS, "Read-only file system", path)

        write = rename = make_folder
    events = []
    choice = select_shared(STORAGE, str(tmp_path), SingleProcess(), SelectionPolicy(ranks_to_verify=every_rank))
    publish_completed(ReadOnly(), choice, SingleProcess(), {}, 0.0, events.append)
    assert any("is complete, and not published now" in getattr(event, "text", "") for event in events)
