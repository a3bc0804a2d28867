"""A start script of the PyNative trainer with a callback of the user: pynative_counting.py --config
FILE.

The callback keeps numbers in ``TrainerState``. It counts where a step begins, because mindformers
saves before it calls the callbacks of users at a step's end.
"""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
args = parser.parse_args()

from mindformers.pynative.callback import TrainerCallback  # noqa: E402
from mindformers.pynative.trainer import Trainer  # noqa: E402


class Counting(TrainerCallback):
    def on_step_begin(self, args, state, **kwargs):
        state.best_metric = (state.best_metric or 0.0) + 0.1
        if state.global_step % 7 == 0:
            state.best_model_checkpoint = f"/weights/step-{state.global_step}"
            state.loss_scale = 2.0 * getattr(state, "loss_scale", 1.0)


Trainer(args.config, callbacks=[Counting()]).train()
