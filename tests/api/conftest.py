"""A training folder as docs/api.md shows it: steps 100 to 500 of a small Qwen3 on 4 ranks (dp=2,
tp=2), and its config.json."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_folders import GROUPED, document
from memory_tiers import memory, root, tier  # noqa: F401  fixtures
from rank_folders import STORAGE, state_of, target_of
from training_logs import history

import mindresume
from mindresume.formats.rank_folders import FileName
from mindresume.formats.strategy import read_strategy
from mindresume.model.layout import held
from mindresume.reshard.range_reader import view
from mindresume.saving.committer import Committer
from mindresume.saving.shard_writer import rank_shard, write_shard

FIXTURE = (
    Path(__file__).resolve().parents[2]
    / "st"
    / "fixtures"
    / "mf190_10_safetensors_dp2tp2"
    / "output"
)
CONFIG = {
    **document(GROUPED),
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rope_theta": 10000.0,
}
WORLD, STEPS = 4, (100, 200, 300, 400, 500)


@pytest.fixture(scope="session")
def small_model():
    """({name: array}, {name: layout}) of weights, optimizer and counters that mindformers saved."""
    with mindresume.open(FIXTURE, hold=False)[15] as checkpoint:
        return (
            {name: checkpoint.read(name) for name in checkpoint.tensors},
            {name: row.layout for name, row in checkpoint.tensors.items() if row.layout},
        )


@pytest.fixture
def training(tmp_path, small_model):
    """Returns the folder of a training: output/checkpoint, strategy/ and Qwen3/config.json; and
    run/, another one's events and logs."""
    arrays, layouts = small_model
    directory = tmp_path / "output" / "checkpoint"
    for step in STEPS:
        state = replace(state_of(step), metrics={"loss": 5.0 - step / 200})
        for rank in range(WORLD):
            shard = {
                name: view(array, held(layouts[name], rank, array.shape)).copy()
                if name in layouts
                else array
                for name, array in arrays.items()
            }
            shard["step_num"] = shard["step_num"] * 0 + step
            known = {name: (layout, arrays[name].shape) for name, layout in layouts.items()}
            name = FileName("qwen3", rank, 0, state.epoch, state.step_in_epoch, "safetensors")
            metadata = {"format": "ms", "remove_redundancy": "False"}
            write_shard(
                target_of(directory, rank, WORLD),
                rank_shard(name, state, shard, known, metadata=metadata),
                saved_at=1.7e9 + step,
            )
        committer = Committer(target_of(directory, 0, WORLD))
        committer.poll(step)
        assert not committer.pending
    (tmp_path / "Qwen3").mkdir()
    (tmp_path / "Qwen3" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    assert read_strategy(str(FIXTURE / "strategy"), STORAGE).world_size == WORLD
    history().write_all(tmp_path / "run")
    return tmp_path
