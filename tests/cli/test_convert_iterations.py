"""``mindresume convert`` between the formats: rank folders to an iteration folder and back, bit for
bit."""

import json
import os

import pytest
from iteration_folders import TRACKER
from rank_folders import tensors_at
from reshard.plans import COUNTERS, MODEL, STEP, Plan, random_tensors, recorded

import mindresume

COMMAND = "convert"
TENSORS = random_tensors(MODEL)
NAME = f"iteration_{STEP:08d}"


def values(folder):
    return {name: array.tobytes() for name, array in tensors_at(folder).items()}


@pytest.mark.parametrize(
    "plan, dedup",
    [("dp1", False), ("tp2", False), ("dp2tp2opt2", True), ("dp2tp2pp2opt2", True), ("pp4", False)],
)
def test_a_round_trip_keeps_everything(tmp_path, call, plan, dedup):
    """Layout, weights, moments and counters, and the state in both formats; a resume can use the
    result."""
    plan = Plan.parse(plan)
    recorded(tmp_path / "old", plan, TENSORS, dedup=dedup)
    assert call(tmp_path / "old", tmp_path / "new", "--format", "iteration")[0] == 0
    assert sorted(os.listdir(tmp_path / "new")) == sorted(
        [".mindresume", "conversion.json", NAME, TRACKER]
    )
    assert (tmp_path / "new" / TRACKER).read_text() == str(STEP)
    common = json.loads((tmp_path / "new" / NAME / "common.json").read_text())
    state = mindresume.open(tmp_path / "old")[STEP].state
    assert (common["step_num"], common["global_batch_size"]) == (STEP, state.global_batch_size)
    if plan.world_size > 1:
        metadata = json.loads((tmp_path / "new" / NAME / "metadata.json").read_text())
        assert set(TENSORS) <= set(metadata["state_dict_metadata"])
    chosen = mindresume.open(tmp_path / "new").select().chosen.info
    assert (chosen.step, chosen.iteration_dir, chosen.world_size) == (STEP, NAME, plan.world_size)
    assert mindresume.compare(tmp_path / "old", tmp_path / "new").equal

    assert call(tmp_path / "new", tmp_path / "again", "--format", "safetensors")[0] == 0
    old, again = values(tmp_path / "old"), values(tmp_path / "again")
    assert all(again[name] == old[name] for name in TENSORS)
    assert set(again) == set(old) and set(COUNTERS) <= set(again)
    assert mindresume.open(tmp_path / "again").latest().info.world_size == plan.world_size


def test_weights_without_a_step(tmp_path, call):
    recorded(tmp_path / "old", Plan.parse("tp2"), TENSORS)
    assert call(tmp_path / "old", tmp_path / "merged", "--drop", "*_num", command="merge")[0] == 0
    status, _, err = call(
        tmp_path / "merged", tmp_path / "new", "--format", "iteration", "--to", "dp=2"
    )
    assert (
        status == 2
        and "nothing there says which step it is" in err
        and not (tmp_path / "new").exists()
    )
    status, _, err = call(tmp_path / "merged", tmp_path / "new")
    assert status == 2 and "have no layout of their own" in err
