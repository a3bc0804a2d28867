"""Defines the details of a record, which have a line of their own: every tensor that a rank wrote, and its random state."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindresume.errors import RecordError
from mindresume.model.file_record import MAX_FILES
from mindresume.model.layout import TensorLayout
from mindresume.model.record_codec import expect_checksum, expect_list, expect_shape
from mindresume.model.training_state import is_count


@dataclass(frozen=True)
class TensorRecord:
    """Describes one tensor in a file of one rank.

    Attributes:
        dtype: numpy name.
        shape: of the part in the file, in elements.
        checksum: xxh3_128 of its bytes, in hex.
        layout: how the global tensor is sharded; None if no strategy names it.
        global_shape: of the whole tensor; None without layout.
        file: index into the files of the record.
    """
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    layout: TensorLayout | None = None
    global_shape: tuple[int, ...] | None = None
    file: int = 0


@dataclass(frozen=True)
class Details:
    """Holds every tensor in the files of a rank, and the state of its random number generators."""
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    random: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        layouts: dict[TensorLayout, int] = {}
        rows = {}
        for name, tensor in self.tensors.items():
            index = None if tensor.layout is None else layouts.setdefault(tensor.layout, len(layouts))
            rows[name] = [tensor.dtype, tensor.shape, tensor.checksum, index, tensor.global_shape, tensor.file]
        return {"tensors": rows, "layouts": [layout.to_json() for layout in layouts], "random": dict(self.random)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Details:
        """Reads the result of ``to_json``. Raises RecordError or ValueError for anything else, and if a shape does not fit its
        layout."""
        layouts = [TensorLayout.from_json(layout) for layout in value["layouts"]]
        fits: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}   # a model has thousands of tensors but few layouts
        tensors = {}
        for name, row in value["tensors"].items():
            dtype, shape, checksum, index, whole, file = expect_list(row, name, 6)
            if not is_count(file, 0, MAX_FILES - 1):
                raise RecordError(f"tensor {name}: the file is {file!r}"[:400] + f", expected a number below {MAX_FILES}")
            if not isinstance(dtype, str):
                raise RecordError(f"tensor {name}: the dtype is {dtype!r}"[:400] + ", expected a string")
            expect_checksum(checksum, f"tensor {name}")
            shape, whole = expect_shape(name, shape), None if whole is None else expect_shape(name, whole)
            if index is not None:
                if not is_count(index, 0, len(layouts) - 1) or whole is None:
                    raise RecordError(f"tensor {name}: layout {index!r} of global shape {whole}"[:400] + f"; there are "
                                      f"{len(layouts)} layouts")
                if (index, whole) not in fits:
                    fits[index, whole] = layouts[index].local_shape(whole)
                if fits[index, whole] != shape:
                    raise RecordError(f"tensor {name} of shape {shape}: its layout cuts {whole} into {fits[index, whole]}"[:400])
            tensors[name] = TensorRecord(dtype, shape, checksum, None if index is None else layouts[index], whole, file)
        if not isinstance(value["random"], dict):
            raise RecordError(f"random is {type(value['random']).__name__}, expected an object")
        return cls(tensors, value["random"])
