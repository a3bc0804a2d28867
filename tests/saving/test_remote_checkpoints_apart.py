"""Nodes without shared storage, and an object store: each node commits its own part, the store has
the whole checkpoint; a node that restarts with an empty disk downloads its part. Ranks 0 and 1 are
on one node, 2 and 3 on the other."""

import os
import shutil

import pytest
from coordination.test_storage_topology import RUN, save_part
from rank_folders import STORAGE, Ranks, flip_bit, path_of
from resume.test_node_local_selection import NODES, PARTS
from storages import moxing_store

from mindresume import runtime
from mindresume.coordination import liveness
from mindresume.coordination.storage_topology import PeerState, SharedGroups, newest_committed
from mindresume.errors import NoUsableCheckpointError
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, attempt_name, parse_attempt
from mindresume.resume import bucket_source
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources
from mindresume.saving import upload
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, RunStatus
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import SaveTarget
from mindresume.saving.upload import Uploader, Uploads
from mindresume.storage.read_cache import ReadCache
from sim import machine
from sim.cluster import current_process

URL = "obs://bucket/job/checkpoint"
GROUPS = SharedGroups((0, 0, 2, 2))


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # nothing here loses its power
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))


def remote():
    return RemoteCheckpoints(moxing_store(), URL)


def targets(tmp_path):
    return [
        SaveTarget(
            STORAGE, str(tmp_path / NODES[rank]), RUN, rank, 4, local_ranks=PARTS[NODES[rank]]
        )
        for rank in range(4)
    ]


def save(tmp_path, time, *steps, late=()):
    """Saves on both nodes, and uploads; ``late``: ranks that do not upload."""

    def also(now):
        for other in uploaders[1:]:
            if other.uploads.target.rank not in late:
                other.work()

    time.also = also
    uploaders = [Uploader(Uploads(remote(), target, None, 60.0)) for target in targets(tmp_path)]
    for step in steps:
        for node, ranks in PARTS.items():
            save_part(tmp_path / node, step, ranks)
        for uploader in uploaders:
            uploader.queue.enqueue(step)
        uploaders[0].work()
    return uploaders


def resume(tmp_path, storage=lambda: STORAGE, hosts=()):
    def one(group):
        root, own = str(tmp_path / NODES[group.rank]), storage()
        sources = CheckpointSources(
            shared=GROUPS, saved_to={os.path.realpath(root)}, remote=remote()
        )
        return select_checkpoint(own, root, group, SelectionPolicy(4), sources)

    found = Ranks(4, hosts).run(one)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def test_each_node_needs_room_for_its_own_part_whatever_its_name(tmp_path, clock, monkeypatch):
    """All hosts have one name here, as nodes that nobody has named."""
    save(tmp_path, clock, 5)
    manifest, _ = remote().manifest(remote().scan().committed()[0])
    parts = [sum(file.size for file in files) for files in manifest.files]
    for node in PARTS:
        shutil.rmtree(tmp_path / node)
    monkeypatch.setattr(bucket_source, "_SPARE", 0)
    monkeypatch.setitem(machine.ANSWERS, runtime.gethostname, lambda: "localhost")
    monkeypatch.setattr(liveness, "boot_id", lambda: current_process().host.name)
    for room, fits in (
        (max(sum(parts[:2]), sum(parts[2:])), True),
        (min(sum(parts[:2]), sum(parts[2:])) - 1, False),
    ):
        monkeypatch.setattr(type(STORAGE), "free_space", lambda self, folder, room=room: room)
        if fits:
            assert {choice.chosen.step for choice in resume(tmp_path, hosts=NODES)} == {5}
            for node in PARTS:
                shutil.rmtree(tmp_path / node)
        else:
            with pytest.raises(NoUsableCheckpointError, match="on the host of rank 0 has room for"):
                resume(tmp_path, hosts=NODES)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_node_with_an_empty_disk_gets_its_part_again(tmp_path, clock, lost):
    save(tmp_path, clock, 5, 10)
    shutil.rmtree(tmp_path / lost)
    found = resume(tmp_path)
    assert [choice.chosen.step for choice in found] == [10] * 4
    for rank, choice in enumerate(found):
        assert [shard.rank for shard in choice.shards] == [rank]
        assert choice.shards[0].details.random == {"python": f"of rank {rank}"}
    names = {path.name for path in (tmp_path / lost).glob("rank_*")}
    assert names == {f"rank_{rank}" for rank in PARTS[lost]} and newest_committed(
        CheckpointDir(STORAGE, str(tmp_path / lost))
    )


def test_a_replaced_damaged_file_is_read_again(tmp_path, clock):
    """Although every file that was read completely is cached in memory."""
    save(tmp_path, clock, 5, 10)
    flip_bit(path_of(tmp_path / NODES[1], 10, 1))
    assert [
        choice.chosen.step for choice in resume(tmp_path, lambda: ReadCache(STORAGE, 1 << 30))
    ] == [10] * 4


def test_a_step_of_one_node_alone_is_downloaded_if_the_store_has_it_completely(tmp_path, clock):
    save(tmp_path, clock, 5, 10)
    name = newest_committed(CheckpointDir(STORAGE, str(tmp_path / "b")))[0]
    shutil.rmtree(tmp_path / "b" / ".mindresume" / name)
    assert [choice.chosen.step for choice in resume(tmp_path)] == [10] * 4


def test_no_complete_checkpoint_anywhere_is_an_error(tmp_path, clock):
    save(tmp_path, clock, 5, late=(2,))
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(NoUsableCheckpointError):
        resume(tmp_path)


# ---- retention of one node, and uploads of the other ---------------------------------------------


def steps_of(names):
    return [parse_attempt(name)[0] for name in names]


class Training:
    """Two nodes that each keep one checkpoint; the ranks exchange their steps after each save. Time
    advances when a rank waits, and the training then continues: ``slow`` saves until the other
    ranks have uploaded something."""

    def __init__(self, tmp_path, time, slow=5):
        self.base, self.time, self.slow, self.step, self.events = tmp_path, time, slow, 0, []
        time.also = self.go_on
        self.places = targets(tmp_path)
        self.uploaders = [
            Uploader(Uploads(remote(), target, None, 60.0, self.events.append, True))
            for target in self.places
        ]
        for uploader in self.uploaders:
            uploader.queue.changed.wait = self.wait
        self.exchanges = [
            PeerState(CheckpointDir(STORAGE, target.root), RUN, GROUPS, target.rank, uploader.queue)
            for target, uploader in zip(self.places, self.uploaders, strict=True)
        ]
        for peer_state in self.exchanges:
            STORAGE.make_folder(peer_state.directory.path(FOLDER))
            peer_state.record("")

    def save(self, *nodes):
        self.step += 5
        for node in nodes or PARTS:
            save_part(self.base / node, self.step, PARTS[node], policy=KeepLast(1))
            for rank in PARTS[node]:
                self.uploaders[rank].queue.enqueue(self.step)

    def peer_state(self):
        rows = [peer_state.local_state() for peer_state in self.exchanges]
        for peer_state in self.exchanges:
            peer_state.on_peer_state(rows)

    def go_on(self, now):
        """Rank 0 waits for the others."""
        self.save()
        self.peer_state()
        if self.step // 5 % self.slow == 0:
            self.turns(1, 2, 3)

    def stop(self):
        """Pauses or ends the training; rank 0 waits nevertheless."""
        self.time.also = lambda now: self.turns(1, 2, 3)

    def wait(self, seconds):
        self.time.now += 1
        self.stop()
        self.turns(0, 1, 2, 3)

    def turns(self, *ranks):
        for rank in ranks:
            if not self.uploaders[rank].queue.finished:
                self.uploaders[rank].run_once()

    def on_disk(self, node):
        return steps_of(newest_committed(CheckpointDir(STORAGE, str(self.base / node))))

    def finish(self):
        """Finishes on all ranks. Returns the errors."""
        for uploader in self.uploaders:
            uploader.queue.closing = True
        return [str(error) for uploader in self.uploaders for error in uploader.queue.finish(600)]

    def errors(self):
        return [str(error) for uploader in self.uploaders for error in uploader.queue.poll()]


def in_bucket():
    return steps_of(remote().scan().committed())


@pytest.mark.parametrize("slow", [1, 3, 8])
def test_an_announced_step_is_kept_on_all_nodes_until_it_is_uploaded(tmp_path, clock, slow):
    """Uploads are slower than keep_checkpoint_max saves."""
    job = Training(tmp_path, clock, slow)
    for _ in range(4):
        job.save()
        job.peer_state()
        job.turns(0)
        assert in_bucket() and job.errors() == []
        # the newest, the common one, the one that is uploaded
        assert all(len(job.on_disk(node)) <= 3 for node in PARTS)
    assert job.finish() == []
    assert in_bucket()[0] == job.step
    assert not [path for node in PARTS for path in (tmp_path / node / FOLDER).glob("claim-*")]


def test_only_a_step_that_all_nodes_have_is_announced(tmp_path, clock):
    job = Training(tmp_path, clock, 1)
    job.save()
    job.save("a")
    job.turns(0)
    assert in_bucket() == [] and remote().read_status(RUN) == RunStatus(
        None, False
    )  # no common step is announced
    job.peer_state()
    job.stop()
    job.turns(0)
    assert in_bucket() == [5] and job.uploaders[0].queue.ready()
    job.peer_state()
    job.turns(0)
    assert in_bucket() == [5] and job.errors() == []


def test_a_lost_part_is_reported_at_once_and_the_next_step_is_uploaded(tmp_path, clock):
    job = Training(tmp_path, clock, 1)
    job.save()
    job.peer_state()
    shutil.rmtree(tmp_path / "b" / FOLDER / attempt_name(5, RUN))  # by hand
    job.turns(0)
    assert in_bucket() == [] and job.time.now < 10
    first, *others = job.errors()
    assert "step 5 is given up: the part of rank 2 is not on its disk any more" in first
    assert [
        f"the part of rank {rank} is not on its disk any more" in text
        for rank, text in zip((2, 3), others, strict=True)
    ]
    job.save()
    job.peer_state()
    job.turns(0)
    assert in_bucket()[0] >= 10 and attempt_name(5, RUN) not in remote().scan().objects


def test_the_newest_common_step_is_uploaded_at_the_end(tmp_path, clock):
    """The other node did not save the last one."""
    job = Training(tmp_path, clock)
    job.save()
    job.peer_state()
    job.save("a")
    errors = job.finish()
    assert in_bucket() == [5] and job.time.now < 10
    assert any("step 10 is given up: the part of rank 2 was not saved" in text for text in errors)
    assert any(
        "step 10 is not complete in obs://bucket/job/checkpoint: rank 0" in text for text in errors
    )


def test_a_disk_without_read_locks_is_reported(tmp_path, clock, monkeypatch):
    job = Training(tmp_path, clock, 1)
    job.save()

    def refuse(*args):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(upload, "acquire_read_lock", refuse)
    job.uploaders[2].queue.schedule(attempt_name(5, RUN))
    assert "step 5 cannot be locked on the disk of rank 2" in job.errors()[0]


def test_a_node_with_an_unlistable_folder_reports_no_checkpoint(tmp_path, clock, monkeypatch):
    job = Training(tmp_path, clock)
    job.save()

    def refuse(storage, folder):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(type(STORAGE), "list", refuse)
        assert job.exchanges[2].local_state() == [[], True]
    assert job.exchanges[1].local_state() is None
