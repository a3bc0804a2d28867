"""Runs one start of a command: starts it, watches its ranks, ends everything that it has started.

    job = Job(command, number, folder, settings, emit)
    job.start()
    end = job.watch(stop)                       # EXITED, DIED, HUNG, or what ``stop()`` returns
    outcome = job.end(end)                      # nothing of it is left

``folder`` receives the heartbeats of the ranks of this start alone, so none of an earlier start can be taken for one of this.
"""
from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mindresume import runtime
from mindresume.coordination import rank_heartbeat
from mindresume.coordination.awake_clock import AwakeClock
from mindresume.coordination.process_identity import process_namespace
from mindresume.coordination.rank_heartbeat import ENDED, ENDING, NONE, Heartbeat, read_heartbeats
from mindresume.events import (
    FAILED,
    FINISHED,
    NOTHING_TO_TRAIN,
    PREEMPTED,
    Emit,
    HangDetected,
    JobEnded,
    JobStarted,
    RankDied,
    StartupMeasured,
    warning,
)
from mindresume.events.log_lines import end_text
from mindresume.storage.operations import call_within
from mindresume.supervisor.hang import HangLimits, find_hang, startup_phases, without_stacks, write_stacks
from mindresume.supervisor.job_end import EndTimes, end_job, first_lost_step, may_finish
from mindresume.supervisor.logs import PATIENCE, excerpt, tail
from mindresume.supervisor.members import Ended, Member, Members
from mindresume.supervisor.process_table import RANK, SCHEDULER, WRITER, end_with_parent, shell_status
from mindresume.supervisor.restart_policy import (
    DIED,
    EXITED,
    HANG_STATUS,
    HUNG,
    NOT_STARTED,
    TERMINATED,
    WRONG_USE,
    StartOutcome,
)

_STACKS = 30.0                          # seconds for the stacks of all ranks
_JOINING = 300.0                        # seconds for a first heartbeat after a launcher that returns at once
_MOMENT = 1.0                           # seconds for the command to start; if its disk hangs, the watch begins without
_MOMENTARY = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETXTBSY)
TICK = 0.2                              # seconds between two looks; the end of a process is noticed at once
_UNKNOWN_END = 3.0                      # seconds for the launcher to say how a rank ended whose status is not known


@dataclass(frozen=True)
class JobSettings:
    """Holds the seconds of one start, as the options of ``mindresume run`` have them. ``kill_after``: between SIGTERM and SIGKILL
    after a failure; ``leave``: the same after a signal to this process, in which the ranks save."""
    limits: HangLimits = HangLimits()
    kill_after: float = 1.0
    save: float = 20.0
    leave: float = 60.0
    stuck: float = 60.0


@dataclass(frozen=True)
class JobEnd:
    """Says why a start ends.

    Attributes:
        kind: EXITED, DIED, HUNG, STOPPED, PEER or NOT_STARTED.
        status: exit status, as of a shell.
        cause: for people.
        leave: the ranks may save before they end.
        rank: the rank that ended it; None: none, or not known.
        phase: of that rank.
        noticed: ``time.monotonic``.
        log: the last lines of that rank's log that look like its error.
    """
    kind: str
    status: int
    cause: str
    leave: bool = False
    rank: int | None = None
    phase: str = ""
    noticed: float = field(default_factory=runtime.monotonic)
    log: tuple[str, ...] = ()


class Job:
    """Runs one start.

    Args:
        number: from 1.
        folder: for heartbeats; it exists, and is removed at the end.
        ignored: processes that belong to no start, or were left behind by an earlier one.
        evidence: returns the prefix of the paths of files with stacks; None if none can be written.
        to_stderr: the command prints to standard error alone.
    """

    def __init__(self, command: Sequence[str], number: int, folder: str, settings: JobSettings, emit: Emit,
                 environment: Mapping[str, str], ignored: Collection[int] = (),
                 evidence: Callable[[], str | None] = lambda: None, to_stderr: bool = False):
        self.command, self.number, self.folder, self.settings, self.emit = command, number, folder, settings, emit
        self.environment = {**environment, rank_heartbeat.VARIABLE: folder}
        self.members = Members(ignored)
        self.heartbeats: dict[int, Heartbeat] = {}          # by process, the last known
        self._readable: set[int] = set()                    # processes whose heartbeats could be read just now
        self._lost = False                                  # the heartbeat of a living rank was removed
        self.host = runtime.gethostname()
        self._evidence, self._to_stderr = evidence, to_stderr
        self._pid, self._status, self._had_ranks, self._is_noted = 0, None, False, False
        self._start_error: OSError | None = None
        self._is_tried, self._is_over = runtime.Event(), runtime.Event()
        self._ended_early: dict[int, int | None] = {}       # {process: status} of those that ended before ``_pid`` was known
        self._clock = AwakeClock()
        self._began = self._started = 0.0
        self._unknown: tuple[float, Ended] | None = None    # a rank whose end is not understood yet, and since when
        self._is_measured = False
        self._namespace = process_namespace()

    # ---- start --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the command in a session of its own, so that Ctrl-C reaches this process alone. In a thread, because the disk of
        the command can hang; it lasts until the end of this start, because the kernel ends the command when the thread ends that
        has started it. If that fails, ``watch`` returns why."""
        self._began, self._started = runtime.monotonic(), runtime.time()
        thread = runtime.Thread(target=self._start, args=(os.getpid(),), name="mindresume-start", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:                       # the limit of threads
            self._start_error = OSError(errno.EAGAIN, str(error))
        else:
            self._is_tried.wait(_MOMENT)

    def _start(self, parent: int) -> None:
        try:
            process = subprocess.Popen(self.command, env=dict(self.environment), stdin=subprocess.DEVNULL, start_new_session=True,
                                       stdout=2 if self._to_stderr else None, preexec_fn=lambda: end_with_parent(parent))
            process.returncode = 0              # this class reaps it, see ``Members.wait``
            self._pid = process.pid
        except OSError as error:
            self._start_error = error
        except (ValueError, subprocess.SubprocessError) as error:
            self._start_error = OSError(errno.EINVAL, str(error))
        self._is_tried.set()
        self._is_over.wait()

    def _note_start(self) -> JobEnd | None:
        """Emits JobStarted once the command is started. Returns the end of this start if it cannot be."""
        if (error := self._start_error) is not None:
            status = 1 if error.errno in _MOMENTARY else WRONG_USE
            return JobEnd(NOT_STARTED, status, f"the command cannot be started: {error}")
        if self._pid and not self._is_noted:
            self._is_noted = True
            self.emit(JobStarted(self.number, self._pid))
            if self._pid in self._ended_early:
                self._take_status(self._ended_early[self._pid])
        return None

    def _take_status(self, status: int | None) -> None:
        self._status = 1 if status is None else shell_status(status)

    # ---- watch --------------------------------------------------------------------------------------------------------

    def watch(self, stop: Callable[[], JobEnd | None]) -> JobEnd:
        """Returns why this start ends, at the moment when it is known. ``stop``: asked several times a second."""
        has_looked = False
        while True:
            self._clock()
            if end := self._note_start():
                return end
            self._refresh(now=False)
            for ended in self.members.wait(TICK):
                if end := self._taken(ended):
                    return end
            if self._status is not None and not has_looked:         # a rank can have begun, or ended, with the command's end
                has_looked = True
                self._refresh()
                continue
            if end := stop() or self._over() or self._hang():
                return end
            self._measure_startup()

    def _refresh(self, now: bool = True) -> None:
        found = [it for it in read_heartbeats(self.folder) if it.namespace == self._namespace]      # else another number here
        self._readable = {heartbeat.pid for heartbeat in found}
        self.heartbeats.update((heartbeat.pid, heartbeat) for heartbeat in found)
        self.members.refresh(self.heartbeats.values(), now)
        self._had_ranks = self._had_ranks or bool(self.heartbeats or self.members.alive(RANK))

    def _taken(self, ended: Ended) -> JobEnd | None:
        """Takes the end of a process. Returns the end of the job if it is a rank that had not finished, or the scheduler while a
        rank still trains: MindSpore's ranks lose each other without it, and would take 20 s until each sends itself SIGTERM."""
        if ended.member.pid == self._pid:
            self._take_status(ended.status)
        elif not self._pid:
            self._ended_early[ended.member.pid] = ended.status
        ended = self._as_rank(ended)
        if ended.member.role == SCHEDULER and any(self._is_training(member.pid) for member in self.members.alive(RANK)):
            return self._died(ended)
        if ended.member.role != RANK or self._ended_well(ended):
            return None
        if ended.status is None and ended.member.pid not in self.heartbeats:
            self._unknown = self._unknown or (runtime.monotonic(), ended)
            return None
        return self._died(ended)

    def _is_training(self, pid: int) -> bool:
        heartbeat = self._last_heartbeat(pid)
        return heartbeat is not None and heartbeat.phase not in (ENDING, ENDED)

    def _as_rank(self, ended: Ended) -> Ended:
        """Returns the end as that of a rank if a heartbeat proves it: one can end before its role was read from the process
        table."""
        member, beat = ended.member, self._last_heartbeat(ended.member.pid)
        if member.role == RANK or beat is None or beat.ticks != member.process.ticks:
            return ended
        return replace(ended, member=replace(member, role=RANK, rank=beat.rank if beat.rank >= 0 else None))

    def _ended_well(self, ended: Ended) -> bool:
        """Returns whether a rank has ended as it should. A status of 143 is that of ranks that were asked to stop and saved."""
        heartbeat = self._last_heartbeat(ended.member.pid)
        preempted = heartbeat is not None and heartbeat.outcome == PREEMPTED
        if ended.status is None:
            return heartbeat is not None and heartbeat.phase == ENDED and heartbeat.outcome != FAILED
        return ended.status == 0 or preempted and ended.status == TERMINATED

    def _last_heartbeat(self, pid: int) -> Heartbeat | None:
        path = os.path.join(self.folder, f"process_{pid}{rank_heartbeat.SUFFIX}")
        found = rank_heartbeat.read_heartbeat(path)
        if found is not None and found.namespace == self._namespace:
            self.heartbeats[pid] = found
        return self.heartbeats.get(pid)

    def _died(self, ended: Ended) -> JobEnd:
        member, heartbeat = ended.member, self._last_heartbeat(ended.member.pid)
        noticed, path = runtime.monotonic(), call_within(PATIENCE, lambda: self.members.log_file(member), "")
        log = call_within(PATIENCE, lambda: excerpt(path), ()) if path else ()
        if ended.status is None and path:
            ended = Ended(member, call_within(PATIENCE, lambda: _status_in_message(os.path.dirname(path), member.pid), None))
        phase, step = (heartbeat.phase, heartbeat.step) if heartbeat else ("", NONE)
        self.emit(RankDied(self.number, self.host, member.pid, member.rank, ended.status, phase, _known(step), log))
        who = "the scheduler of msrun" if member.role == SCHEDULER else _name(member.rank)
        status = 1 if ended.status is None else shell_status(ended.status)
        return JobEnd(DIED, status, f"{who} {end_text(ended.status)}", False, member.rank, phase, noticed, log)

    def _over(self) -> JobEnd | None:
        """Returns the end of the job if the command and all ranks have ended, or a rank has ended and nobody says how."""
        ranks = self.members.alive(RANK)
        if self._unknown is not None and runtime.monotonic() - self._unknown[0] > _UNKNOWN_END and ranks:
            return self._died(self._unknown[1])
        if self._status is None or self._status == 0 and (ranks or self._may_have_ranks()):
            return None
        failed = [it for it in self.heartbeats.values() if it.outcome == FAILED]
        log = call_within(PATIENCE, lambda: excerpt(self._unknown[1].member.log), ()) if self._unknown is not None else ()
        rank = self._unknown[1].member.rank if self._unknown is not None else failed[0].rank if failed else None
        unasked = ", its ranks after SIGTERM of an unknown sender" if any(it.unasked for it in self.heartbeats.values()) else ""
        return JobEnd(EXITED, self._status, f"the command ended with status {self._status}{unasked}", rank=rank, log=log)

    def _may_have_ranks(self) -> bool:
        """Returns whether processes are left that may become ranks: a launcher can return at once. A job without ranks ends."""
        return not self._had_ranks and bool(self.members.alive()) and runtime.monotonic() - self._began < _JOINING

    def _hang(self) -> JobEnd | None:
        known = [self.heartbeats[member.pid] for member in self.members.alive(RANK) if member.pid in self.heartbeats]
        alive = [heartbeat for heartbeat in known if heartbeat.pid in self._readable]
        if len(alive) < len(known) and not self._lost:
            self._lost = True
            self.emit(warning(f"heartbeats in {self.folder} were removed while their ranks run, so a hang of these ranks is not "
                              f"noticed. systemd does that when a user logs out: set RemoveIPC=no, or loginctl enable-linger"))
        hang = find_hang(alive, self._began, runtime.monotonic(), self.settings.limits, self._clock)
        if hang is None:
            return None
        noticed, first = runtime.monotonic(), hang.ranks[0]

        def write() -> tuple[str, ...] | None:
            target = self._evidence()
            return None if target is None else write_stacks(alive, self.folder, f"{target}-start_{self.number}")
        paths = call_within(_STACKS, write, ())             # py-spy, and a disk that can hang; None: there is no place for them
        if paths is not None and (absent := without_stacks(alive, paths)):
            self.emit(warning(f"no stacks of {absent}"))
        paths = paths or ()
        self.emit(HangDetected(self.number, self.host, tuple(max(it.rank, 0) for it in hang.ranks), hang.seconds, first.phase,
                               _known(first.step), paths))
        cause = (f"{_name(first.rank)} made no progress for {hang.seconds:.0f} s while {first.phase} ({hang.limit})"
                 + (f", stacks: {paths[0]} ..." if paths else ""))
        return JobEnd(HUNG, HANG_STATUS, cause, False, first.rank, first.phase, noticed)

    def _measure_startup(self) -> None:
        """Emits how long each part of the start took, once every rank has finished its first step."""
        ranks = [self.heartbeats.get(member.pid) for member in self.members.alive(RANK)]
        if self._is_measured or not ranks or not all(it is not None and it.has_trained for it in ranks):
            return
        self._is_measured = True
        slowest = max(ranks, key=lambda it: it.entered[rank_heartbeat.TRAINING])
        phases = startup_phases(slowest, self._started)
        self.emit(StartupMeasured(self.number, max(slowest.rank, 0), tuple(phase.name for phase in phases),
                                  tuple(phase.seconds for phase in phases), _known(slowest.resumed)))

    @property
    def output(self) -> str:
        """Returns the output folder of the training; empty if no rank has told it."""
        return next((it.output for it in self.heartbeats.values() if it.output), "")

    @property
    def logs(self) -> set[str]:
        """Returns the files to which ranks and scheduler print."""
        return self.members.logs

    @property
    def is_preempted(self) -> bool:
        """Returns whether the ranks were asked to stop, and have saved. A signal of an unknown sender is no request: it may come
        from a failure, and who stops a job signals the supervisor, too."""
        return any(it.outcome == PREEMPTED and not it.unasked for it in self.heartbeats.values())

    @property
    def has_finished(self) -> bool:
        """Returns whether all ranks have finished the training, and the last save that they began is complete."""
        return bool(self.heartbeats) and all(
            it.phase == ENDED and it.outcome in (FINISHED, NOTHING_TO_TRAIN) and (it.rank != 0 or it.committed >= it.begun)
            for it in self.heartbeats.values())

    @property
    def has_silent_ranks(self) -> bool:
        """Returns whether there are ranks, and none of them writes heartbeats."""
        return bool(self.members.alive(RANK)) and not self.heartbeats

    # ---- end ----------------------------------------------------------------------------------------------------------

    def end(self, end: JobEnd, at_once: Callable[[], bool] = lambda: False) -> tuple[StartOutcome, tuple[int, ...]]:
        """Ends everything that is left. Returns the outcome, and the processes that do not end even after SIGKILL."""
        self._refresh()
        left: tuple[int, ...] = ()
        if end.kind != EXITED or end.status or self._is_finishing(at_once):     # daemons of a job that finished stay
            left = self._end_all(end, at_once)
        beats = list(self.heartbeats.values())
        resumed, last, committed = (max((getattr(it, name) for it in beats), default=NONE)
                                    for name in ("resumed", "step", "committed"))
        preempted = self.is_preempted and end.kind == EXITED
        finished = self.has_finished and end.kind in (EXITED, DIED) and end.status != 0
        outcome = StartOutcome(self.number, self._started, runtime.monotonic() - self._began, end.kind, end.status, end.cause,
                               end.rank, self.host, end.phase, preempted, bool(beats), finished, resumed, last, committed,
                               end.log)
        self.emit(JobEnded(self.number, end.status, end.cause, outcome.seconds, runtime.monotonic() - end.noticed,
                           _known(resumed), _known(last), _known(committed), left))
        self._is_over.set()
        self.members.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return outcome, left

    def _is_finishing(self, at_once: Callable[[], bool]) -> bool:
        """Waits until the scheduler and what writes checkpoints have ended by themselves. Returns whether one has not."""
        until = runtime.monotonic() + self.settings.leave
        while (left := self.members.alive(RANK, SCHEDULER, WRITER)) and runtime.monotonic() < until and not at_once():
            self.members.wait(TICK)
            self._refresh(now=False)
        return bool(left)

    def _end_all(self, end: JobEnd, at_once: Callable[[], bool]) -> tuple[int, ...]:
        """Ends all processes of this start. Returns those that do not end even after SIGKILL."""
        settings = self.settings
        times = EndTimes(settings.leave if end.leave else settings.kill_after, settings.save, settings.stuck, not end.leave)

        def is_saving(member: Member) -> bool:
            beat, alive = self.heartbeats.get(member.pid), {other.pid for other in self.members.alive(RANK)}
            lost = first_lost_step(other for pid, other in self.heartbeats.items() if pid not in alive)
            return beat is not None and may_finish(beat, lost, end.kind)
        _, left = end_job(self.members, times, self._refresh, is_saving, at_once)
        self._refresh()
        return left


def _status_in_message(folder: str, pid: int) -> int | None:
    """Returns the exit status of a worker from msrun's message, which scripts/msrun_launcher.sh writes into a file; None if there
    is none."""
    found = re.findall(rf"Worker process {pid} exit with exception\. Error code: (-?\d{{1,9}})\.",
                       tail(os.path.join(folder, "msrun_stderr.log")))
    return int(found[-1]) if found else None


def _name(rank: int | None) -> str:
    return "a rank" if rank is None or rank < 0 else f"rank {rank}"


def _known(number: int) -> int | None:
    return None if number == NONE else number
