"""``mindresume export-hf``: the folder that it writes, its output, and its refusals."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_folders import GROUPED, complete, contiguous, document, put, trained
from rank_folders import tensors_at
from reshard.plans import Plan, Spec, recorded

import mindresume
from mindresume.errors import ConfigError

COMMAND = "export-hf"
FIXTURES = Path(__file__).resolve().parents[2] / "st" / "fixtures"
TINY = {
    **document(GROUPED),
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "torch_dtype": "float16",
}


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return folder


@pytest.fixture
def source():
    return FIXTURES / "mf190_10_safetensors_single" / "output" / "checkpoint"


def test_a_folder_for_transformers(read, source, config, tmp_path):
    status, found = read(source, tmp_path / "hf", "--config", config, "--dtype", "bfloat16")
    assert status == 0 and found["finished"] and not found["dry_run"]
    assert (found["model_type"], found["files"], found["tensors"], found["dtypes"]) == (
        "qwen3",
        1,
        25,
        ["bfloat16"],
    )
    assert found["bytes_written"] == found["bytes_to_write"] and found["source"].endswith(
        "step 15, 1 rank"
    )
    assert sorted(os.listdir(tmp_path / "hf")) == [
        "config.json",
        "conversion.json",
        "model.safetensors",
    ]
    written = json.loads((tmp_path / "hf" / "config.json").read_text(encoding="utf-8"))
    assert written == {**TINY, "torch_dtype": "bfloat16"}
    header = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"] == {
        "format": "pt"
    }


def test_several_files_with_an_index(read, call, source, config, tmp_path):
    status, found = read(
        source,
        tmp_path / "hf",
        "--config",
        config / "config.json",
        "--max-shard-size",
        "30kB",
        "--step",
        "5",
    )
    assert status == 0 and found["files"] == 5 and found["dtypes"] == ["float32"]
    index = json.loads(
        (tmp_path / "hf" / "model.safetensors.index.json").read_text(encoding="utf-8")
    )
    assert (
        len(index["weight_map"]) == 25
        and index["metadata"]["total_size"] == found["bytes_to_write"]
    )
    assert set(index["weight_map"].values()) == {
        f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)
    }
    assert call(source, tmp_path / "one", "--config", config, "--step", "5")[0] == 0
    one, several = tensors_at(tmp_path / "one"), tensors_at(tmp_path / "hf")
    assert one.keys() == several.keys() and all((one[name] == several[name]).all() for name in one)


def test_strategy_of_the_source(call, config, tmp_path):
    cut = FIXTURES / "mf190_10_safetensors_dp2tp2" / "output"
    status, out, _ = call(
        cut / "checkpoint", tmp_path / "hf", "--config", config, "--from", cut / "strategy"
    )
    assert (
        status == 0
        and "step 15, 4 ranks" in out
        and "25 tensors in 1 file," in out
        and "112.8 KiB written" in out
    )


def test_dry_run_and_again(call, read, source, config, tmp_path):
    status, out, _ = call(source, tmp_path / "hf", "--config", config, "--dry-run")
    assert status == 0 and "dry run" in out and not (tmp_path / "hf").exists()
    assert call(source, tmp_path / "hf", "--config", config)[0] == 0
    before = (tmp_path / "hf" / "model.safetensors").stat()
    status, out, _ = call(source, tmp_path / "hf", "--config", config)
    assert (
        status == 0
        and "exists already" in out
        and (tmp_path / "hf" / "model.safetensors").stat() == before
    )
    (config / "config.json").write_text(json.dumps({**TINY, "rope_theta": 5e5}), encoding="utf-8")
    # another configuration is another conversion
    for more in ((), ("--dtype", "bfloat16")):
        status, _, err = call(source, tmp_path / "hf", "--config", config, *more)
        assert status == 2 and "is not empty: it was converted from" in err
    assert sorted(os.listdir(tmp_path)) == ["hf", "model"]


def test_missing_or_wrong_input_is_an_error(call, source, config, tmp_path):
    def refused(*arguments, change=None):
        (config / "config.json").write_text(
            json.dumps({**TINY, **(change or {})}), encoding="utf-8"
        )
        status, out, err = call(source, tmp_path / "hf", *arguments)
        assert status == 2 and out == "" and not (tmp_path / "hf").exists() and err.count("\n") == 1
        return err

    assert "--config is missing: give the config.json" in refused()
    assert "none/config.json does not exist" in refused(
        "--config", tmp_path / "none" / "config.json"
    )
    assert "choose one of bfloat16, float32, keep" in refused("--config", config, "--dtype", "int8")
    assert "--max-shard-size is 'big'" in refused("--config", config, "--max-shard-size", "big")
    assert "model_type 'llama'" in refused("--config", config, change={"model_type": "llama"})
    assert "num_attention_heads 4 x head_dim 8 + num_key_value_heads 2 x head_dim 8 + " in refused(
        "--config", config, change={"num_key_value_heads": 2}
    )
    assert "there are:" in refused("--config", config, "--step", "7")


def test_contiguous_orders(call, config, tmp_path):
    given = trained(GROUPED)
    complete(tmp_path / "source", given)
    (config / "config.json").write_text(json.dumps(document(GROUPED)), encoding="utf-8")
    assert (
        call(
            tmp_path / "source",
            tmp_path / "hf",
            "--config",
            config,
            "--contiguous-attention",
            "--contiguous-mlp",
        )[0]
        == 0
    )
    found = tensors_at(tmp_path / "hf")
    qkv, fc1 = (
        given[f"decoder.layers.0.{name}.weight"]
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
    )
    np.testing.assert_array_equal(found["model.layers.0.self_attn.k_proj.weight"], qkv[48:72])
    np.testing.assert_array_equal(found["model.layers.0.mlp.up_proj.weight"], fc1[12:])


@pytest.mark.parametrize("merged", [False, True])
def test_the_orders_are_those_that_the_checkpoint_records(call, config, tmp_path, merged):
    given = trained(GROUPED)
    (config / "config.json").write_text(json.dumps(document(GROUPED)), encoding="utf-8")
    one, source = (
        Plan(
            model=tuple((name, Spec(array.shape, None, "first")) for name, array in given.items())
        ),
        {},
    )
    for name, order in (("contiguous", True), ("default", False)):
        source[name] = tmp_path / name
        recorded(source[name], one, given, arrangement=contiguous(order, order))
        if merged:
            source[name] = tmp_path / f"merged {name}"
            mindresume.merge(tmp_path / name, source[name])

    def exported(name, *flags):
        assert call(source[name], tmp_path / "hf", "--config", config, *flags)[0] == 0
        found = tensors_at(tmp_path / "hf")
        shutil.rmtree(tmp_path / "hf")
        return (
            found["model.layers.0.self_attn.k_proj.weight"].tobytes() == qkv[48:72].tobytes(),
            found["model.layers.0.mlp.up_proj.weight"].tobytes() == fc1[12:].tobytes(),
        )

    qkv, fc1 = (
        given[f"decoder.layers.0.{name}.weight"]
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1")
    )
    assert (
        exported("contiguous") == exported("contiguous", "--contiguous-attention") == (True, True)
    )
    assert exported("default") == (False, False)
    for flag, key in zip(
        ("--contiguous-attention", "--contiguous-mlp"), contiguous(True, True), strict=True
    ):
        status, out, err = call(source["default"], tmp_path / "hf", "--config", config, flag)
        assert status == 2 and not out and key in err and not (tmp_path / "hf").exists()
    for given_order in ({"contiguous_attention": False}, {"contiguous_mlp": False}):
        with pytest.raises(ConfigError, match="as the checkpoint records"):
            mindresume.export_hf(
                source["contiguous"], tmp_path / "hf", config=config, **given_order
            )


def test_damage_leaves_nothing(call, config, tmp_path):
    given = trained(GROUPED)
    complete(tmp_path / "source", given)
    path = tmp_path / "source" / "model.safetensors"
    (config / "config.json").write_text(json.dumps(document(GROUPED)), encoding="utf-8")
    os.truncate(path, path.stat().st_size - 8)
    status, _, err = call(tmp_path / "source", tmp_path / "hf", "--config", config)
    assert status == 2 and "model.safetensors" in err
    put(path, given)
    assert sorted(os.listdir(tmp_path)) == ["model", "source"]
    assert call(tmp_path / "source", tmp_path / "hf", "--config", config)[0] == 0
