"""``merge``: consolidated weights."""

from tests.judge.case import Case
from tests.judge.folders import edit, fixture, flip, four, remove, trained, truncate, write

C = "output/checkpoint"

CASES = [
    Case(
        "4 ranks",
        fixture("mf190_10_safetensors_dp2tp2"),
        f"merge {C} merged",
        "which merged",
        f"diff {C} merged",
        f"merge {C} merged",
    ),
    Case(
        "in parts, without the optimizer",
        fixture("mf190_10_safetensors_dp2tp2"),
        f"merge {C} merged --part-size 60kB --drop adam_* --json",
        "ls merged",
        f"diff {C} merged",
    ),
    Case(
        "with an index as of Hugging Face",
        fixture("mf190_10_ckpt_dp2tp2opt"),
        f"merge {C} merged --hf-index --part-size 60kB --engine direct",
        "ls merged",
        "which merged",
    ),
    Case("2.0", fixture("mf190_20_dp2tp2opt"), f"merge {C} merged", f"diff {C} merged"),
    Case(
        "of mindresume",
        trained("1.0"),
        f"merge {C} merged",
        "which merged --json",
        f"diff {C} merged",
    ),
    Case(
        "newest damaged, as a scrub found",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        f"scrub {C}",
        f"merge {C} merged",
        f"which {C}",
        truncate(f"{C}/rank_0/*-2_5.*"),
        f"merge {C} other",
    ),
    Case(
        "without strategy files",
        fixture("mf190_10_safetensors_dp2tp2"),
        remove("output/strategy"),
        f"merge {C} merged",
    ),
    Case(
        "a tensor is left out, its header was altered",
        four(),
        f"merge {C} merged --drop adam_* --drop output_layer*",
        edit("merged/param_name_map.json", **{"output_layer.weight": "part0.safetensors"}),
        "ls merged",
        "which merged",
    ),
    Case(
        "refused",
        four(),
        write("merged/notes.txt", "mine"),
        f"merge {C} merged",
        f"merge {C} new --part-size 0",
        f"merge {C} new --drop *",
        "merge nowhere new",
    ),
]
