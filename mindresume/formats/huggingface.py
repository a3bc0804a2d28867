"""Reads the dimensions of a model from a Hugging Face ``config.json``, and makes rules of the
tables of its family: which part of a tensor is which part of another.

    model = model_from_config(json.load(open("config.json")), "config.json")
    model.dimensions["hidden_size"], model.features
    known = rules(model)                        # {MindSpore name: Rule}, shapes of whole tensors
    known["decoder.layers.0.self_attention.linear_qkv.weight"].blocks
    inverse_rules(known)                        # {Hugging Face name: Rule}
    copies(model)                               # {Hugging Face name: the tensor that it repeats}

``formats/huggingface_families.py`` has the tables of names.

Interleaved orders of linear_qkv and linear_fc1 do not depend on the parallel layout. Contiguous
ones do: tensor parallelism splits the part of each rank into [q, k, v] and [gate, up]
(``skip_redistribution``), so the whole tensor is not in the order of the tables; see
``check_contiguous_order``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindresume.errors import ConfigError
from mindresume.formats import huggingface_families as tables
from mindresume.formats.huggingface_families import (
    ALTERNATING,
    BY_GROUP,
    FAMILIES,
    PER_EXPERT,
    Family,
    Row,
)
from mindresume.model.layout import TensorLayout
from mindresume.typed import is_count

CONFIG = "config.json"
DENSE, EXPERTS = "qwen3", "qwen3_moe"  # model_type
INTERLEAVED, CONTIGUOUS = "interleaved", "contiguous"
ORDERS = (INTERLEAVED, CONTIGUOUS)
# of mindformers
ATTENTION_KEY = "use_contiguous_weight_layout_attention"
MLP_KEY = "use_interleaved_weight_layout_mlp"
HEAD, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
HF_HEAD, HF_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FC1, QKV = "linear_fc1", "linear_qkv"
QUANTIZATION = "quantization_config"
MAX_NUMBER = 1 << 24  # layers, heads, rows, words; no model has more
# heads and experts of all layers; each becomes a block of a rule
MAX_PARTS = 1 << 18
# of mindformers, in the rules
_OPERATIONS = ("RenameConvertOp", "QKVConvertOp", "ConcatConvertOp", "ExpertsConvertOp")


class Latent(NamedTuple):
    """Sizes of latent attention: ``q_lora_rank`` (0: queries are not compressed), ``kv_lora_rank``,
    ``qk_nope_head_dim``, ``qk_rope_head_dim``, ``v_head_dim``."""

    query_rank: int
    rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model.

    Attributes:
        kind: ``model_type``, a key of FAMILIES.
        layers: number of layers.
        hidden: hidden size.
        heads: attention heads.
        groups: key-value heads; with latent attention 0.
        head_dim: size of a head; with latent attention 0.
        inner: width of the MLP; 0 if no layer has one.
        vocabulary: number of words.
        experts: 0 if no layer has experts.
        expert_inner: width of one expert.
        shared: number of shared experts.
        dense_layers: in a model with experts, the first layers that have none.
        predictions: next-token-prediction layers.
        latent: sizes of latent attention; None: attention is grouped.
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
    expert_inner: int = 0
    shared: int = 0
    dense_layers: int = 0
    predictions: int = 0
    latent: Latent | None = None

    @property
    def family(self) -> Family:
        """Tables of its family."""
        return FAMILIES[self.kind]

    @property
    def dimensions(self) -> dict[str, int]:
        """Sizes by key of ``config.json``, for the shapes in the tables."""
        found = {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "moe_intermediate_size": self.expert_inner,
            "n_shared_experts": self.shared,
        }
        if self.family.experts_key:
            found[self.family.experts_key] = self.experts
        if self.latent:
            found |= zip(
                (
                    "q_lora_rank",
                    "kv_lora_rank",
                    "qk_nope_head_dim",
                    "qk_rope_head_dim",
                    "v_head_dim",
                ),
                self.latent,
                strict=True,
            )
        return found


@dataclass(frozen=True)
class Model(Dimensions):
    """The dimensions of a model, and the orders of its weights.

    Attributes:
        tied: lm_head is the embedding.
        attention: order of linear_qkv in grouped attention, one of ORDERS.
        mlp: order of linear_fc1, one of ORDERS.
        concatenated: whether latent projections are concatenated (``mla_qkv_concat``).
        block: rows and columns of one scale of fp8 weights; None: ``config.json`` has no
            ``quantization_config``.
        source: where the dimensions come from, for messages.
    """

    tied: bool = False
    attention: str = INTERLEAVED
    mlp: str = INTERLEAVED
    concatenated: bool = False
    block: tuple[int, int] | None = None
    source: str = CONFIG

    @property
    def features(self) -> frozenset[str]:
        """What rows of the tables ask for (``Row.when``)."""
        return frozenset(
            (
                tables.CONTIGUOUS_ATTENTION
                if self.attention == CONTIGUOUS
                else tables.INTERLEAVED_ATTENTION,
                tables.CONTIGUOUS_MLP if self.mlp == CONTIGUOUS else tables.INTERLEAVED_MLP,
                tables.CONCATENATED if self.concatenated else tables.SEPARATE,
                tables.COMPRESSED
                if self.latent and self.latent.query_rank
                else tables.UNCOMPRESSED,
                tables.TIED if self.tied else tables.UNTIED,
                *([tables.SHARED_EXPERTS] if self.shared else []),
            )
        )


class _Config(NamedTuple):
    """A parsed ``config.json``. ``source``: its path, for messages."""

    document: Mapping[str, Any]
    source: str

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.document.get(key, default)
        if not is_count(value, least, MAX_NUMBER):
            raise ConfigError(
                f"{self.source}: {key} should be a number from {least} to {MAX_NUMBER}, found "
                f"{value!r}"[:400]
            )
        return value

    def optional(self, key: str) -> int:
        return 0 if self.document.get(key) is None else self.number(key, least=0)


def model_from_config(
    document: Mapping[str, Any],
    source: str,
    attention: str = INTERLEAVED,
    mlp: str = INTERLEAVED,
    concatenated: bool = False,
) -> Model:
    """Reads the dimensions from a Hugging Face ``config.json``.

    Args:
        document: the parsed file.
        source: its path, for messages.
        attention: order of linear_qkv in grouped attention.
        mlp: order of linear_fc1.
        concatenated: whether latent projections are concatenated.

    Raises:
        ConfigError: No rule supports the model or one of its features, or dimensions are missing or
            inconsistent.
    """
    kind, architectures = document.get("model_type"), document.get("architectures")
    named = (
        architectures[0]
        if isinstance(architectures, list) and len(architectures) == 1
        else architectures
    )
    if (
        not isinstance(kind, str)
        or kind not in FAMILIES
        or named not in (None, FAMILIES[kind].architecture)
    ):
        raise ConfigError(
            f"{source}: model_type {kind!r}, architectures {architectures!r}"[:400]
            + "; supported are the weights of "
            + ", ".join(f"{family.architecture} ({name})" for name, family in FAMILIES.items())
        )
    family = FAMILIES[kind]
    for option, value in (("order of linear_qkv", attention), ("order of linear_fc1", mlp)):
        if value not in ORDERS:
            raise ConfigError(f"{option} is {value!r}; choose one of {', '.join(ORDERS)}")
    for key, plain in (family.plain or {}).items():
        if document.get(key) not in plain:
            raise ConfigError(
                f"{source}: {key} is {document[key]!r}"[:400]
                + f"; no rule is known for weights of such a model. Supported: {plain[-1]!r}"
            )
    config = _Config(document, source)
    heads = config.number("num_attention_heads")
    hidden = config.number("hidden_size")
    layers = config.number("num_hidden_layers")
    groups = head_dim = 0
    latent = None
    if family.latent:
        latent = Latent(
            config.optional("q_lora_rank"),
            *map(
                config.number,
                ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            ),
        )
    else:
        groups = (
            heads
            if document.get("num_key_value_heads", 0) is None
            else config.number("num_key_value_heads")
        )
        if heads % groups:
            raise ConfigError(
                f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
                f"{groups}"
            )
        # the defaults of transformers
        head_dim = config.number("head_dim", 128 if kind == DENSE else hidden // heads)
    experts = config.number(family.experts_key) if family.experts_key else 0
    dense_layers = config.optional("first_k_dense_replace") if experts and family.dense else 0
    predictions = config.optional("num_nextn_predict_layers") if family.prediction else 0
    if dense_layers > layers:
        raise ConfigError(
            f"{source}: first_k_dense_replace {dense_layers} is more than num_hidden_layers "
            f"{layers}"
        )
    if predictions > 1 or predictions and experts and dense_layers == layers:
        raise ConfigError(
            f"{source}: num_nextn_predict_layers is {predictions}, with {layers - dense_layers} of "
            f"{layers} layers with experts; mindformers trains one such layer at most, and only of "
            "the kind of the last layer"
        )
    if layers * (groups + experts) > MAX_PARTS:
        raise ConfigError(
            f"{source}: num_hidden_layers {layers} x (num_key_value_heads {groups} + experts "
            f"{experts}) is more than {MAX_PARTS}; is this the config.json of the model?"
        )
    tied = document.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ConfigError(f"{source}: tie_word_embeddings should be true or false, found {tied!r}")
    return Model(
        kind,
        layers,
        hidden,
        heads,
        groups,
        head_dim,
        config.number("intermediate_size") if family.dense else 0,
        config.number("vocab_size"),
        experts,
        config.number("moe_intermediate_size") if experts else 0,
        config.optional("n_shared_experts"),
        dense_layers,
        predictions,
        latent,
        tied,
        attention,
        mlp,
        concatenated and family.latent,
        _block_of(document, source),
        source,
    )


def _block_of(document: Mapping[str, Any], source: str) -> tuple[int, int] | None:
    """Returns rows and columns of one scale; None if the weights are not quantised. ConfigError for
    any quantisation but fp8 (e4m3) with a scale for each block."""
    found = document.get(QUANTIZATION)
    if found is None:
        return None
    block = found.get("weight_block_size") if isinstance(found, dict) else None
    if (
        not isinstance(found, dict)
        or found.get("quant_method") != "fp8"
        or found.get("fmt", "e4m3") != "e4m3"
        or not isinstance(block, list)
        or len(block) != 2
        or not all(is_count(size, 1, MAX_NUMBER) for size in block)
    ):
        raise ConfigError(
            f"{source}: {QUANTIZATION} is {found!r}"[:400]
            + "; supported is quant_method fp8 (fmt e4m3) with "
            "weight_block_size [rows, columns]. Use the unquantised weights of the model"
        )
    return block[0], block[1]


# ---- rules ---------------------------------------------------------------------------------------

# part of a tensor: ascending indices of each dimension; only the first has gaps
Part = tuple[range, ...]


class Block(NamedTuple):
    """States that ``part`` of a tensor equals ``other`` of tensor ``name`` in the other naming.
    ``transposed``: with the two dimensions exchanged."""

    part: Part
    name: str
    other: Part
    transposed: bool = False


@dataclass(frozen=True)
class Rule:
    """Composes a tensor of ``shape`` from ``blocks``, which cover each element once.
    ``shape_formula``: the factors of the shape, for messages. ``float32``: the tensor stays in
    float32 when others are rounded."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    shape_formula: str
    float32: bool = False


class _Tensor(NamedTuple):
    """A tensor of Hugging Face: name, shape, and the factors of its first dimension."""

    name: str
    shape: tuple[int, ...]
    rows: str


def check_contiguous_order(model: Model, layouts: Mapping[str, TensorLayout]) -> None:
    """Raises ConfigError if tensor parallelism shards a tensor of ``layouts`` that is in contiguous
    order: the order of the whole tensor then depends on the number of pieces. An optimizer shard is
    harmless, as no computation uses its pieces alone."""
    for name, layout in layouts.items():
        contiguous = (
            f".{QKV}." in name
            and model.latent is None
            and model.attention == CONTIGUOUS
            or f".{FC1}." in name
            and model.mlp == CONTIGUOUS
        )
        pieces = (
            math.prod(layout.device_matrix[-1 - axis] for axis in layout.axes[0])
            if layout.axes
            else 1
        )
        if contiguous and pieces > 1:
            raise ConfigError(
                f"{name} is in contiguous order and sharded by tensor parallelism ({pieces}): each "
                "rank then has its own [q, k, v] or [gate, up], and no rule exists for the whole "
                "tensor. Use use_contiguous_weight_layout_attention: False and "
                "use_interleaved_weight_layout_mlp: True"
            )


def rules(model: Model) -> dict[str, Rule]:
    """Returns {MindSpore name: Rule} for all tensors of the network. With tied weights the network
    has no HEAD; its rule takes the embedding, for a network that is not tied and starts from these
    weights."""
    dimensions = model.dimensions
    features = model.features
    found = {}
    for rows, at, hf in _places(model):
        for row in rows:
            if features.issuperset(row.when):
                found[at + row.name] = _rule(row, hf, model, dimensions)
    return found


def _places(model: Model) -> Iterator[tuple[tuple[Row, ...], str, str]]:
    """Yields each table with the two prefixes of its names."""
    family = model.family
    yield tables.MODEL, "", ""
    for i in range(model.layers):
        rows = family.experts if model.experts and i >= model.dense_layers else family.dense
        yield (*family.layer, *rows), f"decoder.layers.{i}.", f"model.layers.{i}."
    for i in range(model.predictions):
        hf = f"model.layers.{model.layers + i}."
        yield family.prediction, f"mtp.layers.{i}.", hf
        yield (
            (*family.layer, *(family.experts if model.experts else family.dense)),
            f"mtp.layers.{i}.transformer_layer.",
            hf,
        )


def copies(model: Model) -> dict[str, str]:
    """Returns {tensor: the tensor that it repeats} for the tensors that Hugging Face stores
    twice."""
    tied = {HF_HEAD: HF_EMBEDDING} if model.tied else {}
    return {
        f"model.layers.{model.layers + i}.{name}": tied.get(other, other)
        for i in range(model.predictions)
        for name, other in (model.family.copies or {}).items()
    }


def _rule(row: Row, hf: str, model: Model, dimensions: Mapping[str, int]) -> Rule:
    """Composes a parameter of its sources, in the order of its row."""
    sources = [
        _Tensor(
            hf + source.name,
            tuple(_size(text, dimensions) for text in source.shape),
            _text(source.shape[0], dimensions),
        )
        for source in row.sources
    ]
    _, first, factors = sources[0]
    count = len(sources)
    blocks = []
    shape: tuple[int, ...]
    if row.order == ALTERNATING:
        shape = count * first[0], first[1]
        formula = f"{count} x {factors} = {shape[0]}"
        blocks = [
            Block((range(i, shape[0], count), range(shape[1])), source.name, _whole(source.shape))
            for i, source in enumerate(sources)
        ]
    elif row.order == PER_EXPERT:
        columns, rows = first
        shape = model.experts * rows, count * columns
        formula = (
            f"{model.experts} experts x {rows} rows, {count} x {columns} columns, of {factors}"
        )
        blocks = [
            Block(
                (range(e * rows, (e + 1) * rows), range(i * columns, (i + 1) * columns)),
                source.name.format(e),
                _whole(source.shape),
                True,
            )
            for e in range(model.experts)
            for i, source in enumerate(sources)
        ]
    else:
        # rows after each other: of each group, or all of each source
        groups = model.groups if row.order == BY_GROUP else 1
        at = 0
        others = _whole(first[1:])
        for group in range(groups):
            for source in sources:
                rows = source.shape[0] // groups
                blocks.append(
                    Block(
                        (range(at, at + rows), *others),
                        source.name,
                        (range(group * rows, (group + 1) * rows), *others),
                    )
                )
                at += rows
        shape = at, *first[1:]
        formula = " + ".join(source.rows for source in sources) + (f" = {at}" if count > 1 else "")
    return Rule(
        shape,
        tuple(blocks),
        formula + "".join(f", by {_text(text, dimensions)}" for text in row.sources[0].shape[1:]),
        row.float32,
    )


def _whole(shape: tuple[int, ...]) -> Part:
    return tuple(range(size) for size in shape)


def _size(text: str, dimensions: Mapping[str, int]) -> int:
    """Evaluates a size such as ``num_attention_heads x (qk_nope_head_dim + v_head_dim)``."""
    return math.prod(
        sum(
            dimensions[word] if word in dimensions else int(word)
            for word in factor.strip("()").split(" + ")
        )
        for factor in text.split(" x ")
    )


def _text(text: str, dimensions: Mapping[str, int]) -> str:
    """Returns the same with the numbers after their names."""
    return re.sub(r"\w\w+", lambda found: f"{found[0]} {dimensions[found[0]]}", text)


def shapes(known: Mapping[str, Rule]) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of the tensors that the rules take their parts from."""
    found: dict[str, tuple[int, ...]] = {}
    for rule in known.values():
        for block in rule.blocks:
            ends = tuple(indices[-1] + 1 for indices in block.other)
            found[block.name] = tuple(map(max, found.get(block.name, ends), ends))
    return found


def inverse_rules(known: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns rules for the tensors that ``known`` takes its parts from. If two rules use the same
    tensor (tied weights), the first one counts."""
    blocks: dict[str, list[Block]] = {}
    owner: dict[str, str] = {}
    for name, rule in known.items():
        for block in rule.blocks:
            if owner.setdefault(block.name, name) == name:
                blocks.setdefault(block.name, []).append(
                    Block(block.other, name, block.part, block.transposed)
                )
    return {
        name: Rule(
            shape, tuple(blocks[name]), known[owner[name]].shape_formula, known[owner[name]].float32
        )
        for name, shape in shapes(known).items()
    }


# ---- mindformers' own template -------------------------------------------------------------------


def compare_with_template(converters: Iterable[Any], model: Model) -> list[str]:
    """Compares ``rules`` with the ``weight_converters`` of a mindformers network
    (``checkpoint/converter/template.py``). Returns a sentence for each difference. Compares only
    names and kinds of operations: the order within a tensor depends on settings that these
    operations do not use."""
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
            problems.append(
                f"{name} is made of {_list(found.get(name))} by mindformers, of "
                f"{_list(ours.get(name))} by the rules"
            )
    return problems


def _wild(name: str) -> str:
    return re.sub(r"\.\d+\.", ".{}.", name)


def _list(names: Iterable[str] | None) -> str:
    return " and ".join(sorted(names)) if names else "nothing"
