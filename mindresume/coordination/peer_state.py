"""Exchanges, between nodes that share no disk, which checkpoints each node has (at the steps of
``mindresume.coordination.preemption``).

    peers = PeerState(storage, root, run, shared_groups, rank, uploads)
    peers.on_peer_state(rows_of_all_ranks(peers.local_state()))         # all ranks at the same step

    newest checkpoint of all nodes   recorded, and kept by retention (``mindresume.coordination.common_checkpoint``)
    no upload in progress            that checkpoint is uploaded next; each node locks it now (``mindresume.saving.uploader``)
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindresume.coordination.common_checkpoint import committed, newest_common, record
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.storage.interface import Storage


class Uploads(Protocol):
    """The methods of an ``Uploader`` that an exchange calls."""

    def ready(self) -> bool: ...

    def schedule(self, name: str) -> None: ...


@dataclass
class PeerState:
    """Sends the state of each leader (first rank of a group that shares storage) to the others, and acts on all states. Where all
    ranks share the directory there is nothing to exchange. ``uploads``: of this rank, if checkpoints are uploaded."""
    storage: Storage
    root: str
    run: str
    shared_groups: SharedGroups
    rank: int
    uploads: Uploads | None = None
    _recorded: str | None = None

    def local_state(self) -> Any:
        """Returns [names of the newest checkpoints of this group, whether an upload can begin]; None: nothing to exchange."""
        if not self.shared_groups.is_split or not self.shared_groups.is_leader(self.rank):
            return None
        try:
            names = committed(self.storage, self.root)
        except OSError:                                 # then no checkpoint is common, and nothing is removed
            names = []
        return [names, self.uploads is not None and self.uploads.ready()]

    def on_peer_state(self, rows: Sequence[Any]) -> None:
        """Acts on ``rows``, the local states of all ranks. Raises OSError if the common checkpoint cannot be recorded: then
        nothing newer than the recorded one is removed."""
        if not self.shared_groups.is_split or not self.shared_groups.is_leader(self.rank):
            return
        leaders = self.shared_groups.of_leaders(rows)
        common = newest_common([names for names, _ in leaders])
        if self.uploads is not None and leaders[0][1]:
            self.uploads.schedule(common)           # before the record: after it older ones may be removed
        self.record(common)

    def record(self, name: str) -> None:
        """Records ``name`` unless it is recorded already. Raises OSError as above."""
        if name != self._recorded and self.shared_groups.is_leader(self.rank):
            record(self.storage, self.root, name, self.run)
            self._recorded = name
