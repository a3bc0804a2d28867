"""``verify``, ``Catalog.verify``: every byte of every checkpoint."""

from tests.judge.case import Case
from tests.judge.folders import (
    edit,
    fixture,
    flip,
    flip_header,
    four,
    link,
    remove,
    trained,
    truncate,
)

C = "output/checkpoint"
VERIFY = f"verify {C}"

CASES = [
    Case("intact", trained("1.0"), VERIFY, f"verify {C} --json"),
    Case(
        "rot in two files",
        four(),
        flip(f"{C}/rank_1/*-2_5.*"),
        flip_header(f"{C}/rank_3/*-1_10.*"),
        VERIFY,
        f"verify {C} --json",
    ),
    Case(
        "one step",
        trained("1.0"),
        flip(f"{C}/rank_0/*-1_10.*"),
        f"verify {C} --step 15",
        f"verify {C} --step 10",
        f"verify {C} --step 12",
        f">>> mindresume.open('{C}').verify(step=15).damaged",
    ),
    Case(
        "records, manifests",
        trained("1.0"),
        flip(f"{C}/.mindresume/step-0000000020-*/rank_00000.json"),
        flip(f"{C}/.mindresume/step-0000000015-*/manifest.json"),
        remove(f"{C}/.mindresume/step-0000000010-*/manifest.json"),
        VERIFY,
    ),
    Case(
        "an incomplete save is no damage",
        trained("1.0"),
        remove(f"{C}/.mindresume/step-0000000020-*/*"),
        VERIFY,
    ),
    Case(
        "a link in place of the weights",
        trained("1.0"),
        remove(f"{C}/rank_0/net_rank_0-2_10.safetensors"),
        link(f"{C}/rank_0/net_rank_0-2_5.safetensors", f"{C}/rank_0/net_rank_0-2_10.safetensors"),
        VERIFY,
    ),
    Case("ckpt", trained("1.0 ckpt"), flip(f"{C}/rank_0/*-2_5.ckpt"), VERIFY),
    Case(
        "2.0",
        four("iteration"),
        VERIFY,
        flip(f"{C}/iteration_00000015/*-opt-0000002-*"),
        edit(f"{C}/iteration_00000010/common.json", step_num=9),
        VERIFY,
    ),
    Case(
        "mindformers has no checksums",
        fixture("mf190_10_safetensors_dp2tp2"),
        flip(f"{C}/rank_1/*-2_5.*"),
        VERIFY,
        truncate(f"{C}/rank_1/*-2_5.*"),
        VERIFY,
    ),
    Case(
        "mindformers 2.0",
        fixture("mf190_20_dp2tp2opt"),
        VERIFY,
        truncate(f"{C}/iteration_00000015/metadata.json"),
        VERIFY,
    ),
    Case(
        "consolidated by mindresume, its header altered",
        four(),
        f"merge {C} merged",
        "verify merged",
        flip_header("merged/part0.safetensors"),
        "verify merged",
        "which merged",
    ),
    Case(
        "consolidated by mindresume, a part missing",
        four(),
        f"merge {C} merged --part-size 200kB",
        remove("merged/part1.safetensors"),
        "verify merged",
        "ls merged",
        "which merged",
    ),
    Case("no checkpoint", VERIFY, "verify ."),
]
