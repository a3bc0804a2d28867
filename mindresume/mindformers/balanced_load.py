"""Reads once what several ranks of the job need (``balanced_load``): one rank reads a piece, and broadcasts it to the others.

    shared = BalancedLoad(layouts, context)
    arrays = run_on_all(group, lambda: read_regions(weights, shared.mine(regions, dtypes)))
    shared.receive(arrays, traffic.read)                # collective
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindresume.coordination.collectives import gather_results
from mindresume.events import Notice
from mindresume.mindformers.process_group import TensorBroadcaster
from mindresume.mindformers.training_context import TrainingContext
from mindresume.reshard.broadcast_load import Exchange, exchange_pieces, plan_reads
from mindresume.reshard.geometry import Region
from mindresume.tensor_files.header import DTYPES


class BalancedLoad:
    """Divides the regions of a load among the ranks that need them.

    Args:
        layouts: {name: (layout, global shape)} of this job.
        enabled: False: every rank reads all that it needs.
    """

    def __init__(self, layouts: Mapping[str, Any], context: TrainingContext, enabled: bool = True):
        self.layouts, self.context, self.enabled = layouts, context, enabled
        self._regions: Mapping[str, Region] = {}
        self._dtypes: Mapping[str, str] = {}
        self._exchanges: list[Exchange] = []

    def mine(self, regions: Mapping[str, Region], dtypes: Mapping[str, str]) -> Mapping[str, Region]:
        """Returns which of ``regions`` this rank reads. No message is exchanged."""
        if not self.enabled:
            return regions
        sizes = {name: DTYPES[dtypes[name]].itemsize for name in regions}
        mine, self._exchanges = plan_reads(regions, self.layouts, sizes, self.context.group.rank)
        self._regions, self._dtypes = regions, dtypes
        return mine

    def receive(self, arrays: dict[str, Any], read_bytes: int) -> None:
        """Adds to ``arrays`` the pieces that other ranks read. All ranks call it, after all have read.

        Args:
            read_bytes: bytes that this rank read, for the message.
        Raises:
            CollectiveError: On all ranks.
        """
        if not self.enabled:
            return
        context = self.context
        if not any(gather_results(context.group, lambda: bool(self._exchanges))):
            context.emit(Notice("load_balanced (balanced_load) has no effect: no two ranks of this job hold the same part of a "
                                "tensor"))
            return
        if self._exchanges:
            broadcaster = TensorBroadcaster()
            received = exchange_pieces(arrays, self._exchanges, self._regions, self._dtypes, context.group.rank, broadcaster)
            broadcaster.close()
            context.emit(Notice(f"balanced load of rank {context.group.rank}: {read_bytes / 2**20:.1f} MiB read, "
                                f"{received / 2**20:.1f} MiB from other ranks"))
