"""A conversion is one transaction: after a failure or kill at any operation the target is absent or
complete, the source is unchanged, and the same conversion started again completes it. The result is
a checkpoint."""

import os
import random
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rank_folders import STORAGE, flip_bit
from reshard.plans import (
    COUNTERS,
    TENSORS,
    TINY,
    Plan,
    recorded,
)

import mindresume
from mindresume import runtime
from mindresume.errors import ConfigError, SaveError
from mindresume.events import ignore
from mindresume.fault_injection.faults import Fault, FaultInjector, Killed, RankStorage, Scheduler
from mindresume.formats.consolidated import MINDSPORE
from mindresume.formats.rank_folders import META
from mindresume.reshard import converter as module
from mindresume.reshard import mindspore_engine
from mindresume.reshard.conversion_plan import to_consolidated, to_ranks
from mindresume.reshard.converter import LOCK, Conversion, Share, remove_tree
from mindresume.reshard.direct_engine import Engine
from mindresume.reshard.open_checkpoint import open_checkpoint

STEP_NUM = {"step_num": COUNTERS["step_num"]}


@pytest.fixture(autouse=True, scope="module")
def same_time():
    """The records of all conversions are equal."""
    with runtime.answers({runtime.time: lambda: 1000.0}):
        yield


@pytest.fixture
def in_memory():
    """Returns a folder in memory: on disk the removal of thousands of files takes longer than the
    test."""
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ) as folder:
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
    return Conversion(storage, job, str(target), emit)


def carry_out(made):
    """Runs a conversion as the command line does: an error or Ctrl-C removes the unfinished
    work."""
    if not made.finished():
        made.run(Engine(workers=1))


def write(made, number):
    """Writes one group, as a process does that dies after it."""
    made.share = Share(number + 1, len(made.plan.groups))
    made.write(Engine())
    made.share = Share()


def contents(folder):
    """{path below: bytes, None for a folder}"""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def stamps(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.rglob("*")}


# ---- failures and kills --------------------------------------------------------------------------

CTRL_C = "Ctrl-C"


class Disk(RankStorage):
    """Is the view of a rank whose files are written in pieces."""

    def create(self, path, size):
        with self.operation("create", path):
            made = STORAGE.create(path, size)
            # its bytes are not durable yet
            self.injector.record_change({path: b""})
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
                self.disk.injector.record_change({self.path: Path(self.path).read_bytes()})
        except OSError:
            self.abandon()
            raise

    def abandon(self):
        if not self.disk.injector.dead:
            self.inner.abandon()
        elif self.inner._handle >= 0:  # a file of a dead process is closed and remains
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


def disk(kind="EIO", at=0, root=""):
    """Injects the fault at operation number ``at``, from 1; 0: never. ``root``: see
    FaultInjector."""
    chance = random.Random(at)
    if kind == CTRL_C:
        return Disk(Interrupting(STORAGE, Scheduler(1, chance), CtrlC(at, kind), chance), 0)
    return Disk(FaultInjector(STORAGE, Scheduler(1, chance), Fault(at, kind), chance, str(root)), 0)


def struck_by(kind, names):
    """Returns the numbers of the operations that a fault of this kind can hit."""
    return [at for at, name in enumerate(names, 1) if kind == CTRL_C or Fault(at, kind).hits(name)]


def some(numbers, what, soak):
    """Every second one, without --soak: of the two conversions the others."""
    return numbers if soak else numbers[what == "ranks" :: 2]


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
        assert len(set(names)) == 12  # every kind there is
    return found


def without_hints(found):
    return {path: content for path, content in found.items() if not path.endswith(META)}


@pytest.mark.parametrize(
    "what, kind",
    [
        ("ranks", "EIO"),
        ("ranks", "EIO after"),
        ("ranks", CTRL_C),
        ("consolidated", "EIO"),
        ("consolidated", CTRL_C),
    ],
)
def test_an_error_or_ctrl_c_at_any_operation(in_memory, root, expected, what, kind, soak):
    wanted, names = expected[what]
    job, before, raised = JOBS[what](root), contents(root), 0
    numbers = some(struck_by(kind, names), what, soak)
    for at in numbers:
        out, failing, log = in_memory / str(at), disk(kind, at), []
        try:
            carry_out(conversion(on(failing, job), out / "new", failing, log.append))
        except (OSError, SaveError, KeyboardInterrupt):
            raised += 1
            # meta.json is a hint: hours of work are not thrown away for it
            assert kind == CTRL_C or META not in failing.injector.operations[at - 1].path
            assert not out.exists() or not os.listdir(out) or contents(out / "new") == wanted, (
                failing.injector.operations[at - 1]
            )
        else:
            # meta.json is a hint: its failure is only reported
            made = contents(out / "new")
            assert made == wanted or log and without_hints(made) == without_hints(wanted), (
                failing.injector.operations[at - 1]
            )
        struck = failing.injector.operations[at - 1]
        # its removal failed: next time
        locks = {os.path.basename(struck.path)} if struck.path.endswith(LOCK) else set()
        assert not out.exists() or set(os.listdir(out)) <= {"new", *locks}, struck
        carry_out(conversion(job, out / "new"))
        assert without_hints(contents(out / "new")) == without_hints(wanted), (
            failing.injector.operations[at - 1]
        )
        assert os.listdir(out) == ["new"], failing.injector.operations[at - 1]
    assert raised > len(numbers) * 2 // 3 and contents(root) == before


@pytest.mark.parametrize(
    "what, kind",
    [
        ("ranks", "kill all"),
        ("ranks", "torn"),
        ("ranks", "power"),
        ("ranks", "reorder"),
        ("consolidated", "kill all"),
        ("consolidated", "power"),
        ("consolidated", "reorder"),
    ],
)
def test_a_conversion_survives_a_kill_at_any_operation(in_memory, root, expected, what, kind, soak):
    """Killed, killed in the middle of a write, and power loss: unflushed bytes are lost completely
    or in part."""
    wanted, names = expected[what]
    job, before, went_on = JOBS[what](root), contents(root), 0
    numbers = some(struck_by(kind, names), what, soak)
    for at in numbers:
        out, again = in_memory / str(at), disk()
        out.mkdir()
        dying = disk(kind, at, out)
        made = conversion(on(dying, job), out / "new", dying)
        with pytest.raises(Killed):
            carry_out(made)
        if made._lock >= 0:
            os.close(made._lock)  # as the kernel does
        struck = dying.injector.operations[at - 1]
        there = (out / "new").exists()
        assert not there or contents(out / "new") == wanted, struck
        done = {
            int(name[: -len(".json")])
            for name in STORAGE.list(f"{made.work}/done")
            if not name.startswith(".")
        }
        carry_out(conversion(on(again, job), out / "new", again))
        assert contents(out / "new") == wanted and os.listdir(out) == ["new"], struck
        missing = (
            []
            if there
            else [group for number, group in enumerate(job.groups) if number not in done]
        )
        # what was finished is not done again
        assert again.count("create") == sum(map(len, missing)), struck
        went_on += bool(done)
    assert contents(root) == before and went_on > len(numbers) // 3


@pytest.mark.parametrize("what", JOBS)
def test_a_power_loss_after_the_end_loses_nothing(in_memory, root, expected, what):
    durable = disk(root=in_memory)
    carry_out(conversion(on(durable, JOBS[what](root)), in_memory / "deep" / "new", durable))
    durable.injector.lose_power(0.0)
    assert contents(in_memory / "deep" / "new") == expected[what][0] and os.listdir(
        in_memory / "deep"
    ) == ["new"]


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
    job = to_ranks(
        open_checkpoint(STORAGE, str(root)),
        Plan.parse("pp2", TINY).strategy(),
        "safetensors",
        ranks_per_group=2,
    )
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


@pytest.mark.parametrize("still_writing", [False, True])
def test_leftovers_in_the_scratch_folder_are_ignored(tmp_path, root, monkeypatch, still_writing):
    """MindSpore's engine refuses folders that exist; and workers of the process that was killed may
    still write into theirs."""
    made = conversion(ranks_job(root), tmp_path / "new")
    scratch = os.path.join(made.work, "scratch-of-one")
    made.prepare()
    STORAGE.make_folder(os.path.join(scratch, "mindspore-1-0000aaaa", "out"))
    made._release()
    given = []

    def rewrite(weights, target, work, **_):
        given.append((os.listdir(work), len(os.listdir(scratch)) - 1))
        return weights

    monkeypatch.setattr(mindspore_engine, "rewrite", rewrite)
    with monkeypatch.context() as patched:
        if still_writing:  # not empty: OSError
            patched.setattr(module, "remove_tree", lambda storage, folder: os.rmdir(folder))
        made.prepare()
    made.write(Engine("mindspore"))
    assert given == [([], 2 if still_writing else 1)]
    made.commit()
    assert os.listdir(made.target) and not os.path.exists(made.work)


# ---- room and locks ------------------------------------------------------------------------------


def test_two_different_conversions_at_once(tmp_path, root):
    """Both may run; the second one to commit finds that the target exists, and leaves the first
    one's files alone."""
    first, second = (
        conversion(ranks_job(root), tmp_path / "new"),
        conversion(consolidated_job(root), tmp_path / "new"),
    )
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
def test_no_conversion_starts_between_the_end_of_the_lock_and_the_rename(
    tmp_path, root, expected, operation
):
    committing = Meanwhile(FaultInjector(STORAGE, Scheduler(1, random.Random(0))), 0)
    first, second, started = (
        conversion(ranks_job(root), tmp_path / "new", committing),
        conversion(ranks_job(root), tmp_path / "new"),
        [],
    )
    committing.when = lambda name, path: (
        name == operation and path == first.work and not os.path.exists(path + LOCK)
    )

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


def test_removal_does_not_follow_links(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("precious")
    (tmp_path / "gone" / "folder").mkdir(parents=True)
    (tmp_path / "gone" / "folder" / "file").write_text("")
    (tmp_path / "gone" / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "gone" / "dangling").symlink_to(tmp_path / "nowhere")
    remove_tree(STORAGE, str(tmp_path / "gone"))
    assert contents(tmp_path) == {"kept": None, "kept/file": b"precious"}


@pytest.mark.parametrize("count", [1, 2, 99])
def test_those_who_write_check_all_of_the_source(root, tmp_path, monkeypatch, count):
    """Nobody waits for the check of a part without files."""
    checked = []
    monkeypatch.setattr(
        module,
        "check_source",
        lambda weights, traffic, number, shares: checked.append((number, shares)),
    )
    found = [
        mindresume.merge(root, tmp_path / "many", part_size_bytes=32, part=(number, count))
        for number in range(1, count + 1)
    ]
    files = found[0].files
    assert files > 1 and checked == [
        (number, min(count, files)) for number in range(min(count, files))
    ]
