"""Leaving in time: whatever rank is asked, all leave at the same step; and they rarely ask each
other."""

import fcntl
import os
import resource
import signal
import threading
from types import SimpleNamespace

import pytest
from rank_folders import Ranks
from senders import from_outside

from mindresume import runtime
from mindresume.coordination import preemption
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.preemption import (
    BY_FILE,
    BY_SIGNAL,
    BY_UNKNOWN,
    OTHER,
    STATUS,
    PreemptionHandler,
    SignalSenders,
    request,
    requests,
)


def trained(leaving, steps, each, asked=None, last=1000):
    """Runs steps of ``each`` seconds until a rank leaves. Returns (step, reason) and the steps at
    which the ranks exchanged."""
    exchanges, gather = [], leaving.group.gather

    def counted(message):
        exchanges.append(leaving.step)
        return gather(message)

    leaving.group.gather = counted
    for step in range(1, steps + 1):
        runtime.sleep(each)
        leaving.step = step
        if step == asked:
            leaving.signalled, leaving._senders.look = True, lambda: OTHER
        reason = leaving.check(step)
        if reason:
            return step, reason, exchanges
    return None, "", exchanges


@pytest.mark.parametrize("asked, rank", [(1, 0), (17, 3), (40, 1), (99, 2)])
def test_all_ranks_leave_at_the_same_step(asked, rank):
    def work(group):
        when = asked if group.rank == rank else None
        return trained(PreemptionHandler(group, 5.0), 200, 0.5 + 0.01 * group.rank, when)

    results = Ranks(4).run(work)
    (left,) = {(step, reason) for step, reason, _ in results}
    assert left[1] == BY_SIGNAL and asked <= left[0] <= asked + 10
    assert len({tuple(exchanges) for _, _, exchanges in results}) == 1


def test_ranks_exchange_about_every_interval():
    """1,000 steps of 0.1 s, an interval of 5 s: the ranks exchange at the first few steps, then
    every 50th."""

    def work(group):
        return trained(PreemptionHandler(group, 5.0), 1000, 0.1)[2]

    (exchanges,) = {tuple(found) for found in Ranks(2).run(work)}
    assert exchanges[:6] == (1, 2, 4, 8, 16, 32) and 15 <= len(exchanges) <= 30
    assert set(
        later - before for before, later in zip(exchanges[7:], exchanges[8:], strict=False)
    ) <= {49, 50}


def test_ranks_exchange_after_each_slow_step():
    def work(group):
        return trained(PreemptionHandler(group, 5.0), 10, 8.0)[2]

    assert {tuple(found) for found in Ranks(2).run(work)} == {tuple(range(1, 11))}


def alone(seconds=5.0, *arguments, **options):
    return PreemptionHandler(SingleProcess(), seconds, *arguments, **options)


@pytest.fixture
def install():
    """Installs handlers of SIGTERM, and closes them after the test."""
    installed, before = [], signal.getsignal(signal.SIGTERM)

    def add(leaving):
        installed.append(leaving)
        leaving.install()
        return leaving

    yield add
    for leaving in installed:
        leaving.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_single_process_leaves_at_once_without_an_exchange():
    leaving = alone()
    assert leaving.check(1) == ""
    leaving.signalled = True
    assert leaving.check(2) == BY_UNKNOWN


def test_a_known_sender_on_any_rank_counts_before_an_unknown_one():
    def work(group):
        leaving = PreemptionHandler(group, 5.0)
        leaving.signalled = group.rank > 0
        if group.rank == 2:
            leaving._senders.look = lambda: OTHER
        return leaving.check(1)

    assert set(Ranks(3).run(work)) == {BY_SIGNAL}


def test_an_interval_of_zero_disables_preemption(install):
    before = signal.getsignal(signal.SIGTERM)
    leaving = install(alone(0))
    leaving.signalled = True
    assert leaving.check(1) == "" and signal.getsignal(signal.SIGTERM) is before


def test_the_signal_is_recorded_and_its_handler_restored_afterwards(install):
    leaving = install(alone())
    from_outside()
    assert leaving.check(1) == BY_SIGNAL and STATUS == 143


def test_a_signal_of_this_process_itself_is_a_failure_and_no_request(monkeypatch, install):
    """MindSpore sends it when a worker of the data set has died. It was taken for a preemption."""
    # the training thread is first
    monkeypatch.setattr(SignalSenders, "_watch", lambda self: None)
    failed = []
    leaving = install(alone(on_own_signal=lambda: failed.append(True)))
    os.kill(os.getpid(), signal.SIGTERM)
    assert [leaving.check(1), leaving.check(2)] == ["", ""] and failed == [True]


def test_a_signal_is_watched_also_with_more_than_1024_open_files(monkeypatch, install):
    """select() raised for such a descriptor, and the watch ended."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 1024) for end in preemption._pipe()]
    monkeypatch.setattr(preemption, "_pipe", lambda: ends)
    failed = threading.Event()
    install(alone(on_own_signal=failed.set))
    os.kill(os.getpid(), signal.SIGTERM)
    assert failed.wait(60)


def test_a_fork_of_a_rank_ends_by_the_signal():
    """Such as a process of a user's own pool, which ``terminate`` did not end."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        leaving = alone()
        leaving.install()
        child = os.fork()
        if not child:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert leaving.check(1) == ""
    finally:
        leaving.close()
        signal.signal(signal.SIGTERM, before)


def test_ranks_that_have_agreed_to_stop_are_not_ended_by_their_own_signal():
    """The scheduler of a job that a platform stops can be gone before the ranks have saved."""
    failed = []
    leaving = alone(on_own_signal=lambda: failed.append(True))
    leaving.signalled = True
    assert leaving.check(1) == BY_UNKNOWN
    leaving._end_by_own_signal()
    assert failed == []


def named(path=None):
    """Returns MindSpore's callback, which may name the file of the graceful exit."""
    return SimpleNamespace(remote_config_file=path and str(path), exit=False)


def test_the_sender_is_known_although_a_callback_has_replaced_the_handler(install):
    callback = named()
    leaving = install(alone(5.0, [callback]))
    signal.signal(signal.SIGTERM, lambda *_: setattr(callback, "exit", True))
    assert leaving.check(1) == ""
    from_outside()
    assert leaving.check(2) == BY_SIGNAL


ASKS = '{"GracefulExit": 1}'


def test_the_graceful_exit_file_is_a_request(tmp_path, monkeypatch, clock):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MS_ENABLE_GRACEFUL_EXIT", raising=False)
    leaving = alone(5.0, [object(), named(tmp_path / "mine.json")])
    assert leaving.check(1) == ""
    (tmp_path / "mine.json").write_text(ASKS)
    assert leaving.check(2) == ""  # looked at a moment ago
    clock.now += 1
    assert leaving.check(3) == BY_FILE
    for said in ("", BY_FILE):
        leaving = alone()
        (tmp_path / "graceful_exit.json").write_text(ASKS)
        assert leaving.check(1) == said
        os.remove(tmp_path / "graceful_exit.json")
        monkeypatch.setenv("MS_ENABLE_GRACEFUL_EXIT", "1")


@pytest.mark.parametrize("again", ['{"GracefulExit": 1} ', '{"GracefulExit": 0}', None])
def test_a_remaining_file_does_not_end_the_next_training(tmp_path, again, clock):
    """The file ended the previous training. Neither our callback nor MindSpore's reacts to it until
    it is written again; a warning says so."""
    path = tmp_path / "mine.json"
    path.write_text(ASKS)
    callback = named(path)
    leaving = alone(5.0, [callback])
    assert str(path) in leaving.file.ignored and "Set GracefulExit to 0" in leaving.file.ignored
    for step in range(1, 4):
        clock.now += 1
        assert leaving.check(step) == "" and callback.remote_config_file is None
    path.write_text(again) if again else os.remove(path)
    clock.now += 1
    assert leaving.check(4) == (
        BY_FILE if again and "1" in again else ""
    ) and callback.remote_config_file == str(path)
    assert not leaving.file.ignored
    path.write_text('{"GracefulExit": 1}  ')
    clock.now += 1
    assert leaving.check(5) == BY_FILE


def test_a_request_while_the_network_is_compiled_counts(tmp_path):
    path = str(tmp_path / "mine.json")
    callback = named(path)
    before = requests(
        {"callbacks": [{"type": "MFLossMonitor"}, {"type": "OnRequestExit", "config_file": path}]}
    )
    assert before == {"graceful_exit.json": None, path: None} and requests({}) == {
        "graceful_exit.json": None
    }
    (tmp_path / "mine.json").write_text(ASKS)
    leaving = alone(5.0, [callback], before=before)
    assert not leaving.file.ignored and leaving.check(1) == BY_FILE
    stays = alone(5.0, [callback], before={path: request(path)})
    assert stays.file.ignored and stays.check(1) == ""


def test_a_callback_that_handles_the_signal_is_consulted():
    callback = named()
    leaving = alone(5.0, [callback])
    assert leaving.check(1) == ""
    callback.exit = True
    assert leaving.check(2) == BY_UNKNOWN


@pytest.mark.parametrize(
    "content, asks",
    [
        (ASKS, True),
        ('{"GracefulExit": 0}', False),
        ("[1]", False),
        ('{"Grac', False),
        ('{"GracefulExit": "1"}', False),
    ],
)
def test_the_preemption_file_is_parsed(tmp_path, content, asks):
    (tmp_path / "f.json").write_text(content)
    assert (request(str(tmp_path / "f.json")) is not None) is asks
    assert request(str(tmp_path / "absent.json")) is None and request(str(tmp_path)) is None
