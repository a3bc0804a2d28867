"""Implements ``mindresume.coordination.collectives.Group`` for the running job, on the
communication that mindformers initialised."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import numpy as np

from mindresume.coordination.collectives import Group, SingleProcess
from mindresume.errors import ConfigError


def group_of_job() -> Group:
    """Returns the group of the job; SingleProcess without communication."""
    from mindspore.communication import GlobalComm, get_group_size, get_rank

    if not GlobalComm.INITED or get_group_size() == 1:
        return SingleProcess()
    return MindSporeGroup(get_rank(), get_group_size())


def check_launch(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if msrun started several processes that do not communicate: each would
    take itself for rank 0, save into the folder of the others, and resume from what one of them
    saved last. mindformers alone lets them overwrite each other's files."""
    from mindspore.communication import GlobalComm

    workers = environment.get("MS_WORKER_NUM", "1")
    if (
        environment.get("MS_ROLE") in ("MS_WORKER", "MS_SCHED")
        and workers != "1"
        and not GlobalComm.INITED
    ):
        raise ConfigError(
            f"msrun started {workers} processes, but they do not communicate: use_parallel is "
            "False, or the communication was not initialised. All of them would save into one "
            "folder as rank 0. Set use_parallel: True, or start one process (without msrun, or "
            "with --worker_num 1)"
        )


# seconds between two questions of a rank to the scheduler, of which MindSpore draws one each time
_INTERVALS = ("MS_RETRY_INTERVAL_LOWER", "MS_RETRY_INTERVAL_UPPER")
_SMALL_CLUSTER = 256  # ranks; MindSpore's own limit (kClusterScaleBound)


def join_sooner(environment: MutableMapping[str, str]) -> None:
    """Makes a rank ask the scheduler every second whether all ranks have come, by default every 3
    to 5 s. To be called before the communication is initialised; what the user has set stays.

    The heartbeats of the job keep that interval: one costs the scheduler 17 microseconds, and 256
    ranks send as many as 1,024 do by default. With more ranks nothing is set: MindSpore then counts
    tries of other waits with the same interval, which would have a third of their time limit.
    """
    workers = environment.get("MS_WORKER_NUM", "")
    if (
        workers.isdigit()
        and int(workers) <= _SMALL_CLUSTER
        and not any(name in environment for name in _INTERVALS)
    ):
        environment.update(dict.fromkeys(_INTERVALS, "1"))


class MindSporeGroup:
    """Sends bytes through ``Broadcast`` and ``AllGather`` of int32, the type that the library of
    every back end supports.

    If a rank is lost, these calls end at the time limit of the back end's collectives, as any step
    of the training does.
    """

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size

    def broadcast(self, message: bytes) -> bytes:
        length = int(self._broadcast(np.array([len(message)], np.int32))[0])
        payload = message if self.rank == 0 else b""
        return _bytes(self._broadcast(_words(payload, length)), length)

    def gather(self, message: bytes) -> list[bytes]:
        lengths = self._gather(np.array([len(message)], np.int32)).tolist()
        longest = max(lengths)
        if not longest:
            return [b""] * self.size
        rows = self._gather(_words(message, longest)).reshape(self.size, -1)
        return [_bytes(row, length) for row, length in zip(rows, lengths, strict=True)]

    @staticmethod
    def _broadcast(array: np.ndarray) -> np.ndarray:
        from mindspore import Tensor, ops

        return ops.Broadcast(0)((Tensor(array),))[0].asnumpy()

    @staticmethod
    def _gather(array: np.ndarray) -> np.ndarray:
        from mindspore import Tensor, ops

        return ops.AllGather()(Tensor(array)).asnumpy()


def _words(message: bytes, length: int) -> np.ndarray:
    """Returns ``message``, padded with zeros to ``length`` bytes, as whole int32 words, at least
    one."""
    padded = message.ljust(max(4, (length + 3) // 4 * 4), b"\0")
    return np.frombuffer(padded, np.int32).copy()


def _bytes(words: np.ndarray, length: int) -> bytes:
    """Returns the first ``length`` bytes of ``words``."""
    return np.ascontiguousarray(words).tobytes()[:length]


class TensorBroadcaster:
    """Implements ``reshard.region_load.Broadcast`` on communication groups of the job, which are
    created at their first use. All ranks of a group make the same calls in the same order;
    ``close`` when all are done.

    Bits are sent as int32 through ``Broadcast``. On CPU, MindSpore's library cannot broadcast
    within a subset of the ranks, and adds only float32: there every 16 bits are sent as one whole
    number below 65,536 and added to zeros, which is exact.
    """

    def __init__(self) -> None:
        from mindspore import get_context

        self._groups: dict[tuple[int, ...], str] = {}
        self._on_cpu = get_context("device_target") == "CPU"

    def __call__(
        self, ranks: tuple[int, ...], owner: int, data: np.ndarray | None, count: int
    ) -> np.ndarray:
        from mindspore import Tensor, ops

        if self._on_cpu:
            words = (
                np.zeros(-(-count // 2), np.float32)
                if data is None
                else _filled(data, np.uint16).astype(np.float32)
            )
            found = (
                ops.AllReduce(ops.ReduceOp.SUM, self._group(ranks))(Tensor(words))
                .asnumpy()
                .astype(np.uint16)
            )
        else:
            words = np.zeros(-(-count // 4), np.int32) if data is None else _filled(data, np.int32)
            found = ops.Broadcast(owner, self._group(ranks))((Tensor(words),))[0].asnumpy()
        return np.ascontiguousarray(found).view(np.uint8)[:count]

    def _group(self, ranks: tuple[int, ...]) -> str:
        from mindspore.communication import GlobalComm, create_group, get_group_size

        if len(ranks) == get_group_size():
            return GlobalComm.WORLD_COMM_GROUP
        if ranks not in self._groups:
            self._groups[ranks] = "mindresume_" + "_".join(map(str, ranks))
            create_group(self._groups[ranks], list(ranks))
        return self._groups[ranks]

    def close(self) -> None:
        from mindspore.communication import destroy_group

        # on CPU the library logs an error instead
        for name in () if self._on_cpu else self._groups.values():
            destroy_group(name)
        self._groups.clear()


def _filled(data: np.ndarray, dtype: type) -> np.ndarray:
    """Returns bytes as words, padded with zeros."""
    width = np.dtype(dtype).itemsize
    return np.pad(data, (0, -len(data) % width)).view(dtype)
