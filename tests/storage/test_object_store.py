"""The contract of ``ObjectStore``: a fake moxing, and fsspec in memory, on a disk and with an S3
server."""

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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

    def replace(self, name, work):
        """``work(original, *args, **kwargs)`` in the place of a function of moxing or of a file
        system of fsspec."""
        if self.kind == "moxing":
            original = getattr(moxing.file, name)
            self.monkeypatch.setattr(moxing.file, name, partial(work, original))
            return
        connect = FsspecStore._at

        def at(store, url):
            fs, path = connect(store, url)
            return Disturbed(fs, name, work), path

        self.monkeypatch.setattr(FsspecStore, "_at", at)


class Disturbed:
    """Replaces one method of an fsspec file system."""

    def __init__(self, fs, name, work):
        self.fs, self.name, self.work = fs, name, work

    def __getattr__(self, name):
        found = getattr(self.fs, name)
        return partial(self.work, found) if name == self.name else found


def failing(times, work, calls):
    """Returns ``work``, which fails that many times first."""

    def run(*arguments, **named):
        calls.append(arguments)
        if len(calls) <= times:
            raise RuntimeError("503 Service Unavailable")
        return work(*arguments, **named)

    return run


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
    (tmp_path / "empty").touch()
    assert store.list(url) == [] and store.size(f"{url}/x/a") is None
    store.upload(str(tmp_path / "a"), f"{url}/x/a")
    store.upload(str(tmp_path / "empty"), f"{url}/x1/empty")
    store.put(f"{url}/b", b"small")
    assert store.list(url) == ["b", "x/a", "x1/empty"]  # no folders
    assert store.list(f"{url}/x") == ["a"]  # a prefix ends where a folder does
    names = ("x/a", "b", "x1/empty")
    assert [store.size(f"{url}/{name}") for name in names] == [7, 5, 0]
    for name, content in (("x/a", b"weights"), ("x1/empty", b"")):
        store.download(f"{url}/{name}", str(tmp_path / "copy"))
        assert (tmp_path / "copy").read_bytes() == content
    for content in (b"other", b""):
        store.put(f"{url}/b", content)
        assert store.read(f"{url}/b") == content and store.size(f"{url}/b") == len(content)
    # nothing failed; moxing: the folder that was not there
    assert subject.pauses in ([], [1.0])
    for work in (store.read, lambda url: store.download(url, str(tmp_path / "none"))):
        with pytest.raises(RemoteError, match=f"{url}/none"):
            work(f"{url}/none")
    for _ in range(2):
        store.delete(f"{url}/x/a")
    assert store.list(url) == ["b", "x1/empty"] and not (tmp_path / "none").exists()


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
    name = {"moxing": "list_directory", "s3": "find"}.get(subject.kind, "walk")
    calls = []
    subject.replace(name, lambda work, *args, **named: failing(1, work, calls)(*args, **named))
    assert store.list(subject.url) == ["a/b"] and len(calls) == 2
    subject.replace(name, refuse)
    with pytest.raises(RemoteError, match=f"{subject.url}.*403 Forbidden"):
        store.list(subject.url)


def refuse(*arguments, **named):
    raise OSError("403 Forbidden")


# ---- retries -------------------------------------------------------------------------------------

cheap = pytest.mark.parametrize("subject", ["moxing", "file"], indirect=True)


@cheap
def test_a_temporary_error_is_retried_with_growing_pauses(subject, store, monkeypatch):
    calls = []
    monkeypatch.setattr(store.driver, "put", failing(TRIES - 1, store.driver.put, calls))
    store.put(f"{subject.url}/a", b"x")
    assert len(calls) == TRIES and subject.pauses == [1.0, 4.0, 16.0]
    assert store.read(f"{subject.url}/a") == b"x"


@cheap
@pytest.mark.parametrize(
    "operation", ["list", "size", "read", "put", "upload", "download", "delete"]
)
def test_a_permanent_error_names_the_url(subject, store, tmp_path, monkeypatch, operation):
    (tmp_path / "file").write_bytes(b"12345")
    url, new, calls = f"{subject.url}/a", str(tmp_path / "new"), []
    store.put(url, b"x")
    monkeypatch.setattr(store.driver, operation, failing(99, None, calls))
    arguments = {
        "list": (subject.url,),
        "put": (url, b"x"),
        "upload": (str(tmp_path / "file"), url),
        "download": (url, new),
    }
    with pytest.raises(RemoteError, match=f"{subject.url}.*{TRIES} times.*RuntimeError: 503"):
        getattr(store, operation)(*arguments.get(operation, (url,)))
    assert len(calls) == TRIES and not os.path.exists(new)


@cheap
def test_an_upload_that_arrives_short_is_an_error(subject, store, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"12345")
    monkeypatch.setattr(store.driver, "upload", lambda path, url: store.driver.put(url, b"123"))
    with pytest.raises(RemoteError, match="expected 5 bytes, arrived: 3 bytes"):
        store.upload(str(tmp_path / "file"), f"{subject.url}/a")


@cheap
def test_a_failed_download_leaves_no_file(subject, store, tmp_path, monkeypatch):
    store.put(f"{subject.url}/a", b"12345678")

    def half(url, path):
        Path(path).write_bytes(b"1234")
        raise OSError("connection reset")

    monkeypatch.setattr(store.driver, "download", half)
    with pytest.raises(RemoteError, match="connection reset"):
        store.download(f"{subject.url}/a", str(tmp_path / "file"))
    assert not (tmp_path / "file").exists()


@cheap
def test_a_missing_local_file_is_not_retried(subject, store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.upload(str(tmp_path / "gone"), f"{subject.url}/a")
    assert subject.pauses == []


@pytest.mark.parametrize("subject", ["file", "memory"], indirect=True)
def test_an_interrupted_upload_keeps_the_old_object(subject, store, tmp_path):
    """An object store shows nothing of a PUT that did not end."""
    (tmp_path / "new").write_bytes(b"12345678")
    (tmp_path / "half").write_bytes(b"1234")
    store.put(f"{subject.url}/a", b"old")

    def half(original, source, target):
        original(str(tmp_path / "half"), target)
        raise OSError("connection reset")

    subject.replace("put_file", half)
    with pytest.raises(RemoteError, match="connection reset"):
        store.upload(str(tmp_path / "new"), f"{subject.url}/a")
    assert store.read(f"{subject.url}/a") == b"old" and store.list(subject.url) == ["a"]


# ---- moxing --------------------------------------------------------------------------------------

only_moxing = pytest.mark.parametrize("subject", ["moxing"], indirect=True)


@only_moxing
@pytest.mark.parametrize("is_known", [True, False])
def test_a_listing_does_not_depend_on_folders_that_exist(store, monkeypatch, is_known):
    """``exists`` may deny a folder that exists only in the names of objects."""
    store.put(f"{URL}/a/b", b"x")
    monkeypatch.setattr(moxing.file, "exists", lambda url: is_known)
    assert store.list(URL) == ["a/b"] and store.list(f"{URL}/other") == []
    monkeypatch.setattr(moxing.file, "list_directory", refuse)
    with pytest.raises(RemoteError, match=f"{URL}.*403 Forbidden"):
        store.list(URL)


@only_moxing
def test_a_store_is_not_empty_if_no_folder_can_be_made(store, monkeypatch):
    monkeypatch.setattr(moxing.file, "make_dirs", refuse)
    with pytest.raises(RemoteError, match=f"{URL}.*403 Forbidden"):
        store.list(URL)


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
    """It is no empty bucket: that would mean a fresh start."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(object_store, "TRIES", 1)
    store = RetryingStore(FsspecStore(subject.url))
    store.driver._at(subject.url)[0].retries = 1
    with pytest.raises(RemoteError, match=subject.url):
        store.list(subject.url)


@only_s3
def test_a_large_file_is_uploaded_in_parts(subject, store, tmp_path, monkeypatch):
    size = (5 << 20) + 3
    with open(tmp_path / "large", "wb") as file:
        file.truncate(size)
    parts = []

    def small_parts(original, source, target):
        parts.append(store.list(subject.url))
        return original(source, target, chunksize=5 << 19)

    subject.replace("put_file", small_parts)
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
