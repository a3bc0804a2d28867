"""``export-hf``: a folder for transformers."""

from tests.judge.case import Case
from tests.judge.folders import edit, fixture, flip, four, hf_config, part, trained, truncate, write

C = "output/checkpoint"

CASES = [
    Case(
        "of mindformers",
        fixture("mf190_10_safetensors_single"),
        hf_config(),
        f"export-hf {C} hf --config Qwen3",
        "which hf",
        "inspect hf --tensor *layers.1*",
        f"export-hf {C} hf --config Qwen3",
    ),
    Case(
        "several files, bfloat16",
        fixture("mf190_10_safetensors_dp2tp2"),
        hf_config(),
        f"export-hf {C} hf --config Qwen3/config.json --dtype bfloat16 --max-shard-size 30kB "
        "--json",
        "ls hf",
        "which hf",
    ),
    Case(
        "consolidated",
        part("mf190_unified_from_dp2tp2/unified_checkpoint", "merged"),
        hf_config(),
        "export-hf merged hf --config Qwen3",
    ),
    Case(
        "newest damaged, as a scrub found",
        four(),
        hf_config(),
        flip(f"{C}/rank_[02]/*-2_5.*"),
        f"scrub {C}",
        f"export-hf {C} hf --config Qwen3",
        f"which {C}",
        truncate(f"{C}/rank_*/*-1_10.*"),
        f"export-hf {C} other --config Qwen3",
    ),
    Case(
        "elements in another order",
        fixture("mf190_10_safetensors_single"),
        hf_config(),
        f"export-hf {C} hf --config Qwen3 --contiguous-attention --contiguous-mlp",
    ),
    Case(
        "another size of the model",
        fixture("mf190_10_safetensors_single"),
        hf_config(),
        edit("Qwen3/config.json", num_attention_heads=8),
        f"export-hf {C} hf --config Qwen3",
        edit("Qwen3/config.json", model_type="bert"),
        f"export-hf {C} hf --config Qwen3",
    ),
    Case(
        "refused",
        trained("1.0"),
        hf_config(),
        f"export-hf {C} hf --config Qwen3",
        f"export-hf {C} hf --config nowhere",
        f"export-hf {C} hf",
        write("hf/notes.txt", "mine"),
        f"export-hf {C} hf --config Qwen3",
    ),
]
