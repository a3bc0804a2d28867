"""A training acquires its folder."""

import errno
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rank_folders import RUN, STORAGE, Ranks, dir_at, target_of
from storages import Hooked, failing, os_error

from mindresume.coordination.storage_topology import (
    NEWEST_COMMON,
    PeerState,
    SharedGroups,
    protected_by_peers,
    record_common,
    single_group,
)
from mindresume.errors import SaveError
from mindresume.events import ignore
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, run_sequence
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.save_session import SaveSession, check_directory, open_save_session
from mindresume.storage.posix import PosixStorage


def test_an_old_common_record_that_cannot_be_removed_is_kept_without_an_error(tmp_path):
    (tmp_path / ".mindresume").mkdir()
    record_common(CheckpointDir(STORAGE, str(tmp_path)), "", RUN)
    for storage, there in ((failing(NEWEST_COMMON, "remove"), [NEWEST_COMMON]), (STORAGE, [])):
        peer_state = PeerState(CheckpointDir(storage, str(tmp_path)), RUN, single_group(2), 0)
        home = SaveSession(
            replace(target_of(tmp_path, 0, 2), storage=storage),
            0,
            single_group(2),
            None,
            peer_state,
            ignore,
        )
        home.begin(None)
        assert [path.name for path in (tmp_path / ".mindresume").iterdir()] == there
    assert protected_by_peers(dir_at(tmp_path)) == {}


def test_the_run_of_nodes_that_share_no_disk_is_later_than_all_at_another_place(tmp_path):
    """Both nodes restart with empty disks. A run with the number of the previous one counted as the
    older of two in half of the cases and then uploaded nothing."""
    roots = [str(tmp_path / "node0"), str(tmp_path / "node1")]

    def opened(group):
        root = roots[group.rank]
        session = open_save_session(
            STORAGE,
            SaveOptions(root, "sim"),
            group,
            ignore,
            0.0,
            shared_groups={root: SharedGroups((0, 1))},
            in_memory="0007-1111aaaa",
            leases={},
        )
        session.release()
        return session.target.run

    first, second = Ranks(2).run(opened)
    assert first == second and run_sequence(first) == 8


def test_a_bucket_that_one_node_alone_knows_numbers_the_run_of_all(tmp_path):
    """The environment of a node decides whether its ranks have a bucket; all ranks exchange the
    same messages."""
    remote = SimpleNamespace(scan=lambda: SimpleNamespace(runs=lambda: ["0007-1111aaaa"]))

    def opened(group):
        session = open_save_session(
            STORAGE,
            SaveOptions(str(tmp_path), "sim"),
            group,
            ignore,
            0.0,
            shared_groups={str(tmp_path): single_group(2)},
            remote=remote if group.rank == 0 else None,
            leases={},
        )
        session.release()
        return session.target.run

    first, second = Ranks(2).run(opened)
    assert first == second and run_sequence(first) == 8


# ---- a folder that cannot hold checkpoints is refused before the training -----------------------


def test_a_good_folder_is_left_as_it_was(tmp_path):
    check_directory(CheckpointDir(PosixStorage(), str(tmp_path / "output" / "checkpoint")))
    assert os.listdir(tmp_path / "output" / "checkpoint" / FOLDER) == []


NAMES = ["probe-0123abcd", "probe-0123abcd-4096", ".probe-0123abcd-4096.0123abcd.mindresume-tmp"]


def left(folder, names, seconds):
    """Creates the files of a job killed ``seconds`` ago, by the clock of the file system."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
        now = (folder / name).stat().st_mtime
        os.utime(folder / name, (now - seconds, now - seconds))


def test_old_probes_of_dead_jobs_are_removed_and_those_of_possibly_running_jobs_are_kept(tmp_path):
    left(tmp_path / FOLDER, NAMES, 3700)
    left(
        tmp_path / FOLDER,
        ["claim-0001-0123abcd.json", "tracker-0000000004", ".x.0123abcd.mindresume-tmp"],
        1e6,
    )
    left(tmp_path / FOLDER, [name.replace("0123abcd", "beef0000") for name in NAMES], 3500)
    check_directory(CheckpointDir(PosixStorage(), str(tmp_path)))
    assert sorted(os.listdir(tmp_path / FOLDER)) == [
        ".probe-beef0000-4096.beef0000.mindresume-tmp",
        ".x.0123abcd.mindresume-tmp",
        "claim-0001-0123abcd.json",
        "probe-beef0000",
        "probe-beef0000-4096",
        "tracker-0000000004",
    ]


def test_an_old_probe_that_cannot_be_removed_stops_no_job(tmp_path):
    def before(operation, path):
        if (operation, os.path.basename(path)) in (("remove", NAMES[0]), ("status", NAMES[1])):
            raise os_error(errno.ESTALE, path)

    left(tmp_path / FOLDER, NAMES, 3700)
    check_directory(CheckpointDir(Hooked(before), str(tmp_path)))
    assert sorted(os.listdir(tmp_path / FOLDER)) == NAMES[:2]


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(
        SaveError,
        match="making a folder failed: Not a directory|making a folder failed: File exists",
    ):
        check_directory(CheckpointDir(PosixStorage(), str(tmp_path / "checkpoint")))


@pytest.mark.parametrize(
    "operation, named",
    [
        ("make_folder", "making a folder"),
        ("write", "writing and flushing a file"),
        ("open", "reading it back"),
        ("rename", "renaming a file over another one"),
        ("sync", "flushing the folders above"),
        ("list", "listing the folder"),
        ("remove", "removing a file"),
    ],
)
def test_the_operation_that_fails_is_named(tmp_path, operation, named):
    (tmp_path / FOLDER).mkdir()
    storage = failing("", operation, number=errno.EROFS)
    with pytest.raises(
        SaveError,
        match=f"cannot hold checkpoints: {named} failed: Read-only file system.*output_dir",
    ):
        check_directory(CheckpointDir(storage, str(tmp_path)))


def test_a_rename_that_does_not_replace(tmp_path):
    storage = PosixStorage()
    storage.rename = lambda old, new: None
    with pytest.raises(SaveError, match="reads b'one' after b'two' was written"):
        check_directory(CheckpointDir(storage, str(tmp_path)))
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_rename_that_copies(tmp_path):
    storage = PosixStorage()
    storage.rename = lambda old, new: storage.write(new, [b"two"])
    with pytest.raises(SaveError, match="still listed after it was renamed"):
        check_directory(CheckpointDir(storage, str(tmp_path)))


def test_a_folder_above_that_cannot_be_opened(tmp_path):
    """The parent existed before: its name needs no flush. Folders created below are still
    flushed."""
    (tmp_path / "checkpoint").mkdir()
    storage = failing(tmp_path.name, "sync", number=errno.EACCES)
    check_directory(CheckpointDir(storage, str(tmp_path / "checkpoint")))
    assert ("sync", str(tmp_path)) in storage.asked
