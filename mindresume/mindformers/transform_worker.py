"""Runs the jobs of one process of the reference engine.

``python -m mindresume.mindformers.transform_worker JOB.json ...`` runs one job after the other. A
job: {"kind": "ranks", "folder" or "unified"; "source", "out": folders; "source_strategy",
"target_strategy": files or null; "format": of the files; "ranks": ranks of the target; "processes":
most processes; "redundant": whether every rank has all tensors of its layout}. It reads
``<source>/rank_<R>/weights.<format>`` and writes ``<out>/rank_<R>/weights<R>.<format>``, or
complete files into ``out``. ``reshard/mindspore_engine.py`` starts and watches it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from mindresume import runtime


def main(paths: list[str]) -> None:
    runtime.Thread(target=end_with_parent, daemon=True).start()
    from mindspore.parallel import transform_safetensors

    guard(transform_safetensors)
    for path in paths:
        with open(path, encoding="utf-8") as file:
            job = json.load(file)
        {"ranks": by_rank, "folder": by_folder, "unified": unified}[job["kind"]](job)


def end_with_parent() -> None:
    """Ends this process, and those that it started, when the parent ends for any reason. The parent
    holds the other end of the pipe and never writes; the kernel closes the pipe with the parent."""
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def guard(engine: Any) -> None:
    """Works around two defects of MindSpore.

    It passes views to ``save_file``, and safetensors 0.8.0 ignores their strides;
    ``ascontiguousarray`` is not used, because it would give arrays without dimensions one. And
    ``unified_safetensors`` sleeps after each part as long as more than half of the machine's memory
    is in use, by any process.
    """
    engine.save_file = partial(_save_contiguous, engine.save_file)
    engine.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(percent=0.0))


def _save_contiguous(save: Any, tensors: dict[str, Any], *args: Any, **options: Any) -> Any:
    return save(
        {name: np.asarray(array, order="C") for name, array in tensors.items()}, *args, **options
    )


def by_rank(job: dict[str, Any]) -> None:
    """Transforms rank by rank, ckpt only: ``transform_safetensors_by_rank`` of MindSpore 2.9.0
    always raises AttributeError."""
    import mindspore

    strategies = job["source_strategy"], job["target_strategy"]
    for rank in job["ranks"]:
        needed = mindspore.rank_list_for_transform(rank, *strategies)
        files = {
            number: os.path.join(job["source"], f"rank_{number}", f"weights.{job['format']}")
            for number in needed
        }
        folder = os.path.join(job["out"], f"rank_{rank}")
        os.makedirs(folder, mode=0o700)
        mindspore.transform_checkpoint_by_rank(
            rank, files, os.path.join(folder, f"weights{rank}.{job['format']}"), *strategies
        )


def by_folder(job: dict[str, Any]) -> None:
    """Transforms all ranks at once. ``process_num`` is 1: with more, a file that a process fails to
    write is silently missing."""
    import mindspore

    mindspore.transform_checkpoints(
        job["source"],
        job["out"],
        "weights",
        job["source_strategy"],
        job["target_strategy"],
        process_num=1,
        output_format=job["format"],
    )


def unified(job: dict[str, Any]) -> None:
    """Merges the files of all ranks into complete files."""
    from mindspore.parallel import unified_safetensors

    unified_safetensors(
        job["source"],
        job["source_strategy"],
        job["out"],
        merge_with_redundancy=job["redundant"],
        max_process_num=job["processes"],
    )


if __name__ == "__main__":
    main(sys.argv[1:])
