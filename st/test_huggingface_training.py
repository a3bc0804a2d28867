"""Trainings that begin with Hugging Face weights, by the real Trainer: latent attention of
DeepSeek-V3 (all layers dense, because experts have no kernel on the CPU), and Qwen3 with a
config.json of transformers 4.57. With a learning rate of 0 the checkpoint still holds these
weights, so its export is the folder again, bit for bit.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import yaml

from mindresume.formats.huggingface import Latent, Model, rules, shapes
from mindresume.model.layout import whole
from mindresume.reshard.open_checkpoint import open_checkpoint
from mindresume.reshard.range_reader import scale_blocks
from mindresume.reshard.region_load import read_regions
from mindresume.reshard.translated_view import SCALE, scales_shape
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import encode
from st.run_attempts import FIXTURES, in_parallel, steps_of, train_well
from st.training_run import FORMAT_2, Run

ONE, FOUR = (
    FIXTURES / name / "config.yaml"
    for name in ("mf190_10_safetensors_single", "mf190_10_safetensors_dp2tp2")
)
QWEN3 = Model("qwen3", 2, 32, 4, 4, 8, 64, 128)
LATENT = Model("deepseek_v3", 2, 32, 4, 0, 0, 64, 128, 4, 24, 1, 2, latent=Latent(24, 16, 12, 4, 8))
BLOCK = (8, 8)
SIZES = {
    "max_position_embeddings": 16,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
NETWORK = {
    "multi_latent_attention": True,
    "mla_qkv_concat": False,
    "qk_layernorm": True,
    "rotary_scaling_factor": 1.0,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_grouped_gemm": True,
    "num_nextn_predict_layers": 0,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_token_dispatcher_type": "alltoall",
    "router_dense_type": "float32",
}
STILL = "--lr_schedule.learning_rate 0. --runner_config.epochs 1"


def document(model: Model) -> dict:
    """Its config.json, as transformers 4.57 writes it."""
    found = {
        "model_type": model.kind,
        "architectures": [model.family.architecture],
        "num_hidden_layers": model.layers,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **SIZES,
        **model.dimensions,
    }
    if not model.latent:
        return {key: value for key, value in found.items() if value}
    del found["head_dim"]
    return {
        **found,
        "num_key_value_heads": 4,
        "first_k_dense_replace": model.dense_layers,
        "qk_head_dim": 16,
        "rope_interleave": True,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }


def folder_of(folder: Path, model: Model, fp8: bool = False) -> dict[str, np.ndarray]:
    """Writes a Hugging Face folder. Returns its values in float32."""
    folder.mkdir()
    generator, stored, values = np.random.default_rng(5), {}, {}
    for name, shape in shapes(rules(model)).items():
        values[name] = stored[name] = (
            generator.standard_normal(shape) * 0.1 + ("norm" in name)
        ).astype(np.float32)
        if fp8 and "_proj" in name:
            stored[name] = (values[name] * 100).astype(ml_dtypes.float8_e4m3fn)
            scales = stored[name + SCALE] = (
                generator.random(scales_shape(shape, BLOCK)) / 50
            ).astype(np.float32)
            values[name] = scale_blocks(
                stored[name], scales, range(shape[0]), range(shape[1]), BLOCK
            )
    config = document(model)
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": list(BLOCK),
        }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with open(folder / "model.safetensors", "wb") as file:
        for _, piece in encode("safetensors", stored, {"format": "pt"}):
            file.write(piece)
    return values


def run_of(folder: Path, base: Path, model: Model, data: Path, graphs: Path, **changes) -> Run:
    """A training whose YAML has the settings of mindformers; the dimensions come from config.json
    if ``changes`` says so."""
    config = yaml.safe_load(base.read_text(encoding="utf-8"))
    section = config["model"]["model_config"]
    if model.latent:
        section |= {**document(model), **NETWORK}
        for key in ("dtype", "rope_interleave", "qk_head_dim", "head_dim"):
            section.pop(key, None)
    if "pretrained_model_dir" in changes:
        for key in document(model):
            section.pop(key, None)
    for callback in config["callbacks"]:
        if callback["type"] == "CheckpointMonitor":
            callback["checkpoint_format"] = "safetensors"
    folder.mkdir(parents=True)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**config, **changes}, sort_keys=False), encoding="utf-8")
    return Run(folder, str(path), data, 1 if base == ONE else 4, graphs=graphs, options=STILL)


def exported(run: Run, target: Path, config: Path) -> dict[str, np.ndarray]:
    found = run.mindresume("export-hf", str(run.checkpoints), str(target), "--config", str(config))
    assert found.returncode == 0, found.stderr
    weights = open_checkpoint(PosixStorage(), str(target)).weights
    return read_regions(
        weights, {name: whole(tensor.shape) for name, tensor in weights.tensors.items()}
    )


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32 and found[name].tobytes() == array.tobytes(), name


def test_fp8_weights_in_checkpoint_1(tmp_path, sequences, graphs):
    values = folder_of(tmp_path / "hf", LATENT, fp8=True)
    run = train_well(
        run_of(
            tmp_path / "run", ONE, LATENT, sequences, graphs, load_checkpoint=str(tmp_path / "hf")
        )
    )
    assert steps_of(run)[0] == 1
    assert_same(exported(run, tmp_path / "again", tmp_path / "hf"), values)
    assert "quantization_config" not in json.loads(
        (tmp_path / "again" / "config.json").read_text(encoding="utf-8")
    )


def test_configurations_of_transformers(tmp_path, sequences, graphs):
    """As ``pretrained_model_dir``: the network gets its dimensions from there."""
    models, values, runs = (QWEN3, LATENT), [], []
    for i, model in enumerate(models):
        values.append(folder_of(tmp_path / f"hf{i}", model))
        runs.append(
            run_of(
                tmp_path / f"run{i}",
                ONE,
                model,
                sequences,
                graphs,
                pretrained_model_dir=str(tmp_path / f"hf{i}"),
            )
        )
    in_parallel(*(lambda run=run: train_well(run, FORMAT_2) for run in runs))
    for i, run in enumerate(runs):
        assert_same(exported(run, tmp_path / f"again{i}", tmp_path / f"hf{i}"), values[i])


# by default tests/reshard/test_huggingface.py and tests/mindformers/test_hf_streaming.py
@pytest.mark.soak
@pytest.mark.parametrize("model", [QWEN3, LATENT], ids=["qwen3", "latent"])
def test_each_rank_of_four_loads_its_slices(tmp_path, sequences, graphs, model):
    """Data parallel 2 x model parallel 2."""
    values = folder_of(tmp_path / "hf", model)
    run = run_of(
        tmp_path / "run", FOUR, model, sequences, graphs, load_checkpoint=str(tmp_path / "hf")
    )
    assert_same(exported(train_well(run, FORMAT_2), tmp_path / "again", tmp_path / "hf"), values)
