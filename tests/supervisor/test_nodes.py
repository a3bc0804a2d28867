"""supervisor/: the supervisors of two nodes, as real processes with one folder, start, end and
restart together."""

import os
import signal
import sys

import pytest

from mindresume.cli.run import run
from mindresume.errors import ConfigError

LINGER = "time.sleep(3600)"


def of(events, kind):
    return [event for event in events if event["event"] == kind]


@pytest.fixture
def nodes(tmp_path, supervised):
    """Returns a function that starts a program under the supervisors of two nodes, each in its own
    folder."""

    def start(program, *options, **more):
        return [
            supervised(tmp_path / f"node{node}").start(
                program,
                "--nodes",
                "2",
                "--node-rank",
                str(node),
                "--rendezvous",
                str(tmp_path / "meeting"),
                "--node-timeout",
                "60",
                *options,
                command=[
                    sys.executable,
                    "msrun.py",
                    "1",
                    "rank.py",
                    "{node_rank}/{nodes}/{workers}",
                ],
                **more,
            )
            for node in range(2)
        ]

    return start


def test_a_failure_on_one_node_ends_the_other_and_both_start_again(nodes):
    found = [
        job.wait()
        for job in nodes(f"""
if start == 2: finish()
beat.set(begun=5, written=5, committed=5)
beat.reach(6)
if "node1" in folder:
    sys.exit(9)
{LINGER}
""")
    ]
    for status, events in found:
        assert status == 0 and [event["generation"] for event in of(events, "nodes_joined")] == [
            1,
            2,
        ]
        assert [event["status"] for event in of(events, "job_ended")] == [9, 0]
    assert len(of(found[1][1], "rank_died")) == 1 and not of(found[0][1], "rank_died")


def test_a_wrong_setting_on_one_node_ends_the_job_on_all(nodes):
    found = [job.wait() for job in nodes(f"if 'node1' in folder: sys.exit(2)\n{LINGER}")]
    assert [status for status, _ in found] == [2, 2]
    assert all(len(of(events, "job_started")) == 1 for _, events in found)


def test_a_rollback_restarts_all_nodes_at_once_and_a_stop_of_the_guard_ends_all(nodes):
    """The first two starts resume from the same step: no progress."""
    found = [
        job.wait()
        for job in nodes(f"""
beat.set(resumed=5)
beat.reach(6)
if "node1" in folder:
    sys.exit(67 if start < 3 else 68)
{LINGER}
""")
    ]
    assert [status for status, _ in found] == [68, 68]
    for _, events in found:
        assert [event["status"] for event in of(events, "job_ended")] == [67, 67, 68]
    restarts = of(found[0][1], "job_restarted")
    assert [(it["delay_seconds"], it["fruitless_starts"]) for it in restarts] == [(0, 0)] * 2


def test_sigterm_to_one_node_ends_the_job_on_all(nodes):
    jobs = nodes(f"mark('up')\n{LINGER}", "--leave", "5")
    for job in jobs:
        job.pid("up")
    jobs[1].process.send_signal(signal.SIGTERM)
    assert [job.wait()[0] for job in jobs] == [143, 143]


def test_a_node_that_fails_after_its_training_waits_for_the_others_and_none_starts_again(nodes):
    found = [
        job.wait()
        for job in nodes("""
beat.set(outcome=1)
beat.enter(hb.ENDED)
if "node1" in folder:
    sys.exit(9)
""")
    ]
    assert [status for status, _ in found] == [9, 9]
    assert all(len(of(events, "job_started")) == 1 for _, events in found)


def test_the_rest_goes_on_with_fewer_nodes(tmp_path, supervised):
    status, events = supervised(tmp_path / "node1").run(
        "finish()",
        "--nodes",
        "2",
        "--node-rank",
        "1",
        "--min-nodes",
        "1",
        "--local-workers",
        "4",
        "--rendezvous",
        str(tmp_path / "meeting"),
        "--node-timeout",
        "1",
        command=["bash", "-c", "echo $0 > numbers", "{node_rank} {nodes} {workers}"],
    )
    (joined,) = of(events, "nodes_joined")
    assert status == 0 and (joined["nodes"], joined["missing"]) == ([1], [0])
    assert (tmp_path / "node1" / "numbers").read_text() == "0 1 4\n"


# ``mindresume``, except that no listing returns any more once there is a file ``hang``.
HANGING_DISK = """
import os, time
from mindresume.cli import main
from mindresume.storage.posix import PosixStorage
plain = PosixStorage.list
def list_(self, folder):
    while os.path.exists("hang"):
        open("hangs", "w").close()
        time.sleep(1)
    return plain(self, folder)
PosixStorage.list = list_
main()
"""


def test_the_death_of_a_local_rank_is_noticed_while_the_rendezvous_hangs(nodes):
    jobs = nodes(f"mark('up')\n{LINGER}", "--node-timeout", "3600", supervisor=("-c", HANGING_DISK))
    rank = jobs[0].pid("up")
    for job in jobs:
        job.mark("hang")
        job.wait_until((job.folder / "hangs").exists)
    os.kill(rank, signal.SIGKILL)
    jobs[0].wait_until(lambda: of(jobs[0].events(), "job_ended"))
    assert [of(jobs[0].events(), kind)[0]["status"] for kind in ("rank_died", "job_ended")] == [
        -9,
        137,
    ]
    for job in jobs:  # they hear of each other again
        (job.folder / "hang").unlink()
    jobs[1].wait_until(lambda: of(jobs[1].events(), "job_ended"))
    assert of(jobs[1].events(), "job_ended")[0]["status"] == 137


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rendezvous": "x", "node_rank": 2},
        {"rendezvous": "x", "min_nodes": 3},
        {"rendezvous": "x", "min_nodes": 1},
    ],
)
def test_wrong_numbers_are_refused(options):
    with pytest.raises(ConfigError):
        run(["true"], nodes=2, **options)
