"""Views a Hugging Face folder with the names, shapes and order of MindSpore Transformers, and reads it into a network.

    weights = view_of_folder(storage, "Qwen3-8B", wanted=wanted)     # for ``wanted_regions``, ``read_regions``
    arrays = read_network(storage, "Qwen3-8B", wanted, layouts, rank, network=transformer_config)

    config.json ─▶ Model ─▶ rules of its family ─▶ {parameter: blocks of stored tensors}
    headers ─▶ fp8 weights joined with their scales ─▶ everything that does not fit, in one error ─▶ TranslatedView
    layout, rank ─▶ regions ─▶ byte ranges of each block ─▶ read ─▶ scaled, converted, transposed ─▶ arrays of this rank
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mindresume.errors import ConfigError, CorruptFileError, LoadError
from mindresume.formats.huggingface import (
    CONFIG,
    CONTIGUOUS,
    HF_HEAD,
    INTERLEAVED,
    Model,
    check_contiguous_order,
    model_from_config,
)
from mindresume.formats.huggingface_families import FAMILIES
from mindresume.formats.huggingface_rules import compare_with_template, copies, rules, shapes
from mindresume.model.layout import TensorLayout
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.block_scales import with_scales
from mindresume.reshard.conversion_manifest import read_weights
from mindresume.reshard.direct_engine import TILE, Traffic
from mindresume.reshard.geometry import Region, shape_of, view, within
from mindresume.reshard.range_reader import OpenFiles, bits_dtype, gather
from mindresume.reshard.region_load import WORKERS, read_regions, wanted_regions
from mindresume.reshard.translated_view import TranslatedView, problems_text, translated
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_bytes
from mindresume.tensor_files.header import DTYPES as FILE_DTYPES
from mindresume.tensor_files.header import parse_object

IGNORED = (HF_HEAD, "*.rotary_emb.inv_freq")        # in a Hugging Face folder: the head of tied weights; a computed table
# In MindSpore: statistics, and the seeds of dropout (mindformers 1.8.0); no weights.
_BUFFERS = ("*.num_tokens_per_expert", "*.router.fi_accu", "*.expert_load", "*_dropout.seed", "*_dropout.offset")
_MAX_CONFIG = 16 << 20


# ---- the configuration ---------------------------------------------------------------------------------------------

def read_config(storage: Storage, path: str) -> tuple[dict[str, Any], str]:
    """Reads the ``config.json`` at ``path``, which is the file or its folder. Returns (JSON object, path of the file). Raises
    ConfigError if it does not exist or is no such file, and CorruptFileError if it is not a JSON object."""
    status = storage.status(path)
    if status is not None and status.is_folder:
        path = os.path.join(path, CONFIG)
        status = storage.status(path)
    if status is None:
        raise ConfigError(f"{path} does not exist; the config.json of the Hugging Face model is needed: it has the numbers of "
                          f"heads, layers and experts")
    if status.is_folder or status.size > _MAX_CONFIG:
        raise ConfigError(f"{path} is no config.json")
    return parse_object(read_bytes(storage, path, _MAX_CONFIG), path, "the configuration"), path


def read_model(storage: Storage, path: str, attention: str = INTERLEAVED, mlp: str = INTERLEAVED,
               concatenated: bool = False) -> Model:
    """Reads the model that a Hugging Face folder or its ``config.json`` describes. Raises the errors of ``read_config`` and
    ``model_from_config``."""
    return model_from_config(*read_config(storage, path), attention, mlp, concatenated)


def is_huggingface(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a folder with the configuration of a supported model."""
    try:
        kind = read_config(storage, path)[0].get("model_type")
        return isinstance(kind, str) and kind in FAMILIES
    except (ConfigError, CorruptFileError, OSError):
        return False


# ---- loading -------------------------------------------------------------------------------------------------------

def view_of_folder(storage: Storage, folder: str, attention: str = INTERLEAVED, mlp: str = INTERLEAVED,
                   wanted: Mapping[str, tuple[tuple[int, ...], str]] | None = None, concatenated: bool = False) -> TranslatedView:
    """Views a Hugging Face folder with the names, shapes and order of MindSpore Transformers. Reads only headers, no tensor.

    Args:
        attention, mlp, concatenated: as for ``model_from_config``.
        wanted: {name: (shape, dtype)} of parameters; values are converted to the dtype while they are read.
    Raises:
        ConfigError: As ``model_from_config``.
        LoadError: A tensor is missing, has another shape, has a dtype that cannot be converted, has no rule, or is fp8 without
            scales that fit; the message names these tensors.
        CorruptFileError: As ``read_weights``.
    """
    return _of_folder(storage, folder, read_model(storage, folder, attention, mlp, concatenated), wanted or {})


def _of_folder(storage: Storage, folder: str, model: Model, wanted: Mapping[str, tuple[tuple[int, ...], str]],
               left_out: Iterable[str] = ()) -> TranslatedView:
    """Views the folder of ``model``. ``left_out``: patterns of stored tensors for which the network has no parameter."""
    (_, inner, _), known, repeated = read_weights(storage, folder), rules(model), copies(model)
    tensors = with_scales(inner.tensors, model.block, os.path.join(folder, CONFIG))
    needed, ignored = shapes(known), (*IGNORED, *left_out)
    expected = needed | {name: needed[other] for name, other in repeated.items()}
    missing = [name for name in needed if name not in tensors]
    unknown = [name for name in tensors if name not in expected and not any(fnmatchcase(name, p) for p in ignored)]
    why = {block.name: rule.shape_formula for rule in known.values() for block in rule.blocks}
    other = [f"{name} is {tensors[name].shape}, not {shape} (a part of {why[repeated.get(name, name)]})"
             for name, shape in expected.items() if name in tensors and tensors[name].shape != shape]
    problems = []
    if missing:
        problems.append(f"missing: {problems_text(missing)}{_hint(model, missing)}")
    if unknown:
        problems.append(f"without a rule: {problems_text(unknown)}")
    if problems or other:
        raise LoadError(f"{folder} does not hold the weights that its {CONFIG} describes ({model.kind}, {model.layers} layers): "
                        + problems_text(problems + other))
    return translated(inner, known, {name: dtype for name, (_, dtype) in wanted.items() if name in known}, tensors)


def _hint(model: Model, missing: Iterable[str]) -> str:
    """Returns what to do about missing tensors that a setting explains."""
    if HF_HEAD in missing:
        return f". If the model has no {HF_HEAD} of its own, tie_word_embeddings must be true in {model.source}"
    if model.predictions and all(name.startswith(_prediction_layer(model)) for name in missing):
        return (f". transformers does not save next-token-prediction layers: set num_nextn_predict_layers to 0 in {model.source} "
                f"and in the model configuration")
    return ""


def _prediction_layer(model: Model) -> str:
    return f"model.layers.{model.layers}."


Share = Callable[[Mapping[str, Region], Mapping[str, str]], Mapping[str, Region]]


def read_network(storage: Storage, folder: str, wanted: Mapping[str, tuple[tuple[int, ...], str]],
                 layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]], rank: int, network: Any = None,
                 tied: bool | None = None, converters: Iterable[Any] = (), traffic: Traffic | None = None,
                 kind: str | None = None, note: Callable[[str], None] = lambda text: None,
                 share: Share = lambda regions, dtypes: regions) -> dict[str, np.ndarray]:
    """Reads the weights of one rank's network from a Hugging Face folder. Returns {parameter: its slice, in its dtype}. A network
    without next-token prediction takes the other layers of a model that has it.

    Args:
        wanted, layouts: as for ``wanted_regions``, for the parameters of the network only.
        network: mindformers' TransformerConfig of the network; its dimensions must be equal to those of the folder.
        tied: whether the network shares embedding and head.
        converters: ``weight_converters`` of the network's template, which must agree with the rules; empty: it has no template.
        kind: ``model_type`` of the network; None: unknown.
        note: receives a sentence about layers of the folder that the network does not have.
        share: returns which regions this rank reads, by all that it needs and their dtypes; the others are left out.
    Raises:
        ConfigError, LoadError, CorruptFileError, OSError: As ``view_of_folder``; ConfigError also if ``network`` has other
            dimensions.
    """
    model, left_out = read_model(storage, folder, *orders_of(network)), ()
    if kind is not None and kind != model.kind:
        raise ConfigError(f"{model.source}: model_type is {model.kind}, but the network is {kind}. Use the model "
                          f"configuration of that folder")
    if network is not None:
        check_network(model, network)
        if model.predictions and not getattr(network, "mtp_num_layers", None):
            note(f"{folder}: the next-token-prediction layer is not loaded, because the network has none")
            model, left_out = replace(model, predictions=0), (f"{_prediction_layer(model)}*",)
    if tied and not model.tied:
        raise ConfigError(f"{model.source}: tie_word_embeddings is false, but the network shares embedding and output layer, so "
                          f"{HF_HEAD} would be lost; set tie_word_embeddings: False in the model configuration")
    converters = list(converters)
    if converters and (problems := compare_with_template(converters, model)):
        raise LoadError(f"the network's own template does not fit the rules for {model.kind}: {problems_text(problems)}")
    check_contiguous_order(model, {name: layout for name, (layout, _) in layouts.items()})
    weights = _of_folder(storage, folder, model, wanted, left_out)
    regions, traffic = wanted_regions(weights, wanted, layouts, rank, is_no_weight), traffic or Traffic()
    regions = share(regions, {name: weights.tensors[name].dtype for name in regions})
    transposed = {name: region for name, region in regions.items()
                  if any(block.transposed for block in weights.tensors[name].rule.blocks)}
    found = read_regions(weights, {name: region for name, region in regions.items() if name not in transposed}, traffic=traffic)
    return found | _read_transposed(weights, transposed, traffic)


def _read_transposed(weights: TranslatedView, regions: Mapping[str, Region], traffic: Traffic) -> dict[str, np.ndarray]:
    """Reads regions of tensors with transposed blocks, one block (the weights of one expert) at a time. Tiles of rows would each
    read a few columns of every stored row, so every row would be read many times. A large block is read in pieces of ``TILE``
    bytes, which are whole rows of the stored tensor."""
    files = OpenFiles(weights.storage)

    def one(item: tuple[str, Region]) -> np.ndarray:
        name, ((low, high), (left, right)) = item
        tensor = weights.tensors[name]
        out = np.empty(shape_of(item[1]), bits_dtype(tensor.dtype))
        rows, columns = ({edge for block in tensor.rule.blocks for edge in (block.part[i].start, block.part[i].stop)}
                         for i in (0, 1))
        for start, stop in _between(rows, low, high):
            width = max(TILE // out.itemsize // (stop - start), 1)
            for first, last in _between(columns, left, right):
                for begin in range(first, last, width):
                    part = (start, stop), (begin, min(begin + width, last))
                    gather(weights, files, name, part, view(out, within(part, item[1])), out[:0])
        traffic.progress(out.nbytes)
        return out.view(FILE_DTYPES[tensor.dtype])
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            found = dict(zip(regions, pool.map(one, regions.items()), strict=True))
    finally:
        files.close()
    traffic.read += files.bytes_read
    return found


def _between(edges: Iterable[int], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yields the intervals from ``low`` to ``high`` between the edges."""
    return itertools.pairwise(sorted({low, high, *(edge for edge in edges if low < edge < high)}))


# ---- the network ---------------------------------------------------------------------------------------------------

def orders_of(network: Any) -> tuple[str, str, bool]:
    """Returns the orders of linear_qkv and linear_fc1, and whether latent projections are concatenated, by a TransformerConfig of
    mindformers; None: the default orders, and False."""
    contiguous = getattr(network, "use_contiguous_weight_layout_attention", False)
    interleaved = getattr(network, "use_interleaved_weight_layout_mlp", True)
    return (CONTIGUOUS if contiguous else INTERLEAVED, INTERLEAVED if interleaved else CONTIGUOUS,
            bool(getattr(network, "mla_qkv_concat", False)))


def check_network(model: Model, network: Any) -> None:
    """Raises ConfigError unless a TransformerConfig of mindformers has the dimensions of ``model``. Shapes alone do not show a
    difference in heads and groups: other numbers of them can give the same shapes. A network without norms or router biases would
    leave out weights."""
    rows = {"num_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads,
            "num_moe_experts": model.experts}
    if model.latent:
        rows |= {"multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": model.latent.query_rank,
                 "kv_lora_rank": model.latent.rank, "qk_head_dim": model.latent.nope, "qk_pos_emb_head_dim": model.latent.rope,
                 "v_head_dim": model.latent.value}
    else:
        rows |= {"num_query_groups": model.groups, "kv_channels": model.head_dim}
    if any(row.float32 for row in model.family.experts):
        rows["moe_router_enable_expert_bias"] = True
    other = [f"{key} {getattr(network, key, None) or 0} instead of {value}" for key, value in rows.items()
             if (getattr(network, key, None) or 0) != value]
    if (layers := getattr(network, "mtp_num_layers", None) or 0) > model.predictions:
        other.append(f"mtp_num_layers {layers} instead of {model.predictions} (num_nextn_predict_layers)")
    if other:
        raise ConfigError(f"the network differs from the model of {model.source}: {', '.join(other)}. Use the model "
                          f"configuration of that folder")


def is_no_weight(name: str) -> bool:
    """Returns whether a parameter is transient or a buffer with statistics."""
    return may_be_absent(name) or any(fnmatchcase(name, pattern) for pattern in _BUFFERS)
