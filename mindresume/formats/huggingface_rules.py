"""Makes rules of the tables of a family: which part of a tensor is which part of another.

    known = rules(model)                        # {MindSpore name: Rule}, shapes of whole tensors
    known["decoder.layers.0.self_attention.linear_qkv.weight"].blocks
    inverse_rules(known)                        # {Hugging Face name: Rule}
    copies(model)                               # {Hugging Face name: the tensor that it repeats}
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mindresume.formats import huggingface_families as tables
from mindresume.formats.huggingface import HEAD, HF_EMBEDDING, HF_HEAD, Model
from mindresume.formats.huggingface_families import ALTERNATING, BY_GROUP, PER_EXPERT, Row

_OPERATIONS = ("RenameConvertOp", "QKVConvertOp", "ConcatConvertOp", "ExpertsConvertOp")     # of mindformers, in the rules

Part = tuple[range, ...]            # part of a tensor: ascending indices of each dimension; only the first has gaps


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
    for messages. ``float32``: the tensor stays in float32 when others are rounded."""
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    shape_formula: str
    float32: bool = False


class _Tensor(NamedTuple):
    """A tensor of Hugging Face: name, shape, and the factors of its first dimension."""
    name: str
    shape: tuple[int, ...]
    rows: str


# ---- rules ---------------------------------------------------------------------------------------------------------

def rules(model: Model) -> dict[str, Rule]:
    """Returns {MindSpore name: Rule} for all tensors of the network. With tied weights the network has no HEAD; its rule takes
    the embedding, for a network that is not tied and starts from these weights."""
    dimensions, features, found = model.dimensions, model.features, {}
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
        yield (*family.layer, *(family.experts if model.experts else family.dense)), f"mtp.layers.{i}.transformer_layer.", hf


def copies(model: Model) -> dict[str, str]:
    """Returns {tensor: the tensor that it repeats} for the tensors that Hugging Face stores twice."""
    tied = {HF_HEAD: HF_EMBEDDING} if model.tied else {}
    return {f"model.layers.{model.layers + i}.{name}": tied.get(other, other) for i in range(model.predictions)
            for name, other in (model.family.copies or {}).items()}


def _rule(row: Row, hf: str, model: Model, dimensions: Mapping[str, int]) -> Rule:
    """Composes a parameter of its sources, in the order of its row."""
    sources = [_Tensor(hf + source.name, tuple(_size(text, dimensions) for text in source.shape),
                       _text(source.shape[0], dimensions)) for source in row.sources]
    (_, first, factors), count, blocks = sources[0], len(sources), []
    shape: tuple[int, ...]
    if row.order == ALTERNATING:
        shape = count * first[0], first[1]
        formula = f"{count} x {factors} = {shape[0]}"
        blocks = [Block((range(i, shape[0], count), range(shape[1])), source.name, _whole(source.shape))
                  for i, source in enumerate(sources)]
    elif row.order == PER_EXPERT:
        columns, rows = first
        shape = model.experts * rows, count * columns
        formula = f"{model.experts} experts x {rows} rows, {count} x {columns} columns, of {factors}"
        blocks = [Block((range(e * rows, (e + 1) * rows), range(i * columns, (i + 1) * columns)), source.name.format(e),
                        _whole(source.shape), True) for e in range(model.experts) for i, source in enumerate(sources)]
    else:                                               # rows after each other: of each group, or all of each source
        groups, at, others = model.groups if row.order == BY_GROUP else 1, 0, _whole(first[1:])
        for group in range(groups):
            for source in sources:
                rows = source.shape[0] // groups
                blocks.append(Block((range(at, at + rows), *others), source.name,
                                    (range(group * rows, (group + 1) * rows), *others)))
                at += rows
        shape = at, *first[1:]
        formula = " + ".join(source.rows for source in sources) + (f" = {at}" if count > 1 else "")
    return Rule(shape, tuple(blocks), formula + "".join(f", by {_text(text, dimensions)}" for text in row.sources[0].shape[1:]),
                row.float32)


def _whole(shape: tuple[int, ...]) -> Part:
    return tuple(range(size) for size in shape)


def _size(text: str, dimensions: Mapping[str, int]) -> int:
    """Evaluates a size such as ``num_attention_heads x (qk_nope_head_dim + v_head_dim)``."""
    return math.prod(sum(dimensions[word] if word in dimensions else int(word) for word in factor.strip("()").split(" + "))
                     for factor in text.split(" x "))


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
    """Returns rules for the tensors that ``known`` takes its parts from. If two rules use the same tensor (tied weights), the
    first one counts."""
    blocks: dict[str, list[Block]] = {}
    owner: dict[str, str] = {}
    for name, rule in known.items():
        for block in rule.blocks:
            if owner.setdefault(block.name, name) == name:
                blocks.setdefault(block.name, []).append(Block(block.other, name, block.part, block.transposed))
    return {name: Rule(shape, tuple(blocks[name]), known[owner[name]].shape_formula, known[owner[name]].float32)
            for name, shape in shapes(known).items()}


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
