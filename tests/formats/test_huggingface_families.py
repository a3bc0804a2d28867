"""The tables of names: against the parameters of mindformers' networks, and against its own table
of names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from mindresume.formats.huggingface import Latent, Model, copies, rules, shapes
from mindresume.formats.huggingface_families import FAMILIES
from mindresume.reshard.huggingface import is_no_weight

# {network: {parameter: shape}}, by st/programs/hf_names.py: the same in mindformers 1.8.0 (it has
# no TeleChat3), 1.9.0 and 2.1.0
NETWORKS = json.loads(
    (Path(__file__).parent / "huggingface_networks.json").read_text(encoding="utf-8")
)
LATENT = {
    "kind": "deepseek_v3",
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "groups": 0,
    "head_dim": 0,
    "inner": 48,
    "vocabulary": 128,
    "experts": 4,
    "expert_inner": 20,
    "shared": 1,
    "dense_layers": 1,
    "predictions": 1,
    "latent": Latent(24, 16, 8, 4, 8),
}
QUERIES = {**LATENT, "predictions": 0, "shared": 2, "latent": Latent(0, 16, 8, 4, 8)}
MODELS = {
    "latent": Model(**LATENT),
    "concatenated": Model(**LATENT, concatenated=True),
    "queries": Model(**QUERIES),
    "concatenated queries": Model(**QUERIES, concatenated=True),
    "telechat3_moe": Model(
        **{**LATENT, "kind": "telechat3_moe", "latent": Latent(24, 16, 128, 64, 8)}
    ),
    "telechat3": Model("telechat3", 3, 32, 4, 2, 8, 48, 128),
    "qwen3": Model("qwen3", 3, 32, 4, 2, 8, 48, 128),
    "qwen3_moe": Model("qwen3_moe", 3, 32, 4, 2, 8, 0, 128, experts=4, expert_inner=20),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_the_network_has_its_rule(name):
    expected = {
        parameter: tuple(shape)
        for parameter, shape in NETWORKS[name].items()
        if not is_no_weight(parameter)
    }
    assert {parameter: rule.shape for parameter, rule in rules(MODELS[name]).items()} == expected


def test_every_family_is_compared():
    assert {model.kind for model in MODELS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", ["latent", "queries", "telechat3", "telechat3_moe"])
def test_names_are_those_of_weight_mapping(name):
    """mindformers' own replacement of names gives the names of the rules; what it then concatenates
    has names of its own. The names of next-token-prediction layers there are those of its inference
    network, so they are left out."""
    from mindformers.models.deepseek3.utils import DeepseekV3PreTrainedModel
    from mindformers.models.telechat3.utils import TeleChat3PreTrainedModel
    from mindformers.models.telechat3_moe.utils import TeleChat3MoePreTrainedModel

    mapping = {
        "deepseek_v3": DeepseekV3PreTrainedModel,
        "telechat3": TeleChat3PreTrainedModel,
        "telechat3_moe": TeleChat3MoePreTrainedModel,
    }[MODELS[name].kind].weight_mapping
    for parameter, rule in rules(MODELS[name]).items():
        # it has no row for these queries
        if parameter.startswith("mtp.") or parameter.endswith("linear_q_proj.weight"):
            continue
        for block in rule.blocks:
            found = block.name
            for old, new in mapping:
                found = found.replace(old, new)
            found = re.sub(
                r"\.(gating|hidden)\.",
                ".linear_fc1.",
                re.sub(r"\.linear_[qkv]\.", ".linear_qkv.", found),
            )
            found = re.sub(r"experts\.\d+\.linear_fc(\d)\.weight", r"experts.weight\1", found)
            assert found == parameter, block.name


def test_shapes_are_evaluated():
    known = rules(MODELS["latent"])
    assert (
        known["decoder.layers.1.self_attention.linear_kv_up_proj.weight"].shape_formula
        == "num_attention_heads 4 x (qk_nope_head_dim 8 + v_head_dim 8), by kv_lora_rank 16"
    )
    assert (
        known["mtp.layers.0.eh_proj.weight"].shape_formula
        == "hidden_size 32, by 2 x hidden_size 32"
    )
    assert (
        known["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"].shape_formula
        == "2 x n_shared_experts 1 x moe_intermediate_size 20 = 40, by hidden_size 32"
    )


def test_a_layer_of_predictions_has_its_own_number_and_copies():
    model = MODELS["latent"]
    assert copies(model) == {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }
    assert copies(MODELS["queries"]) == {} == copies(MODELS["qwen3"])
    mine = {
        name.removeprefix("model.layers.3.")
        for name in shapes(rules(model))
        if name.startswith("model.layers.3.")
    }
    other = {
        name.removeprefix("model.layers.2.")
        for name in shapes(rules(model))
        if name.startswith("model.layers.2.")
    }
    assert (
        mine - other
        == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
        and other <= mine
    )


def test_only_router_biases_stay_in_float32():
    names = [name for name, rule in rules(MODELS["latent"]).items() if rule.float32]
    assert len(names) == 3 and all(name.endswith("router.expert_bias") for name in names)


def test_concatenated_projections_are_computed_with_like_separate_ones():
    """[q, kv] of MLASelfAttentionConcatenated: split by columns of the result, queries first."""
    model = MODELS["concatenated"]
    rule = rules(model)["decoder.layers.0.self_attention.linear_qkv.weight"]
    tensors = {
        name: np.random.default_rng(0).random(shape)
        for name, shape in shapes({"one": rule}).items()
    }
    whole = np.empty(rule.shape)
    for block in rule.blocks:
        whole[np.ix_(*block.part)] = tensors[block.name][np.ix_(*block.other)]
    x = np.random.default_rng(1).random((5, 32))
    queries, rest = np.split(x @ whole.T, [model.latent.query_rank], -1)
    np.testing.assert_allclose(queries, x @ tensors["model.layers.0.self_attn.q_a_proj.weight"].T)
    np.testing.assert_allclose(
        rest, x @ tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].T
    )
