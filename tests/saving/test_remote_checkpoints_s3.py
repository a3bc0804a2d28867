"""Checkpoints on an S3 server: uploads are restored when the disk is lost. The protocol itself:
test_remote.py."""

import pytest
from fakes.s3 import BUCKET, environment, s3_server  # noqa: F401  a fixture
from saving.test_remote_checkpoints import FORMATS, LATER, World, content
from storages import retrying

from mindresume.errors import NoUsableCheckpointError
from mindresume.model.manifest import MANIFEST
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, record_path
from mindresume.saving.retention import KeepLast
from mindresume.storage.object_store import FsspecStore


@pytest.fixture(params=sorted(FORMATS))
def world(request, tmp_path, monkeypatch, s3_server):  # noqa: F811
    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.parent.name}-{tmp_path.name}/checkpoint"
    made = World(tmp_path, request.param)
    made.remote = RemoteCheckpoints(retrying(FsspecStore(url)), url)
    return made


def test_a_lost_folder_is_restored(world):
    world.upload(5, 10)
    assert world.committed() == [10, 5]
    before = content(world.disk)
    world.empty_disk()
    assert world.restore_all().chosen.step == 10
    assert content(world.disk).items() <= before.items()


def test_the_next_run_resumes_from_the_store_and_the_oldest_is_removed(world):
    world.upload(5, 10)
    world.empty_disk()
    assert world.restore_all().chosen.step == 10
    world.upload(15, run=LATER, policy=KeepLast(2))
    assert world.committed() == [15, 10]
    world.empty_disk()
    assert world.restore_all().chosen.step == 15


def test_an_incomplete_checkpoint_is_refused_and_the_next_older_one_is_selected(world):
    world.upload(5, 10)
    name, older = world.remote.scan().committed()
    manifest, _ = world.remote.manifest(name)
    world.remote.store.delete(f"{world.remote.url}/{name}/{manifest.files[1][0].path}")
    world.empty_disk()
    assert world.restore_all().chosen.step == 5
    world.remote.store.put(f"{world.remote.url}/{older}/{record_path(older, MANIFEST)}", b"torn")
    world.empty_disk()
    with pytest.raises(NoUsableCheckpointError):
        world.restore_all()
