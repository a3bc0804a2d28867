"""``mox.file`` on a local folder, with the semantics of an object store.

It follows the documentation of MoXing (support.huaweicloud.com, "MoXing Developer Guide", and the
API reference of mox.file in huaweicloud/ModelArts-Lab): names and arguments of the functions, what
a listing contains, what ``remove`` leaves alone. Where that says nothing, the fake is strict: a
listing, a size or a copy of a missing object raises. It was never compared with the real one.

    FAKE_MOXING_ROOT     folder for the buckets: obs://bucket/a/b is the file bucket/a/b in it
    FAKE_MOXING_DELAY    seconds that each upload takes
    FAKE_MOXING_KILL     "copy 3": the process is killed when it begins its third copy
    FAKE_MOXING_REFUSE   "copy write": these operations fail

An object appears complete when its PUT has ended; folders exist only in names; nothing can be
renamed or appended to. Within a test: ``watch`` is called with ("before" or "after", operation,
url), of a download also in the middle ("half"), and may raise; ``hidden`` urls of objects are left
out of listings.
"""

import io
import os
import shutil
import signal
import tempfile
import time
from types import SimpleNamespace

_PARTS = ".parts"  # of uploads under way
_counts = {}
hidden = set()


def watch(moment, operation, url):
    """Replaced by tests."""


class MoxFileNotExistsException(Exception):
    pass


def _root():
    return os.environ["FAKE_MOXING_ROOT"]


def _is_remote(url):
    return url.startswith(("obs://", "s3://"))


def _path(url):
    return os.path.join(_root(), url.partition("://")[2].rstrip("/"))


class _operation:
    def __init__(self, name, url):
        self.name, self.url = name, url

    def __enter__(self):
        watch("before", self.name, self.url)
        _counts[self.name] = _counts.get(self.name, 0) + 1
        if os.environ.get("FAKE_MOXING_KILL") == f"{self.name} {_counts[self.name]}":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name in os.environ.get("FAKE_MOXING_REFUSE", "").split():
            raise RuntimeError("403 Forbidden")

    def __exit__(self, kind, *rest):
        if kind is None:
            watch("after", self.name, self.url)


def _get(url):
    path = _path(url)
    if not os.path.isfile(path):
        raise MoxFileNotExistsException(url)
    return path


def _put(url, write):
    """Stores the whole object, or nothing."""
    path = _path(url)
    os.makedirs(os.path.join(_root(), _PARTS), exist_ok=True)
    handle, part = tempfile.mkstemp(dir=os.path.join(_root(), _PARTS))
    with os.fdopen(handle, "wb") as file:
        write(file)
    time.sleep(float(os.environ.get("FAKE_MOXING_DELAY", "0")))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.replace(part, path)


def exists(url):
    with _operation("exists", url):
        return os.path.exists(_path(url))


def is_directory(url):
    with _operation("is_directory", url):
        return os.path.isdir(_path(url))


def list_directory(url, recursive=False):
    """Returns relative names, of folders too; of everything below if recursive."""
    with _operation("list_directory", url):
        top, found = _path(url), []
        if not os.path.isdir(top):
            raise MoxFileNotExistsException(url)
        for folder, folders, files in os.walk(top):
            inner = os.path.relpath(folder, top)
            found += [os.path.normpath(os.path.join(inner, name)) for name in folders + files]
            if not recursive:
                break
        return sorted(
            name for name in found if os.path.join(top, name) not in {_path(url) for url in hidden}
        )


def get_size(url, recursive=False):
    with _operation("get_size", url):
        return 0 if os.path.isdir(_path(url)) else os.path.getsize(_get(url))


def stat(url):
    with _operation("stat", url):
        found = os.stat(_get(url))
        return SimpleNamespace(
            length=found.st_size, mtime_nsec=found.st_mtime_ns, is_directory=False
        )


def read(url, binary=False):
    with _operation("read", url), open(_get(url), "rb") as file:
        return file.read() if binary else file.read().decode()


def write(url, data, binary=False):
    with _operation("write", url):
        _put(url, lambda file: file.write(data if binary else data.encode()))


def copy(src_url, dst_url):
    with _operation("copy", dst_url):
        source = _get(src_url) if _is_remote(src_url) else src_url
        if _is_remote(dst_url):
            with open(source, "rb") as file:
                _put(dst_url, lambda into: shutil.copyfileobj(file, into))
            return
        # in two halves, so that it can end between them
        with open(source, "rb") as file, open(dst_url, "wb") as into:
            half = os.path.getsize(source) // 2
            into.write(file.read(half))
            into.flush()
            watch("half", "copy", src_url)
            shutil.copyfileobj(file, into)


def copy_parallel(src_url, dst_url, file_list=None, threads=16, is_processing=True, use_queue=True):
    for folder, _, files in os.walk(_path(src_url) if _is_remote(src_url) else src_url):
        inner = os.path.relpath(folder, _path(src_url) if _is_remote(src_url) else src_url)
        for name in files:
            source, target = (os.path.normpath(os.path.join(inner, name)),) * 2
            if not _is_remote(dst_url):
                os.makedirs(os.path.dirname(os.path.join(dst_url, target)), exist_ok=True)
            copy(f"{src_url.rstrip('/')}/{source}", f"{dst_url.rstrip('/')}/{target}")


def remove(url, recursive=False):
    """Removes an object; ignores a missing one, and a folder without ``recursive``."""
    with _operation("remove", url):
        path = _path(url)
        if os.path.isdir(path) and recursive:
            shutil.rmtree(path)
        elif os.path.isfile(path) and not url.endswith("/"):
            os.remove(path)
        folder = os.path.dirname(path)
        # it was in names alone
        while folder != _root() and os.path.isdir(folder) and not os.listdir(folder):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def make_dirs(url):
    """Creates an object without content that represents the folder."""
    with _operation("make_dirs", url):
        os.makedirs(_path(url), exist_ok=True)


mk_dir = make_dirs


class File(io.BytesIO):
    """Supports the modes r, w, rb, wb; written bytes are put at the end."""

    def __init__(self, name, mode="r"):
        if "a" in mode or "+" in mode:
            raise AssertionError(f"{name} was opened with {mode}: an object cannot be appended to")
        self.name, self.mode = name, mode
        super().__init__(read(name, binary=True) if "r" in mode else b"")

    def read(self, size=-1):
        data = super().read(size)
        return data if "b" in self.mode else data.decode()

    def write(self, data):
        return super().write(data if "b" in self.mode else data.encode())

    def close(self):
        if not self.closed and "w" in self.mode:
            write(self.name, self.getvalue(), binary=True)
        super().close()


def rename(src_url, dst_url):
    raise AssertionError(f"{src_url} was to be renamed: of an object that is a copy and a removal")


def append(url, data, binary=False):
    raise AssertionError(f"{url} was to be appended to: an object cannot be")
