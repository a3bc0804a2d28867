"""supervisor/job_end.py: what ends in which order, and what is left behind."""

import signal
from types import SimpleNamespace

import pytest

from mindresume import runtime
from mindresume.supervisor import job_end
from mindresume.supervisor.hang import JobSettings
from mindresume.supervisor.job_end import Ending
from mindresume.supervisor.members import OTHER, RANK, SCHEDULER, WRITER, Ended, Member, Process
from mindresume.supervisor.restart_policy import DIED, JobEnd


class FakeMembers:
    """Stands in for Members. ``tree``: {process: (role, parent, signals that end it)}."""

    def __init__(self, tree):
        self.tree = {
            pid: (Member(Process(pid, parent, pid, "S", 1), role), parent, ends)
            for pid, (role, parent, ends) in tree.items()
        }
        self.sent, self.stopped, self._ended, self.ended = [], set(), [], []

    def alive(self, *roles):
        return [member for member, _, _ in self.tree.values() if not roles or member.role in roles]

    def above(self, pids):
        found = set()
        for pid in pids:
            while pid in self.tree and self.tree[pid][1] in self.tree:
                pid = self.tree[pid][1]
                found.add(pid)
        return found

    def below(self, pid):
        return {other for other, (_, parent, _) in self.tree.items() if parent == pid}

    def wait(self, seconds):
        ended, self._ended = self._ended, []
        return ended

    def send(self, pid, number):
        self.sent.append((pid, number))
        if pid in self.tree and number in self.tree[pid][2]:
            self._ended.append(Ended(self.tree.pop(pid)[0], -number))
            self.ended.append(pid)

    def order(self, number):
        return list(dict.fromkeys(pid for pid, sent in self.sent if sent == number))


TERM, KILL, STOP, CONT = signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
BOTH = (TERM, KILL)


@pytest.fixture
def end(monkeypatch):
    """Returns a function that ends a tree in simulated time: each call of ``wait`` takes 0.05 s."""
    now = [0.0]
    monkeypatch.setattr(runtime, "monotonic", lambda: now[0])

    def run(
        members,
        grace=1.0,
        leave=False,
        is_saving=lambda member: False,
        at_once=lambda: False,
    ):
        monkeypatch.setattr(job_end, "send", members.send)

        def refresh():
            now[0] += 0.05

        job = SimpleNamespace(
            members=members,
            settings=JobSettings(kill_after=grace, save=20.0, leave=grace, stuck=60.0),
            refresh=refresh,
            is_saving=lambda member, kind: is_saving(member),
        )
        why = JobEnd(DIED, 1, "", leave)
        left = Ending(job, why, SimpleNamespace(is_hurried=at_once)).run()
        return members.ended, left, now[0]

    return run


def test_launchers_are_stopped_first_and_the_scheduler_outlives_the_ranks(end):
    members = FakeMembers(
        {
            1: (OTHER, 0, BOTH),
            2: (OTHER, 1, BOTH),
            3: (SCHEDULER, 2, BOTH),
            4: (RANK, 2, BOTH),
            5: (RANK, 2, (KILL,)),
            6: (OTHER, 4, BOTH),
            7: (OTHER, 1, (KILL,)),
        }
    )
    ended, left, spent = end(members)
    assert set(members.sent[:2]) == {(1, STOP), (2, STOP)} and left == ()
    terminated = members.order(TERM)
    assert set(terminated[:3]) == {4, 5, 6} and set(terminated[3:]) == {1, 2, 3, 7}
    assert sorted(ended) == [1, 2, 3, 4, 5, 6, 7]
    assert members.order(CONT) and members.order(KILL) == [5, 7] and 1 < spent < 3


STUBBORN = (RANK, 0, (KILL,))
WRITES = (WRITER, 0, (KILL,))


def is_5(member):
    return member.pid == 5


@pytest.mark.parametrize(
    "tree, how, asked, killed, least, most",
    [
        # without ranks every process gets SIGTERM at once
        ({1: (OTHER, 0, BOTH), 2: (OTHER, 1, BOTH)}, {}, [1, 2], [], 0, 1),
        # a rank that saves and a writer have more time
        ({4: STUBBORN, 5: STUBBORN, 8: WRITES}, {"is_saving": is_5}, [4, 5], [4, 5, 8], 40, 43),
        # after a signal a rank that saves is asked at once, and has no less time than the others
        (
            {4: (RANK, 0, BOTH), 5: (RANK, 0, BOTH)},
            {"grace": 60.0, "leave": True, "is_saving": lambda member: True},
            [4, 5],
            [],
            0,
            1,
        ),
        ({4: STUBBORN, 5: STUBBORN}, {"grace": 60.0, "is_saving": is_5}, [4, 5], [4, 5], 60, 62),
        # a second signal kills everything at once
        ({4: STUBBORN, 8: WRITES}, {"at_once": lambda: True}, [4], [4, 8], 0, 1),
    ],
)
def test_who_is_asked_and_killed_when(end, tree, how, asked, killed, least, most):
    members = FakeMembers(tree)
    _, left, spent = end(members, **how)
    assert members.order(TERM) == asked and members.order(KILL) == killed
    assert left == () and least <= spent < most and not members.order(STOP)


def test_a_rank_that_saves_gets_sigterm_after_its_save(end):
    """It may not handle the signal. What it has started is let alone as long."""
    members = FakeMembers({4: (RANK, 0, BOTH), 5: (RANK, 0, (KILL,)), 6: (OTHER, 5, BOTH)})
    calls = []

    def is_saving(member):
        calls.append(member.pid)
        return member.pid == 5 and len(calls) < 60

    _, _, spent = end(members, is_saving=is_saving)
    assert members.order(TERM) == [4, 5, 6]
    assert members.order(KILL) == [5] and 3 < spent < 5


def test_a_process_that_does_not_end_after_sigkill_is_left_behind(end):
    members = FakeMembers({4: (RANK, 0, ()), 5: (RANK, 0, BOTH)})
    ended, left, spent = end(members)
    assert (ended, left) == ([5], (4,)) and 60 < spent < 65
