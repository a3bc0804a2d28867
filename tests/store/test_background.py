"""Saving behind the training, in a thread and in a process: nothing torn, nothing silent, no memory beyond one buffer."""
import os
import signal
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from folders import STORAGE, name_of, path_of, place_of, save, state_of, tensors_of, write_rank

from mindresume.agree import Solo
from mindresume.errors import FolderInUseError
from mindresume.files import read_header, read_tensor
from mindresume.formats.records import scan_records
from mindresume.manifest import run_name
from mindresume.resume.select import select
from mindresume.store import background
from mindresume.store.background import Background
from mindresume.store.retention import KEEP_ALL, KeepLast
from mindresume.store.saver import Extra, Save
from mindresume.store.shard import Place, rank_shard
from mindresume.store.staging import Staging
from mindresume.store.storage import PosixStorage

KINDS = ["thread", "process"]
PATIENCE = 600.0


def shard(step, rank=0, fmt="safetensors", tensors=None):
    return rank_shard(name_of(rank, step, 0, fmt), state_of(step), tensors or tensors_of(rank, step))


def saver_in(root, kind, world=1, rank=0, policy=KEEP_ALL, **options):
    return Background(place_of(root, rank, world), policy if rank == 0 else None, kind, **options)


def steps(root):
    return [candidate.step for candidate in scan_records(STORAGE, str(root))[0] if candidate.committed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_what_was_there_at_the_call_is_saved(tmp_path, kind, fmt):
    """Parameters change at once after the call, as the next step changes them."""
    saver = saver_in(tmp_path, kind)
    for step in (5, 10):
        tensors = tensors_of(0, step)
        expected = {name: array.copy() for name, array in tensors.items()}
        saver.save(Save(shard(step, fmt=fmt, tensors=tensors)))
        for array in tensors.values():
            array[...] = 0
        (outcome,) = saver.wait(PATIENCE)
        assert outcome.saved and outcome.error is None and outcome.size > 0
        path = path_of(tmp_path, step, 0, fmt=fmt)
        with open(path, "rb") as file:
            header = read_header(file, str(path))
            for name, array in expected.items():
                assert read_tensor(file, header.tensors[name]).tobytes() == array.tobytes(), name
    assert saver.finish(PATIENCE) == []
    assert steps(tmp_path) == [10, 5]
    assert select(STORAGE, str(tmp_path), Solo(), 1).chosen.step == 10


def test_every_dtype_text_and_shape_survives_the_buffer(tmp_path):
    tensors = {"bf16": np.arange(7, dtype=np.float32).astype(ml_dtypes.bfloat16), "zero": np.array(3, np.int64),
               "empty": np.zeros((0, 4), np.float16), "columns": np.arange(12, dtype=np.float64).reshape(3, 4).T,
               "flag": np.array([True, False]), "text": np.array("dynamic")}
    saver = saver_in(tmp_path, "process")
    saver.save(Save(shard(5, fmt="ckpt", tensors=tensors)))
    assert saver.finish(PATIENCE)[0].error is None
    with open(path_of(tmp_path, 5, 0, fmt="ckpt"), "rb") as file:
        header = read_header(file, "x.ckpt")
        for name, array in tensors.items():
            found = read_tensor(file, header.tensors[name])
            assert (found.shape, found.tobytes()) == (array.shape, array.tobytes()), name


def test_a_foreign_bfloat16_keeps_its_bits():
    """MindSpore brings a numpy type of its own of that name; values must not pass through a cast."""
    bits = np.array([0x7FC1, 0x0001, 0xFF80], np.uint16)            # a NaN with payload, a denormal, -infinity
    staging = Staging()
    save = Save(shard(5, tensors={"x": bits.view(ml_dtypes.bfloat16)}))
    unpacked = staging.unpack(staging.pack(save))
    assert unpacked.shard.files[0].tensors["x"].view(np.uint16).tolist() == bits.tolist()


def test_the_buffer_is_made_once_and_grows_only_for_more(tmp_path):
    staging = Staging()
    first = staging.pack(Save(shard(5)))
    memory = staging._memory
    staging.pack(Save(shard(10)))
    assert staging._memory is memory and staging.size == first.size == Staging.needed(Save(shard(5)))
    staging.pack(Save(shard(15, tensors={**tensors_of(0, 15), "more": np.zeros(1000)})))
    assert staging.size > first.size


class Stuck(PosixStorage):
    """A writer that looks at the folder before its first save waits for ``go``."""

    def __init__(self, go):
        self.go = go

    def list(self, folder):
        self.go.wait(PATIENCE)
        return super().list(folder)


def test_a_writer_that_the_training_did_not_wait_for_writes_no_zeros(tmp_path):
    """Its copy of the save is given back at the end of the training. The same for a thread that comes to it only then."""
    go = threading.Event()
    saver = Background(Place(Stuck(go), str(tmp_path), run_name(1, "0000aaaa"), 0, 1), KEEP_ALL, "thread")
    saver.save(Save(shard(5)))
    writer = saver._writer
    (outcome,) = saver.finish(0.05)
    assert not outcome.saved and "still being written" in str(outcome.error)
    go.set()
    writer.close()
    writer._thread.join(PATIENCE)
    assert os.listdir(tmp_path) == [] and steps(tmp_path) == []


class Slow(PosixStorage):
    """Weights stay in the writer until ``go`` exists."""

    def __init__(self, go):
        self.go = go

    def write(self, path, pieces, size=0):
        until = time.monotonic() + PATIENCE
        while size and not os.path.exists(self.go) and time.monotonic() < until:
            time.sleep(0.005)
        return super().write(path, pieces, size)


def slow_saver(tmp_path, kind, **options):
    place = Place(Slow(str(tmp_path / "go")), str(tmp_path / "checkpoint"), run_name(1, "0000aaaa"), 0, 1)
    return Background(place, KEEP_ALL, kind, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_goes_on_while_it_is_written(tmp_path, kind):
    saver = slow_saver(tmp_path, kind)
    saver.save(Save(shard(5)))
    assert saver.busy() and saver.poll() == []
    (tmp_path / "go").touch()
    assert [outcome.step for outcome in saver.wait(PATIENCE)] == [5]
    assert not saver.busy() and saver.counts.waited == 0
    saver.finish(PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_save_waits_and_is_counted(tmp_path, kind):
    saver = slow_saver(tmp_path, kind, timeout=0.05)
    saver.save(Save(shard(5)))
    saver.save(Save(shard(6)))
    (outcome,) = saver.poll()
    assert not outcome.saved and "step 5 is still being written after 0 s" in str(outcome.error)
    assert saver.counts.waited == 1
    (tmp_path / "go").touch()
    saver.timeout = PATIENCE
    saver.save(Save(shard(7)))
    assert [(o.step, o.saved) for o in saver.finish(PATIENCE)] == [(5, True), (7, True)]
    assert steps(tmp_path / "checkpoint") == [7, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_writer_comes_at_the_next_look_and_the_next_save_works(tmp_path, kind):
    saver = saver_in(tmp_path, kind)
    (tmp_path / "rank_0").write_text("a file in the way")
    saver.save(Save(shard(5)))
    (outcome,) = saver.wait(PATIENCE)
    assert not outcome.saved and "rank_0" in str(outcome.error) and "step 5" in str(outcome.error)
    (tmp_path / "rank_0").unlink()
    saver.save(Save(shard(10)))
    assert saver.finish(PATIENCE)[0].error is None
    assert steps(tmp_path) == [10]


def test_a_writer_process_that_is_killed_is_an_error_and_gets_a_successor(tmp_path):
    save(tmp_path / "checkpoint", 1, 1)
    saver = slow_saver(tmp_path, "process")
    saver.save(Save(shard(5)))
    os.kill(saver._writer._process.pid, signal.SIGKILL)
    (outcome,) = saver.wait(PATIENCE)
    assert not outcome.saved and "died (exit status -9)" in str(outcome.error)
    assert select(STORAGE, str(tmp_path / "checkpoint"), Solo(), 1).chosen.step == 1
    (tmp_path / "go").touch()
    saver.save(Save(shard(10)))
    assert saver.finish(PATIENCE)[0].saved
    assert steps(tmp_path / "checkpoint") == [10, 1]


@pytest.mark.parametrize("late", ["before the next step", "after it", "at the end"])
def test_the_successor_of_a_writer_that_was_killed_commits_what_that_one_had_saved(tmp_path, late):
    lines = []
    saver = saver_in(tmp_path, "process", world=2, log=lines.append)
    saver.save(Save(shard(5)))
    assert saver.wait(PATIENCE)[0].saved
    writer = saver._writer
    writer._process.kill()
    writer._process.wait()
    if late == "before the next step":
        write_rank(tmp_path, 5, 1, 2)
    if late != "at the end":
        assert saver.poll() == [] and saver._writer not in (None, writer)
    if late != "before the next step":
        write_rank(tmp_path, 5, 1, 2)
    assert saver.finish(PATIENCE) == [] and steps(tmp_path) == [5]
    assert ["exit status -9" in line for line in lines if "died" in line] == [True]


def test_the_successor_commits_no_older_step_behind_a_newer_one(tmp_path):
    lines = []
    saver = saver_in(tmp_path, "process", world=2, log=lines.append)
    saver.save(Save(shard(5)))
    saver.wait(PATIENCE)
    saver._writer._process.kill()
    saver._writer._process.wait()
    write_rank(tmp_path, 10, 1, 2)
    saver.save(Save(shard(10)))
    saver.wait(PATIENCE)
    assert steps(tmp_path) == [10]
    write_rank(tmp_path, 5, 1, 2)                               # too late
    saver.poll()
    assert saver.finish(PATIENCE) == [] and steps(tmp_path) == [10]
    assert sum("died" in line for line in lines) == 1


def test_a_writer_process_finishes_its_save_when_the_training_dies(tmp_path):
    saver = slow_saver(tmp_path, "process")
    saver.save(Save(shard(5)))
    process = saver._writer._process
    saver._writer._connection.close()
    (tmp_path / "go").touch()
    process.wait(PATIENCE)
    assert steps(tmp_path / "checkpoint") == [5]


@pytest.mark.parametrize("error", [OSError(11, "Resource temporarily unavailable"), RuntimeError("can't start new thread")])
def test_a_writer_that_cannot_be_started_is_an_error_of_the_save(tmp_path, monkeypatch, error):
    def start(*_):
        raise error
    saver = saver_in(tmp_path, "thread")
    with monkeypatch.context() as patched:
        patched.setitem(background._WRITERS, "thread", start)
        saver.save(Save(shard(5)))
        (outcome,) = saver.poll()
        assert not outcome.saved and str(error) in str(outcome.error)
    saver.save(Save(shard(10)))
    assert saver.finish(PATIENCE)[0].saved


def test_the_end_gives_the_memory_back(tmp_path):
    saver = saver_in(tmp_path, "process")
    saver.save(Save(shard(5)))
    memory = f"/proc/self/fd/{saver._staging.fd}"
    assert "memfd:mindresume" in os.readlink(memory)
    saver.finish(PATIENCE)
    assert saver._staging.fd == -1 and saver._staging.size == 0


def test_a_thread_that_ends_with_a_strange_error_is_an_error(tmp_path, monkeypatch):
    class Strange(PosixStorage):
        def make_folder(self, path):
            raise MemoryError("no bytes left")
    place = Place(Strange(), str(tmp_path), run_name(1, "0000aaaa"), 0, 1)
    saver = Background(place, KEEP_ALL, "thread")
    saver.save(Save(shard(5)))
    (outcome,) = saver.wait(PATIENCE)
    assert not outcome.saved and "MemoryError: no bytes left" in str(outcome.error)
    saver.finish(PATIENCE)


@pytest.mark.parametrize("options, reason", [({"budget": 64}, "staging_gib) is 0 MiB"), ({"share": 64}, "the share of this rank"),
                                             ({"available": lambda: 10}, "container, has left 0 MiB")])
@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_it_is_saved_in_the_training_thread(tmp_path, kind, options, reason):
    log = []
    saver = saver_in(tmp_path, kind, log=log.append, **options)
    saver.save(Save(shard(5)))
    assert path_of(tmp_path, 5, 0).exists()
    assert any("step 5 is saved in the training thread" in text and reason in text for text in log)
    assert saver.finish(PATIENCE)[0].saved and saver.counts.foreground == 1
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_commits_what_another_rank_completes_later(tmp_path, kind):
    saver = saver_in(tmp_path, kind, world=2, policy=KeepLast(1))
    saver.save(Save(shard(5)))
    assert saver.wait(PATIENCE)[0].saved
    assert steps(tmp_path) == []
    write_rank(tmp_path, 5, 1, 2)
    until = time.monotonic() + PATIENCE
    while not steps(tmp_path) and time.monotonic() < until:
        saver.poll()
        time.sleep(0.01)
    assert steps(tmp_path) == [5]
    saver.finish(PATIENCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_waits_for_the_other_ranks_and_names_them(tmp_path, kind):
    log = []
    saver = saver_in(tmp_path, kind, world=3, log=log.append)
    saver.save(Save(shard(5)))
    write_rank(tmp_path, 5, 2, 3)
    saver.wait(PATIENCE)
    saver.finish(0.3)
    assert any("step 5 is not committed: no record of rank 1 " in text for text in log)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_another_job_has_taken_over_stops_the_training(tmp_path, kind):
    saver = saver_in(tmp_path, kind)
    save(tmp_path, 5, 1, run=run_name(2, "0000bbbb"))
    saver.save(Save(shard(10)))
    with pytest.raises(FolderInUseError, match="0002-0000bbbb"):
        saver.wait(PATIENCE)
    with pytest.raises(FolderInUseError):
        saver.poll()


def test_a_new_writer_commits_what_the_dead_one_completed(tmp_path):
    write_rank(tmp_path, 5, 0, 1)
    saver = saver_in(tmp_path, "thread")
    saver.save(Save(shard(10)))
    saver.finish(PATIENCE)
    assert steps(tmp_path) == [10, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_files_for_inference_go_the_same_way(tmp_path, kind):
    weights = np.arange(10, dtype=np.float32)
    saver = saver_in(tmp_path / "checkpoint", kind)
    saver.save(Save(shard(5), (Extra(str(tmp_path / "network"), "net_rank_0-network-1_5.safetensors", "network", "safetensors",
                                     {"w": weights}, {}),)))
    weights[:] = 0
    assert saver.finish(PATIENCE)[0].error is None
    with open(tmp_path / "network" / "net_rank_0-network-1_5.safetensors", "rb") as file:
        header = read_header(file, "x.safetensors")
        assert read_tensor(file, header.tensors["w"]).tolist() == list(range(10))


def test_a_rank_that_only_writes_is_no_work_for_poll(tmp_path):
    saver = saver_in(tmp_path, "thread", world=2, rank=1)
    assert saver.poll() == [] and saver._writer is None
    saver.save(Save(shard(5, rank=1)))
    assert saver.finish(PATIENCE)[0].saved


def test_nothing_saved_nothing_to_finish(tmp_path):
    assert saver_in(tmp_path, "process").finish(PATIENCE) == []


def test_a_buffer_that_is_there_is_used_though_memory_is_short_now(tmp_path):
    left = [1 << 30]
    saver = saver_in(tmp_path, "thread", available=lambda: left[0])
    saver.save(Save(shard(5)))
    left[0] = 0
    saver.save(Save(shard(10)))
    saver.finish(PATIENCE)
    assert saver.counts.foreground == 0
