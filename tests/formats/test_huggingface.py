"""Rules of Qwen3 in two namings: against mindformers' own conversion, bit for bit, and as
arithmetic."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
from huggingface_folders import GROUPED, LATENT, MODELS, MOE, TELECHAT, assemble, random
from hypothesis import given
from hypothesis import strategies as st

from mindresume.errors import ConfigError
from mindresume.formats.huggingface import (
    CONTIGUOUS,
    DENSE,
    EMBEDDING,
    EXPERTS,
    HEAD,
    INTERLEAVED,
    Latent,
    Model,
    check_contiguous_order,
    compare_with_template,
    inverse_rules,
    model_from_config,
    rules,
    shapes,
)
from mindresume.model.layout import TensorLayout

QKV, FC1 = (
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
)
DOCUMENT = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "intermediate_size": 12,
    "vocab_size": 20,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
MOE_DOCUMENT = {
    **DOCUMENT,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "moe_intermediate_size": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


# ---- against mindformers -------------------------------------------------------------------------


@dataclass
class Config:
    """Has the fields that the operations of mindformers read."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    hidden_size: int
    tensor_model_parallel_size: int
    num_moe_experts: int
    moe_ffn_hidden_size: int
    expert_model_parallel_size: int = 1


@pytest.fixture(scope="module")
def converters():
    from mindformers.models.qwen3.utils import Qwen3PreTrainedModel
    from mindformers.models.qwen3_moe.utils import Qwen3MoePreTrainedModel

    return {
        DENSE: Qwen3PreTrainedModel.weight_converters,
        EXPERTS: Qwen3MoePreTrainedModel.weight_converters,
    }


def configured(converters, model, tensor_parallel, optimizer, expert_parallel=1):
    """Returns mindformers' template as a rank with these sizes has it."""
    found = copy.deepcopy(converters[model.kind])
    config = Config(
        model.heads,
        model.groups,
        model.head_dim,
        model.hidden,
        tensor_parallel,
        model.experts,
        model.expert_inner,
        expert_parallel,
    )
    for op in found:
        if hasattr(op, "set_model_config"):
            op.set_model_config(config)
        op.optimizer_parallel_size = optimizer
    return found


def of_layer(op, layer, experts):
    """{name in the operation: names of that layer, of all experts}."""
    return {
        name: [name.format(*((layer, e)[: name.count("{}")])) for e in range(experts or 1)]
        for name in op.hf_names
    }


def converted(op, tensors, model, pieces, piece, layer=1):
    """Returns mindformers' result for one rank: the tensors that it takes, each cut into ``pieces``
    by rows, as its ReshardLoader cuts them (those of experts stacked before)."""
    given_ = {}
    for name, names in of_layer(
        op, layer, model.experts if "experts" in op.hf_names[0] else 0
    ).items():
        stacked = np.concatenate([tensors[one] for one in names])
        given_[name.format(layer, "stack")] = np.split(stacked, pieces)[piece]
    return op(given_)


@pytest.mark.parametrize(
    "name, tensor_parallel, optimizer",
    [
        ("multi", 1, 1),
        ("multi", 2, 2),
        ("grouped", 4, 1),
        ("grouped", 2, 2),
        ("grouped", 1, 4),
        ("one group", 1, 1),
        ("moe", 2, 1),
        ("moe", 1, 2),
        ("tied", 2, 1),
    ],
)
def test_every_rank_gets_the_same_slices_as_from_mindformers(
    converters, name, tensor_parallel, optimizer
):
    """Runs every operation of mindformers' template on every rank: it gives the same bits as that
    rank's rows of the uncut tensor."""
    model, seen = MODELS[name], set()
    tensors = random(model)
    if model.tied:  # mindformers has no rule for a head that is not there
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    whole = assemble(rules(model), tensors)
    pieces = tensor_parallel * optimizer
    for piece in range(pieces):
        for op in configured(
            converters, model, tensor_parallel, optimizer, tensor_parallel if model.experts else 1
        ):
            if any(len(tensors[names[0]]) % pieces for names in of_layer(op, 1, 0).values()):
                continue
            for made, array in converted(op, tensors, model, pieces, piece).items():
                made = made.replace(".stack.", ".")
                np.testing.assert_array_equal(np.split(whole[made], pieces)[piece], array, made)
                seen.add(made)
    assert {
        name for name in whole if ".layers.0." not in name and len(whole[name]) % pieces == 0
    } == seen


@pytest.mark.parametrize("name", ["grouped", "one group", "moe"])
def test_more_ranks_than_groups(converters, name):
    """mindformers then assembles the whole linear_qkv and cuts that."""
    from mindformers.checkpoint.converter.template import WeightTemplate

    model = MODELS[name]
    tensors, collected = random(model), {}
    template = WeightTemplate(configured(converters, model, 4, 4))
    for one in ("q_proj", "k_proj", "v_proj"):
        source = f"model.layers.1.self_attn.{one}.weight"
        assert template.check_weights_for_qkv(source)
        made, array = template.preprocess_hf_weights(
            source, tensors[source], {}, collected, model.experts
        )
    assert made == QKV
    np.testing.assert_array_equal(assemble(rules(model), tensors)[QKV], array)


def test_contiguous_orders_are_those_of_its_older_conversion():
    """The template has one order only; ``convert_hf_weight`` of Checkpoint 1.0 follows the
    settings."""
    from mindformers.parallel_core.utils.model_mixin import TrainModelMixin

    mixin, hf = TrainModelMixin(), "model.layers.1."
    for model in (GROUPED, MODELS["contiguous"]):
        tensors = random(model)
        whole = assemble(rules(model), tensors)
        q, k, v = (tensors[f"{hf}self_attn.{one}_proj.weight"] for one in "qkv")
        gate, up = (tensors[f"{hf}mlp.{one}_proj.weight"] for one in ("gate", "up"))
        if model is GROUPED:
            qkv = mixin.concat_qkv_interleaved(
                q, k, v, QKV.replace("qkv", "q"), model.head_dim, model.groups, model.heads
            )
            fc1 = mixin.concat_linear_fc1_interleaved(
                gate, up, FC1.replace("linear_fc1", "gating"), model.inner
            )
        else:
            qkv = mixin.concat_qkv_contiguous(q, k, v, QKV.replace("qkv", "q"))
            fc1 = mixin.concat_linear_fc1_contiguous(gate, up, FC1.replace("linear_fc1", "gating"))
        np.testing.assert_array_equal(whole[QKV], qkv[QKV])
        np.testing.assert_array_equal(whole[FC1], fc1[FC1])


def test_template_is_compared_by_name(converters):
    for model in (GROUPED, MOE, MODELS["tied"]):
        assert compare_with_template(converters[model.kind], model) == []
    less = [op for op in converters[DENSE] if "lm_head.weight" not in op.hf_names]
    assert compare_with_template(less, GROUPED) == [
        f"{HEAD} is made of nothing by mindformers, of lm_head.weight by the rules"
    ]
    found = compare_with_template(converters[DENSE], MOE)
    assert len(found) == 5 and any(
        "linear_fc1" in row and "of nothing by the rules" in row for row in found
    )

    class TransposeConvertOp:
        hf_names, mf_names = ["model.norm.weight"], ["decoder.final_layernorm.weight"]

    assert compare_with_template([*converters[DENSE], TransposeConvertOp()], GROUPED) == [
        "TransposeConvertOp for decoder.final_layernorm.weight is an unknown operation"
    ]


# ---- as arithmetic -------------------------------------------------------------------------------


@given(
    st.sampled_from([DENSE, EXPERTS]),
    st.integers(1, 2),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_rules_cover_each_element_once_and_are_invertible(
    kind, layers, hidden, groups, each, head_dim, inner, attention, mlp, tied
):
    experts = {"experts": 3, "expert_inner": inner} if kind == EXPERTS else {}
    attention, mlp = (CONTIGUOUS if one else INTERLEAVED for one in (attention, mlp))
    model = Model(
        kind,
        layers,
        hidden,
        groups * each,
        groups,
        head_dim,
        inner,
        7,
        tied=tied,
        attention=attention,
        mlp=mlp,
        **experts,
    )
    assert_bijective(model)


@given(
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.tuples(st.integers(0, 4), *[st.integers(1, 4)] * 4),
    st.integers(0, 2),
    *[st.booleans()] * 4,
)
def test_rules_of_latent_models_too(
    layers, dense, hidden, heads, latent, shared, predicts, mlp, concatenated, tied
):
    dense = min(dense, layers)
    predictions = int(predicts and dense < layers)
    assert_bijective(
        Model(
            "deepseek_v3",
            layers,
            hidden,
            heads,
            0,
            0,
            3,
            7,
            2,
            5,
            shared,
            dense,
            predictions,
            Latent(*latent),
            tied,
            mlp=CONTIGUOUS if mlp else INTERLEAVED,
            concatenated=concatenated,
        )
    )


def assert_bijective(model):
    """Each element of each tensor is in one block, in both directions, and a round trip changes
    none."""
    known = rules(model)
    if model.tied:
        del known[HEAD]
    for rule in (*known.values(), *inverse_rules(known).values()):
        count = np.zeros(rule.shape, int)
        for block in rule.blocks:
            count[np.ix_(*block.part)] += 1
        assert (count == 1).all()
    tensors = {
        name: np.random.default_rng(2).random(shape, np.float32)
        for name, shape in shapes(known).items()
    }
    again = assemble(inverse_rules(known), assemble(known, tensors))
    assert tensors.keys() == again.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, again[name])


def test_tied_head_is_the_embedding():
    known = rules(MODELS["tied"])
    assert known[HEAD].blocks == known[EMBEDDING].blocks and "lm_head.weight" not in shapes(known)
    assert {block.name for block in inverse_rules(known)["model.embed_tokens.weight"].blocks} == {
        EMBEDDING
    }


# ---- the configuration ---------------------------------------------------------------------------


def test_dimensions():
    assert model_from_config(DOCUMENT, "config.json") == GROUPED
    assert model_from_config({**DOCUMENT, "num_key_value_heads": None}, "config.json").groups == 8
    assert model_from_config(MOE_DOCUMENT, "x", CONTIGUOUS) == Model(
        EXPERTS, 2, 16, 8, 4, 6, 0, 20, 4, 10, attention=CONTIGUOUS, source="x"
    )
    without = {
        key: value for key, value in DOCUMENT.items() if key not in ("head_dim", "architectures")
    }
    assert model_from_config(without, "x").head_dim == 128  # as transformers has it
    assert (
        model_from_config(
            {**without, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 10},
            "x",
        ).head_dim
        == 2
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"model_type": "llama"},
            "model_type 'llama'.*Qwen3ForCausalLM .qwen3., .*, DeepseekV3ForCausalLM .deepseek_v3.",
        ),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"hidden_size": None}, "hidden_size should be a number from 1 to 16777216, found None"),
        ({"num_key_value_heads": 3}, "8 is not a multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_unsupported_features_are_refused_by_name(change, message):
    with pytest.raises(ConfigError, match=message):
        model_from_config({**DOCUMENT, **change}, "config.json")


LATENT_DOCUMENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 12,
    "vocab_size": 20,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "dtype": "bfloat16",
    "attention_bias": False,
}


def test_dimensions_of_latent_models():
    assert model_from_config(LATENT_DOCUMENT, "config.json") == LATENT
    other = {
        **LATENT_DOCUMENT,
        "model_type": "telechat3_moe",
        "architectures": ["TeleChat3MoeForCausalLM"],
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "num_nextn_predict_layers": None,
    }
    assert (
        model_from_config(other, "config.json", concatenated=True) == MODELS["concatenated queries"]
    )
    fp8 = {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 64],
            "activation_scheme": "dynamic",
        }
    }
    assert model_from_config({**LATENT_DOCUMENT, **fp8}, "config.json") == replace(
        LATENT, block=(128, 64)
    )
    telechat = {
        **DOCUMENT,
        "model_type": "telechat3",
        "architectures": ["TeleChat3ForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "mlp_bias": False,
    }
    assert model_from_config(telechat, "config.json", concatenated=True) == TELECHAT


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"kv_lora_rank": None}, "kv_lora_rank should be a number"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace 4 is more than num_hidden_layers 3"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2.*one such layer at most"),
        (
            {"first_k_dense_replace": 3},
            "num_nextn_predict_layers is 1, with 0 of 3 layers with experts",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
            "weight_block_size",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "weight_block_size": [128, 128]}},
            "gptq",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "fmt": "e5m2",
                    "weight_block_size": [128, 128],
                }
            },
            "e5m2",
        ),
    ],
)
def test_latent_models_that_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        model_from_config({**LATENT_DOCUMENT, **change}, "config.json")


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats(allow_nan=False)
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
)


@given(
    st.dictionaries(
        st.sampled_from([*LATENT_DOCUMENT, "quantization_config", "tie_word_embeddings"]),
        _JSON,
        max_size=3,
    )
)
def test_any_configuration_is_a_model_or_refused(changes):
    try:
        model = model_from_config({**LATENT_DOCUMENT, **changes}, "config.json")
    except ConfigError as error:
        assert "config.json" in str(error)
    else:
        assert inverse_rules(rules(replace(model, layers=min(model.layers, 3), dense_layers=0)))


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigError, match="order of linear_fc1 is 'mixed'"):
        model_from_config(DOCUMENT, "config.json", mlp="mixed")


def test_contiguous_orders_and_tensor_parallelism():
    tensor, optimizer = TensorLayout((2, 2), (0, -1)), TensorLayout((4,), (-1, -1), -1)
    model = MODELS["contiguous"]
    check_contiguous_order(GROUPED, {QKV: tensor, FC1: tensor})
    check_contiguous_order(
        model,
        {
            QKV: optimizer,
            FC1: optimizer,
            "decoder.layers.0.mlp.linear_fc2.weight": TensorLayout((2,), (-1, 0)),
            "decoder.final_layernorm.weight": TensorLayout((2, 2), (-1,)),
            "x": TensorLayout((2,), ()),
        },
    )
    for name in (QKV, FC1, f"adam_m.{FC1}"):
        with pytest.raises(ConfigError, match=r"linear_.*sharded by tensor parallelism \(2\)"):
            check_contiguous_order(model, {name: tensor})
