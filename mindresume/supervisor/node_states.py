"""Exchanges the states of the supervisors of several nodes through files in a folder that all of them see.

    {folder}/node-00002-5f0c21aa-00000017.json        node, session (one run of a supervisor), sequence number

A state is never rewritten: each one is a new file with a higher number, and a listing shows which is the newest. So a host that
caches listings and contents for a minute (NFS) sees a state late, but never an old content under a new name. A state is published
again every few seconds: that shows that its supervisor is alive. Clocks of nodes are not compared: a state is as old as the time
since this process first saw it. The last state stays when a supervisor ends, because others can see it late; the next one of this
node removes it.
"""
from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from mindresume import runtime
from mindresume.coordination.shared_folder import Sighting, Watch
from mindresume.errors import RecordError
from mindresume.model.manifest import encode_head, read_head
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.typed import Count, Limits, decode

KIND = "node state"
READY, RUNNING, FAILED, FINISHED, LEFT = "ready", "running", "failed", "finished", "left"
_NAME = re.compile(r"node-(\d{5})-([0-9a-f]{8,32})-(\d{8})\.json")
_KEPT = 2                       # files of one supervisor: a listing can still show the one before the newest
_Text = Annotated[str, Limits(0, 1000)]
_MOMENT = 0.2                   # seconds for which a caller waits: most disks answer sooner, and the answer counts at once
_PUBLISH, _READ, _REMOVE = "publish", "read", "remove"


@dataclass(frozen=True)
class NodeState:
    """Describes what the supervisor of a node does.

    Attributes:
        node: its number.
        session: random, of this run of the supervisor.
        state: READY for a start; RUNNING, FAILED or FINISHED in ``generation``; LEFT: it supervises no more.
        generation: the newest in which it took part; 0: none.
        seen: {node: session} of the other supervisors that it sees.
        members: {node: session} of those that take part in ``generation``, in RUNNING.
        status: exit status, of FAILED, FINISHED and LEFT.
        reason: for people.
        kind: of the end of its part, as ``restart_policy`` has them, of FAILED.
        address: under which its host can be reached.
    """
    node: Count
    session: _Text
    state: Literal["ready", "running", "failed", "finished", "left"] = READY
    generation: Count = 0
    seen: Mapping[int, _Text] = field(default_factory=dict)
    members: Mapping[int, _Text] = field(default_factory=dict)
    status: Count = 0
    reason: _Text = ""
    kind: _Text = field(default="", metadata={"key": "end"})
    address: _Text = ""

    def encode(self) -> bytes:
        row = {"end" if name == "kind" else name: value for name, value in asdict(self).items()}
        return encode_head({"version": 1, "kind": KIND, **row})

    @classmethod
    def read(cls, storage: Storage, path: str) -> NodeState:
        """Reads a state. Raises RecordError if it is torn, altered, of another kind or of a later version; OSError."""
        with storage.open(path) as file:
            return decode(cls, read_head(file, KIND)[0], KIND)


class NodeStates:
    """Publishes this supervisor's state and sees those of the others. An error of the storage is kept in ``error``, and the
    operation is tried again at the next call: a file system that is away for a minute ends no training.

    Args:
        beat: seconds after which a state is published again.
        clock: monotonic.
    Attributes:
        watch: by (node, session) what was seen of the other supervisors; the content is their NodeState.
    """

    def __init__(self, storage: Storage, folder: str, state: NodeState, beat: float, clock: Callable[[], float]):
        self.storage, self.folder, self.mine, self.beat = storage, folder, state, beat
        self.watch = Watch(clock)
        self.error: OSError | None = None
        self._published_at = 0.0
        self._published: NodeState | None = None        # the newest one of this supervisor that the others can see
        self._sequence = 0
        self._names: list[str] = []

    @property
    def is_published(self) -> bool:
        """Returns whether the others can see the current state."""
        return self.mine == self._published

    def set(self, **changes: object) -> None:
        """Changes this supervisor's state. It is published at once, or at the next ``refresh``."""
        changed = replace(self.mine, **changes)
        if changed != self.mine:
            self.mine = changed
            self.publish_if_due()

    def refresh(self) -> None:
        """Reads the states of the others, and publishes this one if it is new or due."""
        self.look()
        self.publish_if_due()

    def newest(self, node: int) -> Sighting | None:
        """Returns the newest state of another node: of the session that was seen to change last."""
        of_node = [seen for (number, session), seen in self.watch.members.items()
                   if number == node and session != self.mine.session]
        return max(of_node, key=lambda seen: (seen.since, seen.content.session), default=None)

    def remove_old(self) -> None:
        """Removes the files of earlier supervisors of this node. One that is alive publishes again."""
        with suppress(OSError):
            for name in self.storage.list(self.folder):
                match = _NAME.fullmatch(name)
                if match and int(match[1]) == self.mine.node and match[2] != self.mine.session:
                    self.storage.remove(os.path.join(self.folder, name))

    def publish_if_due(self) -> None:
        """Publishes this supervisor's state if it is new, or was published long enough ago."""
        now, state = self.watch.clock(), self.mine              # which another thread can replace meanwhile
        if state == self._published and now - self._published_at < self.beat:
            return
        self._sequence += 1                         # also after an error: the name may exist
        name = f"node-{state.node:05d}-{state.session}-{self._sequence:08d}.json"
        self._names.append(name)
        try:
            self.storage.make_folder(self.folder)
            publish(self.storage, os.path.join(self.folder, name), [state.encode()], state.session)
            self._published, self._published_at = state, now
            while len(self._names) > _KEPT:
                self.storage.remove(os.path.join(self.folder, self._names[0]))
                self._names.pop(0)
        except OSError as error:
            self.error = error

    def look(self) -> None:
        """Reads the new states of the others. One that cannot be read keeps this node from none of the others."""
        failed: OSError | None = None
        newest: dict[tuple[int, str], tuple[int, str]] = {}
        try:
            names = self.storage.list(self.folder)
        except OSError as error:
            self.error = error
            return
        for match in filter(None, map(_NAME.fullmatch, names)):
            member, sequence = (int(match[1]), match[2]), int(match[3])
            newest[member] = max(newest.get(member, (0, "")), (sequence, match[0]))
        for member, (sequence, name) in newest.items():
            before = self.watch.members.get(member)
            if member == (self.mine.node, self.mine.session) or before is not None and before.number >= sequence:
                continue
            try:
                state = NodeState.read(self.storage, os.path.join(self.folder, name))
            except (FileNotFoundError, RecordError):            # replaced by a newer one, or another version's
                continue
            except OSError as error:
                failed = error
                continue
            if (state.node, state.session) == member:
                self.watch.see(member, sequence, state)
        self.error = failed


class BackgroundStates(NodeStates):
    """Exchanges the states in one thread of its own: no method waits for the storage longer than a moment.

    A hung mount holds a system call for ever. In the watch loop that would hide the death of a rank of this very node. Here the
    thread waits alone: the job is watched and ended. What needs the other nodes waits as it does for a storage that fails: they
    count as gone after ``--node-timeout``. At most one exchange is in progress, and a state that was replaced before it was
    published is never published: others can miss a state in any case, because a listing shows the newest one.
    """

    def __init__(self, storage: Storage, folder: str, state: NodeState, beat: float, clock: Callable[[], float]):
        super().__init__(storage, folder, state, beat, clock)
        self._changed = runtime.Condition()
        self._wanted: set[str] = set()
        self._is_busy = False
        self._defect: BaseException | None = None       # errors of the storage are in ``error``
        runtime.Thread(target=self._work, name="mindresume-nodes", daemon=True).start()

    def refresh(self) -> None:
        self._ask(_READ)

    def publish_if_due(self) -> None:
        self._ask(_PUBLISH)

    def remove_old(self) -> None:
        self._ask(_REMOVE)

    def _is_idle(self) -> bool:
        return not self._wanted and not self._is_busy

    def _ask(self, what: str) -> None:
        with self._changed:
            was_idle = self._is_idle()
            self._wanted.add(what)
            self._changed.notify_all()
            if was_idle:                                # else the storage takes its time, and this caller does not wait as well
                self._changed.wait_for(self._is_idle, _MOMENT)
            if self._defect is not None:
                raise self._defect

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._wanted:
                    self._changed.wait()
                wanted = self._wanted
                self._wanted = set()
                self._is_busy = True
            try:
                if _REMOVE in wanted:
                    super().remove_old()
                super().publish_if_due()                # before the others are read, which takes longer
                if _READ in wanted:
                    self.look()
                    super().publish_if_due()            # again, if it has failed
            except BaseException as error:
                self._defect = error
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
