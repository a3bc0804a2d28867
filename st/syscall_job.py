"""The smallest thing that saves checkpoints as a training does: one rank, without a network, to be
watched by strace.

    syscall_job.py FOLDER FORMAT KIND WIDTH STEP ...

``KIND``: foreground, thread or process, as ``async_save`` chooses them. ``WIDTH``: how much the
storage does at once; 1 keeps all system calls of a saver in one thread, so that they can be
counted. Before every step but the first it waits for a line on stdin. Prints what became of each
step as a line of JSON: ``{"step", "saved", "error", "events"}``. Exit status 0, or 3 if a step was
not saved and a SaveError said so. Anything else that is raised ends it with a traceback and status
1.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mindresume.events import Event  # noqa: E402
from mindresume.fault_injection.scenarios import RUNS, shard  # noqa: E402
from mindresume.saving.async_saver import AsyncSaver  # noqa: E402
from mindresume.saving.committer import SyncSaver  # noqa: E402
from mindresume.saving.retention import KeepLast  # noqa: E402
from mindresume.saving.shard_writer import Save, SaveTarget, Shard  # noqa: E402  # noqa: E402
from mindresume.storage.posix import PosixStorage  # noqa: E402

REPORTED = 3  # exit status: a SaveError said what was not saved
_WAIT = 60.0  # seconds


def big_tensors(step: int) -> dict[str, np.ndarray]:
    """Three of 1.1 MiB each, so that a file is more than one ``write``. They depend on nothing but
    ``step``."""
    random = np.random.default_rng([7, step])
    return {
        f"layer{index}.weight": random.standard_normal((275, 1024), np.float32)
        for index in range(3)
    }


def shard_of(target: SaveTarget, step: int, fmt: str) -> Shard:
    small = shard(target, step, fmt)
    (file,) = small.files
    return replace(small, files=(replace(file, tensors={**file.tensors, **big_tensors(step)}),))


def saver_of(target: SaveTarget, kind: str, events: list[Event]) -> AsyncSaver | SyncSaver:
    if kind != "foreground":
        return AsyncSaver(target, KeepLast(1), kind, emit=events.append)
    work = SyncSaver(target, KeepLast(1), events.append)
    work.begin()
    return work


def run(root: str, fmt: str, kind: str, width: int, steps: list[int]) -> int:
    storage, events = PosixStorage(), []
    storage.width = width
    target = SaveTarget(storage, root, RUNS[0], 0, 1)
    saver, status = saver_of(target, kind, events), 0
    for step in steps:
        if step != steps[0]:
            sys.stdin.readline()
        saver.save(Save(shard_of(target, step, fmt)))
        outcomes = saver.wait(_WAIT)
        if step == steps[-1]:
            outcomes += saver.finish(1.0)
        for outcome in outcomes:
            error = str(outcome.error) if outcome.error else None
            print(
                json.dumps(
                    {
                        "step": outcome.step,
                        "saved": outcome.saved,
                        "error": error,
                        "events": [event.to_json() for event in events],
                    }
                ),
                flush=True,
            )
            status = status if outcome.saved else REPORTED
    return status


if __name__ == "__main__":
    folder, file_format, saver_kind, at_once, *numbers = sys.argv[1:]
    sys.exit(run(folder, file_format, saver_kind, int(at_once), list(map(int, numbers))))
