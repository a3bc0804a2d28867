"""Which checkpoints a selection accepts, and which ranks each process verifies."""

from types import SimpleNamespace

import pytest

from mindresume.formats import MINDFORMERS, Candidate
from mindresume.model.manifest import FileRecord
from mindresume.resume.eligible import SelectionPolicy

FILE = (FileRecord("f", "safetensors"),)


def candidate(ranks, state=None):
    return Candidate(5, MINDFORMERS, "safetensors", dict.fromkeys(ranks, FILE), len(ranks), state)


@pytest.mark.parametrize(
    "rank, size, state, ranks",
    [
        (0, 1, "recorded", [0, 1, 2, 3]),
        (0, 1, None, [0, 1, 2, 3]),
        (1, 2, "recorded", [1, 3]),
        (1, 2, None, [0, 1, 3]),
        (5, 8, "recorded", []),
        (5, 8, None, [0]),
    ],
)
def test_every_rank_is_verified_by_some_process_and_the_counters_of_mindformers_by_each(
    rank, size, state, ranks
):
    group = SimpleNamespace(rank=rank, size=size)
    saved = candidate(range(4), state)
    assert list(SelectionPolicy(every_rank=True).ranks_to_verify(group, saved)) == ranks
    assert list(SelectionPolicy().ranks_to_verify(group, saved)) == [rank]
