"""What a job selects from a folder: on one rank or on several; and what one process foresees for
all of them."""

from rank_folders import STORAGE

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.events import ignore
from mindresume.resume.eligible import SelectionPolicy
from mindresume.resume.selection import select_checkpoint
from mindresume.resume.sources import CheckpointSources

ALONE = SingleProcess()


def choose(
    root,
    world=None,
    requested=None,
    *,
    group=ALONE,
    storage=STORAGE,
    sources=None,
    emit=ignore,
    is_own=False,
    **policy,
):
    """Returns the choice of a job. Each rank of ``group`` verifies the files of all ranks, with
    ``is_own`` its own file."""
    return select_checkpoint(
        storage,
        str(root),
        group,
        SelectionPolicy(world, requested, every_rank=not is_own, **policy),
        sources,
        emit,
    )


def apart(*leaders):
    """Returns the sources of a job whose nodes share no disk. ``leaders``: by rank, the first rank
    that sees the same disk."""
    return CheckpointSources(shared=SharedGroups(leaders))
