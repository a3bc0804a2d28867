"""Numbers of this node's part of a job for Prometheus (``mindresume.events.metrics``): what the
heartbeats of its ranks and the events of the supervisor tell. ``serve`` answers Prometheus itself,
with these and with those of rank 0, if it is on this node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mindresume import runtime
from mindresume.coordination.rank_heartbeat import NONE, TRAINING, Heartbeat
from mindresume.errors import ConfigError
from mindresume.events import ERROR, Emit, Event, JobEnded
from mindresume.events.metrics import Metrics, MetricsFile

_DOWN, _REDOING = "down", "redoing"  # activities beside the phases of a heartbeat


class NodeMetrics(Metrics):
    """Writes the numbers of a node. ``folder``, ``training``, ``emit``: see ``Metrics``; ``node``:
    its number."""

    own = "node_"

    def __init__(self, folder: str, training: str, emit: Emit, node: int):
        self._activity, self._since = _DOWN, runtime.monotonic()
        self._failed: Counter[int] = Counter()  # saves that failed in a row, by process
        self._reached = self._committed = NONE  # the newest steps so far
        super().__init__(folder, training, f"node_{node}", emit, int, node=str(node))
        self.put("node_gave_up", 0)
        self.put("node_fruitless_starts", 0)

    def watch(self, beats: Mapping[int, Heartbeat]) -> None:
        """Takes the heartbeats of the ranks of this node, by process. Called several times a
        second."""
        if not beats:
            return
        first = min(beats.values(), key=lambda beat: beat.rank)
        again = first.phase == TRAINING and first.step < self._reached
        failed = Counter({pid: beat.saves.failed for pid, beat in beats.items()})
        step = min(beat.step for beat in beats.values())
        committed = max(beat.saves.committed for beat in beats.values())
        with self._lock:
            self._spend(_REDOING if again else first.phase)
            self.put("node_save_failures_total", (failed - self._failed).total())
            self.put("node_step", None if step == NONE else step)
            if committed > self._committed:
                self.put("node_fruitless_starts", 0)
        self._failed, self._reached = failed, max(first.step, self._reached)
        self._committed = max(committed, self._committed)

    def handle(self, event: Event, time_s: float) -> None:
        with self._lock:
            if event.log_level == ERROR or isinstance(event, JobEnded):
                self._spend(_DOWN)
            super().handle(event, time_s)

    def look(self) -> None:
        with self._lock:
            self._spend(self._activity)

    def _spend(self, activity: str) -> None:
        """Adds the time since the last call to the activity since then, and begins another."""
        now = runtime.monotonic()
        self.put("node_seconds_total", now - self._since, self._activity)
        self._activity, self._since = activity, now

    def serve(self, port: int) -> None:
        """Answers Prometheus on a port, in threads. Raises ConfigError if it is in use."""
        registry = self.client.CollectorRegistry()
        registry.register(self)
        registry.register(MetricsFile(f"{self.path.rpartition('-')[0]}-rank_0.prom"))
        try:
            self.client.start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port (MSRUN_METRICS_PORT) {port}: {error}. Give a free port of this "
                "host, another one for each job on it"
            ) from error
