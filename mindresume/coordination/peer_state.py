"""Exchanges, between nodes that share no disk, which checkpoints each has; at the same steps
(``mindresume.coordination.preemption``).

    peers = PeerState(storage, root, run, shared_groups, rank, uploads)
    peers.on_peer_state(rows_of_all_ranks(peers.local_state()))         # all ranks at the same step

    the newest checkpoint that all have     is recorded, and stays (``mindresume.coordination.common_checkpoint``)
    no upload is under way                  that checkpoint is uploaded next, and locked on all nodes from this moment
                                            (``mindresume.saving.uploader``)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindresume.coordination.common_checkpoint import committed, newest_common, record
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.storage.interface import Storage


class Uploads(Protocol):
    """What an exchange asks of an ``Uploader``."""

    def ready(self) -> bool: ...

    def schedule(self, name: str) -> None: ...


@dataclass
class PeerState:
    """Sends the state of the first rank of each group that shares storage to the others, and acts on the states of all.
    ``uploads``: of this rank, if checkpoints go to an object store. Nothing is exchanged about a directory that all ranks see."""
    storage: Storage
    root: str
    run: str
    shared_groups: SharedGroups
    rank: int
    uploads: Uploads | None = None
    _noted: str | None = None

    def local_state(self) -> Any:
        """Returns, for the other ranks, the newest checkpoints of this group, and whether another one can be uploaded."""
        if not self.shared_groups.is_split or not self.shared_groups.is_leader(self.rank):
            return None
        try:
            names = committed(self.storage, self.root)
        except OSError:                                 # then none is known to be common, and nothing goes
            names = []
        return [names, self.uploads is not None and self.uploads.ready()]

    def on_peer_state(self, rows: Sequence[Any]) -> None:
        """Acts on ``rows``, the local states of all ranks. Raises OSError if the note cannot be changed: then nothing newer than
        the last one is removed."""
        if not self.shared_groups.is_split or not self.shared_groups.is_leader(self.rank):
            return
        leaders = self.shared_groups.of_leaders(rows)
        common = newest_common([names for names, _ in leaders])
        if self.uploads is not None and leaders[0][1]:
            self.uploads.schedule(common)           # before the note: from then on older ones may go
        self.record(common)

    def record(self, name: str) -> None:
        """Records ``name`` if it is another one. Raises OSError as above."""
        if name != self._noted and self.shared_groups.is_leader(self.rank):
            record(self.storage, self.root, name, self.run)
            self._noted = name
