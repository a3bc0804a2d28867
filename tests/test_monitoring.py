"""docs/monitoring/: alerts and dashboard name metrics that exist, and the page explains every
alert."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from mindresume.events.metrics import METRICS, PREFIX, parts_of

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "monitoring"
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
}
QUERIES = [
    target["expr"]
    for panel in json.loads((FOLDER / "dashboard.json").read_text("utf-8"))["panels"]
    for target in panel["targets"]
]


def test_alerts_and_dashboard_use_metrics_and_labels_that_exist():
    labels = {PREFIX + name: label for name, label, _ in map(parts_of, METRICS)}
    texts = [*ALERTS.values(), *QUERIES, (DOCS / "monitoring.md").read_text("utf-8")]
    for name, selector in re.findall(
        r"\b(mindresume_[a-z_]+[a-z])\b(\{[^}]*\})?", "\n".join(texts)
    ):
        assert name in labels
        own = set(re.findall(r"(\w+)=~?\"", selector)) - {"training", "node"}
        assert own <= {labels[name]}, name


def test_every_metric_is_on_the_dashboard_or_in_an_alert():
    used = set(re.findall(r"mindresume_(\w+)", "\n".join([*ALERTS.values(), *QUERIES])))
    assert {parts_of(row)[0] for row in METRICS} - used == set()


@pytest.mark.parametrize("page", ["monitoring.md", "monitoring.zh.md"])
def test_the_page_explains_every_alert(page):
    rows = re.findall(r"(?m)^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", (DOCS / page).read_text("utf-8"))
    assert rows == [*ALERTS]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
@pytest.mark.parametrize("words", [("check", "alerts.yml"), ("test", "alerts_test.yml")])
def test_alerts_fire_and_clear(words):
    tested = yaml.safe_load((FOLDER / "alerts_test.yml").read_text("utf-8"))["tests"]
    cases = [case for test in tested for case in test["alert_rule_test"]]
    for name in ALERTS:
        assert {bool(case["exp_alerts"]) for case in cases if case["alertname"] == name} == {
            True,
            False,
        }
    command, file = words
    done = subprocess.run(["promtool", command, "rules", file], cwd=FOLDER, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
