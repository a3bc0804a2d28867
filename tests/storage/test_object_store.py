"""The contract of ``ObjectStore``: a fake moxing, and fsspec in memory, on a disk and with an S3
server."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import moxing
from fakes.s3 import BUCKET, environment, s3_server  # noqa: F401  a fixture
from rank_folders import by_clock

import mindresume
from mindresume.errors import ConfigError, RemoteError
from mindresume.storage import object_store
from mindresume.storage.object_store import TRIES, FsspecStore, MoxingStore, RetryingStore

URL = "obs://bucket/job"
KINDS = ("moxing", "memory", "file", "s3")
# operation of the store -> what moxing, and what fsspec, is asked for
CALLS = {
    "list": ("list_directory", "find"),
    "size": ("get_size", "info"),
    "read": ("read", "cat_file"),
    "put": ("write", "pipe_file"),
    "upload": ("copy", "put_file"),
    "download": ("copy", "get_file"),
    "delete": ("remove", "rm_file"),
}


class Subject:
    """A kind of store below its own URL, and faults of its parts. Connections are shared by all
    tests."""

    connections: dict = {}

    def __init__(self, kind, url, monkeypatch):
        self.kind, self.url, self.monkeypatch, self.pauses = kind, url, monkeypatch, []
        self.store = self.connections.get(kind) or self.another()
        self.connections[kind] = self.store

    def another(self):
        """Returns the same bucket, as another process sees it."""
        return RetryingStore(
            MoxingStore(moxing.file) if self.kind == "moxing" else FsspecStore(self.url)
        )

    def sleep(self, seconds):
        self.pauses.append(seconds)

    def replace(self, operation, work):
        """``work(original, *args, **kwargs)`` in the place of what ``operation`` calls."""
        name = CALLS[operation][self.kind != "moxing"]
        if self.kind == "moxing":
            original = getattr(moxing.file, name)
            self.monkeypatch.setattr(
                moxing.file, name, lambda *args, **kwargs: work(original, *args, **kwargs)
            )
            return
        connect = FsspecStore._at

        def at(store, url):
            fs, path = connect(store, url)
            return Disturbed(
                fs, "walk" if name == "find" and self.kind != "s3" else name, work
            ), path

        self.monkeypatch.setattr(FsspecStore, "_at", at)

    def fails(self, operation, times, error=RuntimeError("503 Service Unavailable")):  # noqa: B008  an error has no state here
        """Makes ``operation`` fail that many times, then work. Returns the calls."""
        calls = []

        def work(original, *args, **kwargs):
            calls.append(args)
            if len(calls) <= times:
                raise error
            return original(*args, **kwargs)

        self.replace(operation, work)
        return calls


class Disturbed:
    """Replaces one method of an fsspec file system."""

    def __init__(self, fs, name, work):
        self.fs, self.name, self.work = fs, name, work

    def __getattr__(self, name):
        found = getattr(self.fs, name)
        return (
            (lambda *args, **kwargs: self.work(found, *args, **kwargs))
            if name == self.name
            else found
        )


@pytest.fixture(params=KINDS)
def subject(request, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_MOXING_ROOT", str(tmp_path / "objects"))
    if request.param == "s3":
        for name, value in environment(request.getfixturevalue("s3_server")).items():
            monkeypatch.setenv(name, value)
    unique = f"{tmp_path.parent.name}-{tmp_path.name}"
    url = {
        "moxing": URL,
        "memory": f"memory://{unique}/job",
        "file": f"file://{tmp_path}/objects/job",
        "s3": f"s3://{BUCKET}/{unique}",
    }[request.param]
    made = Subject(request.param, url, monkeypatch)
    with by_clock(made):
        yield made


@pytest.fixture
def store(subject):
    return subject.store


# ---- the contract --------------------------------------------------------------------------------


def test_an_object_is_found_by_url_and_in_listings(subject, store, tmp_path):
    url = subject.url
    (tmp_path / "a").write_bytes(b"weights")
    assert store.list(url) == [] and store.size(f"{url}/x/a") is None
    store.upload(str(tmp_path / "a"), f"{url}/x/a")
    store.put(f"{url}/b", b"small")
    assert store.list(url) == ["b", "x/a"] and store.list(f"{url}/x") == ["a"]  # no folders
    assert (
        store.size(f"{url}/x/a") == 7
        and store.size(f"{url}/b") == 5
        and store.read(f"{url}/b") == b"small"
    )
    store.download(f"{url}/x/a", str(tmp_path / "c"))
    assert (tmp_path / "c").read_bytes() == b"weights"
    store.put(f"{url}/b", b"other")
    assert store.read(f"{url}/b") == b"other"
    store.delete(f"{url}/x/a")
    store.delete(f"{url}/x/a")
    assert store.list(url) == ["b"]
    # nothing failed; moxing: the folder that was not there
    assert subject.pauses in ([], [1.0])


def test_a_prefix_ends_where_a_folder_does(subject, store):
    store.put(f"{subject.url}/step-1/.mindresume/step-1/a", b"1")
    store.put(f"{subject.url}/step-10/b", b"2")
    assert store.list(f"{subject.url}/step-1") == [".mindresume/step-1/a"]
    assert store.list(subject.url) == ["step-1/.mindresume/step-1/a", "step-10/b"]


def test_an_object_without_content(subject, store, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    store.upload(str(tmp_path / "empty"), f"{subject.url}/a")
    store.put(f"{subject.url}/b", b"")
    assert store.size(f"{subject.url}/a") == store.size(f"{subject.url}/b") == 0
    store.download(f"{subject.url}/a", str(tmp_path / "copy"))
    assert store.read(f"{subject.url}/b") == (tmp_path / "copy").read_bytes() == b""
    assert store.list(subject.url) == ["a", "b"]


def test_changes_by_others_are_visible(subject, store):
    """Neither listings nor sizes are cached."""
    url, other = subject.url, subject.another()
    store.put(f"{url}/x/a", b"1")
    assert store.list(url) == ["x/a"] and store.size(f"{url}/x/b") is None
    other.put(f"{url}/x/b", b"22")
    assert store.list(url) == ["x/a", "x/b"] and store.size(f"{url}/x/b") == 2
    other.put(f"{url}/x/b", b"333")
    other.delete(f"{url}/x/a")
    assert (
        store.list(url) == ["x/b"]
        and store.size(f"{url}/x/b") == 3
        and store.size(f"{url}/x/a") is None
    )


def test_several_threads_at_once(subject, store):
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda number: store.put(f"{subject.url}/{number:02d}", bytes(number)), range(24)
            )
        )
        assert list(
            pool.map(lambda number: store.size(f"{subject.url}/{number:02d}"), range(24))
        ) == list(range(24))
    assert store.list(subject.url) == [f"{number:02d}" for number in range(24)]


def test_a_failed_listing_is_not_an_empty_store(subject, store):
    store.put(f"{subject.url}/a/b", b"x")
    subject.fails("list", 99, OSError("connection reset"))
    with pytest.raises(RemoteError, match=f"{subject.url}.*connection reset"):
        store.list(subject.url)


def test_a_listing_that_fails_once_is_complete(subject, store):
    store.put(f"{subject.url}/a/b", b"x")
    subject.fails("list", 1)
    assert store.list(subject.url) == ["a/b"]


def test_a_temporary_error_is_retried_with_growing_pauses(subject, store):
    calls = subject.fails("put", TRIES - 1)
    store.put(f"{subject.url}/a", b"x")
    assert (
        len(calls) == TRIES
        and subject.pauses == [1.0, 4.0, 16.0]
        and store.read(f"{subject.url}/a") == b"x"
    )


@pytest.mark.parametrize(
    "operation, work",
    [
        ("list", lambda store, url, path: store.list(url)),
        ("size", lambda store, url, path: store.size(f"{url}/a")),
        ("read", lambda store, url, path: store.read(f"{url}/a")),
        ("put", lambda store, url, path: store.put(f"{url}/a", b"x")),
        ("upload", lambda store, url, path: store.upload(path, f"{url}/a")),
        ("download", lambda store, url, path: store.download(f"{url}/a", path + "2")),
        ("delete", lambda store, url, path: store.delete(f"{url}/a")),
    ],
)
def test_a_permanent_error_names_the_url(subject, store, tmp_path, operation, work):
    (tmp_path / "file").write_bytes(b"12345")
    store.put(f"{subject.url}/a", b"x")
    calls = subject.fails(operation, 99)
    with pytest.raises(RemoteError, match=f"{subject.url}.*{TRIES} times.*RuntimeError: 503"):
        work(store, subject.url, str(tmp_path / "file"))
    assert len(calls) == TRIES and not os.path.exists(tmp_path / "file2")


def test_a_missing_object_cannot_be_read(subject, store, tmp_path):
    store.put(f"{subject.url}/a", b"x")
    for work in (
        lambda: store.read(f"{subject.url}/none"),
        lambda: store.download(f"{subject.url}/none", str(tmp_path / "b")),
    ):
        with pytest.raises(RemoteError, match=f"{subject.url}/none"):
            work()
    assert not (tmp_path / "b").exists()


def test_an_upload_that_arrives_short_is_an_error(subject, store, tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "short").write_bytes(b"123")
    subject.replace(
        "upload", lambda original, source, target: original(str(tmp_path / "short"), target)
    )
    with pytest.raises(RemoteError, match="expected 5 bytes, arrived: 3 bytes"):
        store.upload(str(tmp_path / "file"), f"{subject.url}/a")


def test_a_failed_download_leaves_no_file(subject, store, tmp_path):
    store.put(f"{subject.url}/a", b"12345678")

    def half(original, source, target):
        Path(target).write_bytes(b"1234")
        raise OSError("connection reset")

    subject.replace("download", half)
    with pytest.raises(RemoteError, match="connection reset"):
        store.download(f"{subject.url}/a", str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()


def test_an_interrupted_upload_keeps_the_old_object(subject, store, tmp_path):
    (tmp_path / "new").write_bytes(b"12345678")
    store.put(f"{subject.url}/a", b"old")
    if subject.kind == "moxing":
        pytest.skip("the fake has no partial upload")

    def half(original, source, target):
        # an S3 server shows nothing of a PUT that did not end
        if subject.kind != "s3":
            (tmp_path / "half").write_bytes(b"1234")
            original(str(tmp_path / "half"), target)
        raise OSError("connection reset")

    subject.replace("upload", half)
    with pytest.raises(RemoteError, match="connection reset"):
        store.upload(str(tmp_path / "new"), f"{subject.url}/a")
    assert store.read(f"{subject.url}/a") == b"old" and store.list(subject.url) == ["a"]


def test_a_missing_local_file_is_not_retried(subject, store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.upload(str(tmp_path / "gone"), f"{subject.url}/a")
    assert subject.pauses == []


# ---- moxing --------------------------------------------------------------------------------------

only_moxing = pytest.mark.parametrize("subject", ["moxing"], indirect=True)


@only_moxing
def test_a_listing_does_not_depend_on_folders_that_exist(store, monkeypatch):
    store.put(f"{URL}/a/b", b"x")
    monkeypatch.setattr(moxing.file, "exists", lambda url: False)
    assert store.list(URL) == ["a/b"] and store.list(f"{URL}/other") == []


def refuse(url, recursive=False):
    raise RuntimeError("403 Forbidden")


@only_moxing
@pytest.mark.parametrize("is_known", [True, False])
def test_a_bucket_that_cannot_be_listed_is_an_error_whether_it_exists_or_not(
    store, monkeypatch, is_known
):
    """The result of ``exists`` does not matter: it may deny a folder that exists only in the names
    of objects."""
    store.put(f"{URL}/a/b", b"x")
    monkeypatch.setattr(moxing.file, "list_directory", refuse)
    monkeypatch.setattr(moxing.file, "exists", lambda url: is_known)
    with pytest.raises(RemoteError, match=f"{URL}.*403 Forbidden"):
        store.list(URL)


@only_moxing
def test_a_store_is_not_empty_if_no_folder_can_be_made(store, monkeypatch):
    monkeypatch.setattr(moxing.file, "make_dirs", refuse)
    with pytest.raises(RemoteError, match=f"{URL}.*403 Forbidden"):
        store.list(URL)


@only_moxing
def test_s3_names_the_same(store):
    store.put("s3://bucket/a/b", b"x")
    assert store.list("s3://bucket/a") == ["b"]


@only_moxing
def test_the_fake_refuses_what_an_object_store_cannot(store):
    store.put(f"{URL}/a", b"x")
    for misuse in (
        lambda: moxing.file.rename(f"{URL}/a", f"{URL}/b"),
        lambda: moxing.file.append(f"{URL}/a", "x"),
        lambda: moxing.file.File(f"{URL}/a", "ab"),
    ):
        with pytest.raises(AssertionError):
            misuse()
    with moxing.file.File(f"{URL}/c", "w") as file:
        file.write("text")
        assert not moxing.file.exists(f"{URL}/c")  # it appears complete
    assert moxing.file.read(f"{URL}/c") == "text"


# ---- fsspec --------------------------------------------------------------------------------------

only_s3 = pytest.mark.parametrize("subject", ["s3"], indirect=True)


@only_s3
def test_a_bucket_that_does_not_exist_is_an_error_at_once(subject):
    store = RetryingStore(FsspecStore("s3://other/job"))
    for work in (lambda: store.list("s3://other/job"), lambda: store.put("s3://other/job/a", b"x")):
        with pytest.raises(RemoteError, match="s3://other/job.*bucket does not exist"):
            work()
    assert subject.pauses == []


@only_s3
def test_a_server_that_does_not_answer_is_an_error(subject, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(object_store, "TRIES", 2)
    store = RetryingStore(FsspecStore(subject.url))
    store.driver._at(subject.url)[0].retries = 1
    with pytest.raises(RemoteError, match=f"{subject.url}.*2 times"):
        store.list(subject.url)
    assert subject.pauses == [1.0]


@only_s3
def test_a_large_file_is_uploaded_in_parts(subject, store, tmp_path, monkeypatch):
    size = (5 << 20) + 3
    with open(tmp_path / "large", "wb") as file:
        file.truncate(size)
    parts = []

    def small_parts(original, source, target):
        parts.append(store.list(subject.url))
        return original(source, target, chunksize=5 << 19)

    subject.replace("upload", small_parts)
    monkeypatch.setattr("s3fs.S3FileSystem._upload_file_part_concurrent", _counted(parts))
    store.upload(str(tmp_path / "large"), f"{subject.url}/large")
    assert parts == [[], "in parts"] and store.size(f"{subject.url}/large") == size


def _counted(calls):
    from s3fs import S3FileSystem

    original = S3FileSystem._upload_file_part_concurrent

    async def upload(self, *args, **kwargs):
        calls.append("in parts")
        # the least that S3 takes
        return await original(self, *args, **{**kwargs, "chunksize": 5 << 20})

    return upload


def run(subject, program, **variables):
    """Runs a program in its own process, with the store under ``sys.argv[1]``. Returns its
    output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), subject.url],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(mindresume.__file__).parent.parent), **variables},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@only_s3
def test_a_process_that_was_forked_has_its_own_connections(subject, store):
    run(
        subject,
        """
        import os, signal, sys
        from mindresume.storage.object_store import FsspecStore, RetryingStore
        url = sys.argv[1]
        store = RetryingStore(FsspecStore(url))
        store.put(url + "/before", b"1")
        child = os.fork()
        if not child:
            signal.alarm(60)  # without an event loop it would wait forever
            store.put(url + "/child", b"1")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        store.put(url + "/after", b"1")
        """,
    )
    assert store.list(subject.url) == ["after", "before", "child"]


@only_s3
def test_uploads_at_the_end_of_the_interpreter_succeed(subject, store):
    """The last checkpoint of a training that failed: Python's thread pools are closed, and a host
    name is to be resolved."""
    run(
        subject,
        """
        import atexit, sys
        from mindresume.storage.object_store import FsspecStore, RetryingStore
        store = RetryingStore(FsspecStore(sys.argv[1]))
        atexit.register(lambda: store.put(sys.argv[1] + "/last", b"1"))
        """,
        AWS_ENDPOINT_URL=os.environ["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost"),
    )
    assert store.list(subject.url) == ["last"]


@only_s3
def test_endpoint_and_credentials_come_from_the_configuration_of_fsspec_too(subject, store):
    server = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        subject.monkeypatch.delenv(name)
    run(
        subject,
        """
        import sys
        from mindresume.storage.object_store import FsspecStore, RetryingStore
        RetryingStore(FsspecStore(sys.argv[1])).put(sys.argv[1] + "/a", b"1")
        """,
        FSSPEC_S3_ENDPOINT_URL=server,
        FSSPEC_S3_KEY="test",
        FSSPEC_S3_SECRET="test",
        FSSPEC_S3='{"max_concurrency": 4, "config_kwargs": {"s3": {"addressing_style": "path"}}}',
    )
    for name, value in environment(server).items():
        subject.monkeypatch.setenv(name, value)
    assert store.list(subject.url) == ["a"]


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    import fsspec

    loaded = {name: driver for name, driver in fsspec.registry.items() if name not in ("s3", "gs")}
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", loaded)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url, package in (("s3://bucket/job", r"mindresume\[s3\]"), ("gs://bucket/job", "gcsfs")):
        with pytest.raises(ConfigError, match=f"{url}.*pip install .*{package}"):
            FsspecStore(url)


@pytest.mark.parametrize("url", ["nothing://bucket/job", "bucket/job"])
def test_a_url_without_a_driver_is_an_error(url):
    with pytest.raises(ConfigError, match=f"{url}.*expected.*s3://"):
        FsspecStore(url)


def test_fsspec_is_imported_only_where_it_is_used():
    program = (
        "import sys, mindresume.storage.object_store; print({'fsspec', 's3fs', 'aiohttp'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
