"""An in-memory object store: its content, and an ``ObjectStore`` as one process of a pod sees it.

    cluster.disks[BUCKET] = Bucket()
    # mindresume.saving.remote_checkpoints.RemoteCheckpoints(store, url)
    store = PodStore(cluster, process)

The contract is that of ``mindresume.storage.object_store``: a PUT is atomic and visible by its url
at once; listings lag behind PUT and DELETE, each name by a random time. Each call is an operation
of the scheduler where the schedule may inject a fault (an upload or a download is two: its
beginning and its end). Every error is a RemoteError, before or after the effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import xxhash

from mindresume.errors import RemoteError
from sim.cluster import Cluster, Process
from sim.disk import Disk, File
from sim.mount import Mount

BUCKET = "bucket"
# longest lag of a listing of the bucket, as a fraction of ``cluster.lag``
LISTING_LAG_RATIO = 0.1


class Bucket(Disk):
    """The objects of a store. It is one of the disks of a cluster and is copied and compared with
    them. Objects are durable: no loss of power, host or pod changes them. ``seconds``: duration of
    an upload."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, File] = {}
        # urls that are listed with their sizes, but every GET fails
        self.unreadable: set[str] = set()
        self.seconds = 0.0
        # url -> (time until which listings show the previous state, whether it existed then)
        self._lagging: dict[str, tuple[float, bool]] = {}

    def put(self, url: str, data: bytes, until: float = 0.0) -> None:
        """Stores an object. ``until``: a new object is missing from listings before this time."""
        if url not in self.objects:
            self._lagging[url] = until, False
        self.objects[url] = File(data, self.now, True)
        self.unreadable.discard(url)
        self.changed += 1

    def delete(self, url: str, until: float = 0.0) -> None:
        """Removes an object. ``until``: listings may still show it before this time."""
        if self.objects.pop(url, None) is not None:
            self._lagging[url] = until, True
            self.unreadable.discard(url)
            self.changed += 1

    def make_unreadable(self, number: int) -> None:
        """Makes the object with this ``number`` (by name) unreadable until another one is stored
        under its name."""
        if self.objects:
            self.unreadable.add(sorted(self.objects)[number % len(self.objects)])
            self.changed += 1

    def list(self, prefix: str, now: float = float("inf")) -> list[str]:
        """Returns the sorted names below ``prefix``/ that a listing shows at ``now``."""
        late = {url: shown for url, (until, shown) in self._lagging.items() if now < until}
        urls = {url for url in self.objects if late.get(url, True)} | {
            url for url, shown in late.items() if shown
        }
        return sorted(url[len(prefix) + 1 :] for url in urls if url.startswith(f"{prefix}/"))

    # ---- the interface of a disk -----------------------------------------------------------------

    def walk(self, path: str = "") -> Iterator[tuple[str, File]]:
        return iter([(url, file) for url, file in self.objects.items() if url.startswith(path)])

    def signature(self, power: bool = True, unread: str = "/") -> int:
        rows = (
            f"{url}={file.key}{'?' if url in self.unreadable else ''}"
            for url, file in sorted(self.objects.items())
        )
        return xxhash.xxh3_64_intdigest("\n".join(rows).encode())

    def pending(self) -> bool:
        return False

    def lose_power(
        self, survives: Callable[[], bool], torn: Callable[[bytes], bytes] = lambda data: b""
    ) -> None:
        """Does nothing: objects are durable."""

    def copy(self) -> Bucket:
        """Returns a copy with the same objects whose listings do not lag."""
        made = Bucket()
        made.now = self.now
        made.changed = self.changed
        made.objects = dict(self.objects)
        made.unreadable = set(self.unreadable)
        return made


class PodStore:
    """Implements ``ObjectStore`` on the bucket of the cluster. Local files are those of the host of
    ``process``."""

    def __init__(self, cluster: Cluster, process: Process):
        self.cluster = cluster
        self.process = process
        self.disk = Mount(cluster, process)
        self.bucket: Bucket = cluster.disks[BUCKET]  # type: ignore[assignment]

    def list(self, prefix: str) -> list[str]:
        return self._do(
            "list objects", prefix, lambda: self.bucket.list(prefix, self.cluster.scheduler.now)
        )

    def size(self, url: str) -> int | None:
        def act() -> int | None:
            found = self.bucket.objects.get(url)
            return None if found is None else len(found.data)

        return self._do("size", url, act)

    def read(self, url: str) -> bytes:
        return self._do("get", url, lambda: self._get(url))

    def put(self, url: str, data: bytes) -> None:
        self._do("put", url, lambda: self.bucket.put(url, data, self._visible_from()))

    def upload(self, path: str, url: str) -> None:
        with self.disk.open(path) as file:
            data = file.read()
        self._do("upload", url, lambda: None)
        self.cluster.scheduler.sleep(self.bucket.seconds)
        self.put(url, data)

    def download(self, url: str, path: str) -> None:
        self._do("download", url, lambda: self._get(url))
        try:
            file = self.disk.create(path, 0)
            try:
                data = self.read(url)
                file.write_at(0, memoryview(data))
                file.finish()
            except BaseException:
                file.abandon()
                raise
        except OSError as error:
            with suppress(OSError):
                self.disk.remove(path)
            raise RemoteError(f"{url} could not be downloaded: {error}") from error

    def delete(self, url: str) -> None:
        self._do("delete", url, lambda: self.bucket.delete(url, self._visible_from()))

    def _get(self, url: str) -> bytes:
        found = self.bucket.objects.get(url)
        if found is None:
            raise RemoteError(f"{url}: there is no such object")
        if url in self.bucket.unreadable:
            raise RemoteError(f"{url}: access is denied")
        return found.data

    def _visible_from(self) -> float:
        lag = self.cluster.lag * LISTING_LAG_RATIO
        return self.cluster.scheduler.now + lag * self.cluster.random.random() if lag else 0.0

    def _do(self, name: str, url: str, act: Callable[[], Any]) -> Any:
        code, after = self.cluster.operate(self.process, name, url)
        self.bucket.now = self.cluster.server_time()
        error = RemoteError(f"{url}: {name}: {os.strerror(code)}") if code else None
        if error is not None and not after:
            raise error
        found = act()
        if error is not None:
            raise error
        return found
