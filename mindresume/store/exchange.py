"""What nodes that share no disk tell each other, at the same steps (``mindresume.store.preemption``), and what follows from it.

    exchange = Exchange(storage, root, run, islands, rank, uploader)
    exchange.told(rows_of_all_ranks(exchange.news()))           # all ranks at the same step

    the newest checkpoint that all have     is noted, and stays (``mindresume.store.common``)
    no upload is under way                  that checkpoint is uploaded next, and held on all nodes from this moment
                                            (``mindresume.store.mirror``)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindresume.store.common import committed, newest_common, note
from mindresume.store.islands import Islands
from mindresume.store.storage import Storage


class Uploads(Protocol):
    """What an exchange asks of an ``Uploader``."""

    def ready(self) -> bool: ...

    def schedule(self, name: str) -> None: ...


@dataclass
class Exchange:
    """What the first rank of each island tells the others, and does with what all of them say. ``uploads``: of this rank, if
    checkpoints go to an object store. Of a folder that all ranks see nothing is exchanged."""
    storage: Storage
    root: str
    run: str
    islands: Islands
    rank: int
    uploads: Uploads | None = None
    _noted: str | None = None

    def news(self) -> Any:
        """For the other ranks: the newest checkpoints of this island, and whether another one can be uploaded."""
        if not self.islands.apart or not self.islands.leads(self.rank):
            return None
        try:
            names = committed(self.storage, self.root)
        except OSError:                                 # then none is known to be common, and nothing goes
            names = []
        return [names, self.uploads is not None and self.uploads.ready()]

    def told(self, rows: Sequence[Any]) -> None:
        """``rows``: the news of all ranks. OSError if the note cannot be changed: then nothing newer than the last one goes."""
        if not self.islands.apart or not self.islands.leads(self.rank):
            return
        leaders = self.islands.of_leaders(rows)
        common = newest_common([names for names, _ in leaders])
        if self.uploads is not None and leaders[0][1]:
            self.uploads.schedule(common)           # before the note: from then on older ones may go
        self.note(common)

    def note(self, name: str) -> None:
        """OSError as above."""
        if name != self._noted and self.islands.leads(self.rank):
            note(self.storage, self.root, name, self.run)
            self._noted = name
