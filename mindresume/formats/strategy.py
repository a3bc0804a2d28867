"""Reads and writes MindSpore's strategy files, which describe the sharding of every parameter of a job. Neither mindspore nor
protobuf is imported.

    strategy = read_strategy("output/strategy")                 # a folder, or one file: .ckpt (protobuf) or .json
    strategy.of_rank(5)["embedding.weight"].slices(5 % strategy.stage_size, (8, 4))
    write_strategy(strategy, "elsewhere")                       # files that MindSpore reads

MindSpore writes one file per rank, ``ckpt_strategy_rank_<R>.ckpt``, with the parameters of that rank's pipeline stage. A merged
file (``mindspore.merge_pipeline_strategys``) holds all stages; its parameters are named ``<stage>-<name>``.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindresume.errors import StrategyError
from mindresume.formats.strategy_codec import Layouts, decode_strategy, encode_strategy
from mindresume.formatting import listed
from mindresume.model.layout import MAX_RANKS, TensorLayout
from mindresume.model.training_state import is_count
from mindresume.storage.atomic_publish import publish
from mindresume.storage.interface import Storage
from mindresume.storage.operations import parallel, read_bytes
from mindresume.storage.posix import PosixStorage

MAX_BYTES = 256 << 20                   # of a file; 2,000 parameters need 200 kB
_RANK = re.compile(r"(?!merged|\.).*rank_(\d{1,9})(.*)\.(?:ckpt|json)", re.ASCII)
_WHOLE = re.compile(r"(?!\.)(?:merged.*|.*strategy.*)\.(?:ckpt|json)")


@dataclass(frozen=True)
class Strategy:
    """The sharding of all parameters of a job.

    Attributes:
        stages: for each pipeline stage {parameter: layout}.
        source: where it was read, for messages.

    Raises:
        StrategyError: A stage has no parameter, or layouts differ in ``stage_size``.
    """
    stages: tuple[Layouts, ...]
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.stages or not all(self.stages):
            raise StrategyError(f"{self._where}{len(self.stages)} stages, {sum(map(bool, self.stages))} of them with parameters; "
                                f"expected at least one stage, each with parameters")
        one_form = {layout: layout.normalized() for stage in self.stages for layout in stage.values()}
        stages = tuple({name: one_form[layout] for name, layout in stage.items()} for stage in self.stages)
        object.__setattr__(self, "stages", stages)
        if len({layout.stage_size for layout in one_form}) > 1:
            sizes = {layout.stage_size: f"{layout.stage_size} ({name} of stage {number})"
                     for number, stage in enumerate(self.stages) for name, layout in stage.items()}
            raise StrategyError(f"{self._where}all layouts of a job must have the same number of ranks per stage, found "
                                + listed(list(sizes.values()), 5))
        if self.world_size > MAX_RANKS:
            raise StrategyError(f"{self._where}{len(self.stages)} stages of {self.stage_size} ranks; a job has up to {MAX_RANKS}")

    @property
    def _where(self) -> str:
        return f"{self.source}: " if self.source else ""

    @property
    def stage_size(self) -> int:
        """Returns the number of ranks in each pipeline stage."""
        return next(iter(self.stages[0].values())).stage_size

    @property
    def world_size(self) -> int:
        """Returns the number of ranks of the job."""
        return len(self.stages) * self.stage_size

    def of_rank(self, rank: int) -> Layouts:
        """Returns {parameter: layout} of the tensors that ``rank`` holds; its number within the stage is ``rank % stage_size``.
        Raises StrategyError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise StrategyError(f"{self._where}rank {rank} is not one of the {self.world_size} ranks of this strategy")
        return self.stages[rank // self.stage_size]

    def stage_of(self, name: str) -> int | None:
        """Returns the first stage that holds the parameter; None if no stage does."""
        return next((number for number, stage in enumerate(self.stages) if name in stage), None)

    def fit_dimensions(self, dimensions: Mapping[str, int]) -> Strategy:
        """Returns the strategy with its layouts adapted to the given numbers of dimensions. A file has ``[1, 0]`` both for a
        matrix and for a vector sharded by two axes, and no dimensions at all if a stage is one rank. Raises StrategyError if a
        layout does not fit."""
        known: dict[tuple[TensorLayout, int], TensorLayout] = {}

        def fit(name: str, layout: TensorLayout) -> TensorLayout:
            count, cuts = dimensions.get(name, len(layout.tensor_map)), layout.tensor_map
            if count == len(cuts):
                return layout
            if (layout, count) not in known:
                axes = tuple(axis for axis in cuts if isinstance(axis, int))
                if count == 1 and cuts and len(axes) == len(cuts):
                    cuts = (axes,)
                elif not cuts and layout.stage_size == 1:
                    cuts = (-1,) * count
                else:
                    raise StrategyError(f"{self._where}parameter {name} has {count} dimensions, the strategy has "
                                        f"{len(cuts)}: {layout}; does it belong to this model?")
                known[layout, count] = TensorLayout(layout.device_matrix, cuts, layout.optimizer_shards).normalized()
            return known[layout, count]

        return Strategy(tuple({name: fit(name, layout) for name, layout in stage.items()} for stage in self.stages), self.source)

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value that ``from_json`` reads; it contains each distinct layout once."""
        layouts: dict[TensorLayout, int] = {}
        stages = [{name: layouts.setdefault(layout, len(layouts)) for name, layout in stage.items()} for stage in self.stages]
        return {"source": self.source, "layouts": [layout.to_json() for layout in layouts], "stages": stages}

    @classmethod
    def from_json(cls, value: Any) -> Strategy:
        """Reads the result of ``to_json``; ignores unknown keys. Raises StrategyError for anything else."""
        try:
            layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
            if not all(is_count(index, 0, len(layouts) - 1) for stage in value["stages"] for index in stage.values()):
                raise ValueError(f"an index is not one of the {len(layouts)} layouts")
            return cls(tuple({name: layouts[index] for name, index in stage.items()} for stage in value["stages"]),
                       str(value["source"]))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise StrategyError(f"not a strategy: {type(error).__name__}: {error}"[:400]) from error


# ---- reading ---------------------------------------------------------------------------------------------------------

def read_strategy(path: str, storage: Storage = PosixStorage()) -> Strategy:          # noqa: B008  it has no state
    """Reads the strategy of a file, or of a folder of files. In a folder, a merged file is used only if there are no files of
    ranks.

    One file per stage is enough. Not detected: missing files of all of the last stages.

    Raises:
        StrategyError: A file is damaged, files of different jobs are mixed, stages are missing, or a tensor is sharded unevenly.
        OSError: Reading failed.
    """
    found = storage.status(path)
    if found is None:
        raise StrategyError(f"{path}: there is no such strategy file or folder")
    if not found.is_folder:
        return _complete(decode_strategy(_content(storage, path), path), path)
    names = storage.list(path)
    ranked = [(int(match[1]), name) for name in names if (match := _rank_of(name))]
    wholes = [name for name in names if _WHOLE.fullmatch(name) and not _rank_of(name)]
    if ranked:
        return _of_ranks(path, sorted(ranked), storage)
    contents = {_content(storage, os.path.join(path, name)): name for name in reversed(wholes)}
    if len(contents) != 1:
        raise StrategyError(f"{path}: no file of a rank (ckpt_strategy_rank_<R>.ckpt or .json), "
                            + (f"but {len(wholes)} others that differ: {listed(wholes, 5)}; give one of them" if wholes else
                               f"and no merged file; found {listed(names, 5) or 'nothing'}"))
    (content, name), = contents.items()
    return _complete(decode_strategy(content, os.path.join(path, name)), path)


def _rank_of(name: str) -> re.Match[str] | None:
    """Returns the match of a file name with a rank; None for any other name."""
    found = _RANK.fullmatch(name)
    return found if found and (not found[2] or "strategy" in name) else None        # net_rank_0-1_10.ckpt holds weights


def _of_ranks(folder: str, files: list[tuple[int, str]], storage: Storage) -> Strategy:
    """Reads the files of ranks. ``files``: (rank, name). Parses files with the same bytes once."""
    contents: dict[bytes, bytes] = {}           # one object for all ranks with the same bytes
    parsed: dict[int, Mapping[int, Layouts]] = {}

    def load(name: str) -> bytes:
        content = _content(storage, os.path.join(folder, name))
        return contents.setdefault(content, content)

    first: dict[int, tuple[str, Layouts]] = {}
    held: dict[int, tuple[str, int]] = {}
    for (rank, name), content in zip(files, parallel(storage, load, [name for _, name in files]), strict=True):
        if id(content) not in parsed:
            parsed[id(content)] = decode_strategy(content, os.path.join(folder, name))
        if len(parsed[id(content)]) != 1:
            raise StrategyError(f"{folder}: {name} has the name of rank {rank}'s file, but holds {len(parsed[id(content)])} "
                                f"stages; remove it, or give the path of this file")
        (stage, layouts), = parsed[id(content)].items()
        if rank in held:
            raise StrategyError(f"{folder}: {held[rank][0]} and {name} are both the file of rank {rank}; keep those of one job")
        held[rank] = name, stage
        other, known = first.setdefault(stage, (name, layouts))
        if known is not layouts and known != layouts:
            differing = next(name for name in [*known, *layouts] if known.get(name) != layouts.get(name))
            raise StrategyError(f"{folder}: {other} and {name} are both of stage {stage} and differ in {differing}: "
                                f"{known.get(differing, 'absent')} and {layouts.get(differing, 'absent')}; are files of "
                                f"different jobs mixed? Keep those of one job")
    strategy = _complete({stage: layouts for stage, (_, layouts) in first.items()}, folder)
    for rank, (name, stage) in held.items():
        if rank // strategy.stage_size != stage:
            raise StrategyError(f"{folder}: {name} is of stage {stage}; with {strategy.stage_size} ranks a stage and "
                                f"{len(strategy.stages)} stages, rank {rank} "
                                + (f"is of stage {rank // strategy.stage_size}" if rank < strategy.world_size else
                                   f"is one too many, there are {strategy.world_size}") + "; keep the files of one job")
    return strategy


def _complete(stages: Mapping[int, Layouts], source: str) -> Strategy:
    """Returns the strategy of all stages. Raises StrategyError if a stage is missing."""
    missing = max(stages) + 1 - len(stages)
    if missing:
        gap = next(stage for stage in range(max(stages)) if stage not in stages)
        raise StrategyError(f"{source}: the highest pipeline stage is {max(stages)}, and {missing} below it are missing, the "
                            f"first is {gap}: give the folder with the files of all ranks, or a merged file")
    return Strategy(tuple(stages[stage] for stage in range(len(stages))), source)


def _content(storage: Storage, path: str) -> bytes:
    """Reads a strategy file. Raises StrategyError if it is too large to be one."""
    found = storage.status(path)
    if found is not None and found.size > MAX_BYTES:
        raise StrategyError(f"{path}: {found.size} bytes, expected a strategy file of at most {MAX_BYTES}")
    return read_bytes(storage, path, MAX_BYTES)


# ---- writing ---------------------------------------------------------------------------------------------------------

def write_strategy(strategy: Strategy, folder: str, fmt: str = "ckpt",
                   storage: Storage = PosixStorage()) -> list[str]:                    # noqa: B008  it has no state
    """Writes ``ckpt_strategy_rank_<R>.<fmt>`` for all ranks and returns the paths in order of rank. Publishes each file
    atomically; keeps an existing file with the same bytes.

    Raises:
        StrategyError: As for ``encode_strategy``, before the first byte; or the folder holds another strategy.
        OSError: Writing failed.
    """
    stages = [encode_strategy({number: stage}, fmt) for number, stage in enumerate(strategy.stages)]
    wanted = {f"ckpt_strategy_rank_{rank}.{fmt}": stages[rank // strategy.stage_size] for rank in range(strategy.world_size)}
    present = [name for name in storage.list(folder) if _rank_of(name)]
    for name in present:
        if name not in wanted or _content(storage, os.path.join(folder, name)) != wanted[name]:
            raise StrategyError(f"{folder}: {name} exists and belongs to another strategy; give an empty folder")
    storage.make_folder(folder)
    parallel(storage, lambda name: publish(storage, os.path.join(folder, name), [wanted[name]], "strategy"),
             [name for name in wanted if name not in present])
    return [os.path.join(folder, name) for name in wanted]
