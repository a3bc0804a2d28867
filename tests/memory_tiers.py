"""Tiers in memory for the tests: a tmpfs folder that is removed again, and small trainings that
save into it."""

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from rank_folders import RUN, STORAGE, dir_at, state_of, tensors_of

from mindresume.formats.rank_folders import FileName
from mindresume.formats.records import scan_records
from mindresume.saving.memory_tier.directory import (
    OWNER,
    make_mark,
    make_tier,
    owner_of,
    read_mark,
    this_process,
    tier_path,
)
from mindresume.saving.shard_writer import Save, iteration_shard, rank_shard
from mindresume.storage import publish_json

MEMORY = "/dev/shm"


@pytest.fixture
def memory():
    """Returns a folder in memory."""
    if not os.access(MEMORY, os.W_OK):
        pytest.skip(f"{MEMORY} is not writable")
    path = tempfile.mkdtemp(prefix="mindresume-test-", dir=MEMORY)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def tier_of(root):
    """Returns the folder of the tier of a checkpoint directory."""
    return tier_path(read_mark(dir_at(root)))


class StepRequest:
    """The state of one rank after ``step``. ``bad``: collecting fails."""

    def __init__(self, target, step, fmt="safetensors", bad=False, collective=False):
        self.step, self.target, self.fmt, self.bad, self.collective, self.collected = (
            step,
            target,
            fmt,
            bad,
            collective,
            0,
        )

    def collect(self):
        self.collected += 1
        if self.bad:
            raise ValueError("cannot collect")
        state, tensors = (
            state_of(self.step),
            tensors_of(self.target.rank, self.step, self.target.world_size),
        )
        if self.target.iterations:
            model = {name: array for name, array in tensors.items() if not name.startswith("adam")}
            return Save(
                iteration_shard(
                    "net",
                    self.target,
                    state,
                    model,
                    {name: array for name, array in tensors.items() if name not in model},
                    random={"python": f"of rank {self.target.rank}"},
                )
            )
        name = FileName("net", self.target.rank, 0, state.epoch, state.step_in_epoch, self.fmt)
        return Save(
            rank_shard(name, state, tensors, random={"python": f"of rank {self.target.rank}"})
        )

    def needs_collectives(self):
        return self.collective


ALIVE = [this_process()]
DEAD = [[2**22 - 3, 1]]  # a process that cannot exist with this start


def make_owned_tier(memory, root, run=RUN, processes=None):
    """Makes the tier of a dead job that saved to ``root``, or of the one with ``processes``.
    Returns it."""
    os.makedirs(root, exist_ok=True)
    mark = make_mark(dir_at(root), memory, run, keep=True)
    tier = Path(tier_path(mark))
    make_tier(str(tier))
    owner = owner_of(dir_at(root), mark, run, DEAD if processes is None else processes)
    publish_json(STORAGE, str(tier / OWNER), asdict(owner), run)
    return tier


def newest_file(tier):
    """Returns the path of the first file of the newest save in a tier."""
    return Path(tier) / scan_records(dir_at(tier))[0][0].first.path


@pytest.fixture
def root(tmp_path):
    """Returns the checkpoint directory of a training with a tier; it does not exist yet."""
    return tmp_path / "checkpoint"


@pytest.fixture
def tier(memory, root):
    """Returns the tier of a dead job that saved to ``root``."""
    return make_owned_tier(memory, root)
