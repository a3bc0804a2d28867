"""Messages as int32 words, and the group of a single process."""

import numpy as np
import pytest
from rank_folders import Threads

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import ConfigError
from mindresume.mindformers.process_group import (
    MindSporeGroup,
    _bytes,
    _words,
    check_launch,
    join_sooner,
)


@pytest.mark.parametrize("length", range(20))
def test_messages_of_every_small_length_are_received(length):
    """Also filled up to the longest."""
    for longest in {length, 19, 20}:
        for message in (bytes(range(length)), b"\0" * length, b"\xff" * length):
            words = _words(message, longest)
            assert words.dtype == np.int32 and words.shape == (max(1, -(-longest // 4)),)
            # a tensor made of them may share their memory
            assert _bytes(words, length) == message and words.flags.writeable


class Wire(MindSporeGroup):
    """The group of several ranks with threads instead of communication: what each rank sends must
    have one shape."""

    def __init__(self, group):
        super().__init__(group.rank, group.size)
        self.group = group

    def _gather(self, array):
        rows = [np.frombuffer(row, np.int32) for row in self.group.gather(array.tobytes())]
        assert {row.shape for row in rows} == {array.shape}
        return np.concatenate(rows)

    def _broadcast(self, array):
        return self._gather(array)[: len(array)]


@pytest.mark.parametrize(
    "messages",
    [[b"a", b"", b"hello world"], [b"", b"", b""], [b"1234", b"5678"], [b"x" * 1000, b"y"]],
)
def test_unequal_messages_of_all_ranks(messages):
    def work(group):
        wire = Wire(group)
        return wire.gather(messages[group.rank]), wire.broadcast(messages[group.rank])

    assert Threads(len(messages)).run(work) == [(messages, messages[0])] * len(messages)


def test_a_job_of_one_process_needs_no_communication():
    group = SingleProcess()
    assert (group.rank, group.size) == (0, 1)
    assert group.broadcast(b"x") == b"x" and group.gather(b"y") == [b"y"]


@pytest.mark.parametrize("role", ["MS_WORKER", "MS_SCHED"])
def test_several_processes_that_do_not_communicate_are_refused(role, monkeypatch):
    """Each would be rank 0 of one folder."""
    environment = {"MS_ROLE": role, "MS_WORKER_NUM": "4"}
    with pytest.raises(ConfigError, match="4 processes.*use_parallel"):
        check_launch(environment)
    check_launch({**environment, "MS_WORKER_NUM": "1"})
    check_launch({})
    monkeypatch.setattr("mindspore.communication.GlobalComm.INITED", True)
    check_launch(environment)


LOWER, UPPER = "MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER"


@pytest.mark.parametrize("ranks", ["1", "256"])
def test_a_rank_of_a_small_job_asks_the_scheduler_every_second(ranks):
    environment = {"MS_WORKER_NUM": ranks}
    join_sooner(environment)
    assert environment == {"MS_WORKER_NUM": ranks, LOWER: "1", UPPER: "1"}


@pytest.mark.parametrize(
    "environment",
    [
        {"MS_WORKER_NUM": "257"},
        {"MS_WORKER_NUM": "4", LOWER: "2"},
        {"MS_WORKER_NUM": "4", UPPER: "9"},
        {"MS_WORKER_NUM": "many"},
        {},
    ],
)
def test_what_the_user_or_mindspore_has_set_for_joining_stays(environment):
    before = dict(environment)
    join_sooner(environment)
    assert environment == before
