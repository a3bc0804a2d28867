"""supervisor/job.py: heartbeats that somebody removes are no hang; what the end of a process means
for the job."""

import errno
import os
import shutil
import threading
import time
from types import SimpleNamespace

import pytest

from mindresume.coordination import rank_heartbeat
from mindresume.coordination.liveness import start_ticks
from mindresume.coordination.rank_heartbeat import (
    COMPILING,
    ENDED,
    ENDING,
    OUTCOMES,
    TRAINING,
    RankHeartbeat,
    read_heartbeats,
)
from mindresume.events import Emitter, HangDetected, Notice, ignore
from mindresume.supervisor import job as job_module
from mindresume.supervisor import job_end
from mindresume.supervisor.hang import JobSettings
from mindresume.supervisor.job import Command, Job, _status_in_message
from mindresume.supervisor.members import OTHER, RANK, SCHEDULER, Ended, Member, Process
from mindresume.supervisor.restart_policy import (
    DIED,
    EXITED,
    HUNG,
    NOT_STARTED,
    STOPPED,
    JobEnd,
)
from mindresume.supervisor.supervisor import Supervisor, SupervisorSettings


def job_with_a_silent_rank(folder, events):
    """Returns a job whose only rank, this process, made its last step when the host was started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rank_heartbeat, "runtime", SimpleNamespace(monotonic=lambda: 0.0, time=time.time)
        )
        RankHeartbeat(os.path.join(folder, f"process_{os.getpid()}.heartbeat")).reach(5)
    job = Job(Command(["train"], {}), 1, str(folder), JobSettings(1e-9), events.append)
    (found,) = read_heartbeats(str(folder))
    job.members.refresh = lambda *arguments: None
    job.members.alive = lambda *roles: [Member(Process(found.pid, 1, 1, "R", found.ticks), RANK, 0)]
    return job


def test_a_removed_heartbeat_is_no_hang(tmp_path):
    events = []
    job = job_with_a_silent_rank(tmp_path, events)
    job.refresh()
    assert job._hang().rank == -1 and isinstance(events.pop(), HangDetected)
    # as systemd does when a user logs out (RemoveIPC)
    shutil.rmtree(tmp_path)
    for _ in range(3):
        job.refresh()
        assert job._hang() is None
    (notice,) = events
    assert isinstance(notice, Notice) and str(tmp_path) in notice.text


def test_a_start_after_the_folder_was_removed_has_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(job_end, "_MEMORY", str(tmp_path))
    supervisor = Supervisor(["train"], SupervisorSettings(), Emitter())
    supervisor._folder = str(tmp_path / "gone")
    job = supervisor.make_job(["train"], 2)
    assert (
        os.path.isdir(job.heartbeats.folder)
        and os.path.dirname(job.heartbeats.folder) == supervisor._folder
    )


@pytest.fixture
def job(tmp_path):
    return Job(Command(["true"], {}), 1, str(tmp_path), JobSettings(), ignore)


class Quiet:
    """Observes a job, and lets it go on; ``end``: ends it."""

    def __init__(self, end=None):
        self.end = end

    def observe(self, job):
        return self.end

    def is_hurried(self):
        return False


def ended(ticks, status=2):
    return Ended(Member(Process(os.getpid(), 0, 0, "Z", ticks), OTHER), status)


def tell(folder, **numbers):
    """Makes this process a rank whose training has ended."""
    beat = RankHeartbeat.create(str(folder), 0)
    beat.set(**numbers)
    beat.enter(ENDED)


FINISHED, PREEMPTED = OUTCOMES.index("finished"), OUTCOMES.index("preempted")


@pytest.mark.parametrize(
    "status, outcome, dies",
    [
        (0, FINISHED, False),
        (None, FINISHED, False),
        (143, PREEMPTED, False),
        (143, FINISHED, True),
        (5, PREEMPTED, True),
        (None, OUTCOMES.index("failed"), True),
    ],
)
def test_a_rank_that_ends_well_does_not_end_the_others(job, tmp_path, status, outcome, dies):
    tell(tmp_path, outcome=outcome)
    assert (job._taken(ended(start_ticks(os.getpid()), status)) is not None) == dies


@pytest.mark.parametrize(
    "numbers, end, is_preempted, has_finished",
    [
        # asked by others, not by the supervisor
        ({"outcome": PREEMPTED}, (EXITED, 143), True, False),
        # it may have been the signal of a failure
        ({"outcome": PREEMPTED, "unasked": 1}, (EXITED, 143), False, False),
        ({"outcome": PREEMPTED}, (DIED, 143), False, False),
        # msrun was killed: the launcher has ended the ranks, which have saved
        ({"outcome": PREEMPTED}, (EXITED, 137), False, False),
        # the launcher fails, or a rank crashes, after the training
        ({"outcome": FINISHED}, (EXITED, 3), False, True),
        ({"outcome": FINISHED}, (DIED, 139), False, True),
        ({"outcome": FINISHED}, (HUNG, 124), False, False),
        ({"outcome": FINISHED, "begun": 5, "committed": 4}, (EXITED, 3), False, False),
    ],
)
def test_what_the_ranks_tell_decides_whether_a_start_was_the_last(
    job, tmp_path, numbers, end, is_preempted, has_finished
):
    tell(tmp_path, **numbers)
    job.members.refresh = lambda *arguments: None  # ends nothing here
    outcome, _ = job.end(JobEnd(*end, ""), Quiet())
    assert (outcome.is_preempted, outcome.has_finished) == (is_preempted, has_finished)


def test_a_rank_that_ends_before_its_role_is_known_is_one_by_its_heartbeat(job, tmp_path):
    RankHeartbeat.create(str(tmp_path), 3)
    end = job._taken(ended(start_ticks(os.getpid())))
    assert (end.kind, end.status, end.rank) == (DIED, 2, 3)


def test_another_process_with_the_number_of_a_rank_is_none(job, tmp_path):
    assert job._taken(ended(start_ticks(os.getpid()))) is None
    RankHeartbeat.create(str(tmp_path), 3)
    assert job._taken(ended(start_ticks(os.getpid()) + 1)) is None


@pytest.mark.parametrize(
    "phase, fails", [(TRAINING, True), (COMPILING, True), (ENDING, False), (ENDED, False)]
)
def test_the_end_of_the_scheduler_is_the_end_of_ranks_that_still_train(job, tmp_path, phase, fails):
    """No rank dies by itself before each has waited for 20 s and sent itself SIGTERM."""
    RankHeartbeat.create(str(tmp_path), 3).enter(phase)
    rank = Member(Process(os.getpid(), 0, 0, "R", start_ticks(os.getpid())), RANK, 3)
    job.members.alive = lambda *roles: [rank] if RANK in roles else []
    end = job._taken(Ended(Member(Process(1, 0, 0, "Z", 5), SCHEDULER), -9))
    assert (end is not None) == fails
    if fails:
        assert (end.kind, end.status, end.rank) == (
            DIED,
            137,
            None,
        ) and "the scheduler of msrun" in end.cause


@pytest.mark.parametrize(
    "has_rank, status, fails", [(True, -9, True), (False, 1, True), (True, 0, False)]
)
def test_a_scheduler_that_fails_before_the_first_heartbeat_is_not_waited_for(
    job, has_rank, status, fails
):
    """Its port is in use, or it was killed: the ranks would wait for it until they give up, after
    two hours."""
    rank = Member(Process(os.getpid(), 0, 0, "R", start_ticks(os.getpid())), RANK, 3)
    job.members.alive = lambda *roles: [rank] * has_rank
    end = job._taken(Ended(Member(Process(1, 0, 0, "Z", 5), SCHEDULER), status))
    assert (end is not None) == fails


class SeenLate:
    """Stands in for Members: a rank that has ended with status 3 is only seen when the process
    table is read again."""

    logs = frozenset()

    def __init__(self):
        self.ends = [Ended(Member(Process(1, 0, 0, "Z", 5), OTHER), 1)]

    def refresh(self, heartbeats, now):
        if now:
            self.ends.append(Ended(Member(Process(2, 0, 0, "Z", 5), RANK, 0), 3))

    def wait(self, seconds):
        found, self.ends = self.ends, []
        return found

    def alive(self, *roles):
        return []

    def log_file(self, member):
        return ""


def test_the_status_of_a_rank_that_ended_with_the_command_is_that_of_the_job(job):
    job.members, job.command.pid = SeenLate(), 1
    end = job.watch(Quiet())
    assert (end.kind, end.status, end.rank) == (DIED, 3, 0)


# ---- the start -----------------------------------------------------------------------------------


def test_a_disk_of_the_command_that_hangs_does_not_stop_the_watch(job, monkeypatch):
    hanging = threading.Event()

    def hang(*arguments, **more):
        hanging.wait()
        raise OSError(errno.EIO, "at last")

    monkeypatch.setattr(job_module, "_MOMENT", 0.01)
    monkeypatch.setattr(job_module.subprocess, "Popen", hang)
    job.start()
    asked = JobEnd(STOPPED, 143, "SIGTERM was received")
    assert job.watch(Quiet(asked)) is asked
    outcome, left = job.end(asked, Quiet())
    assert (outcome.end.kind, outcome.end.status, left) == (STOPPED, 143, ())
    hanging.set()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file"), 2),
        (PermissionError(errno.EACCES, "denied"), 2),
        (OSError(errno.EAGAIN, "no more processes"), 1),
        (OSError(errno.ENOMEM, "no memory"), 1),
        (ValueError("embedded null"), 2),
    ],
)
def test_a_command_that_cannot_be_started_ends_the_start_and_says_why(
    job, monkeypatch, error, status
):
    def fail(*arguments, **more):
        raise error

    monkeypatch.setattr(job_module.subprocess, "Popen", fail)
    job.start()
    end = job.watch(Quiet())
    assert (end.kind, end.status) == (NOT_STARTED, status) and str(error) in end.cause
    assert job.end(end, Quiet())[0].has_begun is False


def test_at_the_limit_of_threads_the_start_is_tried_again(job, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    job.start()
    end = job.watch(Quiet())
    assert (end.kind, end.status) == (NOT_STARTED, 1)


def test_a_command_that_ends_before_its_start_is_known_has_its_status(job, tmp_path):
    job._taken(Ended(Member(Process(77, 0, 0, "Z", 5), OTHER), 3))
    assert job._over() is None
    job.command.pid = 77
    assert job._over().status == 3
    tell(tmp_path, outcome=PREEMPTED, unasked=1)
    job.heartbeats.refresh()
    assert "its ranks after SIGTERM of an unknown sender" in job._over().cause


def test_the_status_of_a_rank_that_msrun_has_reaped_is_in_its_message(tmp_path):
    (tmp_path / "msrun_stderr.log").write_text(
        "[ERROR] Worker process 17 exit with exception. Error code: -9.\n"
        "Worker process 4 exit with exception. Error code: 2.\n"
    )
    assert [_status_in_message(str(tmp_path), pid) for pid in (17, 4, 5)] == [-9, 2, None]
    assert _status_in_message(str(tmp_path / "absent"), 17) is None


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_start_has_begun_once_a_rank_has_a_heartbeat(job, tmp_path, has_begun):
    """A script that cannot be read at a restart (status 2) is tried again then."""
    if has_begun:
        RankHeartbeat.create(str(tmp_path), 0)
    job.refresh()
    outcome, _ = job.end(JobEnd(EXITED, 0, "it ended"), Quiet())
    assert outcome.has_begun is has_begun
