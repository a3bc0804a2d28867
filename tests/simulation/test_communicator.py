"""The collectives of simulated jobs."""

import pytest

from sim.cluster import Cluster, current_cluster
from sim.communicator import LIMIT, Communicator, ExchangeError, MismatchError
from sim.machine import use_cluster
from sim.schedule import Schedule


def run_ranks(*works, limit=LIMIT):
    """Runs each ``work(member)`` as a rank. Returns (cluster, communicator, results by rank)."""
    cluster, shared, found = (
        Cluster(Schedule()),
        Communicator(len(works), limit),
        {},
    )
    with use_cluster(cluster):
        host = cluster.host()
        for rank, work in enumerate(works):

            def attempt(rank=rank, work=work):
                found[rank] = work(shared.member(rank, cluster.processes[rank]))

            cluster.process(host, f"rank{rank}", attempt)
        cluster.scheduler.run()
    return cluster, shared, [found.get(rank) for rank in range(len(works))]


@pytest.mark.parametrize("further", [0, 1])
def test_two_ranks_that_make_different_calls(further):
    def work(member):
        for _ in range(further):
            member.gather(b"")
        return member.gather(b"") if member.rank == 0 else member.broadcast(b"")

    cluster, shared, _ = run_ranks(work, work, limit=30.0)
    errors = [type(process.error) for process in cluster.processes]
    assert (
        sorted(error.__name__ for error in errors) == ["ExchangeError", "MismatchError"]
        and MismatchError in errors
    )
    assert shared.mismatch.startswith(f"call {further + 1}: ")


def test_a_killed_rank_sends_no_message():
    """Its except and finally clauses make calls while it is unwound."""

    def dies(member):
        try:
            current_cluster().scheduler.sleep(100.0)
        finally:
            member.gather(b"from the dead")

    def kills(member):
        current_cluster().scheduler.sleep(1.0)
        current_cluster().kill(current_cluster().processes[0])
        current_cluster().scheduler.sleep(1.0)
        return member.gather(b"")

    cluster, shared, _ = run_ranks(dies, kills, limit=30.0)
    assert isinstance(cluster.processes[1].error, ExchangeError) and list(
        shared.rounds[1].messages
    ) == [1]
