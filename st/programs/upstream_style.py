"""A start script as a user of MindSpore Transformers has it, with nothing of ours in it."""

import argparse
import os
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--run_mode", default="train")
parser.add_argument("--train_dataset_dir")
parser.add_argument("--register_path")
args = parser.parse_args()
if args.register_path:
    os.environ["REGISTER_PATH"] = args.register_path
    sys.path.append(args.register_path)

from mindformers import MindFormerConfig, Trainer, build_context  # noqa: E402

config = MindFormerConfig(args.config, run_mode=args.run_mode)
if args.train_dataset_dir:
    config.train_dataset.data_loader.dataset_dir = args.train_dataset_dir
build_context(config)
Trainer(config).train()
