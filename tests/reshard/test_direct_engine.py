"""The direct engine against numpy: bit for bit, from every layout to every other, and nothing left
when something fails."""

import errno
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import cuts
from rank_folders import STORAGE, dir_at, leaves_nothing
from reshard.plans import (
    COUNTERS,
    MODEL,
    Plan,
    Spec,
    foreign,
    part_of,
    put,
    random_tensors,
    recorded,
    region_of,
    transformer,
)

from mindresume import runtime
from mindresume.errors import ConfigError, CorruptFileError, LoadError
from mindresume.formats.consolidated import read_consolidated
from mindresume.model.layout import TensorLayout, elements, whole
from mindresume.reshard import direct_engine, range_reader
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, view_of_consolidated
from mindresume.reshard.conversion_plan import TargetFile
from mindresume.reshard.direct_engine import (
    BUFFERS,
    MIN_TILE,
    engine_for,
    tile_for,
    tiles,
    transform,
)
from mindresume.reshard.range_reader import TILE, OpenFiles, Traffic, bits_dtype
from mindresume.reshard.step_view import view_of_rank_folders
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import array_checksum, ckpt, file_checksum, read_header, read_tensor

TENSORS = random_tensors(MODEL)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """(plan, kind, format) -> (root, candidate), each written once."""
    known = {}

    def source(text, kind, fmt):
        if (text, kind, fmt) not in known:
            root = tmp_path_factory.mktemp("source")
            write = foreign if kind.startswith("foreign") else recorded
            known[text, kind, fmt] = (
                root,
                write(root, Plan.parse(text), TENSORS, fmt, dedup="dedup" in kind),
            )
        return known[text, kind, fmt]

    return source


def weights_of(source, text, kind, fmt):
    root, candidate = source(text, kind.removesuffix(" and strategy"), fmt)
    needed = "foreign" in kind or "strategy" in kind
    return view_of_rank_folders(
        dir_at(root), candidate, Plan.parse(text).strategy() if needed else None
    )


def targets_of(root, plan, fmt, extra=COUNTERS):
    """Returns empty rank files; their folders exist."""
    made = []
    for rank in range(plan.world_size):
        (root / f"rank_{rank}").mkdir(parents=True, exist_ok=True)
        holds = {
            **plan.regions(rank),
            **{name: whole(array.shape) for name, array in extra.items()},
        }
        made.append(TargetFile(str(root / f"rank_{rank}" / f"new.{fmt}"), fmt, holds, {"run": "7"}))
    return made


def check_file(target, sums, expected):
    """Checks one new file: its tensors bit for bit, its metadata, and the returned checksums."""
    with open(target.path, "rb") as file:
        assert file_checksum(file) == (sums.file, sums.size)
        header = read_header(file, target.path)
        assert dict(header.metadata) == target.metadata
        found = {name: read_tensor(file, entry) for name, entry in header.tensors.items()}
    assert found.keys() == expected.keys() == sums.tensors.keys()
    for name, array in expected.items():
        got = found[name]
        assert (got.dtype, got.shape, got.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        ), (target.path, name)
        assert sums.tensors[name] == array_checksum(array), (target.path, name)


def check(targets, sums, plan, tensors, extra=COUNTERS):
    for rank, (target, of_file) in enumerate(zip(targets, sums, strict=True)):
        check_file(target, of_file, {**plan.shard(tensors, rank), **extra})


def files_below(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file())


# ---- bit for bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_bytes", [7, 64, 1000])
@pytest.mark.parametrize("workers", [1, 3])
def test_tensors_in_several_slices_of_a_ckpt(tmp_path, monkeypatch, slice_bytes, workers):
    monkeypatch.setattr(ckpt, "SLICE_BYTES", slice_bytes)
    model = transformer(layers=2)
    tensors, source, target = (
        random_tensors(model),
        Plan.parse("dp2tp2opt2", model),
        Plan.parse("tp2pp2", model),
    )
    weights = view_of_rank_folders(dir_at(tmp_path), recorded(tmp_path, source, tensors, "ckpt"))
    assert (
        any(
            len(entry.ranges) > 2
            for header in weights.headers.values()
            for entry in header.tensors.values()
        )
        or slice_bytes == 1000
    )
    targets = targets_of(tmp_path / "to", target, "ckpt")
    check(targets, transform(weights, STORAGE, targets, workers, 100), target, tensors)


@settings(max_examples=40)
@given(
    cuts(least=0),
    cuts(least=0),
    st.sampled_from(["float32", "bfloat16", "int8", "int64"]),
    st.sampled_from([1, 24, 100]),
    st.integers(1, 3),
)
def test_any_layout_to_any_other(one, other, dtype, tile, workers):
    """Includes layouts that no MindSpore strategy describes: any device matrix, axes and optimizer
    shard."""
    (source, shape), (wanted, other_shape) = one, other
    if len(shape) != len(other_shape):
        wanted, other_shape = TensorLayout((1,), (-1,) * len(shape)), shape
    shape = tuple(math.lcm(a, b) if a and b else 0 for a, b in zip(shape, other_shape, strict=True))
    if math.prod(shape) > 3000:
        wanted, shape = source, one[1]
    array = random_tensors({"w": Spec(shape, None, 0, dtype)})["w"]
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            put(Path(folder, f"{rank}.safetensors"), {"w": part_of(array, source, rank)})
            for rank in range(source.stage_size)
        ]
        weights = CheckpointView(
            STORAGE,
            "test",
            {"w": Tensor("w", dtype, shape, source)},
            {rank: (str(path),) for rank, path in enumerate(paths)},
        )
        targets = [
            TargetFile(f"{folder}/new{rank}.ckpt", "ckpt", {"w": region_of(shape, wanted, rank)})
            for rank in range(wanted.stage_size)
        ]
        for rank, sums in enumerate(transform(weights, STORAGE, targets, workers, tile)):
            check_file(targets[rank], sums, {"w": part_of(array, wanted, rank)})


def test_tiles_are_bounded_and_in_order():
    tensors = [Tensor(name, spec.dtype, spec.shape) for name, spec in MODEL.items()]
    tensors += [
        Tensor(f"small{i}", "float16", (1,)) for i in range(2 * direct_engine.MAX_CHUNKS_IN_TILE)
    ]
    for size in (1, 64, 1000, 1 << 20):
        found = list(tiles(tensors, size))
        sizes = {
            name: np.dtype(bits_dtype(tensor.dtype)).itemsize
            for name, tensor in ((t.name, t) for t in tensors)
        }
        assert all(
            sum(elements(region) * sizes[tensor.name] for tensor, region in tile) <= max(size, 8)
            for tile in found
        )
        assert all(0 < len(tile) <= direct_engine.MAX_CHUNKS_IN_TILE for tile in found)
        order = [tensor.name for tile in found for tensor, _ in tile]
        assert [
            name for name, before in zip(order, ["", *order], strict=False) if name != before
        ] == [tensor.name for tensor in tensors if math.prod(tensor.shape)]
        total = Counter()
        for tile in found:
            for tensor, region in tile:
                total[tensor.name] += elements(region)
        assert all(total[tensor.name] == math.prod(tensor.shape) for tensor in tensors)


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("memory", [None, 10**6 * 3, 1 << 22, 100 << 20, 1 << 40])
def test_all_buffers_together_fit_into_the_memory(memory, workers):
    tile = tile_for(memory, workers)
    assert MIN_TILE <= tile <= TILE
    assert memory is None and tile == TILE or tile * BUFFERS * workers <= memory
    least = MIN_TILE * BUFFERS * workers
    assert tile_for(least, workers) == MIN_TILE
    with pytest.raises(
        ConfigError, match=f"{least - 1} bytes .*each needs at least {least // workers}"
    ):
        tile_for(least - 1, workers)


def test_engines():
    assert [engine_for("auto", fmt) for fmt in ("ckpt", "safetensors")] == ["mindspore", "direct"]
    assert engine_for("direct", "ckpt") == "direct" != engine_for("mindspore", "safetensors")


# ---- reads ---------------------------------------------------------------------------------------


class Watched(OpenFiles):
    """Records every read, and how many files were open at once."""

    last = None

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.reads, self.seen_open = [], 0
        Watched.last = self

    def read(self, path, position, out):
        self.reads.append((path, position, len(out)))
        super().read(path, position, out)
        self.seen_open = max(self.seen_open, len(self._open))


@pytest.mark.parametrize(
    "given, wanted, kind, fmt",
    [
        ("dp2tp2pp2opt2", "tp4", "recorded", "safetensors"),
        ("dp8", "tp8", "foreign", "safetensors"),
        ("dp4opt4", "dp2", "recorded", "ckpt"),
        ("dp2tp2axes10", "tp4", "foreign dedup", "safetensors"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_byte_is_read_once_and_in_order(
    sources, tmp_path, monkeypatch, given, wanted, kind, fmt, workers
):
    monkeypatch.setattr(direct_engine, "OpenFiles", Watched)
    weights = weights_of(sources, given, kind, fmt)
    transform(
        weights, STORAGE, targets_of(tmp_path, Plan.parse(wanted), "safetensors"), workers, 300
    )
    files = Watched.last
    assert files.traffic.read == sum(
        array.nbytes for array in (*TENSORS.values(), *COUNTERS.values())
    )
    ends, ordered = (
        {},
        files.reads if workers == 1 and fmt == "safetensors" else sorted(files.reads),
    )
    for path, position, count in ordered:
        assert position >= ends.get(path, 0), "read twice, or back"
        ends[path] = position + count
    assert not files._open, "all files are closed again"


@pytest.mark.parametrize("workers", [1, 3])
def test_more_files_than_may_be_open(sources, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(direct_engine, "OpenFiles", Watched)
    monkeypatch.setattr(range_reader, "MAX_OPEN", 3)
    weights, plan = weights_of(sources, "tp8", "recorded", "safetensors"), Plan.parse("tp2")
    targets = targets_of(tmp_path, plan, "safetensors")
    check(targets, transform(weights, STORAGE, targets, workers, 2000), plan, TENSORS)
    assert len({path for path, _, _ in Watched.last.reads}) == 8 and Watched.last.seen_open <= 3


def test_reading_beyond_a_tensor_is_refused(tmp_path):
    path = put(tmp_path / "a.safetensors", {"w": np.arange(8, dtype=np.int32)})
    with open(path, "rb") as file:
        entry = read_header(file, str(path)).tensors["w"]
    files = OpenFiles(STORAGE)
    with pytest.raises(CorruptFileError, match="4 bytes beyond the end"):
        range_reader.read_range(files, str(path), entry, 28, memoryview(bytearray(8)))
    files.close()


# ---- damage --------------------------------------------------------------------------------------

LITTLE = {name: spec for name, spec in transformer(layers=2).items() if "accu" not in name}


def small(folder, given="tp4", wanted="tp2pp2", write=foreign, fmt="safetensors", model=LITTLE):
    """Returns (weights, empty target files, (plan and tensors of the target))."""
    tensors, source, target = (
        random_tensors(model),
        Plan.parse(given, model),
        Plan.parse(wanted, model),
    )
    candidate = write(folder, source, tensors, fmt)
    strategy = source.strategy() if write is foreign else None
    weights = view_of_rank_folders(dir_at(folder), candidate, strategy)
    return weights, targets_of(folder / "to", target, "safetensors"), (target, tensors)


def places_of(weights):
    return [
        (name, weights.locate(name, cut))
        for name, tensor in weights.tensors.items()
        for cut in tensor.cuts(whole(tensor.shape))
    ]


@contextmanager
def failing(folder, error, match=None):
    """Asserts that the work inside raises the error and leaves nothing."""
    with leaves_nothing(folder), pytest.raises(error, match=match) as found:
        yield found
    assert files_below(folder / "to") == []


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_source_that_is_cut_after_its_header_was_read(tmp_path, fmt, workers, rank):
    weights, targets, _ = small(tmp_path, wanted="tp2", fmt=fmt)
    (path,) = weights.files[rank]
    places = [place for _, place in places_of(weights) if place.path == path]
    os.truncate(path, max(start for place in places for start, _ in place.entry.ranges) + 1)
    ends = r"the file ends at byte .* truncated since its header was read"
    with failing(tmp_path, CorruptFileError, ends) as found:
        transform(weights, STORAGE, targets, workers, 512)
    assert found.value.path == path


class Failing(PosixStorage):
    """Fails operation ``at`` (from 0) of one ``kind`` (create, head, data or finish) as a full disk
    does."""

    def __init__(self, kind="", at=-1):
        self.kind, self.at, self.done, self._lock = kind, at, Counter(), threading.Lock()

    def strike(self, kind):
        with self._lock:
            number = self.done[kind]
            self.done[kind] += 1
        if (kind, number) == (self.kind, self.at):
            raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path, size):
        self.strike("create")
        return FailingFile(self, super().create(path, size))


class FailingFile:
    def __init__(self, storage, inner):
        self.storage, self.inner, self.abandon = storage, inner, inner.abandon

    def write_at(self, position, data):
        self.storage.strike("data" if position else "head")
        self.inner.write_at(position, data)

    def finish(self):
        try:
            self.storage.strike("finish")
        except OSError:
            self.inner.abandon()  # as the protocol says
            raise
        self.inner.finish()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["create", "head", "data", "finish"])
def test_a_target_that_fails_leaves_nothing(tmp_path, kind, workers):
    model = {name: spec for name, spec in LITTLE.items() if not name.startswith("adam")}
    weights, targets, expected = small(tmp_path, "tp2", "dp2tp2opt2", recorded, model=model)
    working = Failing()
    check(targets, transform(weights, working, targets, workers, 512), *expected)
    for made in targets:
        os.remove(made.path)
    assert working.done[kind] >= 4
    for number in range(working.done[kind]):
        with failing(tmp_path, OSError, "No space left"):
            transform(weights, Failing(kind, number), targets, workers, 512)


# ---- targets that cannot be written --------------------------------------------------------------


def test_an_existing_target_is_kept(sources, tmp_path):
    weights, plan = weights_of(sources, "tp2", "foreign", "safetensors"), Plan.parse("tp4")
    targets = targets_of(tmp_path, plan, "safetensors")
    Path(targets[2].path).write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        transform(weights, STORAGE, targets)
    assert (
        files_below(tmp_path) == ["rank_2/new.safetensors"]
        and Path(targets[2].path).read_bytes() == b"precious"
    )


def test_a_text_of_a_ckpt_is_refused(tmp_path):
    path = put(tmp_path / "a.ckpt", {"note": np.array("abc"), "w": np.arange(4)})
    with pytest.raises(LoadError, match="a.ckpt: note is a text, not a tensor"):
        view_of_consolidated(STORAGE, read_consolidated(STORAGE, str(path)))


# ---- interrupted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_worker_is_not_lost(tmp_path, error):
    weights, targets, _ = small(tmp_path)
    struck = threading.Event()

    def progress(count):
        if threading.current_thread() is threading.main_thread():
            assert struck.wait(600)
        else:
            struck.set()
            raise error("in a worker")

    with failing(tmp_path, error, "in a worker"):
        transform(weights, STORAGE, targets, 3, 512, Traffic(progress=progress))


class Waiting(PosixStorage):
    """Calls ``begun`` at the first write of a worker, which continues when a file is abandoned, or
    after a while."""

    def __init__(self, begun):
        self.begun, self.taking, self.abandoned, self.too_early = (
            begun,
            threading.Lock(),
            threading.Event(),
            None,
        )

    def create(self, path, size):
        return WaitingFile(self, super().create(path, size))

    def check(self, folder):
        assert self.too_early is False, (
            "files were closed and removed while a worker still wrote into them"
        )
        assert files_below(folder / "to") == []


class WaitingFile:
    def __init__(self, storage, inner):
        self.storage, self.inner, self.finish = storage, inner, inner.finish

    def abandon(self):
        self.storage.abandoned.set()
        self.inner.abandon()

    def write_at(self, position, data):
        if threading.current_thread() is not threading.main_thread():
            with self.storage.taking:
                if self.storage.too_early is None:
                    self.storage.begun()
                    self.storage.too_early = self.storage.abandoned.wait(1)
        self.inner.write_at(position, data)


def waits_for_workers(thread):
    """Returns whether a thread has no tile left and waits in ``join`` or ``wait``."""
    frame, found = sys._current_frames()[thread], set()
    while frame is not None:
        found.add(frame.f_code)
        frame = frame.f_back
    waiting = {threading.Thread.join.__code__, threading.Condition.wait.__code__}
    return bool(found & waiting) and not found & {
        direct_engine._Transfer._serve.__code__,
        threading.Thread.start.__code__,
    }


def end(threads):
    """Ends the threads of a failed test. It identifies them by number: after an interrupted
    ``join``, CPython 3.10 to 3.12 reports a running thread as ended."""
    late = time.monotonic() + 600
    while set(threads) & set(sys._current_frames()) and time.monotonic() < late:
        pass


def test_ctrl_c_while_the_main_thread_waits_for_the_others(tmp_path):
    weights, targets, _ = small(tmp_path)
    main, workers = threading.main_thread().ident, []

    def press():
        workers.append(threading.get_ident())
        while not waits_for_workers(main):
            pass
        signal.pthread_kill(main, signal.SIGINT)

    storage = Waiting(press)
    with leaves_nothing(tmp_path):
        with pytest.raises(KeyboardInterrupt):
            transform(weights, storage, targets, 2, 512)
        end(workers)
    storage.check(tmp_path)


def test_a_thread_that_cannot_be_started(tmp_path, monkeypatch):
    weights, targets, _ = small(tmp_path)
    begun, writing = [], threading.Event()

    class Thread(threading.Thread):
        def start(self):
            if begun:
                assert writing.wait(600)
                raise RuntimeError("can't start new thread")
            begun.append(self)
            super().start()

    storage = Waiting(writing.set)
    with leaves_nothing(tmp_path):
        with (
            monkeypatch.context() as patch,
            pytest.raises(RuntimeError, match="can't start new thread"),
        ):
            patch.setattr(runtime, "Thread", Thread)
            transform(weights, storage, targets, 4, 512)
        end([thread.ident for thread in begun])
    storage.check(tmp_path)
