"""What a job selects from a folder: on one rank or on several; and what one process foresees for
all of them."""

import pytest
from rank_folders import STORAGE

from mindresume.coordination.collectives import SingleProcess
from mindresume.coordination.storage_topology import SharedGroups
from mindresume.errors import NoUsableCheckpointError
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


def takes(root, step, *refused, **options):
    """Asserts that a job takes ``step`` and refuses just ``refused``: (step, part of the reason),
    newest first. Returns the choice."""
    choice = choose(root, **options)
    assert choice.chosen is not None and choice.chosen.step == step, choice
    assert [refusal.step for refusal in choice.refused] == [number for number, _ in refused]
    for refusal, (_, reason) in zip(choice.refused, refused, strict=True):
        assert reason in refusal.reason
    return choice


def stops(root, *said, error=NoUsableCheckpointError, **options):
    """Asserts that a job ends with an error that says all of ``said``. Returns the error."""
    with pytest.raises(error) as caught:
        choose(root, **options)
    for text in said:
        assert text in str(caught.value)
    return caught.value


def apart(*leaders):
    """Returns the sources of a job whose nodes share no disk. ``leaders``: by rank, the first rank
    that sees the same disk."""
    return CheckpointSources(shared=SharedGroups(leaders))
