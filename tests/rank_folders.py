"""Rank folders for the tests, written by the product as several ranks would, or as mindformers
would; ranks as simulated processes or threads; what a test compares or damages."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import mindresume
from mindresume import runtime
from mindresume.formats import CheckpointDir
from mindresume.formats.rank_folders import FileName, folder_name, meta_json
from mindresume.model.manifest import TRASH, attempt_name, run_name
from mindresume.model.training_state import TrainingState
from mindresume.saving.committer import Committer
from mindresume.saving.retention import KEEP_ALL
from mindresume.saving.shard_writer import SaveTarget, rank_shard, write_shard
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import encode, read_header, read_tensor
from sim.cluster import Cluster, current_process
from sim.communicator import Communicator
from sim.machine import use_cluster
from sim.schedule import Schedule

STORAGE = PosixStorage()
RUN, LATER_RUN = run_name(1, "0000aaaa"), run_name(2, "0000bbbb")
# the folder of records, leases and marks of a checkpoint directory
RECORDS, MANIFEST = ".mindresume", "manifest.json"
PER_EPOCH = 10
LONGEST = 20_000  # simulated seconds that ranks may take


def dir_at(root: str | Path) -> CheckpointDir:
    return CheckpointDir(STORAGE, str(root))


def by_clock(time):
    """Lets the ``monotonic`` and the ``sleep`` of ``time`` answer for those of the machine."""
    return runtime.answers(
        {
            getattr(runtime, name): getattr(time, name)
            for name in ("monotonic", "sleep")
            if hasattr(time, name)
        }
    )


class _EveryRun:
    """Contains all runs: for a plan, all of them are over."""

    def __contains__(self, run: object) -> bool:
        return True


EVERY_RUN = _EveryRun()


def state_of(step: int, batch: int = 8) -> TrainingState:
    return TrainingState(step, PER_EPOCH, step, batch, 1.0, None, PER_EPOCH)


def tensors_of(rank: int, step: int, replicas: int = 2) -> dict[str, np.ndarray]:
    """Returns tensors of a data-parallel job: ranks with the same ``rank % replicas`` hold the same
    weights."""
    random = np.random.default_rng([rank % replicas, step])
    return {
        "embedding.weight": random.standard_normal((8, 4)).astype(np.float32),
        "adam_m.embedding.weight": random.standard_normal((8, 4)).astype(np.float32),
        "layer.bias": random.standard_normal(5).astype(np.float32),
        **counters(step),
    }


def counters(step: int, batch: int = 8) -> dict[str, np.ndarray]:
    return {
        "epoch_num": np.array(state_of(step).epoch, np.int64),
        "step_num": np.array(step, np.int64),
        "global_step": np.array([step], np.int32),
        "loss_scale": np.array(1.0, np.float32),
        "global_batch_size": np.array(batch, np.int64),
    }


def name_of(rank: int, step: int, suffix: int = 0, fmt: str = "safetensors") -> FileName:
    state = state_of(step)
    return FileName("net", rank, suffix, state.epoch, state.step_in_epoch, fmt)


def target_of(
    root: Path, rank: int, world: int, run: str = RUN, local_ranks: tuple[int, ...] = ()
) -> SaveTarget:
    return SaveTarget(STORAGE, str(root), run, rank, world, local_ranks=local_ranks)


def write_rank(
    root: Path,
    step: int,
    rank: int,
    world: int,
    run: str = RUN,
    fmt: str = "safetensors",
    suffix: int = 0,
    replicas: int = 2,
    at: float = 1000.0,
    local_ranks: tuple[int, ...] = (),
) -> None:
    shard = rank_shard(
        name_of(rank, step, suffix, fmt),
        state_of(step),
        tensors_of(rank, step, replicas),
        random={"python": f"of rank {rank}"},
        metadata={"format": "ms", "remove_redundancy": "False"},
    )
    write_shard(target_of(root, rank, world, run, local_ranks), shard, saved_at=at + step)


def save(
    root: Path,
    step: int,
    world: int = 4,
    run: str = RUN,
    fmt: str = "safetensors",
    suffix: int = 0,
    policy=KEEP_ALL,
    replicas: int = 2,
) -> Committer:
    """Writes a complete, committed checkpoint."""
    for rank in reversed(range(world)):
        write_rank(root, step, rank, world, run, fmt, suffix, replicas)
    committer = Committer(target_of(root, 0, world, run), policy)
    committer.poll(step)
    assert committer.pending == []
    return committer


def path_of(root: Path, step: int, rank: int, suffix: int = 0, fmt: str = "safetensors") -> Path:
    return Path(root) / folder_name(rank) / str(name_of(rank, step, suffix, fmt))


def records_of(root: Path | str, step: int, run: str = RUN) -> Path:
    """Returns the folder of the records of one saved step."""
    return Path(root) / RECORDS / attempt_name(step, run)


def trash(root: Path | str, step: int, run: str = RUN) -> None:
    """Leaves a removal that was cut short after its first operation."""
    records = records_of(root, step, run)
    records.rename(records.with_name(TRASH + records.name))


def tensors_at(root: Path | str, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns all tensors of a checkpoint in global shape; of the newest one without ``step``."""
    catalog = mindresume.open(root, hold=False)
    checkpoint = catalog.latest() if step is None else catalog[step]
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def committed_steps(root: Path | str) -> list[int]:
    """Returns the committed steps, newest first."""
    return [row.step for row in mindresume.open(root).list() if row.committed]


def write_foreign(
    root: Path,
    step: int,
    world: int = 4,
    suffix: int = 0,
    fmt: str = "safetensors",
    meta: bool = True,
    time: float | None = None,
    ranks: list[int] | None = None,
) -> None:
    """Writes a checkpoint as mindformers without mindresume does: no record, no label."""
    for rank in range(world) if ranks is None else ranks:
        path = path_of(root, step, rank, suffix, fmt)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"format": "ms", "remove_redundancy": "False"} if fmt == "safetensors" else {}
        path.write_bytes(
            b"".join(bytes(piece) for _, piece in encode(fmt, tensors_of(rank, step), metadata))
        )
        if time is not None:
            os.utime(path, (time, time))
        if meta:
            (path.parent / "meta.json").write_text(
                json.dumps(meta_json(name_of(rank, step, suffix, fmt)))
            )


class Ranks:
    """Several ranks, each with a Group, as processes of a simulated cluster: their order is the
    same each time, and no real time passes. What they do on a disk, they do on the real one.
    ``hosts``: by rank, the host that it runs on; default one for all. ``run(function)`` calls
    function(group) on all, returns the results; an error is one."""

    def __init__(self, size: int, hosts: Sequence[str] = ()):
        self.size, self.hosts = size, hosts or ["host"] * size

    def run(self, function) -> list:
        results: list = [None] * self.size
        cluster, communicator = Cluster(Schedule()), Communicator(self.size)

        def work(rank: int) -> None:
            try:
                results[rank] = function(communicator.member(rank, current_process()))
            except Exception as error:
                results[rank] = error

        with use_cluster(cluster):
            hosts = {name: cluster.host(name) for name in self.hosts}
            for rank, name in enumerate(self.hosts):
                cluster.process(hosts[name], f"rank{rank}", lambda rank=rank: work(rank))
            cluster.scheduler.run(until=lambda: cluster.scheduler.now > LONGEST)
            assert all(process.dead for process in cluster.processes), "a rank hangs"
        for process in cluster.processes:
            if process.error is not None:  # no Exception: pytest.fail, for one
                raise process.error
        assert not communicator.mismatch, communicator.mismatch
        return results


def simulated(function):
    """Returns ``function()``, called by a process of a simulated cluster: it and its threads live
    in simulated time."""
    (found,) = Ranks(1).run(lambda group: function())
    if isinstance(found, Exception):
        raise found
    return found


class Threads:
    """The same as real threads, for what reads with threads of its own pools, which a simulated
    cluster cannot run (``reshard``, ``mindformers/loading.py``). They meet in each exchange, and
    write to no common folder, so their order decides nothing."""

    def __init__(self, size: int):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=600)
        self.board: list[bytes] = [b""] * size

    class Member:
        def __init__(self, ranks: Threads, rank: int):
            self.ranks, self.rank, self.size = ranks, rank, ranks.size

        def gather(self, message: bytes) -> list[bytes]:
            self.ranks.board[self.rank] = message
            self.ranks.barrier.wait()
            replies = list(self.ranks.board)
            self.ranks.barrier.wait()
            return replies

        def broadcast(self, message: bytes) -> bytes:
            return self.gather(message)[0]

    def run(self, function) -> list:
        results: list = [None] * self.size

        def work(rank: int) -> None:
            try:
                results[rank] = function(self.Member(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return results


def folder_contents(folder: Path | str) -> dict[Path, bytes | None]:
    """Returns {path: bytes} of all files below a folder, {path: None} of all folders."""
    return {path: None if path.is_dir() else path.read_bytes() for path in Path(folder).rglob("*")}


def tensors_in(path: Path | str) -> dict[str, np.ndarray]:
    """Returns all tensors of a weight file."""
    with open(path, "rb") as file:
        return {
            name: read_tensor(file, entry)
            for name, entry in read_header(file, str(path)).tensors.items()
        }


def flip_bit(path: Path, offset: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def start_of(path: Path, tensor: str | None = None) -> int:
    """Returns where the bytes of a tensor begin in a weight file; of the first one that has any."""
    with open(path, "rb") as file:
        entries = read_header(file, str(path)).tensors
    return next(
        entry for name, entry in entries.items() if (name == tensor if tensor else entry.nbytes)
    ).ranges[0][0]


def damage(root: Path, step: int, rank: int, tensor: str = "embedding.weight") -> str:
    """Flips a bit of a tensor. Returns the path of its file."""
    path = path_of(root, step, rank)
    flip_bit(path, start_of(path, tensor))
    return str(path)


def leases(root: Path | str) -> list[str]:
    """Returns the names of the leases in a checkpoint directory: those of jobs, and of readers."""
    return sorted(path.name for path in (Path(root) / RECORDS).glob("claim-*"))


def open_below(folder: Path | str) -> list[str]:
    """Returns the files there that this process holds open. Threads of other tests may open others
    at any time."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
    return [path for path in found if path.startswith(str(folder))]


@contextmanager
def leaves_nothing(*folders: Path | str):
    """Asserts that the work inside ends all threads that it started, and closes all files below
    ``folders``. What threads of other tests do meanwhile does not count."""
    own, begun, start = threading.current_thread(), [], threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if threading.current_thread() is own or threading.current_thread() in begun:
            begun.append(thread)
        start(thread)

    threading.Thread.start = noted
    try:
        yield
    finally:
        threading.Thread.start = start
    threads = [thread.name for thread in begun if thread.is_alive()]
    files = [path for folder in folders for path in open_below(folder)]
    assert not threads and not files, f"left behind: threads {threads}, open files {files}"
