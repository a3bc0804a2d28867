"""A training acquires its folder."""

import errno
from dataclasses import replace
from types import SimpleNamespace

from rank_folders import RUN, STORAGE, Ranks, dir_at, target_of

from mindresume.coordination.storage_topology import (
    COMMON,
    PeerState,
    SharedGroups,
    protected_by_peers,
    record_common,
    single_group,
)
from mindresume.events import ignore
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import run_sequence
from mindresume.saving.save_policy import SaveOptions
from mindresume.saving.save_session import SaveSession, open_save_session
from mindresume.storage.posix import PosixStorage


class Stuck(PosixStorage):
    def remove(self, path):
        if path.endswith(COMMON):
            raise OSError(errno.EIO, "Input/output error", path)
        super().remove(path)


def test_an_old_common_record_that_cannot_be_removed_is_kept_without_an_error(tmp_path):
    (tmp_path / ".mindresume").mkdir()
    record_common(CheckpointDir(STORAGE, str(tmp_path)), "", RUN)
    for storage, there in ((Stuck(), [COMMON]), (STORAGE, [])):
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
