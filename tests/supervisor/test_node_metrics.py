"""supervisor/node_metrics.py: what heartbeats make of the numbers of a node, and its port."""

import socket
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from mindresume.coordination.rank_heartbeat import LOADING, TRAINING, Heartbeat, Saves
from mindresume.errors import ConfigError
from mindresume.events import JobEnded, JobRestarted, RankDied, ignore
from mindresume.events.metrics import Metrics

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

from mindresume.supervisor import node_metrics  # noqa: E402
from mindresume.supervisor.node_metrics import NodeMetrics  # noqa: E402


@pytest.fixture
def clock(monkeypatch):
    """Returns a list with the time of the monotonic clock."""
    now = [100.0]
    fake = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(node_metrics, "runtime", fake)
    return now


@pytest.fixture
def node(tmp_path, clock):
    made = NodeMetrics(str(tmp_path), "job", ignore, 0)
    yield made
    made.close()


def beats(*ranks: tuple[int, str, int, Saves]):
    return {
        100 + rank: Heartbeat(100 + rank, 1, rank, 2, phase, step, saves=saves)
        for rank, phase, step, saves in ranks
    }


def spent(node) -> dict[str, float]:
    return {
        label: value
        for (name, label), value in node.numbers.items()
        if name == "node_seconds_total" and value
    }


def test_time_is_told_apart_by_what_the_first_rank_does(node, clock):
    none = Saves()

    def watch(seconds, *ranks):
        clock[0] += seconds
        node.watch(beats(*ranks))

    watch(1, (1, TRAINING, 9, none), (0, LOADING, -1, none))
    watch(2, (0, TRAINING, 8, none), (1, TRAINING, 9, none))
    clock[0] += 4
    node.handle(RankDied(1, "host", 100), 0.0)
    assert node.numbers["node_step", ""] == 8
    clock[0] += 8
    node.handle(JobEnded(1, 137, "", 1.0, 1.0), 0.0)
    watch(16, (0, TRAINING, 5, none))  # it trains step 6 again
    watch(32, (0, TRAINING, 8, none))  # step 9 is new
    watch(64, (0, TRAINING, 9, none))
    assert spent(node) == {"down": 1 + 8 + 16, LOADING: 2, TRAINING: 4 + 64, "redoing": 32}


def test_failed_saves_of_every_rank_count(node):
    for first, second in ((1, 0), (2, 1), (2, 2), (0, 3), (1, 3)):
        node.watch(
            beats(
                (0, TRAINING, 5, Saves(failed=first)),
                (1, TRAINING, 5, Saves(failed=second)),
            )
        )
    assert node.numbers["node_save_failures_total", ""] == 2 + 3 + 1


def test_a_later_checkpoint_ends_a_crash_loop(node):
    node.watch(beats((0, TRAINING, 5, Saves(committed=5))))
    node.handle(JobRestarted(2, 1.0, "", 2), 0.0)
    node.watch(beats((0, TRAINING, 5, Saves(committed=5))))
    assert node.numbers["node_fruitless_starts", ""] == 2
    node.watch(beats((0, TRAINING, 10, Saves(committed=10))))
    assert node.numbers["node_fruitless_starts", ""] == 0


def test_the_port_answers_with_the_numbers_of_the_node_and_of_rank_0(node, tmp_path):
    rank_0 = Metrics(str(tmp_path), "job", "rank_0", ignore, lambda: 7)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node.serve(port)
    text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'mindresume_step{training="job"} 7.0' in text
    assert 'mindresume_node_running{node="0",training="job"} 1.0' in text
    rank_0.close()


def test_a_port_in_use_is_refused(node):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=str(taken.getsockname()[1])):
            node.serve(taken.getsockname()[1])
