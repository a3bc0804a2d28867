"""Lets the supervisors of several nodes start and end together, generation by generation.

    all nodes        READY(g) ─▶ the leader sees all of them: RUNNING(g + 1, members)
                     ─▶ the members: RUNNING(g + 1)
    one fails        FAILED(g + 1) ─▶ the others end their parts
                     ─▶ READY(g + 1), once nothing of theirs is left
    the leader       decides what follows: READY too, or LEFT(status), which all others return as
                     well
    all finish       FINISHED(g + 1) of all ─▶ the leader: LEFT(0)

The leader is the lowest node that is alive. It counts a node as ready only if that node's state
names the session of the leader: then it was written after the leader began, and is not left over
from an earlier job. A node starts in a generation only if the leader's state names its own session.
So nobody starts in a generation in which others do not count on it.

A node that is not heard of for ``timeout`` seconds is gone: the part of the others ends. At the
next start the leader waits as long for all nodes, then goes on with at least ``min_nodes``. A node
that comes back later takes part in the next generation.

    {folder}/node-00002-5f0c21aa-00000017.json        node, session (one run of a supervisor),
                                                      sequence number

A state is never rewritten: each one is a new file with a higher number, and a listing shows which
is the newest. So a host that caches listings and contents for a minute (NFS) sees a state late, but
never an old content under a new name. A state is published again every few seconds: that shows that
its supervisor is alive. Clocks of nodes are not compared: a state is as old as the time since this
process first saw it. The last state stays when a supervisor ends, because others can see it late;
the next one of this node removes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from mindresume import runtime
from mindresume.coordination.liveness import AwakeClock, Sighting, Watch
from mindresume.errors import ConfigError, RecordError
from mindresume.model.manifest import encode_head, read_head
from mindresume.storage import Storage, publish
from mindresume.supervisor.restart_policy import PEER, STOPPED, JobEnd
from mindresume.typed import Count, Limits, decode

KIND = "node state"
READY = "ready"
RUNNING = "running"
FAILED = "failed"
FINISHED = "finished"
LEFT = "left"
_NAME = re.compile(r"node-(\d{5})-([0-9a-f]{8,32})-(\d{8})\.json")
# files of one supervisor: a listing can still show the one before the newest
_KEPT = 2
_Text = Annotated[str, Limits(0, 1000)]
# seconds for which a caller waits: most disks answer sooner, and the answer counts at once
_MOMENT = 0.2
_PUBLISH = "publish"
_READ = "read"
_REMOVE = "remove"


@dataclass(frozen=True)
class NodeState:
    """Describes what the supervisor of a node does.

    Attributes:
        node: its number.
        session: random, of this run of the supervisor.
        state: READY for a start; RUNNING, FAILED or FINISHED in ``generation``; LEFT: it supervises
            no more.
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
        """Reads a state. Raises RecordError if it is torn, altered, of another kind or of a later
        version; OSError."""
        with storage.open(path) as file:
            return decode(cls, read_head(file, KIND)[0], KIND)


class NodeStates:
    """Publishes this supervisor's state and sees those of the others. An error of the storage is
    kept in ``error``, and the operation is tried again at the next call: a file system that is away
    for a minute ends no training.

    Args:
        beat: seconds after which a state is published again.
    Attributes:
        watch: by (node, session) what was seen of the other supervisors; the content is their
            NodeState.
    """

    def __init__(
        self, storage: Storage, folder: str, state: NodeState, beat: float, clock: AwakeClock
    ):
        self.storage = storage
        self.folder = folder
        self.mine = state
        self.beat = beat
        self.watch = Watch(clock)
        self.error: OSError | None = None
        self._published_at = 0.0
        # the newest one of this supervisor that the others can see
        self._published: NodeState | None = None
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
        of_node = [
            seen
            for (number, session), seen in self.watch.members.items()
            if number == node and session != self.mine.session
        ]
        return max(of_node, key=lambda seen: (seen.since, seen.content.session), default=None)

    def remove_old(self) -> None:
        """Removes the files of earlier supervisors of this node. One that is alive publishes
        again."""
        with suppress(OSError):
            for name in self.storage.list(self.folder):
                match = _NAME.fullmatch(name)
                if match and int(match[1]) == self.mine.node and match[2] != self.mine.session:
                    self.storage.remove(os.path.join(self.folder, name))

    def publish_if_due(self) -> None:
        """Publishes this supervisor's state if it is new, or was published long enough ago."""
        # which another thread can replace meanwhile
        now, state = self.watch.clock(), self.mine
        if state == self._published and now - self._published_at < self.beat:
            return
        self._sequence += 1  # also after an error: the name may exist
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
        """Reads the new states of the others. One that cannot be read keeps this node from none of
        the others."""
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
            if (
                member == (self.mine.node, self.mine.session)
                or before is not None
                and before.number >= sequence
            ):
                continue
            try:
                state = NodeState.read(self.storage, os.path.join(self.folder, name))
            except (FileNotFoundError, RecordError):
                # replaced by a newer one, or another version's
                continue
            except OSError as error:
                failed = error
                continue
            if (state.node, state.session) == member:
                self.watch.see(member, sequence, state)
        self.error = failed


class BackgroundStates(NodeStates):
    """Exchanges the states in one thread of its own: no method waits for the storage longer than a
    moment.

    A hung mount holds a system call for ever. In the watch loop that would hide the death of a rank
    of this very node. Here the thread waits alone: the job is watched and ended. What needs the
    other nodes waits as it does for a storage that fails: they count as gone after
    ``--node-timeout``. At most one exchange is in progress, and a state that was replaced before it
    was published is never published: others can miss a state in any case, because a listing shows
    the newest one.
    """

    def __init__(
        self, storage: Storage, folder: str, state: NodeState, beat: float, clock: AwakeClock
    ):
        super().__init__(storage, folder, state, beat, clock)
        self._changed = runtime.Condition()
        self._wanted: set[str] = set()
        self._is_busy = False
        self._defect: BaseException | None = None  # errors of the storage are in ``error``
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
            # else the storage takes its time, and this caller does not wait as well
            if was_idle:
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
                # before the others are read, which takes longer
                super().publish_if_due()
                if _READ in wanted:
                    self.look()
                    super().publish_if_due()  # again, if it has failed
            except BaseException as error:
                self._defect = error
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()


# ---- together ------------------------------------------------------------------------------------

# states that a node publishes in the time after which it counts as gone
_BEATS = 10
_LONGEST_BEAT = 10.0  # seconds
_LOOK = 1.0  # seconds between two looks at the states of the others
_PATIENCE = 3  # times ``timeout`` for a node that is alive and not ready
# changes that prove that a session is alive: a late listing can show one of a dead one
_ALIVE = 3
NODE_LOST = 1  # exit status if a node does not come back


@dataclass(frozen=True)
class Membership:
    """Describes who takes part in a generation. ``index``: of this node among ``nodes``.
    ``address``: of the leader's host."""

    generation: int
    nodes: tuple[int, ...]
    index: int
    address: str
    is_leader: bool


@dataclass(frozen=True)
class Place:
    """Says which node this is. Raises ConfigError if the numbers do not fit.

    Attributes:
        node: its number, from 0.
        nodes: of the job.
        min_nodes: with as many the job goes on.
        timeout: seconds for which a node is waited for.
        address: under which this host can be reached.
    """

    node: int
    nodes: int
    min_nodes: int
    timeout: float
    address: str

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise ConfigError(
                f"--node-rank {self.node}: expected a number from 0 to {self.nodes - 1} (--nodes "
                f"{self.nodes})"
            )
        if not 1 <= self.min_nodes <= self.nodes:
            raise ConfigError(
                f"--min-nodes {self.min_nodes}: expected a number from 1 to {self.nodes} (--nodes "
                f"{self.nodes})"
            )


class Rendezvous:
    """Coordinates the supervisor of one node with the others. All methods return at once; call them
    again and again.

    Args:
        states: exchanges the states, in the calling thread or in one of its own.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        place: Place,
        clock: AwakeClock,
        session: str = "",
        states: type[NodeStates] = NodeStates,
    ):
        self.node = place.node
        self.nodes = place.nodes
        self.min_nodes = place.min_nodes
        self.timeout = place.timeout
        self.clock = clock
        state = NodeState(place.node, session or runtime.token_hex(4), address=place.address)
        self.states = states(
            storage, folder, state, min(_LONGEST_BEAT, place.timeout / _BEATS), clock
        )
        self._waits_since: float | None = None
        self._looked = -_LOOK

    @property
    def generation(self) -> int:
        return self.states.mine.generation

    # ---- start -----------------------------------------------------------------------------------

    def agree(self) -> Membership | JobEnd | None:
        """Returns who starts together now; None: not yet; JobEnd: nothing is started any more.
        Looks twice in a second."""
        now = self.clock()
        if self._waits_since is None:
            self._waits_since = now
            # with the end of its part: others may not have seen FAILED
            self.states.set(state=READY, members={})
        elif now - self._looked < _LOOK / 2:
            return None
        self._looked = now
        self.states.refresh()
        others = self._others()
        self.states.set(seen={node: seen.content.session for node, seen in others.items()})
        if conflict := self._conflict():
            return conflict
        for seen in others.values():
            state = seen.content
            if not self._is_fresh(seen):
                continue
            if state.state == LEFT and state.seen.get(self.node) == self.states.mine.session:
                return _last(state.status, state.reason)
            if self._admits(state):
                return self._begin(state.generation, state.members, state.address)
        return self._lead(others)

    def _admits(self, state: NodeState) -> bool:
        """Returns whether this node takes part in the generation of another one, which can have
        finished its own part already."""
        return (
            state.state in (RUNNING, FINISHED)
            and state.generation > self.generation
            and state.members.get(self.node) == self.states.mine.session
            and min(state.members) == state.node
        )

    def _lead(self, others: Mapping[int, Sighting]) -> Membership | JobEnd | None:
        """Starts a generation if this node is the leader, and all nodes are ready or the others
        were waited for."""
        fresh = {node: seen.content for node, seen in others.items() if self._is_fresh(seen)}
        ready = {
            self.node: self.states.mine,
            **{
                node: state
                for node, state in fresh.items()
                if state.state == READY and state.seen.get(self.node) == self.states.mine.session
            },
        }
        # it still ends its part
        is_busy = any(state.state != LEFT for node, state in fresh.items() if node not in ready)
        waited = self.clock() - self._waits_since
        if len(ready) < self.nodes and waited <= (
            _PATIENCE * self.timeout if is_busy else self.timeout
        ):
            return None
        if len(ready) < self.min_nodes:
            missing = [node for node in range(self.nodes) if node not in ready]
            if self._has_finished_with(
                [others[node].content for node in missing if node in others], len(missing)
            ):
                return _last(0, "all nodes had finished the job before this one was started again")
            reason = (
                f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(map(str, missing))} did "
                f"not come within {self.timeout:.0f} s (--node-timeout)"
                + (f"; {self.states.error}" if self.states.error else "")
            )
            self.leave(NODE_LOST, reason)
            return _last(NODE_LOST, reason)
        if min(ready) != self.node:
            # the leader waits for nodes that this one sees
            if waited > 2 * _PATIENCE * self.timeout:
                reason = f"node {min(ready)} leads the job and does not start it"
                self.leave(NODE_LOST, reason)
                return _last(NODE_LOST, reason)
            return None
        generation = max(state.generation for state in ready.values()) + 1
        return self._begin(
            generation,
            {node: state.session for node, state in sorted(ready.items())},
            self.states.mine.address,
        )

    def _has_finished_with(self, missing: Sequence[NodeState], count: int) -> bool:
        """Returns whether this node, in an earlier run of its supervisor, and ``count`` nodes,
        whose states are ``missing``, have finished the same generation. A platform started this one
        again, late; the others do not come back."""
        generations = {
            seen.content.generation
            for (node, _), seen in self.states.watch.members.items()
            if node == self.node and _has_finished(seen.content)
        }
        return 0 < count == len(missing) and all(
            _has_finished(state) and state.generation in generations for state in missing
        )

    def _begin(self, generation: int, members: dict[int, str], address: str) -> Membership:
        self._waits_since = None
        self.states.remove_old()
        self.states.set(
            state=RUNNING,
            generation=generation,
            members=dict(members),
            status=0,
            reason="",
            kind="",
        )
        nodes = tuple(sorted(members))
        return Membership(generation, nodes, nodes.index(self.node), address, nodes[0] == self.node)

    # ---- while it runs ---------------------------------------------------------------------------

    def check(self) -> JobEnd | None:
        """Returns why this node's part is to end, because of another node; None: it goes on. Looks
        once in a second. The end is part of this node's state from then on, so that it reaches all
        nodes, in whatever order they see the states."""
        end = self._check()
        if end is not None:
            self.states.set(status=end.status, reason=end.cause[:500], kind=end.kind)
        return end

    def _check(self) -> JobEnd | None:
        now = self.clock()
        if now - self._looked < _LOOK:
            return None
        self._looked = now
        self.states.refresh()
        if conflict := self._conflict():
            return conflict
        for node, session in self.states.mine.members.items():
            seen = self.states.newest(node) if node != self.node else None
            if seen is None:
                continue
            state, cause = seen.content, ""
            if state.session != session:
                cause = f"the supervisor of node {node} was started anew"
            elif self._says_why(state):
                return JobEnd(
                    state.kind or PEER,
                    state.status,
                    _from_node(state),
                    state.kind == STOPPED,
                    is_last=state.state == LEFT,
                )
            elif self._has_ended(state):
                cause = f"node {node} has ended its part"
            elif self._is_silent(seen):
                cause = f"node {node} was not heard of for {self.timeout:.0f} s (--node-timeout)"
            if cause:
                return JobEnd(PEER, NODE_LOST, cause)
        return None

    def _says_why(self, state: NodeState) -> bool:
        """Returns whether a state says why the part of its node ends. One that has left says so
        also before it had seen that this generation begins."""
        return state.state == LEFT or (
            state.state in (FAILED, READY)
            and state.generation == self.generation
            and state.kind != ""
        )

    def _has_ended(self, state: NodeState) -> bool:
        """Returns whether a node has ended its part, whatever its state says of the end."""
        return state.generation > self.generation or (
            state.state == READY and state.generation == self.generation
        )

    def _is_silent(self, seen: Sighting) -> bool:
        return not self._is_fresh(seen) and seen.content.state != FINISHED

    def fail(self, status: int, reason: str, kind: str) -> None:
        """Tells the others that this node's part has ended badly. Called before the part is
        ended."""
        self.states.set(state=FAILED, status=status, reason=reason[:500], kind=kind)

    def finish(self, status: int = 0) -> JobEnd | None:
        """Tells the others that this node's part has finished, with the exit ``status`` of the
        command. Returns None until all have, then the end with the status of the first node whose
        command failed, else 0; the end of another node's part if it fails before it has
        finished."""
        self.states.set(state=FINISHED, status=status)
        if end := self.check():
            return end
        others, members = self._others(), self.states.mine.members
        parts = [
            self.states.mine if node == self.node else others[node].content
            for node in sorted(members)
            if node == self.node or node in others
        ]
        if len(parts) == len(members) and all(
            part.state == FINISHED and part.generation == self.generation for part in parts
        ):
            return _last(
                next((part.status for part in parts if part.status), 0), "all nodes have finished"
            )
        return None

    def leave(self, status: int, reason: str, kind: str = "") -> None:
        """Tells the others that the job is over."""
        self.states.set(state=LEFT, status=status, reason=reason[:500], kind=kind)

    # ---- who -------------------------------------------------------------------------------------

    def _others(self) -> dict[int, Sighting]:
        """Returns {node: its newest state} of the other nodes that were seen."""
        newest = {node: self.states.newest(node) for node in range(self.nodes) if node != self.node}
        return {node: seen for node, seen in newest.items() if seen is not None}

    def _is_fresh(self, seen: Sighting) -> bool:
        return self.clock() - seen.since <= self.timeout

    def _conflict(self) -> JobEnd | None:
        """Returns an end if another supervisor of this node is alive: of two, the one with the
        higher session ends."""
        for (node, session), seen in self.states.watch.members.items():
            if (
                node == self.node
                and session < self.states.mine.session
                and seen.advances >= _ALIVE
                and self._is_fresh(seen)
                and seen.content.state != LEFT
            ):
                return _last(
                    NODE_LOST,
                    f"another supervisor of node {node} is alive (session {session}); give each "
                    "node its own --node-rank",
                )
        return None


def _last(status: int, cause: str) -> JobEnd:
    return JobEnd(PEER, status, cause, is_last=True)


def _has_finished(state: NodeState) -> bool:
    return state.state in (FINISHED, LEFT) and state.status == 0 and state.generation > 0


def _from_node(state: NodeState) -> str:
    """Returns the reason in a state, with the node from which it comes."""
    return (
        state.reason if state.reason.startswith("node ") else f"node {state.node}: {state.reason}"
    )
