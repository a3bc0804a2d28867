"""The last step of a training that is complete: what the run that saved it did not do before it
died."""

import errno
import os

import iteration_folders
import pytest
import rank_folders
from fakes import moxing
from rank_folders import STORAGE, Ranks, folder_contents
from storages import failing, moxing_store

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import RemoteError
from mindresume.events import UploadFailed, UploadFinished, ignore
from mindresume.formats.rank_folders import META
from mindresume.model.manifest import FOLDER, MANIFEST, attempt_name
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.committer import Committer
from mindresume.saving.remote_checkpoints import RemoteCheckpoints, RunStatus
from mindresume.saving.save_session import publish_completed, upload_completed

# ---- a training that is complete -----------------------------------------------------------------


@pytest.mark.parametrize(
    "died", ["before the rename", "before the tracker", "before the manifest", "not at all"]
)
def test_the_last_step_of_a_training_that_is_complete_is_published(tmp_path, died):
    """mindformers alone, an evaluation and an export would take the step before for ever."""
    for step in (15, 20):
        iteration_folders.save(tmp_path, step)
    if died == "before the rename":
        iteration_folders.unname(tmp_path, 20)
    elif died == "before the manifest":
        os.remove(
            iteration_folders.unname(tmp_path, 20)
            / FOLDER
            / attempt_name(20, iteration_folders.RUN)
            / MANIFEST
        )
    if died != "not at all":
        iteration_folders.track(tmp_path, 15)
        iteration_folders.intend(tmp_path, 20)
    before = folder_contents(tmp_path)

    def start(group):
        choice = select_checkpoint(STORAGE, str(tmp_path), group)
        publish_completed(STORAGE, choice, group, {}, 0.0, ignore)
        return choice.chosen.step

    assert Ranks(2).run(start) == [20, 20]
    assert (tmp_path / "iteration_00000020").is_dir() and iteration_folders.tracker(
        tmp_path
    ) == "20"
    assert died != "not at all" or folder_contents(tmp_path) == before
    published = folder_contents(tmp_path)
    assert Ranks(2).run(start) == [20, 20] and folder_contents(tmp_path) == published


def test_a_complete_training_in_a_folder_that_nobody_can_write_is_complete(tmp_path):
    iteration_folders.save(tmp_path, 20)
    iteration_folders.unname(tmp_path, 20)

    read_only = failing("", "make_folder", "write", "rename", number=errno.EROFS)
    events = []
    choice = select_checkpoint(
        STORAGE, str(tmp_path), SingleProcess(), SelectionPolicy(every_rank=True)
    )
    publish_completed(read_only, choice, SingleProcess(), {}, 0.0, events.append)
    assert any(
        "is complete, and not published now" in getattr(event, "text", "") for event in events
    )


@pytest.mark.parametrize("died", ["before the manifest", "before meta.json", "not at all"])
def test_meta_json_names_the_last_step_of_a_training_that_is_complete(tmp_path, died):
    """In Checkpoint 1.0 mindformers alone takes the step that it names."""
    for step in (15, 20):
        rank_folders.save(tmp_path, step, world=2)
        if step == 15:
            old = (tmp_path / "rank_0" / META).read_bytes()
    last = (tmp_path / "rank_0" / META).read_bytes()
    if died == "before the manifest":
        os.remove(tmp_path / FOLDER / attempt_name(20, rank_folders.RUN) / MANIFEST)
    if died != "not at all":
        (tmp_path / "rank_0" / META).write_bytes(old)
    before = folder_contents(tmp_path)

    def start(group):
        choice = select_checkpoint(STORAGE, str(tmp_path), group)
        publish_completed(STORAGE, choice, group, {}, 0.0, ignore)
        return choice.chosen.step

    for _ in range(2):
        assert Ranks(2).run(start) == [20, 20]
        assert (tmp_path / "rank_0" / META).read_bytes() == last
    assert died != "not at all" or folder_contents(tmp_path) == before


def test_meta_json_of_mindformers_that_has_trained_on_alone_stays(tmp_path):
    rank_folders.save(tmp_path, 20, world=2)
    rank_folders.write_foreign(tmp_path, 25, world=2, suffix=1)
    theirs = (tmp_path / "rank_0" / META).read_bytes()
    session_of = rank_folders.target_of(tmp_path, 0, 2, "0002-0000bbbb")
    Committer(session_of).recover()
    assert (tmp_path / "rank_0" / META).read_bytes() == theirs


# ---- the object store ----------------------------------------------------------------------------

URL = "obs://bucket/job/checkpoint"
SAVES = {"1.0": rank_folders.save, "2.0": iteration_folders.save}


@pytest.fixture
def remote(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))
    yield RemoteCheckpoints(moxing_store(), URL)


def upload(root, remote, emit=ignore, ranks=2):
    def start(group):
        choice = select_checkpoint(STORAGE, str(root), group, SelectionPolicy(every_rank=True))
        try:
            upload_completed(STORAGE, choice, group, RemoteCheckpoints(remote.store, URL), emit)
        except RemoteError as error:
            return str(error)
        return None

    return Ranks(ranks).run(start)


@pytest.mark.parametrize("fmt", SAVES)
@pytest.mark.parametrize("ranks", [2, 1, 3])
def test_the_last_step_is_uploaded_by_any_number_of_ranks(
    tmp_path, remote, fmt, ranks, monkeypatch
):
    root, events, sent = tmp_path / "disk", [], []
    for step in (15, 20):
        SAVES[fmt](root, step, world=2)
    assert upload(root, remote, events.append, ranks) == [None] * ranks
    (name,) = remote.scan().committed()
    assert name == attempt_name(20, rank_folders.RUN)
    assert [event.is_whole for event in events if isinstance(event, UploadFinished)].count(
        True
    ) == 1
    data = root if fmt == "1.0" else root / "iteration_00000020"
    for file in remote.manifest(name)[0].files[1]:
        assert (tmp_path / "objects" / "bucket/job/checkpoint" / name / file.path).read_bytes() == (
            data / file.path
        ).read_bytes()
    monkeypatch.setattr(moxing.file, "watch", lambda moment, operation, url: sent.append(operation))
    # it is there
    assert upload(root, remote, events.append, ranks) == [None] * ranks and {
        "copy",
        "write",
    }.isdisjoint(sent)


@pytest.mark.parametrize("fmt", SAVES)
def test_an_upload_that_fails_is_an_error_and_the_next_start_uploads(
    tmp_path, remote, fmt, monkeypatch
):
    root, events = tmp_path / "disk", []
    SAVES[fmt](root, 20, world=2)
    monkeypatch.setenv("FAKE_MOXING_REFUSE", "copy")
    assert all("step 20 is not uploaded" in text for text in upload(root, remote, events.append))
    assert remote.scan().committed() == [] and any(
        isinstance(event, UploadFailed) for event in events
    )
    monkeypatch.delenv("FAKE_MOXING_REFUSE")
    assert upload(root, remote) == [None, None] and len(remote.scan().committed()) == 1


def test_a_store_of_a_later_run_is_left_alone(tmp_path, remote):
    rank_folders.save(tmp_path / "disk", 20, world=2)
    remote.publish_status("0002-0000bbbb", RunStatus(None, False))
    assert all(
        "has been taken over by run 0002-0000bbbb" in text
        for text in upload(tmp_path / "disk", remote)
    )


def test_what_mindformers_saved_and_what_is_not_committed_is_not_uploaded(tmp_path, remote):
    rank_folders.write_foreign(tmp_path / "theirs", 20, world=2)
    iteration_folders.save(tmp_path / "ours", 20)
    iteration_folders.unname(tmp_path / "ours", 20)
    assert upload(tmp_path / "theirs", remote) == upload(tmp_path / "ours", remote) == [None, None]
    assert not remote.scan().objects
