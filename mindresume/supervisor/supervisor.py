"""Supervises one node's part of a job over all its starts.

    orphans of a killed supervisor ─▶ (all nodes agree) ─▶ start ─▶ watch ─▶ end ─▶ decide ─▶ exit, or wait and start again
"""
from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import mindresume
from mindresume.events import (
    GaveUp,
    JobRestarted,
    Notice,
    OrphansEnded,
    SupervisorEnded,
    SupervisorStarted,
    warning,
)
from mindresume.events.emitter import Emitter
from mindresume.supervisor import orphans
from mindresume.supervisor.event_recorder import EventRecorder
from mindresume.supervisor.failure_page import page
from mindresume.supervisor.job import TICK, Job, JobEnd, JobSettings
from mindresume.supervisor.job_end import EndTimes
from mindresume.supervisor.process_table import all_processes, become_subreaper, descendants
from mindresume.supervisor.restart_policy import (
    EXIT,
    GIVE_UP,
    STOPPED,
    Decision,
    RestartPolicy,
    StartOutcome,
    decide,
)

_SILENT = 120.0                 # seconds after which a job without heartbeats is reported
_SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


@dataclass(frozen=True)
class SupervisorSettings:
    """Holds the options of ``mindresume run``. ``events``: folder for the event file; empty: the output folder of the training.
    ``to_stderr``: the command prints to standard error alone."""
    policy: RestartPolicy = RestartPolicy()
    job: JobSettings = JobSettings()
    events: str = ""
    to_stderr: bool = False


class Supervisor:
    """Supervises one command. ``emit``: has the handlers that print; the event file is added."""

    def __init__(self, command: Sequence[str], settings: SupervisorSettings, emit: Emitter,
                 environment: Mapping[str, str] | None = None):
        self.command, self.settings, self.emit = tuple(command), settings, emit
        self.environment = dict(os.environ if environment is None else environment)
        self.starts: list[StartOutcome] = []
        self._recorder = EventRecorder(emit)
        self._signals: list[int] = []
        self._folder = ""
        self._left: set[int] = set()

    def run(self) -> int:
        """Supervises until the end. Returns the exit status. Raises OSError if the command cannot be started at all."""
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)        # closing the terminal does not end the job
        self.emit.add(self._recorder)
        if self.settings.events:
            self._recorder.open(self.settings.events)
        try:
            return self._run()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            self.emit.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        self.emit(SupervisorStarted(socket.gethostname(), os.getpid(), mindresume.__version__, self.command))
        if not become_subreaper():
            self.emit(warning("this system has no subreaper (prctl): processes whose parent dies cannot be found"))
        self._end_orphans()
        self._folder = orphans.make_folder()
        decision = None
        while decision is None or decision.action not in (EXIT, GIVE_UP):
            if decision is not None and not self._wait(decision):
                decision = Decision(EXIT, self._signal_status(), reason="stopped by a signal before the next start")
                break
            self.starts.append(self._one_start())
            decision = decide(self.settings.policy, self.starts)
        if decision.action == GIVE_UP:
            self.emit(GaveUp(decision.status, decision.reason, len(self.starts), page(self.starts)))
        self.emit(SupervisorEnded(decision.status, decision.reason, len(self.starts)))
        return decision.status

    def _one_start(self) -> StartOutcome:
        number = len(self.starts) + 1
        folder = os.path.join(self._folder, f"start_{number}")
        os.mkdir(folder)
        existing = {*descendants(os.getpid(), all_processes()), *self._left}
        job = Job(self.command, number, folder, self.settings.job, self.emit,
                  {**self.environment, **orphans.marks(self.command)}, existing, self._recorder.evidence, self.settings.to_stderr)
        job.start()
        end = job.watch(self._observer(job))
        outcome, left = job.end(end, lambda: len(self._signals) > 1)
        self._left |= set(left)
        shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def _observer(self, job: Job) -> Callable[[], JobEnd | None]:
        """Returns a function that is called while a job runs, and returns why it is to end."""
        silent_after, told = time.monotonic() + _SILENT, False

        def observe() -> JobEnd | None:
            nonlocal told
            if job.output:
                self._recorder.open(job.output)
            if not told and job.has_silent_ranks and time.monotonic() > silent_after:
                told = True
                self.emit(Notice("the ranks write no heartbeats, because mindresume is not installed in them: only their exits "
                                 "are watched"))
            if not self._signals:
                return None
            number = self._signals[0]
            return JobEnd(STOPPED, _SIGNALS[number], f"{signal.Signals(number).name} was received", True)
        return observe

    # ---- between two starts -----------------------------------------------------------------------------------------------

    def _wait(self, decision: Decision) -> bool:
        """Waits before the next start. Returns False if a signal came."""
        self.emit(JobRestarted(len(self.starts) + 1, decision.delay, decision.reason, decision.fruitless))
        until = time.monotonic() + decision.delay
        while not self._signals and time.monotonic() < until:
            time.sleep(min(TICK, max(0.0, until - time.monotonic())))
        return not self._signals

    def _end_orphans(self) -> None:
        """Ends what a killed supervisor of the same command has left behind."""
        found = orphans.find_orphans(self.command)
        if found:
            job = self.settings.job
            self.emit(OrphansEnded(tuple(process.pid for process in found)))
            left = orphans.end_orphans(found, EndTimes(job.leave, job.leave, job.stuck), lambda: bool(self._signals))
            if left:
                self.emit(warning(f"processes {', '.join(map(str, left))} do not end after SIGKILL and are left behind"))

    # ---- signals --------------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _signal_status(self) -> int:
        return _SIGNALS[self._signals[0]]
