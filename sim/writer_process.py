"""The writer of ``async_save: process`` as a process of a simulated cluster.

It keeps the contract of ``mindresume.saving.background_writer.WriterProcess``: it shares only messages and the staging buffer
with the training, ignores SIGTERM, finishes what it has begun when the training has died, and then waits for other ranks no
longer than a living training would.
"""
from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mindresume.saving.background_writer import serve
from mindresume.saving.retention import Policy
from mindresume.saving.shard_writer import SaveTarget
from mindresume.saving.staging import Staging
from sim.cluster import current_cluster, current_process
from sim.mount import Mount
from sim.threads import SimpleQueue

_CHECK = 1.0                    # seconds between checks of the training


class WriterProcess:
    """The training's end of the writer."""

    def __init__(self, target: SaveTarget, policy: Policy | None, staging: Staging, timeout: float):
        self._inbox, self._outbox = SimpleQueue(), SimpleQueue()
        training, cluster = current_process(), current_cluster()
        self._process = cluster.process(training.host, f"{training.name}.writer", lambda: None)
        self._process.sigterm_handler = lambda: None
        (target, policy), memory = _pickled((replace(target, storage=None), policy)), Staging(fd=os.dup(staging.fd))
        mine = replace(target, storage=Mount(cluster, self._process))
        cluster.cleanups.append(memory.close)
        cluster.scheduler.start(self._process, _deadline_task(training, self._process, timeout), f"{training.name}.writer/bound")
        self._process.main = cluster.scheduler.start(
            self._process, lambda: serve(mine, policy, memory, self._receive(training),
                                         lambda message: self._outbox.put(_pickled(message))), self._process.name)

    def _receive(self, training: Any) -> Callable[[], Any]:
        def receive() -> Any:
            while self._inbox.empty():
                if training.dead:
                    return None
                self._inbox.wait(_CHECK)
            return self._inbox.get()
        return receive

    def send(self, message: Any) -> None:
        if self._process.dead:
            raise BrokenPipeError("the writer process has ended")
        self._inbox.put(_pickled(message))

    def receive(self, timeout: float) -> Any:
        if self._outbox.empty() and timeout:
            self._outbox.wait(timeout)
        return None if self._outbox.empty() else self._outbox.get()

    def alive(self) -> bool:
        return not self._process.dead

    def close(self) -> None:
        self.send(None)

    def join(self) -> None:
        while self.alive():
            current_cluster().scheduler.sleep(_CHECK)

    def end(self) -> str:
        return f"exit status {self._process.exit}"


def _pickled(message: Any) -> Any:
    """Returns ``message`` as it arrives at the other end of a pipe."""
    return pickle.loads(pickle.dumps(message))


def _deadline_task(training: Any, process: Any, timeout: float) -> Callable[[], None]:
    """Returns a task that kills the writer ``timeout`` seconds after the death of its training."""
    def work() -> None:
        scheduler = current_cluster().scheduler
        while not training.dead:
            scheduler.sleep(_CHECK)
        scheduler.sleep(timeout)
        current_cluster().kill(process)
    return work
