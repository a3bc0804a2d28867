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

from mindresume.errors import RecordError
from mindresume.model.manifest import encode_head, field_errors, read_head
from mindresume.model.training_state import is_count
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage

KIND = "node state"
READY, RUNNING, FAILED, FINISHED, LEFT = "ready", "running", "failed", "finished", "left"
_STATES = (READY, RUNNING, FAILED, FINISHED, LEFT)
_NAME = re.compile(r"node-(\d{5})-([0-9a-f]{8,32})-(\d{8})\.json")
_KEPT = 2                       # files of one supervisor: a listing can still show the one before the newest
_MAX_TEXT = 1000


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
    node: int
    session: str
    state: str = READY
    generation: int = 0
    seen: Mapping[int, str] = field(default_factory=dict)
    members: Mapping[int, str] = field(default_factory=dict)
    status: int = 0
    reason: str = ""
    kind: str = ""
    address: str = ""

    def encode(self) -> bytes:
        numbers = {name: {str(node): session for node, session in getattr(self, name).items()} for name in ("seen", "members")}
        return encode_head({"version": 1, "kind": KIND, **{"end" if name == "kind" else name: value
                                                           for name, value in asdict(self).items()}, **numbers})

    @classmethod
    def read(cls, storage: Storage, path: str) -> NodeState:
        """Reads a state. Raises RecordError if it is torn, altered, of another kind or of a later version; OSError."""
        with storage.open(path) as file:
            head, _ = read_head(file, KIND)
        with field_errors(KIND):
            maps = {name: {int(node): session for node, session in head[name].items()} for name in ("seen", "members")}
            texts = {name: head["end" if name == "kind" else name] for name in ("session", "state", "reason", "kind", "address")}
            counts = {name: head[name] for name in ("node", "generation", "status")}
            everything = [*texts.values(), *maps["seen"].values(), *maps["members"].values()]
            if not all(isinstance(text, str) and len(text) <= _MAX_TEXT for text in everything) or texts["state"] not in _STATES:
                raise RecordError("node state: a text is missing, too long, or no state")
            if not all(map(is_count, (*counts.values(), *maps["seen"], *maps["members"]))):
                raise RecordError("node state: a number is missing or negative")
            return cls(**texts, **counts, **maps)


@dataclass(frozen=True)
class SeenState:
    """Holds the newest state of one session as this process sees it. ``since``: when its number was first seen, by this process's
    clock. ``advances``: how often its number was seen to grow."""
    state: NodeState
    sequence: int
    since: float
    advances: int = 0


class NodeStates:
    """Publishes this supervisor's state and sees those of the others. An error of the storage is kept in ``error``, and the
    operation is tried again at the next call: a file system that is away for a minute ends no training.

    Args:
        beat: seconds after which a state is published again.
        clock: monotonic.
    """

    def __init__(self, storage: Storage, folder: str, state: NodeState, beat: float, clock: Callable[[], float]):
        self.storage, self.folder, self.mine, self.beat, self.clock = storage, folder, state, beat, clock
        self.error: OSError | None = None
        self.seen: dict[tuple[int, str], SeenState] = {}
        self._sequence, self._published_at = 0, 0.0
        self._published: NodeState | None = None        # the newest one of this supervisor that the others can see
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

    def look(self) -> None:
        """Reads the states of the others."""
        try:
            self._read()
            self.error = None
        except OSError as error:
            self.error = error

    def newest(self, node: int) -> SeenState | None:
        """Returns the newest state of another node: of the session that was seen to change last."""
        of_node = [seen for (number, session), seen in self.seen.items()
                   if number == node and session != self.mine.session]
        return max(of_node, key=lambda seen: (seen.since, seen.state.session), default=None)

    def remove_old(self) -> None:
        """Removes the files of earlier supervisors of this node. One that is alive publishes again."""
        with suppress(OSError):
            for name in self.storage.list(self.folder):
                match = _NAME.fullmatch(name)
                if match and int(match[1]) == self.mine.node and match[2] != self.mine.session:
                    self.storage.remove(os.path.join(self.folder, name))

    def publish_if_due(self) -> None:
        """Publishes this supervisor's state if it is new, or was published long enough ago."""
        now, state = self.clock(), self.mine            # which another thread can replace meanwhile
        if state == self._published and now - self._published_at < self.beat:
            return
        name = f"node-{self.mine.node:05d}-{self.mine.session}-{self._sequence + 1:08d}.json"
        self._sequence += 1                         # also after an error: the name may exist
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

    def _read(self) -> None:
        """Reads new states. Raises OSError at the end if one could not be read: it keeps this node from none of the others."""
        newest: dict[tuple[int, str], tuple[int, str]] = {}
        failed: OSError | None = None
        for name in self.storage.list(self.folder):
            if match := _NAME.fullmatch(name):
                key, sequence = (int(match[1]), match[2]), int(match[3])
                if sequence > newest.get(key, (0, ""))[0]:
                    newest[key] = sequence, name
        for key, (sequence, name) in newest.items():
            before = self.seen.get(key)
            if key == (self.mine.node, self.mine.session) or before is not None and before.sequence >= sequence:
                continue
            try:
                state = NodeState.read(self.storage, os.path.join(self.folder, name))
            except (FileNotFoundError, RecordError):        # replaced by a newer one, or another version's
                continue
            except OSError as error:
                failed = error
                continue
            if (state.node, state.session) == key:
                advances = 0 if before is None else before.advances + 1
                self.seen = {**self.seen, key: SeenState(state, sequence, self.clock(), advances)}      # others iterate over it
        if failed is not None:
            raise failed
