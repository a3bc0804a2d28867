"""The data of the interactive charts: what was recorded, few points, nothing left out without a
number."""

import json

import numpy as np
import pytest
from rank_folders import STORAGE
from training_logs import RUNS, Log, Training, history, two_attempts

from mindresume.events import FAILED, PHASES, TrainingEnded
from mindresume.report import page
from mindresume.report.accounting import REDONE, Seconds, accounts_of
from mindresume.report.builder import Report, build_report
from mindresume.report.chart import MARKS, POINTS, chart_data
from mindresume.report.runs import Losses, Origin, RunAttempt, Save, Saves


def written(folder, log):
    log.write_all(folder) if isinstance(log, Training) else log.write(
        folder / "log/rank_0/info.log"
    )
    return build_report(STORAGE, str(folder), str(folder / "checkpoint"))


def report_of(*attempts):
    return Report("/run", ("/run",), (), 0, None, accounts_of(attempts), "/run/c", False, (), ())


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def test_the_curves_are_the_losses_of_each_attempt(tmp_path):
    found = chart_data(written(tmp_path, two_attempts()))
    (first, second), (lost,) = of_kind(found["curves"], "kept"), of_kind(found["curves"], "lost")
    assert (first["steps"], first["attempt"], second["steps"], second["attempt"]) == (
        [1, 2, 3, 4, 5],
        1,
        [6, 7, 8, 9, 10],
        2,
    )
    assert (lost["steps"], lost["attempt"]) == ([6, 7, 8], 1)
    assert first["values"] == [5.99, 5.98, 5.97, 5.96, 5.95] and first["times"] == [
        12,
        13,
        14,
        15,
        16,
    ]
    assert found["areas"] == [[5, 8]] and found["losses"] == {"shown": 13, "total": 13}


def test_the_marks_stand_where_things_happened(tmp_path):
    marks = chart_data(written(tmp_path, two_attempts()))["marks"]
    saves = [(mark["step"], mark["at"], mark["loss"]) for mark in of_kind(marks, "committed")]
    assert saves == [(5, 16.5, None), (10, 54.5, None)]
    (failed,), (resumed,) = of_kind(marks, "failed"), of_kind(marks, "resumed")
    assert (failed["step"], failed["loss"], failed["attempt"], failed["text"][0]) == (
        8,
        5.92,
        1,
        "tip.failed",
    )
    assert (resumed["step"], resumed["loss"], resumed["text"][1]["source"]) == (
        5,
        5.95,
        ["source.disk", {}],
    )


def test_the_timeline_has_each_span_and_each_phase(tmp_path):
    found = chart_data(written(tmp_path, two_attempts()))
    assert [(span[0], span[1]) for span in found["spans"]] == [
        ("startup", 1),
        ("productive", 1),
        ("lost", 1),
        ("downtime", 1),
        ("startup", 2),
        ("productive", 2),
        ("shutdown", 2),
    ]
    assert found["spans"][0][2] == 0 and found["spans"][-1][3] == found["length"] == 55
    assert all(
        before[3] == after[2]
        for before, after in zip(found["spans"], found["spans"][1:], strict=False)
    )
    assert found["phases"] and sum(row[3] - row[2] for row in found["phases"]) == pytest.approx(
        30, abs=1.5
    )


def test_a_failure_before_the_first_step_is_on_the_timeline_alone(tmp_path):
    log = two_attempts()
    log.start(60).event(61, TrainingEnded(FAILED, "out of memory")).start(80).resume(
        81, 10, RUNS[1]
    ).run(82, RUNS[2])
    marks = of_kind(chart_data(written(tmp_path, log.steps(90, 11, 12)))["marks"], "failed")
    assert [(mark["step"], mark["loss"], mark["attempt"], mark["text"][0]) for mark in marks] == [
        (8, 5.92, 1, "tip.failed"),
        (None, None, 3, "tip.failed_early"),
    ]
    assert marks[1]["at"] == 61 and marks[1]["text"][1]["reason"] == "rank 0: out of memory"


def test_saves_to_memory_are_marks(tmp_path):
    report = written(tmp_path, history(attempts=3, memory=3, sources="md"))
    found, copies = (
        chart_data(report),
        [save.step for row in report.attempts for save in row.saves.memory],
    )
    assert [mark["step"] for mark in of_kind(found["marks"], "memory")] == copies and len(
        copies
    ) > 100
    assert (
        found["saves"]["total"]
        == found["saves"]["shown"]
        == len(copies) + sum(len(row.saves.disk) for row in report.attempts)
    )
    assert [mark["text"][1]["source"][0] for mark in of_kind(found["marks"], "resumed")] == [
        "source.memory",
        "source.disk",
    ]


@pytest.mark.parametrize(
    "log",
    [
        Log().start(0),
        Training().start(0).fresh(1).run(2, RUNS[0]).save(9, 5),
        Log().loss(1, 1, "nan"),
        Log().start(0).loss(5, 1),
        Log().start(0).loss(5, 1, "inf").start(9).loss(11, 1, "nan"),
    ],
)
def test_any_history_has_data(tmp_path, log):
    report = written(tmp_path, log)
    json.loads(page.json_block(chart_data(report)))
    assert page.html(report)


def test_without_attempts_there_is_none(tmp_path):
    assert chart_data(report_of()) is None


def test_a_million_losses_are_a_small_page():
    count = 1_000_000
    values = np.linspace(6, 1, count) + np.random.default_rng(0).normal(0, 0.05, count)
    values[123_456], values[500_000] = 99.0, np.nan
    losses = Losses(np.arange(1, count + 1), values, np.arange(count) + 10.0, np.ones(count))
    saves = tuple(Save(step, step + 10.0, 0.1, 1.0, 10**9, True) for step in range(100, count, 100))
    report = report_of(
        RunAttempt(
            1,
            0.0,
            count + 10.0,
            "failed",
            first_step=1,
            last_step=count,
            losses=losses,
            origin=Origin(is_fresh=True),
            saves=Saves(saves),
        )
    )
    found = chart_data(report)
    (curve,) = found["curves"]
    assert len(curve["steps"]) <= POINTS and found["losses"] == {
        "shown": len(curve["steps"]),
        "total": count,
    }
    assert (
        99.0 in curve["values"]
        and 123_457 in curve["steps"]
        and (curve["steps"][0], curve["steps"][-1]) == (1, count)
    )
    assert found["saves"]["shown"] <= MARKS + 1 and found["saves"]["total"] == len(saves)
    assert len(page.html(report)) < 800_000


def test_the_style_colours_each_kind_and_each_phase():
    style = page.STYLE
    for name in (*PHASES.values(), REDONE):
        assert f".p-{name.replace(' ', '-')}" in style
    for name in Seconds.__dataclass_fields__:
        assert f".k-{name}" in style
