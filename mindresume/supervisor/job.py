"""Runs one start of a command: starts it, watches its ranks, ends everything that it has started.

    job = Job(Command(["msrun", ...], os.environ), number, folder, settings, emit)
    job.start()
    end = job.watch(observer)                   # EXITED, DIED, HUNG, or what ``observer`` wants
    # nothing of it is left but the processes ``left``, which do not end
    outcome, left = job.end(end, observer)

``folder`` receives the heartbeats of the ranks of this start alone, so none of an earlier start can
be taken for one of this.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mindresume import runtime
from mindresume.coordination import rank_heartbeat
from mindresume.coordination.liveness import AwakeClock
from mindresume.coordination.rank_heartbeat import ENDED, ENDING, NONE
from mindresume.events import (
    FAILED,
    PREEMPTED,
    Emit,
    HangDetected,
    JobEnded,
    JobStarted,
    RankDied,
    StartupMeasured,
    end_text,
    warning,
)
from mindresume.storage import call_within
from mindresume.supervisor.evidence import PATIENCE, EventRecorder, excerpt, tail
from mindresume.supervisor.hang import (
    Heartbeats,
    JobSettings,
    find_hang,
    startup_phases,
    without_stacks,
    write_stacks,
)
from mindresume.supervisor.job_end import Ending, first_lost_step, may_finish
from mindresume.supervisor.members import (
    RANK,
    SCHEDULER,
    WRITER,
    Ended,
    Member,
    Members,
    end_with_parent,
    shell_status,
)
from mindresume.supervisor.restart_policy import (
    DIED,
    EXITED,
    HANG_STATUS,
    HUNG,
    KILLED,
    NOT_STARTED,
    TERMINATED,
    WRONG_USE,
    JobEnd,
    StartOutcome,
)

_STACKS = 30.0  # seconds for the stacks of all ranks
# seconds for a first heartbeat after a launcher that returns at once
_JOINING = 300.0
# seconds for the command to start; if its disk hangs, the watch begins without
_MOMENT = 1.0
_MOMENTARY = (
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.ESTALE,
    errno.ETXTBSY,
)
# seconds between two looks; the end of a process is noticed at once
TICK = 0.2
# seconds for the launcher to say how a rank ended whose status is not known
_UNKNOWN_END = 3.0


class Observer(Protocol):
    """Is asked while a job runs, and while it is ended, several times a second."""

    def observe(self, job: Job) -> JobEnd | None:
        """Returns why the job is to end; None: it goes on."""

    def is_hurried(self) -> bool:
        """Returns whether everything is to be killed now."""


class Command:
    """Starts a command in a session of its own, so that Ctrl-C reaches this process alone. In a
    thread, because the disk of the command can hang; it lasts until ``close``, because the kernel
    ends the command when the thread ends that has started it.

    Args:
        to_stderr: it prints to standard error alone.
    Attributes:
        pid: 0: not started yet.
        error: why it cannot be started.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], to_stderr: bool = False
    ):
        self.words = words
        self.environment = environment
        self.to_stderr = to_stderr
        self.pid = 0
        self.error: OSError | None = None
        self._is_tried = runtime.Event()
        self._is_over = runtime.Event()

    def start(self, heartbeats: str) -> None:
        """Starts it. ``heartbeats``: folder for those of its ranks."""
        thread = runtime.Thread(
            target=self._start, args=(os.getpid(), heartbeats), name="mindresume-start", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads
            self.error = OSError(errno.EAGAIN, str(error))
        else:
            self._is_tried.wait(_MOMENT)

    def _start(self, parent: int, heartbeats: str) -> None:
        try:
            process = subprocess.Popen(
                self.words,
                env={**self.environment, rank_heartbeat.VARIABLE: heartbeats},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                stdout=2 if self.to_stderr else None,
                preexec_fn=lambda: end_with_parent(parent),
            )
            process.returncode = 0  # ``Members.wait`` reaps it
            self.pid = process.pid
        except OSError as error:
            self.error = error
        except (ValueError, subprocess.SubprocessError) as error:
            self.error = OSError(errno.EINVAL, str(error))
        self._is_tried.set()
        self._is_over.wait()

    def close(self) -> None:
        self._is_over.set()


class Job:
    """Runs one start.

    Args:
        number: from 1.
        folder: for heartbeats; it exists, and is removed at the end.
        ignored: processes that belong to no start, or were left behind by an earlier one.
        recorder: has the folder for files with stacks; None: none are written.
    """

    def __init__(
        self,
        command: Command,
        number: int,
        folder: str,
        settings: JobSettings,
        emit: Emit,
        ignored: Collection[int] = (),
        recorder: EventRecorder | None = None,
    ):
        self.command = command
        self.number = number
        self.settings = settings
        self.emit = emit
        self.recorder = recorder
        self.members = Members(ignored)
        self.heartbeats = Heartbeats(folder)
        # by process, of those that have ended: the command ends before
        self._statuses: dict[int, int | None] = {}
        # its number is known, or after; what is said or done once
        self._said: set[str] = set()
        self._had_ranks = False
        self._clock = AwakeClock()
        self._began = self._started = 0.0
        # a rank whose end is not understood yet, and since when
        self._unknown: tuple[float, Ended] | None = None

    def start(self) -> None:
        """Starts the command. If that fails, ``watch`` returns why."""
        self._began, self._started = runtime.monotonic(), runtime.time()
        self.command.start(self.heartbeats.folder)

    def _is_first(self, what: str) -> bool:
        is_first = what not in self._said
        self._said.add(what)
        return is_first

    @property
    def _status(self) -> int | None:
        """Returns the exit status of the command, as of a shell; None: it runs, or has not been
        started yet."""
        if not self.command.pid or self.command.pid not in self._statuses:
            return None
        status = self._statuses[self.command.pid]
        return 1 if status is None else shell_status(status)

    # ---- watch -----------------------------------------------------------------------------------

    def watch(self, observer: Observer) -> JobEnd:
        """Returns why this start ends, at the moment when it is known."""
        while True:
            self._clock()
            if (error := self.command.error) is not None:
                status = 1 if error.errno in _MOMENTARY else WRONG_USE
                return JobEnd(NOT_STARTED, status, f"the command cannot be started: {error}")
            if self.command.pid and self._is_first("start"):
                self.emit(JobStarted(self.number, self.command.pid))
            self.refresh(now=False)
            for ended in self.members.wait(TICK):
                if end := self._taken(ended):
                    return end
            # a rank can have begun, or ended, with the command
            if self._status is not None and self._is_first("end"):
                self.refresh()
                continue
            if end := observer.observe(self) or self._over() or self._hang():
                return end
            self._measure_startup()

    def refresh(self, now: bool = True) -> None:
        self.heartbeats.refresh()
        self.members.refresh(self.heartbeats.known.values(), now)
        self._had_ranks = self._had_ranks or bool(self.heartbeats.known or self.members.alive(RANK))

    def _taken(self, ended: Ended) -> JobEnd | None:
        """Takes the end of a process. Returns the end of the job if it is a rank that had not
        finished, or the scheduler while a rank still trains: MindSpore's ranks lose each other
        without it, and would take 20 s until each sends itself SIGTERM."""
        self._statuses.setdefault(ended.member.pid, ended.status)
        ended = self._as_rank(ended)
        if ended.member.role == SCHEDULER:
            beats = [self.heartbeats.of(member.pid) for member in self.members.alive(RANK)]
            is_needed = any(
                beat is not None and beat.phase not in (ENDING, ENDED) for beat in beats
            ) or (
                # the ranks have not begun yet, and would wait for it
                bool(ended.status) and (None in beats or not (beats or self._had_ranks))
            )
            return self._died(ended) if is_needed else None
        if ended.member.role != RANK or self._ended_well(ended):
            return None
        if ended.status is None and ended.member.pid not in self.heartbeats.known:
            self._unknown = self._unknown or (runtime.monotonic(), ended)
            return None
        return self._died(ended)

    def _as_rank(self, ended: Ended) -> Ended:
        """Returns the end as that of a rank if a heartbeat proves it: one can end before its role
        was read from the process table."""
        member, beat = ended.member, self.heartbeats.of(ended.member.pid)
        if member.role == RANK or beat is None or beat.ticks != member.process.ticks:
            return ended
        return replace(
            ended, member=replace(member, role=RANK, rank=beat.rank if beat.rank >= 0 else None)
        )

    def _ended_well(self, ended: Ended) -> bool:
        """Returns whether a rank has ended as it should. A status of 143 is that of ranks that were
        asked to stop and saved."""
        beat = self.heartbeats.of(ended.member.pid)
        if ended.status is None:
            return beat is not None and beat.phase == ENDED and beat.outcome != FAILED
        return (
            ended.status == 0
            or ended.status == TERMINATED
            and beat is not None
            and beat.outcome == PREEMPTED
        )

    def _died(self, ended: Ended) -> JobEnd:
        member, beat = ended.member, self.heartbeats.of(ended.member.pid)
        noticed = runtime.monotonic()
        path = call_within(PATIENCE, "", self.members.log_file, member)
        log = call_within(PATIENCE, (), excerpt, path) if path else ()
        status = ended.status
        if status is None and path:
            status = call_within(
                PATIENCE, None, _status_in_message, os.path.dirname(path), member.pid
            )
        phase, step = (beat.phase, beat.step) if beat else ("", NONE)
        self.emit(
            RankDied(
                self.number,
                runtime.gethostname(),
                member.pid,
                member.rank,
                status,
                phase,
                _known(step),
                log,
                member.role == SCHEDULER,
            )
        )
        who = "the scheduler of msrun" if member.role == SCHEDULER else _name(member.rank)
        return JobEnd(
            DIED,
            1 if status is None else shell_status(status),
            f"{who} {end_text(status)}",
            False,
            member.rank,
            phase,
            noticed,
            log,
        )

    def _over(self) -> JobEnd | None:
        """Returns the end of the job if the command and all ranks have ended, or a rank has ended
        and nobody says how."""
        ranks, status = self.members.alive(RANK), self._status
        since, unknown = self._unknown or (0.0, None)
        if unknown is not None and ranks and runtime.monotonic() - since > _UNKNOWN_END:
            return self._died(unknown)
        # A launcher can return at once: processes are left that may become ranks. A job without
        # ranks ends.
        is_joining = (
            not self._had_ranks
            and bool(self.members.alive())
            and runtime.monotonic() - self._began < _JOINING
        )
        if status is None or status == 0 and (ranks or is_joining):
            return None
        beats = self.heartbeats.known.values()
        unasked = (
            ", its ranks after SIGTERM of an unknown sender"
            if any(beat.unasked for beat in beats)
            else ""
        )
        cause = f"the command ended with status {status}{unasked}"
        if unknown is None:
            return JobEnd(
                EXITED,
                status,
                cause,
                rank=next((beat.rank for beat in beats if beat.outcome == FAILED), None),
            )
        log = call_within(PATIENCE, (), excerpt, unknown.member.log)
        return JobEnd(EXITED, status, cause, rank=unknown.member.rank, log=log)

    def _hang(self) -> JobEnd | None:
        known = [beat for beat in self._beats_of_ranks() if beat is not None]
        alive = [beat for beat in known if beat.pid in self.heartbeats.readable]
        if len(alive) < len(known) and self._is_first("heartbeats removed"):
            self.emit(
                warning(
                    f"heartbeats in {self.heartbeats.folder} were removed while their ranks run, "
                    "so a hang of these ranks is not noticed. systemd does that when a user logs "
                    "out: set RemoveIPC=no, or loginctl enable-linger"
                )
            )
        hang = find_hang(alive, self._began, runtime.monotonic(), self.settings, self._clock)
        if hang is None:
            return None
        noticed, first = runtime.monotonic(), hang.ranks[0]

        # py-spy, and a disk that can hang
        paths = call_within(_STACKS, (), self._write_stacks, alive)
        if paths is not None and (absent := without_stacks(alive, paths)):
            self.emit(warning(f"no stacks of {absent}"))
        self.emit(
            HangDetected(
                self.number,
                runtime.gethostname(),
                tuple(max(it.rank, 0) for it in hang.ranks),
                hang.seconds,
                first.phase,
                _known(first.step),
                paths or (),
            )
        )
        cause = (
            f"{_name(first.rank)} made no progress for {hang.seconds:.0f} s while {first.phase} "
            f"({hang.limit})" + (f", stacks: {paths[0]} ..." if paths else "")
        )
        return JobEnd(HUNG, HANG_STATUS, cause, False, first.rank, first.phase, noticed)

    def _write_stacks(self, ranks: Sequence[rank_heartbeat.Heartbeat]) -> tuple[str, ...] | None:
        """Returns the files with stacks; None: there is no place for them."""
        target = self.recorder.evidence() if self.recorder is not None else None
        return (
            None
            if target is None
            else write_stacks(ranks, self.heartbeats.folder, f"{target}-start_{self.number}")
        )

    def _beats_of_ranks(self) -> list[rank_heartbeat.Heartbeat | None]:
        """Returns the last heartbeat of each rank that runs; None for one without."""
        return [self.heartbeats.known.get(member.pid) for member in self.members.alive(RANK)]

    def _measure_startup(self) -> None:
        """Emits how long each part of the start took, once every rank has finished its first
        step."""
        ranks = self._beats_of_ranks()
        if (
            not ranks
            or not all(it is not None and it.has_trained for it in ranks)
            or not self._is_first("measured")
        ):
            return
        slowest = max(ranks, key=lambda it: it.times.entered[rank_heartbeat.TRAINING])
        phases = startup_phases(slowest, self._started)
        self.emit(
            StartupMeasured(
                self.number,
                max(slowest.rank, 0),
                tuple(phase.name for phase in phases),
                tuple(phase.seconds for phase in phases),
                _known(slowest.resumed),
            )
        )

    # ---- end -------------------------------------------------------------------------------------

    def end(self, end: JobEnd, observer: Observer) -> tuple[StartOutcome, tuple[int, ...]]:
        """Ends everything that is left. Returns the outcome, and the processes that do not end even
        after SIGKILL."""
        self.refresh()
        left: tuple[int, ...] = ()
        is_preempted = self.is_preempted(end)  # before SIGTERM from here
        # daemons of a job that finished stay
        if end.kind != EXITED or end.status or self._is_finishing(observer):
            left = Ending(self, end, observer).run()
            self.refresh()
        beats = self.heartbeats
        resumed, last, committed = beats.newest_steps()
        failed, is_full = beats.failed_saves()
        if failed and end.status:
            disk = "the disk is full" if is_full else "the disk cannot be written"
            end = replace(end, cause=f"{end.cause}; {disk}, saves that failed in a row: {failed}")
        outcome = StartOutcome(
            self.number,
            self._started,
            runtime.monotonic() - self._began,
            end,
            runtime.gethostname(),
            is_preempted,
            bool(beats.known),
            beats.has_finished and end.kind in (EXITED, DIED) and end.status != 0,
            resumed,
            last,
            committed,
            failed,
        )
        self.emit(
            JobEnded(
                self.number,
                end.status,
                end.cause,
                outcome.seconds,
                runtime.monotonic() - end.noticed,
                _known(resumed),
                _known(last),
                _known(committed),
                left,
            )
        )
        self.command.close()
        self.members.close()
        shutil.rmtree(beats.folder, ignore_errors=True)
        return outcome, left

    def _is_finishing(self, observer: Observer) -> bool:
        """Waits until the scheduler and what writes checkpoints have ended by themselves. Returns
        whether one has not."""
        until = runtime.monotonic() + self.settings.leave
        while (
            (left := self.members.alive(RANK, SCHEDULER, WRITER))
            and runtime.monotonic() < until
            and not observer.is_hurried()
        ):
            self.members.wait(TICK)
            self.refresh(now=False)
        return bool(left)

    def is_preempted(self, end: JobEnd) -> bool:
        """Returns whether the ranks were asked to stop, and have saved. If the command was killed,
        or msrun, of which scripts/msrun_launcher.sh returns the status, then by the launcher."""
        return self.heartbeats.is_preempted and end.kind == EXITED and end.status != KILLED

    def is_saving(self, member: Member, kind: str) -> bool:
        """Returns whether a rank writes a checkpoint that can still become complete. ``kind``: of
        the end of the job."""
        known, alive = self.heartbeats.known, {other.pid for other in self.members.alive(RANK)}
        lost = first_lost_step(beat for pid, beat in known.items() if pid not in alive)
        return member.pid in known and may_finish(known[member.pid], lost, kind)


def _status_in_message(folder: str, pid: int) -> int | None:
    """Returns the exit status of a worker from msrun's message, which scripts/msrun_launcher.sh
    writes into a file; None if there is none."""
    found = re.findall(
        rf"Worker process {pid} exit with exception\. Error code: (-?\d{{1,9}})\.",
        tail(os.path.join(folder, "msrun_stderr.log")),
    )
    return int(found[-1]) if found else None


def _name(rank: int | None) -> str:
    return "a rank" if rank is None or rank < 0 else f"rank {rank}"


def _known(number: int) -> int | None:
    return None if number == NONE else number
