"""A start script of the PyNative trainer with a callback that loads weights of its own, behind all
others, before each step."""

import argparse

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
args = parser.parse_args()

import mindspore as ms  # noqa: E402
from mindformers.pynative.callback import TrainerCallback  # noqa: E402
from mindformers.pynative.trainer import Trainer  # noqa: E402


class LoadsWeights(TrainerCallback):
    def on_step_begin(self, args, state, **kwargs):
        for parameter in kwargs["model"].trainable_params():
            parameter.set_data(ms.Tensor(np.ones(parameter.shape, np.float32), parameter.dtype))


Trainer(args.config, callbacks=[LoadsWeights()]).train()
