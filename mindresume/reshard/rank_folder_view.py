"""Views rank folders: layouts by the records, or by the strategy of the job that saved."""
from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mindresume.errors import LoadError, StrategyError
from mindresume.formats import Candidate
from mindresume.formats.checkpoint_dir import CheckpointDir
from mindresume.formats.strategy import Strategy
from mindresume.formatting import counted, listed, ranks_count
from mindresume.model.layout import TensorLayout, is_scalar
from mindresume.model.training_state import may_be_absent
from mindresume.reshard.checkpoint_view import CheckpointView, Records, Tensor, read_header_of
from mindresume.reshard.geometry import held
from mindresume.reshard.tensor_checks import missing_parameters
from mindresume.storage.operations import parallel
from mindresume.tensor_files import Header
from mindresume.tensor_files.header import DTYPES


def view_of_rank_folders(directory: CheckpointDir, candidate: Candidate, strategy: Strategy | None = None) -> CheckpointView:
    """Views rank folders.

    Args:
        strategy: required for checkpoints that mindformers wrote on several ranks. If records hold the layouts, it must agree.
    Raises:
        StrategyError: names the tensors whose layout is unknown or does not fit.
        LoadError: all files of a pipeline stage are missing, or the only file with some tensor is.
    """
    if strategy is not None and strategy.world_size != candidate.world_size:
        raise StrategyError(f"{strategy.source}: a strategy of {ranks_count(strategy.world_size)} "
                            f"({counted(len(strategy.stages), 'stage')} of {strategy.stage_size}), the checkpoint "
                            f"{directory.root}, step {candidate.step}, is of {candidate.world_size}")
    builder = _RankFolders(directory, candidate)
    files = {rank: (directory.path(of_rank[0].path),) for rank, of_rank in candidate.files.items() if of_rank}
    return CheckpointView(directory.storage, directory.root, builder.tensors(strategy), files, records=builder.records,
                          headers=builder.headers, world_size=candidate.world_size)


class _RankFolders:
    """Finds tensors and layouts of rank folders. Reads one header (and record) per stage; more only after redundancy removal."""

    def __init__(self, directory: CheckpointDir, candidate: Candidate):
        self.storage, self.root, self.candidate = directory.storage, directory.root, candidate
        self.headers: dict[str, Header | None] = {}
        self.records = Records(self.storage, candidate)

    def path(self, rank: int) -> str | None:
        files = self.candidate.files.get(rank)
        return os.path.join(self.root, files[0].path) if files else None

    def header(self, rank: int) -> Header | None:
        path = self.path(rank)
        if path is None:
            return None
        if path not in self.headers:
            self.headers[path] = read_header_of(self.storage, path)
        return self.headers[path]

    # ---- layouts -----------------------------------------------------------------------------------------------------

    def tensors(self, strategy: Strategy | None) -> dict[str, Tensor]:
        size = strategy.stage_size if strategy else self._stage_size()
        stages = range(0, self.candidate.world_size, size)
        held_by = [self._held(first, size, strategy.stages[stage] if strategy else ()) for stage, first in enumerate(stages)]
        if strategy:
            strategy = strategy.fit_dimensions({name: len(shape) for stage in held_by for name, (_, _, shape) in stage.items()})
        found: dict[str, Tensor] = {}
        lost: list[str] = []
        for stage, first in enumerate(stages):
            given = strategy.stages[stage] if strategy else None
            for name, (rank, dtype, shape) in held_by[stage].items():
                known, recorded = found.get(name), self._recorded(rank, name)
                layout = self._layout(name, shape, recorded, given, first, size) or (known.layout if known else None)
                ranks = (*([known.first] if known else []), *range(first, first + size))
                if layout is None and self.candidate.world_size > 1 and not self._same_everywhere(name, shape, ranks):
                    lost.append(f"{name} {shape}")
                    continue
                full = shape if layout is None else _global_shape(layout, shape, name)
                if known is None:
                    found[name] = Tensor(name, dtype, full, layout, first, size)
                else:                               # shared by several stages, or a counter
                    found[name] = _shared_by(known, dtype, full, layout, first, self.root)
            self._check_lost(first, size, given, found)
        if lost:
            source = strategy.source if strategy else "the checkpoint records no layout for them, and no strategy is given " \
                "(src_strategy_path_or_dir, --from)"
            raise StrategyError(f"{self.root}, step {self.candidate.step}: {len(lost)} tensors have no layout: "
                                f"{listed(lost, 5)}; {source}")
        return found

    def _stage_size(self) -> int:
        """Returns the number of ranks of a stage, by the records; of the job, if no record has a layout."""
        for rank in self.candidate.files:
            details = self.records.details(rank)
            sizes = {row.layout.stage_size for row in details.tensors.values() if row.layout} if details else set()
            if sizes:
                size = sizes.pop()
                if sizes or self.candidate.world_size % size:
                    raise StrategyError(f"{self.root}: the record of rank {rank} has layouts of stages of {size} ranks"
                                        f"{' and other sizes' if sizes else ''}, the job had {self.candidate.world_size}")
                return size
        return self.candidate.world_size

    def _held(self, first: int, size: int, named: Collection[str]) -> dict[str, tuple[int, str, tuple[int, ...]]]:
        """Returns {tensor: (rank, dtype, local shape)} of a stage. All its ranks hold the same names, unless redundancy was
        removed. A safetensors file says so; for a ckpt file it is assumed if a tensor of the strategy (``named``) is missing."""
        one = next((rank for rank in range(first, first + size) if self.header(rank) is not None), None)
        if one is None:
            raise LoadError(f"{self.root}, step {self.candidate.step}: the files of all ranks from {first} to "
                            f"{first + size - 1}, a whole pipeline stage, are missing")
        ranks, header = [one], self.header(one)
        if header.metadata.get("remove_redundancy") == "True" or any(
                name not in header.tensors and not may_be_absent(name) for name in named):
            parallel(self.storage, self.header, range(first, first + size))
            ranks = [rank for rank in range(first, first + size) if self.header(rank) is not None]
        found: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        for rank in ranks:
            for name, entry in self.header(rank).tensors.items():
                if entry.dtype not in DTYPES:
                    raise LoadError(f"{self.path(rank)}: {name} is a text, not a tensor; it can be part of no other layout")
                found.setdefault(name, (rank, entry.dtype, entry.shape))
        return found

    def _check_lost(self, first: int, size: int, given: Mapping[str, TensorLayout] | None, found: Mapping[str, Tensor]) -> None:
        """Raises LoadError if the records or the strategy name a tensor of this stage that only missing files held."""
        gone = [rank for rank in range(first, first + size) if self.header(rank) is None] if self._read_all(first, size) else []
        for rank in gone:
            details = self.records.details(rank)
            lost = [name for name in details.tensors if name not in found] if details else missing_parameters(given or {}, found)
            if lost:
                raise LoadError(f"{self.root}, step {self.candidate.step}: the file of rank {rank} is missing, and with it "
                                f"{len(lost)} tensors that no other rank has, for example {lost[0]}")

    def _read_all(self, first: int, size: int) -> bool:
        return all(self.path(rank) is None or self.path(rank) in self.headers for rank in range(first, first + size))

    def _recorded(self, rank: int, name: str) -> Any:
        details = self.records.details(rank)
        return details.tensors.get(name) if details else None

    def _layout(self, name: str, shape: tuple[int, ...], recorded: Any, given: Mapping[str, TensorLayout] | None, first: int,
                size: int) -> TensorLayout | None:
        known = recorded.layout if recorded else None
        wanted = given.get(name) if given else None
        if known is None or wanted is None:
            return known or wanted
        full = _global_shape(known, shape, name)
        if known != wanted:
            for rank in range(size):
                try:
                    same = held(known, rank, full) == held(wanted, rank, full)
                except ValueError:
                    same = False
                if not same:
                    raise StrategyError(f"{name}: the strategy that is given cuts it as {wanted}, the record of the checkpoint "
                                        f"as {known}; rank {first + rank} would hold another part of {full}. Leave "
                                        f"src_strategy_path_or_dir (--from) away: these records know their layouts")
        return known

    def _same_everywhere(self, name: str, shape: tuple[int, ...], ranks: Iterable[int]) -> bool:
        """Returns whether a tensor without a layout is alike on ``ranks``: a counter, or one whose recorded checksums agree (data
        parallel)."""
        if is_scalar(shape):
            return True
        rows = [self._recorded(rank, name) for rank in ranks]
        return len({(row.dtype, row.shape, row.checksum) if row else None for row in rows}) == 1 and rows[0] is not None


def _shared_by(known: Tensor, dtype: str, shape: tuple[int, ...], layout: TensorLayout | None, first: int, where: str) -> Tensor:
    """Adds the stage that begins with rank ``first`` to the holders. StrategyError if it holds another dtype, shape or layout."""
    if (known.dtype, known.shape, known.layout) != (dtype, shape, layout) and not is_scalar(shape):
        raise StrategyError(f"{where}: the pipeline stage of rank {known.first} holds {known.name} as {known.dtype} of whole "
                            f"shape {known.shape}, cut as {known.layout}, that of rank {first} as {dtype} of {shape}, cut as "
                            f"{layout}; expected the same on both")
    return replace(known, other_stages=(*known.other_stages, first))


def _global_shape(layout: TensorLayout, held: tuple[int, ...], name: str) -> tuple[int, ...]:
    try:
        return layout.global_shape(held)
    except ValueError as error:
        raise StrategyError(f"{name}: {error}") from error
