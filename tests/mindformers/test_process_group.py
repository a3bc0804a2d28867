"""Messages as int32 words, and the group of a single process."""

import numpy as np
import pytest

from mindresume.coordination.collectives import SingleProcess
from mindresume.errors import ConfigError
from mindresume.mindformers.process_group import MindSporeGroup, _bytes, _words, check_launch


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
    """The group of several ranks with numpy instead of communication: every rank's messages are
    known beforehand."""

    def __init__(self, rank, messages):
        super().__init__(rank, len(messages))
        self.messages = messages

    def _broadcast(self, array):  # what rank 0 would send
        message = self.messages[0]
        return (
            np.array([len(message)], np.int32)
            if array.shape == (1,) and not hasattr(self, "announced") and self._tell()
            else _words(message, len(message))
        )

    def _tell(self):
        self.announced = True
        return True

    def _gather(self, array):
        lengths = [len(message) for message in self.messages]
        if not hasattr(self, "announced"):
            self._tell()
            return np.array(lengths, np.int32)
        rows = [_words(message, max(lengths)) for message in self.messages]
        assert array.shape == rows[self.rank].shape and np.array_equal(array, rows[self.rank])
        return np.concatenate(rows)


@pytest.mark.parametrize(
    "messages",
    [[b"a", b"", b"hello world"], [b"", b"", b""], [b"1234", b"5678"], [b"x" * 1000, b"y"]],
)
def test_unequal_messages_of_all_ranks(messages):
    for rank, message in enumerate(messages):
        assert Wire(rank, messages).gather(message) == messages
        assert Wire(rank, messages).broadcast(message if rank == 0 else b"ignored") == messages[0]


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
