"""Cells: their number, reproducible operation numbers, and reproducible results."""

import os

import pytest

from mindresume.errors import SaveError
from mindresume.fault_injection import runner
from mindresume.fault_injection.faults import FAULTS, Fault
from mindresume.fault_injection.runner import (
    Setup,
    cell,
    count,
    prepare,
    run_cells,
    sampled,
)
from mindresume.fault_injection.scenarios import RUNS, SCENARIOS, Scenario


@pytest.fixture
def setup(folder):
    return Setup(folder)


def test_every_scenario_and_format_and_rank_has_operations(setup, folder):
    tasks = prepare(setup)
    assert {(task.scenario, task.format) for task in tasks} == {
        (name, fmt) for name in SCENARIOS for fmt in ("safetensors", "ckpt", "iteration")
    }
    for task in tasks:
        assert [operation.number for operation in task.operations] == list(
            range(1, len(task.operations) + 1)
        )
        assert {operation.rank for operation in task.operations} == (
            {0} if task.scenario == "pointers" else {0, 1}
        )
        assert all(not os.path.isabs(operation.path) for operation in task.operations)
    assert os.listdir(folder) == []


def test_each_fault_and_operation_it_can_hit_is_one_cell(setup, monkeypatch):
    (task,) = prepare(setup, ["pointers"], ["ckpt"])
    monkeypatch.setattr(runner, "cell", lambda setup, task, fault: fault)
    found = [fault for batch in run_cells(setup, [task]) for fault in batch]
    names = {operation.number: operation.name for operation in task.operations}
    assert found == [
        Fault(number, kind)
        for kind in FAULTS
        for number in names
        if Fault(number, kind).hits(names[number])
    ]
    assert {fault.at for fault in found if fault.kind == "torn"} == {
        n for n, name in names.items() if name == "write"
    }
    assert {fault.at for fault in found if fault.kind == "EIO"} == set(names)
    assert next(run_cells(setup, [task], ["torn"])) == [
        fault for fault in found if fault.kind == "torn"
    ]


@pytest.mark.parametrize("kind", ["kill some", "reorder", "late", "ENOSPC"])
def test_a_cell_can_be_repeated(setup, kind):
    (task,) = prepare(setup, ["prune"], ["safetensors"])
    hit = next(operation for operation in task.operations[20:] if operation.name == "write")
    first = cell(setup, task, Fault(hit.number, kind))
    assert first == cell(setup, task, Fault(hit.number, kind))
    assert kind == "late" or (first.rank, first.name, first.path) == (hit.rank, hit.name, hit.path)
    assert first.to_json()["verdict"] == first.verdict == "PASS"


def broken(workload):
    class Broken(Scenario):
        def work(self, sandbox, rank):
            workload(sandbox, rank)

    return Broken("broken", "of this test")


def test_a_scenario_that_fails_without_a_fault_is_not_drilled(setup, monkeypatch):
    def loses(sandbox, rank):
        sandbox.journal.report((RUNS[0], 20), rank)  # it says so

    monkeypatch.setattr(runner, "SCENARIOS", {"broken": broken(loses)})
    with pytest.raises(SaveError, match="broken, ckpt: without any fault: LOST_WORK"):
        prepare(setup, ["broken"], ["ckpt"])


def test_a_sample_hits_every_scenario_format_and_fault_and_other_operations_in_each(setup):
    tasks = prepare(setup, ["first save", "save", "pointers"])

    def sample(seed):
        of_seed = Setup(setup.folder, seed=seed)
        return [[sampled(of_seed, task, kind, 10) for kind in FAULTS] for task in tasks]

    found = sample(0)
    cells = sum(len(operations) for row in found for operations in row)
    assert count(setup, tasks, every=10) == cells < count(setup, tasks) / 8
    assert all(operations for row in found for operations in row)
    for task, row in zip(tasks, found, strict=True):
        hit = {operation.number for operations in row for operation in operations}
        assert len(hit) > len(task.operations) / 3  # not the same tenth twelve times
    assert sample(0) == found != sample(1)
