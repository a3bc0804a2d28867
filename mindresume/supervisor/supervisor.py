"""Supervises one node's part of a job over all its starts.

    orphans of a killed supervisor ─▶ (all nodes agree) ─▶ start ─▶ watch ─▶ end ─▶ decide ─▶ exit,
        or wait and start again

With several nodes the leader decides; the others end their part, and wait for the next start or for
the leader's end.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType

import mindresume
from mindresume import runtime
from mindresume.coordination import rank_heartbeat
from mindresume.coordination.rank_heartbeat import Heartbeat
from mindresume.events import (
    Emitter,
    Event,
    GaveUp,
    JobRestarted,
    LogsKept,
    NodesJoined,
    Notice,
    OrphansEnded,
    SupervisorEnded,
    SupervisorStarted,
    warning,
)
from mindresume.storage import Hurry, call_within
from mindresume.supervisor import job_end
from mindresume.supervisor.evidence import PATIENCE, EventRecorder, keep_logs
from mindresume.supervisor.hang import JobSettings
from mindresume.supervisor.job import TICK, Command, Job
from mindresume.supervisor.members import RANK, all_processes, become_subreaper, descendants
from mindresume.supervisor.rendezvous import Membership, Rendezvous
from mindresume.supervisor.restart_policy import (
    DIED,
    EXIT,
    EXITED,
    GIVE_UP,
    HUNG,
    NOT_STARTED,
    PEER,
    RESTART,
    STOPPED,
    Decision,
    JobEnd,
    StartOutcome,
    decide,
    failure_page,
)
from mindresume.supervisor.standby import Standby

# seconds for which the end waits until memory is written to disk, which can hang
_FLUSHING = 1800.0
_SILENT = 120.0  # seconds after which a job without heartbeats is reported
# seconds for which the last state is tried to be published: without it the others wait in vain
_LEAVING = 30.0
_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True)
class SupervisorSettings:
    """Holds the options of ``mindresume run``.

    Attributes:
        max_restarts: restarts in a row without progress.
        events: folder for the event file; empty: the output folder of the training.
        to_stderr: the command prints to standard error alone.
        local_workers: ranks of one node, for the placeholder {workers}.
        keep_logs: starts whose logs are kept; 0: the next start overwrites them.
        standby: keep a process that has imported the framework.
    """

    max_restarts: int = 5
    job: JobSettings = JobSettings()
    events: str = ""
    to_stderr: bool = False
    local_workers: int = 8
    keep_logs: int = 5
    standby: bool = False


Flush = Callable[[str, Hurry], Event | None]


class _Signals(list[int]):
    """The signals that this process got."""

    def is_hurried(self) -> bool:
        return len(self) > 1


class Supervisor:
    """Supervises one command.

    Args:
        emit: has the handlers that print; the event file is added.
        nodes: coordinates this node with the others; None: there is one node.
        flush: writes what only memory has to disk. Called after the last start if the job has
            failed, with the output folder of the training and what says that it is to stop at once.
            Returns what it did.
        watchers: receive the heartbeats of the running start, by process, several times a second.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: SupervisorSettings,
        emit: Emitter,
        nodes: Rendezvous | None = None,
        flush: Flush | None = None,
        watchers: Sequence[Callable[[Mapping[int, Heartbeat]], None]] = (),
    ):
        self.command = tuple(command)
        self.settings = settings
        self.emit = emit
        self.nodes = nodes
        self.flush = flush
        self.watchers = watchers
        self.starts: list[StartOutcome] = []
        self._recorder = EventRecorder(emit, nodes.node if nodes else 0)
        self._signals = _Signals()
        self._folder = ""
        self._standby: Standby | None = None
        self._logs: set[str] = set()  # of the last start
        self._left: set[int] = set()  # processes that did not end after SIGKILL
        self._peer_end: JobEnd | None = None  # why another node ends the running start
        self._output = ""  # folder of the training; empty: not known
        # when a start without heartbeats is reported; None: it is
        self._silent_after: float | None = None

    def run(self) -> int:
        """Supervises until the end. Returns the exit status. Raises OSError if there is no place
        for heartbeats."""
        before = {number: runtime.signal(number, self._on_signal) for number in _SIGNALS}
        # ignored, the kernel keeps no exit status
        before[signal.SIGCHLD] = runtime.signal(signal.SIGCHLD, signal.SIG_DFL)
        # closing the terminal does not end the job
        before[signal.SIGHUP] = runtime.signal(signal.SIGHUP, signal.SIG_IGN)
        self.emit.add(self._recorder)
        if self.settings.events:
            self._recorder.open(self.settings.events)
        try:
            return self._run()
        finally:
            if self._standby is not None:
                self._standby.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self.emit.close()
            for number, handler in before.items():
                runtime.signal(number, handler)

    def _run(self) -> int:
        node, nodes = (self.nodes.node, self.nodes.nodes) if self.nodes else (0, 1)
        self.emit(
            SupervisorStarted(
                runtime.gethostname(),
                os.getpid(),
                mindresume.__version__,
                self.command,
                node,
                nodes,
            )
        )
        if not become_subreaper():
            self.emit(
                warning(
                    "this system has no subreaper (prctl): processes whose parent dies cannot be "
                    "found"
                )
            )
        self._end_orphans()
        self._folder = job_end.make_folder()
        if self.settings.standby:
            self._standby = Standby(self._folder, self.emit)
        decision = self.supervise()
        if decision.status and self._output and self.flush is not None:
            done = call_within(
                _FLUSHING, None, self.flush, self._output, self._signals, hurry=self._signals
            )
            if done is not None:
                self.emit(done)
        if decision.action == GIVE_UP:
            self.emit(
                GaveUp(
                    decision.status, decision.reason, len(self.starts), failure_page(self.starts)
                )
            )
        self.emit(SupervisorEnded(decision.status, decision.reason, len(self.starts)))
        return decision.status

    # ---- starts ----------------------------------------------------------------------------------

    def supervise(self) -> Decision:
        """Starts the command again and again. Returns the last decision, which the other nodes know
        too."""
        decision = self._supervise()
        if self.nodes is not None:
            self.nodes.leave(decision.status, decision.reason)
            until = runtime.monotonic() + _LEAVING
            while (
                not self.nodes.states.is_published
                and runtime.monotonic() < until
                and not self._signals.is_hurried()
            ):
                runtime.sleep(TICK)
                self.nodes.states.publish_if_due()
        return decision

    def _supervise(self) -> Decision:
        while True:
            members = self._agree()
            if isinstance(members, Decision):
                return members
            outcome = self._one_start(members)
            self.starts.append(outcome)
            if self._peer_end is not None and self._peer_end.is_last:
                return Decision(EXIT, self._peer_end.status, reason=self._peer_end.cause)
            if members is not None and not members.is_leader and outcome.end.kind != STOPPED:
                continue  # the leader decides
            decision = decide(self.settings.max_restarts, self.starts)
            if decision.action != RESTART:
                return decision
            if not self._wait(decision):
                return self._stopped()

    def _agree(self) -> Membership | Decision | None:
        """Waits until the nodes start together. Returns who does, None if there is one node, or a
        decision to end."""
        if self.nodes is None:
            return None
        began = runtime.monotonic()
        while not self._signals:
            found = self.nodes.agree()
            if isinstance(found, Membership):
                missing = tuple(sorted(set(range(self.nodes.nodes)) - set(found.nodes)))
                self.emit(
                    NodesJoined(found.generation, found.nodes, runtime.monotonic() - began, missing)
                )
                return found
            if found is not None:
                return Decision(
                    GIVE_UP if self.starts and found.status else EXIT,
                    found.status,
                    reason=found.cause,
                )
            runtime.sleep(TICK)
        return self._stopped()

    def _one_start(self, members: Membership | None) -> StartOutcome:
        """Runs the command once. ``_peer_end``: the end of another node's part if that ended it."""
        self._keep_logs()
        self._peer_end, number = None, len(self.starts) + 1
        try:
            job = self.make_job(fill_in(self.command, members, self.settings.local_workers), number)
        except OSError as error:
            # no place for heartbeats, or the limit of open files
            cause = f"the start cannot be prepared: {error}"
            if self.nodes is not None:
                self.nodes.fail(1, cause, NOT_STARTED)
            self.emit(warning(cause))
            return StartOutcome(
                number, runtime.time(), 0.0, JobEnd(NOT_STARTED, 1, cause), runtime.gethostname()
            )
        job.start()
        self._silent_after = runtime.monotonic() + _SILENT
        end = job.watch(self)
        if self.nodes is not None and self._peer_end is None:
            self._peer_end = self._report_to_nodes(job, end)
            if self._peer_end is not None and not self._peer_end.is_last:
                end = self._peer_end
        outcome, left = job.end(end, self)
        self._output = job.heartbeats.output or self._output
        self._logs = job.members.logs
        self._left |= set(left)
        return outcome

    def make_job(self, command: Sequence[str], number: int) -> Job:
        """Returns a start of the command. Raises OSError."""
        # somebody has cleaned up, for example systemd when a user logged out
        if not os.path.isdir(self._folder):
            self._folder = job_end.make_folder()
        folder = os.path.join(self._folder, f"start_{number}")
        os.mkdir(folder)
        existing = {*descendants(os.getpid(), all_processes()), *self._left}
        ended_by_us = (
            {rank_heartbeat.ENDED_BY_US: "1"}
            if self.starts and self.starts[-1].end.kind in (DIED, HUNG, PEER)
            else {}
        )
        standby = self._standby.variables() if self._standby else {}
        environment = {**os.environ, **standby, **job_end.marks(self.command), **ended_by_us}
        return Job(
            Command(command, environment, self.settings.to_stderr),
            number,
            folder,
            self.settings.job,
            self.emit,
            existing,
            self._recorder,
        )

    def _report_to_nodes(self, job: Job, end: JobEnd) -> JobEnd | None:
        """Tells the other nodes how this part ends, before what is left of it is ended. Waits for
        them if it has finished. Returns what they ended with, None if that does not matter."""
        if end.kind == STOPPED:
            self.nodes.leave(end.status, end.cause, end.kind)
        elif not job.heartbeats.has_finished and (
            end.kind != EXITED or end.status and not job.is_preempted(end)
        ):
            self.nodes.fail(end.status, end.cause, end.kind)
        else:
            while not self._signals:
                peer = self.nodes.finish(end.status)
                if peer is not None:
                    return replace(peer, status=peer.status or end.status) if peer.is_last else peer
                runtime.sleep(TICK)
        return None

    def observe(self, job: Job) -> JobEnd | None:
        """Returns why a job is to end that runs. Called often."""
        if job.heartbeats.output:
            self._recorder.open(job.heartbeats.output)
        for watch in self.watchers:
            watch(job.heartbeats.known)
        if self._standby is not None:
            self._standby.make_if_due(job)
        if (
            self._silent_after is not None
            and runtime.monotonic() > self._silent_after
            and not job.heartbeats.known
            and job.members.alive(RANK)
        ):
            self._silent_after = None
            self.emit(
                Notice(
                    f"no heartbeat of a rank after {_SILENT:.0f} s: mindresume is not loaded in "
                    "them, or they still start; until one comes only their exits are watched"
                )
            )
        if self._signals:
            number = self._signals[0]
            return JobEnd(
                STOPPED, _SIGNALS[number], f"{signal.Signals(number).name} was received", True
            )
        self._peer_end = self.nodes.check() if self.nodes is not None else None
        return self._peer_end

    def is_hurried(self) -> bool:
        """Returns whether everything is to be killed now. Called often while a job is ended."""
        if self.nodes is not None:
            self.nodes.states.publish_if_due()
        return self._signals.is_hurried()

    # ---- between two starts ----------------------------------------------------------------------

    def _wait(self, decision: Decision) -> bool:
        """Waits before the next start. Returns False if a signal came."""
        self.emit(
            JobRestarted(len(self.starts) + 1, decision.delay, decision.reason, decision.fruitless)
        )
        until = runtime.monotonic() + decision.delay
        while not self._signals and runtime.monotonic() < until:
            self.is_hurried()
            runtime.sleep(min(TICK, max(0.0, until - runtime.monotonic())))
        return not self._signals

    def _keep_logs(self) -> None:
        """Moves the logs of the last start, which the next one would overwrite."""
        if not self.starts:
            return
        last = self.starts[-1]
        folders = call_within(
            PATIENCE,
            TimeoutError(f"their disk did not answer in {PATIENCE:.0f} s"),
            self._move_logs,
            last,
        )
        if isinstance(folders, OSError):
            self.emit(warning(f"the logs of start {last.number} are not kept: {folders}"))
        elif folders:
            self.starts[-1] = replace(last, log_folders=folders)
            self.emit(LogsKept(last.number, folders))

    def _move_logs(self, last: StartOutcome) -> tuple[str, ...] | OSError:
        node = self.nodes.node if self.nodes else 0
        try:
            return keep_logs(
                self._logs,
                node,
                last.number,
                last.started,
                self.settings.keep_logs,
                self.nodes is None,
            )
        except OSError as error:
            return error

    def _end_orphans(self) -> None:
        """Ends what a killed supervisor of the same command has left behind."""
        found = job_end.find_orphans(self.command)
        if found:
            self.emit(OrphansEnded(tuple(process.pid for process in found)))
            left = job_end.end_orphans(found, self.settings.job, self._signals)
            if left:
                self.emit(
                    warning(
                        f"processes {', '.join(map(str, left))} do not end after SIGKILL and are "
                        "left behind"
                    )
                )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _stopped(self) -> Decision:
        return Decision(EXIT, _SIGNALS[self._signals[0]], reason="a signal came between two starts")


def fill_in(
    command: Sequence[str], members: Membership | None, local_workers: int
) -> tuple[str, ...]:
    """Returns the command with the numbers of a start in place of {nodes}, {node_rank}, {workers}
    and {master_addr}."""
    if members is None:
        return tuple(command)
    values = {
        "{nodes}": len(members.nodes),
        "{node_rank}": members.index,
        "{master_addr}": members.address,
        "{workers}": local_workers * len(members.nodes),
    }
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace(name, str(value))
        filled.append(word)
    return tuple(filled)
