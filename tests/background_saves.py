"""Saves in the background whose weights wait for a file: what the scripts of
test_async_saver_end.py import."""

import os
import time

import rank_folders

from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.retention import KEEP_ALL
from mindresume.saving.shard_writer import Save, SaveTarget, iteration_shard, rank_shard
from mindresume.storage.posix import PosixStorage


class Held(PosixStorage):
    """Weights are written as soon as there is a file "go"."""

    def write(self, path, pieces, size=0):
        while size and not os.path.exists("go"):
            time.sleep(0.005)
        return super().write(path, pieces, size)


def saver_of(kind, version):
    """Returns the saver of a training in this folder."""
    return AsyncSaver(
        SaveTarget(Held(), os.path.abspath("checkpoint"), rank_folders.RUN, 0, 1, version == "2.0"),
        KEEP_ALL,
        kind,
    )


def save_of(target, step):
    if target.iterations:
        return Save(
            iteration_shard(
                "net", target, rank_folders.state_of(step), rank_folders.tensors_of(0, step), None
            )
        )
    return Save(
        rank_shard(
            rank_folders.name_of(0, step),
            rank_folders.state_of(step),
            rank_folders.tensors_of(0, step),
        )
    )


def writer_of(saver):
    """Returns the number of its process."""
    return saver._writer._process.pid
