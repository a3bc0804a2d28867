"""Logs and event files for the tests: lines as mindformers writes them, event files by the real
handler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from mindresume import events as ev
from mindresume.events import Event
from mindresume.events.event_file import EventFile
from mindresume.report.log_reader import (
    LogLine,
    RecordedEvent,
    SupervisedStart,
    find_event_logs,
    parse,
    read_events,
)
from mindresume.report.runs import RunAttempt, attempts_of

ZERO = time.mktime((2026, 11, 21, 20, 0, 0, 0, 0, -1))  # when all of them begin
RUNS = [f"{number:04d}-0000aaaa" for number in range(1, 30)]
INFO = "log/rank_0/info.log"


def check(subject, **wanted) -> None:
    """Asserts that the fields of ``subject`` have these values."""
    assert {name: getattr(subject, name) for name in wanted} == wanted


class Log:
    """Lines of mindformers. ``at``: seconds since ZERO. ``printed``: in the form that a worker
    prints, else in that of info.log."""

    def __init__(self, printed: bool = False):
        self.lines: list[str] = []
        self.printed = printed

    def line(self, at: float, message: str, level: str = "INFO"):
        whole = int(at)
        stamp = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ZERO + whole))
            + f",{round((at - whole) * 1000):03d}"
        )
        self.lines.append(
            f"{stamp} - mindformers/home/output/log[mindformers/x.py:1] - {level} - {message}"
            if self.printed
            else f"[{level}] {stamp} [mindformers/x.py:1] work: {message}"
        )
        return self

    def start(self, at: float):
        return self.line(at, "..........Init Config..........")

    def over(self, at: float):
        return self.line(at, ".........Training Over!.............")

    def pipeline(self, at: float):
        return self.line(
            at, "pipeline stages: 2 > 1, the loss on the last card is valid.", "WARNING"
        )

    def loss(
        self,
        at: float,
        step: int,
        value: float | str = 4.0,
        seconds: float = 1.0,
        size: int = 10,
        sink: bool = False,
    ):
        value = value if isinstance(value, str) else f"{value:.6f}"
        loss = f"loss: {value}" if sink else f"loss:[{value}/{value}]"
        return self.line(
            at,
            f"{{ Epoch:[{(step - 1) // size + 1:3d}/  4], "
            f"step:[{(step - 1) % size + 1:5d}/{size:5d}], {loss}, per_step_time: "
            f"{int(seconds * 1000)}ms, lr: 1e-05, overflow cond: False, loss_scale: 1.0, "
            "global_norm: [0.8], train_throughput_per_npu: 0.000T",
        )

    def steps(self, at: float, first: int, last: int, seconds: float = 1.0):
        """Adds loss lines at the ends of the steps; the first of them begins at ``at``."""
        for step in range(first, last + 1):
            self.loss(at + (step - first + 1) * seconds, step, 6 - step / 100, seconds)
        return self

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)

    @property
    def parsed(self) -> list[LogLine]:
        return [row for line in self.lines for row in parse(line)]

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text, encoding="utf-8")
        return path


class Training(Log):
    """A log, and the events of rank 0. ``recorded``: of each attempt, which is one event file each.
    The first event of an attempt follows 0.1 s after its line in the log."""

    def __init__(self, printed: bool = False):
        super().__init__(printed)
        self.recorded: list[list[RecordedEvent]] = []

    def event(self, at: float, event: Event) -> Training:
        self.recorded[-1].append(RecordedEvent(round(ZERO + at, 3), event))
        return self

    def start(self, at: float, utc_offset: int | None = None) -> Training:
        super().start(at)
        self.recorded.append([])
        return self.event(at + 0.1, ev.TrainingStarted("node-0", 4711, 1, "0.1.0", utc_offset))

    def over(self, at: float) -> Training:
        super().over(at)
        return self.event(at, ev.TrainingEnded(ev.FINISHED))

    def fresh(self, at: float) -> Training:
        return self.event(
            at, ev.FreshStart("./output/checkpoint", "does not exist", "are initialised at random")
        )

    def resume(
        self,
        at: float,
        step: int,
        run: str | None,
        after: int | None = None,
        scale: float = 1.0,
        source: str = "disk",
    ) -> Training:
        """``after``: the step after which it counts on, if that is another one."""
        self.event(
            at,
            ev.CheckpointSelected(
                step, 1, run, "./output/checkpoint", "1 rank, every byte verified", source=source
            ),
        )
        return self.event(at, ev.ProgressRestored(step if after is None else after, 0, step, scale))

    def run(
        self, at: float, run: str, save_steps: int | None = None, memory_steps: int | None = None
    ) -> Training:
        return self.event(
            at,
            ev.RunOpened(
                run, "/home/output/checkpoint", "net_rank_0-1", 1, save_steps, memory_steps
            ),
        )

    def save(self, at: float, step: int, seconds: float = 0.5) -> Training:
        """Adds a save that ends at ``at``."""
        self.event(at - seconds, ev.SaveBegun(step)).event(
            at, ev.SaveWritten(step, 13_000_000, seconds, seconds)
        )
        return self.event(at, ev.SaveCommitted(step, 1, 13_000_000))

    def attempts(self, starts: Sequence[SupervisedStart] = ()) -> tuple[RunAttempt, ...]:
        """Returns the run attempts. ``starts``: what a supervisor recorded."""
        return attempts_of(self.recorded, self.parsed, (), starts)

    def write_all(self, output: Path) -> Training:
        """Writes the log and the event files of rank 0."""
        self.write(output / INFO)
        for recorded in self.recorded:
            record(output, 0, recorded)
        return self


def record(output: Path, rank: int, recorded: list[RecordedEvent]) -> Path:
    """Writes one event file by the real handler, and returns its path."""
    handler = EventFile(str(output), rank)
    for at, event in recorded:
        handler.handle(event, at)
    handler.close()
    return Path(handler.path)


def fail(output: Path, rank: int, at: float, reason: str, run: str | None = None) -> Path:
    """Writes the event file of another rank that failed."""
    opened = [RecordedEvent(ZERO + at - 1, ev.RunOpened(run, "/x", "net", 1))] if run else []
    return record(
        output, rank, [*opened, RecordedEvent(ZERO + at, ev.TrainingEnded(ev.FAILED, reason))]
    )


def two_attempts() -> Training:
    """Killed after step 8, of which 6 to 8 are lost; resumed from 5, finished at 10. 1 step takes 1
    s, compiling 9."""
    training = (
        Training()
        .start(0)
        .fresh(1)
        .run(2, RUNS[0])
        .loss(12, 1, 5.99, 10)
        .steps(12, 2, 5)
        .save(16.5, 5)
    )
    training.steps(16.5, 6, 8)
    training.start(40).event(
        41, ev.CandidateRefused(8, "the save never completed: no rank recorded what it wrote")
    )
    training.resume(41, 5, RUNS[0]).run(42, RUNS[1]).loss(50, 6, 5.94, 8).steps(50, 7, 10).save(
        54.5, 10
    )
    return training.over(55)


def history(
    attempts: int = 3,
    background: bool = True,
    every: int = 20,
    steps: int = 110,
    start: float = 30,
    down: float = 40,
    finished: bool = False,
    memory: int = 0,
    sources: str = "",
) -> Training:
    """Returns a training whose attempts each do ``steps`` steps of 2 s and fail 10 steps after a
    save; a save stops it for 0.5 s. It starts in ``start`` seconds, ``down`` seconds after a
    failure. ``memory``: steps between two saves in memory, which stop it for 0.1 s; ``sources``: a
    letter for each attempt but the first: m, it resumes from memory; d, from the disk."""
    training, at, step, copied = Training(), 0.0, 0, 0
    for number in range(attempts):
        training.start(at)
        source = "memory" if number and sources[number - 1 : number] == "m" else "disk"
        step = copied if source == "memory" else step
        training.fresh(at + 1) if not number else training.resume(
            at + 1, step, RUNS[number - 1], source=source
        )
        training.run(at + 2, RUNS[number])
        now, base = at + start, step
        for done in range(base + 1, base + steps + 1):
            now += 2
            training.loss(now, done, 4.0, 2.0)
            if memory and done % memory == 0:
                now, copied = now + 0.1, done
                training.event(now, ev.TierSaved(done, 13_000_000, 0.1, 0.3))
            if done % every == 0:
                now, step = now + 0.5, done
                training.event(now - 0.5, ev.SaveBegun(done))
                if background:
                    training.event(now, ev.SaveStaged(done, "x", 0.5))
                training.event(
                    now + (5 if background else 0),
                    ev.SaveWritten(done, 13, 5.5 if background else 0.5, 0.5),
                )
        if finished and number == attempts - 1:
            training.over(now + 1)
        at = now + down
    return training


def events_in(folder, *kinds):
    """Returns the events of the only event log in a folder, as the report reads them."""
    (log,) = find_event_logs([str(folder)])
    return [event for _, event in read_events(log) if not kinds or isinstance(event, kinds)]
