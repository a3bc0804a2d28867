"""``diff``, ``compare``: two checkpoints of any layouts and formats, bit by bit."""

from tests.judge.case import Case
from tests.judge.folders import fixture, flip, four, part, trained, truncate

C = "output/checkpoint"

CASES = [
    Case(
        "equal",
        trained("1.0"),
        trained("1.0", "other"),
        f"diff {C} other/checkpoint",
        f"diff {C} other --json",
    ),
    Case(
        "two steps",
        four(),
        f"diff {C} {C} --step-b 10 --tensor *_num",
        f"diff {C} {C} --step-b 10 --tensor *_num --tolerance 5",
        f"diff {C} {C} --step-b 10 --tensor *_num --tolerance 4",
    ),
    Case(
        "two steps as JSON",
        four(),
        f"diff {C} {C} --step-b 10 --json --tensor decoder.final_layernorm*",
        f">>> mindresume.compare('{C}', '{C}', step_b=10, "
        "tensors='step_num').differences[0].within(5)",
    ),
    Case(
        "mindformers and what it consolidated",
        fixture("mf190_10_safetensors_dp2tp2"),
        part("mf190_unified_from_dp2tp2/unified_checkpoint", "merged"),
        f"diff {C} merged",
    ),
    Case(
        "a bit flipped",
        four(),
        four(to="rotted"),
        flip("rotted/rank_[02]/*-2_5.*"),
        f"diff {C} rotted",
    ),
    Case(
        "newest damaged, as a scrub found",
        trained("1.0"),
        trained("1.0", "other"),
        flip("other/checkpoint/rank_0/*-2_10.*"),
        f"diff {C} other",
        "scrub other/checkpoint",
        f"diff {C} other",
        f"diff {C} other --step-b 20",
        "which other",
        truncate("other/checkpoint/rank_0/*-2_5.*"),
        f"diff {C} other",
    ),
    Case(
        "wrong arguments",
        trained("1.0"),
        f"diff {C} {C} --tolerance some",
        f"diff {C} {C} --step-a 11",
        f"diff {C} nowhere",
    ),
]
