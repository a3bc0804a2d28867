"""A training of the real Trainer under ``mindresume run`` is watched by a real Prometheus, through
the port and through node_exporter: its ranks are killed, the alert fires and clears, and every
query of the dashboard returns data."""

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from mindresume import events as ev
from mindresume.events.metrics import Metrics
from st.cpu_cluster.launch import free_port
from st.run_attempts import LIMIT, assert_no_process_left, committed_steps, events, run_beside
from st.supervised_run import number_of_starts, supervised, supervisor_events
from st.training_run import ROOT, Run

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
PROGRAMS = ("prometheus", "promtool", "prometheus-node-exporter")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
MONITORING = ROOT / "docs" / "monitoring"
LAST = 40
# what a training without a partner node and an object store does not have
ELSEWHERE = ("partner_", "uploaded_")


class Prometheus:
    """A Prometheus that scrapes a port of a supervisor and a node_exporter every second."""

    def __init__(self, folder: Path, port: int, textfile: Path):
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        exporter = f"127.0.0.1:{free_port()}"
        jobs = {"mindresume": f"127.0.0.1:{port}", "node": exporter}
        every = "1s"
        configuration = {
            "global": {"scrape_interval": every, "evaluation_interval": every},
            "rule_files": [str(MONITORING / "alerts.yml")],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [target]}]}
                for name, target in jobs.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        self.commands = [
            [
                "prometheus-node-exporter",
                "--collector.disable-defaults",
                "--collector.textfile",
                f"--collector.textfile.directory={textfile}",
                f"--web.listen-address={exporter}",
            ],
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
            ],
        ]

    @contextmanager
    def running(self) -> Iterator["Prometheus"]:
        with open(self.folder / "log", "w", encoding="utf-8") as log:
            processes = [
                subprocess.Popen(command, stdout=log, stderr=log) for command in self.commands
            ]
        try:
            yield self
        finally:
            for process in processes:
                process.terminate()
                process.wait()

    def get(self, what: str, **parameters: str) -> dict:
        with urlopen(f"http://{self.address}/api/v1/{what}?{urlencode(parameters)}") as answer:
            return json.load(answer)["data"]

    def query(self, text: str) -> list[dict]:
        return self.get("query", query=text)["result"]

    def value(self, text: str) -> float:
        (row,) = self.query(text)
        return float(row["value"][1])

    def firing(self) -> set[str]:
        """Returns the alerts that fire; empty while it starts."""
        with suppress(URLError):
            alerts = self.get("alerts")["alerts"]
            return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
        return set()


def until(reached: Callable[[], object], run: Run) -> None:
    """Waits; AssertionError with the end of the log after LIMIT seconds, or if the job has
    failed."""
    end = time.monotonic() + LIMIT
    while not reached():
        assert time.monotonic() < end and not run.process.poll(), run.launcher_log()[-3000:]
        time.sleep(0.1)


def kill_rank_1(run: Run, start: int) -> None:
    """Kills it as soon as start number ``start`` has it."""

    def killed() -> bool:
        if number_of_starts(run) < start:
            return False
        with suppress(LookupError, ProcessLookupError):
            os.kill(run.worker(1), signal.SIGKILL)
            return True
        return False

    until(killed, run)


def queries() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return [
        target["expr"].replace("$__rate_interval", "1h")
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def write_of_another_training(folder: Path) -> None:
    """Writes the numbers of a training with a partner node and an object store."""
    made = Metrics(str(folder), "elsewhere", "rank_0", ev.ignore, lambda: 9)
    for event in (
        ev.SaveCommitted(8, 2, 100),
        ev.PartnerCopied(8, 50, 1.0),
        ev.UploadFinished(4, "s3://bucket", 50),
    ):
        made.handle(event, time.time())
    made.close()


def test_an_alert_fires_and_clears_and_the_dashboard_has_data(whole_four, tmp_path):
    textfile, port = tmp_path / "textfile", free_port()
    textfile.mkdir()
    write_of_another_training(textfile)
    with Prometheus(tmp_path, port, textfile).running() as prometheus:
        run = supervised(
            run_beside(whole_four, tmp_path / "run", copied=False),
            *("--metrics-port", str(port), "--metrics-textfile", str(textfile)),
            MINDRESUME_METRICS_TRAINING="st",
            MINDRESUME_MEMORY_TIER_EVERY_STEPS="1",
        )
        kill_rank_1(run, 1)
        assert "MindresumeCrashLoop" not in prometheus.firing()
        kill_rank_1(run, 2)
        until(lambda: "MindresumeCrashLoop" in prometheus.firing(), run)
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            shown = answer.read()
        checked = subprocess.run(["promtool", "check", "metrics"], input=shown, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, b"")
        until(lambda: committed_steps(run), run)
        os.kill(run.worker(1), signal.SIGKILL)
        until(lambda: "MindresumeCrashLoop" not in prometheus.firing(), run)
        run.wait_for_success(LIMIT)
        assert_no_process_left(run)

        node = '{training="st", job="node"}'
        until(lambda: prometheus.value(f"mindresume_node_running{node}") == 0, run)
        assert prometheus.value(f"mindresume_running{node}") == 0
        assert prometheus.value(f"mindresume_committed_step{node}") == LAST
        proof = events(run, "resume_proved")[-1]
        assert prometheus.value(f"mindresume_resume_differing_steps{node}") == proof["differences"]
        assert prometheus.value(f"mindresume_node_starts_total{node}") == number_of_starts(run)
        died = len(supervisor_events(run, "rank_died"))
        assert prometheus.value(f"sum(mindresume_node_failures_total{node})") == died
        for query in queries():
            assert prometheus.query(query.replace("$training", ".+")), query
            if not any(name in query for name in ELSEWHERE):
                found = prometheus.query(query.replace("$training", "st"))
                assert found and not any(math.isnan(float(row["value"][1])) for row in found), query
