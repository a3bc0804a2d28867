"""All of it in order: a folder -> what is known -> one JSON document."""
from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindresume.report import account, history
from mindresume.report.account import Share, shares_of, total_of
from mindresume.report.disk import Disk, look
from mindresume.report.history import Life, lives_of, settled, with_losses
from mindresume.report.logs import Event, last_words, merged
from mindresume.report.sources import LOOKED_FOR, LogFile, find_logs
from mindresume.store.storage import Storage


@dataclass(frozen=True)
class Report:
    """``read``: the logs that it is made from. ``rank``: whose; None: there are none. ``loss_rank``: whose loss, where it is that
    of another rank. ``notes``: what a reader has to know."""
    output: str
    folders: tuple[str, ...]
    read: tuple[str, ...]
    rank: int | None
    loss_rank: int | None
    shares: tuple[Share, ...]
    disk: Disk
    notes: tuple[str, ...]

    @property
    def lives(self) -> tuple[Life, ...]:
        return tuple(share.life for share in self.shares)

    @property
    def steps_done(self) -> int:
        return sum(share.steps for share in self.shares)

    @property
    def steps_lost(self) -> int:
        return sum(share.steps_lost for share in self.shares)

    @property
    def reached(self) -> int | None:
        """The last step of the training that there is now."""
        return next((share.life.last_step for share in reversed(self.shares) if share.life.last_step is not None), None)

    @property
    def not_safe(self) -> int | None:
        """Steps behind the newest checkpoint, if the last life did not end as it should; None also where there is no folder."""
        if not self.disk.exists:
            return None
        return account.not_safe(self.shares, self.disk.newest.step if self.disk.newest else None)


def make(storage: Storage, output: str, root: str, more: Sequence[str] = ()) -> Report:
    """``output``: the folder below which the logs are. ``root``: of the checkpoints. ``more``: other folders of logs."""
    folders = (output, *more)
    found, disk = find_logs(folders), look(storage, root)
    rank = min((log.rank for log in found), default=None)
    own = [log for log in found if log.rank == rank]
    lives = lives_of(merged(own))
    lives, others = _true_losses(lives, found, rank)
    if lives:
        words = _first_words(found, lives[-1].started)
        lives = (*lives[:-1], settled(lives[-1], disk.claimed if disk.exists else None, words))
    read = tuple(piece for log in found if log in own or log.rank in others for piece in log.pieces)
    shares = shares_of(lives)
    return Report(output, folders, read, rank, max(others, default=None), shares, disk,
                  tuple(_notes(lives, rank, others)))


def _true_losses(lives: tuple[Life, ...], found: Iterable[LogFile], rank: int | None) -> tuple[tuple[Life, ...], list[int]]:
    """With pipeline stages the last rank has the true loss; if the number of ranks changed, of each life another one."""
    used: list[int] = []
    by_rank = sorted({log.rank for log in found} - {rank}, reverse=True)
    todo = {life.number for life in lives if life.last_card and len(life.losses)}
    for other in by_rank:
        if not todo:
            break
        better = with_losses(lives, merged(log for log in found if log.rank == other))
        got = {new.number for old, new in zip(lives, better, strict=True) if new is not old and new.number in todo}
        if got:
            lives = tuple(new if new.number in got else old for old, new in zip(lives, better, strict=True))
            used.append(other)
            todo -= got
    return lives, used


def _first_words(found: Iterable[LogFile], since: float) -> Event | None:
    """Of the worker that failed first in the last life: the others fail because it is gone."""
    words = [words for log in found if log.worker and (words := last_words(log)) is not None and words.time >= since]
    return min(words, key=lambda event: event.time, default=None)


def _notes(lives: Sequence[Life], rank: int | None, others: Sequence[int]) -> Iterable[str]:
    if rank is None:
        return
    if rank:
        yield f"There is no log of rank 0; this is what rank {rank} tells. What only rank 0 logs is missing, such as commits."
    if any(life.last_card and len(life.losses) for life in lives) and not others:
        yield (f"The training has pipeline stages. The loss is that of rank {rank}, not the true one: there is no log of "
               f"the last rank.")
    if others:
        yield f"The training has pipeline stages: the loss is that of rank {', '.join(map(str, sorted(others)))}, the last one."
    if lives and lives[0].cut:
        yield "The log begins in the middle: older lines were rotated away. What came before is not counted."
    interval = max((life.losses.interval for life in lives), default=1)
    if interval > 1:
        yield (f"The log has a loss every {interval} steps. A life that died may have done up to {interval - 1} steps more than "
               f"is counted.")
    bad = sum(life.losses.not_finite for life in lives)
    if bad:
        yield f"The loss is not finite (nan or inf) at {bad} steps; the curve has gaps there."
    if any(life.scale != 1 for life in lives):
        yield ("The batch size changed, so steps were renumbered. Each life is drawn in its own counting; lost steps are counted "
               "in those of the life that lost them.")


# ---- for programs ----------------------------------------------------------------------------------------------------

def to_json(report: Report) -> dict[str, Any]:
    """One document. Its fields are those of Life, Save, Seconds and Checkpoint, and mean the same. Times are seconds since 1970,
    spans are seconds."""
    seconds = total_of(report.shares)
    return {
        "output": report.output, "root": report.disk.root,
        "logs": {"read": list(report.read), "looked_for": looked_for(report), "rank": report.rank, "loss_rank": report.loss_rank},
        "steps": {"reached": report.reached, "done": report.steps_done, "lost": report.steps_lost, "not_safe": report.not_safe},
        "seconds": {**_rounded(asdict(seconds)), "total": round(seconds.total, 3)},
        "lives": [_life(share) for share in report.shares],
        "checkpoints": [asdict(row) for row in report.disk.checkpoints],
        "notes": [*report.notes, *report.disk.notes],
    }


def looked_for(report: Report) -> list[str]:
    return [os.path.join(folder, pattern) for folder in report.folders for pattern in LOOKED_FOR]


def _life(share: Share) -> dict[str, Any]:
    life = share.life
    return {
        "number": life.number, "run": life.run, "started": life.started, "ended": life.ended, "end": life.end, "why": life.why,
        "fresh": life.fresh, "resumed_from": life.resumed_from, "inferred": life.inferred, "source": life.source,
        "first_step": life.first_step, "last_step": life.last_step, "steps": share.steps, "steps_lost": share.steps_lost,
        "loss": _ends(life), "seconds": _rounded(asdict(share.seconds)),
        "saves": [asdict(save) for save in life.saves], "saves_skipped": life.skipped,
        "refused": [asdict(row) for row in life.refused],
    }


def _ends(life: history.Life) -> dict[str, float | None]:
    values = [float(value) if math.isfinite(value) else None for value in life.losses.values[[0, -1]]] if len(life.losses) else [
        None, None]
    return {"first": values[0], "last": values[1]}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
