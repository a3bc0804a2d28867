"""Several processes write the bytes that one process writes; one that dies is an error, and the same command goes on."""
import os
import re
import signal
import time
from pathlib import Path

import pytest
from rank_folders import flip_bit, folder_contents
from reshard.plans import MODEL, Plan, random_tensors, recorded

import mindresume
from mindresume.api import conversion
from mindresume.coordination.file_group import file_group
from mindresume.coordination.launched_process import LaunchedProcess
from mindresume.errors import CollectiveError, ProcessLostError
from mindresume.reshard.converter import Conversion
from mindresume.storage.atomic_publish import TEMPORARY
from mindresume.storage.posix import PosixStorage

LOST, FAILED, DIED = 11, 12, 13                     # exit statuses


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    recorded(folder, Plan.parse("tp4"), random_tensors(MODEL))
    return folder


def convert(source, target, group):
    return conversion.convert(source, target, to="tp=2,dp=2", group=group)


def iterations(source, target, group):
    return conversion.convert(source, target, to="dp=3", format="iteration", group=group)


def merge(source, target, group):
    return conversion.merge(source, target, part_size_bytes=2000, group=group)


def meeting(target):
    return str(Path(target).parent / "meeting")


def fork(rank, size, source, target, work=convert, storage=None, before=lambda group: None):
    """Starts one process of a launch. Returns its process id."""
    child = os.fork()
    if child:
        return child
    status = FAILED
    try:
        storage = storage or PosixStorage()
        conversion.PosixStorage = lambda: storage
        with file_group(storage, meeting(target), LaunchedProcess(rank, size), ("same",), 600.0) as group:
            before(group)
            work(source, target, group)
            status = 0
    except ProcessLostError:
        status = LOST
    except CollectiveError as error:
        print(error)
    finally:
        os._exit(status)


def statuses(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def launch(size, source, target, work=convert):
    return statuses([fork(rank, size, source, target, work) for rank in range(size)])


def content(folder):
    """Returns {path: bytes} without times, and without what depends on them: checksums of records and of their list."""
    times = rb'^[0-9a-f]{32}|"saved_at":[0-9.]+|"records":\[[^]]*\]'
    return {str(path.relative_to(folder)): data if data is None or ".mindresume" not in path.parts else re.sub(times, b"", data)
            for path, data in folder_contents(folder).items()}


@pytest.mark.parametrize("work", [convert, iterations, merge])
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_bytes_as_with_one_process(source, tmp_path, work, size):
    work(source, tmp_path / "one", conversion.ALONE)
    assert launch(size, source, tmp_path / "many", work) == [0] * size
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["many", "one"]
    assert launch(size, source, tmp_path / "many", work) == [0] * size              # it exists already
    assert not mindresume.open(tmp_path / "many").verify().damaged


def test_the_result_counts_the_bytes_of_all(source, tmp_path):
    one = convert(source, tmp_path / "one", conversion.ALONE)
    read, write = os.pipe()

    def work(source, target, group):
        found = convert(source, target, group)
        os.write(write, b"%d %d\n" % (found.bytes_written, found.finished))
    assert launch(3, source, tmp_path / "many", work) == [0] * 3
    assert os.read(read, 1000) == b"%d 1\n" % one.bytes_written * 3


def test_damage_is_an_error_on_all_and_leaves_nothing_behind(tmp_path):
    root, target = tmp_path / "source", tmp_path / "target"
    candidate = recorded(root, Plan.parse("tp4"), random_tensors(MODEL))
    flip_bit(root / candidate.files[2][0].path, -1)
    assert launch(3, root, target) == [FAILED] * 3
    assert os.listdir(tmp_path) == ["source"]


def test_the_processes_must_open_the_same_checkpoint(source, tmp_path):
    def work(source, target, group):
        conversion.convert(source, target, to="tp=2,dp=2" if group.rank else "tp=4", group=group)
    assert 0 not in launch(2, source, tmp_path / "target", work)
    assert os.listdir(tmp_path) == []


class Killing(PosixStorage):
    """Kills this process before operation ``at``, without a chance to clean up."""

    def __init__(self, at):
        self.left = at

    def _operate(self):
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


def _counted(name):
    def method(self, *arguments):
        self._operate()
        return getattr(PosixStorage, name)(self, *arguments)
    return method


for _name in ("list", "status", "open", "write", "create", "rename", "sync", "remove", "make_folder", "free_space"):
    setattr(Killing, _name, _counted(_name))


def test_a_killed_process_is_an_error_and_the_same_command_goes_on(source, tmp_path):
    convert(source, tmp_path / "one", conversion.ALONE)

    def die(source, target, group):
        write = Conversion.write

        def once(self, *arguments):
            write(self, *arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        Conversion.write = once
        convert(source, target, group)
    target = tmp_path / "many"
    children = [fork(rank, 3, source, target, die if rank == 1 else convert) for rank in range(3)]
    assert statuses(children) == [LOST, -signal.SIGKILL, LOST]
    work, = tmp_path.glob(f".many*{TEMPORARY}")                     # what is finished stays
    files = sorted(work.rglob("*.safetensors"))
    assert len(files) == 4 and not target.exists()
    kept = [file.stat().st_mtime_ns for file in files[:2]]          # of another group
    flip_bit(files[3], -1)                                          # as a process that was cut off could do
    assert launch(3, source, target) == [0] * 3
    assert [(target / file.relative_to(work)).stat().st_mtime_ns for file in files[:2]] == kept
    assert content(target) == content(tmp_path / "one")
    assert sorted(os.listdir(tmp_path)) == ["many", "one"]


@pytest.mark.parametrize("first", range(2))
def test_process_0_may_die_before_any_operation(source, tmp_path, first):
    """Every twentieth operation; ``range(10_000)`` takes each, in two minutes."""
    convert(source, tmp_path / "one", conversion.ALONE)
    target, expected = tmp_path / "many", content(tmp_path / "one")
    for at in range(20 * first + 2, 10_000, 40):
        children = [fork(rank, 2, source, target, storage=Killing(at) if rank == 0 else None) for rank in range(2)]
        found = statuses(children[:1])
        if found == [0]:
            assert statuses(children[1:]) == [0]
            break
        if not joined(tmp_path / "meeting"):
            os.kill(children[1], signal.SIGKILL)                    # it would wait for process 0 until its timeout
        assert statuses(children[1:])[0] in (0, LOST, -signal.SIGKILL)
        assert not target.exists() or content(target) == expected   # complete or not at all
        assert launch(2, source, target) == [0] * 2
        assert content(target) == expected
        assert sorted(os.listdir(tmp_path)) == ["many", "one"]
        for path in sorted(target.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        target.rmdir()
    else:
        raise AssertionError("it never came to its end")
    assert at > 40


def joined(folder):
    return any(folder.glob("launch-session-*/start"))
