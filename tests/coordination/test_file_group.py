"""Processes exchange messages through files; one that is missing, dead or of another launch is never waited for in vain."""
import json
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from mindresume.coordination import file_group as module
from mindresume.coordination.collectives import Watchdog, gather_results, run_on_rank0
from mindresume.coordination.file_group import file_group
from mindresume.coordination.launched_process import LaunchedProcess
from mindresume.errors import CollectiveError, ProcessLostError
from mindresume.storage.posix import PosixStorage

LONG = 600.0


def run(folder, work, ranks=(0, 1, 2), size=3, arguments=lambda rank: ("same",), job="", clock=lambda rank: time.monotonic(),
        pause=lambda rank, seconds: time.sleep(seconds), timeout=LONG, found=None):
    """Runs ``work(group)`` in a thread for each of ``ranks``. Returns {rank: result or error}, which is ``found`` if given."""
    found = {} if found is None else found

    def one(rank):
        try:
            with file_group(PosixStorage(), str(folder), LaunchedProcess(rank, size, job), arguments(rank), timeout,
                            clock=partial(clock, rank), pause=partial(pause, rank)) as group:
                found[rank] = work(group)
        except Exception as error:
            found[rank] = error
    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def exchange(group):
    return [group.broadcast(b"of %d" % group.rank), group.gather(b"%d" % group.rank), group.gather(b"again %d" % group.rank),
            run_on_rank0(group, lambda: group.rank + 7), gather_results(group, lambda: group.rank, Watchdog())]


EXCHANGED = [b"of 0", [b"0", b"1", b"2"], [b"again 0", b"again 1", b"again 2"], 7, [0, 1, 2]]


def test_messages_reach_all_processes_and_no_file_is_left(tmp_path):
    assert run(tmp_path / "new" / "meeting", exchange) == dict.fromkeys(range(3), EXCHANGED)
    assert not (tmp_path / "new" / "meeting").exists()


def test_old_messages_are_removed(tmp_path):
    def work(group):
        for number in range(20):
            group.gather(b"%d" % number)
        return len(os.listdir(group._session))
    assert all(count <= 3 + 1 + 6 for count in run(tmp_path / "meeting", work).values())


def test_a_process_that_never_comes_is_named(tmp_path):
    now, found = {0: 0.0, 2: 0.0}, {}

    def pause(rank, seconds):
        if rank == 0 or 0 in found:                                 # process 2 waits longer, however fast it runs
            now[rank] += seconds
        else:
            time.sleep(0.001)
    run(tmp_path / "meeting", exchange, ranks=(0, 2), clock=lambda rank: now[rank], pause=pause, timeout=50.0, found=found)
    assert isinstance(found[0], ProcessLostError) and "process 1 of 3" in str(found[0])
    assert isinstance(found[2], ProcessLostError)


def test_without_process_0_the_others_end(tmp_path):
    now = [0.0]

    def pause(rank, seconds):
        now[0] += seconds
    found = run(tmp_path / "meeting", exchange, ranks=(1,), clock=lambda rank: now[0], pause=pause, timeout=50.0)
    assert isinstance(found[1], ProcessLostError) and "process 0 of 3" in str(found[1])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"[" * 60_000, b"[]", b"7", b"{", b'{"session": 7}', b'{"session": ""}',
                                     b'{"session": "../elsewhere"}'])
def test_a_pointer_of_another_form_names_no_session(tmp_path, content):
    now = [0.0]

    def pause(rank, seconds):
        now[0] += seconds
    (tmp_path / "meeting").mkdir()
    (tmp_path / "meeting" / "launch.json").write_bytes(content)
    found = run(tmp_path / "meeting", exchange, ranks=(1,), clock=lambda rank: now[0], pause=pause, timeout=50.0)
    assert isinstance(found[1], ProcessLostError) and "process 0 of 3" in str(found[1])


def test_an_error_of_one_process_reaches_all_at_once(tmp_path):
    def work(group):
        if group.rank == 1:
            raise ValueError("the reason")
        return exchange(group)
    found = run(tmp_path / "meeting", work)
    assert isinstance(found[1], ValueError)
    for rank in (0, 2):
        assert isinstance(found[rank], ProcessLostError) and "the reason" in str(found[rank])
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize("error", [None, ValueError("damaged")])
def test_process_0_ends_first(tmp_path, error):
    """A launcher kills all processes as soon as one has ended with an error; process 0 prints the result, and removes files."""
    folder, ended = tmp_path / "meeting", []

    def one(rank):
        with suppress(CollectiveError), \
                file_group(PosixStorage(), str(folder), LaunchedProcess(rank, 3), ("same",), LONG, clock=lambda: 0.0) as group:
            try:
                gather_results(group, lambda: fail(error))
            finally:
                if rank == 0:
                    while not {"gone-1", "gone-2"} <= set(os.listdir(group._session)):
                        time.sleep(0.001)
                    ended.append("printed")
        ended.append((rank, PosixStorage().list(str(folder))))
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended[0] == "printed" and sorted(ended[1:]) == [(0, []), (1, []), (2, [])]


def fail(error):
    if error is not None:
        raise error


def test_an_error_within_a_collective_leaves_nothing_behind(tmp_path):
    def fail(group):
        return gather_results(group, lambda: 1 // (group.rank - 1))
    found = run(tmp_path / "meeting", fail)
    assert all(isinstance(error, CollectiveError) and "ZeroDivisionError" in str(error) for error in found.values())
    assert not (tmp_path / "meeting").exists()


def test_processes_with_other_arguments_do_not_work_together(tmp_path):
    found = run(tmp_path / "meeting", exchange, arguments=lambda rank: ("convert", "a", "b" if rank < 2 else "c"))
    assert all(isinstance(error, ProcessLostError) for error in found.values())
    assert "process 2 of 3" in str(found[0])


def test_a_killed_process_is_noticed_without_the_timeout(tmp_path):
    child = os.fork()
    if child == 0:                                                  # a real process, which dies within its work
        with file_group(PosixStorage(), str(tmp_path / "meeting"), LaunchedProcess(1, 3), ("same",), LONG) as group:
            group.gather(b"one")
            os.kill(os.getpid(), signal.SIGKILL)

    def work(group):
        group.gather(b"one")
        if group.rank == 0:
            os.waitpid(child, 0)
        return group.gather(b"two")
    found = run(tmp_path / "meeting", work, ranks=(0, 2))
    assert all(isinstance(error, ProcessLostError) for error in found.values())
    assert f"process 1 of 3 (host {os.uname().nodename}, pid {child})" in str(found[0]) + str(found[2])


# ---- an earlier launch ------------------------------------------------------------------------------------------------

def killed_launch(folder, job=""):
    """Leaves what a launch leaves whose processes were killed after some messages."""
    children = []
    for rank in range(3):
        child = os.fork()
        if child == 0:
            with file_group(PosixStorage(), str(folder), LaunchedProcess(rank, 3, job), ("same",), LONG) as group:
                group.broadcast(b"old")
                group.gather(b"old %d" % rank)
                os.kill(os.getpid(), signal.SIGKILL)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert os.listdir(folder)


@pytest.mark.parametrize("job", ["", "4711"])
def test_files_of_an_earlier_launch_do_no_harm(tmp_path, job):
    killed_launch(tmp_path / "meeting", job)
    assert run(tmp_path / "meeting", exchange, job=job) == dict.fromkeys(range(3), EXCHANGED)
    assert not (tmp_path / "meeting").exists()


def test_files_of_a_dead_launch_with_another_job_id_are_removed(tmp_path):
    """Each srun and mpirun has a new one."""
    killed_launch(tmp_path / "meeting", "4711-0")
    assert run(tmp_path / "meeting", exchange, job="4711-1") == dict.fromkeys(range(3), EXCHANGED)
    assert not (tmp_path / "meeting").exists()


def test_a_process_that_comes_before_process_0_does_not_join_the_earlier_launch(tmp_path):
    killed_launch(tmp_path / "meeting")
    looks, found = threading.Semaphore(0), {}

    def pause(rank, seconds):
        looks.release()
        time.sleep(seconds)
    early = threading.Thread(target=lambda: found.update(run(tmp_path / "meeting", exchange, ranks=(1, 2), pause=pause)))
    early.start()
    for _ in range(6):
        looks.acquire()                                             # both have seen the old session several times
    found.update(run(tmp_path / "meeting", exchange, ranks=(0,)))
    early.join()
    assert found == dict.fromkeys(range(3), EXCHANGED)


def test_a_session_that_was_never_begun_is_left_for_the_new_one(tmp_path):
    folder = tmp_path / "meeting"
    (folder / "launch-session-old").mkdir(parents=True)             # process 0 of an earlier launch died before the others came
    (folder / "launch-session-old" / "joined-0").write_text("{}")
    (folder / "launch.json").write_text(json.dumps({"session": "launch-session-old"}))
    looks, found = threading.Semaphore(0), {}

    def pause(rank, seconds):
        looks.release()
        time.sleep(seconds)
    early = threading.Thread(target=lambda: found.update(run(folder, exchange, ranks=(1, 2), pause=pause)))
    early.start()
    for _ in range(6):
        looks.acquire()
    assert any(name.startswith(module._JOINED) for name in os.listdir(folder / "launch-session-old"))
    found.update(run(folder, exchange, ranks=(0,)))
    early.join()
    assert found == dict.fromkeys(range(3), EXCHANGED)


def test_launches_with_job_ids_do_not_meet(tmp_path):
    found = {}
    threads = [threading.Thread(target=lambda job=job: found.update({job: run(tmp_path / "meeting", exchange, job=job)}))
               for job in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys("ab", dict.fromkeys(range(3), EXCHANGED))
