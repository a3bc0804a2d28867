"""supervisor/rendezvous.py: two nodes in one process, in simulated time. The simulation has the
rest."""

import pytest

from mindresume.storage.posix import PosixStorage
from mindresume.supervisor.rendezvous import NODE_LOST, Membership, Place, Rendezvous

TIMEOUT = 60.0


@pytest.fixture
def nodes(tmp_path):
    now = [0.0]
    made = [
        Rendezvous(
            PosixStorage(),
            str(tmp_path),
            Place(node, 2, 2, TIMEOUT, f"host{node}"),
            lambda: now[0],
            str(node) * 8,
        )
        for node in range(2)
    ]

    def later():
        now[0] += 1.0

    return *made, later


def start_of_leader(leader, other, later):
    """Lets the leader begin a generation that the other node has not seen yet."""
    found = None
    while not isinstance(found, Membership):
        assert other.agree() is None
        later()
        found = leader.agree()
    return found


def test_a_node_starts_although_the_leader_has_finished_its_part_already(nodes):
    leader, other, later = nodes
    start_of_leader(leader, other, later)
    assert leader.finish() is None
    later()
    found = other.agree()
    assert (found.generation, found.nodes, found.index, found.is_leader) == (1, (0, 1), 1, False)
    later()
    assert other.finish().status == 0
    later()
    assert leader.finish().is_last


@pytest.mark.parametrize("statuses", [(0, 9), (9, 0), (9, 7)])
def test_all_nodes_end_with_the_status_of_the_first_node_whose_command_failed_after_its_training(
    nodes, statuses
):
    leader, other, later = nodes
    start_of_leader(leader, other, later)
    later()
    other.agree()
    later()
    leader.finish(statuses[0])
    later()
    found = other.finish(statuses[1])
    later()
    assert found.is_last and leader.finish(statuses[0]).status == found.status == 9


def test_a_node_that_leaves_before_it_starts_ends_the_part_of_the_others(nodes):
    """For example after SIGTERM. It is not waited for until it counts as gone."""
    leader, other, later = nodes
    start_of_leader(leader, other, later)
    other.leave(143, "SIGTERM was received")
    later()
    end = leader.check()
    assert end is not None and end.is_last and end.status == 143


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (9, NODE_LOST)])
def test_a_node_that_is_started_again_after_all_have_finished_ends_with_their_status(
    tmp_path, nodes, status, expected
):
    """Kubernetes starts a pod again that was evicted after its work; the completed ones never come
    back."""
    leader, other, later = nodes
    start_of_leader(leader, other, later)
    later()
    other.agree()
    later()
    leader.finish(status)
    later()
    end = other.finish()
    later()
    assert leader.finish(status).is_last
    for node in (leader, other):
        node.leave(end.status, end.cause)
    again = Rendezvous(
        PosixStorage(), str(tmp_path), Place(1, 2, 2, TIMEOUT, "host1"), leader.clock, "a" * 8
    )
    found = None
    while found is None:
        later()
        found = again.agree()
    assert found.is_last and found.status == expected
