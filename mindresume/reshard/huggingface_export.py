"""Exports weights under the names of Hugging Face, with a ``config.json``.

plan = to_huggingface(source, read_model(storage, "Qwen3-8B"), "bfloat16", 5 << 30)
Conversion(storage, plan, target).run(Engine())
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import xxhash

from mindresume.errors import ConfigError
from mindresume.formats.consolidated import HUGGINGFACE
from mindresume.formats.huggingface import (
    ATTENTION_KEY,
    CONFIG,
    CONTIGUOUS,
    HEAD,
    INTERLEAVED,
    MLP_KEY,
    QUANTIZATION,
    Model,
    Rule,
    check_contiguous_order,
    copies,
    inverse_rules,
    rules,
)
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor
from mindresume.reshard.conversion_plan import ConversionPlan, to_consolidated
from mindresume.reshard.huggingface import check_fit, is_no_weight
from mindresume.reshard.open_checkpoint import OpenCheckpoint
from mindresume.reshard.translated_view import TranslatedView, translated

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
                "checkpoint records, and "
                f"the export was asked to read the order of {key}: {when is given}. Leave the "
                "order out"
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
    _check(inner, known, model)
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


def _check(inner: CheckpointView, known: Mapping[str, Rule], model: Model) -> None:
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
    check_fit(inner.name, model, (missing, hint), (lost, _hint(lost)), other)


def _hint(lost: Collection[str]) -> str:
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
