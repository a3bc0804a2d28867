"""A checkpoint on which jobs die is suspected, taken last, and never removed; one step clears
it."""

import json
import os
import signal
import socket

import pytest
from rank_folders import STORAGE, dir_at, save
from storages import failing

from mindresume import runtime
from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.rank_heartbeat import ENDED_BY_US
from mindresume.errors import LoadError
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER, run_name
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.saving.crash_loop import LoadAttempt, explanation, key_of, load_attempts
from mindresume.saving.retention import KeepLast, plan

NAN = RuntimeError("loss is nan")


def choose(root, limit=2, named=None):
    return select_checkpoint(
        STORAGE, str(root), SingleProcess(), SelectionPolicy(1, named, max_failed_loads=limit)
    )


class Job:
    """Loads what is chosen, and is about to compute its first step. ``ranks`` of it."""

    count = 0

    def __init__(
        self, root, limit=2, named=None, output="/output", ranks=1, hosts=1, compiled=True
    ):
        Job.count += 1
        self.choice = choose(root, limit, named)
        self.step = self.choice.chosen.step
        self.load_attempts = [
            LoadAttempt(dir_at(root), self.choice.chosen, output, rank, limit)
            for rank in range(ranks)
        ]
        for load_attempt in self.load_attempts:
            load_attempt.run, load_attempt.hosts = run_name(Job.count, "0000aaaa"), hosts
            if compiled:
                load_attempt.begin()

    def fails(self, error=None, rank=0):
        """Ends the job with ``error``. None: it is killed and records nothing."""
        if error is not None:
            self.load_attempts[rank].failed(error)
        self.load_attempts[0]._stop_capturing()  # as the end of the process does
        return self

    def passes(self):
        for load_attempt in self.load_attempts:
            load_attempt.passed()


@pytest.fixture
def root(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, world=1)
    return tmp_path


def kept(root):
    return [c.step for c in plan(dir_at(root), KeepLast(1)).kept]


def left(root):
    return sorted(name for name in os.listdir(root / FOLDER) if name.startswith(("trial", "death")))


def test_two_failed_loads_select_the_older_checkpoint(root):
    assert [Job(root).fails().step for _ in range(2)] == [15, 15]
    found = choose(root)
    assert found.chosen.step == 10
    assert [str(refusal) for refusal in found.refused] == [
        "step 15: it is suspected: 2 jobs in a row loaded it and died before their first step was "
        "done, the last one: no error was reported (mindresume.max_failed_loads: 2); name it "
        "explicitly to load it all the same"
    ]


def test_the_failure_of_the_previous_job_is_reported(root):
    Job(root).fails(NAN)
    assert choose(root).notes == (
        f"step 15: the job before loaded it and died before the first step was done, the last one: "
        f"RuntimeError: loss is nan (rank 0, host {socket.gethostname()})",
    )


def test_a_finished_step_clears_the_load_attempt(root):
    Job(root).fails(NAN)
    Job(root).passes()
    assert left(root) == [] and [Job(root).fails().step for _ in range(2)] == [15, 15]


def test_only_failures_after_the_load_count(root):
    """Two preemptions or errors during the load or the compilation made the newest checkpoint
    suspect."""
    for _ in range(3):
        Job(root, compiled=False).fails(NAN)
    assert left(root) == [] and choose(root).chosen.step == 15


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(143),
        MemoryError(),
        RuntimeError("Device(id:0) memory isn't enough: Out of Memory"),
        RuntimeError("Ascend error EL0004: Failed to allocate memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("HcclAllReduce failed, EI0002: notify wait timeout"),
        ConnectionResetError(),
        TimeoutError(),
        RuntimeError("The total number of timed out node is 1"),
        RuntimeError("Exception thrown from dataset pipeline"),
        OSError(5, "Input/output error"),
        LoadError("it changed"),
        TypeError("unexpected argument"),
        ImportError("no module"),
    ],
)
def test_failures_with_another_cause_do_not_count(root, error):
    for _ in range(3):
        Job(root, ranks=2).fails(error, rank=1)
    assert choose(root).chosen.step == 15 and list(load_attempts(dir_at(root)).values()) == [()]
    Job(root, ranks=2).passes()
    assert left(root) == []


@pytest.mark.parametrize(
    "error",
    [
        NAN,
        ValueError("nan"),
        FloatingPointError(),
        RuntimeError("aicore exception"),
        AssertionError(""),
    ],
)
def test_failures_that_the_checkpoint_may_cause_count(root, error):
    for _ in range(2):
        Job(root, ranks=2).fails(error, rank=1)
    assert explanation(error) == "" and choose(root).chosen.step == 10


def test_an_error_of_the_compiler_is_none_of_the_checkpoint():
    space = {}
    exec(
        compile(
            "def compile(): raise ValueError('For primitive[Add]')",
            "/x/mindspore/nn/cell.py",
            "exec",
        ),
        space,
    )
    try:
        space["compile"]()
    except ValueError as error:
        assert explanation(error) == "the network could not be compiled"


def test_a_rank_that_lost_its_peers_does_not_excuse_the_rank_with_the_error(root):
    for _ in range(2):
        job = Job(root, ranks=3)
        job.fails(RuntimeError("hccl: peer is gone"), rank=0)
        job.fails(NAN, rank=2)
    assert choose(root).chosen.step == 10


@pytest.mark.parametrize(
    "number, supervised, counts",
    [
        (signal.SIGTERM, False, False),
        (signal.SIGINT, False, False),
        (signal.SIGUSR1, False, True),
        (signal.SIGTERM, True, True),
    ],
)
def test_the_signal_before_a_kill_decides_whether_it_counts(
    root, number, supervised, counts, monkeypatch
):
    """The number is on the disk although no handler ran, and none could: the process did not live
    to see it. The signal with which a supervisor ends what a failure has left is no reason."""
    if supervised:
        monkeypatch.setenv(ENDED_BY_US, "1")
    before = signal.signal(number, lambda *_: None)
    try:
        for _ in range(2):
            job = Job(root)
            os.kill(os.getpid(), number)
            job.fails()
    finally:
        signal.signal(number, before)
    assert choose(root).chosen.step == (10 if counts else 15)
    Job(root, named="net_rank_0-2_5").passes()
    assert not any(name.startswith("death") for name in left(root))


def test_a_suspected_checkpoint_is_selected_if_all_are_suspected(root):
    """Never stuck: the newest one again, with what is known of the others."""
    assert [Job(root).fails().step for _ in range(6)] == [15, 15, 10, 10, 5, 5]
    found = choose(root)
    assert found.chosen.step == 15 and [refusal.step for refusal in found.refused] == [15, 10, 5]


# ---- hosts ---------------------------------------------------------------------------------------


def failures_on(root, monkeypatch, *hosts, ranks=2, of=2):
    for host in hosts:
        monkeypatch.setattr(runtime, "gethostname", lambda host=host: host)
        Job(root, ranks=ranks, hosts=of).fails(NAN, rank=1)


def test_failures_on_one_host_need_more_jobs_to_refuse_a_checkpoint(root, monkeypatch):
    failures_on(root, monkeypatch, "bad", "bad", "bad")
    found = choose(root)
    assert (
        found.chosen.step == 15
        and "3 jobs in a row" in found.notes[-1]
        and "All died on host bad" in found.notes[-1]
    )
    # never stuck: it may be its slice after all
    failures_on(root, monkeypatch, "bad")
    found = choose(root)
    assert found.chosen.step == 10 and "all on host bad" in found.refused[0].reason


@pytest.mark.parametrize("hosts, of", [(("one", "two"), 2), (("one", "one"), 1)])
def test_failures_on_several_hosts_or_the_only_host_count(root, monkeypatch, hosts, of):
    failures_on(root, monkeypatch, *hosts, of=of)
    assert choose(root).chosen.step == 10


# ---- whose ---------------------------------------------------------------------------------------


def test_jobs_that_begin_with_it_at_the_same_time_are_not_in_a_row(root):
    """Several trainings from one source; one of them has done its first step."""
    jobs = [Job(root, output=f"/output/{number}") for number in range(5)]
    assert [job.step for job in jobs] == [15] * 5
    jobs[2].passes()
    for job in jobs:
        job.fails()
    assert not any(name.startswith("trial") for name in left(root))
    assert [Job(root, output="/output/0").fails().step for _ in range(3)] == [15, 15, 10]


def test_a_requested_name_overrides_the_guard(root):
    for _ in range(2):
        Job(root).fails()
    assert choose(root, named="net_rank_0-2_5").chosen.step == 15


def test_a_limit_of_none_disables_the_guard(root):
    assert [Job(root, limit=0).fails().step for _ in range(4)] == [15] * 4


def test_a_save_of_the_same_step_by_a_later_run_is_another_checkpoint(root):
    for _ in range(2):
        Job(root).fails()
    job = Job(root)
    assert job.step == 10 and len(load_attempts(dir_at(root))[key_of(job.choice.chosen)]) == 1


def test_a_load_attempt_creates_no_folder(tmp_path, root):
    job = Job(root, compiled=False)
    load_attempt = LoadAttempt(dir_at(tmp_path / "elsewhere"), job.choice.chosen, "/output")
    load_attempt.run = run_name(1, "0000aaaa")
    load_attempt.begin()
    load_attempt.failed(NAN)
    load_attempt.passed()
    assert not (tmp_path / "elsewhere").exists()


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"2 /output",  # of an earlier version
        json.dumps({"output": "/output", "deaths": [{"run": "x"}] * 2, "began": None}).encode(),
    ],
)
def test_an_unreadable_load_attempt_refuses_no_checkpoint(root, content):
    """Nor does it let one go."""
    Job(root).fails()
    (root / FOLDER / left(root)[1]).write_bytes(content)
    assert set(load_attempts(dir_at(root)).values()) == {None} and choose(root).chosen.step == 15
    save(root, 20, world=1)
    assert kept(root) == [20, 15]
    Job(root, named="net_rank_0-2_5").passes()
    assert not any(name.startswith("trial") for name in left(root))


@pytest.mark.parametrize("word", [b"", b'{"explained": "", "cause": 7, "host": "", "rank": 0}'])
def test_an_unreadable_failure_record_does_not_count(root, word):
    job = Job(root).fails(NAN)
    (root / FOLDER / f"death-{job.load_attempts[0].run}-rank_00000.json").write_bytes(word)
    assert list(load_attempts(dir_at(root)).values()) == [()]


@pytest.mark.parametrize("operation", ["write", "rename", "sync", "remove"])
def test_a_failing_disk_ends_only_the_load_attempt(root, operation):
    Job(root).fails()
    directory = CheckpointDir(failing("", operation), str(root))
    load_attempt = LoadAttempt(directory, choose(root).chosen, "/output")
    load_attempt.run = run_name(9, "0000aaaa")
    for work in (load_attempt.begin, load_attempt.passed, lambda: load_attempt.failed(NAN)):
        try:
            work()
        except OSError:
            continue
    load_attempt._stop_capturing()
    assert choose(root, limit=3).chosen.step == 15


# ---- retention -----------------------------------------------------------------------------------


def test_an_unsuspected_checkpoint_is_removed_when_the_training_continues_from_another(root):
    """One job failed right after it had loaded step 15, and the next one loads a newer checkpoint,
    which another job has saved."""
    Job(root).fails()
    later = run_name(2, "0000bbbb")
    for step in (20, 25):
        save(root, step, world=1, run=later, suffix=1)
    assert kept(root) == [25, 15]
    # of a training that knows nothing of the first one
    Job(root, output="/another").passes()
    assert kept(root) == [25, 15]
    Job(root).passes()
    assert kept(root) == [25]
    assert left(root) == []
