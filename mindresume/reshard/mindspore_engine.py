"""Converts with the reference engine: MindSpore's own transform, in separate processes, into a work
folder.

    rewritten = rewrite(weights, strategy, work)                # strategy None: whole tensors
    # into the final files; checks names, shapes and dtypes again
    direct_engine.transform(rewritten, storage, targets)

MindSpore may return normally after a wrong result. So inputs that it would convert wrongly are
refused before, and every output file is checked afterwards. ckpt: ``rank_list_for_transform`` and
``transform_checkpoint_by_rank``, the ranks of the target spread over the workers; safetensors:
``transform_checkpoints``, or ``unified_safetensors`` for whole tensors, in one worker. A worker is
a process of ``mindresume.mindformers.transform_worker``; this process does not import mindspore.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mindresume import runtime
from mindresume.errors import CorruptFileError, EngineError, StrategyError
from mindresume.events import Emit, Notice, ignore
from mindresume.formats.strategy import Strategy, encode_strategy
from mindresume.formatting import counted
from mindresume.model.layout import Region, TensorLayout, shape_of
from mindresume.reshard.checkpoint_view import CheckpointView, Tensor
from mindresume.reshard.conversion_plan import METADATA, TargetFile, fitted, holdings, whole_tensors
from mindresume.reshard.direct_engine import transform
from mindresume.reshard.strategy_store import strategy_of
from mindresume.storage import parallel
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import Header, format_of, read_header, read_tensor

COMMAND = (sys.executable, "-m", "mindresume.mindformers.transform_worker")
PAUSE = 0.05  # seconds between two polls of the processes
LAST_LINES = 6  # lines of a process's output in an error
LAST_BYTES = 1 << 16  # end of the output in which they are searched
UNMERGED = "accu_grads"  # prefix of the tensors that unified_safetensors does not merge


def rewrite(
    weights: CheckpointView,
    target: Strategy | None,
    work: str,
    *,
    workers: int = 1,
    timeout: float = 7200.0,
    emit: Emit = ignore,
    command: Sequence[str] = COMMAND,
) -> CheckpointView:
    """Writes ``weights`` in the layouts of ``target`` into files below ``work``. Returns a view of
    them.

    Args:
        target: strategy of the result; None: whole tensors.
        work: an empty folder of the caller, who removes it.
        workers: number of processes.
        timeout: seconds for all processes together; as long as mindformers waits for it.
        emit: receives notices of the progress.
        command: command of a worker, without its jobs.
    Raises:
        EngineError: MindSpore cannot convert this, fails, exceeds ``timeout``, or writes a wrong
            result.
        StrategyError: target and weights do not fit.
        CorruptFileError, OSError. No process is left after an error.
    """
    task = prepare(weights, target, work, workers)
    if task is None:
        emit(
            Notice(f"{weights.name} holds whole tensors already: MindSpore has nothing to convert")
        )
        return weights
    emit(
        Notice(
            f"MindSpore converts {weights.name}: {counted(len(task.held), 'file')} of ranks, "
            f"processes: {len(task.jobs)}, below {work}"
        )
    )
    run([[job] for job in task.jobs], task.work, timeout, command)
    return collect(task)


# ---- prepare -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A prepared conversion. ``held``: {tensor: region} for each rank of the target; ``jobs``: job
    files, one a worker; ``unified``: MindSpore merges whole tensors from safetensors."""

    weights: CheckpointView
    target: Strategy | None
    work: str
    format: str
    held: Sequence[Mapping[str, Region]]
    jobs: tuple[str, ...]
    unified: bool


def prepare(
    weights: CheckpointView, target: Strategy | None, work: str, workers: int = 1
) -> Task | None:
    """Prepares the work folder up to the start of the workers. Returns None if neither source nor
    target is cut. Raises the errors of ``rewrite``."""
    work = os.path.abspath(work)
    sizes = [tensor.layout.stage_size for tensor in weights.tensors.values() if tensor.layout]
    # None: its tensors are whole
    source = strategy_of(weights, sizes[0], is_shared=False) if sizes else None
    target = fitted(target, weights)
    held = holdings(weights, target)
    if source is None and target is None:
        return None
    _check_strategies(weights, source, target)
    strategies = [
        _write_strategy(weights, strategy, os.path.join(work, f"{name}.ckpt"))
        for name, strategy in (("source", source), ("target", target))
    ]
    paths, redundant = _files(weights, source, work)
    formats = {format_of(path) for path in paths.values()}
    if len(formats) > 1:
        raise _refusal(
            weights,
            f"its files are of the formats {' and '.join(sorted(formats))}; MindSpore takes one",
        )
    (fmt,) = formats
    unified = (
        target is None
        and fmt == "safetensors"
        and not any(name.startswith(UNMERGED) for name in weights.tensors)
    )
    if not redundant and not unified:
        raise _refusal(
            weights,
            "copies were removed from its files as redundant (remove_redundancy); of such files "
            "MindSpore can only merge safetensors, and no accu_grads",
        )
    if not redundant:
        for name, layout in _layouts(weights, source):
            if _is_nested(layout):
                raise _refusal(
                    weights,
                    f"{name}: copies were removed as redundant, and where several axes cut one "
                    f"dimension MindSpore takes parts of other ranks for copies: {layout}",
                )
    kind = "unified" if unified else "ranks" if fmt == "ckpt" else "folder"
    if kind == "folder" and (shared := _shared(weights, source, target, paths)):
        raise _refusal(
            weights,
            f"{min(shared)} is held by several stages, and MindSpore changes the number of stages "
            "of safetensors for one of them only",
        )
    if fmt == "ckpt":
        parallel(weights.storage, partial(_check_nan, weights), list(paths.values()))
    links, out = os.path.join(work, "in"), os.path.join(work, "out")
    os.makedirs(out, mode=0o700)
    for rank, path in paths.items():
        folder = os.path.join(links, f"rank_{rank}")
        os.makedirs(folder, mode=0o700)
        os.symlink(os.path.abspath(path), os.path.join(folder, f"weights.{fmt}"))
    shares = max(min(workers, len(held)), 1) if kind == "ranks" else 1
    jobs = []
    for share in range(shares):
        job = {
            "kind": kind,
            "source": links,
            "out": out,
            "source_strategy": strategies[0],
            "target_strategy": strategies[1],
            "format": fmt,
            "ranks": list(range(len(held)))[share::shares],
            "processes": workers,
            "redundant": redundant,
        }
        jobs.append(os.path.join(work, f"job{share}.json"))
        Path(jobs[-1]).write_text(json.dumps(job), encoding="utf-8")
    return Task(weights, target, work, fmt, held, tuple(jobs), unified)


def _refusal(weights: CheckpointView, reason: str) -> EngineError:
    return EngineError(
        f"{weights.name} cannot be rewritten by MindSpore: {reason}. Use --engine direct, which can"
    )


def _check_strategies(
    weights: CheckpointView, source: Strategy | None, target: Strategy | None
) -> None:
    for name, tensor in weights.tensors.items():
        if source is not None and tensor.layout is None and not tensor.is_counter:
            raise _refusal(
                weights,
                f"no layout of {name} {tensor.shape} is known; MindSpore would copy it as it is",
            )
        if tensor.dtype == "str" or tensor.dtype.startswith("float8"):
            raise _refusal(
                weights,
                f"{name} is of dtype {tensor.dtype}, which MindSpore's transform cannot read",
            )
        if 0 in tensor.shape:
            raise _refusal(
                weights, f"{name} {tensor.shape} is empty, which MindSpore cannot reshape"
            )
    for strategy in (source, target):
        for name, layout in _layouts(weights, strategy):
            if _is_misread(layout):
                raise _refusal(
                    weights,
                    f"{name}: with this layout MindSpore puts the parts of other ranks into the "
                    f"files: {layout}",
                )
    if source is None or target is None:
        return
    sizes = source.stage_size, target.stage_size
    if max(sizes) % min(sizes):
        raise _refusal(
            weights,
            f"its stages are of {sizes[0]} ranks, those of the target of {sizes[1]}; for MindSpore "
            "one number has to divide the other",
        )
    if sizes[0] > 1 and sizes[1] == 1 and len(target.stages) > 1:
        raise _refusal(
            weights,
            f"the target has {len(target.stages)} stages of one rank; from stages of {sizes[0]} "
            "ranks MindSpore looks for more ranks than there are",
        )


def _layouts(weights: CheckpointView, strategy: Strategy | None) -> list[tuple[str, TensorLayout]]:
    """Returns (tensor, layout) for the tensors of the checkpoint in all stages of a strategy."""
    return [
        row
        for stage in (strategy.stages if strategy else ())
        for row in stage.items()
        if row[0] in weights.tensors
    ]


def _is_nested(layout: TensorLayout) -> bool:
    """Returns whether several axes cut one dimension."""
    return any(isinstance(cut, tuple) for cut in layout.tensor_map)


def _is_misread(layout: TensorLayout) -> bool:
    """Returns whether the optimizer shards over the major axis while the other axes cut the
    dimensions in another order than their own: MindSpore takes the order of the dimensions
    (``mindspore/parallel/_tensor.py``, _construct_tensor_layout_for_opt_shard)."""
    axes = len(layout.device_matrix)
    used = [
        cut
        for cut in layout.tensor_map
        if isinstance(cut, int) and cut >= 0 and layout.device_matrix[axes - 1 - cut] > 1
    ]
    return (
        layout.optimizer_slices > 1
        and not _is_nested(layout)
        and layout.unused_axes == (axes - 1,)
        and used != sorted(used, reverse=True)
    )


def _write_strategy(weights: CheckpointView, strategy: Strategy | None, path: str) -> str | None:
    if strategy is None:
        return None
    try:
        content = encode_strategy(dict(enumerate(strategy.stages)))
    except StrategyError as error:
        raise _refusal(weights, str(error)) from error
    Path(path).write_bytes(content)
    return path


def _files(
    weights: CheckpointView, source: Strategy | None, work: str
) -> tuple[dict[int, str], bool]:
    """Returns {rank: path}, and whether every file holds all tensors of its rank (no redundancy was
    removed). EngineError if a file holds a tensor that MindSpore would misread."""
    if source is None:
        places = set(weights.files.get(0, ())) or {
            path for copies in weights.places.values() for path in copies.values()
        }
        if (
            len(places) == 1
            and (header := weights.header(path := places.pop()))
            and set(header.tensors) == set(weights.tensors)
        ):
            return {0: path}, True
        # MindSpore would take only the last of several files
        merged = os.path.join(work, "merged.safetensors")
        transform(
            weights,
            PosixStorage(),
            [TargetFile(merged, "safetensors", whole_tensors(weights.tensors), METADATA)],
        )
        return {0: merged}, True
    if any(len(weights.files.get(rank, ())) > 1 for rank in range(source.world_size)):
        raise _refusal(
            weights, "a rank of it has several files (Checkpoint 2.0), and MindSpore takes one"
        )
    paths = {rank: next(iter(weights.files.get(rank, ())), "") for rank in range(source.world_size)}
    headers = dict(
        zip(paths, parallel(weights.storage, weights.header, paths.values()), strict=True)
    )
    if lost := [rank for rank, header in headers.items() if header is None]:
        raise _refusal(
            weights, f"rank {lost[0]} has no file; MindSpore takes no copies of other ranks"
        )
    counters = {name for name, tensor in weights.tensors.items() if tensor.layout is None}
    if missing := counters - set(headers[0].tensors):
        raise _refusal(weights, f"rank 0 does not hold {min(missing)}, which no strategy names")
    for rank, header in headers.items():
        for name, entry in header.tensors.items():
            tensor = weights.tensors.get(name)
            shape = (
                None
                if tensor is None
                else tensor.layout.local_shape(tensor.shape)
                if tensor.layout
                else tensor.shape
            )
            if tensor is None or (entry.dtype, entry.shape) != (tensor.dtype, shape):
                expected = f"{tensor.dtype} {shape}" if tensor else "nothing of that name"
                raise _refusal(
                    weights,
                    f"the file of rank {rank} holds {name} as {entry.dtype} {entry.shape}, "
                    f"expected {expected}, and MindSpore reads all of it",
                )
    return paths, all(
        source.of_rank(rank).keys() <= header.tensors.keys() for rank, header in headers.items()
    )


def _shared(
    weights: CheckpointView,
    source: Strategy | None,
    target: Strategy | None,
    paths: Mapping[int, str],
) -> set[str]:
    """Returns the parameters of more than one stage, such as an embedding that is also the head, if
    the number of stages changes."""
    stages, others = (strategy.stages if strategy else () for strategy in (target, source))
    if max(len(stages), 1) == max(len(others), 1):
        return set()
    shared = {
        name
        for number, stage in enumerate(stages)
        for name in stage
        if number != target.stage_of(name)
    }
    for rank, path in paths.items() if source else ():
        held = weights.header(path).tensors
        shared |= {
            name
            for name in held
            if weights.tensors[name].layout and name not in source.of_rank(rank)
        }
    return shared & set(weights.tensors)


def _check_nan(weights: CheckpointView, path: str) -> None:
    """Raises EngineError for a NaN that MindSpore would change: it reads bfloat16 of a ckpt as
    float32, and writes every NaN as 0x7fc0."""
    header = weights.header(path)
    with weights.storage.open(path) as file:
        for name, entry in header.tensors.items():
            if entry.dtype == "bfloat16":
                bits = read_tensor(file, entry).view(np.uint16)
                if np.any((bits & 0x7FFF > 0x7F80) & (bits != 0x7FC0)):
                    raise _refusal(
                        weights,
                        f"{name} in {path} holds NaN of bfloat16, and MindSpore loses their sign "
                        "and payload if the format is ckpt",
                    )


# ---- collect -------------------------------------------------------------------------------------


def collect(task: Task) -> CheckpointView:
    """Returns a view of the files that MindSpore wrote. EngineError, with rank and parameter, if
    they are not as the target needs them."""
    out = os.path.join(task.work, "out")
    storage = PosixStorage()
    source = task.weights.tensors
    paths = {
        rank: [os.path.join(out, f"rank_{rank}", f"weights{rank}.{task.format}")]
        for rank in range(len(task.held))
    }
    if task.unified:
        paths = {
            0: [
                os.path.join(out, file)
                for file in sorted(os.listdir(out))
                if file.endswith(".safetensors")
            ]
        }
    headers = {
        path: header
        for of_rank in parallel(storage, partial(_checked, task), paths.items())
        for path, header in of_rank.items()
    }
    title = f"{task.weights.name}, rewritten by MindSpore"
    if task.target is None:
        places = {name: {0: path} for path, header in headers.items() for name in header.tensors}
        uncut = {name: Tensor(name, tensor.dtype, tensor.shape) for name, tensor in source.items()}
        return CheckpointView(storage, title, uncut, places=places, headers=dict(headers))
    tensors = {}
    for name, tensor in source.items():
        stage = task.target.stage_of(name)
        layout = None if stage is None else task.target.stages[stage][name]
        tensors[name] = Tensor(
            name, tensor.dtype, tensor.shape, layout, (stage or 0) * task.target.stage_size
        )
    return CheckpointView(
        storage,
        title,
        tensors,
        {rank: tuple(of_rank) for rank, of_rank in paths.items()},
        world_size=len(paths),
        headers=dict(headers),
    )


def _checked(task: Task, files: tuple[int, Sequence[str]]) -> dict[str, Header]:
    """Returns the headers of the files of a rank (rank, paths). Raises EngineError if its tensors
    differ from those of the target. Counters are required on rank 0 only."""
    rank, paths = files
    headers: dict[str, Header] = {}
    for path in paths:
        try:
            with open(path, "rb") as file:
                headers[path] = read_header(file, path)
        except FileNotFoundError as error:
            raise failure(
                f"it ended normally, but wrote no file for rank {rank} ({path})", task.work
            ) from error
        except CorruptFileError as error:
            raise failure(
                f"it ended normally, but the file of rank {rank} is damaged: {error}", task.work
            ) from error
    found = {
        name: (entry.dtype, entry.shape)
        for header in headers.values()
        for name, entry in header.tensors.items()
    }
    tensors = task.weights.tensors
    expected = {
        name: (tensors[name].dtype, shape_of(region)) for name, region in task.held[rank].items()
    }
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name) and not (
            name not in found and rank and tensors[name].is_counter
        ):
            there, wanted = (
                " ".join(map(str, side[name])) if name in side else "nothing"
                for side in (found, expected)
            )
            raise failure(
                f"it ended normally, but wrote for rank {rank} of parameter {name} {there}, "
                f"expected {wanted}",
                task.work,
            )
    return headers


# ---- processes -----------------------------------------------------------------------------------


def run(
    jobs: Sequence[Sequence[str]], work: str, timeout: float, command: Sequence[str] = COMMAND
) -> None:
    """Starts one process for each list of jobs and waits for all. Their output goes to log files in
    ``work``. EngineError if one fails, or after ``timeout`` seconds. When this returns or raises,
    no process and no descendant of one is left."""
    path = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, filter(None, sys.path))]
    )
    environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": path}
    deadline = runtime.monotonic() + timeout
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number, files in enumerate(jobs):
            # MindSpore leaves folders in its working directory
            with open(_log(work, number), "wb") as out:
                running[number] = subprocess.Popen(
                    [*command, *files],
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    env=environment,
                    cwd=work,
                    start_new_session=True,
                )
        while running:
            for number, process in list(running.items()):
                if (
                    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    is not None
                ):
                    _end(running.pop(number))
                    _check_status(process.returncode, number, len(jobs), work)
            if running and runtime.monotonic() > deadline:
                late = next(iter(running))
                raise failure(
                    f"process {late + 1} of {len(jobs)} was not done after {timeout:.0f} s and was "
                    "ended",
                    work,
                    late,
                )
            if running:
                runtime.sleep(PAUSE)
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its process group. It was not reaped, so its number cannot belong to
    another process."""
    os.killpg(process.pid, signal.SIGKILL)
    process.stdin.close()
    process.wait()


def _check_status(status: int, number: int, count: int, work: str) -> None:
    """Raises EngineError unless a process ended with status 0."""
    if not status:
        return
    how = f"ended with status {status}"
    if status < 0:
        how = f"was killed by {signal.Signals(-status).name}" + (
            " (out of memory?)" if status == -signal.SIGKILL else ""
        )
    raise failure(f"process {number + 1} of {count} {how}", work, number)


def failure(what: str, work: str, number: int = 0) -> EngineError:
    """Returns an error with the last lines of output of process ``number``."""
    try:
        with open(_log(work, number), "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            said = file.read(LAST_BYTES).decode(errors="replace")
    except FileNotFoundError:
        said = ""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()][-LAST_LINES:]
    return EngineError(
        f"MindSpore's transform failed: {what}. Use --engine direct, which does without it. Its "
        "last lines:\n" + ("\n".join(f"  {line[-400:]}" for line in lines) or "  none")
    )


def _log(work: str, number: int) -> str:
    return os.path.join(work, f"worker{number}.log")
