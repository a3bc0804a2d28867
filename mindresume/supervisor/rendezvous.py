"""Lets the supervisors of several nodes start and end together, generation by generation.

    all nodes        READY(g) ─▶ the leader sees all of them: RUNNING(g + 1, members) ─▶ the members: RUNNING(g + 1)
    one fails        FAILED(g + 1) ─▶ the others end their parts ─▶ READY(g + 1), once nothing of theirs is left
    the leader       decides what follows: READY too, or LEFT(status), which all others return as well
    all finish       FINISHED(g + 1) of all ─▶ the leader: LEFT(0)

The leader is the lowest node that is alive. It counts a node as ready only if that node's state names the session of the leader:
then it was written after the leader began, and is not left over from an earlier job. A node starts in a generation only if the
leader's state names its own session. So nobody starts in a generation in which others do not count on it.

A node that is not heard of for ``timeout`` seconds is gone: the part of the others ends. At the next start the leader waits as
long for all nodes, then goes on with at least ``min_nodes``. A node that comes back later takes part in the next generation.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mindresume import runtime
from mindresume.coordination.shared_folder import Sighting
from mindresume.errors import ConfigError
from mindresume.storage.interface import Storage
from mindresume.supervisor.node_states import FAILED, FINISHED, LEFT, READY, RUNNING, NodeState, NodeStates
from mindresume.supervisor.restart_policy import PEER, STOPPED, JobEnd

_BEATS = 10                     # states that a node publishes in the time after which it counts as gone
_LONGEST_BEAT = 10.0            # seconds
_LOOK = 1.0                     # seconds between two looks at the states of the others
_PATIENCE = 3                   # times ``timeout`` for a node that is alive and not ready
_ALIVE = 3                      # changes that prove that a session is alive: a late listing can show one of a dead one
NODE_LOST = 1                   # exit status if a node does not come back


@dataclass(frozen=True)
class Membership:
    """Describes who takes part in a generation. ``index``: of this node among ``nodes``. ``address``: of the leader's host."""
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
            raise ConfigError(f"--node-rank {self.node}: expected a number from 0 to {self.nodes - 1} (--nodes {self.nodes})")
        if not 1 <= self.min_nodes <= self.nodes:
            raise ConfigError(f"--min-nodes {self.min_nodes}: expected a number from 1 to {self.nodes} (--nodes {self.nodes})")


class Rendezvous:
    """Coordinates the supervisor of one node with the others. All methods return at once; call them again and again.

    Args:
        clock: monotonic.
        states: exchanges the states, in the calling thread or in one of its own.
    """

    def __init__(self, storage: Storage, folder: str, place: Place, clock: Callable[[], float], session: str = "",
                 states: type[NodeStates] = NodeStates):
        self.node, self.nodes, self.min_nodes, self.timeout = place.node, place.nodes, place.min_nodes, place.timeout
        self.clock = clock
        state = NodeState(place.node, session or runtime.token_hex(4), address=place.address)
        self.states = states(storage, folder, state, min(_LONGEST_BEAT, place.timeout / _BEATS), clock)
        self._waits_since: float | None = None
        self._looked = -_LOOK

    @property
    def generation(self) -> int:
        return self.states.mine.generation

    # ---- start --------------------------------------------------------------------------------------------------------

    def agree(self) -> Membership | JobEnd | None:
        """Returns who starts together now; None: not yet; JobEnd: nothing is started any more. Looks twice in a second."""
        now = self.clock()
        if self._waits_since is None:
            self._waits_since = now
            self.states.set(state=READY, members={})        # with the end of its part: others may not have seen FAILED
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
        """Returns whether this node takes part in the generation of another one, which can have finished its own part already."""
        return (state.state in (RUNNING, FINISHED) and state.generation > self.generation
                and state.members.get(self.node) == self.states.mine.session and min(state.members) == state.node)

    def _lead(self, others: Mapping[int, Sighting]) -> Membership | JobEnd | None:
        """Starts a generation if this node is the leader, and all nodes are ready or the others were waited for."""
        fresh = {node: seen.content for node, seen in others.items() if self._is_fresh(seen)}
        ready = {self.node: self.states.mine, **{node: state for node, state in fresh.items() if state.state == READY
                                                 and state.seen.get(self.node) == self.states.mine.session}}
        is_busy = any(state.state != LEFT for node, state in fresh.items() if node not in ready)    # it still ends its part
        waited = self.clock() - self._waits_since
        if len(ready) < self.nodes and waited <= (_PATIENCE * self.timeout if is_busy else self.timeout):
            return None
        if len(ready) < self.min_nodes:
            missing = [node for node in range(self.nodes) if node not in ready]
            if self._has_finished_with([others[node].content for node in missing if node in others], len(missing)):
                return _last(0, "all nodes had finished the job before this one was started again")
            reason = (f"{'node' if len(missing) == 1 else 'nodes'} {', '.join(map(str, missing))} did not come within "
                      f"{self.timeout:.0f} s (--node-timeout)" + (f"; {self.states.error}" if self.states.error else ""))
            self.leave(NODE_LOST, reason)
            return _last(NODE_LOST, reason)
        if min(ready) != self.node:
            if waited > 2 * _PATIENCE * self.timeout:               # the leader waits for nodes that this one sees
                reason = f"node {min(ready)} leads the job and does not start it"
                self.leave(NODE_LOST, reason)
                return _last(NODE_LOST, reason)
            return None
        generation = max(state.generation for state in ready.values()) + 1
        return self._begin(generation, {node: state.session for node, state in sorted(ready.items())}, self.states.mine.address)

    def _has_finished_with(self, missing: Sequence[NodeState], count: int) -> bool:
        """Returns whether this node, in an earlier run of its supervisor, and ``count`` nodes, whose states are ``missing``, have
        finished the same generation. A platform started this one again, late; the others do not come back."""
        generations = {seen.content.generation for (node, _), seen in self.states.watch.members.items()
                       if node == self.node and _has_finished(seen.content)}
        return 0 < count == len(missing) and all(
            _has_finished(state) and state.generation in generations for state in missing)

    def _begin(self, generation: int, members: dict[int, str], address: str) -> Membership:
        self._waits_since = None
        self.states.remove_old()
        self.states.set(state=RUNNING, generation=generation, members=dict(members), status=0, reason="", kind="")
        nodes = tuple(sorted(members))
        return Membership(generation, nodes, nodes.index(self.node), address, nodes[0] == self.node)

    # ---- while it runs ------------------------------------------------------------------------------------------------

    def check(self) -> JobEnd | None:
        """Returns why this node's part is to end, because of another node; None: it goes on. Looks once in a second. The end is
        part of this node's state from then on, so that it reaches all nodes, in whatever order they see the states."""
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
            state = seen.content
            if state.session != session:
                return JobEnd(PEER, NODE_LOST, f"the supervisor of node {node} was started anew")
            if state.state == LEFT:                     # also before it had seen that this generation begins
                return JobEnd(state.kind or PEER, state.status, _from_node(state), state.kind == STOPPED, is_last=True)
            if state.state in (FAILED, READY) and state.generation == self.generation and state.kind:
                return JobEnd(state.kind, state.status, _from_node(state), state.kind == STOPPED)
            if state.state == READY and state.generation >= self.generation or state.generation > self.generation:
                return JobEnd(PEER, NODE_LOST, f"node {node} has ended its part")
            if not self._is_fresh(seen) and state.state != FINISHED:
                return JobEnd(PEER, NODE_LOST, f"node {node} was not heard of for {self.timeout:.0f} s (--node-timeout)")
        return None

    def fail(self, status: int, reason: str, kind: str) -> None:
        """Tells the others that this node's part has ended badly. Called before the part is ended."""
        self.states.set(state=FAILED, status=status, reason=reason[:500], kind=kind)

    def finish(self, status: int = 0) -> JobEnd | None:
        """Tells the others that this node's part has finished, with the exit ``status`` of the command. Returns None until all
        have, then the end with the status of the first node whose command failed, else 0; the end of another node's part if it
        fails before it has finished."""
        self.states.set(state=FINISHED, status=status)
        if end := self.check():
            return end
        others, members = self._others(), self.states.mine.members
        parts = [self.states.mine if node == self.node else others[node].content for node in sorted(members)
                 if node == self.node or node in others]
        if len(parts) == len(members) and all(part.state == FINISHED and part.generation == self.generation for part in parts):
            return _last(next((part.status for part in parts if part.status), 0), "all nodes have finished")
        return None

    def leave(self, status: int, reason: str, kind: str = "") -> None:
        """Tells the others that the job is over."""
        self.states.set(state=LEFT, status=status, reason=reason[:500], kind=kind)

    # ---- who ----------------------------------------------------------------------------------------------------------

    def _others(self) -> dict[int, Sighting]:
        """Returns {node: its newest state} of the other nodes that were seen."""
        newest = {node: self.states.newest(node) for node in range(self.nodes) if node != self.node}
        return {node: seen for node, seen in newest.items() if seen is not None}

    def _is_fresh(self, seen: Sighting) -> bool:
        return self.clock() - seen.since <= self.timeout

    def _conflict(self) -> JobEnd | None:
        """Returns an end if another supervisor of this node is alive: of two, the one with the higher session ends."""
        for (node, session), seen in self.states.watch.members.items():
            if (node == self.node and session < self.states.mine.session and seen.advances >= _ALIVE and self._is_fresh(seen)
                    and seen.content.state != LEFT):
                return _last(NODE_LOST, f"another supervisor of node {node} is alive (session {session}); give each node its "
                                          f"own --node-rank")
        return None


def _last(status: int, cause: str) -> JobEnd:
    return JobEnd(PEER, status, cause, is_last=True)


def _has_finished(state: NodeState) -> bool:
    return state.state in (FINISHED, LEFT) and state.status == 0 and state.generation > 0


def _from_node(state: NodeState) -> str:
    """Returns the reason in a state, with the node from which it comes."""
    return state.reason if state.reason.startswith("node ") else f"node {state.node}: {state.reason}"
