"""What the tests with several processes share: what a job left behind, what all ranks said, copies of checkpoint folders."""
from __future__ import annotations

import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from mindresume.tensor_files import read_header
from st.jobs import Run, differences

CHOSEN = re.compile(r"mindresume: resume from step (\d+)")
COMMITTED = re.compile(r"mindresume: step (\d+) committed")
ALL_RANKS_END = 120.0                 # seconds until the loss of one rank has ended the whole job


@dataclass
class Life:
    """What is known of one life after its end. ``logs``: by rank. ``status``: of the launcher, as the shell sees it."""
    status: int
    logs: list[str]
    steps: list[dict]
    predicted: dict = field(default_factory=dict)         # `mindresume which --json` right before the start

    def chosen(self) -> list[int | None]:
        """The step that each rank said it resumes from, None for a fresh start."""
        found = [CHOSEN.findall(log) for log in self.logs]
        assert all(len(steps) <= 1 for steps in found), found
        return [int(steps[0]) if steps else None for steps in found]

    def committed(self) -> list[int]:
        """The steps that rank 0 said are committed."""
        return [int(step) for step in COMMITTED.findall(self.logs[0])]

    def trained(self) -> list[int]:
        return [row["step"] for row in self.steps]


def ended(run: Run, predicted: dict | None = None) -> Life:
    """The facts of the life that just ended. AssertionError if a process of the job is still there."""
    status = run.process.wait()
    assert_nothing_left(run)
    return Life(status, [run.log(rank) for rank in range(run.workers)], run.steps(-1), predicted or {})


def not_identical(whole: Run, life: Life) -> list[str]:
    """``differences``, without the steps that a killed life did not reach."""
    return [text for text in differences(whole.steps(), life.steps) if not text.endswith("is missing")]


def members_by_environment(run: Run) -> list[int]:
    """Processes started by ``run`` in any of its lives, also those whose parents are gone. Zombies have no environment."""
    mark, found = f"CPU_CLUSTER_STEPS={run.losses}".encode(), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            except OSError:                              # it has ended in the meantime, or belongs to somebody else
                continue
            if mark in environment:
                found.append(int(entry))
    return found


def assert_nothing_left(run: Run, seconds: float = 10.0) -> None:
    """A killed process is gone a moment after the signal; ``seconds`` later every process of the job must be."""
    deadline = time.monotonic() + seconds
    while (left := members_by_environment(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"still running after the job ended: {left}"


def copied(run: Run, folder: Path, config: str | None = None) -> Run:
    """A run in ``folder`` that finds the checkpoints of ``run`` as they are now, half-written files included."""
    shutil.copytree(run.checkpoints, folder / "output" / "checkpoint")
    return run.like(folder, config=config or run.config)


def flip_in_tensor(path: Path, name: str) -> None:
    """One bit in the middle of one tensor of a weight file."""
    with open(path, "rb") as file:
        entry = read_header(file, str(path)).tensors[name]
    start, count = entry.ranges[0]
    with open(path, "r+b") as file:
        file.seek(start + count // 2)
        byte = file.read(1)[0]
        file.seek(start + count // 2)
        file.write(bytes([byte ^ 1]))
