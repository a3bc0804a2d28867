"""A plan that was made ahead is that of the save that comes."""

import numpy as np
import pytest

from mindresume.formats.rank_folders import label
from mindresume.saving.memory_tier.slots import FilePlans
from mindresume.saving.shard_writer import ShardFile
from mindresume.tensor_files import plan_file, tensor_spec

RUN = "0001-00000000"


def files(step, **tensors):
    tensors = {"weight": np.zeros((3, 4), np.float32), "step": np.array(step), **tensors}
    return [
        ShardFile(
            "rank_0/a.safetensors", "safetensors", tensors, {"format": "ms", **label(RUN, step)}
        )
    ]


def expected(found):
    return tuple(
        plan_file(
            file.format,
            {name: tensor_spec(name, array) for name, array in file.tensors.items()},
            file.metadata,
        )
        for file in found
    )


@pytest.mark.parametrize(
    "then",
    [
        files(110),
        files(120),
        files(110, weight=np.zeros((3, 5), np.float32)),
        files(110, weight=np.zeros((3, 4), np.int32)),
        files(110, new=np.zeros(2)),
        files(110) * 2,
    ],
)
def test_the_plan_is_always_that_of_the_files(then):
    plans = FilePlans()
    assert plans.of(files(100)) == expected(files(100))
    plans.prepare(files(110))
    assert plans.of(then) == expected(then)


def test_the_usual_next_save_is_planned_ahead(monkeypatch):
    plans = FilePlans()
    plans.prepare(files(110))
    monkeypatch.setattr("mindresume.saving.memory_tier.slots.plan_file", None)
    assert plans.of(files(110)) == expected(files(110))


def test_what_cannot_be_planned_is_an_error_of_the_save_that_comes():
    plans, wrong = FilePlans(), files(100, text=np.array("text"))
    plans.prepare(wrong)
    with pytest.raises(ValueError):
        plans.of(wrong)
