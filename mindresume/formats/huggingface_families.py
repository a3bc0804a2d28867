"""Tables of the model families: which tensors of Hugging Face make each parameter of MindSpore
Transformers' training network.

    for row in FAMILIES["deepseek_v3"].layer: print(row.name, row.order, row.sources)

Names are relative to the place of the table, such as ``decoder.layers.N.`` and ``model.layers.N.``.
Names of parameters are those of the networks of mindformers 1.8.0 to 2.1.0
(``parallel_core/training_graph``), names of sources those of ``weight_mapping`` and
``weight_converters`` (``models/*/utils.py``). Shapes are written with keys of ``config.json``:
``num_experts x hidden_size``.

The orders within a parameter, as the networks compute with them:

SAME         the tensor itself
STACKED      the rows of each tensor after those of the one before
ALTERNATING  row 2i is row i of the first tensor, row 2i+1 row i of the second (``mlp.py``,
             MLPInterleaved)
BY_GROUP     for each query group its query heads, its key head, its value head (``attention.py``)
PER_EXPERT   for each expert its transposed tensors, side by side (``moe/ffn.py``, FFNGroupedGEMM)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

SAME = "same"
STACKED = "stacked"
ALTERNATING = "alternating"
BY_GROUP = "by group"
PER_EXPERT = "per expert"

# What ``Row.when`` asks for: settings of the network, and features of the model.
INTERLEAVED_ATTENTION, CONTIGUOUS_ATTENTION = "interleaved attention", "contiguous attention"
INTERLEAVED_MLP, CONTIGUOUS_MLP = "interleaved MLP", "contiguous MLP"
# mla_qkv_concat
SEPARATE, CONCATENATED = "separate latent projections", "concatenated latent projections"
# q_lora_rank
COMPRESSED, UNCOMPRESSED = "compressed queries", "uncompressed queries"
TIED, UNTIED = "tied embeddings", "untied embeddings"
SHARED_EXPERTS = "shared experts"


class Source(NamedTuple):
    """Names a tensor of Hugging Face and its shape. ``{}`` in the name: the number of an expert."""

    name: str
    shape: tuple[str, ...]


class Row(NamedTuple):
    """Describes one parameter. It exists if the model and the network have all of ``when``.
    ``float32``: an export keeps it in float32, as transformers does."""

    name: str
    sources: tuple[Source, ...]
    order: str = SAME
    when: tuple[str, ...] = ()
    float32: bool = False


@dataclass(frozen=True)
class Family:
    """The tables of one ``model_type``.

    Attributes:
        architecture: the class in ``architectures``.
        layer: parameters of every layer.
        dense: parameters of a layer without experts.
        experts: parameters of a layer with experts.
        prediction: parameters of a next-token-prediction layer besides those of its transformer
            layer.
        copies: {tensor of such a layer: tensor of the model}. Hugging Face stores the tensor twice,
            the network holds it once.
        experts_key: key of the number of experts; empty: the family has none.
        latent: whether attention is latent (MLA).
        plain: {key of ``config.json``: values that have rules}; other values are refused.
    """

    architecture: str
    layer: tuple[Row, ...]
    dense: tuple[Row, ...] = ()
    experts: tuple[Row, ...] = ()
    prediction: tuple[Row, ...] = ()
    copies: Mapping[str, str] | None = None
    experts_key: str = ""
    latent: bool = False
    plain: Mapping[str, tuple[Any, ...]] | None = None


def _same(
    name: str, source: str, *shape: str, when: tuple[str, ...] = (), float32: bool = False
) -> Row:
    return Row(name, (Source(source, shape),), SAME, when, float32)


_EMBEDDING = Source("model.embed_tokens.weight", ("vocab_size", "hidden_size"))
MODEL = (  # of every family; a tied head is the embedding
    Row("embedding.word_embeddings.weight", (_EMBEDDING,)),
    _same("output_layer.weight", "lm_head.weight", "vocab_size", "hidden_size", when=(UNTIED,)),
    Row("output_layer.weight", (_EMBEDDING,), when=(TIED,)),
    _same("decoder.final_layernorm.weight", "model.norm.weight", "hidden_size"),
)

_NORMS = (
    _same("input_layernorm.weight", "input_layernorm.weight", "hidden_size"),
    _same("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", "hidden_size"),
)

# ---- attention -----------------------------------------------------------------------------------

_QKV = (
    Source("self_attn.q_proj.weight", ("num_attention_heads x head_dim", "hidden_size")),
    Source("self_attn.k_proj.weight", ("num_key_value_heads x head_dim", "hidden_size")),
    Source("self_attn.v_proj.weight", ("num_key_value_heads x head_dim", "hidden_size")),
)
_GROUPED = (
    Row("self_attention.linear_qkv.weight", _QKV, BY_GROUP, (INTERLEAVED_ATTENTION,)),
    Row("self_attention.linear_qkv.weight", _QKV, STACKED, (CONTIGUOUS_ATTENTION,)),
    _same(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        "hidden_size",
        "num_attention_heads x head_dim",
    ),
)
_QK_NORMS = (
    _same("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", "head_dim"),
    _same("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", "head_dim"),
)

_HEADS = "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
_QUERY = Source("self_attn.q_proj.weight", (_HEADS, "hidden_size"))
_QUERY_DOWN = Source("self_attn.q_a_proj.weight", ("q_lora_rank", "hidden_size"))
_QUERY_UP = Source("self_attn.q_b_proj.weight", (_HEADS, "q_lora_rank"))
_KEY_VALUE_DOWN = Source(
    "self_attn.kv_a_proj_with_mqa.weight", ("(kv_lora_rank + qk_rope_head_dim)", "hidden_size")
)
_KEY_VALUE_NORM = Source("self_attn.kv_a_layernorm.weight", ("kv_lora_rank",))
_KEY_VALUE_UP = Source(
    "self_attn.kv_b_proj.weight",
    ("num_attention_heads x (qk_nope_head_dim + v_head_dim)", "kv_lora_rank"),
)
# the network itself reorders the rotary part, in both settings
_LATENT = (
    Row("self_attention.linear_q_proj.weight", (_QUERY,), when=(SEPARATE, UNCOMPRESSED)),
    Row("self_attention.linear_q_down_proj.weight", (_QUERY_DOWN,), when=(SEPARATE, COMPRESSED)),
    Row("self_attention.linear_q_up_proj.weight", (_QUERY_UP,), when=(SEPARATE, COMPRESSED)),
    Row("self_attention.linear_kv_down_proj.weight", (_KEY_VALUE_DOWN,), when=(SEPARATE,)),
    Row("self_attention.kv_layernorm.weight", (_KEY_VALUE_NORM,), when=(SEPARATE,)),
    Row("self_attention.linear_kv_up_proj.weight", (_KEY_VALUE_UP,), when=(SEPARATE,)),
    Row(
        "self_attention.linear_qkv.weight",
        (_QUERY, _KEY_VALUE_DOWN),
        STACKED,
        (CONCATENATED, UNCOMPRESSED),
    ),
    Row(
        "self_attention.linear_qkv.weight",
        (_QUERY_DOWN, _KEY_VALUE_DOWN),
        STACKED,
        (CONCATENATED, COMPRESSED),
    ),
    Row("self_attention.linear_qb.weight", (_QUERY_UP,), when=(CONCATENATED, COMPRESSED)),
    Row("self_attention.k_layernorm.weight", (_KEY_VALUE_NORM,), when=(CONCATENATED,)),
    Row("self_attention.linear_kvb.weight", (_KEY_VALUE_UP,), when=(CONCATENATED,)),
    _same(
        "self_attention.q_layernorm.weight",
        "self_attn.q_a_layernorm.weight",
        "q_lora_rank",
        when=(COMPRESSED,),
    ),
    _same(
        "self_attention.linear_proj.weight",
        "self_attn.o_proj.weight",
        "hidden_size",
        "num_attention_heads x v_head_dim",
    ),
)

# ---- MLP and experts -----------------------------------------------------------------------------


def _mlp(at: str, hf: str, size: str, when: tuple[str, ...] = ()) -> tuple[Row, ...]:
    gate_up = (
        Source(f"{hf}gate_proj.weight", (size, "hidden_size")),
        Source(f"{hf}up_proj.weight", (size, "hidden_size")),
    )
    return (
        Row(f"{at}linear_fc1.weight", gate_up, ALTERNATING, (INTERLEAVED_MLP, *when)),
        Row(f"{at}linear_fc1.weight", gate_up, STACKED, (CONTIGUOUS_MLP, *when)),
        _same(f"{at}linear_fc2.weight", f"{hf}down_proj.weight", "hidden_size", size, when=when),
    )


def _experts(key: str) -> tuple[Row, ...]:
    gate, up = (
        Source(f"mlp.experts.{{}}.{one}_proj.weight", ("moe_intermediate_size", "hidden_size"))
        for one in ("gate", "up")
    )
    down = Source("mlp.experts.{}.down_proj.weight", ("hidden_size", "moe_intermediate_size"))
    return (
        _same("mlp.router.weight", "mlp.gate.weight", key, "hidden_size"),
        Row("mlp.experts.weight1", (gate, up), PER_EXPERT),
        Row("mlp.experts.weight2", (down,), PER_EXPERT),
    )


_DENSE = _mlp("mlp.", "mlp.", "intermediate_size")
_BIASED_EXPERTS = (
    *_experts("n_routed_experts"),
    _same(
        "mlp.router.expert_bias",
        "mlp.gate.e_score_correction_bias",
        "n_routed_experts",
        float32=True,
    ),
    *_mlp(
        "mlp.shared_experts.",
        "mlp.shared_experts.",
        "n_shared_experts x moe_intermediate_size",
        (SHARED_EXPERTS,),
    ),
)

# ---- next-token prediction -----------------------------------------------------------------------

_PREDICTION = (
    _same("enorm.weight", "enorm.weight", "hidden_size"),
    _same("hnorm.weight", "hnorm.weight", "hidden_size"),
    _same("eh_proj.weight", "eh_proj.weight", "hidden_size", "2 x hidden_size"),
    _same("final_layernorm.weight", "shared_head.norm.weight", "hidden_size"),
)
_COPIES = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "shared_head.head.weight": "lm_head.weight",
}

# ---- the families --------------------------------------------------------------------------------

_PLAIN = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "decoder_sparse_step": (None, 1),
    "mlp_only_layers": (None, []),
    "moe_layer_freq": (None, 1),
}
_LATENT_EXPERTS = {**_PLAIN, "rope_interleave": (None, True), "topk_method": (None, "noaux_tc")}

FAMILIES: Mapping[str, Family] = {
    "qwen3": Family("Qwen3ForCausalLM", (*_NORMS, *_GROUPED, *_QK_NORMS), _DENSE, plain=_PLAIN),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (*_NORMS, *_GROUPED, *_QK_NORMS),
        experts=_experts("num_experts"),
        experts_key="num_experts",
        plain=_PLAIN,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (*_NORMS, *_LATENT),
        _DENSE,
        _BIASED_EXPERTS,
        _PREDICTION,
        _COPIES,
        "n_routed_experts",
        latent=True,
        plain=_LATENT_EXPERTS,
    ),
    "telechat3": Family(
        "TeleChat3ForCausalLM",
        (*_NORMS, *_GROUPED),
        _DENSE,
        plain={**_PLAIN, "num_nextn_predict_layers": (None, 0)},
    ),
    "telechat3_moe": Family(
        "TeleChat3MoeForCausalLM",
        (*_NORMS, *_LATENT),
        _DENSE,
        _BIASED_EXPERTS,
        _PREDICTION,
        _COPIES,
        "n_routed_experts",
        latent=True,
        plain=_LATENT_EXPERTS,
    ),
}
