"""A training from Python: the import of the plugin is the only line of ours."""

import argparse

from mindformers import MindFormerConfig, Trainer, build_context

import mindresume.plugin  # noqa: F401

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--run_mode")
parser.add_argument("--train_dataset_dir")
args = parser.parse_args()

config = MindFormerConfig(args.config, run_mode="train")
config.train_dataset.data_loader.dataset_dir = args.train_dataset_dir
config.load_checkpoint, config.resume_training = "", False  # given below instead
build_context(config)
Trainer(config).train(resume_from_checkpoint="./output/checkpoint", resume_training=True)
