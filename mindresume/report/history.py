"""Events -> lives. What a log does not say is inferred here, and only here; each field says from what."""
from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mindresume.report import logs
from mindresume.report.logs import Event
from mindresume.report.losses import Losses

FINISHED, ASKED, DIED, RUNNING, UNKNOWN = "finished", "asked to leave", "died", "running", "unknown"
NOTHING_LEFT = "nothing left to train"
NORMAL = (FINISHED, ASKED, NOTHING_LEFT)         # ends after which nothing is lost


@dataclass(frozen=True)
class Save:
    """One save of one life, as the rank tells it whose log is read. ``stopped``: seconds in which the training stood still: the
    whole save, or of one in the background the copy. ``seconds``: until it was written, None if that is not said.
    ``committed``: all ranks were complete. ``problem``: why it was not saved or not committed."""
    step: int
    time: float
    stopped: float = 0.0
    seconds: float | None = None
    committed: bool = False
    background: bool = False
    problem: str = ""

    @property
    def done(self) -> bool:
        """Whether this rank wrote it, or handed it to the writer in the background."""
        return self.seconds is not None or self.committed or self.background


@dataclass(frozen=True)
class Refused:
    step: int | None
    reason: str


@dataclass(frozen=True)
class Life:
    """One start of the job until its end.

    ``started``: when the trainer was made; ``cut``: the log begins later, so it is the first line there is. ``ended``: the last
    line that says something of the training; a process that is killed writes none. ``end``: see above; DIED where another start
    follows without a word of an end. ``resumed_from``: step of the checkpoint, in the steps of the lives before; None: from the
    beginning, or (``inferred``) there is no word of it. ``base``: the step behind which this life counts on: not the same after
    a change of the batch size. ``scale``: its steps for one of the lives before.
    ``first_step``, ``last_step``: done in this life; None if none was.
    """
    number: int
    started: float
    ended: float
    end: str
    why: str = ""
    cut: bool = False
    run: str | None = None
    fresh: bool = False
    resumed_from: int | None = None
    inferred: bool = False
    source: str = ""
    base: int = 0
    scale: float = 1.0
    first_step: int | None = None
    last_step: int | None = None
    last_card: bool = False
    saves: tuple[Save, ...] = ()
    skipped: int = 0
    refused: tuple[Refused, ...] = ()
    losses: Losses = field(default_factory=Losses)


def lives_of(events: Iterable[Event]) -> tuple[Life, ...]:
    """In order of time. A life begins where the trainer is made, and where a log that has no such line speaks of a choice or a
    run for the second time."""
    books: list[_Book] = []
    for event in events:
        if event.kind == logs.ERROR:
            if books:
                books[-1].take(event)
            continue
        if not books or books[-1].is_over_with(event):
            books.append(_Book(event))
        books[-1].take(event)
    for index, book in enumerate(books):
        for step in book.late:                                      # committed by this life for one before it
            owner = next((other for other in reversed(books[:index]) if step in other.saves), None)
            if owner is not None:
                owner.saves[step] = replace(owner.saves[step], committed=True, problem="")
    return tuple(book.closed(number, last=book is books[-1]) for number, book in enumerate(books, start=1))


def with_losses(lives: Sequence[Life], events: Iterable[Event]) -> tuple[Life, ...]:
    """The same lives with the loss of another rank, where that rank has one: with pipeline stages that of the last rank is the
    true one. Its lines are put into a life by their time."""
    books, starts = [_Curve() for _ in lives], [life.started for life in lives]
    for event in events:
        index = bisect_right(starts, event.time) - 1
        if event.kind == logs.LOSS and index >= 0:
            books[index].add(event)
    return tuple(replace(life, losses=book.closed()) if life.last_card and book.steps else life
                 for life, book in zip(lives, books, strict=True))


def settled(life: Life, claims: Mapping[str, bool | None] | None, error: Event | None) -> Life:
    """The last life, of which the log does not say how it ended. ``claims``: on the folder of checkpoints, by run: does the
    process live (None: it is on another machine); None if there is no such folder. ``error``: the last words of a worker."""
    if life.end != UNKNOWN:
        return life
    claimed = claims is not None and life.run in claims
    alive = claims[life.run] if claimed else None
    if alive:
        return replace(life, end=RUNNING)
    if error is not None:
        return replace(life, end=DIED, why=error.text)
    if alive is False:
        return replace(life, end=DIED, why="its process is gone, and it did not say why")
    if life.run is not None and claims is not None and not claimed:
        return replace(life, end=DIED, why="it gave its claim on the folder back without a word of an end: an error or a signal")
    return life


class _Curve:
    """Loss lines of one life. Steps rise; what another file repeats is passed over."""

    def __init__(self) -> None:
        self.steps, self.rows = array("q"), [array("d") for _ in range(3)]

    def add(self, event: Event) -> None:
        if not self.steps or event.step > self.steps[-1]:
            self.steps.append(event.step)
            for row, value in zip(self.rows, (event.value, event.time, event.seconds), strict=True):
                row.append(value)

    def closed(self) -> Losses:
        return Losses(np.frombuffer(self.steps, np.int64) if self.steps else np.empty(0, np.int64),
                      *(np.frombuffer(row) if row else np.empty(0) for row in self.rows))


class _Book:
    """What is known of one life while its events come."""

    def __init__(self, first: Event):
        self.started, self.ended, self.cut = first.time, first.time, first.kind != logs.START
        self.run: str | None = None
        self.choice: Event | None = None
        self.continues: Event | None = None
        self.normal: str | None = None
        self.why, self.last_card, self.skipped, self.leaving = "", False, 0, 0
        self.late: list[int] = []
        self.saves: dict[int, Save] = {}
        self.refused: list[Refused] = []
        self.curve = _Curve()

    def is_over_with(self, event: Event) -> bool:
        """Whether the event is of another life."""
        if event.kind == logs.START:
            return True
        if event.kind in (logs.FRESH, logs.RESUME):
            return self.choice is not None
        if event.kind == logs.REFUSED:
            return self.choice is not None or self.run is not None or len(self.curve.steps) > 0
        return event.kind == logs.RUN and self.run not in (None, event.text)

    def take(self, event: Event) -> None:
        kind, step = event.kind, event.step
        self.ended = max(self.ended, event.time)
        if kind == logs.LOSS:
            self.curve.add(event)
        elif kind in (logs.FRESH, logs.RESUME):
            self.choice = event
        elif kind == logs.CONTINUES:
            self.continues = event
        elif kind == logs.REFUSED:
            self.refused.append(Refused(step, event.text))
        elif kind == logs.RUN:
            self.run = event.text
        elif kind == logs.LAST_CARD:
            self.last_card = True
        elif kind == logs.SKIPPED:
            self.skipped += 1
        elif kind == logs.LATE:
            self.late.append(step)
        elif kind in (logs.SAVING, logs.SAVED, logs.COMMITTED, logs.FAILED, logs.UNCOMMITTED):
            self._save(event)
        else:
            self._ends(event)

    def _ends(self, event: Event) -> None:
        if event.kind == logs.OVER:
            self.normal = self.normal or (ASKED if self.leaving else FINISHED)
        elif event.kind == logs.COMPLETE:
            self.normal, self.why = NOTHING_LEFT, event.text
        elif event.kind == logs.LEFT:
            self.normal, self.why = ASKED, event.text
        elif event.kind == logs.LEAVING:
            self.leaving = event.step
        elif event.kind == logs.ERROR:
            self.why = self.why or event.text

    def _save(self, event: Event) -> None:
        if event.step is None:                                          # a failure whose step is not said
            return
        save = self.saves.get(event.step, Save(event.step, event.time))
        if event.kind == logs.SAVING:
            save = replace(save, stopped=event.value, background=True)
        elif event.kind == logs.SAVED:
            save = replace(save, seconds=event.value, problem="", stopped=save.stopped if save.background else event.value)
        elif event.kind == logs.COMMITTED:
            save = replace(save, committed=True, problem="")
        else:
            save = replace(save, problem=event.text)
        self.saves[event.step] = save

    def closed(self, number: int, last: bool) -> Life:
        losses, choice = self.curve.closed(), self.choice
        own = [step for step, save in self.saves.items() if save.done]
        base, scale = self._base(losses)
        last_step = max((int(losses.steps[-1]) if len(losses) else 0), self.leaving, *own, 0) or None
        end = self.normal or (UNKNOWN if last else DIED)
        resumed = None
        if choice is not None and choice.kind == logs.RESUME:
            resumed = choice.step if choice.step is not None else base
        elif choice is None and base:
            resumed = base
        return Life(number, self.started, self.ended, end, self.why, self.cut, self.run,
                    choice is not None and choice.kind == logs.FRESH, resumed, choice is None,
                    choice.text if choice is not None and choice.kind == logs.RESUME else "", base, scale,
                    base + 1 if last_step is not None else None, last_step, self.last_card,
                    tuple(self.saves[step] for step in sorted(self.saves)), self.skipped, tuple(self.refused), losses)

    def _base(self, losses: Losses) -> tuple[int, float]:
        """The step behind which this life goes on, and how many of its steps make one of the lives before."""
        if self.continues is not None:
            before = self.continues.value
            return self.continues.step, self.continues.step / before if before else 1.0
        if self.choice is not None and self.choice.step is not None:
            return self.choice.step, 1.0
        if self.choice is not None or not len(losses):
            return 0, 1.0
        return max(int(losses.steps[0]) - losses.interval, 0), 1.0
