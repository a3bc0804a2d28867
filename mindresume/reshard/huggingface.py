"""Views weights under other names: a Hugging Face folder with MindSpore's names and order, and vice versa.

    weights = view_of_folder(storage, "Qwen3-8B", wanted=wanted)     # for ``wanted_regions``, ``read_regions``
    arrays = read_network(storage, "Qwen3-8B", wanted, layouts, rank, network=transformer_config)

Nothing is converted beforehand: each tensor knows which parts of other tensors it consists of (``formats/huggingface.py``), and
only the requested byte ranges are read.
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mindresume.errors import ConfigError, CorruptFileError, LoadError
from mindresume.formats.consolidated import read_consolidated
from mindresume.formats.huggingface import (
    ARCHITECTURES,
    CONFIG,
    CONTIGUOUS,
    HF_HEAD,
    INTERLEAVED,
    Model,
    Rule,
    check_contiguous_order,
    compare_with_template,
    model_from_config,
    rules,
    shapes,
)
from mindresume.formatting import listed
from mindresume.model.layout import TensorLayout
from mindresume.model.training_state import is_transient
from mindresume.reshard.checkpoint_view import CheckpointView, PieceLocation, Tensor, view_of_consolidated
from mindresume.reshard.direct_engine import Traffic
from mindresume.reshard.geometry import Cut, Region, shape_of
from mindresume.reshard.range_reader import ComposedCut, OpenFiles, bits_dtype, castable, gather
from mindresume.reshard.region_load import WORKERS, read_regions, wanted_regions
from mindresume.storage.interface import Storage
from mindresume.storage.operations import read_bytes
from mindresume.tensor_files.header import DTYPES as FILE_DTYPES
from mindresume.tensor_files.header import parse_object

IGNORED = (HF_HEAD, "*.rotary_emb.inv_freq")        # in a Hugging Face folder: the head of tied weights; a computed table
_BUFFERS = ("*.num_tokens_per_expert", "*.router.fi_accu", "*.expert_load")     # in MindSpore: statistics, not weights
_MAX_CONFIG = 16 << 20


@dataclass(frozen=True)
class ComposedTensor(Tensor):
    """Describes a tensor that ``rule`` composes of ``parts``: tensors of another view, by name."""
    rule: Rule | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def identical_to(self) -> str | None:
        """Returns the name of the one tensor of the other view that has the same bytes, or None."""
        block = self.rule.blocks[0]
        part = self.parts[block.name]
        same = len(self.rule.blocks) == 1 and not block.transposed and block.part == block.other
        return block.name if same and part.dtype == self.dtype and part.shape == self.shape else None

    def cuts(self, region: Region) -> tuple[Any, ...]:
        """Returns the cuts of ``region``: of type ``Cut`` if ``identical_to`` is set, else ``ComposedCut``."""
        if self.identical_to is not None:
            return self.parts[self.identical_to].cuts(region)
        found = []
        for block in self.rule.blocks:
            hit = _clip(block.part, region)
            if hit is None:
                continue
            part = self.parts[block.name]
            order = slice(None, None, -1 if block.transposed else 1)
            wanted = tuple(indices[start:stop] for indices, (start, stop) in zip(block.other, hit[order], strict=True))
            for cut in part.cuts(tuple((indices[0], indices[-1] + 1) for indices in wanted)):
                inner = _clip(wanted, cut.part)
                if inner is None:
                    continue
                local = tuple(range(indices[start] - low, indices[stop - 1] - low + 1, indices.step)
                              for indices, (start, stop), (low, _) in zip(wanted, inner, cut.piece, strict=True))
                target = tuple(slice(indices[first + start] - low, indices[first + stop - 1] - low + 1, indices.step)
                               for indices, (first, _), (start, stop), (low, _) in
                               zip(block.part, hit, inner[order], region, strict=True))
                found.append(ComposedCut(cut.piece, cut.holders, block.name, part.dtype, local, target, block.transposed))
        return tuple(found)


def _clip(part: Sequence[range], region: Region) -> tuple[tuple[int, int], ...] | None:
    """Returns, for each dimension, which of the indices of ``part`` lie in ``region``: their (start, stop) positions in ``part``.
    Returns None if no element lies in ``region``."""
    found = []
    for indices, (low, high) in zip(part, region, strict=True):
        start = max(0, -((indices.start - low) // indices.step))
        stop = min(len(indices), -((indices.start - high) // indices.step))
        if start >= stop:
            return None
        found.append((start, stop))
    return tuple(found)


class TranslatedView(CheckpointView):
    """Views ``inner`` under other names. Reads compare recorded checksums only for tensors that keep their bytes
    (``identical_to``)."""

    def __init__(self, inner: CheckpointView, tensors: Mapping[str, ComposedTensor]):
        self.__dict__.update(inner.__dict__)
        self.inner, self.tensors = inner, tensors

    def locate(self, name: str, cut: Cut | ComposedCut) -> PieceLocation:
        """Returns where a piece lies. Raises the errors of ``CheckpointView.locate``, with names of tensors in ``inner``."""
        source = cut.source if isinstance(cut, ComposedCut) else self.tensors[name].identical_to
        return self.inner.locate(source, Cut(cut.piece, cut.holders, cut.piece))

    def composed_sources(self) -> list[str]:
        """Returns the tensors of ``inner`` that are read in parts: a read of a part cannot compare the checksum of the whole."""
        return list(dict.fromkeys(block.name for tensor in self.tensors.values() if tensor.identical_to is None
                                  for block in tensor.rule.blocks))


def translated(inner: CheckpointView, known: Mapping[str, Rule], dtypes: Mapping[str, str]) -> TranslatedView:
    """Views ``inner`` under the names of other tensors.

    Args:
        inner: has all tensors that the rules refer to, in the right shapes.
        known: {name of a new tensor: its rule}.
        dtypes: {name of a new tensor: its dtype}. A tensor without an entry keeps the stored dtype.
    Raises:
        LoadError: Some tensors cannot be converted; the message names them.
    """
    tensors, problems = {}, []
    for name, rule in known.items():
        parts = {block.name: inner.tensors[block.name] for block in rule.blocks}
        stored = {part.dtype for part in parts.values()}
        dtype = dtypes.get(name) or min(stored)
        bad = sorted(one for one in stored if not castable(one, dtype))
        if len(stored) > 1 and name not in dtypes:
            problems.append(f"{name} would have the dtypes {' and '.join(sorted(stored))}")
        elif bad:
            problems.append(f"{name} is {bad[0]}, expected {dtype}")
        tensors[name] = ComposedTensor(name, dtype, rule.shape, rule=rule, parts=parts)
    if problems:
        raise LoadError(f"{inner.name}: {len(problems)} tensors cannot be converted: {problems_text(problems)}. Possible: "
                        f"bfloat16 or float16 to float32, float32 to bfloat16")
    return TranslatedView(inner, tensors)


# ---- loading -------------------------------------------------------------------------------------------------------

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


def read_model(storage: Storage, path: str, attention: str = INTERLEAVED, mlp: str = INTERLEAVED) -> Model:
    """Reads the model that a Hugging Face folder or its ``config.json`` describes. Raises the errors of ``read_config`` and
    ``model_from_config``."""
    return model_from_config(*read_config(storage, path), attention, mlp)


def is_huggingface(storage: Storage, path: str) -> bool:
    """Returns whether ``path`` is a folder with the configuration of a supported model."""
    try:
        kind = read_config(storage, path)[0].get("model_type")
        return isinstance(kind, str) and kind in ARCHITECTURES
    except (ConfigError, CorruptFileError, OSError):
        return False


def view_of_folder(storage: Storage, folder: str, attention: str = INTERLEAVED, mlp: str = INTERLEAVED,
                   wanted: Mapping[str, tuple[tuple[int, ...], str]] | None = None) -> TranslatedView:
    """Views a Hugging Face folder with the names, shapes and order of MindSpore Transformers. Reads only headers, no tensor.

    Args:
        attention, mlp: orders of the rows in linear_qkv and linear_fc1 (``formats/huggingface.py``).
        wanted: {name: (shape, dtype)} of parameters; values are converted to the dtype while they are read.
    Raises:
        ConfigError: As ``model_from_config``.
        LoadError: A tensor is missing, has another shape, has a dtype that cannot be converted, or has no rule; the message names
            these tensors.
        CorruptFileError: As ``read_consolidated``.
    """
    return _of_folder(storage, folder, read_model(storage, folder, attention, mlp), wanted or {})


def _of_folder(storage: Storage, folder: str, model: Model, wanted: Mapping[str, tuple[tuple[int, ...], str]]) -> TranslatedView:
    inner, known = view_of_consolidated(storage, read_consolidated(storage, folder)), rules(model)
    needed = shapes(known)
    missing = [name for name in needed if name not in inner.tensors]
    unknown = [name for name in inner.tensors if name not in needed and not any(fnmatchcase(name, p) for p in IGNORED)]
    why = {block.name: rule.shape_formula for rule in known.values() for block in rule.blocks}
    other = [f"{name} is {inner.tensors[name].shape}, not {shape} (a part of {why[name]})" for name, shape in needed.items()
             if name in inner.tensors and inner.tensors[name].shape != shape]
    rows = (("missing", missing), ("without a rule", unknown))
    problems = [f"{what}: {problems_text(names)}" for what, names in rows if names] + other
    if problems:
        raise LoadError(f"{folder} does not hold the weights that its {CONFIG} describes ({model.kind}, {model.layers} layers): "
                        + problems_text(problems))
    return translated(inner, known, {name: dtype for name, (_, dtype) in wanted.items() if name in known})


def read_network(storage: Storage, folder: str, wanted: Mapping[str, tuple[tuple[int, ...], str]],
                 layouts: Mapping[str, tuple[TensorLayout, tuple[int, ...]]], rank: int, network: Any = None,
                 tied: bool | None = None, converters: Iterable[Any] = (), traffic: Traffic | None = None
                 ) -> dict[str, np.ndarray]:
    """Reads the weights of one rank's network from a Hugging Face folder. Returns {parameter: its slice, in its dtype}.

    Args:
        wanted, layouts: as for ``wanted_regions``, for the parameters of the network only.
        network: mindformers' TransformerConfig of the network; its dimensions must be equal to those of the folder.
        tied: whether the network shares embedding and head.
        converters: ``weight_converters`` of the network's template, which must agree with the rules.
    Raises:
        ConfigError, LoadError, CorruptFileError, OSError: As ``view_of_folder``; ConfigError also if ``network`` has other
            dimensions.
    """
    orders = orders_of(network)
    model = read_model(storage, folder, *orders)
    if network is not None:
        check_network(model, network)
    if tied and not model.tied:
        raise ConfigError(f"{model.source}: tie_word_embeddings is false, but the network shares embedding and output layer, so "
                          f"{HF_HEAD} would be lost; set tie_word_embeddings: False in the model configuration")
    converters = list(converters)
    if converters and (problems := compare_with_template(converters, model)):
        raise LoadError(f"the network's own template does not fit the rules for {model.kind}: {problems_text(problems)}")
    check_contiguous_order(model, {name: layout for name, (layout, _) in layouts.items()})
    weights = _of_folder(storage, folder, model, wanted)
    regions, traffic = wanted_regions(weights, wanted, layouts, rank, is_no_weight), traffic or Traffic()
    transposed = {name: region for name, region in regions.items()
                  if any(block.transposed for block in weights.tensors[name].rule.blocks)}
    found = read_regions(weights, {name: region for name, region in regions.items() if name not in transposed}, traffic=traffic)
    return found | _read_transposed(weights, transposed, traffic)


def _read_transposed(weights: TranslatedView, regions: Mapping[str, Region], traffic: Traffic) -> dict[str, np.ndarray]:
    """Reads regions of tensors with transposed blocks, one block at a time. Tiles of rows would each read a few columns of every
    stored row, so every row would be read many times. Each thread needs memory for one block (the weights of one expert)."""
    files = OpenFiles(weights.storage)

    def one(item: tuple[str, Region]) -> np.ndarray:
        name, ((low, high), *others) = item
        tensor = weights.tensors[name]
        out = np.empty(shape_of(item[1]), bits_dtype(tensor.dtype))
        borders = {low, high, *(block.part[0].start for block in tensor.rule.blocks)}
        edges = sorted(edge for edge in borders if low <= edge <= high)
        for start, stop in itertools.pairwise(edges):
            gather(weights, files, name, ((start, stop), *others), out[start - low:stop - low], out[:0])
        traffic.progress(out.nbytes)
        return out.view(FILE_DTYPES[tensor.dtype])
    try:
        with ThreadPoolExecutor(WORKERS) as pool:
            found = dict(zip(regions, pool.map(one, regions.items()), strict=True))
    finally:
        files.close()
    traffic.read += files.bytes_read
    return found


def orders_of(network: Any) -> tuple[str, str]:
    """Returns the orders of linear_qkv and linear_fc1 by a TransformerConfig of mindformers; None: by the defaults."""
    contiguous = getattr(network, "use_contiguous_weight_layout_attention", False)
    interleaved = getattr(network, "use_interleaved_weight_layout_mlp", True)
    return CONTIGUOUS if contiguous else INTERLEAVED, INTERLEAVED if interleaved else CONTIGUOUS


def check_network(model: Model, network: Any) -> None:
    """Raises ConfigError unless a TransformerConfig of mindformers has the dimensions of ``model``. Shapes alone do not show a
    difference in heads and groups: other numbers of them can give the same shapes."""
    rows = (("num_layers", model.layers), ("hidden_size", model.hidden), ("num_attention_heads", model.heads),
            ("num_query_groups", model.groups), ("kv_channels", model.head_dim), ("num_moe_experts", model.experts))
    other = [f"{key} {getattr(network, key, None) or 0} instead of {value}" for key, value in rows
             if (getattr(network, key, None) or 0) != value]
    if other:
        raise ConfigError(f"the network differs from the model of {model.source}: {', '.join(other)}. Use the model "
                          f"configuration of that folder")


def is_no_weight(name: str) -> bool:
    """Returns whether a parameter is transient or a buffer with statistics."""
    return is_transient(name) or any(fnmatchcase(name, pattern) for pattern in _BUFFERS)


def problems_text(names: Sequence[str], most: int = 5) -> str:
    """Returns the first ``most`` names or sentences as one text, with the number of the others."""
    return listed(names, most, "; " if any(" " in name for name in names) else ", ")
