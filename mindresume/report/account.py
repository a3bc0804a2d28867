"""Where steps and seconds of a training went. Arithmetic on lives, nothing else.

    time   |starting|------training------|~~lost~~|ending|  down  |starting|----training----|ending|
    life 1  ^ trainer is made             ^ checkpoint from which life 2 goes on    ^ life 2

A step is *lost* if a later life went on from a checkpoint before it: the training that there is now does not contain it.
"""
from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from mindresume.report.history import NORMAL, Life

_RUN = re.compile(r", run (\d+-[0-9a-f]{8}), ")


@dataclass(frozen=True)
class Seconds:
    """A partition of the time between the first start and the last end.

    ``training``: steps that count, and the gaps between them. ``lost``: the same of steps that were lost. ``saving``: the
    training stood still for a save. ``starting``: from the making of the trainer to the first step, its compilation included.
    ``ending``: behind the last step. ``down``: between a death and the next start. ``waiting``: the same behind a normal end.
    """
    training: float = 0.0
    lost: float = 0.0
    saving: float = 0.0
    starting: float = 0.0
    ending: float = 0.0
    down: float = 0.0
    waiting: float = 0.0

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, item.name) for item in fields(self))

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(frozen=True)
class Span:
    """A stretch of one life on the axis of time, for the drawing. ``kind``: a field of Seconds, but not ``saving``."""
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Share:
    """What became of one life. ``kept``: its last step that counts; steps behind it are lost. ``seconds``: of the life and of the
    time from its end to the next start."""
    life: Life
    kept: float
    steps: int
    steps_lost: int
    seconds: Seconds
    spans: tuple[Span, ...]


def shares_of(lives: Sequence[Life]) -> tuple[Share, ...]:
    starts = [*(life.started for life in lives[1:]), None]
    return tuple(_share(life, limit, after) for life, limit, after in zip(lives, _limits(lives), starts, strict=False))


def _limits(lives: Sequence[Life]) -> list[float]:
    """For each life the last of its steps that the training there is now contains: infinity if all, 0 if none.

    From the last life back to the one that saved the checkpoint it went on from, and so on; lives in between are in vain."""
    limits, limit = [0.0] * len(lives), math.inf
    index = next((index for index in reversed(range(len(lives))) if _is_link(lives[index], index == len(lives) - 1)), None)
    while index is not None:
        limits[index] = limit
        index, limit = _parent(lives, index)
    return limits


def _is_link(life: Life, last: bool) -> bool:
    """Whether it trained, or is about to."""
    return life.first_step is not None or last and (life.fresh or life.resumed_from is not None)


def _parent(lives: Sequence[Life], index: int) -> tuple[int | None, float]:
    """The life that a life went on from, and the step in that one's counting. Where neither run nor step tell, there is none."""
    life, before = lives[index], range(index - 1, -1, -1)
    if life.resumed_from is None:
        trained = next((other for other in before if lives[other].first_step is not None), None)
        apart = trained is not None and lives[trained].end in NORMAL
        return (trained, math.inf) if apart else (None, 0.0)        # behind a normal end it is another training
    run = _RUN.search(life.source)
    for other in before:
        if run is not None and lives[other].run == run[1]:
            return other, life.resumed_from
    for other in before:
        if lives[other].first_step is not None and lives[other].base < life.resumed_from <= lives[other].last_step:
            return other, life.resumed_from
    return None, 0.0


def _share(life: Life, limit: float, after: float | None) -> Share:
    done = 0 if life.last_step is None else max(life.last_step - life.base, 0)
    lost = 0 if life.last_step is None else int(max(life.last_step - max(limit, life.base), 0))
    begin, kept, last = _edges(life, limit)
    spans = [Span("starting", life.started, begin), Span("training", begin, kept), Span("lost", kept, last),
             Span("ending", last, life.ended)]
    if after is not None:
        spans.append(Span("waiting" if life.end in NORMAL else "down", life.ended, max(after, life.ended)))
    seconds = {span.kind: max(span.end - span.begin, 0.0) for span in spans}
    saving = 0.0
    for save in life.saves:                                 # a save stands in the log when it is over
        kind = "lost" if kept < save.time <= last else "training" if begin < save.time <= kept else "ending"
        stopped = min(save.stopped, seconds[kind])
        seconds[kind] -= stopped
        saving += stopped
    return Share(life, min(limit, life.last_step or 0), done, lost, Seconds(**seconds, saving=saving),
                 tuple(span for span in spans if span.end > span.begin))


def _edges(life: Life, limit: float) -> tuple[float, float, float]:
    """When the first step began, when the last one that counts and the last one of all were over. The first step is taken to be
    as long as an ordinary one: what it took longer was the compilation."""
    losses = life.losses
    if not len(losses):
        return life.ended, life.ended, life.ended
    last = min(float(losses.times[-1]), life.ended)
    count = min(max(int(losses.steps[0]) - life.base, 1), losses.interval)
    begin = min(max(float(losses.times[0]) - count * losses.typical, life.started), last)
    if life.cut:
        begin = life.started
    counting = int(np.searchsorted(losses.steps, limit, side="right"))
    kept = begin if not counting else max(begin, min(float(losses.times[counting - 1]), last))
    return begin, kept, last


def total_of(shares: Sequence[Share]) -> Seconds:
    return sum((share.seconds for share in shares), Seconds())


def not_safe(shares: Sequence[Share], newest: int | None) -> int | None:
    """Steps that the next start would do again, because they lie behind the newest checkpoint; None if the last life ended as it
    should."""
    if not shares or shares[-1].life.end in NORMAL:
        return None
    reached = next((share.life.last_step for share in reversed(shares) if share.life.last_step is not None), 0)
    return max(reached - (newest or 0), 0)
