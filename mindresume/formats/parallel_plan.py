"""Parses a parallel configuration and derives the strategy of a model from it, as the target of a
conversion.

    plan = ParallelPlan.parse("dp=2,tp=4,pp=2,opt=2") strategy = strategy_from_plan(plan,
    {"embedding.weight": ((64, 8), TensorLayout((2,), (0, -1)), (0, 3)), ...}, stages=4)

A plan gives numbers of ranks, not the dimensions that they shard: the dimension for tensor
parallelism is taken from the layouts of the source checkpoint. Anything else needs a strategy file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mindresume.errors import ConfigError
from mindresume.formats.strategy import Strategy
from mindresume.model.layout import MAX_RANKS, TensorLayout

# Global shape; layout in the source, None if unknown; the pipeline stages that hold it there,
# ascending, () if unknown.
SourceTensor = tuple[tuple[int, ...], TensorLayout | None, tuple[int, ...]]

_KEYS = {"dp": "dp", "tp": "tp", "mp": "tp", "pp": "pp", "opt": "opt"}
_PLAN = re.compile(rf"\s*(?:{'|'.join(_KEYS)})\s*=[^/\\]*|\w+=-?\d+(?:,\w+=-?\d+)*")
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h|layer)\.(\d{1,9})(?:\.|$)", re.ASCII)
# multi-token prediction: mindformers puts it into the last stage
_BEHIND = re.compile(r"(?:^|\.)mtp\.")
# tok_embeddings, word_embeddings, embed_tokens, wte: input of the first layer
_FIRST = ("embed", "wte")
_GIVE = "give a strategy file instead of a plan"


def is_plan(text: str) -> bool:
    """Returns whether ``text`` is meant as a plan, valid or not, rather than a path."""
    return _PLAN.fullmatch(text) is not None


@dataclass(frozen=True)
class ParallelPlan:
    """``dp`` x ``tp`` ranks in each of ``pp`` pipeline stages. ``opt``: number of optimizer shards;
    0: none, -1: as many as a tensor has replicas. Raises ConfigError for impossible numbers."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    opt: int = 0

    def __post_init__(self) -> None:
        if min(self.dp, self.tp, self.pp) < 1 or self.opt < -1:
            raise ConfigError(
                f"plan {self}: dp, tp and pp must be integers >= 1; opt too, or 'all'"
            )
        if self.world_size > MAX_RANKS:
            raise ConfigError(
                f"plan {self}: {self.world_size} ranks; a job has at most {MAX_RANKS}"
            )

    def __str__(self) -> str:
        opt = {0: "", -1: ",opt=all"}.get(self.opt, f",opt={self.opt}")
        return f"dp={self.dp},tp={self.tp},pp={self.pp}{opt}"

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """Parses a plan such as ``"dp=2,tp=4,pp=2,opt=2"``. Missing numbers are 1, a missing opt
        means no optimizer shards; mp is a synonym of tp. Raises ConfigError for any other text."""
        found: dict[str, int] = {}
        for part in text.split(","):
            key, equals, value = map(str.strip, part.partition("="))
            name = _KEYS.get(key)
            if name is None or not equals:
                raise ConfigError(
                    f"plan {text!r}: {part!r} is not dp=, tp= (or mp=), pp= or opt= with a number, "
                    "as in dp=2,tp=4,pp=2,opt=2"
                )
            if name in found:
                raise ConfigError(
                    f"plan {text!r}: {key}={value} gives {name} a second time"
                    + (" (mp is a synonym of tp)" if name == "tp" else "")
                )
            everything = name == "opt" and value in ("all", "-1")
            if not everything and not re.fullmatch(r"0*[1-9]\d{0,8}", value, re.ASCII):
                raise ConfigError(
                    f"plan {text!r}: {key} is {value!r}, expected a whole number >= 1"
                    + (", or all for as many pieces as there are replicas" if name == "opt" else "")
                )
            found[name] = -1 if everything else int(value)
        return cls(**found)

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the job."""
        return self.dp * self.tp * self.pp


def strategy_from_plan(
    plan: ParallelPlan, tensors: Mapping[str, SourceTensor], stages: int = 1
) -> Strategy:
    """Returns layouts and stages of the tensors under a plan.

    Layouts use the device matrix [dp, tp]. Tensor parallelism does not shard a tensor without a
    layout. Layers are distributed evenly: layer i of L is in stage i * pp // L. A tensor that
    several stages of the source hold, such as an embedding that is also the head, is in several
    stages of the target.

    Args:
        plan: the target.
        tensors: of the source.
        stages: number of pipeline stages of the source.

    Raises:
        ConfigError: The plan does not fit, or the source does not give enough information.
    """
    if not tensors:
        raise ConfigError(f"plan {plan}: there are no tensors to shard")
    # dimension that tensor parallelism shards; None: it does not shard the tensor
    cuts: dict[str, int | None] = {}
    for name, (shape, layout, _) in tensors.items():
        cuts[name] = None
        if layout is None or plan.tp == 1:
            continue
        if len(layout.tensor_map) != len(shape):
            raise ConfigError(
                f"plan {plan}: {name} has the shape {shape}, its layout in the source is for "
                f"{len(layout.tensor_map)} dimensions: {layout}"
            )
        cut = [
            dim
            for dim, axes in enumerate(layout.axes)
            if any(layout.device_matrix[-1 - axis] > 1 for axis in axes)
        ]
        if len(cut) > 1:
            raise ConfigError(
                f"plan {plan}: the source shards {name} of shape {shape} along dimensions "
                f"{' and '.join(map(str, cut))}; a plan can shard only one; {_GIVE}"
            )
        cuts[name] = cut[0] if cut else None
    if plan.tp > 1 and all(cut is None for cut in cuts.values()):
        raise ConfigError(
            f"plan {plan}: no tensor of the source is sharded, so the dimension for tensor "
            f"parallelism is unknown; {_GIVE}"
        )
    places = _stages(plan, tensors, stages)
    found: list[dict[str, TensorLayout]] = [{} for _ in range(plan.pp)]
    for name, (shape, _, _) in tensors.items():
        at = cuts[name]
        if at is not None and shape[at] % plan.tp:
            raise ConfigError(
                f"plan {plan}: {name} of shape {shape} has {shape[at]} elements in dimension {at}, "
                f"which tp={plan.tp} does not divide"
            )
        layout = TensorLayout(
            (plan.dp, plan.tp), tuple(0 if dim == at else -1 for dim in range(len(shape)))
        )
        pieces = layout.replicas if plan.opt == -1 else plan.opt
        # Like mindformers, uses no optimizer shards if they do not divide the replicas or the local
        # dimension 0.
        if (
            shape
            and pieces > 1
            and not layout.replicas % pieces
            and not layout.local_shape(shape)[0] % pieces
        ):
            layout = TensorLayout(layout.device_matrix, layout.tensor_map, plan.opt)
        for stage in places[name]:
            found[stage][name] = layout
    if not all(found):
        raise ConfigError(
            f"plan {plan}: pipeline stage {found.index({})} would hold no tensor; take a smaller "
            f"pp, or {_GIVE}"
        )
    return Strategy(tuple(found), str(plan))


def _stages(
    plan: ParallelPlan, tensors: Mapping[str, SourceTensor], stages: int
) -> dict[str, tuple[int, ...]]:
    """Returns {tensor: pipeline stages}. A tensor outside the layers stays in the first or last
    stage if the source has it there. Else its name decides, and a tensor not known to precede the
    first layer follows the last one. ``stages``: number of stages in the source."""
    if plan.pp == 1:
        return dict.fromkeys(tensors, (0,))
    layers = {name: _layer(name) for name in tensors}
    count = 1 + max((layer for layer in layers.values() if layer is not None), default=-1)
    if plan.pp > count:
        raise ConfigError(
            f"plan {plan}: {count} layers (names with layers.<i>, blocks.<i>, h.<i> or layer.<i>) "
            f"do not fill {plan.pp} pipeline stages; take a smaller pp, or {_GIVE}"
        )
    known = {stage for _, _, held in tensors.values() for stage in held}
    first, last = (min(known), max(known)) if len(known) > 1 else (None, None)
    places: dict[str, tuple[int, ...]] = {}
    for name, (_, _, held) in tensors.items():
        layer = layers[name]
        if len(held) > 1:
            places[name] = _shared(plan, name, held, layer is not None, stages)
        elif layer is not None:
            places[name] = (layer * plan.pp // count,)
        else:
            is_first = held[0] == first if held and held[0] in (first, last) else _is_first(name)
            places[name] = (0,) if is_first else (plan.pp - 1,)
    return places


def _shared(
    plan: ParallelPlan, name: str, held: tuple[int, ...], in_layer: bool, stages: int
) -> tuple[int, ...]:
    """Returns the target stages of a tensor that several stages of the source hold. Raises
    ConfigError if those do not determine the target stages: both of two stages can mean all stages,
    or the two ends. It means the ends for an embedding (by its name)."""
    if not in_layer:
        ends, everywhere = held == (0, stages - 1), len(held) == stages
        if ends and (stages > 2 or plan.pp == 2 or _is_first(name)):
            return 0, plan.pp - 1
        if everywhere and stages > 2:
            return tuple(range(plan.pp))
    raise ConfigError(
        f"plan {plan}: {name} is held by the pipeline stages {', '.join(map(str, held))} of "
        f"{stages} in the source, so it is unknown which of {plan.pp} stages need it; {_GIVE}"
    )


def _is_first(name: str) -> bool:
    """Returns whether a tensor precedes the first layer, by its name."""
    return any(word in name for word in _FIRST) and not _BEHIND.search(name)


def _layer(name: str) -> int | None:
    """Returns the number of the layer in a parameter's name; None outside the layers."""
    found = None if _BEHIND.search(name) else _LAYER.search(name)
    return int(found[1]) if found else None
