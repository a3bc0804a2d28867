"""events/metrics.py: what events make of the numbers, and the file that Prometheus reads."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from queue import SimpleQueue

import pytest

from mindresume import events as ev
from mindresume.coordination import rank_heartbeat as hb
from mindresume.errors import ConfigError
from mindresume.events.metrics import METRICS, PREFIX, SOURCES, Metrics, fold, parts_of

prometheus = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

COMMITTED = ev.SaveCommitted(5, 2, 100)
PROVED = {"step": 10, "tensors": 4, "steps": 3, "expected_steps": 3}


def samples(path) -> dict[str, float]:
    """Returns {metric{value of its own label}: number} of the one file in a folder."""
    (file,) = Path(path).glob("*.prom")
    found = {}
    for family in text_string_to_metric_families(file.read_text(encoding="utf-8")):
        for sample in family.samples:
            own = [value for key, value in sample.labels.items() if key not in ("training", "node")]
            found[sample.name.removeprefix(PREFIX) + "".join(f"/{value}" for value in own)] = (
                sample.value
            )
    return found


def metrics(folder, training="job", step=lambda: None, emit=ev.ignore) -> Metrics:
    return Metrics(str(folder), training, "rank_0", emit, step)


def folded(*events: ev.Event) -> dict[str, float]:
    numbers: dict = {}
    for time_s, event in enumerate(events):
        fold(numbers, event, float(time_s))
    return {
        name + (f"/{label}" if label else ""): value for (name, label), value in numbers.items()
    }


@pytest.mark.parametrize(
    "events, expected",
    [
        (
            [COMMITTED, ev.SaveCommitted(10, 2, 120)],
            {"committed_step": 10, "committed_timestamp_seconds": 1, "checkpoint_bytes": 120},
        ),
        (
            [ev.SaveWritten(5, 50, 2.0, 0.5), ev.SaveWritten(10, 50, 3.0)],
            {
                "saves_total": 2,
                "save_bytes_total": 100,
                "save_seconds_total": 5,
                "save_stall_seconds_total": 0.5,
            },
        ),
        (
            [
                ev.CandidateRefused(7, "torn", "a.safetensors"),
                ev.CandidateRefused(6, "unhealthy"),
                ev.CheckpointSelected(5, 0, "run", "dir", "", source=ev.MEMORY),
            ],
            {
                "refused_checkpoints_total/file": 1,
                "refused_checkpoints_total/other": 1,
                "loads_total/memory": 1,
            },
        ),
        (
            [ev.Resumed(10, lost_steps=3), ev.ResumeProved(**PROVED)],
            {"redone_steps_total": 3, "resume_proved": 1, "resume_differing_steps": 0},
        ),
        (
            [ev.Resumed(10), ev.ResumeDiffers(11, "loss", "r", "1", "2")],
            {"resume_proved": 0, "resume_differing_steps": 1},
        ),
        (
            [ev.ResumeProved(**PROVED, differences=2)],
            {"resume_proved": 0, "resume_differing_steps": 2},
        ),
        ([ev.ResumeProved(10, 0)], {"resume_proved": 0, "resume_differing_steps": 0}),
        (
            [
                ev.JobStarted(1, 7),
                ev.RankDied(1, "h", 8, 0, -9),
                ev.JobEnded(1, 137, "", 9.0, 0.5),
                ev.JobRestarted(2, 2.0, "", 1),
                ev.JobStarted(2, 9),
                ev.StartupMeasured(2, 0, ("start", "import + join"), (0.5, 4.0)),
                ev.StartupMeasured(3, 0, ("start",), (0.5,)),
            ],
            {
                "node_starts_total": 2,
                "node_failures_total/died": 1,
                "node_recovery_seconds_total/end": 0.5,
                "node_recovery_seconds_total/wait": 2,
                "node_recovery_seconds_total/start": 1,
                "node_recovery_seconds_total/import + join": 4,
                "node_fruitless_starts": 1,
                "node_rank_slow": 0,
                "node_save_slow": 0,
            },
        ),
        (
            [ev.SlowRank(2, 3.0, 0.5, 40), ev.SlowSave(40, 60.0, 9.0)],
            {"node_rank_slow": 1, "node_save_slow": 1},
        ),
        ([ev.SlowRank(2, 0.5, 0.5, 60, has_ended=True)], {"node_rank_slow": 0}),
    ],
)
def test_numbers_of_events(events, expected):
    assert folded(*events) == expected


def test_every_event_and_field_of_the_table_exists():
    """What one of them misses would stay 0 for ever."""
    for row, text in METRICS.items():
        name, label, values = parts_of(row)
        assert bool(label) == (values != [""]) and re.fullmatch("[a-z_]+", name)
        for source in text.partition(SOURCES)[2].split():
            kind, value, own = re.fullmatch(r"(\w+)\.(\w+)(?:/(\S+))?", source).groups()
            event = ev.base._KINDS[kind]
            fields = {"0", "1", "time", "why", "proved", "is_slow", *event.__dataclass_fields__}
            assert value in fields, source
            assert (own is None) == (not label), source
            assert own is None or own.strip("{}") in fields or own in values, source


def test_activities_are_the_phases_of_a_rank():
    (row,) = (row for row in METRICS if row.startswith("node_seconds_total"))
    assert parts_of(row)[2] == [*hb.PHASES, "redoing", "down"]


def test_recovery_has_the_phases_of_a_start():
    (row,) = (row for row in METRICS if row.startswith("node_recovery"))
    assert parts_of(row)[2] == ["end", "wait", *[*ev.PHASES.values()][2:]]


def test_the_file_has_what_happened_until_the_end(tmp_path):
    steps = [4]
    made = metrics(tmp_path, step=lambda: steps[0])
    assert samples(tmp_path)["running"] == 1 and samples(tmp_path)["step"] == 4
    assert samples(tmp_path)["loads_total/disk"] == 0  # so that the first one is an increase
    made.handle(ev.RunOpened("r", str(tmp_path), "p", 2, save_steps=5), 50.0)
    made.handle(COMMITTED, 60.0)
    steps[0] = 8
    made.close()
    found = samples(tmp_path)
    assert (found["running"], found["step"], found["committed_step"]) == (0, 8, 5)
    assert found["committed_timestamp_seconds"] == 60 and found["save_interval_steps"] == 5
    assert found["step_seconds"] > 0 and found["checkpoint_free_bytes"] > 0


def test_a_failure_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("mindresume.events.metrics.EVERY", 3600.0)
    made, written = metrics(tmp_path), SimpleQueue()
    monkeypatch.setattr(made, "_write", lambda: written.put(dict(made.numbers)))
    made.handle(ev.SaveWritten(5, 1, 1.0), 0.0)
    made.handle(ev.SaveFailed(10, "disk full"), 1.0)
    assert written.get(timeout=600)["save_failures_total", ""] == 1 and written.empty()
    made.close()
    assert written.get(timeout=0)["running", ""] == 0


def test_counters_go_on_in_the_next_process(tmp_path):
    for _ in range(2):
        made = metrics(tmp_path)
        made.handle(ev.CheckpointSelected(5, 0, "run", "dir", ""), 0.0)
        made.close()
    assert samples(tmp_path)["loads_total/disk"] == 2


def test_files_of_trainings_and_writers_differ(tmp_path):
    for training in ("a/b", "a_b", '名 "\n'):
        metrics(tmp_path, training).close()
    Metrics(str(tmp_path), "a_b", "node_0", ev.ignore, int).close()
    assert len(os.listdir(tmp_path)) == 4  # no temporary file, either


def test_a_torn_or_foreign_file_is_written_anew(tmp_path):
    made = metrics(tmp_path)
    made.close()
    Path(made.path).write_bytes(b"\xff{{{ not metrics")
    metrics(tmp_path).close()
    assert samples(tmp_path)["running"] == 0


def test_a_folder_that_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="missing"):
        metrics(tmp_path / "missing")


def test_without_prometheus_client_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="pip install"):
        metrics(tmp_path)


def test_a_later_failure_is_said_once_and_writing_goes_on(tmp_path):
    folder, told = tmp_path / "metrics", []
    folder.mkdir()
    made = metrics(folder, emit=told.append)
    folder.rename(tmp_path / "gone")
    made.handle(ev.SaveFailed(5, "x"), 0.0)
    made.handle(ev.SaveFailed(6, "x"), 0.0)
    made.close()
    assert [type(event) for event in told] == [ev.Notice]
    assert samples(tmp_path / "gone")["running"] == 1


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_promtool_finds_nothing_wrong(tmp_path):
    made = metrics(tmp_path, '名 "\\\n')
    made.handle(COMMITTED, 0.0)
    made.close()
    text = Path(made.path).read_bytes()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
