"""Numbers of a training for Prometheus, made of its events (docs/monitoring.md).

    events ─▶ ``fold`` ─▶ {(metric, value of its label): number} ─▶ a file for Prometheus

Rank 0 writes ``mindresume_...`` and the supervisor of each node ``mindresume_node_...``, each into
a file of its own, which node_exporter's textfile collector reads. Counters go on where the file of
an earlier process of the same training ends.

A thread writes the file, every ``EVERY`` seconds and after an error. ``handle`` only changes
numbers in memory, so neither a step nor the watch of a job ever waits for a disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from mindresume import events as ev
from mindresume import runtime
from mindresume.errors import ConfigError
from mindresume.events import Emit, Event, Handler, ignore, warning

EVERY = 15.0  # seconds between two writes of a file
PATIENCE = 10.0  # seconds for which the end waits for the last write
PREFIX = "mindresume_"
SOURCES = " <- "

# {name{label=its values}: meaning <- which events change it}. A name that ends with _total is a
# counter, any other a gauge. Of an event: its kind, "." and one of its fields, its ``time`` or 0 or
# 1; "/" and the value of the label, which may be a field, too.
METRICS = {
    "running": "1 while the training runs, 0 after its end",
    "seen_timestamp_seconds": "When rank 0 last wrote these numbers",
    "opened_timestamp_seconds": "When this run acquired the checkpoint folder <- run_opened.time",
    "step": "Last finished step",
    "step_seconds": "Mean time of the steps between the last two writes of these numbers",
    "save_interval_steps": "Configured steps between two saves to disk <- run_opened.save_steps",
    "committed_step": "Last step that is complete on all ranks <- save_committed.step",
    "committed_timestamp_seconds": "When that step was committed <- save_committed.time",
    "checkpoint_bytes": "Size of that checkpoint, all ranks together <- save_committed.size_bytes",
    "checkpoint_free_bytes": "Free space of the disk with the checkpoint folder",
    "saves_total": "Saves that rank 0 has written <- save_written.1",
    "save_bytes_total": "Bytes of these saves <- save_written.size_bytes",
    "save_seconds_total": "Time in which they were written <- save_written.write_seconds",
    "save_stall_seconds_total": "Time for which the training waited for them <- "
    "save_written.stall_seconds",
    "save_failures_total": "Saves of rank 0 that failed <- save_failed.1",
    "saves_skipped_total": "Saves that were due while the one before was being written <- "
    "save_skipped.1",
    "saves_abandoned_total": "Saves that were not complete on all ranks <- save_abandoned.1",
    "uploaded_step": "Last step that is complete in the object store <- upload_finished.step",
    "upload_failures_total": "Uploads, or removals there, that failed <- upload_failed.1",
    "memory_step": "Last step that rank 0 has saved in memory <- tier_saved.step",
    "memory_timestamp_seconds": "When it was saved there <- tier_saved.time",
    "memory_failures_total": "Saves in memory that failed <- tier_refused.1",
    "partner_step": "Last step of the node of rank 0 that its partner has in memory <- "
    "partner_copied.step",
    "partner_timestamp_seconds": "When it was sent <- partner_copied.time",
    "loads_total{source=disk|memory}": "Checkpoints that a start took, by where they were <- "
    "checkpoint_selected.1/{source}",
    "fetches_total{source=bucket|partner}": "Checkpoints that a start fetched before that <- "
    "checkpoint_fetched.1/bucket partner_fetched.1/partner",
    "fresh_starts_total": "Starts without a checkpoint <- fresh_start.1",
    "refused_checkpoints_total{reason=file|other}": "Checkpoints that a start did not take: a file "
    "is missing or damaged, or another reason <- candidate_refused.1/{why}",
    "redone_steps_total": "Steps that were lost and are trained again <- resumed.lost_steps",
    "resume_proved": "1: the weights, and the steps that were trained again, are those of before; "
    "0: they differ, or nothing was compared, or not yet <- resumed.0 resume_proved.proved",
    "resume_differing_steps": "Steps trained again that differ from those of before <- resumed.0 "
    "resume_differs.1 resume_proved.differences",
    "node_running": "1 while the supervisor runs, 0 after its end",
    "node_seen_timestamp_seconds": "When the supervisor last wrote these numbers",
    "node_step": "Last step that all ranks of this node have finished",
    "node_save_failures_total": "Failed saves, all ranks of this node together",
    "node_seconds_total{activity=starting|joining|selecting|building|compiling|"
    "loading|first step|training|saving|inference|ending|ended|redoing|down}": "Time of the job "
    "by what its first rank on this node does; redoing: it trains steps that were trained before; "
    "down: there is no rank",
    "node_starts_total": "Starts of the command <- job_started.1",
    "node_failures_total{reason=died|hung}": "Failures that this node noticed: a rank died or hung "
    "<- rank_died.1/died hang_detected.1/hung",
    "node_recovery_seconds_total{phase=end|wait|start|import|join|select|build|"
    "load|compile|first step}": "Time of the phases of ends and starts; several names: they were "
    "not told apart <- job_ended.end_seconds/end job_restarted.delay_seconds/wait",
    "node_rank_slow": "1: a rank of this node makes the others wait <- job_started.0 "
    "slow_rank.is_slow",
    "node_save_slow": "1: a save takes longer than usual <- job_started.0 slow_save.is_slow",
    "node_fruitless_starts": "Starts in a row that left no later checkpoint <- "
    "job_restarted.fruitless_starts",
    "node_gave_up": "1: the job is not started again <- gave_up.1",
}

Numbers = dict[tuple[str, str], float]


def parts_of(row: str) -> tuple[str, str, list[str]]:
    """Returns the name, the label and its values of a key of METRICS; "" and [""] without label."""
    name, _, rest = row.rstrip("}").partition("{")
    label, _, values = rest.partition("=")
    return name, label, values.split("|")


def put(numbers: Numbers, name: str, value: float | None, label: str = "") -> None:
    """Sets a gauge, or adds to a counter, if the value is known."""
    if value is not None:
        before = numbers.get((name, label), 0.0) if name.endswith("_total") else 0.0
        numbers[name, label] = before + value


def fold(numbers: Numbers, event: Event, time_s: float) -> None:
    """Changes the numbers that an event tells of. ``time_s``: seconds since 1970."""
    facts = {"0": 0, "1": 1, "time": time_s, **vars(event)}
    if isinstance(event, ev.CandidateRefused):
        facts["why"] = "file" if event.file else "other"
    elif isinstance(event, ev.ResumeProved):
        facts["proved"] = int(event.tensors and not event.differences)
    elif isinstance(event, (ev.SlowRank, ev.SlowSave)):
        facts["is_slow"] = int(not event.has_ended)
    elif isinstance(event, ev.StartupMeasured):
        for phase, seconds in zip(event.phases, event.seconds, strict=True):
            put(numbers, "node_recovery_seconds_total", seconds, phase)
    for row, text in METRICS.items():
        for source in text.partition(SOURCES)[2].split():
            kind, _, rest = source.partition(".")
            value, _, label = rest.partition("/")
            if kind == event.kind:
                put(numbers, parts_of(row)[0], facts[value], label.format_map(facts))


class MetricsFile:
    """Reads a file that ``Metrics`` has written."""

    def __init__(self, path: str):
        self.path = path

    def collect(self) -> list[Any]:
        """Returns its metrics, as prometheus_client has them; none if it cannot be read."""
        from prometheus_client.parser import text_string_to_metric_families

        with suppress(OSError, ValueError):
            return list(text_string_to_metric_families(Path(self.path).read_text("utf-8")))
        return []


class Metrics(Handler):
    """Writes the numbers of rank 0 into its file.

    Args:
        folder: of the textfile collector; it exists.
        training: tells trainings apart, in all of their restarts: the label ``training``.
        writer: tells the processes of a training apart, in the name of the file.
        emit: receives a warning, once, if the file cannot be written any more.
        step: returns the last finished step; None: there is none.
        labels: those of every number besides ``training``.
    Raises:
        ConfigError: prometheus_client is not installed, or the file cannot be written.
    """

    own = ""  # what the names of its metrics begin with

    def __init__(
        self,
        folder: str,
        training: str,
        writer: str,
        emit: Emit,
        step: Callable[[], int | None],
        **labels: str,
    ):
        try:
            import prometheus_client
        except ImportError as error:
            raise ConfigError(
                "metrics need prometheus_client, which this Python does not have: pip install "
                "'mindresume[metrics]' (or prometheus_client alone)"
            ) from error
        self.client, self.emit, self.step = prometheus_client, emit, step
        digest = hashlib.sha256(training.encode()).hexdigest()[:16]
        self.path = os.path.join(folder, f"mindresume-{digest}-{writer}.prom")
        self.labels = {"training": training, **labels}
        self.rows = {
            row: parts_of(row) for row in METRICS if row.startswith("node_") == bool(self.own)
        }
        self.numbers = {
            (name, value): 0.0
            for name, _, values in self.rows.values()
            for value in values
            if name.endswith("_total")
        }
        for metric in MetricsFile(self.path).collect():
            for sample in metric.samples:
                label = "".join(sample.labels[key] for key in sample.labels.keys() - self.labels)
                self.numbers[sample.name.removeprefix(PREFIX), label] = sample.value
        self.put = partial(put, self.numbers)
        self.put(f"{self.own}running", 1)
        self._checkpoints = ""  # the folder that this run saves to
        self._before: tuple[int | None, float] = None, 0.0  # a step, and when it was seen
        # reentrant both: a signal handler can interrupt the thread that uses them
        self._lock = runtime.RLock()
        self._wake: runtime.SimpleQueue = runtime.SimpleQueue()  # True: write for the last time
        self._thread = runtime.Thread(target=self._work, name="mindresume-metrics", daemon=True)
        try:
            self._write()
            self._thread.start()
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"metrics cannot be written to {folder} (mindresume.metrics.textfile, "
                f"--metrics-textfile): {error}. Give a folder that exists and that this user may "
                "write, the one of node_exporter's --collector.textfile.directory"
            ) from error

    def handle(self, event: Event, time_s: float) -> None:
        with self._lock:
            fold(self.numbers, event, time_s)
            if isinstance(event, ev.RunOpened):
                self._checkpoints = event.checkpoint_dir
        if event.log_level == ev.ERROR:
            self._wake.put(False)

    def look(self) -> None:
        """Sets the numbers that no event tells. It may wait for a disk."""
        step, now, free = self.step(), runtime.monotonic(), None
        with suppress(OSError):
            free = shutil.disk_usage(self._checkpoints).free
        with self._lock:
            self.put("step", step)
            self.put("checkpoint_free_bytes", free)
            before, since = self._before
            if step is not None and step != before:
                if before is not None:
                    self.put("step_seconds", (now - since) / (step - before))
                self._before = step, now

    def collect(self) -> Iterator[Any]:
        """Yields all metrics for prometheus_client."""
        self.look()
        with self._lock:
            self.put(f"{self.own}seen_timestamp_seconds", runtime.time())
            found = sorted(self.numbers.items())
        for row, (name, label, _) in self.rows.items():
            meaning = METRICS[row].partition(SOURCES)[0]
            kind = "counter" if name.endswith("_total") else "gauge"
            metric = self.client.Metric(PREFIX + name.removesuffix("_total"), meaning, kind)
            for (other, value), number in found:
                if other == name:
                    own = {label: value} if label else {}
                    metric.add_sample(PREFIX + name, {**self.labels, **own}, number)
            yield metric

    def _write(self) -> None:
        self.client.write_to_textfile(self.path, self)  # a temporary file and a rename

    def _work(self) -> None:
        is_last = False
        while not is_last:
            with suppress(runtime.Empty):
                is_last = self._wake.get(timeout=EVERY)
            try:
                self._write()
            except Exception as error:
                self.emit(warning(f"metrics are not written: {error}; each later write tries"))
                self.emit = ignore

    def close(self) -> None:
        with self._lock:
            self.put(f"{self.own}running", 0)
        self._wake.put(True)
        self._thread.join(PATIENCE)
