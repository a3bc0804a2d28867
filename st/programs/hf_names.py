"""Builds the training networks of MindSpore Transformers that have rules for Hugging Face weights,
and writes the names and shapes of their parameters: tests/formats/huggingface_networks.json.

    python st/cpu_cluster/run.py st/programs/hf_names.py CONFIG.yaml NETWORKS.json
"""

import json
import sys

from mindformers import MindFormerConfig, build_context
from mindformers.models.build_model import build_network

COMMON = {
    "seq_length": 16,
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-6,
    "add_bias_linear": False,
    "use_flash_attention": True,
    "offset": 0,
    "params_dtype": "float32",
    "compute_dtype": "float32",
    "layernorm_compute_dtype": "float32",
    "softmax_compute_dtype": "float32",
    "rotary_dtype": "float32",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8, "hidden_act": "swiglu"}
EXPERTS = {
    "moe_grouped_gemm": True,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "router_dense_type": "float32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}
LATENT = {
    **EXPERTS,
    "multi_latent_attention": True,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_layernorm": True,
    "mla_qkv_concat": False,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_router_enable_expert_bias": True,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 1,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
}
QUERIES = {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "num_nextn_predict_layers": 0}
NETWORKS = {
    "qwen3": {**GROUPED, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        **GROUPED,
        **EXPERTS,
        "num_experts": 4,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
    },
    "latent": LATENT,
    "concatenated": {**LATENT, "mla_qkv_concat": True},
    "queries": QUERIES,
    "concatenated queries": {**QUERIES, "mla_qkv_concat": True},
    "telechat3": {**GROUPED, "model_type": "telechat3", "architectures": ["TeleChat3ForCausalLM"]},
    "telechat3_moe": {
        **LATENT,
        "model_type": "telechat3_moe",
        "architectures": ["TeleChat3MoeForCausalLM"],
    },
}

base, out = sys.argv[1:]
build_context(MindFormerConfig(base, run_mode="train"))
found = {}
for name, settings in NETWORKS.items():
    config = MindFormerConfig(base, run_mode="train")
    config.model.model_config = type(config.model.model_config)(**COMMON, **settings)
    try:
        network = build_network(config.model)
    except ValueError as error:  # mindformers 1.8.0 has no TeleChat3
        if "Can't find class" not in str(error):
            raise
        continue
    found[name] = {
        parameter: list(value.shape) for parameter, value in network.parameters_dict().items()
    }
with open(out, "w", encoding="utf-8") as file:
    json.dump(found, file, indent=0, sort_keys=True)
    file.write("\n")
