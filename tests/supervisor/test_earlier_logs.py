"""supervisor/evidence.py: the logs of a start are moved out of the way of the next one; what is not
known to be one stays."""

import os
from functools import partial

import pytest

from mindresume.supervisor.evidence import EARLIER, keep_logs

NAMES = ("worker_0.log", "worker_1.log", "scheduler.log")
NOON = 1795435200.0
keep = partial(keep_logs, node=0, start=1, started=NOON, kept=5)


@pytest.fixture
def logs(tmp_path):
    """Returns the paths of the logs of a start."""
    for name in NAMES:
        (tmp_path / name).write_text(name)
    return [str(tmp_path / name) for name in NAMES]


def earlier(folder):
    return sorted(os.listdir(folder / EARLIER))


def test_the_logs_are_moved_with_what_the_launcher_writes_beside_them(tmp_path, logs):
    (tmp_path / "msrun_stderr.log").touch()
    (folder,) = keep(logs)
    assert folder == str(tmp_path / EARLIER / "20261123T120000-node_0-start_1")
    assert sorted(os.listdir(folder)) == sorted([*NAMES, "msrun_stderr.log"]) and os.listdir(
        tmp_path
    ) == [EARLIER]


def test_a_log_that_is_still_written_keeps_its_writer(tmp_path, logs):
    with open(logs[0], "a") as file:
        (folder,) = keep(logs)
        file.write(" and more")
    with open(os.path.join(folder, NAMES[0])) as file:
        assert file.read() == f"{NAMES[0]} and more"


def test_what_is_not_known_to_be_a_log_of_msrun_stays(tmp_path, logs):
    others = [tmp_path / name for name in ("train.log", "worker.log", "worker_0.txt")]
    for other in others:
        other.touch()
    (tmp_path / "msrun_stderr.log").touch()
    keep([*map(str, others), *logs, str(tmp_path / "worker_7.log")], is_alone=False)
    assert sorted(os.listdir(tmp_path)) == sorted(
        [EARLIER, "msrun_stderr.log", *(other.name for other in others)]
    )


def test_the_logs_of_the_oldest_starts_of_this_node_are_removed(tmp_path, logs):
    keep(logs, node=1)
    (tmp_path / EARLIER / "20200101T000000-node_0-start_1").mkdir()
    (tmp_path / EARLIER / "20200101T000000-node_0-start_1" / "notes.txt").touch()
    for start in range(1, 4):
        for path in logs:
            open(path, "w").close()
        keep(logs, start=start, started=NOON + start, kept=2)
    assert earlier(tmp_path) == [
        "20200101T000000-node_0-start_1",
        "20261123T120000-node_1-start_1",
        "20261123T120002-node_0-start_2",
        "20261123T120003-node_0-start_3",
    ]


def test_nothing_is_moved_if_nothing_is_kept_or_there_are_no_logs(tmp_path, logs):
    assert keep(logs, kept=0) == () == keep([]) == keep(
        [str(tmp_path / "worker_9.log")]
    ) and EARLIER not in os.listdir(tmp_path)


def test_an_error_of_one_file_does_not_keep_the_others(tmp_path, logs):
    (folder,) = keep(logs)
    os.remove(os.path.join(folder, NAMES[0]))
    os.mkdir(os.path.join(folder, NAMES[0]))  # a file cannot take its place
    for path in logs:
        open(path, "w").close()
    with pytest.raises(OSError, match=NAMES[0]):
        keep(logs)
    assert not os.path.exists(logs[1]) and os.path.exists(logs[0])
