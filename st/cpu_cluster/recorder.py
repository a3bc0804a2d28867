"""Records every step exactly, and can kill the process at an exact step.

What: ``CPU_CLUSTER_STEPS=path`` appends one JSON line a step, flushed, so that it survives SIGKILL.
``{rank}`` in the path becomes the rank; without it only rank 0 records.

    {"step": 7, "loss": 4.85203, "hex": "409b43d4", "lr": 0.0002, "norm": 1.25,
     "batch": "5f3c...", "samples": ["9a0c...", ...],
     "epoch": 1, "epoch_step": 7, "draws": [0.61, 0.07, 42, 7], "time": 1760000000.1}

step        the optimizer's global_step after the step: counts on over a resume that restored it
hex         the bits of the float32 loss, for exact comparison
lr, norm    the learning rate and the norm of the gradients that the training cell returned, null
            if it returns none
samples     one id a row of this rank's batch: 12 hex digits of SHA-256 over the row in the first
            input column; the
            rows of ``st/data/make_data.py`` are distinct, so an id is a sample
batch       the same over the whole column, 16 digits
draws       what Python's, numpy's and MindSpore's generators gave at the beginning of the step, or
            of its sink
epoch, epoch_step    as the callbacks see them: in sink mode "epoch" is the sink, after a resume
                     epoch_step restarts In sink mode there is a line for each step within the sink
                     too; only the last one comes after the callbacks.

``CPU_CLUSTER_KILL=RANK@STEP`` (or ``all@STEP``): that rank (every rank, once each one has recorded
the step) sends itself SIGKILL at the end of step STEP, after all callbacks of the step, a
checkpoint save included; within a sink right after the step. With ``CPU_CLUSTER_KILLED=path`` only
once, for jobs that start again by themselves: ``path`` is made before the kill, and a process that
finds it kills nothing.

``CPU_CLUSTER_LOSE=0,3@STEP``: at the end of step STEP all ranks but 0 and 3 hang as if lost, and
these save what they have as MindIO TTP makes them, which does not exist here: mindformers'
``ckpt_save_func`` (trainer/base_trainer.py) is called with the arguments of mindspore's
``_save_checkpoint_on_failure``, on a CheckpointMonitor that is in no training. Then the job dies.

Why: a resumed run must equal the uninterrupted one bit by bit and sample by sample, and a log
rounds.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import time

import mindspore as ms
import numpy as np
from mindspore.common.generator import default_generator
from mindspore.train.callback import Callback


def global_step(cb: object) -> int:
    """The optimizer's own count of steps. ``cb``: the parameters that callbacks get."""
    optimizer = cb.optimizer if cb.optimizer is not None else cb.train_network.optimizer
    return int(optimizer.global_step.asnumpy().reshape(-1)[0])


def sample_ids(rows: np.ndarray) -> list[str]:
    """One id a row of ``rows`` [batch, ...]."""
    return [hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()[:12] for row in rows]


class StepRecorder(Callback):
    """Appends to ``path``."""

    def __init__(self, path: str):
        super().__init__()
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  open as long as the process trains
        self.draws = []

    def on_train_step_begin(self, run_context):
        seed, offset = default_generator._step(ms.Tensor(1, ms.int64))
        self.draws = [
            random.random(),
            float(np.random.random()),
            int(seed.asnumpy()),
            int(offset.asnumpy()),
        ]

    def step_end(self, run_context):
        cb = run_context.original_args()
        self.step_in_sink(cb, cb.net_outputs, cb.train_dataset_element, cb.cur_step_num)

    def step_in_sink(self, cb, outputs, batch, step):
        """``step``: steps since the process began to train."""
        outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        loss = np.float32(outputs[0].asnumpy().mean())
        rows = batch[0] if isinstance(batch, (tuple, list)) else batch
        # the data queue of a device keeps its batches
        rows = np.zeros((0,)) if rows is None else rows.asnumpy()
        line = {
            "step": global_step(cb),
            "loss": float(loss),
            "hex": loss.tobytes()[::-1].hex(),
            "lr": float(outputs[3].asnumpy()) if len(outputs) > 3 else None,
            "norm": float(outputs[4].asnumpy()) if len(outputs) > 4 else None,
            "batch": hashlib.sha256(rows.tobytes()).hexdigest()[:16],
            "samples": sample_ids(rows),
            "epoch": cb.cur_epoch_num,
            "epoch_step": (step - 1) % cb.batch_num + 1,
            "draws": self.draws,
            "time": round(time.time(), 3),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def wait_for_records(step: int) -> None:
    """Returns once each rank that records has recorded ``step``, or after a minute: who dies first
    takes the others with it."""
    path, size = os.environ.get("CPU_CLUSTER_STEPS", ""), int(os.environ.get("MS_WORKER_NUM", "1"))
    for record in {path.replace("{rank}", str(rank)) for rank in range(size if path else 0)}:
        for _ in range(1200):
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                open(record, encoding="utf-8") as file,
            ):
                if json.loads(file.readlines()[-1])["step"] >= step:
                    break
            time.sleep(0.05)


class KillSelf(Callback):
    """Ends this process as a crash would, at the end of the first step >= ``step``. ``note``: a
    file that it makes before. ``all_die``: each rank does the same."""

    def __init__(self, step: int, note: str = "", all_die: bool = False):
        super().__init__()
        self.step, self.note, self.all_die = step, note, all_die

    def step_end(self, run_context):
        self.step_in_sink(run_context.original_args())

    def step_in_sink(self, cb, *_):
        if global_step(cb) >= self.step:
            if self.all_die:
                wait_for_records(global_step(cb))
            if self.note:
                with open(self.note, "w", encoding="utf-8"):
                    pass
            os.kill(os.getpid(), signal.SIGKILL)


class LoseRanks(Callback):
    """``left``: the ranks that are not lost. ``here``: a path that contains how many of them have
    saved."""

    def __init__(self, rank: int, left: list[int], step: int, here: str):
        super().__init__()
        self.rank, self.left, self.step, self.here = rank, left, step, here

    def step_end(self, run_context):
        cb = run_context.original_args()
        if global_step(cb) < self.step:
            return
        if self.rank in self.left:
            saving = next(
                callback for callback in cb.list_callback if hasattr(callback, "_append_dict")
            )
            # as built by the trainer, with arguments alone
            emergency = object.__new__(type(saving))
            emergency.__dict__.update(
                saving.__dict__, _append_dict=dict(saving._append_dict), _training=None
            )
            emergency._append_dict.update({"__exception_save__": True})
            emergency._save_ckpt(cb, True)
            with open(f"{self.here}.saved-{self.rank}", "w", encoding="utf-8"):
                pass
            while not all(os.path.exists(f"{self.here}.saved-{rank}") for rank in self.left):
                time.sleep(0.05)
            os._exit(1)  # as _tft_exit_cb does
        time.sleep(3600)


def from_environment() -> list[Callback]:
    """The callbacks asked for by the variables; they run after all others of a step."""
    rank, callbacks = os.environ.get("RANK_ID", "0"), []
    path = os.environ.get("CPU_CLUSTER_STEPS")
    if path and ("{rank}" in path or rank == "0"):
        callbacks.append(StepRecorder(path.replace("{rank}", rank)))
    who, _, step = os.environ.get("CPU_CLUSTER_KILL", "").partition("@")
    note = os.environ.get("CPU_CLUSTER_KILLED", "")
    if who in ("all", rank) and step and not os.path.exists(note):
        callbacks.append(KillSelf(int(step), note, who == "all"))
    left, _, step = os.environ.get("CPU_CLUSTER_LOSE", "").partition("@")
    if step:
        callbacks.append(
            LoseRanks(int(rank), [int(one) for one in left.split(",")], int(step), path)
        )
    return callbacks
