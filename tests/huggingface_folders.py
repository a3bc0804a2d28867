"""Small models of the families of Hugging Face, their tensors in both namings, and folders of
them."""

import json
from dataclasses import replace

import numpy as np

from mindresume.formats.huggingface import (
    ATTENTION_KEY,
    CONTIGUOUS,
    DENSE,
    EXPERTS,
    MLP_KEY,
    Latent,
    Model,
    copies,
    rules,
    shapes,
)
from mindresume.tensor_files import encode

MULTI = Model(DENSE, 2, 16, 4, 4, 6, 12, 20)
GROUPED = Model(DENSE, 2, 16, 8, 4, 6, 12, 20)
MOE = Model(EXPERTS, 2, 16, 4, 2, 8, 0, 20, experts=4, expert_inner=12)
TELECHAT = Model("telechat3", 2, 16, 4, 2, 8, 12, 20)
LATENT = Model(
    "deepseek_v3",
    3,
    16,
    4,
    0,
    0,
    12,
    20,
    4,
    10,
    1,
    dense_layers=1,
    predictions=1,
    latent=Latent(12, 8, 6, 4, 5),
)
# not compressed
QUERIES = replace(
    LATENT, kind="telechat3_moe", predictions=0, shared=2, latent=Latent(0, 8, 6, 4, 5)
)
MODELS = {
    "telechat": TELECHAT,
    "latent": LATENT,
    "queries": QUERIES,
    "no shared experts": replace(LATENT, shared=0),
    "concatenated": replace(LATENT, concatenated=True, mlp=CONTIGUOUS),
    "concatenated queries": replace(QUERIES, concatenated=True),
    "multi": MULTI,
    "grouped": GROUPED,
    "moe": MOE,
    "one group": replace(MULTI, groups=1),
    "contiguous": replace(GROUPED, attention=CONTIGUOUS, mlp=CONTIGUOUS),
    "tied": replace(GROUPED, tied=True),
}


def random(model, seed=0):
    """{Hugging Face name: array}; no two elements are equal."""
    numbers = np.random.default_rng(seed)
    found = {
        name: numbers.random(shape, np.float32) for name, shape in shapes(rules(model)).items()
    }
    assert (
        len(np.unique(np.concatenate([a.ravel() for a in found.values()])))
        > sum(a.size for a in found.values()) * 0.99
    )
    return found | {name: found[other] for name, other in copies(model).items()}


def assemble(known, tensors):
    """{name: array} by the rules, in plain numpy."""
    found = {}
    for name, rule in known.items():
        found[name] = np.full(rule.shape, np.nan, np.float32)
        for block in rule.blocks:
            part = tensors[block.name][np.ix_(*block.other)]
            found[name][np.ix_(*block.part)] = part.T if block.transposed else part
    return found


def document(model):
    found = {
        "model_type": model.kind,
        "architectures": [model.family.architecture],
        "num_hidden_layers": model.layers,
        "tie_word_embeddings": model.tied,
        **{key: size for key, size in model.dimensions.items() if size},
    }
    if model.block:
        found["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(model.block),
        }
    return found | (
        {"first_k_dense_replace": model.dense_layers, "num_nextn_predict_layers": model.predictions}
        if model.latent
        else {}
    )


def put(path, tensors, metadata=None):
    path.write_bytes(
        b"".join(piece for _, piece in encode("safetensors", tensors, metadata or {"format": "pt"}))
    )


def folder_of(folder, model, tensors, parts=2):
    """Writes a Hugging Face folder, as save_pretrained does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document(model)), encoding="utf-8")
    names, found = sorted(tensors), {}
    for i in range(parts):
        name = f"model-{i + 1:05}-of-{parts:05}.safetensors" if parts > 1 else "model.safetensors"
        found |= dict.fromkeys(names[i::parts], name)
        put(folder / name, {one: tensors[one] for one in names[i::parts]})
    if parts > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": found}), encoding="utf-8"
        )
    return str(folder)


def complete(folder, tensors):
    folder.mkdir()
    put(folder / "model.safetensors", tensors, {"format": "ms"})
    return folder


def trained(model):
    """Returns weights of ``model`` in the naming of mindformers: the numbers from 0 on in each
    tensor."""
    known = rules(model)
    return assemble(
        known,
        {
            name: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            for name, shape in shapes(known).items()
        },
    )


def contiguous(attention, mlp):
    """Returns what a record says of the order of its rows."""
    return {ATTENTION_KEY: attention, MLP_KEY: not mlp}
