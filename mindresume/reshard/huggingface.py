"""Views a Hugging Face folder with the names, shapes and order of MindSpore Transformers, for a
network too; exports weights under the names of Hugging Face, with a ``config.json``.

    # for ``wanted_regions``, ``read_regions``
    weights = view_of_folder(storage, "Qwen3-8B", wanted=wanted)
    weights = view_for_network(storage, "Qwen3-8B", LoadTarget(shapes, layouts),
        NetworkModel(transformer_config))

    config.json ─▶ Model ─▶ rules of its family ─▶ {parameter: blocks of stored tensors}
    headers ─▶ fp8 weights joined with their scales ─▶ everything that does not fit, in one error ─▶
        TranslatedView
    layout, rank ─▶ regions ─▶ byte ranges of each block ─▶ read ─▶ scaled, converted, transposed ─▶
        arrays of this rank

    plan = to_huggingface(source, read_model(storage, "Qwen3-8B"), "bfloat16", 5 << 30)
    Conversion(storage, plan, target).run(Engine())
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from mindresume.errors import ConfigError, CorruptFileError, LoadError
from mindresume.events import Emit, Notice, ignore
from mindresume.formats.consolidated import HUGGINGFACE
from mindresume.formats.huggingface import (
    ATTENTION_KEY,
    CONFIG,
    CONTIGUOUS,
    HEAD,
    HF_HEAD,
    INTERLEAVED,
    MLP_KEY,
    QUANTIZATION,
    Model,
    Rule,
    check_contiguous_order,
    compare_with_template,
    copies,
    inverse_rules,
    model_from_config,
    rules,
    shapes,
)
from mindresume.formats.huggingface_families import FAMILIES
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor, read_weights
from mindresume.reshard.conversion_plan import ConversionPlan, to_consolidated
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.region_load import LoadTarget, Shapes
from mindresume.reshard.translated_view import (
    TranslatedView,
    problems_text,
    translated,
    with_scales,
)
from mindresume.storage import Storage, read_bytes
from mindresume.tensor_files.header import parse_object

# in a Hugging Face folder: the head of tied weights; a computed table
IGNORED = (HF_HEAD, "*.rotary_emb.inv_freq")
# In MindSpore: statistics, and the seeds of dropout (mindformers 1.8.0); no weights.
_BUFFERS = (
    "*.num_tokens_per_expert",
    "*.router.fi_accu",
    "*.expert_load",
    "*_dropout.seed",
    "*_dropout.offset",
)
_MAX_CONFIG = 16 << 20


# ---- the configuration ---------------------------------------------------------------------------


def read_config(storage: Storage, path: str) -> tuple[dict[str, Any], str]:
    """Reads the ``config.json`` at ``path``, which is the file or its folder. Returns (JSON object,
    path of the file). Raises ConfigError if it does not exist or is no such file, and
    CorruptFileError if it is not a JSON object."""
    status = storage.status(path)
    if status is not None and status.is_folder:
        path = os.path.join(path, CONFIG)
        status = storage.status(path)
    if status is None:
        raise ConfigError(
            f"{path} does not exist; the config.json of the Hugging Face model is needed: it has "
            "the numbers of heads, layers and experts"
        )
    if status.is_folder or status.size > _MAX_CONFIG:
        raise ConfigError(f"{path} is no config.json")
    return parse_object(read_bytes(storage, path, _MAX_CONFIG), path, "the configuration"), path


def read_model(
    storage: Storage,
    path: str,
    attention: str = INTERLEAVED,
    mlp: str = INTERLEAVED,
    concatenated: bool = False,
) -> Model:
    """Reads the model that a Hugging Face folder or its ``config.json`` describes. Raises the
    errors of ``read_config`` and ``model_from_config``."""
    return model_from_config(*read_config(storage, path), attention, mlp, concatenated)


def is_huggingface(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a folder with the configuration of a supported model."""
    try:
        kind = read_config(storage, path)[0].get("model_type")
        return isinstance(kind, str) and kind in FAMILIES
    except (ConfigError, CorruptFileError, OSError):
        return False


# ---- loading -------------------------------------------------------------------------------------


def view_of_folder(
    storage: Storage,
    folder: str,
    model: Model | None = None,
    wanted: Shapes | None = None,
    left_out: Iterable[str] = (),
) -> TranslatedView:
    """Views a Hugging Face folder with the names, shapes and order of MindSpore Transformers. Reads
    only headers, no tensor.

    Args:
        model: what it holds; None: as its ``config.json`` describes it (``read_model``).
        wanted: {name: (shape, dtype)} of parameters; values are converted to the dtype while they
            are read.
        left_out: patterns of stored tensors for which the network has no parameter.
    Raises:
        ConfigError: As ``model_from_config``.
        LoadError: A tensor is missing, has another shape, has a dtype that cannot be converted, has
            no rule, or is fp8 without scales that fit; the message names these tensors.
        CorruptFileError: As ``read_weights``.
    """
    model = model or read_model(storage, folder)
    _, inner, _ = read_weights(storage, folder)
    known = rules(model)
    repeated = copies(model)
    tensors = with_scales(inner.tensors, model.block, os.path.join(folder, CONFIG))
    needed, ignored = shapes(known), (*IGNORED, *left_out)
    expected = needed | {name: needed[other] for name, other in repeated.items()}
    missing = [name for name in needed if name not in tensors]
    unknown = [
        name
        for name in tensors
        if name not in expected and not any(fnmatchcase(name, p) for p in ignored)
    ]
    why = {block.name: rule.shape_formula for rule in known.values() for block in rule.blocks}
    other = [
        f"{name} is {tensors[name].shape}, not {shape} (a part of {why[repeated.get(name, name)]})"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    check_fit(
        folder,
        replace(model, source=f"its {CONFIG}"),
        (missing, _hint(model, missing)),
        (unknown, ""),
        other,
    )
    return translated(
        inner,
        known,
        {name: dtype for name, (_, dtype) in (wanted or {}).items() if name in known},
        tensors,
    )


def check_fit(
    name: str,
    model: Model,
    missing: tuple[Sequence[str], str],
    unknown: tuple[Sequence[str], str],
    other: Sequence[str],
) -> None:
    """Raises LoadError if tensors of ``name`` are ``missing``, have no rule (``unknown``), each
    with a hint, or differ in shape (``other``)."""
    problems = [
        f"{word}: {problems_text(names)}{hint}"
        for word, (names, hint) in (("missing", missing), ("without a rule", unknown))
        if names
    ]
    if problems or other:
        raise LoadError(
            f"{name} does not hold the weights that {model.source} describes ({model.kind}, "
            f"{model.layers} layers): {problems_text([*problems, *other])}"
        )


def _hint(model: Model, missing: Iterable[str]) -> str:
    """Returns what to do about missing tensors that a setting explains."""
    if HF_HEAD in missing:
        return (
            f". If the model has no {HF_HEAD} of its own, tie_word_embeddings must be true in "
            f"{model.source}"
        )
    if model.predictions and all(
        name.startswith(f"model.layers.{model.layers}.") for name in missing
    ):
        return (
            ". transformers does not save next-token-prediction layers: set "
            f"num_nextn_predict_layers to 0 in {model.source} and in the model configuration"
        )
    return ""


@dataclass(frozen=True)
class NetworkModel:
    """Describes the network of a training that takes the weights of a folder.

    Attributes:
        config: its TransformerConfig of mindformers, whose dimensions must be equal to those of the
            folder; None: unknown.
        tied: whether it shares embedding and head; None: unknown.
        converters: ``weight_converters`` of its template, which must agree with the rules; empty:
            it has no template.
        kind: its ``model_type``; None: unknown.
    """

    config: Any = None
    tied: bool | None = None
    converters: Sequence[Any] = ()
    kind: str | None = None


def view_for_network(
    storage: Storage, folder: str, target: LoadTarget, network: NetworkModel, emit: Emit = ignore
) -> TranslatedView:
    """Views a Hugging Face folder for one rank of a network. A network without next-token
    prediction takes the other layers of a model that has it.

    Args:
        target: the parameters of the network only.
    Raises:
        ConfigError, LoadError, CorruptFileError, OSError: As ``view_of_folder``; ConfigError also
            if the network has other dimensions.
    """
    model, left_out = read_model(storage, folder, *orders_of(network.config)), ()
    if network.kind is not None and network.kind != model.kind:
        raise ConfigError(
            f"{model.source}: model_type is {model.kind}, but the network is {network.kind}. Use "
            "the model configuration of that folder"
        )
    if network.config is not None:
        check_network(model, network.config)
        if model.predictions and not getattr(network.config, "mtp_num_layers", None):
            emit(
                Notice(
                    f"{folder}: the next-token-prediction layer is not loaded, because the network "
                    "has none"
                )
            )
            model, left_out = replace(model, predictions=0), (f"model.layers.{model.layers}.*",)
    if network.tied and not model.tied:
        raise ConfigError(
            f"{model.source}: tie_word_embeddings is false, but the network shares embedding and "
            "output layer, so "
            f"{HF_HEAD} would be lost; set tie_word_embeddings: False in the model configuration"
        )
    if network.converters and (problems := compare_with_template(list(network.converters), model)):
        raise LoadError(
            f"the network's own template does not fit the rules for {model.kind}: "
            f"{problems_text(problems)}"
        )
    check_contiguous_order(model, {name: layout for name, (layout, _) in target.layouts.items()})
    return view_of_folder(storage, folder, model, target.shapes, left_out)


# ---- the network ---------------------------------------------------------------------------------


def orders_of(network: Any) -> tuple[str, str, bool]:
    """Returns the orders of linear_qkv and linear_fc1, and whether latent projections are
    concatenated, by a TransformerConfig of mindformers; None: the default orders, and False."""
    contiguous = getattr(network, "use_contiguous_weight_layout_attention", False)
    interleaved = getattr(network, "use_interleaved_weight_layout_mlp", True)
    return (
        CONTIGUOUS if contiguous else INTERLEAVED,
        INTERLEAVED if interleaved else CONTIGUOUS,
        bool(getattr(network, "mla_qkv_concat", False)),
    )


def check_network(model: Model, network: Any) -> None:
    """Raises ConfigError unless a TransformerConfig of mindformers has the dimensions of ``model``.
    Shapes alone do not show a difference in heads and groups: other numbers of them can give the
    same shapes. A network without norms or router biases would leave out weights."""
    rows = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_moe_experts": model.experts,
    }
    if model.latent:
        rows |= {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": model.latent.query_rank,
            "kv_lora_rank": model.latent.rank,
            "qk_head_dim": model.latent.nope,
            "qk_pos_emb_head_dim": model.latent.rope,
            "v_head_dim": model.latent.value,
        }
    else:
        rows |= {"num_query_groups": model.groups, "kv_channels": model.head_dim}
    if any(row.float32 for row in model.family.experts):
        rows["moe_router_enable_expert_bias"] = True
    other = [
        f"{key} {getattr(network, key, None) or 0} instead of {value}"
        for key, value in rows.items()
        if (getattr(network, key, None) or 0) != value
    ]
    if (layers := getattr(network, "mtp_num_layers", None) or 0) > model.predictions:
        other.append(
            f"mtp_num_layers {layers} instead of {model.predictions} (num_nextn_predict_layers)"
        )
    if other:
        raise ConfigError(
            f"the network differs from the model of {model.source}: {', '.join(other)}. Use the "
            "model configuration of that folder"
        )


# ---- export -------------------------------------------------------------------------------------


KEEP = "keep"  # the stored dtype
DTYPES = ("bfloat16", "float32", KEEP)  # what an export can write
_PREDICTION = "mtp.layers."


def orders_in(
    source: OpenCheckpoint, contiguous_attention: bool | None, contiguous_mlp: bool | None
) -> tuple[str, str]:
    """Returns the orders of linear_qkv and of linear_fc1: as the checkpoint records them, else as
    given, else mindformers' defaults. Latent attention has no linear_qkv, and records none.

    Raises:
        ConfigError: The checkpoint records another order than the given one.
    """
    recorded, found = source.arrangement, []
    for key, given, when in (
        (ATTENTION_KEY, contiguous_attention, True),
        (MLP_KEY, contiguous_mlp, False),
    ):
        known = recorded[key] is when if key in recorded else None
        if known is not None and given is not None and given is not known:
            raise ConfigError(
                f"{source.what}: the model was trained with {key}: {recorded[key]}, as the "
                f"checkpoint records, and the export was asked to read the order of {key}: "
                f"{when is given}. Leave the order out"
            )
        found.append(CONTIGUOUS if (known if given is None else given) else INTERLEAVED)
    return found[0], found[1]


def to_huggingface(
    source: OpenCheckpoint,
    model: Model,
    dtype: str,
    part_bytes: int,
    config: Mapping[str, Any] | None = None,
) -> ConversionPlan:
    """Plans the export of the weights in ``source``, without counters and optimizer states, under
    the names of Hugging Face.

    Args:
        dtype: one of DTYPES; router biases are written in float32, or kept.
        part_bytes: largest size of a part.
        config: the content of the ``config.json`` beside the weights; None: there is none.
    Raises:
        LoadError: A tensor is missing, has another shape, or has no rule; the message names these
            tensors and shows how the expected shape is computed.
        ConfigError: ``dtype`` is not supported, or the order of the rows cannot be known from a
            layout.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    inner = source.weights
    if model.latent:  # the names tell it
        model = replace(
            model,
            concatenated=any(
                name.endswith(".self_attention.linear_kvb.weight") for name in inner.tensors
            ),
        )
    known = rules(model)
    if model.tied:
        del known[HEAD]
    _check_weights(inner, known, model)
    check_contiguous_order(
        model,
        {
            name: tensor.layout
            for name, tensor in inner.tensors.items()
            if tensor.layout is not None
        },
    )
    back = inverse_rules(known)
    back |= {name: back[other] for name, other in copies(model).items()}
    view = translated(
        inner,
        back,
        {}
        if dtype == KEEP
        else {name: "float32" if rule.float32 else dtype for name, rule in back.items()},
    )
    # of tensors that it has no more
    state = replace(source.state, arrangement={}) if source.state is not None else None
    plan = to_consolidated(
        replace(source, weights=view, state=state, made=None), HUGGINGFACE, part_bytes
    )
    wanted = json.dumps(
        [plan.fingerprint, repr(replace(model, source=CONFIG)), config], sort_keys=True
    )
    # transformers refuses any other
    files = tuple(replace(file, metadata={"format": "pt"}) for file in plan.files)
    documents = plan.documents if len(files) > 1 else ()
    if config is not None:
        documents = ((CONFIG, _config_of(view, config)), *documents)
    return replace(
        plan,
        files=files,
        fingerprint=xxhash.xxh3_128_hexdigest(wanted.encode()),
        documents=documents,
        model_type=model.kind,
    )


def _config_of(view: TranslatedView, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``config`` with the dtype of the weights, under the key that it has (``dtype`` since
    transformers 4.57, ``torch_dtype`` before), and without a quantisation, as the weights have
    none."""
    dtypes = {tensor.dtype for tensor in view.tensors.values() if not tensor.rule.float32} or {
        "float32"
    }
    document = {key: value for key, value in config.items() if key != QUANTIZATION}
    if len(dtypes) == 1:
        key = "dtype" if "dtype" in document else "torch_dtype"
        document = {
            **{k: v for k, v in document.items() if k not in ("dtype", "torch_dtype")},
            key: dtypes.pop(),
        }
    return document


def _check_weights(inner: CheckpointView, known: Mapping[str, Rule], model: Model) -> None:
    tensors = inner.tensors
    missing = [name for name in known if name not in tensors]
    other = [
        f"{name} is {tensors[name].shape}, expected {rule.shape}: {rule.shape_formula}"
        for name, rule in known.items()
        if name in tensors and tensors[name].shape != rule.shape
    ]
    lost = [name for name, tensor in tensors.items() if not _is_known(name, tensor, known)]
    hint = (
        ". If the model shares it with the embedding, tie_word_embeddings must be true"
        if HEAD in missing
        else ""
    )
    check_fit(inner.name, model, (missing, hint), (lost, _hint_of_lost(lost)), other)


def _hint_of_lost(lost: Collection[str]) -> str:
    """Returns what to do about tensors that a setting explains."""
    if HEAD in lost:
        return ". It is no copy of the embedding, so tie_word_embeddings must be false"
    if all(name.startswith(_PREDICTION) for name in lost):  # of none the hint is not shown
        return (
            ". The model has a next-token-prediction layer, so num_nextn_predict_layers must be 1"
        )
    return ""


def _is_known(name: str, tensor: Tensor, known: Mapping[str, Rule]) -> bool:
    """Returns whether a tensor is a weight, an optimizer state of a weight (``adam_m.NAME``), a
    counter or a buffer."""
    parts = name.split(".")
    if any(".".join(parts[i:]) in known for i in range(len(parts))):
        return True
    if HEAD not in known and parts[1:] == HEAD.split("."):
        return True  # an optimizer state of the tied head
    return tensor.is_counter or is_no_weight(name)


def is_no_weight(name: str) -> bool:
    """Returns whether a parameter is transient or a buffer with statistics."""
    return may_be_absent(name) or any(fnmatchcase(name, pattern) for pattern in _BUFFERS)
