"""The product passes at a sample of the operations; the system tests take every operation of all
scenarios."""

import pytest

from mindresume.fault_injection.faults import FAULTS
from mindresume.fault_injection.runner import Setup, count, prepare, run_cells


def failed_cells(setup, scenarios, every=1, **how):
    """Returns (all cells, cells that do not pass or leave files behind)."""
    tasks = prepare(setup, scenarios, **how)
    done = [cell for unit in run_cells(setup, tasks, every=every) for cell in unit]
    assert len(done) == count(setup, tasks, every=every)
    assert {cell.fault for cell in done} == set(FAULTS)
    return len(done), [cell for cell in done if cell.verdict != "PASS" or cell.left]


@pytest.mark.parametrize(
    "scenario, fmt",
    [("first save", "safetensors"), ("pointers", "ckpt"), ("pointers", "iteration")],
)
def test_every_fault(folder, scenario, fmt, soak):
    cells, found = failed_cells(Setup(folder), [scenario], every=5 if soak else 20, formats=[fmt])
    assert found == [] and cells >= 12


@pytest.mark.parametrize("seed, fmt, start", [(3, "safetensors", 41), (1, "iteration", 89)])
def test_three_ranks_in_other_orders(folder, seed, fmt, start):
    """Uses seeds in which rank 0 is done first, so that it waits for the others."""
    cells, found = failed_cells(
        Setup(folder, ranks=3, seed=seed), ["save"], every=start, formats=[fmt]
    )
    assert found == [] and cells > 20
