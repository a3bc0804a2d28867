"""The config.json of transformers 4.57: its dtype and its computed sizes reach neither mindformers
nor the user's settings."""

import json

import pytest

from mindresume.mindformers.patches import without_foreign_keys

WRITTEN = {
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "rope_interleave": True,
    "pretraining_tp": 1,
    "qk_head_dim": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "hidden_size": 32,
}


def test_foreign_keys_are_dropped():
    assert without_foreign_keys(WRITTEN, {}) == {
        "model_type": "deepseek_v3",
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "hidden_size": 32,
    }
    assert without_foreign_keys({"qk_head_dim": 12, "torch_dtype": "bfloat16"}, {}) == {
        "qk_head_dim": 12,
        "torch_dtype": "bfloat16",
    }


def test_settings_of_the_user_stay():
    assert (
        without_foreign_keys({**WRITTEN, "dtype": "float32"}, {"dtype": "float32"})["dtype"]
        == "float32"
    )


def test_mindformers_builds_the_configuration(tmp_path):
    """Through its own function, with its own check of keys; without mindresume it refuses this
    file."""
    pytest.importorskip("mindformers.tools")
    from mindformers.models.build_config import merge_model_config
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.parallel_core.transformer_config_utils import convert_to_transformer_config
    from mindformers.tools.register import MindFormerConfig

    import mindresume.plugin  # noqa: F401

    document = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "max_position_embeddings": 16,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(document), encoding="utf-8")
    merged = merge_model_config(str(tmp_path), MindFormerConfig(seq_length=16))
    assert "dtype" not in merged
    assert convert_to_transformer_config(Qwen3Config(**merged)).num_layers == 2
