"""Loads Hugging Face folders, or files of checkpoints, into a training network of MindSpore
Transformers; writes its logits.

    python st/cpu_cluster/run.py st/programs/hf_logits.py CONFIG.yaml SOURCE TOKENS.npy LOGITS.npy [key=value ...]

``key=value`` (JSON) change ``model.model_config``. Several sources in one command: with -- between
them. Beside the logits of a folder, LOGITS.npy.json names the parameters that mindformers' own
``load_hf_checkpoint`` fills with something else.
"""  # noqa: E501

import itertools
import json
import sys

import mindspore as ms
import numpy as np
from mindformers import MindFormerConfig, build_context
from mindformers.checkpoint.checkpoint import load_hf_checkpoint
from mindformers.models.build_model import build_network

from mindresume.reshard.huggingface import (
    NetworkModel,
    is_huggingface,
    is_no_weight,
    view_for_network,
)
from mindresume.reshard.region_load import LoadTarget, read_regions, wanted_regions
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import read_header, read_tensor


def logits(config_path, source, tokens, out, *changes):
    config = MindFormerConfig(config_path, run_mode="train")
    config.model.model_config.update(
        {key: json.loads(value) for key, _, value in (one.partition("=") for one in changes)}
    )
    network = build_network(config.model)
    parameters = network.parameters_dict()
    wanted = {
        name: (tuple(p.shape), str(p.dtype).lower())
        for name, p in parameters.items()
        if name.startswith(("embedding.", "decoder.", "output_layer."))
    }
    if is_huggingface(PosixStorage(), source):
        target = LoadTarget(wanted, {})
        weights = view_for_network(
            PosixStorage(),
            source,
            target,
            NetworkModel(
                network.get_gpt_transformer_config(),
                network.config.tie_word_embeddings,
                network.template.weight_converters if hasattr(network, "template") else (),
                network.config.model_type,
            ),
        )
        shapes = {name: row for name, row in wanted.items() if not is_no_weight(name)}
        arrays = read_regions(weights, wanted_regions(weights, LoadTarget(shapes, {}), 0))
        if hasattr(network, "template"):  # mindformers can load only Qwen3
            load_hf_checkpoint(source, network)
            with open(f"{out}.json", "w", encoding="utf-8") as file:
                json.dump(
                    [
                        name
                        for name in wanted
                        if not np.array_equal(parameters[name].asnumpy(), arrays[name])
                    ],
                    file,
                )
    else:
        with open(source, "rb") as file:
            header = read_header(file, source)
            arrays = {name: read_tensor(file, header.tensors[name]) for name in wanted}
    for name, array in arrays.items():
        parameters[name].set_data(ms.Tensor(array))
    network.set_train(False)
    np.save(out, network(ms.Tensor(np.load(tokens), ms.int32)).asnumpy())


config_file, *rest = sys.argv[1:]
build_context(MindFormerConfig(config_file, run_mode="train"))
for separator, words in itertools.groupby(rest, lambda word: word == "--"):
    if not separator:
        logits(config_file, *words)
