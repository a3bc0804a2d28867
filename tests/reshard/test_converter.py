"""A conversion is one transaction: after a failure or kill at any operation the target is absent or complete, the source is
unchanged, and the same conversion started again completes it. The result is a checkpoint."""
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from rank_folders import RUN, STORAGE, dir_at, flip_bit, open_below, state_of
from reshard.plans import (
    COUNTERS,
    MODEL,
    STEP,
    Plan,
    Spec,
    arrays_of,
    foreign,
    put,
    random_tensors,
    recorded,
    shard_file,
    tensors_of_rank,
)

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import ConfigError, CorruptFileError, OutOfSpaceError, SaveError
from mindresume.events import WARNING, ignore
from mindresume.fault_injection.faults import Fault, FaultInjector, Killed, RankStorage, Scheduler
from mindresume.formats.consolidated import HUGGINGFACE, MINDSPORE, read_consolidated
from mindresume.formats.rank_folders import META, parse_label
from mindresume.formats.scan import scan
from mindresume.formats.strategy import Strategy, write_strategy
from mindresume.model.layout import TensorLayout
from mindresume.model.manifest import FOLDER, read_details, run_sequence
from mindresume.reshard import converter as module
from mindresume.reshard.conversion_manifest import CONVERSION, read_conversion_manifest
from mindresume.reshard.conversion_plan import to_consolidated, to_ranks
from mindresume.reshard.converter import LOCK, Conversion, Share, remove_tree
from mindresume.reshard.engines import Engine
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.tensor_files import array_checksum, read_header

TINY = {"embedding.weight": Spec((4, 2), 0, "first"), "layers.1.weight": Spec((2, 4), 1, "last", "bfloat16")}
TENSORS = random_tensors(TINY)
ALL = random_tensors(MODEL)
SOLID = {name: spec for name, spec in MODEL.items() if name != "layers.1.none"}          # without the empty one
STEP_NUM = {"step_num": COUNTERS["step_num"]}


@pytest.fixture
def in_memory():
    """Returns a folder in memory: on disk the removal of thousands of files takes longer than the test."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns a recorded checkpoint of two ranks, sharded by tensor parallelism."""
    root = tmp_path_factory.mktemp("source") / "checkpoint"
    recorded(root, Plan.parse("tp2", TINY), TENSORS, extra=STEP_NUM)
    return root


def ranks_job(root, text="pp2", fmt="safetensors"):
    return to_ranks(open_checkpoint(STORAGE, str(root)), Plan.parse(text, TINY).strategy(), fmt)


def consolidated_job(root):
    return to_consolidated(open_checkpoint(STORAGE, str(root)), MINDSPORE, 32)


JOBS = {"ranks": ranks_job, "consolidated": consolidated_job}


def conversion(job, target, storage=STORAGE, emit=ignore):
    return Conversion(storage, job, str(target), emit, clock=lambda: 1000.0)


def carry_out(made):
    """Runs a conversion as the command line does: an error or Ctrl-C removes the unfinished work."""
    if not made.finished():
        made.run(Engine(workers=1))


def write(made, number):
    """Writes one group, as a process does that dies after it."""
    made.share = Share(number + 1, len(made.plan.groups))
    made.write(Engine())
    made.share = Share()


def contents(folder):
    """{path below: bytes, None for a folder}"""
    return {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in sorted(folder.rglob("*"))}


def stamps(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}


# ---- failures and kills ----------------------------------------------------------------------------------------------

CTRL_C = "Ctrl-C"


class Disk(RankStorage):
    """Is the view of a rank whose files are written in pieces."""

    def create(self, path, size):
        folder, name = os.path.split(path)
        with self.operation("create", path):
            self.injector.before_change(folder, name)
            made = STORAGE.create(path, size)
            self.injector.record_change({folder: {name: b""}})           # its bytes are not durable yet
        return Pieces(self, path, made)

    def count(self, name):
        return sum(operation.name == name for operation in self.injector.operations)


class Pieces:
    def __init__(self, disk, path, inner):
        self.disk, self.path, self.inner = disk, path, inner

    def write_at(self, position, data):
        with self.disk.operation("write_at", self.path):
            self.inner.write_at(position, data)

    def finish(self):
        try:
            with self.disk.operation("finish", self.path):
                self.inner.finish()
                self.disk.injector.record_change({
                    os.path.dirname(self.path): {os.path.basename(self.path): Path(self.path).read_bytes()}})
        except OSError:
            self.abandon()
            raise

    def abandon(self):
        if not self.disk.injector.dead:
            self.inner.abandon()
        elif self.inner._handle >= 0:               # a file of a dead process is closed and remains
            os.close(self.inner._handle)
            self.inner._handle = -1


class Interrupting(FaultInjector):
    """Raises Ctrl-C right after operation number ``fault.at``."""

    @contextmanager
    def operation(self, rank, name, path):
        try:
            with super().operation(rank, name, path) as is_torn:
                yield is_torn
        finally:
            if len(self.operations) == self.fault.at:
                raise KeyboardInterrupt


class CtrlC(Fault):
    def hits(self, operation):
        return False


def disk(kind="EIO", at=0):
    """Injects the fault at operation number ``at``, from 1; 0: never."""
    chance = random.Random(at)
    if kind == CTRL_C:
        return Disk(Interrupting(STORAGE, Scheduler(1, chance), CtrlC(at, kind), chance), 0)
    return Disk(FaultInjector(STORAGE, Scheduler(1, chance), Fault(at, kind), chance), 0)


def struck_by(kind, names):
    """Returns the numbers of the operations that a fault of this kind can hit."""
    return [at for at, name in enumerate(names, 1) if kind == CTRL_C or Fault(at, kind).hits(name)]


def on(disk_, job):
    """Returns the same job, whose source too is read through this storage."""
    weights = replace(job.source.weights, storage=disk_)
    return replace(job, source=replace(job.source, weights=weights))


@pytest.fixture(scope="module")
def expected(root, tmp_path_factory):
    """Returns the results of the conversions and the names of their operations."""
    found = {}
    for what, job in JOBS.items():
        out, watched = tmp_path_factory.mktemp(what), disk()
        carry_out(conversion(on(watched, job(root)), out / "new", watched))
        assert os.listdir(out) == ["new"]
        names = [operation.name for operation in watched.injector.operations]
        found[what] = contents(out / "new"), names
        assert len(set(names)) == 12                # every kind there is
    return found


def without_hints(found):
    return {path: content for path, content in found.items() if not path.endswith(META)}


@pytest.mark.parametrize("what, kind", [("ranks", "EIO"), ("ranks", "EIO after"), ("ranks", CTRL_C), ("consolidated", "EIO"),
                                        ("consolidated", CTRL_C)])
def test_an_error_or_ctrl_c_at_any_operation(in_memory, root, expected, what, kind):
    wanted, names = expected[what]
    job, before, raised, numbers = JOBS[what](root), contents(root), 0, struck_by(kind, names)
    for at in numbers:
        out, failing, log = in_memory / str(at), disk(kind, at), []
        try:
            carry_out(conversion(on(failing, job), out / "new", failing, log.append))
        except (OSError, SaveError, KeyboardInterrupt):
            raised += 1
            assert not out.exists() or not os.listdir(out) or contents(out / "new") == wanted, failing.injector.operations[at - 1]
        else:                                       # meta.json is a hint: its failure is only reported
            made = contents(out / "new")
            assert made == wanted or log and without_hints(made) == without_hints(wanted), failing.injector.operations[at - 1]
        struck = failing.injector.operations[at - 1]
        locks = {os.path.basename(struck.path)} if struck.path.endswith(LOCK) else set()      # its removal failed: next time
        assert not out.exists() or set(os.listdir(out)) <= {"new", *locks}, struck
        carry_out(conversion(job, out / "new"))
        assert without_hints(contents(out / "new")) == without_hints(wanted), failing.injector.operations[at - 1]
        assert os.listdir(out) == ["new"], failing.injector.operations[at - 1]
    assert raised > len(numbers) * 2 // 3 and contents(root) == before


@pytest.mark.parametrize("what, kind", [("ranks", "kill all"), ("ranks", "torn"), ("ranks", "power"), ("ranks", "reorder"),
                                        ("consolidated", "kill all"), ("consolidated", "power"), ("consolidated", "reorder")])
def test_a_conversion_survives_a_kill_at_any_operation(in_memory, root, expected, what, kind):
    """Killed, killed in the middle of a write, and power loss: unflushed bytes are lost completely or in part."""
    wanted, names = expected[what]
    job, before, went_on, numbers = JOBS[what](root), contents(root), 0, struck_by(kind, names)
    for at in numbers:
        out, dying, again = in_memory / str(at), disk(kind, at), disk()
        made = conversion(on(dying, job), out / "new", dying)
        with pytest.raises(Killed):
            carry_out(made)
        if made._lock >= 0:
            os.close(made._lock)                    # as the kernel does
        struck = dying.injector.operations[at - 1]
        there = (out / "new").exists()
        assert not there or contents(out / "new") == wanted, struck
        done = {int(name[:-len(".json")]) for name in STORAGE.list(f"{made.work}/done") if not name.startswith(".")}
        carry_out(conversion(on(again, job), out / "new", again))
        assert contents(out / "new") == wanted and os.listdir(out) == ["new"], struck
        missing = [] if there else [group for number, group in enumerate(job.groups) if number not in done]
        assert again.count("create") == sum(map(len, missing)), struck          # what was finished is not done again
        went_on += bool(done)
    assert contents(root) == before and went_on > len(numbers) // 3


@pytest.mark.parametrize("what", JOBS)
def test_a_power_loss_after_the_end_loses_nothing(in_memory, root, expected, what):
    durable = disk()
    carry_out(conversion(on(durable, JOBS[what](root)), in_memory / "deep" / "new", durable))
    durable.injector.lose_power(0.0)
    assert contents(in_memory / "deep" / "new") == expected[what][0] and os.listdir(in_memory / "deep") == ["new"]


def test_a_killed_conversion_continues_where_it_stopped(tmp_path, root, expected):
    first, events = conversion(ranks_job(root), tmp_path / "new"), []
    first.prepare()
    write(first, 1)
    first._release()
    before = stamps(Path(first.work) / "rank_1")
    carry_out(conversion(ranks_job(root), tmp_path / "new", emit=events.append))
    after = stamps(tmp_path / "new" / "rank_1")
    assert before and {(path.name, stamp) for path, stamp in before.items()} <= {(p.name, stamp) for p, stamp in after.items()}
    assert "part 2 of 2" in events[0].text and contents(tmp_path / "new") == expected["ranks"][0]


@pytest.mark.parametrize("spoil", ["a torn mark", "a shorter file", "a missing file"])
def test_changed_files_are_written_again(tmp_path, root, expected, spoil):
    first, again = conversion(ranks_job(root), tmp_path / "new"), disk()
    first.prepare()
    first.write(Engine())
    first._release()
    made = Path(first.work) / "rank_1" / "net_rank_1-2_5.safetensors"
    if spoil == "a torn mark":
        flip_bit(Path(first.work) / "done" / "1.json")
    elif spoil == "a shorter file":
        os.truncate(made, made.stat().st_size - 1)
    else:
        made.unlink()
    carry_out(conversion(ranks_job(root), tmp_path / "new", again))
    assert contents(tmp_path / "new") == expected["ranks"][0] and again.count("create") == 1


def test_a_killed_conversion_continues_with_another_memory_share(tmp_path, root, expected):
    first = conversion(ranks_job(root), tmp_path / "new")
    first.prepare()
    write(first, 0)
    first._release()
    job = to_ranks(open_checkpoint(STORAGE, str(root)), Plan.parse("pp2", TINY).strategy(), "safetensors", ranks_per_group=2)
    carry_out(conversion(job, tmp_path / "new"))
    assert contents(tmp_path / "new") == expected["ranks"][0]


def test_nothing_is_committed_while_a_group_is_missing(tmp_path, root):
    made = conversion(ranks_job(root), tmp_path / "new")
    made.prepare()
    write(made, 0)
    with pytest.raises(SaveError, match=r"part 2 of 2 was not written"):
        made.commit()
    assert not (tmp_path / "new").exists()
    made.abandon()
    assert os.listdir(tmp_path) == []


# ---- the target ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("what", JOBS)
def test_the_same_conversion_again_does_nothing(tmp_path, root, what):
    carry_out(conversion(JOBS[what](root), tmp_path / "new"))
    before, again = stamps(tmp_path), disk()
    made = conversion(JOBS[what](root), tmp_path / "new", again)
    assert made.finished()
    assert stamps(tmp_path) == before
    assert {operation.name for operation in again.injector.operations} <= {"list", "status", "open"}


def other_jobs(root):
    return {"plan": ranks_job(root, "tp2"), "format": ranks_job(root, fmt="ckpt"), "consolidated": consolidated_job(root),
            "one rank": to_ranks(open_checkpoint(STORAGE, str(root)), None, "safetensors"),
            "kind": to_consolidated(open_checkpoint(STORAGE, str(root)), HUGGINGFACE, 32),
            "parts": to_consolidated(open_checkpoint(STORAGE, str(root)), MINDSPORE, 64),
            "drop": to_consolidated(open_checkpoint(STORAGE, str(root)), MINDSPORE, 32, ("embedding*",))}


def test_different_conversions_have_different_work_folders(tmp_path, root):
    recorded(tmp_path / "other", Plan.parse("tp2", TINY), random_tensors(TINY, 1), extra=STEP_NUM)
    shutil.copytree(root, tmp_path / "copy")
    jobs = [ranks_job(root), ranks_job(tmp_path / "other"), *other_jobs(root).values()]
    assert len({job.fingerprint for job in jobs}) == len(jobs) == len({conversion(job, tmp_path / "new").work for job in jobs})
    assert ranks_job(tmp_path / "copy").fingerprint == ranks_job(root).fingerprint          # the same records: the same bytes


@pytest.mark.parametrize("what", ["plan", "format", "consolidated", "one rank", "kind", "parts", "drop"])
def test_another_conversion_into_the_same_folder_is_refused(tmp_path, root, what):
    first = consolidated_job(root) if what in ("kind", "parts", "drop") else ranks_job(root)
    carry_out(conversion(first, tmp_path / "new"))
    before = stamps(tmp_path)
    with pytest.raises(ConfigError, match=r"new is not empty: it was converted from .*checkpoint, step 15, 2 ranks; .* Nothing "
                                          r"was changed"):
        carry_out(conversion(other_jobs(root)[what], tmp_path / "new"))
    assert stamps(tmp_path) == before


def test_another_strategy_of_the_source_is_another_conversion(tmp_path):
    """Files of mindformers do not contain the cut dimension: the result with a wrong strategy differs from the right one and must
    not be reused for it."""
    model = {"w": Spec((4, 4), 0, "first")}
    tensors = random_tensors(model)
    foreign(tmp_path / "from", Plan.parse("tp2", model), tensors)
    for name, cuts in (("wrong", (-1, 0)), ("right", (0, -1))):
        write_strategy(Strategy(({"w": TensorLayout((1, 2), cuts)},)), str(tmp_path / name))
        source = open_checkpoint(STORAGE, str(tmp_path / "from"), strategy=str(tmp_path / name))
        made = conversion(to_ranks(source, None, "safetensors"), tmp_path / "new")
        if name == "right":
            with pytest.raises(ConfigError, match="is not empty: it was converted from"):
                made.finished()
            made = conversion(made.plan, tmp_path / "new of right")
        carry_out(made)
        found = tensors_of_rank(Path(made.target), 0)
        assert (found["w"].tobytes() == tensors["w"].tobytes()) is (name == "right")
    assert (tmp_path / "new of right").exists()


@pytest.mark.parametrize("content", ["notes.txt", ".hidden", CONVERSION, "rank_0/"])
def test_a_target_with_something_in_it_is_refused(tmp_path, root, content):
    path = tmp_path / "new" / content
    path.parent.mkdir()
    path.mkdir() if content.endswith("/") else path.write_text("precious")
    before = stamps(tmp_path)
    with pytest.raises(ConfigError, match="new is not empty; give a folder that does not exist. Nothing was changed"):
        carry_out(conversion(ranks_job(root), tmp_path / "new"))
    assert stamps(tmp_path) == before


def test_a_target_that_is_a_file(tmp_path, root):
    (tmp_path / "new").write_text("precious")
    with pytest.raises(ConfigError, match="new is a file; give a folder that does not exist"):
        carry_out(conversion(ranks_job(root), tmp_path / "new"))
    assert contents(tmp_path) == {"new": b"precious"}


@pytest.mark.parametrize("spoil", ["is gone", "has [0-9]+ bytes instead of"])
def test_a_target_that_was_damaged_later_is_refused(tmp_path, root, spoil):
    carry_out(conversion(ranks_job(root), tmp_path / "new"))
    path = tmp_path / "new" / "rank_1" / "net_rank_1-2_5.safetensors"
    path.unlink() if spoil == "is gone" else os.truncate(path, 7)
    with pytest.raises(ConfigError, match=rf"its file rank_1/net_rank_1-2_5.safetensors {spoil}.*; remove the folder"):
        carry_out(conversion(ranks_job(root), tmp_path / "new"))


def test_a_target_in_the_source_is_refused(tmp_path):
    source, plan = tmp_path / "checkpoint", Plan.parse("tp2", TINY)
    recorded(source, plan, TENSORS, extra=STEP_NUM)
    (tmp_path / "link").symlink_to(source)
    before = contents(source)
    for target in (source / "new", source / "rank_0" / "new", tmp_path / "link" / "new", source / "rank_7", source / "a" / "b"):
        with pytest.raises(ConfigError, match=r"lies in .*checkpoint, the source, into which nothing is written"):
            carry_out(conversion(ranks_job(source), target))
    for target in (source, source / "rank_0", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is not empty|lies in"):
            carry_out(conversion(ranks_job(source), target))
    assert contents(source) == before and sorted(os.listdir(tmp_path)) == ["checkpoint", "link"]
    carry_out(conversion(ranks_job(source), tmp_path / "checkpoint2"))          # a name that begins alike is another folder


def test_a_target_beside_a_single_file(tmp_path):
    put(tmp_path / "net.safetensors", {**TENSORS, **STEP_NUM})
    carry_out(conversion(ranks_job(tmp_path / "net.safetensors", "dp2"), tmp_path / "new"))
    assert len(scan(dir_at(tmp_path / "new")).candidates) == 1


@pytest.mark.parametrize("target", ["new", "new/", "./new", "deep/er/new", "deep/../new", "empty", "empty/"])
def test_ways_to_name_a_target(tmp_path, root, expected, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    os.mkdir("empty")
    os.mkdir("deep") if ".." in target else None
    carry_out(conversion(ranks_job(root), target))
    assert contents(tmp_path / target) == expected["ranks"][0]
    assert not [path for path in tmp_path.rglob(".new*")] + [path for path in tmp_path.rglob(".empty*")]
    assert conversion(ranks_job(root), target).finished()


@pytest.mark.parametrize("target", ["link", "dangling", "."])
def test_a_target_that_no_folder_can_be_renamed_to(tmp_path, root, monkeypatch, target):
    """Either it is refused before the first byte, or it works."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "empty")
    watched = disk()
    try:
        carry_out(conversion(ranks_job(root), target if target == "." else tmp_path / target, watched))
    except ConfigError:
        assert not watched.count("create")


# ---- room and locks --------------------------------------------------------------------------------------------------

class Room(Disk):
    bytes = 0

    def free_space(self, folder):
        return self.bytes


def test_too_little_room_is_seen_before_the_first_byte(tmp_path, root):
    job = ranks_job(root)
    small = Room(FaultInjector(STORAGE, Scheduler(1, random.Random(0))), 0)
    small.bytes = job.size() + module._SPARE - 1
    (tmp_path / "out").mkdir()
    with pytest.raises(OutOfSpaceError, match=r"new needs 1\.0 MiB, there is room for 1\.0 MiB. Nothing was written"):
        carry_out(conversion(job, tmp_path / "out" / "new", small))
    assert not small.count("create") and not small.count("write") and contents(tmp_path / "out") == {}
    small.bytes += 1
    carry_out(conversion(job, tmp_path / "out" / "new", small))
    assert job.size() == sum(path.stat().st_size for path in (tmp_path / "out" / "new").glob("rank_*/*.safetensors"))


def test_finished_files_need_no_space(tmp_path, root):
    job, first = ranks_job(root), conversion(ranks_job(root), tmp_path / "new")
    first.prepare()
    write(first, 0)
    first._release()
    small = Room(FaultInjector(STORAGE, Scheduler(1, random.Random(0))), 0)
    small.bytes = module._SPARE + (Path(first.work) / "rank_0" / "net_rank_0-2_5.safetensors").stat().st_size
    carry_out(conversion(job, tmp_path / "new", small))


RUNNING = r"the same conversion to .*new is running in another process; wait for it, and then start this one again"


def test_the_same_conversion_twice_at_once(tmp_path, root, expected):
    first, second = (conversion(ranks_job(root), tmp_path / "new") for _ in range(2))
    first.prepare()
    write(first, 0)
    before = stamps(tmp_path)
    for _ in range(2):
        with pytest.raises(SaveError, match=RUNNING):
            second.prepare()
    assert stamps(tmp_path) == before
    first.write(Engine())
    first.commit()
    assert contents(tmp_path / "new") == expected["ranks"][0] and os.listdir(tmp_path) == ["new"]
    assert second.finished()


def test_the_same_conversion_in_another_process(tmp_path, root, expected):
    made = conversion(ranks_job(root), tmp_path / "new")
    os.makedirs(made.work)
    code = "import fcntl, sys; lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, made.work + LOCK], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(SaveError, match=RUNNING):
            made.prepare()
        other.kill()                                # its lock is removed with it
    carry_out(made)
    assert contents(tmp_path / "new") == expected["ranks"][0]


def test_two_different_conversions_at_once(tmp_path, root):
    """Both may run; the second one to commit finds that the target exists, and leaves the first one's files alone."""
    first, second = conversion(ranks_job(root), tmp_path / "new"), conversion(consolidated_job(root), tmp_path / "new")
    for made in (first, second):
        assert not made.finished()
        made.prepare()
        made.write(Engine())
    first.commit()
    before = stamps(tmp_path / "new")
    with pytest.raises(OSError, match="not empty"):
        second.commit()
    second.abandon()
    assert stamps(tmp_path / "new") == before and os.listdir(tmp_path) == ["new"]


class Meanwhile(Disk):
    """Calls ``act`` once, right before the operation for which ``when(name, path)`` is true."""
    when = then = None

    def operation(self, name, path):
        if self.when and self.when(name, path):
            self.when = None
            self.then()
        return super().operation(name, path)


def test_the_other_process_commits_between_our_check_and_our_lock(tmp_path, root, expected):
    first, second = (conversion(ranks_job(root), tmp_path / "new") for _ in range(2))
    assert not second.finished()
    carry_out(first)
    before = stamps(tmp_path / "new")
    with suppress(OSError, SaveError, ConfigError):
        second.prepare()
        second.write(Engine())
        second.commit()
    second.abandon()
    assert stamps(tmp_path / "new") == before and contents(tmp_path / "new") == expected["ranks"][0]
    assert os.listdir(tmp_path) == ["new"]


@pytest.mark.parametrize("operation", ["sync", "rename"])
def test_no_conversion_starts_between_the_end_of_the_lock_and_the_rename(tmp_path, root, expected, operation):
    committing = Meanwhile(FaultInjector(STORAGE, Scheduler(1, random.Random(0))), 0)
    first, second, started = conversion(ranks_job(root), tmp_path / "new", committing), conversion(
        ranks_job(root), tmp_path / "new"), []
    committing.when = lambda name, path: name == operation and path == first.work and not os.path.exists(path + LOCK)

    def start():
        with suppress(SaveError):
            second.prepare()
            started.append(True)
            write(second, 0)
    committing.then = start
    with suppress(pytest.fail.Exception):
        carry_out(first)
    second._release()
    assert not started and contents(tmp_path / "new") == expected["ranks"][0]


def test_a_file_system_without_locks(tmp_path, root, expected, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    events = []
    carry_out(conversion(ranks_job(root), tmp_path / "new", emit=events.append))
    assert contents(tmp_path / "new") == expected["ranks"][0] and "[Errno 37] No locks available" in events[0].text
    assert events[0].level == WARNING


def test_two_at_once_without_locks(tmp_path, root, expected, monkeypatch):
    """Neither finds the work of the other, so neither removes it; the second one gets an error."""
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(module.fcntl, "flock", no_locks)
    first, second = (conversion(ranks_job(root), tmp_path / "new") for _ in range(2))
    first.prepare()
    second.prepare()
    assert first.work != second.work
    for made in (first, second):
        made.write(Engine())
    first.commit()
    with pytest.raises(OSError):
        second.commit()
    second.abandon()
    assert contents(tmp_path / "new") == expected["ranks"][0] and os.listdir(tmp_path) == ["new"]


def test_no_file_stays_open(tmp_path, root):
    for number in range(3):
        carry_out(conversion(ranks_job(root), tmp_path / str(number)))
    failing = disk("EIO", 30)
    with pytest.raises(OSError):
        carry_out(conversion(on(failing, ranks_job(root)), tmp_path / "new", failing))
    assert open_below(tmp_path) == [] == open_below(root)


def test_removal_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("precious")
    (tmp_path / "gone" / "folder").mkdir(parents=True)
    (tmp_path / "gone" / "folder" / "file").write_text("")
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "dangling").symlink_to(tmp_path / "nowhere")
    remove_tree(STORAGE, str(tmp_path / "gone"))
    assert contents(tmp_path) == {"kept": None, "kept/file": b"precious"}


# ---- the target is a checkpoint --------------------------------------------------------------------------------------

def convert(source, target, plan, fmt="safetensors", model=MODEL, **options):
    """``plan``: text, or None for one rank. Returns the target."""
    strategy = None if plan is None else Plan.parse(plan, model).strategy()
    carry_out(conversion(to_ranks(open_checkpoint(STORAGE, str(source), **options), strategy, fmt), target))
    return target


def check(folder, plan, tensors=ALL, extra=COUNTERS):
    """Checks that every rank has exactly the slices of the plan, bit for bit."""
    for rank in range(plan.world_size):
        wanted, found = shard_file(plan, tensors, rank, extra=extra), tensors_of_rank(folder, rank)
        assert {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in wanted.items()} == \
            {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in found.items()}


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_the_target_is_a_checkpoint(tmp_path, fmt):
    plan = Plan.parse("dp2tp2pp2opt2")
    recorded(tmp_path / "a", Plan.parse("tp4"), ALL, fmt)
    convert(tmp_path / "a", tmp_path / "b", "dp2tp2pp2opt2", fmt)
    check(tmp_path / "b", plan)
    choice = select_checkpoint(STORAGE, str(tmp_path / "b"), SingleProcess(),
                    SelectionPolicy(8, ranks_to_verify=lambda _, candidate: range(8)))
    candidate, run = choice.chosen, choice.chosen.run
    assert (candidate.step, candidate.world_size, candidate.format, candidate.committed) == (STEP, 8, fmt, True)
    assert candidate.state == state_of(STEP) and run_sequence(run) == 1 and run != RUN
    assert choice.refused == choice.notes == () and choice.bytes_verified and len(choice.shards) == 8
    for rank in range(8):
        attempt = tmp_path / "b" / FOLDER / f"step-{STEP:010d}-run-{run}"
        with open(attempt / f"rank_{rank:05d}.json", "rb") as file:
            record, details = read_details(file)
        assert (record.run, record.rank, record.world_size, record.state) == (run, rank, 8, state_of(STEP))
        assert {name: row.layout for name, row in details.tensors.items() if row.layout} == plan.strategy().of_rank(rank)
        assert all(row.global_shape == ALL[name].shape for name, row in details.tensors.items() if row.layout)
        path = tmp_path / "b" / f"rank_{rank}" / f"net_rank_{rank}-2_5.{fmt}"
        with open(path, "rb") as file:
            header = read_header(file, str(path))
        assert parse_label(header) == (run, STEP)
        assert fmt == "ckpt" or header.metadata["format"] == "ms" and header.metadata["remove_redundancy"] == "False"
        assert rank or json.loads((path.parent / META).read_text()) == {
            "last_epoch": 2, "last_step": 5, "last_ckpt_file": path.name}
    assert not [path for path in tmp_path.rglob("*tmp*")] and not (tmp_path / "b" / LOCK).exists()


@pytest.mark.parametrize("write", [foreign, recorded])
@pytest.mark.parametrize("chain", ["tp4 dp2tp2pp2opt2 dp4opt4", "dp4opt-1 tp2pp2 dp8", "dp2tp2axes10 pp4 tp8opt1"])
def test_a_chain_of_conversions_returns_to_the_same_bits(tmp_path, write, chain):
    """Only the first conversion gets its strategy as an argument."""
    start, *rest = chain.split()
    write(tmp_path / "0", Plan.parse(start), ALL)
    options = {}
    if write is foreign:
        write_strategy(Plan.parse(start).strategy(), str(tmp_path / "strategy"))
    for number, (text, fmt) in enumerate(zip([*rest, start], ["ckpt", "safetensors", "safetensors"], strict=True), 1):
        convert(tmp_path / str(number - 1), tmp_path / str(number), text, fmt, **options)
        check(tmp_path / str(number), Plan.parse(text))
    direct = convert(tmp_path / "0", tmp_path / "direct", start)
    for rank in range(Plan.parse(start).world_size):
        last, straight = tensors_of_rank(tmp_path / "3", rank), tensors_of_rank(direct, rank)
        assert list(last) == list(straight)
        assert [a.tobytes() for a in last.values()] == [a.tobytes() for a in straight.values()]
    assert scan(dir_at(tmp_path / "3")).candidates[0].state.step == STEP


def test_names_and_formats_of_foreign_sources(tmp_path):
    """mindformers' names with a suffix of the run: the same name, without it."""
    plan = Plan.parse("tp2", TINY)
    for rank in range(2):
        put(tmp_path / "a" / f"rank_{rank}" / f"llama_rank_{rank}_1-12_2.ckpt",
            shard_file(plan, TENSORS, rank, extra={**COUNTERS, "step_num": np.array(112, np.int64)}))
    write_strategy(plan.strategy(), str(tmp_path / "of a"))
    convert(tmp_path / "a", tmp_path / "b", "dp2", "ckpt", TINY, strategy=str(tmp_path / "of a"))
    assert sorted(path.name for path in (tmp_path / "b").glob("rank_*/*.ckpt")) == [
        "llama_rank_0-12_2.ckpt", "llama_rank_1-12_2.ckpt"]
    candidate, = scan(dir_at(tmp_path / "b")).candidates
    state = candidate.state
    assert (state.step, state.steps_per_epoch, state.epoch, state.step_in_epoch) == (112, 10, 12, 2)
    assert json.loads((tmp_path / "b" / "rank_0" / META).read_text())["last_ckpt_file"] == "llama_rank_0-12_2.ckpt"
    assert convert(tmp_path / "b", tmp_path / "c", "tp2", "safetensors", TINY)
    assert (tmp_path / "c" / "rank_0" / "llama_rank_0-12_2.safetensors").exists()


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_other_names(tmp_path, fmt):
    """Files of MindSpore's transform are called ``checkpoint_<rank>``; with counters they get the name of a training."""
    plan = Plan.parse("tp2", TINY)
    for extra, name in ((COUNTERS, "checkpoint_rank_1-"), ({}, f"checkpoint_1.{fmt}")):
        folder = tmp_path / str(len(extra))
        for rank in range(2):
            put(folder / "a" / f"rank_{rank}" / f"checkpoint_{rank}.{fmt}", shard_file(plan, TENSORS, rank, extra=extra))
        write_strategy(plan.strategy(), str(folder / "strategy"))
        convert(folder / "a", folder / "b", "dp2", fmt, TINY)
        made, = [path.name for path in (folder / "b" / "rank_1").iterdir() if path.name != META]
        assert made.startswith(name) and made.endswith(fmt)
        check(folder / "b", Plan.parse("dp2", TINY), TENSORS, extra)


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_weights_without_step_num_are_converted_and_have_no_records(tmp_path, fmt):
    foreign(tmp_path / "run" / "checkpoint", Plan.parse("tp2pp2"), ALL, fmt, extra={})
    write_strategy(Plan.parse("tp2pp2").strategy(), str(tmp_path / "run" / "strategy"))
    convert(tmp_path / "run" / "checkpoint", tmp_path / "b", "dp2tp2", fmt)
    check(tmp_path / "b", Plan.parse("dp2tp2"), extra={})
    assert sorted(os.listdir(tmp_path / "b")) == [CONVERSION, "rank_0", "rank_1", "rank_2", "rank_3"]
    assert not list(tmp_path.glob(f"b/*/{META}"))
    candidate, = scan(dir_at(tmp_path / "b")).candidates
    assert candidate.step is None and "weights only" in candidate.problem.reason
    with open(tmp_path / "b" / "rank_0" / f"net_rank_0-2_5.{fmt}", "rb") as file:
        assert parse_label(read_header(file, f"x.{fmt}")) is None


@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_a_target_of_one_rank_is_written(tmp_path, fmt):
    recorded(tmp_path / "a", Plan.parse("dp2tp2pp2opt2"), ALL)
    convert(tmp_path / "a", tmp_path / "b", None, fmt)
    check(tmp_path / "b", Plan.parse("dp1"))
    convert(tmp_path / "b", tmp_path / "c", "dp2tp2")
    check(tmp_path / "c", Plan.parse("dp2tp2"))


def test_removed_redundancy_is_restored(tmp_path):
    recorded(tmp_path / "a", Plan.parse("dp4"), ALL, dedup=True)
    convert(tmp_path / "a", tmp_path / "b", "dp2tp2")
    check(tmp_path / "b", Plan.parse("dp2tp2"))


def test_lost_files_of_the_target_are_replaced_by_replicas(tmp_path):
    recorded(tmp_path / "a", Plan.parse("tp2"), ALL)
    convert(tmp_path / "a", tmp_path / "b", "dp2tp2")
    (tmp_path / "b" / "rank_3" / "net_rank_3-2_5.safetensors").unlink()
    choice = select_checkpoint(STORAGE, str(tmp_path / "b"), SingleProcess(),
                    SelectionPolicy(4, ranks_to_verify=lambda _, candidate: range(4)))
    assert choice.chosen.step == STEP and not choice.refused
    convert(tmp_path / "b", tmp_path / "c", "tp4")
    check(tmp_path / "c", Plan.parse("tp4"))


# ---- consolidated weights ------------------------------------------------------------------------------------------------

def merge(source, target, kind=MINDSPORE, part_bytes=2000, drop=()):
    carry_out(conversion(to_consolidated(open_checkpoint(STORAGE, str(source)), kind, part_bytes, drop), target))
    return read_consolidated(STORAGE, str(target))


@pytest.mark.parametrize("write", [recorded, foreign])
@pytest.mark.parametrize("fmt", ["safetensors", "ckpt"])
def test_merged_weights_are_read_back_and_cut_again(tmp_path, write, fmt):
    write(tmp_path / "run" / "checkpoint", Plan.parse("dp2tp2pp2opt2"), ALL, fmt)
    if write is foreign:
        write_strategy(Plan.parse("dp2tp2pp2opt2").strategy(), str(tmp_path / "run" / "strategy"))
    found = merge(tmp_path / "run" / "checkpoint", tmp_path / "merged")
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays_of(found).items()} == \
        {name: (a.dtype, a.shape, a.tobytes()) for name, a in {**ALL, **COUNTERS}.items()}
    assert found.kind == MINDSPORE and found.notes == () and len(found.files) > 3 and found.files[-1] == "hyper_param.safetensors"
    assert {name for name, file in found.tensors.items() if file == found.files[-1]} == {*COUNTERS, "layers.1.none"}
    source = open_checkpoint(STORAGE, str(tmp_path / "merged"))
    assert (source.state.step, source.state.global_step, source.state.global_batch_size, source.state.loss_scale) == (
        STEP, STEP, 8, 1.0)
    convert(tmp_path / "merged", tmp_path / "again", "tp4", fmt)
    check(tmp_path / "again", Plan.parse("tp4"))


def test_merged_weights_store_their_epoch(tmp_path):
    recorded(tmp_path / "a", Plan.parse("tp2", TINY), TENSORS)
    merge(tmp_path / "a", tmp_path / "merged")
    convert(tmp_path / "merged", tmp_path / "b", "tp2", model=TINY)
    candidate, = scan(dir_at(tmp_path / "b")).candidates
    assert state_of(STEP).epoch == 2 and int(tensors_of_rank(tmp_path / "b", 0)["epoch_num"]) == 2
    assert candidate.state.epoch == 2


def test_merged_weights_record_their_source(tmp_path):
    """Their checksums are recorded for whoever loads them."""
    recorded(tmp_path / "a", Plan.parse("tp2", TINY), TENSORS)
    merge(tmp_path / "a", tmp_path / "merged", part_bytes=32)
    made = read_conversion_manifest(STORAGE, str(tmp_path / "merged"))
    assert made.what == f"{tmp_path}/a, step 15, 2 ranks"
    assert [file.path for file in made.files] == ["part0.safetensors", "part1.safetensors", "hyper_param.safetensors"]
    assert made.tensors == {name: array_checksum(array) for name, array in {**TENSORS, **COUNTERS}.items()}
    for file in made.files:
        content = (tmp_path / "merged" / file.path).read_bytes()
        assert (file.size, file.checksum) == (len(content), xxhash.xxh3_128_hexdigest(content))
    assert read_conversion_manifest(STORAGE, str(tmp_path / "a")) is None
    flip_bit(tmp_path / "merged" / CONVERSION)
    with pytest.raises(CorruptFileError, match="conversion.json: it cannot be read, and nothing else says .* remove it"):
        read_conversion_manifest(STORAGE, str(tmp_path / "merged"))


def test_weights_of_hugging_face(tmp_path):
    recorded(tmp_path / "a", Plan.parse("dp2tp2", SOLID), ALL)
    found = merge(tmp_path / "a", tmp_path / "hf", HUGGINGFACE, drop=("adam_*", "accu_grads.*"))
    wanted = {name for name in SOLID if not name.startswith(("adam_", "accu_grads"))}
    assert set(found.tensors) == wanted and found.kind == HUGGINGFACE
    count = len(found.files)
    assert found.files == tuple(f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)) and count > 1
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": sum(ALL[name].nbytes for name in wanted)}, "weight_map": dict(found.tensors)}
    assert all(header.metadata == {"format": "np"} for header in found.headers.values())
    for name, array in arrays_of(found).items():
        assert array.tobytes() == ALL[name].tobytes() and array.shape == ALL[name].shape
    assert sorted(os.listdir(tmp_path / "hf")) == [CONVERSION, *found.files[:count], "model.safetensors.index.json"]


@pytest.mark.parametrize("shape", [(1,), (), (8, 0)])
def test_a_parameter_of_one_number_is_not_a_counter(tmp_path, shape):
    model = {**TINY, "logit_scale": Spec(shape, None, "last")}
    recorded(tmp_path / "a", Plan.parse("tp2", model), random_tensors(model))
    assert "logit_scale" in merge(tmp_path / "a", tmp_path / "ms").tensors
    assert "logit_scale" in merge(tmp_path / "a", tmp_path / "hf", HUGGINGFACE).tensors


@pytest.mark.parametrize("kind", [MINDSPORE, HUGGINGFACE])
def test_the_safetensors_library_reads_the_parts(tmp_path, kind):
    library = pytest.importorskip("safetensors.numpy")
    model = {name: spec for name, spec in SOLID.items() if spec.dtype != "bfloat16"}
    tensors = random_tensors(model)
    recorded(tmp_path / "a", Plan.parse("dp2tp2pp2opt2", model), tensors)
    found = merge(tmp_path / "a", tmp_path / "merged", kind)
    read = {}
    for file in found.files:
        read |= library.load_file(tmp_path / "merged" / file)
    wanted = {**tensors, **(COUNTERS if kind == MINDSPORE else {})}
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in read.items()} == \
        {name: (a.dtype, a.shape, a.tobytes()) for name, a in wanted.items()}


@pytest.mark.parametrize("part_bytes", [1, 100, 512, 1 << 20])
def test_sizes_of_parts(tmp_path, part_bytes):
    recorded(tmp_path / "a", Plan.parse("tp2"), ALL)
    found = merge(tmp_path / "a", tmp_path / "merged", part_bytes=part_bytes)
    parts = [sorted(name for name, at in found.tensors.items() if at == file) for file in found.files[:-1]]
    assert all(len(names) == 1 or sum(ALL[name].nbytes for name in names) <= part_bytes for names in parts)
    assert len(parts) == {1: len(ALL) - 1, 1 << 20: 1}.get(part_bytes, len(parts))      # the empty one needs no part of its own


def test_nothing_is_left_to_write(tmp_path):
    recorded(tmp_path / "a", Plan.parse("tp2", TINY), TENSORS)
    with pytest.raises(ConfigError, match=r"a: of 7 tensors none is left to be written after \*"):
        merge(tmp_path / "a", tmp_path / "merged", drop=("*",))
    with pytest.raises(ConfigError, match="none is left"):
        merge(tmp_path / "a", tmp_path / "merged", HUGGINGFACE, drop=("*.weight",))
    assert sorted(os.listdir(tmp_path)) == ["a"]
