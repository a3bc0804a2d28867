"""The picture: what it shows is counted in the figure itself, and it is drawn for every history."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from training_logs import RUNS, Log, Training, two_attempts

from mindresume.errors import ConfigError
from mindresume.report import chart
from mindresume.report.accounting import accounts_of
from mindresume.report.log_parser import Clock, parse
from mindresume.report.runs import Losses, Origin, RunAttempt, attempts_of


def accounts(*written):
    recorded = [events for log in written if isinstance(log, Training) for events in log.recorded]
    return accounts_of(
        attempts_of(
            recorded,
            (found for log in written for line in log.lines for found in parse(line, Clock())),
        )
    )


def labelled(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_marks_stand_where_things_happened():
    above, below = chart.draw(accounts(two_attempts())).axes
    lines = labelled(above)
    assert list(lines["failed here (number of the attempt)"].get_xdata()) == [8]
    assert list(lines["resumed after this step"].get_xdata()) == [5]
    assert list(lines["committed: complete on all ranks"].get_xdata()) == [5, 10]
    assert [patch.get_x() for patch in above.patches] == [5] and [
        patch.get_width() for patch in above.patches
    ] == [3]
    lost, kept = above.lines[:2]
    assert (list(lost.get_xdata()), lost.get_color()) == ([6, 7, 8], chart.LOST)
    assert (list(kept.get_xdata()), kept.get_color()) == (list(range(1, 11)), chart.KEPT)
    assert [text.get_text() for text in above.texts] == ["1"]
    assert below.get_xlabel() == "seconds since the first start" and below.get_xlim() == (0, 55)


def test_the_loss_curve_spans_all_attempts_and_is_cut_where_steps_go_back():
    steps, values = chart.kept_curve(accounts(two_attempts()))
    assert list(steps) == list(range(1, 11)) and np.isfinite(values).all()
    steps, values = chart.kept_curve(
        accounts(two_attempts(), Training().start(90).fresh(91).run(92, RUNS[2]).steps(95, 1, 2))
    )
    assert list(steps[-3:]) == [10, 1, 2] and np.isnan(values[-3])


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
def test_any_history_is_drawn(log):
    figure = chart.draw(accounts(log))
    assert chart.png(figure).startswith(b"\x89PNG\r\n\x1a\n")
    ElementTree.fromstring(chart.svg(figure))


def test_the_svg_stands_alone_and_is_the_same_each_time():
    first, second = (chart.svg(chart.draw(accounts(two_attempts()))) for _ in range(2))
    assert first == second
    root = ElementTree.fromstring(first)
    assert (
        root.tag.endswith("svg")
        and "viewBox" in root.attrib
        and "width" not in root.attrib
        and "height" not in root.attrib
    )
    links = re.findall(r'(?:href|url)[="(]+([^")]*)', first)
    assert (
        links
        and all(link.startswith("#") for link in links)
        and "<text" not in first
        and "<script" not in first
    )


def test_millions_of_steps_are_few_points():
    count = 1_000_000
    losses = Losses(
        np.arange(1, count + 1), np.linspace(6, 1, count), np.arange(count) + 10.0, np.ones(count)
    )
    attempt = RunAttempt(
        1,
        0.0,
        count + 10.0,
        "failed",
        first_step=1,
        last_step=count,
        losses=losses,
        origin=Origin(is_fresh=True),
    )
    figure = chart.draw(accounts_of([attempt]))
    assert sum(len(line.get_xdata()) for line in figure.axes[0].lines) < 2 * chart.POINTS
    assert len(chart.svg(figure)) < 1_000_000


def test_many_marks_are_spread():
    spread = chart.spread(list(range(0, 10_000_000, 50)), float)
    assert len(spread) <= chart.MARKS + 1 and max(np.diff(spread)) < 3 * 10_000_000 / chart.MARKS
    assert chart.spread([5, 10], float) == [5, 10]


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_the_error_without_a_package_names_it_and_the_extra(monkeypatch, missing):
    monkeypatch.setattr(
        chart.importlib.util, "find_spec", lambda name: None if name == missing else object()
    )
    with pytest.raises(
        ConfigError,
        match=rf"needs {missing}, .*pip install 'mindresume\[report\]' \(or {missing} alone",
    ):
        chart.check_installed()
