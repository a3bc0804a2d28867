"""supervisor/: ``mindresume run`` with real processes: ranks that die, hang, ignore signals, leave
children behind."""

import json
import os
import signal
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from memory_tiers import make_owned_tier
from rank_folders import committed_steps, save

from mindresume.events.event_file import FOLDER

LINGER = "time.sleep(3600)"  # ends only by a signal
# Rank 0 dies in the first start, after a checkpoint; the second start finishes.
ONE_DEATH = f"""
if start == 2:
    beat.set(resumed=5)
    beat.reach(6)
    finish()
if rank == 0:
    beat.set(begun=5, written=5, committed=5)
    beat.reach(7)
    wait_for("ready_1")
    os.kill(os.getpid(), signal.SIGKILL)
beat.reach(7)
mark("ready_1")
{LINGER}
"""


def of(events, kind):
    return [event for event in events if event["event"] == kind]


FINISHED = """
beat.set(begun=5, written=5, committed=5 if rank == 0 else -1, outcome=1)
beat.enter(hb.ENDED)
"""


def test_a_job_whose_rank_crashes_at_its_exit_after_the_training_is_not_started_again(job):
    status, events = job.run(
        FINISHED
        + """
mark(f"ended_{rank}")
wait_for(f"ended_{1 - rank}")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    )
    assert (
        status == 139 and len(of(events, "job_started")) == 1 and len(of(events, "rank_died")) == 1
    )


def test_a_killed_rank_is_noticed_and_the_job_starts_again_at_once_after_progress(job):
    status, events = job.run(ONE_DEATH)
    (died,) = of(events, "rank_died")
    assert status == 0
    assert [died[name] for name in ("rank", "status", "phase", "step")] == [0, -9, "training", 7]
    first, second = of(events, "job_ended")
    names = ("status", "committed_step", "last_step")
    assert [first[name] for name in names] == [137, 5, 7] and "left_behind" in first
    assert (second["status"], second["resumed_step"]) == (0, 5)
    (restart,) = of(events, "job_restarted")
    assert (restart["start"], restart["delay_seconds"], restart["fruitless_starts"]) == (2, 0, 0)
    # the events are written beside those of the ranks, and nothing else is left
    (file,) = (job.folder / "output" / FOLDER).iterdir()
    written = [json.loads(line)["event"] for line in file.read_text().splitlines()]
    assert "-supervisor_0-" in file.name and written == [event["event"] for event in events]
    mine = f"-{events[0]['process_id']}."
    left = [name for name in os.listdir("/dev/shm") if mine in name]
    assert not [name for name in left if name.startswith("mindresume-supervisor")]


def test_a_child_that_has_left_its_session_is_ended_too(job):
    """Two forks and setsid, with an empty environment: neither session nor environment nor parent
    show where it comes from."""
    status, events = job.run(
        """
if start == 2: finish()
if rank == 1:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.execve(sys.executable, [sys.executable, "-c", "open('daemon', 'w').close(); import time; time.sleep(3600)"], {})
        os._exit(0)
    wait_for("daemon")
    sys.exit(5)
time.sleep(3600)
""",  # noqa: E501
        "--kill-after",
        "0.2",
    )
    # 1: msrun has reaped it first
    assert status == 0 and of(events, "job_ended")[0]["status"] in (5, 1)


def test_a_crash_loop_ends_with_a_page_that_says_what_each_start_died_of_and_where_its_logs_are(
    job,
):
    status, events = job.run(
        """
if rank == 1:
    wait_for(f"up_{start}")
    print("Traceback (most recent call last):\\n  File \\"train.py\\"\\nValueError: bad thing %d" % start)
    sys.exit(3)
print("this is start", start, flush=True)
mark(f"up_{start}")
time.sleep(3600)
""",  # noqa: E501
        "--max-restarts",
        "1",
    )
    (gave_up,) = of(events, "gave_up")
    assert (status, gave_up["starts"], gave_up["status"]) == (3, 2, 3)
    assert [event["delay_seconds"] for event in of(events, "job_restarted")] == [1]
    ((kept,),) = (event["folders"] for event in of(events, "logs_kept"))
    page = "\n".join(gave_up["page"])
    for fact in ("start 1", "ValueError: bad thing 1", "bad thing 2", "rank 1", "status 3", kept):
        assert fact in page
    for folder, start in ((kept, 1), (job.folder, 2)):
        assert Path(folder, "worker_0.log").read_text() == f"this is start {start}\n"


def test_a_full_disk_ends_a_job_that_makes_progress_in_memory_alone(job):
    """Each start resumes from a later step of the tier in memory, and ends with failed saves."""
    status, events = job.run(
        """
beat.set(resumed=30 * start, failed=3, full=1)
beat.reach(30 * start + 29)
sys.exit(1)
""",
        "--max-restarts",
        "1",
    )
    (gave_up,) = of(events, "gave_up")
    assert (status, gave_up["starts"]) == (1, 2) and "free space" in gave_up["reason"]
    assert [event["reason"].count("the disk is full") for event in of(events, "job_ended")] == [
        1,
        1,
    ]
    assert "the disk is full" in "\n".join(gave_up["page"])


def test_a_killed_launcher_is_a_failure_although_its_ranks_save_when_they_are_ended(job):
    status, events = job.run(
        """
if start == 2: finish()
def leave(*_):
    beat.set(outcome=hb.OUTCOMES.index("preempted"))
    beat.enter(hb.ENDED)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
beat.reach(3)
mark(f"up_{rank}")
wait_for(f"up_{1 - rank}")
if rank == 0:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(3600)
""",
        "--kill-after",
        "20",
    )
    assert status == 0 and [event["status"] for event in of(events, "job_ended")] == [137, 0]


def test_a_hang_is_ended_after_the_stacks_are_written(job):
    status, events = job.run(
        """
import faulthandler
if start == 2: finish()
file = open(beat.path.removesuffix(hb.SUFFIX) + hb.STACKS, "ab")
faulthandler.register(signal.SIGRTMIN + 7, file, all_threads=True)
beat.set(signal=signal.SIGRTMIN + 7)
def waits_for_ever():
    beat.reach(3)
    time.sleep(3600)
mark(f"up_{rank}")
wait_for(f"up_{1 - rank}")
waits_for_ever()
""",
        "--hang-timeout",
        "1",
    )
    (hang,) = of(events, "hang_detected")
    assert status == 0 and of(events, "job_ended")[0]["status"] == 124
    assert hang["ranks"] and len(hang["stacks"]) == 2
    assert all("waits_for_ever" in Path(path).read_text() for path in hang["stacks"])


def test_sigterm_reaches_the_ranks_which_save_and_no_start_follows(job):
    job.start(
        """
def leave(number, frame):
    beat.set(outcome=2)
    beat.enter(hb.ENDED)
    mark(f"saved_{rank}")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
beat.reach(1)
mark(f"up_{rank}")
time.sleep(3600)
""",
        "--leave",
        "60",
    )
    for rank in range(2):
        job.pid(f"up_{rank}")
    job.process.send_signal(signal.SIGTERM)
    status, events = job.wait()
    assert status == 143 and len(of(events, "job_started")) == 1
    assert (job.folder / "saved_0").exists() and (job.folder / "saved_1").exists()


def test_a_second_signal_ends_a_job_that_does_not_leave(job):
    job.start(f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nmark(f'up_{{rank}}')\n{LINGER}")
    for rank in range(2):
        job.pid(f"up_{rank}")
    job.process.send_signal(signal.SIGINT)
    job.process.send_signal(signal.SIGTERM)
    status, _ = job.wait()
    assert status == 130


def test_processes_whose_supervisor_was_killed_are_ended_by_the_next_one(job):
    program = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.path.exists("second"): finish()
mark(f"up_{{rank}}")
{LINGER}
"""
    job.start(program)
    ranks = [job.pid(f"up_{rank}") for rank in range(2)]
    job.process.kill()
    job.process.wait()
    assert set(ranks) <= set(job.processes())
    job.mark("second")
    status, events = job.start(program, "--leave", "0.2").wait()
    (ended,) = of(events, "orphans_ended")
    assert status == 0 and set(ranks) <= set(ended["process_ids"])


def test_the_command_ends_with_its_supervisor(job):
    job.start("", command=["bash", "-c", "echo $$ > mine; mv mine up; while :; do sleep 1; done"])
    pid = job.pid("up")
    job.process.kill()
    job.process.wait()
    job.wait_until(lambda: pid not in job.processes())


def test_a_writer_of_checkpoints_may_finish_its_save(job):
    """It ignores SIGTERM, has lost its training, and ends by itself."""
    status, events = job.run("""
if start == 2:
    assert os.path.exists("saved")
    finish()
if rank == 0:
    writer = "import os, time\\nwhile not os.path.exists('go'): time.sleep(0.01)\\ntime.sleep(0.5)\\nopen('saved', 'w').close()"
    subprocess.Popen([sys.executable, "-c", writer], start_new_session=True, env={**os.environ, "MSRUN_LAUNCHER_WRITER": "1"})
    wait_for("up")
    open("go", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
mark("up")
time.sleep(3600)
""")  # noqa: E501
    assert status == 0 and of(events, "job_ended")[0]["status"] == 137


# Rank 0 dies at step 5, rank 1 is saving it. Its training thread waits in a collective and does not
# handle SIGTERM.
SAVES = """
beat.reach(4)
if start == 2:
    assert os.path.exists("saved_1") == {saved}
    finish()
beat.set(begun=5)
{saving}
if rank == 0:
    {died}
    wait_for("saving_1")
    os.kill(os.getpid(), signal.SIGKILL)
mark("saving_1")
if {saved}:
    wait_for("allowed")
    mark("saved_1")
    beat.set(written=5, writing=0)
    beat.enter(hb.TRAINING)
time.sleep(3600)
"""
SAVING = {"training": "beat.enter(hb.SAVING)", "thread": "beat.reach(5); beat.set(writing=5)"}


@pytest.mark.parametrize("where", SAVING)
def test_a_rank_may_finish_a_save_that_the_dead_rank_had_finished(job, where):
    """It is not asked to stop before: SIGTERM would end it at once."""
    job.start(
        SAVES.format(
            saving=SAVING[where], died="beat.set(written=5, writing=0); beat.reach(5)", saved=True
        ),
        "--kill-after",
        "0.1",
        "--save-timeout",
        "100",
    )
    rank = job.pid("saving_1")
    job.wait_until(lambda: of(job.events(), "rank_died"))
    assert rank in job.processes()
    job.mark("allowed")
    status, _ = job.wait()
    assert status == 0


def test_a_save_in_which_a_rank_died_is_not_waited_for(job):
    status, events = job.run(
        SAVES.format(saving=SAVING["thread"], died="pass", saved=False),
        "--kill-after",
        "0.1",
        "--save-timeout",
        "3600",
    )
    assert status == 0 and len(of(events, "job_ended")) == 2


def test_what_only_memory_has_is_written_to_disk_when_the_job_is_given_up(job, memory):
    root = job.folder / "output" / "checkpoint"
    save(make_owned_tier(memory, root), 9, world=2)
    # the other rank keeps the launcher, which would end with a status of its own
    status, events = job.run("time.sleep(600 * rank)\nsys.exit(3)", "--max-restarts", "0")
    assert status == 3 and committed_steps(root) == [9]
    kinds = [event["event"] for event in events]
    assert kinds.index("job_ended") < kinds.index("notice") < kinds.index("supervisor_ended")


def test_a_job_that_ended_well_writes_nothing(job, memory):
    root = job.folder / "output" / "checkpoint"
    save(make_owned_tier(memory, root), 9, world=2)
    status, events = job.run("finish()")
    assert status == 0 and not of(events, "notice") and committed_steps(root) == []


# ---- launchers and limits of the system ----------------------------------------------------------


def test_a_launcher_that_returns_at_once_ends_nothing(job):
    """The ranks make their first heartbeat later, and the job ends when they have: killed by
    nobody, and judged by their ends."""
    # the preamble has made the heartbeat; the launcher is gone by then
    program = "time.sleep(0.3)\n" + FINISHED
    command = f"(sleep 0.3; exec {sys.executable} rank.py) & exit 0"
    status, events = job.run(program, command=["sh", "-c", command])
    [ended] = of(events, "job_ended")
    assert status == ended["status"] == 0 and len(of(events, "job_started")) == 1
    status, events = job.run("sys.exit(5 if start == 1 else 0)", command=["sh", "-c", command])
    assert (
        status == 0
        and len(of(events, "job_started")) == 2
        and of(events, "rank_died")[0]["status"] == 5
    )


def test_a_script_whose_interpreter_does_not_exist_is_wrong_use(job):
    (job.folder / "train").write_text("#!/no/such/interpreter\n")
    (job.folder / "train").chmod(0o755)
    status, events = job.run("", command=["./train"])
    assert (
        status == 2
        and "cannot be started" in events[-1]["reason"]
        and not of(events, "job_restarted")
    )


def test_an_ignored_sigchld_changes_no_status(job):
    supervisor = (
        "-c",
        "import signal, runpy; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "runpy.run_module('mindresume', run_name='__main__')",
    )
    status, events = job.start("finish()", supervisor=supervisor).wait()
    assert status == 0 and len(of(events, "job_started")) == 1 and not of(events, "rank_died")
    assert events[-1] == {**events[-1], "event": "supervisor_ended", "status": 0, "starts": 1}


def test_the_limit_of_open_files_ends_no_supervisor(job):
    """It cannot read the process table for a while."""
    supervisor = (
        "-c",
        """
import os, runpy
real, looks = os.listdir, iter(range(1000))
def listdir(path="."):
    if str(path) == "/proc" and (look := next(looks)) >= 5:
        if look < 9:
            raise OSError(24, "Too many open files")
        open("looked", "w").close()
    return real(path)
os.listdir = listdir
runpy.run_module('mindresume', run_name='__main__')
""",
    )
    status, events = job.start(
        "beat.reach(1); wait_for('looked'); finish()", supervisor=supervisor
    ).wait()
    assert status == 0 and len(of(events, "job_started")) == 1, job.errors()


# The disk of the job hangs for the supervisor, and the reader of its output is gone.
HANGING = """
import builtins, os, runpy, threading
from mindresume.supervisor import evidence, job, supervisor
for module, names in ((builtins, ["open"]), (os, ["open", "mkdir", "makedirs", "listdir", "scandir", "stat", "rename"])):
    for name in names:
        def call(path, *arguments, _real=getattr(module, name), **more):
            if "hanging" in str(path):
                threading.Event().wait()
            return _real(path, *arguments, **more)
        setattr(module, name, call)
evidence._PATIENCE = job.PATIENCE = supervisor.PATIENCE = 0.5
defaults = evidence.BackgroundHandler.__init__.__defaults__
evidence.BackgroundHandler.__init__.__defaults__ = (*defaults[:-1], 0.5)
runpy.run_module("mindresume", run_name="__main__")
"""  # noqa: E501


def test_a_hanging_disk_and_a_full_pipe_do_not_keep_a_supervisor_from_its_work(job):
    """It notices a death, starts again, and ends everything when it is asked to."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 12))
    os.set_blocking(writer, True)
    job.start(
        f"""
beat.set_output(os.path.join(folder, "hanging"))
beat.reach(5)
mark(f"up_{{start}}_{{rank}}")
if start == 1 and rank == 0:
    wait_for("up_1_1")
    os._exit(7)
{LINGER}
""",
        supervisor=("-c", HANGING),
        pipe=writer,
    )
    job.pid("up_2_0"), job.pid("up_2_1")
    job.process.send_signal(signal.SIGTERM)
    job.wait_until(lambda: not job.processes())
    # gives up what memory may have: its disk hangs
    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(120) == 143
    os.close(reader)
    os.close(writer)


def test_a_webhook_gets_what_happened_and_the_ranks_do_not_get_its_secret(job):
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    status, events = job.run(
        'if "MSRUN_NOTIFY_URL" in os.environ: sys.exit(2)\n' + ONE_DEATH,
        MSRUN_NOTIFY_URL=f"http://127.0.0.1:{server.server_port}/token",
        MSRUN_NOTIFY_EVENTS="rank_died,supervisor_ended",
    )
    server.shutdown()
    server.server_close()
    assert status == 0
    died, ended = posted
    assert died["event"] == "rank_died" and (died["rank"], died["status"]) == (0, -9)
    assert ended["event"] == "supervisor_ended" and ended["starts"] == 2
    assert "/token" not in job.errors() + json.dumps(events)
