"""Maps the tensors of Qwen3 between MindSpore Transformers and Hugging Face: which part of a tensor is which part of another.

    model = model_from_config(json.load(open("config.json")), "config.json")
    known = rules(model)                        # {MindSpore name: Rule}, shapes of whole tensors
    known["decoder.layers.0.self_attention.linear_qkv.weight"].blocks
    inverse_rules(known)                        # {Hugging Face name: Rule}

The order within MindSpore's whole tensors, as mindformers 1.9.0 trains them (``parallel_core/training_graph/transformer``):

linear_qkv  interleaved (default): for each query group its query heads, its key head, its value head
            (``attention.py:676``); contiguous (``use_contiguous_weight_layout_attention``): all q, all k, all v (``:564``)
linear_fc1  interleaved (default): row 2i is row i of gate_proj, row 2i+1 row i of up_proj (``mlp.py``, MLPInterleaved);
            contiguous (``use_interleaved_weight_layout_mlp: False``): all of gate_proj, then all of up_proj
experts     ``weight1``: for each expert the transposed gate_proj and, to its right, the transposed up_proj;
            ``weight2``: for each expert the transposed down_proj (``moe/ffn.py``, FFNGroupedGEMM); in every setting

Interleaved orders do not depend on the parallel layout. Contiguous ones do: tensor parallelism splits the part of each rank into
[q, k, v] and [gate, up] (``skip_redistribution``), so the whole tensor is not in the order above; see ``check_contiguous_order``.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindresume.errors import ConfigError
from mindresume.model.layout import TensorLayout
from mindresume.model.training_state import is_count

CONFIG = "config.json"
DENSE, EXPERTS = "qwen3", "qwen3_moe"                   # model_type
ARCHITECTURES = {DENSE: "Qwen3ForCausalLM", EXPERTS: "Qwen3MoeForCausalLM"}
INTERLEAVED, CONTIGUOUS = "interleaved", "contiguous"
ORDERS = (INTERLEAVED, CONTIGUOUS)
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
HF_HEAD, HF_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FC1, QKV = "linear_fc1", "linear_qkv"
MAX_NUMBER = 1 << 24                # layers, heads, rows, words; no model has more
MAX_PARTS = 1 << 18                 # heads and experts of all layers; each becomes a block of a rule
_OPERATIONS = ("RenameConvertOp", "QKVConvertOp", "ConcatConvertOp", "ExpertsConvertOp")     # of mindformers, in the rules

Part = tuple[range, ...]            # part of a tensor: ascending indices of each dimension; only the first has gaps


@dataclass(frozen=True)
class Model:
    """The dimensions and weight orders of a model.

    Attributes:
        kind: DENSE or EXPERTS (``model_type``).
        layers: number of layers.
        hidden: hidden size.
        heads: attention heads.
        groups: key-value heads.
        head_dim: size of a head.
        inner: width of the MLP, or of one expert.
        vocabulary: number of words.
        experts: 0 if dense.
        tied: lm_head is the embedding.
        attention: order of linear_qkv, one of ORDERS.
        mlp: order of linear_fc1, one of ORDERS.
        source: where the dimensions come from, for messages.
    """
    kind: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    inner: int
    vocabulary: int
    experts: int = 0
    tied: bool = False
    attention: str = INTERLEAVED
    mlp: str = INTERLEAVED
    source: str = CONFIG


class Block(NamedTuple):
    """States that ``part`` of a tensor equals ``other`` of tensor ``name`` in the other naming. ``transposed``: with the two
    dimensions exchanged."""
    part: Part
    name: str
    other: Part
    transposed: bool = False


@dataclass(frozen=True)
class Rule:
    """Composes a tensor of ``shape`` from ``blocks``, which cover each element once. ``shape_formula``: the factors of the shape,
    for messages."""
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    shape_formula: str


# ---- the model -----------------------------------------------------------------------------------------------------

def model_from_config(document: Mapping[str, Any], source: str, attention: str = INTERLEAVED, mlp: str = INTERLEAVED) -> Model:
    """Reads the dimensions from a Hugging Face ``config.json``.

    Args:
        document: the parsed file.
        source: its path, for messages.
        attention: order of linear_qkv.
        mlp: order of linear_fc1.

    Raises:
        ConfigError: No rule supports the model or one of its features, or dimensions are missing or inconsistent.
    """
    kind, architectures = document.get("model_type"), document.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    if not isinstance(kind, str) or kind not in ARCHITECTURES or named not in (None, ARCHITECTURES[kind]):
        raise ConfigError(f"{source}: model_type {kind!r}, architectures {architectures!r}"[:400]
                          + "; supported are the weights of "
                          + " and ".join(f"{name} ({kind})" for kind, name in ARCHITECTURES.items()))
    for option, value, allowed in (("order of linear_qkv", attention, ORDERS), ("order of linear_fc1", mlp, ORDERS)):
        if value not in allowed:
            raise ConfigError(f"{option} is {value!r}; choose one of {', '.join(allowed)}")
    for key, plain in (("attention_bias", (None, False)), ("quantization_config", (None,)), ("decoder_sparse_step", (None, 1)),
                       ("mlp_only_layers", (None, []))):
        if document.get(key) not in plain:
            raise ConfigError(f"{source}: {key} is {document[key]!r}"[:400] + "; no rule is known for weights of such a model. "
                              f"Supported: {plain[-1]!r}")

    def number(key: str, default: int | None = None) -> int:
        value = document.get(key, default)
        if not is_count(value, 1, MAX_NUMBER):
            raise ConfigError(f"{source}: {key} should be a number from 1 to {MAX_NUMBER}, found {value!r}"[:400])
        return value
    heads, hidden = number("num_attention_heads"), number("hidden_size")
    groups = heads if document.get("num_key_value_heads", 0) is None else number("num_key_value_heads")
    if heads % groups:
        raise ConfigError(f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    default = 128 if kind == DENSE else hidden // heads     # the default of transformers
    moe = kind == EXPERTS
    tied = document.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ConfigError(f"{source}: tie_word_embeddings should be true or false, found {tied!r}")
    layers, experts = number("num_hidden_layers"), number("num_experts") if moe else 0
    if layers * (groups + experts) > MAX_PARTS:
        raise ConfigError(f"{source}: num_hidden_layers {layers} x (num_key_value_heads {groups} + num_experts {experts}) is "
                          f"more than {MAX_PARTS}; is this the config.json of the model?")
    return Model(kind, layers, hidden, heads, groups, number("head_dim", default),
                 number("moe_intermediate_size" if moe else "intermediate_size"), number("vocab_size"), experts, tied,
                 attention, mlp, source)


def check_contiguous_order(model: Model, layouts: Mapping[str, TensorLayout]) -> None:
    """Raises ConfigError if tensor parallelism shards a tensor of ``layouts`` that is in contiguous order: the order of the whole
    tensor then depends on the number of pieces. An optimizer shard is harmless, as no computation uses its pieces alone."""
    for name, layout in layouts.items():
        contiguous = (f".{QKV}." in name and model.attention == CONTIGUOUS) or (f".{FC1}." in name and model.mlp == CONTIGUOUS)
        pieces = math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes()[0]) if layout.axes() else 1
        if contiguous and pieces > 1:
            raise ConfigError(f"{name} is in contiguous order and sharded by tensor parallelism ({pieces}): each rank then has "
                              f"its own [q, k, v] or [gate, up], and no rule exists for the whole tensor. Use "
                              f"use_contiguous_weight_layout_attention: False and use_interleaved_weight_layout_mlp: True")


# ---- rules ---------------------------------------------------------------------------------------------------------

def rules(model: Model) -> dict[str, Rule]:
    """Returns {MindSpore name: Rule} for all tensors of the network. With tied weights the network has no HEAD; its rule takes
    the embedding, for a network that is not tied and starts from these weights."""
    m = model
    found = {EMBEDDING: _same(HF_EMBEDDING, (m.vocabulary, m.hidden), "vocab_size x hidden_size"),
             HEAD: _same(HF_EMBEDDING if m.tied else HF_HEAD, (m.vocabulary, m.hidden), "vocab_size x hidden_size"),
             "decoder.final_layernorm.weight": _same("model.norm.weight", (m.hidden,), "hidden_size")}
    for i in range(m.layers):
        found |= _layer(m, f"decoder.layers.{i}.", f"model.layers.{i}.")
    return found


def _layer(m: Model, at: str, hf: str) -> dict[str, Rule]:
    width = f"num_attention_heads {m.heads} x head_dim {m.head_dim}"
    found = {
        at + "input_layernorm.weight": _same(hf + "input_layernorm.weight", (m.hidden,), "hidden_size"),
        at + "pre_mlp_layernorm.weight": _same(hf + "post_attention_layernorm.weight", (m.hidden,), "hidden_size"),
        at + "self_attention.q_layernorm.weight": _same(hf + "self_attn.q_norm.weight", (m.head_dim,), "head_dim"),
        at + "self_attention.k_layernorm.weight": _same(hf + "self_attn.k_norm.weight", (m.head_dim,), "head_dim"),
        at + "self_attention.linear_proj.weight": _same(hf + "self_attn.o_proj.weight", (m.hidden, m.heads * m.head_dim),
                                                        f"hidden_size x ({width})"),
        at + f"self_attention.{QKV}.weight": _qkv(m, hf + "self_attn."),
    }
    if not m.experts:
        found[at + f"mlp.{FC1}.weight"] = _fc1(m, hf + "mlp.")
        found[at + "mlp.linear_fc2.weight"] = _same(hf + "mlp.down_proj.weight", (m.hidden, m.inner),
                                                    "hidden_size x intermediate_size")
        return found
    found[at + "mlp.router.weight"] = _same(hf + "mlp.gate.weight", (m.experts, m.hidden), "num_experts x hidden_size")
    found[at + "mlp.experts.weight1"], found[at + "mlp.experts.weight2"] = _experts(m, hf + "mlp.experts.")
    return found


def _same(name: str, shape: tuple[int, ...], shape_formula: str) -> Rule:
    everything = tuple(range(size) for size in shape)
    return Rule(shape, (Block(everything, name, everything),), shape_formula)


def _qkv(m: Model, hf: str) -> Rule:
    each, columns, blocks, row = m.heads // m.groups, range(m.hidden), [], 0
    sizes = [("q_proj", each * m.head_dim), ("k_proj", m.head_dim), ("v_proj", m.head_dim)]
    if m.attention == INTERLEAVED:
        pieces = [(name, group * rows, rows) for group in range(m.groups) for name, rows in sizes]
    else:
        pieces = [(name, 0, rows * m.groups) for name, rows in sizes]
    for name, first, rows in pieces:
        blocks.append(Block((range(row, row + rows), columns), f"{hf}{name}.weight", (range(first, first + rows), columns)))
        row += rows
    return Rule((row, m.hidden), tuple(blocks), f"(num_attention_heads {m.heads} + 2 x num_key_value_heads {m.groups}) x "
                                                f"head_dim {m.head_dim} = {row}, by hidden_size")


def _fc1(m: Model, hf: str) -> Rule:
    rows, columns = range(m.inner), range(m.hidden)
    gate, up = (range(0, 2 * m.inner, 2), range(1, 2 * m.inner, 2)) if m.mlp == INTERLEAVED else (
        rows, range(m.inner, 2 * m.inner))
    return Rule((2 * m.inner, m.hidden), (Block((gate, columns), hf + "gate_proj.weight", (rows, columns)),
                                          Block((up, columns), hf + "up_proj.weight", (rows, columns))),
                f"2 x intermediate_size {m.inner} = {2 * m.inner}, by hidden_size")


def _experts(m: Model, hf: str) -> tuple[Rule, Rule]:
    hidden, inner = range(m.hidden), range(m.inner)
    first, second = [], []
    for e in range(m.experts):
        rows = range(e * m.hidden, (e + 1) * m.hidden)
        first.append(Block((rows, inner), f"{hf}{e}.gate_proj.weight", (inner, hidden), True))
        first.append(Block((rows, range(m.inner, 2 * m.inner)), f"{hf}{e}.up_proj.weight", (inner, hidden), True))
        second.append(Block((range(e * m.inner, (e + 1) * m.inner), hidden), f"{hf}{e}.down_proj.weight", (hidden, inner), True))
    return (Rule((m.experts * m.hidden, 2 * m.inner), tuple(first), f"(num_experts {m.experts} x hidden_size {m.hidden}) by "
                                                                    f"(2 x moe_intermediate_size {m.inner})"),
            Rule((m.experts * m.inner, m.hidden), tuple(second), f"(num_experts {m.experts} x moe_intermediate_size {m.inner}) "
                                                                 f"by hidden_size {m.hidden}"))


def shapes(known: Mapping[str, Rule]) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of the tensors that the rules take their parts from."""
    found: dict[str, tuple[int, ...]] = {}
    for rule in known.values():
        for block in rule.blocks:
            ends = tuple(indices[-1] + 1 for indices in block.other)
            found[block.name] = tuple(map(max, found.get(block.name, ends), ends))
    return found


def inverse_rules(known: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns rules for the tensors that ``known`` takes its parts from. If two rules use the same tensor (tied weights), the
    first one counts."""
    blocks: dict[str, list[Block]] = {}
    owner: dict[str, str] = {}
    for name, rule in known.items():
        for block in rule.blocks:
            if owner.setdefault(block.name, name) == name:
                blocks.setdefault(block.name, []).append(Block(block.other, name, block.part, block.transposed))
    return {name: Rule(shape, tuple(blocks[name]), known[owner[name]].shape_formula) for name, shape in shapes(known).items()}


# ---- mindformers' own template -------------------------------------------------------------------------------------

def compare_with_template(converters: Iterable[Any], model: Model) -> list[str]:
    """Compares ``rules`` with the ``weight_converters`` of a mindformers network (``checkpoint/converter/template.py``).
    Returns a sentence for each difference. Compares only names and kinds of operations: the order within a tensor depends on
    settings that these operations do not use."""
    known = {name: {block.name for block in rule.blocks} for name, rule in rules(model).items()}
    expected = {name: {_wild(source) for source in sources} for name, sources in known.items()}
    if model.tied:
        expected[HEAD] = {HF_HEAD}
    found, problems = {}, []
    for converter in converters:
        kind = type(converter).__name__
        if kind not in _OPERATIONS:
            problems.append(f"{kind} for {', '.join(converter.mf_names)} is an unknown operation")
        for name in converter.mf_names:
            found[name] = {_wild(source) for source in converter.hf_names}
    ours = {_wild(name): sources for name, sources in expected.items()}
    for name in dict.fromkeys((*ours, *found)):
        if ours.get(name) != found.get(name):
            problems.append(f"{name} is made of {_list(found.get(name))} by mindformers, of {_list(ours.get(name))} by the rules")
    return problems


def _wild(name: str) -> str:
    return re.sub(r"\.\d+\.", ".{}.", name)


def _list(names: Iterable[str] | None) -> str:
    return " and ".join(sorted(names)) if names else "nothing"
