"""Nodes that share no disk, and an object store: each node commits its own part, the store holds the whole; a node that comes
back with an empty disk gets its part again. Ranks 0 and 1 are on one node, 2 and 3 on the other.
"""
import shutil

import pytest
from fakes import moxing
from folders import STORAGE, Ranks
from resume.test_apart import NODES, PARTS
from store.test_islands import RUN, save_part

from mindresume.errors import NoUsableCheckpointError
from mindresume.resume.apart import select_apart
from mindresume.resume.restore import Restore
from mindresume.store.common import committed
from mindresume.store.islands import Islands
from mindresume.store.mirror import Mirror
from mindresume.store.objects import MoxingStore
from mindresume.store.remote import Remote
from mindresume.store.shard import Place

URL = "obs://bucket/job/checkpoint"
ISLANDS = Islands((0, 0, 2, 2))


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))


def remote():
    return Remote(MoxingStore(moxing.file, lambda seconds: None), URL)


def save(tmp_path, *steps, late=()):
    """Saved on both nodes, and uploaded; ``late``: ranks that do not upload."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds
        for other in mirrors[1:]:
            if other.place.rank not in late:
                other.work()
    places = [Place(STORAGE, str(tmp_path / NODES[rank]), RUN, rank, 4, part=PARTS[NODES[rank]]) for rank in range(4)]
    mirrors = [Mirror(remote(), place, None, 60.0, clock=lambda: now[0], sleep=sleep if place.rank == 0 else lambda seconds: None)
               for place in places]
    for step in steps:
        for node, ranks in PARTS.items():
            save_part(tmp_path / node, step, ranks)
        for mirror in mirrors:
            mirror.saved(step)
        mirrors[0].work()
    return mirrors


def resume(tmp_path):
    def one(group):
        root = str(tmp_path / NODES[group.rank])
        return Restore(STORAGE, remote(), root, group, 4, islands=ISLANDS).choose(lambda: select_apart(STORAGE, root, group))
    found = Ranks(4).run(one)
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def test_the_store_holds_the_parts_of_all_nodes_as_one(tmp_path):
    save(tmp_path, 5)
    manifest, _ = remote().manifest(remote().look().committed()[0])
    assert (manifest.step, manifest.world_size, manifest.part, len(manifest.files)) == (5, 4, (), 4)


def test_without_the_part_of_one_rank_nothing_is_committed_there(tmp_path):
    first = save(tmp_path, 5, late=(3,))[0]
    assert remote().look().committed() == []
    assert "rank 3" in str(first.poll()[0])


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_node_with_an_empty_disk_gets_its_part_again(tmp_path, lost):
    save(tmp_path, 5, 10)
    shutil.rmtree(tmp_path / lost)
    found = resume(tmp_path)
    assert [choice.chosen.step for choice in found] == [10] * 4
    for rank, choice in enumerate(found):
        assert [shard.rank for shard in choice.shards] == [rank]
        assert choice.shards[0].details.random == {"python": f"of rank {rank}"}
    names = {path.name for path in (tmp_path / lost).glob("rank_*")}
    assert names == {f"rank_{rank}" for rank in PARTS[lost]} and committed(STORAGE, str(tmp_path / lost))


def test_what_both_have_and_is_newer_stays(tmp_path):
    save(tmp_path, 5)
    for node, ranks in PARTS.items():
        save_part(tmp_path / node, 10, ranks)                   # not uploaded any more
    assert [choice.chosen.step for choice in resume(tmp_path)] == [10] * 4


def test_a_step_that_one_node_alone_committed_comes_from_the_store_if_it_is_whole_there(tmp_path):
    save(tmp_path, 5, 10)
    name = committed(STORAGE, str(tmp_path / "b"))[0]
    shutil.rmtree(tmp_path / "b" / ".mindresume" / name)
    assert [choice.chosen.step for choice in resume(tmp_path)] == [10] * 4


def test_nothing_whole_anywhere_is_an_error(tmp_path):
    save(tmp_path, 5, late=(2,))
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(NoUsableCheckpointError):
        resume(tmp_path)
