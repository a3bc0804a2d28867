"""The data of the interactive charts: what was recorded, few points, nothing left out without a
number."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_folders import STORAGE
from training_logs import RUNS, Log, Training, history, two_attempts

from mindresume.events import PHASES
from mindresume.report import page
from mindresume.report.accounting import REDONE, Seconds, accounts_of
from mindresume.report.builder import Report, build_report
from mindresume.report.page import MARKS, POINTS, chart_data, thinned
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
    assert [(row["kind"], row["attempt"], row["steps"]) for row in found["curves"]] == [
        ("kept", 1, [1, 2, 3, 4, 5]),
        ("kept", 2, [6, 7, 8, 9, 10]),
        ("lost", 1, [6, 7, 8]),
    ]
    first = found["curves"][0]
    assert first["values"] == [5.99, 5.98, 5.97, 5.96, 5.95]
    assert first["times"] == [12, 13, 14, 15, 16]
    assert found["areas"] == [[5, 8]] and found["losses"] == {"shown": 13, "total": 13}


def test_the_marks_stand_where_things_happened(tmp_path):
    marks = chart_data(written(tmp_path, two_attempts()))["marks"]
    assert [
        (row["kind"], row["attempt"], row["step"], row["at"], row["loss"]) for row in marks
    ] == [
        ("committed", 1, 5, 16.5, None),
        ("committed", 2, 10, 54.5, None),
        ("failed", 1, 8, 19.5, 5.92),
        ("resumed", 2, 5, None, 5.95),
    ]
    assert marks[2]["text"][0] == "tip.failed"
    assert marks[3]["text"][1]["source"] == ["source.disk", {}]


def test_the_timeline_has_each_span_and_each_phase(tmp_path):
    found = chart_data(written(tmp_path, two_attempts()))
    spans = found["spans"]
    kinds = ["startup", "productive", "lost", "downtime", "startup", "productive", "shutdown"]
    assert [span[0] for span in spans] == kinds
    assert [span[1] for span in spans] == [1, 1, 1, 1, 2, 2, 2]
    assert [span[2] for span in spans] == [0, *(span[3] for span in spans[:-1])]
    assert spans[-1][3] == found["length"] == 55
    assert sum(row[3] - row[2] for row in found["phases"]) == pytest.approx(30, abs=1.5)


def test_saves_to_memory_are_marks(tmp_path):
    report = written(tmp_path, history(attempts=3, memory=3, sources="md"))
    found = chart_data(report)
    copies = [save.step for row in report.attempts for save in row.saves.memory]
    assert [mark["step"] for mark in of_kind(found["marks"], "memory")] == copies
    total = len(copies) + sum(len(row.saves.disk) for row in report.attempts)
    assert len(copies) > 100 and found["saves"] == {"shown": total, "total": total}
    assert [mark["text"][1]["source"][0] for mark in of_kind(found["marks"], "resumed")] == [
        "source.memory",
        "source.disk",
    ]


@pytest.mark.parametrize(
    "log",
    [
        Training().start(0).fresh(1).run(2, RUNS[0]).save(9, 5),
        Log().loss(1, 1, "nan"),
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
    steps = np.arange(1, count + 1)
    attempt = RunAttempt(
        1,
        0.0,
        count + 10.0,
        "failed",
        last_step=count,
        losses=Losses(steps, values, steps + 9.0, np.ones(count)),
        origin=Origin(is_fresh=True),
        saves=Saves(
            tuple(Save(step, step + 10.0, 0.1, 1.0, 10**9, True) for step in range(100, count, 100))
        ),
    )
    report = report_of(attempt)
    found = chart_data(report)
    (curve,) = found["curves"]
    shown = curve["steps"]
    assert found["losses"] == {"shown": len(shown), "total": count} and len(shown) <= POINTS
    assert 99.0 in curve["values"] and 123_457 in shown and (shown[0], shown[-1]) == (1, count)
    assert found["saves"]["shown"] <= MARKS + 1 and found["saves"]["total"] == count // 100 - 1
    assert len(page.html(report)) < 800_000


def test_the_style_colours_each_kind_and_each_phase():
    style = page.STYLE
    for name in (*PHASES.values(), REDONE):
        assert f".p-{name.replace(' ', '-')}" in style
    for name in Seconds.__dataclass_fields__:
        assert f".k-{name}" in style


VALUES = st.lists(st.floats(width=32), max_size=300).map(np.array)


@given(VALUES, st.integers(4, 60))
def test_ends_and_extremes_are_kept(values, most):
    kept = thinned(values, most)
    assert len(kept) <= most and (np.diff(kept) > 0).all()
    if len(values):
        assert kept[0] == 0 and kept[-1] == len(values) - 1
    finite = values[np.isfinite(values)]
    if len(finite):
        assert {finite.min(), finite.max()} <= set(values[kept])


def test_interval_typical_step_and_odd_values():
    found = Losses(np.array([5, 10, 15, 20]), seconds=np.array([9.0, 1, 1, 2]))
    assert (found.interval, found.typical) == (5, 1.5)
    assert (Losses().interval, Losses().typical) == (1, 0.0)
    assert Losses(values=np.array([1, np.nan, np.inf, 2])).not_finite == 2
