"""supervisor/rendezvous.py: what is in the folder besides keeps no supervisor from seeing the
others."""

import os

import pytest

from mindresume.storage.posix import PosixStorage
from mindresume.supervisor.rendezvous import NodeState, NodeStates

MINE, OTHER = NodeState(0, "aaaaaaaa"), NodeState(1, "bbbbbbbb", address="node1")


def states(folder, mine):
    return NodeStates(PosixStorage(), str(folder), mine, 1.0, lambda: 0.0)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[" * 100_000, b"\0" * 4096])
def test_a_state_that_cannot_be_read_hides_no_other(tmp_path, content):
    """Such as the last state of an earlier job of another user."""
    name = tmp_path / "node-00001-00000001-00000007.json"
    if content is None:
        # opening it fails, as without permission
        os.mkdir(name)
    else:
        name.write_bytes(content)
    states(tmp_path, OTHER).publish_if_due()
    mine = states(tmp_path, MINE)
    mine.refresh()
    assert mine.newest(1).content == OTHER and mine.is_published
    assert (mine.error is not None) == (content is None)
