"""``mindresume export-hf``: the folder that it writes, its output, and its refusals."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_folders import GROUPED, contiguous, document, trained
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
