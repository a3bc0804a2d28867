"""The product passes. Every operation of the two short stories here; all stories, exhaustively, in the system tests."""
import pytest

from mindresume.drill.faults import FAULTS
from mindresume.drill.run import Setup, count, prepare, units
from mindresume.drill.stories import ITERATION
from mindresume.files import FORMATS


def troubles(setup, stories, every=1, jobs=2, **how):
    """(cells, those that do not pass or leave something behind)"""
    tasks = prepare(setup, stories, **how)
    done = [cell for unit in units(setup, tasks, every=every, jobs=jobs) for cell in unit]
    assert len(done) == count(tasks, every=every)
    assert every > 1 or {cell.fault for cell in done} == set(FAULTS)
    return len(done), [cell for cell in done if cell.verdict != "PASS" or cell.left]


def test_every_operation_of_the_first_save_and_of_the_pointers_under_every_fault(folder):
    cells, found = troubles(Setup(folder), ["first save", "pointers"], formats=FORMATS)
    assert found == [] and cells > 1000


def test_every_operation_of_the_commit_of_an_iteration_under_every_fault(folder):
    cells, found = troubles(Setup(folder), ["pointers"], formats=[ITERATION])
    assert found == [] and cells > 400


@pytest.mark.parametrize("seed, fmt, start", [(3, "safetensors", 23), (5, "ckpt", 29), (1, "iteration", 31)])
def test_three_ranks_in_other_orders(folder, seed, fmt, start):
    """Seeds in which rank 0 is the first to be done, so that it waits for the others."""
    cells, found = troubles(Setup(folder, ranks=3, seed=seed), ["save"], every=start, jobs=1, formats=[fmt])
    assert found == [] and cells > 40
