"""Reads and damages the checkpoints of a run: rank folders (Checkpoint 1.0), iteration folders
(2.0), whole tensors of both."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindresume.formats import Candidate, CheckpointDir
from mindresume.formats.iterations import TRACKER, iteration_name, parse_iteration
from mindresume.formats.scan import scan
from mindresume.model.layout import held
from mindresume.model.layout import whole as whole_region
from mindresume.model.manifest import (
    FOLDER,
    MANIFEST,
    Manifest,
    Record,
    TensorRecord,
    parse_attempt,
    read_details,
    read_record,
    record_name,
)
from mindresume.reshard.range_reader import view
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header, read_scalar
from st.training_run import Run
from tests.rank_folders import tensors_in


def flip_bit(path: Path, tensor: str | None = None) -> None:
    """Flips one bit in the middle of a file, or of one tensor in it, as a disk or a network would;
    size and times of other files do not change. mindformers leaves its files read-only."""
    content = bytearray(path.read_bytes())
    start, count = 0, len(content)
    if tensor:
        with open(path, "rb") as file:
            start, count = read_header(file, str(path)).tensors[tensor].ranges[0]
    content[start + count // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)


# ---- rank folders --------------------------------------------------------------------------------


def records(run: Run, number: int | None = None) -> dict[int, Record]:
    """{step: record of rank 0} of everything that is committed, of all runs or of the one with that
    number (from 1)."""
    found = {}
    for attempt in sorted((run.checkpoints / FOLDER).iterdir()):
        if parse_attempt(attempt.name) and (attempt / MANIFEST).exists():
            with open(attempt / record_name(0), "rb") as file:
                record = read_record(file)
            if number is None or int(record.run.split("-")[0]) == number:
                found[record.state.step] = record
    return found


def names(run: Run, number: int | None = None) -> dict[int, str]:
    """{step: file name of rank 0} of everything that is committed; ``number`` as of ``records``."""
    return {step: Path(record.files[0].path).name for step, record in records(run, number).items()}


def weights(run: Run, step: int) -> Path:
    """The file of rank 0 of a committed step."""
    return run.checkpoints / records(run)[step].files[0].path


def counter(path: Path, name: str) -> int | float | None:
    """A counter in a file of weights, such as step_num."""
    with open(path, "rb") as file:
        return read_scalar(file, read_header(file, str(path)), name)


def meta(run: Run) -> dict:
    """meta.json of rank 0."""
    return json.loads((run.checkpoints / "rank_0" / "meta.json").read_text(encoding="utf-8"))


def copy_checkpoints(source: Run, target: Run, last_step: int) -> None:
    """Copies the checkpoints of ``source`` up to ``last_step`` into the folder of ``target``."""
    for folder in (source.checkpoints / FOLDER).iterdir():
        attempt = parse_attempt(folder.name)
        if attempt and attempt[0] <= last_step:
            with open(folder / MANIFEST, "rb") as file:
                files = [record.path for records in Manifest.read(file).files for record in records]
            for path in [
                *files,
                *(f"{FOLDER}/{folder.name}/{path.name}" for path in folder.iterdir()),
            ]:
                (target.checkpoints / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source.checkpoints / path, target.checkpoints / path)


# ---- iteration folders ---------------------------------------------------------------------------


def iteration_steps(root: Path) -> list[int]:
    """Steps of the iteration folders, smallest first."""
    return sorted(
        step
        for path in root.glob("iteration_*")
        if (step := parse_iteration(path.name)) is not None
    )


def tracker(root: Path) -> int:
    """The step that the tracker file names."""
    return int((root / TRACKER).read_text(encoding="utf-8"))


def copy_iterations(root: Path, to: Path, *steps: int) -> Path:
    """Copies these iterations alone, with the newest of them in the tracker, and nothing of the
    runs that were there."""
    for step in steps:
        shutil.copytree(root / iteration_name(step), to / iteration_name(step))
    (to / TRACKER).write_text(str(max(steps)), encoding="utf-8")
    return to


def iteration_files(root: Path, step: int) -> list[str]:
    """Names in an iteration folder, without ours."""
    return sorted(
        path.name for path in (root / iteration_name(step)).iterdir() if path.name != FOLDER
    )


def common_json(root: Path, step: int) -> dict[str, Any]:
    return json.loads((root / iteration_name(step) / "common.json").read_text(encoding="utf-8"))


# ---- global tensors ------------------------------------------------------------------------------

# Parameters of the train step: ours are saved beside the optimizer, mindformers saves none in
# Checkpoint 2.0.
OF_TRAIN_STEP = frozenset({"scale_sense", "lm_loss", "aux_loss", "mtp_loss", "indexer_loss"})


def candidate(root: Path, step: int, legacy: bool = False) -> Candidate:
    """The checkpoint of ours of this step. AssertionError if it cannot be used."""
    found = [
        c
        for c in scan(CheckpointDir(PosixStorage(), str(root))).candidates
        if c.step == step and c.records_dir and legacy == (not c.iteration_dir)
    ]
    assert len(found) == 1 and found[0].problem is None, found
    return found[0]


def tensors_of_ranks(
    root: Path, step: int, legacy: bool = False
) -> dict[int, Mapping[str, TensorRecord]]:
    """{rank: what it recorded of the tensors in its files}"""
    one, found = candidate(root, step, legacy), {}
    for rank in one.files:
        with open(os.path.join(one.records_dir, record_name(rank)), "rb") as file:
            found[rank] = read_details(file)[1].tensors
    return found


def layout_table(root: Path, step: int, legacy: bool = False) -> dict[str, TensorRecord]:
    """{tensor: a record of it by some rank}: with redundancy removal a rank records its share
    alone."""
    return {
        name: row
        for rows in tensors_of_ranks(root, step, legacy).values()
        for name, row in rows.items()
    }


def slices_of(root: Path, step: int, legacy: bool = False) -> list[tuple[str, str]]:
    """(tensor, which slice of it) of everything with a layout in the files of all ranks."""
    return [
        (name, str(held(row.layout, rank, row.global_shape)))
        for rank, rows in tensors_of_ranks(root, step, legacy).items()
        for name, row in rows.items()
        if row.layout is not None
    ]


def saved_tensors(root: Path, step: int, legacy: bool = False) -> dict[str, np.ndarray]:
    """Returns the global tensors of all ranks' files. AssertionError if replicas differ or a slice
    is missing."""
    table = layout_table(root, step, legacy)

    def of_rank(files: Any) -> dict[str, np.ndarray]:
        arrays = {}
        for row in files:
            arrays.update(
                {
                    name: array
                    for name, array in tensors_in(root / row.path).items()
                    if name in table
                }
            )
        return arrays

    return merged(
        (rank, of_rank(files), table) for rank, files in candidate(root, step, legacy).files.items()
    )


def of_network(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights and state of the optimizer: what mindformers saves and loads."""
    return {name: array for name, array in tensors.items() if name not in OF_TRAIN_STEP}


def merged(
    ranks: Iterable[tuple[int, Mapping[str, np.ndarray], Mapping[str, TensorRecord]]],
) -> dict[str, np.ndarray]:
    """Returns {name: global tensor} of the ranks' slices. Tensors outside the strategy are equal on
    all ranks; a number gets one dimension. AssertionError if replicas are not equal bit for bit, or
    a slice of a tensor is missing."""
    whole: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}
    for rank, arrays, rows in ranks:
        for name, array in arrays.items():
            record, array = rows.get(name), np.atleast_1d(array)
            cut = record is not None and record.layout is not None
            shape = record.global_shape if cut else array.shape
            region = held(record.layout, rank, shape) if cut else whole_region(shape)
            values = view(whole.setdefault(name, np.zeros(shape, array.dtype)), region)
            seen = view(known.setdefault(name, np.zeros(shape, bool)), region)
            assert values[seen].tobytes() == array[seen].tobytes(), (
                f"{name} of rank {rank} is not its replicas"
            )
            values[...], seen[...] = array, True
    assert [name for name in known if not known[name].all()] == []
    return whole


def not_equal(saved: Mapping[str, np.ndarray], loaded: Mapping[str, np.ndarray]) -> list[str]:
    """Names that are in only one of them, or not the same bit for bit."""

    def content(array: np.ndarray | None) -> Any:
        return None if array is None else (str(array.dtype), array.shape, array.tobytes())

    return [
        name
        for name in sorted({*saved, *loaded})
        if content(saved.get(name)) != content(loaded.get(name))
    ]
