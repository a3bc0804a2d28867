"""Exchanges the states of nodes in one thread of its own, so that a storage that does not answer stops nothing else.

    watch loop    set(state), refresh() ─▶ asks the thread, goes on ─▶ seen, is_published: what the thread knows by now
    thread        publish ─▶ list, read ─▶ a new ``seen`` ─▶ waits until it is asked again

A hung mount holds a system call for ever. In the watch loop that would hide the death of a rank of this very node. Here the
thread waits alone: the job is watched and ended. What needs the other nodes waits as it does for a storage that fails: they count
as gone after ``--node-timeout``. At most one exchange is in progress, and a state that was replaced before it was published is
never published: others can miss a state in any case, because a listing shows the newest one.
"""
from __future__ import annotations

from typing import Any

from mindresume import runtime
from mindresume.supervisor.node_states import NodeStates

_MOMENT = 0.2                   # seconds for which a caller waits: most disks answer sooner, and the answer counts at once
_PUBLISH, _READ, _REMOVE = "publish", "read", "remove"


class BackgroundStates(NodeStates):
    """Implements ``NodeStates``; no method waits for the storage longer than a moment."""

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._changed = runtime.Condition()
        self._wanted: set[str] = set()
        self._is_busy = False
        self._error: BaseException | None = None        # a defect; errors of the storage are in ``error``
        runtime.Thread(target=self._work, name="mindresume-nodes", daemon=True).start()

    def refresh(self) -> None:
        self._ask(_READ)

    def publish_if_due(self) -> None:
        self._ask(_PUBLISH)

    def remove_old(self) -> None:
        self._ask(_REMOVE)

    def _ask(self, what: str) -> None:
        with self._changed:
            was_idle = not (self._wanted or self._is_busy)
            self._wanted.add(what)
            self._changed.notify_all()
            if was_idle:                                # else the storage takes its time, and this caller does not wait as well
                self._changed.wait_for(lambda: not (self._wanted or self._is_busy), _MOMENT)
            if self._error is not None:
                raise self._error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
                wanted, self._wanted, self._is_busy = self._wanted, set(), True
            try:
                if _REMOVE in wanted:
                    super().remove_old()
                super().publish_if_due()                # before the others are read, which takes longer
                if _READ in wanted:
                    self.look()
                    super().publish_if_due()            # again, if it has failed
            except BaseException as error:
                self._error = error
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
