"""One of the four ranks of the saving part of ``iterations.py``, in a real MindSpore process group
on CPU.

    python _iterations_save.py FOLDER MIB ROUNDS            # by st/cpu_cluster/launch.py

Writes FOLDER/rank_R.jsonl, one line for each candidate and round: {"round", "what", "held": seconds
the training thread was held, "call": of these by the call that saves, "begun", "committed": time of
the tracker, "ended": flushed as well, "phases", "load", "barrier"; in round 0 "written": bytes of
the own files}.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import _iterations_job as job
import _measure as measure
import numpy as np
from save import flush, write_plain

from mindresume.formats.iterations import TRACKER, iteration_name, parse_weight_file
from mindresume.mindformers import network_state as live
from mindresume.model.training_state import TrainingState, is_transient
from mindresume.saving.async_saver import AsyncSaver
from mindresume.saving.committer import SyncSaver
from mindresume.saving.retention import KeepLast
from mindresume.saving.shard_writer import Save, SaveTarget, Shard, iteration_shard
from mindresume.storage.posix import PosixStorage

RANKS = 4
DATA = 2
TENSOR = 2
PAUSE = 0.01  # seconds of a step of the training in which its thread only waits
PATIENCE = 600.0
PHASES = {
    "barrier_world": "barriers",
    "ms_save_checkpoint": "files",
    "get_total_params_file_mapping_info": "metadata.json, described",
    "save_metadata": "metadata.json, written",
}


@dataclass(frozen=True)
class Way:
    """One candidate. ``who``: "built-in" or "ours"."""

    who: str
    asynchronous: bool
    once: bool

    @property
    def name(self) -> str:
        return (
            f"{self.who}, "
            f"{'async_save' if self.asynchronous else 'synchronous'}{', remove_redundancy' if self.once else ''}"  # noqa: E501
        )


WAYS = [
    Way(who, asynchronous, once)
    for once in (False, True)
    for asynchronous in (False, True)
    for who in ("built-in", "ours")
]


class Rank:
    def __init__(self, folder: str, mib: int):
        from mindformers.checkpoint import checkpoint
        from mindspore.communication import comm_func, get_rank

        self.checkpoint = checkpoint
        self.barrier = comm_func.barrier
        self.all_reduce = comm_func.all_reduce
        self.folder = folder
        self.rank = get_rank()
        self.step = 0
        self.tensors = job.model(mib, DATA, TENSOR)
        spec = job.spec_of(self.tensors)
        self.strategies = job.Strategies(spec, RANKS)
        self.network, self.optimizer = job.cells_of(spec, self.tensors, self.rank, values=True)
        self.model = set(self.network.parameters_dict())
        self.share: frozenset[str] | None = None
        self.held = job.held(self.tensors)
        self.savers = {way: self.saver(way) for way in WAYS if way.who == "ours"}
        self.managers = {
            way: checkpoint.AsyncSaveManager(True)
            for way in WAYS
            if way.who != "ours" and way.asynchronous
        }
        self.phases: dict[str, float] = {}

    def root(self, way: Way) -> str:
        return os.path.join(self.folder, way.name.replace(", ", "-"))

    # ---- ours, as the monitor does it ------------------------------------------------------------

    def target(self, way: Way) -> SaveTarget:
        return SaveTarget(
            PosixStorage(), self.root(way), "0001-00000000", self.rank, RANKS, iterations=True
        )

    def saver(self, way: Way) -> AsyncSaver | SyncSaver:
        target, policy = self.target(way), KeepLast(5) if self.rank == 0 else None
        os.makedirs(target.root, exist_ok=True)
        if way.asynchronous:
            return AsyncSaver(target, policy, "thread", emit=self.log)
        return SyncSaver(target, policy, self.log)

    def shard(self, way: Way) -> Shard:
        from mindresume.mindformers import adapter

        rows = adapter.parameters_to_save(
            self.optimizer, False, lambda name: not is_transient(name)
        )
        tensors: dict[str, Any] = live.deferred(rows)
        shapes = {name: tuple(array.shape) for name, array in tensors.items()}
        tables = live.strategy_layouts(self.strategies.of_rank[self.rank], shapes, self.log)
        if way.once:
            if self.share is None:
                self.share = live.own_share(tensors, tables, self.rank)
            tensors = {
                name: array
                for name, array in tensors.items()
                if name not in tables or name in self.share
            }
        parts = [
            {name: array for name, array in tensors.items() if (name in self.model) is wanted}
            for wanted in (True, False)
        ]
        return iteration_shard(
            job.PREFIX,
            self.target(way),
            TrainingState(self.step, 1_000_000, self.step),
            *parts,
            tables,
            live.capture_random(),
            way.once,
        )

    def poll(self, way: Way) -> None:
        for outcome in self.savers[way].poll():
            if not outcome.saved or outcome.error is not None:
                raise SystemExit(f"{way.name}: {outcome.error}")

    @staticmethod
    def log(text: str) -> None:
        print(text, flush=True)

    # ---- the built-in, as its callback does it ---------------------------------------------------

    def built_in(self, way: Way) -> None:
        from mindformers.checkpoint import sharded_tensor

        metas = self.timed(
            "layouts of all ranks", sharded_tensor.get_all_sharded_tensor, self.optimizer, None
        )
        self.checkpoint.save_checkpoint(
            iteration=self.step,
            network=self.network,
            optimizer=self.optimizer,
            async_save_manager=self.managers.get(way),
            common_info=self.checkpoint.CommonInfo(1, self.step, self.step, None, 8),
            keep_max_num=5,
            user_prefix=job.PREFIX,
            save_checkpoint_path=self.root(way),
            sharded_tensor_metas=metas,
            remove_redundancy=way.once,
        )

    def timed(self, phase: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*given, **options)
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - started

    def watched(self) -> ExitStack:
        """The parts of the built-in's save are timed."""
        from mindformers.checkpoint import fully_parallel
        from mindspore.train import serialization

        patches = ExitStack()
        for name, phase in PHASES.items():
            patches.enter_context(
                mock.patch.object(
                    self.checkpoint,
                    name,
                    partial(self.timed, phase, getattr(self.checkpoint, name)),
                )
            )
        patches.enter_context(
            mock.patch.object(
                fully_parallel,
                "save_checkpoint",
                partial(self.timed, "files", fully_parallel.save_checkpoint),
            )
        )
        patches.enter_context(
            mock.patch.object(
                serialization,
                "_ckpt_mutex",
                TimedLock(
                    serialization._ckpt_mutex, partial(self.timed, "files, waiting for the writer")
                ),
            )
        )
        patches.enter_context(
            mock.patch.object(
                serialization,
                "copy",
                SimpleNamespace(
                    copy=copy.copy, deepcopy=partial(self.timed, "files, copied", copy.deepcopy)
                ),
            )
        )
        for name, phase in (
            ("apply_saving_parallelization", "who saves what"),
            ("_save_metadata", "metadata.json, made and written"),
        ):
            original = getattr(fully_parallel.BalancedSaveStrategy, name)
            patches.enter_context(
                mock.patch.object(
                    fully_parallel.BalancedSaveStrategy,
                    name,
                    lambda this, *rest, original=original, phase=phase: self.timed(
                        phase, original, this, *rest
                    ),
                )
            )
        return patches

    # ---- one save --------------------------------------------------------------------------------

    def settle(self) -> None:
        self.barrier()
        if self.rank == 0:
            os.sync()
        self.barrier()
        measure.warm_memory(2 * self.held)  # the files' pages, and a copy
        self.barrier()

    def measure(self, way: Way) -> dict[str, Any]:
        self.step += 1
        self.phases = {}
        ours, manager = way.who == "ours", self.managers.get(way)
        self.settle()
        begun, started = time.time(), time.perf_counter()
        if ours:
            self.savers[way].save(Save(self.shard(way)))
        else:
            self.built_in(way)
        call = held = time.perf_counter() - started
        done = False
        while not done:
            time.sleep(PAUSE)
            # a step brings the ranks together
            done = self.is_true_on_any_rank(self.rank == 0 and self.tracked(way))
            started = time.perf_counter()
            if ours:
                self.poll(way)
            elif manager is not None:
                manager.maybe_finalize(wait_finish=False)
            held += time.perf_counter() - started
        committed = os.stat(os.path.join(self.root(way), TRACKER)).st_mtime
        for path in self.own_files(way) if not ours else ():
            flush(path)
        return {
            "what": way.name,
            "held": held,
            "call": call,
            "begun": begun,
            "committed": committed,
            "ended": committed if ours else time.time(),
            "phases": self.phases,
        }

    def tracked(self, way: Way) -> bool:
        try:
            with open(os.path.join(self.root(way), TRACKER)) as file:
                return file.read() == str(self.step)
        except FileNotFoundError:
            return False

    def is_true_on_any_rank(self, value: bool) -> bool:
        from mindspore import Tensor

        return float(self.all_reduce(Tensor([float(value)]))[0].asnumpy()[0]) > 0

    def own_files(self, way: Way) -> list[str]:
        folder = os.path.join(self.root(way), iteration_name(self.step))
        files = {name: parse_weight_file(name) for name in os.listdir(folder)}
        return [
            os.path.join(folder, name)
            for name, parsed in files.items()
            if parsed and parsed.index == self.rank
        ]

    def check(self, way: Way) -> int:
        """Bytes of the own files, whose tensors are compared with the parameters."""
        from safetensors.numpy import load_file

        parameters = self.optimizer.parameters_dict()
        total = 0
        names = set()
        for path in self.own_files(way):
            for name, array in load_file(path).items():
                if not np.array_equal(array, parameters[name].asnumpy()):
                    raise SystemExit(f"{path}: {name} is wrong")
                names.add(name)
                total += array.nbytes
        if not way.once and names != set(parameters):
            raise SystemExit(f"{way.name}: {len(set(parameters) - names)} tensors are missing")
        return total

    def plain(self, once: bool) -> dict[str, Any]:
        """The same bytes with plain writes and a flush. ``once``: of two replicas each writes one
        half."""
        arrays = {
            parameter.name: parameter.asnumpy() for parameter in self.optimizer.get_parameters()
        }
        if once:
            arrays = dict(list(arrays.items())[self.rank // TENSOR :: DATA])
        path = os.path.join(self.folder, f"plain-{self.rank}")
        self.settle()
        begun, started = time.time(), time.perf_counter()
        write_plain(path, arrays)
        held, ended = time.perf_counter() - started, time.time()
        self.barrier()
        os.remove(path)
        return {
            "what": plain_name(once),
            "held": held,
            "call": held,
            "begun": begun,
            "committed": ended,
            "ended": ended,
            "phases": {},
            "written": sum(array.nbytes for array in arrays.values()),
        }

    def work(self, number: int, item: Any) -> dict[str, Any]:
        if not isinstance(item, Way):
            return self.plain(item)
        found = self.measure(item)
        if number == 0:
            found["written"] = self.check(item)
        self.barrier()
        if self.rank == 0:
            shutil.rmtree(os.path.join(self.root(item), iteration_name(self.step)))
            os.remove(os.path.join(self.root(item), TRACKER))
        return found

    def run(self, rounds: int) -> None:
        items = [False, True, *WAYS]
        with open(os.path.join(self.folder, f"rank_{self.rank}.jsonl"), "w") as out, self.watched():
            for number in range(rounds + 1):
                barrier = [self.barrier_seconds() for _ in range(5)]
                for item in measure.shuffled(items, number):
                    found = {
                        "round": number,
                        **self.work(number, item),
                        "load": os.getloadavg()[0],
                        "barrier": min(barrier),
                    }
                    out.write(json.dumps(found) + "\n")
                    out.flush()
        for saver in self.savers.values():
            saver.finish(PATIENCE)

    def barrier_seconds(self) -> float:
        started = time.perf_counter()
        self.barrier()
        return time.perf_counter() - started


class TimedLock:
    """``lock``, which MindSpore's writer holds as long as it writes a file. ``timed`` is given what
    the main thread waits."""

    def __init__(self, lock: Any, timed: Callable[..., Any]):
        self.lock, self.timed = lock, timed

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.timed(self.lock.acquire)
        else:
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def plain_name(once: bool) -> str:
    return "plain writes and fsync" + (", one copy of each" if once else "")


def main() -> None:
    folder, mib, rounds = sys.argv[1:]
    job.install_collectives()
    import mindspore as ms
    from mindspore.communication import init

    ms.set_device("CPU")
    init()
    rank = Rank(folder, int(mib))
    with rank.strategies.patched(rank.rank):
        rank.run(int(rounds))


if __name__ == "__main__":
    main()
