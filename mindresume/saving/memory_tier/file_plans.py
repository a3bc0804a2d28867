"""Lays out the files of a save. The next save usually differs only in its step, so its files are laid out in the background."""
from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from mindresume.formats.rank_folders import label
from mindresume.saving.shard_writer import ShardFile
from mindresume.tensor_files import TensorSpec, plan_file, tensor_spec
from mindresume.tensor_files.header import FilePlan

_Row = tuple[str, dict[str, TensorSpec], dict[str, str]]        # all that a plan depends on


class FilePlans:
    """The plans of one rank's files, those of the next save ahead of it."""

    def __init__(self) -> None:
        self._ahead: tuple[list[_Row], tuple[FilePlan, ...]] = [], ()

    def of(self, files: Sequence[ShardFile]) -> tuple[FilePlan, ...]:
        """Returns the plan of each file. Raises ValueError."""
        rows, (known, plans) = _rows(files), self._ahead
        return plans if rows == known else _plans(rows)

    def prepare(self, files: Sequence[ShardFile], run: str, step: int) -> None:
        """Plans the same files for a save of ``step``, which may never come. Raises no error: ``of`` will."""
        with suppress(ValueError):
            rows = _rows([replace(file, metadata={**file.metadata, **label(run, step)}) for file in files])
            self._ahead = rows, _plans(rows)


def _rows(files: Sequence[ShardFile]) -> list[_Row]:
    return [(file.format, {name: tensor_spec(name, array) for name, array in file.tensors.items()}, dict(file.metadata))
            for file in files]


def _plans(rows: Sequence[_Row]) -> tuple[FilePlan, ...]:
    return tuple(plan_file(*row) for row in rows)
