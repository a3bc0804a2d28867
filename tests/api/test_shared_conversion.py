"""Several processes write the bytes that one process writes; one that dies is an error, and the
same command goes on."""

import fcntl
import os
import re
import shutil
import signal
import time

import pytest
from rank_folders import flip_bit, folder_contents
from reshard.plans import MODEL, Plan, random_tensors, recorded
from storages import DiesInAFile, Hooked

from mindresume.api import conversion
from mindresume.errors import ConfigError, OutOfSpaceError, ProcessLostError, SaveError

LOST, FAILED = 11, 12  # exit statuses
LONG = 60.0  # seconds: nothing waits so long


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    recorded(folder, Plan.parse("tp4"), random_tensors(MODEL))
    return folder


def convert(source, target, **share):
    return conversion.convert(source, target, to="tp=2,dp=2", **share)


def iterations(source, target, **share):
    return conversion.convert(source, target, to="dp=3", format="iteration", **share)


def merge(source, target, **share):
    return conversion.merge(source, target, part_size_bytes=2000, **share)


def fork(number, count, source, target, work=convert, timeout=LONG, storage=None):
    """Starts one process. Returns its process id."""
    child = os.fork()
    if child:
        return child
    status = FAILED
    try:
        if storage:
            conversion.PosixStorage = lambda: storage
        assert work(source, target, part=(number, count), timeout_seconds=timeout).finished
        status = 0
    except ProcessLostError:
        status = LOST
    except Exception as error:  # any error is one status
        print(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def statuses(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def launch(count, source, target, work=convert, timeout=LONG):
    return statuses(
        [fork(number, count, source, target, work, timeout) for number in range(1, count + 1)]
    )


def content(folder):
    """Returns {path: bytes} without times, and without what depends on them: checksums of records
    and of their list."""
    times = rb'^[0-9a-f]{32}|"saved_at":[0-9.]+|"records":\[[^]]*\]'
    return {
        str(path.relative_to(folder)): data
        if data is None or ".mindresume" not in path.parts
        else re.sub(times, b"", data)
        for path, data in folder_contents(folder).items()
    }


@pytest.mark.parametrize("work, locks", [(convert, True), (iterations, False), (merge, True)])
def test_one_part_after_the_other(source, tmp_path, monkeypatch, work, locks):
    """Nobody waits, and whoever writes the last part commits."""

    def no_locks(handle, operation):
        raise OSError(37, "No locks available")

    whole = work(source, tmp_path / "one")
    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    written = 0
    for number in (3, 1, 2):
        found = work(source, tmp_path / "many", part=(number, 3))
        written += found.bytes_written
        assert found.finished is (number == 2) is (tmp_path / "many").exists()
        appears = f"part {number} of 3 is written; {tmp_path}/many appears"
        assert found.finished or appears in found.notes[-1]
    assert written == whole.bytes_written
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["many", "one"]
    assert work(source, tmp_path / "many", part=(1, 3)).seconds is None


def test_a_part_that_does_not_exist(source, tmp_path):
    for part in ((0, 2), (3, 2), (1, 0)):
        with pytest.raises(ConfigError, match=f"part is {part[0]} of {part[1]}"):
            convert(source, tmp_path / "new", part=part)


def test_who_waits_for_parts_of_another_conversion_is_told(source, tmp_path, one):
    with pytest.raises(
        ProcessLostError,
        match=r"waited 1 s for part 2 of 2 \(.*\): it must run, with the same arguments, .* "
        r"Give --step. The same command, started again, continues",
    ):
        conversion.convert(source, tmp_path / "new", to="tp=2", part=(1, 2), timeout_seconds=0.5)
    with pytest.raises(ProcessLostError, match=r"for part 1 of 2"):
        convert(source, tmp_path / "new", part=(2, 2), timeout_seconds=0.5)
    convert(source, tmp_path / "new", part=(1, 2))
    assert content(tmp_path / "new") == one


def test_a_part_and_a_whole_conversion_keep_each_other_out(source, tmp_path, monkeypatch):
    refused, plain = [], conversion.PosixStorage

    def meanwhile(operation, path):
        if operation != "create":
            return
        monkeypatch.setattr(conversion, "PosixStorage", plain)
        storage.before = lambda operation, path: None
        for share in ({}, {"part": (2, 2)}):
            try:
                found = convert(source, tmp_path / "new", **share)
                assert share and not found.finished
            except SaveError as error:
                refused.append(str(error))

    storage = Hooked(meanwhile)
    monkeypatch.setattr(conversion, "PosixStorage", lambda: storage)
    assert convert(source, tmp_path / "new", part=(1, 2)).finished
    assert len(refused) == 1 and "is running in another process" in refused[0]
    assert os.listdir(tmp_path) == ["new"]


def killing(at):
    """Returns a storage that kills this process before operation ``at``, without a chance to clean
    up."""

    def before(operation, path):
        if len(storage.asked) > at:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

    storage = Hooked(before)
    return storage


def marks(operation, path):
    """Whether this is the mark of a group whose files are written."""
    return operation == "rename" and os.path.basename(os.path.dirname(path)) == "done"


def test_a_killed_process_is_an_error_and_the_same_command_goes_on(source, tmp_path, one):
    def die(operation, path):
        if marks(operation, path):
            os.kill(os.getpid(), signal.SIGKILL)

    target = tmp_path / "many"
    children = [
        fork(number, 3, source, target, timeout=2.0, storage=Hooked(die) if number == 2 else None)
        for number in (1, 2, 3)
    ]
    assert statuses(children) == [LOST, -signal.SIGKILL, LOST]
    (work,) = tmp_path.glob(".many*.mindresume-tmp")  # what is finished stays
    assert not target.exists()
    files = sorted(work.rglob("*.safetensors"))
    assert len(files) == 4
    kept = [file.stat().st_mtime_ns for file in files[:2]]  # of another group
    # it was never marked as finished
    flip_bit(files[2], -1)
    assert launch(3, source, target) == [0] * 3
    assert [(target / file.relative_to(work)).stat().st_mtime_ns for file in files[:2]] == kept
    assert content(target) == one and sorted(os.listdir(tmp_path)) == ["many", "one"]


def test_a_damaged_part_of_a_process_that_works_alone_is_written_again_without_room_for_both(
    source, tmp_path, monkeypatch, one
):
    """A process that dies before the commit leaves all groups; one of them is damaged then."""
    target = tmp_path / "new"

    def before(operation, path):
        if operation == "write" and "conversion.json" in path:
            os._exit(FAILED)

    assert statuses([fork(1, 1, source, target, storage=Hooked(before))]) == [FAILED]
    (work,) = tmp_path.glob(".new*.mindresume-tmp")
    damaged = sorted(work.rglob("*.safetensors"))[0]
    flip_bit(damaged, -1)
    create, seen = conversion.PosixStorage.create, []

    def created(storage, path, size):
        seen.append(damaged.exists())
        return create(storage, path, size)

    monkeypatch.setattr(conversion.PosixStorage, "create", created)
    assert convert(source, target).finished
    assert seen and not any(seen) and content(target) == one


def test_a_part_that_changed_since_it_was_written_is_written_again(source, tmp_path, one):
    convert(source, tmp_path / "new", part=(1, 2))
    (work,) = tmp_path.glob(".new*.mindresume-tmp")
    flip_bit(sorted(work.rglob("*.safetensors"))[0], -1)
    found = convert(source, tmp_path / "new", part=(1, 2))
    assert "is not what was written; it is written again" in found.notes[0] and found.bytes_written
    assert convert(source, tmp_path / "new", part=(2, 2)).finished
    assert content(tmp_path / "new") == one


def test_a_process_may_die_before_any_operation(source, tmp_path, one):
    """Every twentieth operation; ``range(10_000)`` takes each, in two minutes."""
    target = tmp_path / "many"
    for at in range(2, 10_000, 20):
        children = [
            fork(
                number, 2, source, target, timeout=0.3, storage=killing(at) if number == 1 else None
            )
            for number in (1, 2)
        ]
        if statuses(children) == [0, 0]:
            break
        assert not target.exists() or content(target) == one  # complete or not at all
        assert launch(2, source, target) == [0] * 2
        assert content(target) == one
        assert sorted(os.listdir(tmp_path)) == ["many", "one"]
        shutil.rmtree(target)
    else:
        raise AssertionError("it never came to its end")
    assert at > 40


@pytest.fixture
def one(source, tmp_path):
    """Returns the content that one process writes, in ``tmp_path/one``."""
    convert(source, tmp_path / "one")
    return content(tmp_path / "one")


def test_parts_ask_for_room_for_all(source, tmp_path, monkeypatch, one):
    """Also after a process that worked alone and died: what it had begun took room."""
    size = sum(len(data) for path, data in one.items() if data and path.endswith("safetensors"))
    target = tmp_path / "many"
    for begins in (False, True):
        if begins:
            assert statuses([fork(1, 1, source, target, storage=DiesInAFile(FAILED))]) == [FAILED]
        with monkeypatch.context() as patched:
            # too little for the records
            patched.setattr(conversion.PosixStorage, "free_space", lambda storage, path: size)
            with pytest.raises(OutOfSpaceError, match="there is room for"):
                convert(source, target, part=(2, 2))
    (work,) = tmp_path.glob(".many*.mindresume-tmp")
    assert not list(work.rglob("*.safetensors"))
    assert launch(2, source, target) == [0, 0]
    assert content(target) == one
