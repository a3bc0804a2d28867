"""MoxingStore on a moxing that keeps its contract, and that fails."""
import os

import pytest
from fakes import moxing

from mindresume.errors import RemoteError
from mindresume.store.objects import TRIES, MoxingStore

URL = "obs://bucket/job"


@pytest.fixture
def pauses():
    return []


@pytest.fixture
def store(tmp_path, monkeypatch, pauses):
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))
    return MoxingStore(moxing.file, pauses.append)


def fails(monkeypatch, name, times):
    """The operation of moxing fails so often, then works. Returns the calls."""
    calls, real = [], getattr(moxing.file, name)

    def work(*args, **kwargs):
        calls.append(args)
        if len(calls) <= times:
            raise RuntimeError("503 Service Unavailable")
        return real(*args, **kwargs)
    monkeypatch.setattr(moxing.file, name, work)
    return calls


def test_what_is_put_is_found_by_url_and_in_listings(store, tmp_path):
    (tmp_path / "a").write_bytes(b"weights")
    assert store.list(URL) == [] and store.size(f"{URL}/x/a") is None
    store.upload(str(tmp_path / "a"), f"{URL}/x/a")
    store.put(f"{URL}/b", b"small")
    assert store.list(URL) == ["b", "x/a"] and store.list(f"{URL}/x") == ["a"]      # no folders
    assert store.size(f"{URL}/x/a") == 7 and store.read(f"{URL}/b") == b"small"
    store.download(f"{URL}/x/a", str(tmp_path / "c"))
    assert (tmp_path / "c").read_bytes() == b"weights"
    store.put(f"{URL}/b", b"other")
    assert store.read(f"{URL}/b") == b"other"
    store.delete(f"{URL}/x/a")
    store.delete(f"{URL}/x/a")
    assert store.list(URL) == ["b"]


def test_a_listing_does_not_depend_on_folders_that_exist(store, monkeypatch):
    store.put(f"{URL}/a/b", b"x")
    monkeypatch.setattr(moxing.file, "exists", lambda url: False)
    assert store.list(URL) == ["a/b"] and store.list(f"{URL}/other") == []


def refuse(url, recursive=False):
    raise RuntimeError("403 Forbidden")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_bucket_that_cannot_be_listed_is_never_taken_for_an_empty_one(store, monkeypatch, is_known):
    """Whatever ``exists`` says: of a folder that is in the names of objects alone it may say no."""
    store.put(f"{URL}/a/b", b"x")
    monkeypatch.setattr(moxing.file, "list_directory", refuse)
    monkeypatch.setattr(moxing.file, "exists", lambda url: is_known)
    with pytest.raises(RemoteError, match="could not be listed.*403 Forbidden"):
        store.list(URL)


def test_where_no_folder_can_be_made_nothing_is_known_to_be_empty(store, monkeypatch):
    monkeypatch.setattr(moxing.file, "make_dirs", refuse)
    with pytest.raises(RemoteError, match="could not be listed.*403 Forbidden"):
        store.list(URL)


def test_a_listing_that_fails_once_shows_what_is_there(store, monkeypatch):
    store.put(f"{URL}/a/b", b"x")
    fails(monkeypatch, "list_directory", 1)
    assert store.list(URL) == ["a/b"]


def test_s3_names_the_same(store):
    store.put("s3://bucket/a/b", b"x")
    assert store.list("s3://bucket/a") == ["b"]


def test_an_error_that_passes_is_tried_again_after_growing_pauses(store, monkeypatch, pauses):
    calls = fails(monkeypatch, "write", TRIES - 1)
    store.put(f"{URL}/a", b"x")
    assert len(calls) == TRIES and pauses == [1.0, 4.0, 16.0] and store.read(f"{URL}/a") == b"x"


@pytest.mark.parametrize("operation, work", [
    ("list_directory", lambda store, path: store.list(URL)), ("get_size", lambda store, path: store.size(f"{URL}/a")),
    ("read", lambda store, path: store.read(f"{URL}/a")), ("write", lambda store, path: store.put(f"{URL}/a", b"x")),
    ("copy", lambda store, path: store.upload(path, f"{URL}/a")),
    ("copy", lambda store, path: store.download(f"{URL}/a", path + "2")),
    ("remove", lambda store, path: store.delete(f"{URL}/a"))])
def test_an_error_that_stays_is_one_error_with_the_url(store, monkeypatch, tmp_path, operation, work):
    (tmp_path / "file").write_bytes(b"12345")
    store.put(f"{URL}/a", b"x")
    calls = fails(monkeypatch, operation, 99)
    with pytest.raises(RemoteError, match=rf"{URL}.* could not be .*, tried 4 times: RuntimeError: 503.*bucket"):
        work(store, str(tmp_path / "file"))
    assert len(calls) == TRIES and not os.path.exists(tmp_path / "file2")


def test_an_upload_that_arrives_short_is_an_error(store, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    monkeypatch.setattr(moxing.file, "copy", lambda source, target: moxing.file.write(target, b"123", binary=True))
    with pytest.raises(RemoteError, match="expected 5 bytes, arrived: 3 bytes"):
        store.upload(str(tmp_path / "file"), f"{URL}/a")


def test_half_of_a_download_does_not_stay(store, monkeypatch, tmp_path):
    store.put(f"{URL}/a", b"12345678")

    def half(moment, *what):
        if moment == "half":
            raise OSError("connection reset")
    monkeypatch.setattr(moxing.file, "watch", half)
    with pytest.raises(RemoteError, match="connection reset"):
        store.download(f"{URL}/a", str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()


def test_a_local_file_that_is_gone_is_not_waited_for(store, tmp_path, pauses):
    with pytest.raises(FileNotFoundError):
        store.upload(str(tmp_path / "gone"), f"{URL}/a")
    assert pauses == []


def test_the_fake_refuses_what_an_object_store_cannot(store):
    store.put(f"{URL}/a", b"x")
    for misuse in (lambda: moxing.file.rename(f"{URL}/a", f"{URL}/b"), lambda: moxing.file.append(f"{URL}/a", "x"),
                   lambda: moxing.file.File(f"{URL}/a", "ab")):
        with pytest.raises(AssertionError):
            misuse()
    with moxing.file.File(f"{URL}/c", "w") as file:
        file.write("text")
        assert not moxing.file.exists(f"{URL}/c")           # it appears whole
    assert moxing.file.read(f"{URL}/c") == "text"
