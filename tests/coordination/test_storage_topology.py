"""Which ranks share a folder, and which checkpoint all nodes have. A node is a folder here."""

import errno
import io
import os
from dataclasses import replace

import pytest
from lease_holders import publish_lease
from rank_folders import EVERY_RUN, STORAGE, Ranks, dir_at, save, target_of, write_rank
from storages import Hooked, os_error

from mindresume import runtime
from mindresume.coordination import storage_topology
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import (
    LOOKS,
    NEWEST_COMMON,
    PATIENCE,
    SharedGroups,
    check_not_shared,
    clear_common,
    find_shared_groups,
    newest_committed,
    newest_common,
    next_common_run,
    order_of,
    protected_by_peers,
    record_common,
    single_group,
)
from mindresume.errors import CollectiveError, LeaseHeldError, RecordError
from mindresume.formats import CheckpointDir
from mindresume.formats.records import scan_records
from mindresume.formats.scan import scan
from mindresume.model.manifest import (
    FOLDER,
    Manifest,
    attempt_name,
    encode_head,
    read_head,
    read_record,
    record_name,
    run_name,
)
from mindresume.resume.eligible import check_files
from mindresume.saving.committer import Committer
from mindresume.saving.garbage_collector import carry_out
from mindresume.saving.retention import KeepLast, plan
from mindresume.saving.shard_writer import SaveTarget
from mindresume.storage.posix import PosixStorage

RUN, LATER = run_name(1, "0000aaaa"), run_name(2, "0000bbbb")


def look(tmp_path, nodes, storages=(STORAGE,) * 4):
    """Returns what each rank finds. ``nodes``: by rank, the name of its folder."""
    for name in nodes:
        (tmp_path / name).mkdir(exist_ok=True)
    return Ranks(len(nodes)).run(
        lambda group: find_shared_groups(
            CheckpointDir(storages[group.rank], str(tmp_path / nodes[group.rank])), group
        )
    )


def is_empty(tmp_path, nodes):
    return not any(os.listdir(tmp_path / name) for name in nodes)


@pytest.mark.parametrize(
    "nodes, leaders",
    [
        ("aaaa", (0, 0, 0, 0)),
        ("aabb", (0, 0, 2, 2)),
        ("abab", (0, 1, 0, 1)),
        ("abcd", (0, 1, 2, 3)),
        ("abbc", (0, 1, 1, 3)),
    ],
)
def test_ranks_that_see_a_probe_file_share_a_group(tmp_path, nodes, leaders):
    found = look(tmp_path, nodes)
    shared_groups = found[0]
    assert found == [SharedGroups(leaders)] * 4 and is_empty(tmp_path, nodes)
    assert shared_groups.is_split is (len(set(nodes)) > 1)
    for rank, name in enumerate(nodes):
        assert [nodes[other] for other in shared_groups.ranks(rank)] == [name] * nodes.count(name)
        assert shared_groups.is_leader(rank) is (nodes.index(name) == rank)
    assert shared_groups.of_leaders(list(nodes)) == sorted(set(nodes))


def test_other_machines_that_see_the_same_folder(tmp_path, monkeypatch):
    """The folder is mounted under another name on another host: a probe file decides, not the
    path."""
    (tmp_path / "shared").mkdir()
    for name in "ab":
        os.symlink(tmp_path / "shared", tmp_path / name)
    monkeypatch.setattr(os.path, "realpath", lambda path: str(path))
    assert look(tmp_path, "aabb") == [single_group(4)] * 4 and is_empty(tmp_path, ["shared"])


class Late(PosixStorage):
    """A host that lists files of other hosts only after ``seconds``, and with ``by_name`` finds
    them by name as late. ``now``: when its ranks looked last."""

    def __init__(self, seconds, by_name=True):
        self.now, self.seconds, self.by_name, self.mine = 0.0, seconds, by_name, set()

    def rename(self, old, new):
        self.mine.add(os.path.basename(new))
        super().rename(old, new)

    def _hidden(self, name):
        return name.startswith("probe-") and name not in self.mine and self.now < self.seconds

    def list(self, folder):
        self.now = runtime.monotonic()
        return [name for name in super().list(folder) if not self._hidden(name)]

    def status(self, path):
        return (
            None if self.by_name and self._hidden(os.path.basename(path)) else super().status(path)
        )


def looked_from(tmp_path, hosts, local=False):
    """Returns the groups that two ranks on each host find in one folder."""

    def work(group):
        host = hosts[group.rank // 2]
        return find_shared_groups(CheckpointDir(host, str(tmp_path)), group)

    names_of_hosts = [f"node{rank // 2}" for rank in range(2 * len(hosts))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_topology, "is_local", lambda path: local)
        (leaders,) = {one.leaders for one in Ranks(len(names_of_hosts), names_of_hosts).run(work)}
    assert os.listdir(tmp_path) == []
    return leaders


@pytest.mark.parametrize("seconds, by_name", [(30, True), (60, True), (1e9, False)])
def test_a_shared_folder_that_a_host_lists_late(tmp_path, seconds, by_name):
    """The folder counted as node-local, and two leaders wrote one manifest."""
    hosts = [Late(seconds, by_name), Late(seconds, by_name)]
    assert looked_from(tmp_path, hosts) == (0, 0, 0, 0)
    assert all(host.now <= min(seconds, PATIENCE) for host in hosts) and (
        by_name or not hosts[0].now
    )


def test_a_listing_that_is_too_old_leaves_no_folder(tmp_path):
    """Both hosts still list what the other has removed. The folder of records stayed in an
    unrelated folder, which then counted as a checkpoint directory, and the training started
    afresh."""

    class Old(PosixStorage):
        shown: set = set()

        def list(self, folder):
            names = super().list(folder)
            self.shown |= {name for name in names if name.startswith("probe-")}
            return sorted({*names, *self.shown}) if folder.endswith(FOLDER) else names

    assert looked_from(tmp_path, [Old(), Old()]) == (0, 0, 0, 0)


def test_one_sighting_is_enough_for_a_shared_group(tmp_path):
    hosts = [Late(1e9), Late(0), Late(1e9)]
    assert looked_from(tmp_path, hosts) == (0,) * 6 and not any(host.now for host in hosts)


@pytest.mark.parametrize("local, looks", [(False, PATIENCE), (True, LOOKS)])
def test_nodes_without_shared_storage_wait_for_a_limited_time(tmp_path, local, looks):
    hosts = [Late(1e9), Late(1e9)]
    assert looked_from(tmp_path, hosts, local) == (0, 0, 2, 2)
    assert [host.now for host in hosts] == [looks - 1] * 2


def test_an_error_leaves_no_probe_files(tmp_path):
    errors = [os_error(errno.EIO)]

    def fail(operation, path):
        if operation == "list" and path.endswith(FOLDER) and errors:
            raise errors.pop()

    for error in look(tmp_path, "aa", (STORAGE, Hooked(fail))):
        assert isinstance(error, CollectiveError) and "rank 1: OSError" in str(error)
    assert is_empty(tmp_path, "a")


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_probe_files_of_a_job_killed_long_ago_are_removed(tmp_path, nodes):
    """They are removed also in a folder in which no job saves and which no preflight checks."""
    old, new = "probe-0123abcd-0", "probe-beef0000-0"
    for name in set(nodes):
        (tmp_path / name / FOLDER).mkdir(parents=True)
        for probe in (old, f".{old}.0123abcd.mindresume-tmp", new):
            (tmp_path / name / FOLDER / probe).write_bytes(b"")
            now = (tmp_path / name / FOLDER / probe).stat().st_mtime
            os.utime(tmp_path / name / FOLDER / probe, (now, now - 3700 * ("0123abcd" in probe)))
    found = look(tmp_path, nodes)
    assert [one.is_split for one in found] == [nodes == "ab"] * 2
    assert all(os.listdir(tmp_path / name / FOLDER) == [new] for name in nodes)


def test_an_interrupted_wait_leaves_no_probe_files(tmp_path, monkeypatch):
    def sleep(seconds):
        raise RuntimeError("interrupted")

    monkeypatch.setattr(runtime, "sleep", sleep)
    assert [str(error) for error in look(tmp_path, "ab")] == ["interrupted"] * 2
    assert is_empty(tmp_path, "ab")


def test_a_single_process_needs_no_probe_and_an_unwritable_folder_is_an_error(tmp_path):
    assert find_shared_groups(dir_at(tmp_path / "nowhere"), SingleProcess()) == single_group(1)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / FOLDER).write_text("x")
    assert all(isinstance(error, CollectiveError) for error in look(tmp_path, "aa"))


def test_the_next_run_is_later_than_all_on_any_node(tmp_path):
    for name, run in (("a", run_name(3, "0000aaaa")), ("b", run_name(7, "0000bbbb"))):
        (tmp_path / name / FOLDER / attempt_name(5, run)).mkdir(parents=True)
    found = Ranks(4).run(
        lambda group: next_common_run(dir_at(tmp_path / "aabb"[group.rank]), group)
    )
    assert len(set(found)) == 1 and found[0].startswith("0008-")


def test_two_leaders_of_one_folder_find_each_other(tmp_path):
    """Whatever went wrong in the exchange of probe files: one of them reads the other's lease
    before the first step."""
    mine = publish_lease(tmp_path)
    theirs = publish_lease(tmp_path, replace(mine.holder, host="node7", pid=7))
    check_not_shared(theirs)
    with pytest.raises(LeaseHeldError, match="host node7 and host .* find each other"):
        check_not_shared(mine)
    mine.publish()
    check_not_shared(mine)


# ---- a node commits its part ---------------------------------------------------------------------


def candidate_at(root):
    (found,) = scan(dir_at(root)).candidates
    return found


def save_part(
    root, step, ranks=(2, 3), world=4, run=RUN, policy=None, commit=True, with_local_ranks=True
):
    """Saves a part of the ranks. ``with_local_ranks``: records list the ranks that share the
    folder; earlier versions did not."""
    for rank in ranks:
        write_rank(root, step, rank, world, run, local_ranks=ranks if with_local_ranks else ())
    target = SaveTarget(STORAGE, str(root), run, ranks[0], world, local_ranks=tuple(ranks))
    committer = Committer(target, policy or KeepLast(99))
    if commit:
        committer.poll(step)
        assert committer.pending == []
    return committer


def test_the_merged_parts_of_all_nodes_are_complete(tmp_path):
    """A user copies the folders into one: the manifest of the last node remains."""
    save_part(tmp_path, 5, (0, 1))
    save_part(tmp_path, 5, (2, 3))
    found = scan(dir_at(tmp_path)).candidates[0]
    assert (found.local_ranks, sorted(found.files), found.problem) == ((), [0, 1, 2, 3], None)
    assert check_files(dir_at(tmp_path), found, 4) is None
    assert Committer(target_of(tmp_path, 0, 4, LATER)).recover() == [5]
    assert scan(dir_at(tmp_path)).candidates[0].committed


@pytest.mark.parametrize(
    "ranks, with_local_ranks, is_torn, said",
    [
        ((2,), True, False, "1 of 2 ranks recorded what they wrote, missing: rank 3"),
        # the save may have been complete, so nothing of it is removed
        ((2, 3), True, True, "the record of rank 3 cannot be read"),
        # records of earlier versions
        ((2, 3), False, False, "2 of 4 ranks recorded what they wrote, missing: rank 0, 1"),
    ],
)
def test_a_node_without_all_records_of_its_ranks_has_no_part(
    tmp_path, ranks, with_local_ranks, is_torn, said
):
    for rank in ranks:
        write_rank(tmp_path, 5, rank, 4, local_ranks=(2, 3) if with_local_ranks else ())
    if is_torn:
        (tmp_path / FOLDER / attempt_name(5, RUN) / record_name(3)).write_bytes(b"")
    for brief in (False, True):
        (found,) = scan_records(dir_at(tmp_path), brief=brief)[0]
        assert said in found.problem.reason
        assert (found.local_ranks, found.maybe_completed) == ((), is_torn)


def test_the_merged_records_of_some_nodes_are_the_parts_of_these_nodes(tmp_path):
    for ranks in ((4, 5), (0, 1), (2, 3)):
        found = scan(dir_at(tmp_path)).candidates
        save_part(tmp_path, 5, ranks, world=6, commit=False)
        assert len(found) == (ranks != (4, 5))
    assert [c.local_ranks for c in found] == [(0, 1, 4, 5)] and found[0].problem is None
    whole = candidate_at(tmp_path)
    assert whole.local_ranks == () and check_files(dir_at(tmp_path), whole, 6) is None


@pytest.mark.parametrize("part", [[2, 2], [-1, 2], [0, 1, 2, 3], [0, 3]])
def test_a_record_or_manifest_of_an_impossible_part(tmp_path, part):
    save_part(tmp_path, 5)
    folder = tmp_path / FOLDER / attempt_name(5, RUN)
    for name, kind, read in (
        (record_name(2), "record", read_record),
        ("manifest.json", "manifest", Manifest.read),
    ):
        with open(folder / name, "rb") as file:
            head, _ = read_head(file, kind)
        assert head["part"] == ([[2, 3]] if kind == "record" else [2, 3])
        with pytest.raises(RecordError, match="part|rank"):
            read(io.BytesIO(encode_head({**head, "part": part})))


# ---- the common step is kept ---------------------------------------------------------------------


def names(*steps, run=RUN):
    return [attempt_name(step, run) for step in steps]


def test_the_newest_step_that_all_nodes_have_is_recorded():
    (later,) = names(5, run=LATER)
    for rows, common in (
        ([names(20, 15, 10), names(15, 10), names(25, 15)], *names(15)),
        ([[later, *names(20)], [*names(20), later]], later),
    ):
        assert newest_common(rows) == common
    for rows in ([names(20), names(15)], [], [names(5), []]):
        assert newest_common(rows) == ""


def test_a_node_that_is_ahead_keeps_the_common_step(tmp_path):
    """Only this node reached step 25, and its policy keeps one."""
    for step in (5, 10):
        save_part(tmp_path, step)
    record_common(dir_at(tmp_path), names(10)[0], RUN)
    for step in (15, 20, 25):
        save_part(tmp_path, step, policy=KeepLast(1))
    assert newest_committed(dir_at(tmp_path)) == names(25, 20, 15, 10)
    record_common(dir_at(tmp_path), names(20)[0], RUN)
    save_part(tmp_path, 30, policy=KeepLast(1))
    assert newest_committed(dir_at(tmp_path)) == names(30, 25, 20)
    clear_common(dir_at(tmp_path))
    clear_common(dir_at(tmp_path))  # twice is once
    save_part(tmp_path, 35, policy=KeepLast(1))
    assert newest_committed(dir_at(tmp_path)) == names(35)


def test_an_incomplete_save_newer_than_the_common_step_is_removed(tmp_path):
    save_part(tmp_path, 5)
    record_common(dir_at(tmp_path), names(5)[0], RUN)
    write_rank(tmp_path, 10, 2, 4, local_ranks=(2, 3))
    save_part(tmp_path, 15, commit=False)
    for over in (False, True):
        made = plan(dir_at(tmp_path), KeepLast(1), ended=EVERY_RUN if over else ())
        assert [c.step for c in made.orphans] == ([10] if over else []) and made.to_delete == ()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff"])
def test_nothing_is_removed_if_the_common_step_is_unknown(tmp_path, content):
    for step in (5, 10):
        save_part(tmp_path, step)
    (tmp_path / FOLDER / NEWEST_COMMON).write_bytes(content)
    assert set(protected_by_peers(dir_at(tmp_path))) == set(names(5, 10))
    made = plan(dir_at(tmp_path), KeepLast(1))
    assert carry_out(dir_at(tmp_path), made) == []
    assert "share no disk" in made.reasons[made.kept[1].commit_dir]


def test_a_shared_folder_has_no_record_of_a_common_step(tmp_path):
    save(tmp_path, 5)
    assert protected_by_peers(dir_at(tmp_path)) == {} and order_of(attempt_name(5, RUN)) == (1, 5)
    assert SharedGroups((0, 0)).is_split is False


def test_a_step_of_one_node_does_not_count_in_merged_folders_of_nodes(tmp_path):
    for rank, part in ((0, (0, 1)), (1, (0, 1)), (2, (2, 3)), (3, (2, 3))):
        write_rank(tmp_path, 10, rank, 4, local_ranks=part)
    Committer(target_of(tmp_path, 0, 4)).poll(10)
    for rank in (0, 1):
        write_rank(tmp_path, 20, rank, 4, local_ranks=(0, 1))
    assert Committer(target_of(tmp_path, 0, 4, run_name(2, "0000bbbb"))).recover() == []
    Committer(target_of(tmp_path, 0, 4, RUN, (0, 1))).poll(20)  # it had done that before
    found = scan(dir_at(tmp_path)).candidates
    assert [(c.step, c.committed, c.local_ranks) for c in found] == [
        (20, True, (0, 1)),
        (10, True, ()),
    ]
    made = plan(dir_at(tmp_path), KeepLast(1), {}, ended=EVERY_RUN)
    assert (
        made.to_delete == () and made.reasons[found[1].commit_dir] == "the newest one of all ranks"
    )
