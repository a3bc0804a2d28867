"""A start script of the PyNative trainer as a user has it, with nothing of ours in it:
pynative_train.py --config FILE."""

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
args = parser.parse_args()

from mindformers.pynative.trainer import Trainer  # noqa: E402

Trainer(args.config).train()
