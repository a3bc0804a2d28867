"""run_mindformer.py that records the parameters that every rank starts with, and the steps of ranks
other than 0; it can be killed at an exact step with an exact checkpoint behind it. For
st/test_iterations.py and st/test_single_iterations.py.

    RECORD_START=FOLDER          rank_R.npz: the parameters when the training begins; steps_R.jsonl:
                                 the steps
    KILL_AFTER_SAVE=12@10        all ranks end by SIGKILL after step 12, once every rank has
                                 recorded what it saved of step 10

Without that wait a background save would be complete or not as the load of the machine has it.
"""

from __future__ import annotations

import glob
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

RECORD, KILL = "RECORD_START", "KILL_AFTER_SAVE"
PATIENCE = 300.0  # seconds that ranks wait for each other before they die


def parameter_recorder(rank: str, folder: str) -> Any:
    """Returns a callback that writes the parameters of this rank when the training begins."""
    from mindspore.train.callback import Callback

    class ParameterRecorder(Callback):
        def on_train_begin(self, run_context):
            os.makedirs(folder, exist_ok=True)
            parameters = run_context.original_args().train_network.parameters_and_names()
            np.savez(
                os.path.join(folder, f"rank_{rank}.npz"),
                **{value.name: value.asnumpy() for _, value in parameters},
            )

    return ParameterRecorder()


def kill_after_save(step: int, saved: int, folder: str) -> Any:
    """Returns a callback. ``folder``: for marks of ranks that are ready."""
    from mindspore.train.callback import Callback

    from st.cpu_cluster.recorder import global_step

    ranks = int(os.environ.get("MS_WORKER_NUM", "1"))
    attempt, mark = (
        f".mindresume/step-{saved:010d}-run-*",
        os.path.join(folder, "ready_" + os.environ.get("RANK_ID", "0")),
    )
    records = [
        f"output/checkpoint/{place}{attempt}/rank_*.json"
        for place in ("iteration_*/", attempt + "/", "")
    ]

    class KillAfterSave(Callback):
        # of the step behind it, so that every rank has recorded this one
        def step_begin(self, run_context):
            if global_step(run_context.original_args()) < step:
                return
            os.makedirs(folder, exist_ok=True)
            Path(mark).touch()
            deadline = time.monotonic() + PATIENCE
            while len(glob.glob(os.path.join(folder, "ready_*"))) < ranks or all(
                len(glob.glob(p)) < ranks for p in records
            ):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"not all ranks have saved step {saved}: {[glob.glob(p) for p in records]}"
                    )
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    return KillAfterSave()


def main() -> None:
    import mindspore as ms

    rank, folder, asked = os.environ.get("RANK_ID", "0"), os.environ[RECORD], os.environ.get(KILL)
    if rank != "0":
        os.environ["CPU_CLUSTER_STEPS"] = os.path.join(folder, "steps_{rank}.jsonl")
    train = ms.Model._train

    def train_with_callbacks(self, epoch, dataset, callbacks=None, *args, **kwargs):
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        added = [kill_after_save(*map(int, asked.split("@")), folder)] if asked else []
        return train(
            self,
            epoch,
            dataset,
            [*given, *added, parameter_recorder(rank, folder)],
            *args,
            **kwargs,
        )

    ms.Model._train = train_with_callbacks
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main())
