"""run_mindformer.py whose step ledger is switched on and off from step to step, and which writes
what a start needs. For ``proof.py``.

    PROOF_STEPS=FILE     one JSON object a step: {"ledger": true, "step": seconds, "own": seconds,
                         "step, CPU": seconds, "own, CPU": seconds}
    PROOF_START=FILE     one JSON object at the end of the first step, then the process ends:
                         {"load": seconds, "first step": seconds, "start": seconds, "tensors": 33,
                         "compared_bytes": 12345}

A step lasts from the moment before the first callback of its beginning to the same moment of the
next step, so that all that the ledger does is in it; "own": the time in mindresume's callback of a
step and in what the loss monitor hands over; "CPU": of all threads of the process, which other work
on the machine does not lengthen. Of each two steps one, drawn at random, has no ledger:
``TrainingContext.proof`` is None while it runs, as on the ranks that keep none. The product has no
option for that.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, START = "PROOF_STEPS", "PROOF_START"


class Stopwatch:
    """Adds up the seconds that functions take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self, name: str) -> float:
        return self.seconds.pop(name, 0.0)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            started, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.add(f"{name}, CPU", time.thread_time() - cpu)
                self.add(name, time.perf_counter() - started)

        return timed


def switching(path: str) -> Any:
    """Returns the callback that goes before all others."""
    from mindspore.train.callback import Callback

    from mindresume.mindformers import training_context
    from mindresume.mindformers.checkpoint_monitor import FirstStep
    from mindresume.mindformers.step_proof import SeenValues

    watch = Stopwatch()
    for owner, name in (
        (FirstStep, "on_train_step_begin"),
        (FirstStep, "on_train_step_end"),
        (SeenValues, "monitor"),
    ):
        setattr(owner, name, watch.around("own", getattr(owner, name)))
    chance, file = random.Random(0), open(path, "w", encoding="utf-8")  # noqa: SIM115

    class Switch(Callback):
        def __init__(self) -> None:
            super().__init__()
            self.proof: Any = None
            self.order: list[bool] = []
            self.begun, self.cpu, self.ledger, self.breaks = 0.0, 0.0, True, False

        def step_begin(self, run_context: Any) -> None:
            line = {
                "ledger": self.ledger,
                "step": time.perf_counter() - self.begun,
                "own": watch.take("own"),
                "step, CPU": time.process_time() - self.cpu,
                "own, CPU": watch.take("own, CPU"),
            }
            if self.begun and not self.breaks:
                file.write(json.dumps(line) + "\n")
                file.flush()
            context = training_context.current()
            self.proof = self.proof or context.proof
            self.order = self.order or chance.sample([True, False], 2)
            self.ledger = self.order.pop()
            context.proof = self.proof if self.ledger else None
            cb_params = run_context.original_args()
            # the data set begins again behind the last step of an epoch
            self.breaks = cb_params.cur_step_num % cb_params.batch_num == 0
            self.begun, self.cpu = time.perf_counter(), time.process_time()

        def end(self, run_context: Any) -> None:
            training_context.current().proof = self.proof

    return Switch()


def start_recorder(path: str) -> Any:
    """Returns a callback that ends the process after the first step."""
    from mindspore.train.callback import Callback

    from mindresume.mindformers import heartbeat, training_context
    from mindresume.mindformers.network_state import LoadedWeights

    watch = Stopwatch()
    LoadedWeights.of = watch.around("load", LoadedWeights.of)
    LoadedWeights.difference = watch.around("first step", LoadedWeights.difference)

    class StartRecorder(Callback):
        def step_end(self, run_context: Any) -> None:
            found = {
                "load": watch.take("load"),
                "first step": watch.take("first step"),
                "start": time.time() - heartbeat.process_started(),
                **training_context.current().resources.proved,
            }
            Path(path).write_text(json.dumps(found), encoding="utf-8")

        # behind all that the first step does
        def step_begin(self, run_context: Any) -> None:
            if os.path.exists(path):
                os._exit(0)

    return StartRecorder()


def main() -> None:
    import mindspore as ms

    # before the load
    recorders = [start_recorder(os.environ[START])] if START in os.environ else []
    train = ms.Model._train

    def train_with_callbacks(
        self: Any, epoch: Any, dataset: Any, callbacks: Any = None, *rest, **named
    ):
        given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
        added = [switching(os.environ[STEPS])] if STEPS in os.environ else recorders
        return train(self, epoch, dataset, [*added, *given], *rest, **named)

    ms.Model._train = train_with_callbacks
    runpy.run_path(os.path.join(sys.path[0], "run_mindformer.py"), run_name="__main__")


if __name__ == "__main__":
    # the repository, as run_mindformer.py has it
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(main())
