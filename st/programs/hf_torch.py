"""Models of transformers, made and run on the CPU by PyTorch. Runs in .venv-hf (scripts/hf_env.sh).

    # random weights of that configuration (JSON values)
    python hf_torch.py make FOLDER key=value ...
    # in float32; every tensor must have been found
    python hf_torch.py logits FOLDER TOKENS.npy LOGITS.npy

Several of these in one command: with -- between them.
"""

import itertools
import json
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def make(folder, *settings):
    """``dtype`` and ``max_shard_size`` apply to the files."""
    given = {
        key: json.loads(value) for key, _, value in (setting.partition("=") for setting in settings)
    }
    dtype = getattr(torch, given.pop("dtype", "float32"))
    shard = given.pop("max_shard_size", "5GB")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    for name, value in model.named_parameters():  # norms too, which begin as ones
        value.data = torch.randn_like(value) * 0.1 + ("norm" in name)
    for name, value in model.named_buffers():  # they begin as zeros
        if name.endswith("e_score_correction_bias"):
            value.data = torch.randn_like(value) * 0.1
    model.tie_weights()
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)


def logits(folder, tokens, out):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if any(info.values()):
        sys.exit(f"not all tensors fit: {info}")
    with torch.no_grad():
        np.save(out, model.eval()(torch.from_numpy(np.load(tokens)).long()).logits.numpy())


for separator, words in itertools.groupby(sys.argv[1:], lambda word: word == "--"):
    if not separator:
        command, *arguments = words
        {"make": make, "logits": logits}[command](*arguments)
