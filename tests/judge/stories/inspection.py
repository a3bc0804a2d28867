"""``inspect``: what a checkpoint or a strategy holds."""

from tests.judge.case import Case
from tests.judge.folders import fixture, flip, four, hf_config, part, remove, trained, truncate

C = "output/checkpoint"

CASES = [
    Case("one rank", trained("1.0"), f"inspect {C}"),
    Case(
        "4 ranks",
        four(),
        f"inspect {C}",
        f"inspect {C} --rank 1 --tensor *layers.0.mlp*",
        f"inspect {C} --all --tensor *mlp*",
    ),
    Case(
        "4 ranks, a tensor",
        four(),
        f"inspect {C} --json --tensor decoder.layers.0.mlp.linear_fc1.weight",
        f">>> [(part.region, part.ranks) for part in mindresume.inspect('{C}', "
        "tensors='*0.mlp*').slices]",
    ),
    Case(
        "an older step, one file",
        trained("1.0"),
        f"inspect {C} --step 11",
        f"inspect {C} --step 10 --tensor dense.*",
        f"inspect {C}/rank_0/net_rank_0-2_5.safetensors --tensor dense.*",
    ),
    Case("2.0", four("iteration"), f"inspect {C} --tensor *output_layer*"),
    Case(
        "newest damaged, as a scrub found",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        f"inspect {C}",
        f"scrub {C}",
        f"inspect {C}",
        f"inspect {C} --step 20",
        f"which {C}",
        truncate(f"{C}/rank_0/*-2_5.*"),
        f"inspect {C}",
    ),
    Case(
        "2.0 damaged, as a scrub found",
        trained("2.0"),
        flip(f"{C}/iteration_00000020/*-opt-*"),
        f"scrub {C}",
        f"inspect {C}",
        f"which {C}",
    ),
    Case(
        "mindformers with strategy files",
        fixture("mf190_10_ckpt_dp2tp2opt"),
        f"inspect {C} --tensor *layers.0.attention.wq.*",
    ),
    Case(
        "mindformers without its strategy files",
        fixture("mf190_10_safetensors_dp2tp2"),
        remove("output/strategy"),
        f"inspect {C}",
        part("mf190_10_safetensors_dp2tp2/output/strategy", "moved"),
        f"inspect {C} --from moved --tensor *output_layer*",
    ),
    Case(
        "mindformers, a slice of a rank without redundancy",
        fixture("mf190_10_safetensors_dp2tp2_nodup"),
        f"inspect {C} --rank 2 --tensor *fc1*",
    ),
    Case(
        "a strategy",
        part("strategy_dp2mp2pp2opt/output/strategy", "strategy"),
        "inspect strategy --tensor *fc1*",
    ),
    Case(
        "Hugging Face",
        four(),
        hf_config(),
        f"export-hf {C} hf --config Qwen3",
        "inspect hf --tensor *layers.0*",
    ),
    Case("nothing to inspect", "inspect nowhere", f"inspect {C} --rank -1"),
]
