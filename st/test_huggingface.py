"""Weights of Qwen3 and DeepSeek-V3 between transformers and MindSpore Transformers: the same logits
on both sides, and the same bits after a way there and back.

transformers runs in an environment of its own (scripts/hf_env.sh makes it). The networks of
MindSpore Transformers are the real ones, in one process; grouped-query attention and experts cannot
run on its CPU backend (TopkExt, GroupedMatmul and others have no kernel there), so of these the
conversion alone is tested, and logits of latent attention come from a model whose layers are all
dense. transformers has no next-token-prediction layer: of it only names and shapes are compared,
with the network (hf_names.py). transformers has no TeleChat3 either, which computes like Llama.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindresume.formats.consolidated import MINDSPORE
from mindresume.formats.huggingface import HEAD
from mindresume.model.layout import whole
from mindresume.reshard.conversion_plan import to_consolidated
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Engine
from mindresume.reshard.huggingface import read_model, view_of_folder
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.region_load import read_regions
from mindresume.storage.posix import PosixStorage
from st.training_run import ROOT

pytestmark = pytest.mark.soak  # most of its three minutes is the installation of torch

FIXTURES = ROOT / "st" / "fixtures"
SINGLE, FOUR = (
    FIXTURES / name for name in ("mf190_10_safetensors_single", "mf190_10_safetensors_dp2tp2")
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, summed in another order
SIZES = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LATENT = {
    "model_type": "deepseek_v3",
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
MODELS = {  # made by transformers
    "plain": {"max_shard_size": "50KB"},
    "tied": {"tie_word_embeddings": True, "dtype": "bfloat16"},
    "grouped": {"num_key_value_heads": 2},
    "one group": {"num_key_value_heads": 1, "tie_word_embeddings": True, "dtype": "float16"},
    "llama": {"model_type": "llama"},
    "latent": {**LATENT, "first_k_dense_replace": 2},
    "latent in bfloat16": {
        **LATENT,
        "first_k_dense_replace": 2,
        "q_lora_rank": None,
        "dtype": "bfloat16",
    },
    "latent experts": {**LATENT, "dtype": "bfloat16", "max_shard_size": "60KB"},
    "experts": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "dtype": "bfloat16",
        "max_shard_size": "60KB",
    },
}
TELECHAT3 = {"model_type": "telechat3", "architectures": ["TeleChat3ForCausalLM"]}
NETWORK = {
    **LATENT,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 2,
    "multi_latent_attention": True,
    "mla_qkv_concat": False,
    "qk_layernorm": True,
    "num_nextn_predict_layers": 0,
    "rotary_scaling_factor": 1.0,
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "hidden_act": "silu",
    "moe_token_dispatcher_type": "alltoall",
    "router_dense_type": "float32",
    "n_group": 1,
}
# of MindSpore Transformers: source, changes of its configuration
NETWORKS = {
    "plain": ("plain", {}),
    "contiguous": (
        "tied",
        {
            "use_contiguous_weight_layout_attention": True,
            "use_interleaved_weight_layout_mlp": False,
            "tie_word_embeddings": True,
        },
    ),
    "own head": ("tied", {}),
    "telechat3": ("telechat3", TELECHAT3),
    "latent": ("latent", NETWORK),
    "latent concatenated": (
        "latent",
        {**NETWORK, "mla_qkv_concat": True, "use_interleaved_weight_layout_mlp": False},
    ),
    "latent in bfloat16": ("latent in bfloat16", {**NETWORK, "q_lora_rank": None}),
    "trained": (SINGLE / "output" / "checkpoint" / "rank_0" / "qwen3_rank_0-2_5.safetensors", {}),
    "four ranks": ("export of four", {}),
}
ROUND_TRIPS = ("grouped", "one group", "experts", "latent", "latent in bfloat16", "latent experts")
STORAGE = PosixStorage()


def words(settings: dict) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def run(*command: object, **more) -> str:
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def torch(interpreter: str, *commands: list) -> None:
    run(
        interpreter,
        ROOT / "st" / "programs" / "hf_torch.py",
        *(word for command in commands for word in (*command, "--")),
        env=dict(os.environ, HF_HUB_OFFLINE="1"),
    )


def export(source: Path, target: Path, config: Path, *more: str) -> dict:
    program = "from mindresume.cli import main; main()"
    return json.loads(
        run(
            sys.executable,
            "-c",
            program,
            "export-hf",
            source,
            target,
            "--config",
            config,
            "--json",
            *more,
            cwd=ROOT,
        )
    )


def through_mindspore(folder: Path, middle: Path) -> None:
    """A Hugging Face folder as consolidated weights of MindSpore Transformers."""
    weights = view_of_folder(STORAGE, str(folder))
    if read_model(STORAGE, str(folder)).tied:  # such a network has no head
        weights.tensors = {name: tensor for name, tensor in weights.tensors.items() if name != HEAD}
    source = replace(open_checkpoint(STORAGE, str(folder)), weights=weights)
    conversion = Conversion(STORAGE, to_consolidated(source, MINDSPORE), str(middle))
    conversion.prepare()
    conversion.write(Engine())
    conversion.commit()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with everything, made once because each program takes seconds to start: models of
    transformers, exports of checkpoints ("export of ..."), models there and back ("NAME again");
    logits by transformers (NAME.npy) and by MindSpore Transformers (NAME in mindspore.npy)."""
    interpreter = run("bash", ROOT / "scripts" / "hf_env.sh").split()[-1]
    at = tmp_path_factory.mktemp("made")
    # without 0, the padding, which MindSpore Transformers masks by itself
    tokens = at / "tokens.npy"
    np.save(tokens, np.random.default_rng(3).integers(1, 128, (2, 16)))

    def logits(*names: str) -> list[list]:
        return [["logits", at / name, tokens, at / f"{name}.npy"] for name in names]

    torch(
        interpreter,
        *(["make", at / name, *words({**SIZES, **given})] for name, given in MODELS.items()),
        *logits(*MODELS),
    )
    (at / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], **SIZES}), encoding="utf-8"
    )
    export(SINGLE / "output" / "checkpoint", at / "export of one", at)
    export(
        SINGLE / "output" / "checkpoint",
        at / "export in bfloat16",
        at,
        "--dtype",
        "bfloat16",
        "--max-shard-size",
        "30kB",
    )
    export(
        FOUR / "output" / "checkpoint",
        at / "export of four",
        at,
        "--from",
        str(FOUR / "output" / "strategy"),
    )
    shutil.copytree(at / "llama", at / "telechat3")
    llama = json.loads((at / "llama" / "config.json").read_text(encoding="utf-8"))
    (at / "telechat3" / "config.json").write_text(
        json.dumps({**llama, **TELECHAT3}), encoding="utf-8"
    )
    for name in ROUND_TRIPS:
        through_mindspore(at / name, at / f"{name} in mindspore")
        export(at / f"{name} in mindspore", at / f"{name} again", at / name)
    jobs = (
        [at / source, tokens, at / f"{name} in mindspore.npy", *words(changes), "--"]
        for name, (source, changes) in NETWORKS.items()
    )
    run(
        sys.executable,
        ROOT / "st" / "cpu_cluster" / "run.py",
        ROOT / "st" / "programs" / "hf_logits.py",
        SINGLE / "config.yaml",
        *(word for job in jobs for word in job),
        cwd=at,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    torch(
        interpreter,
        *logits(
            "export of one",
            "export in bfloat16",
            "export of four",
            *(f"{name} again" for name in ROUND_TRIPS),
        ),
    )
    return at


def load(made: Path, name: str) -> np.ndarray:
    """Returns logits, (tokens, vocabulary); they are not constant."""
    found = np.load(made / f"{name}.npy").reshape(32, 128)
    assert np.ptp(found) > 0.5
    return found


@pytest.mark.parametrize(
    "network, model",
    [
        ("plain", "plain"),
        ("contiguous", "tied"),
        ("own head", "tied"),
        ("telechat3", "llama"),
        ("latent", "latent"),
        ("latent concatenated", "latent"),
        ("latent in bfloat16", "latent in bfloat16"),
    ],
)
def test_mindspore_transformers_computes_like_a_model_of_transformers(made, network, model):
    """The logits are equal for one file or several, either order of its weights, an own or a tied
    head, and float32 or bfloat16."""
    assert len(list((made / model).glob("*.safetensors"))) == (3 if model == "plain" else 1)
    np.testing.assert_allclose(load(made, f"{network} in mindspore"), load(made, model), **CLOSE)


@pytest.mark.parametrize(
    "network, different",
    [
        ("plain", set()),
        ("four ranks", set()),
        ("own head", {"output_layer"}),
        ("contiguous", {"linear_qkv", "linear_fc1"}),
    ],
)
def test_weights_equal_those_loaded_by_mindformers(made, network, different):
    """The bits are equal, except where mindformers 1.9.0 is wrong: it supports one order only, and
    leaves a head random that the folder does not have."""
    found = json.loads((made / f"{network} in mindspore.npy.json").read_text(encoding="utf-8"))
    assert {name.split(".")[-2] for name in found} == different


def test_transformers_computes_like_a_checkpoint_of_mindspore_transformers(made):
    """Trained by mindformers, exported by ours, loaded by transformers: the same logits, in
    bfloat16 to about two digits."""
    mine = load(made, "trained in mindspore")
    np.testing.assert_allclose(load(made, "export of one"), mine, **CLOSE)
    assert len(list((made / "export in bfloat16").glob("model-0*.safetensors"))) > 1
    assert 1e-5 < abs(load(made, "export in bfloat16") - mine).max() < 0.02 * abs(mine).max()


def test_a_checkpoint_of_four_ranks(made):
    """Exported, and loaded on both sides."""
    np.testing.assert_allclose(
        load(made, "export of four"), load(made, "four ranks in mindspore"), **CLOSE
    )
    assert abs(load(made, "export of four") - load(made, "export of one")).max() > 0.1


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_round_trip_keeps_all_bits(made, name):
    """Grouped-query and latent attention, experts and tied weights, with names and shapes as
    transformers writes them: through consolidated weights of MindSpore and back, the same bits and
    the same logits."""
    before, after = (
        read_regions(weights, {one: whole(tensor.shape) for one, tensor in weights.tensors.items()})
        for weights in (
            open_checkpoint(STORAGE, str(made / folder)).weights
            for folder in (name, f"{name} again")
        )
    )
    assert before.keys() == after.keys()
    for one, array in before.items():
        assert array.dtype == after[one].dtype and array.tobytes() == after[one].tobytes(), one
    assert load(made, name).tobytes() == load(made, f"{name} again").tobytes()
