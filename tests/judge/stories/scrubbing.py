"""``scrub``: what rotted, and its repair."""

from tests.judge.case import Case
from tests.judge.folders import copy, fixture, flip, flip_header, four, remove, trained, truncate

C = "output/checkpoint"
SCRUB = f"scrub {C}"

CASES = [
    Case("intact", trained("1.0"), SCRUB, f"scrub {C} --json"),
    Case(
        "damaged, then refused without a new reading",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        SCRUB,
        f"which {C}",
        f"ls {C}",
        f"verify {C}",
        f">>> mindresume.open('{C}').steps()",
        f">>> mindresume.open('{C}').select(verify=False).chosen.step",
        SCRUB,
    ),
    Case(
        "replaced from a backup",
        trained("1.0"),
        copy(f"{C}/rank_0/*-2_10.*", "backup"),
        flip(f"{C}/rank_0/*-2_10.*"),
        SCRUB,
        remove(f"{C}/rank_0/*-2_10.*"),
        copy("backup", f"{C}/rank_0/net_rank_0-2_10.safetensors"),
        f"which {C}",
        f"ls {C}",
    ),
    Case(
        "a result that is torn says nothing",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        SCRUB,
        truncate(f"{C}/.mindresume/step-0000000020-*/scrub.json"),
        f"ls {C}",
        f"which {C}",
    ),
    Case(
        "repaired from replicas",
        four(),
        flip(f"{C}/rank_2/*-2_5.*"),
        flip_header(f"{C}/rank_1/*-1_10.*"),
        SCRUB,
        f"scrub {C} --repair",
        f"verify {C}",
        f"which {C}",
    ),
    Case(
        "a missing file is repaired",
        four(),
        remove(f"{C}/rank_3"),
        f"scrub {C} --repair --json",
        f"verify {C}",
    ),
    Case(
        "both copies rotted",
        four(),
        flip(f"{C}/rank_[02]/*-2_5.*"),
        f"scrub {C} --repair",
        f"which {C}",
    ),
    Case(
        "2.0 repaired",
        four("iteration"),
        flip(f"{C}/iteration_00000015/*-model-0000001-*"),
        f"scrub {C} --repair",
        f"verify {C}",
    ),
    Case(
        "a record rotted",
        trained("1.0"),
        flip(f"{C}/.mindresume/step-0000000015-*/rank_00000.json"),
        SCRUB,
        f"scrub {C} --repair",
    ),
    Case(
        "one step, or those of an age",
        trained("1.0"),
        f"scrub {C} --step 15",
        f"scrub {C} --older-than 24",
        f"scrub {C} --step 11",
        "scrub nowhere",
    ),
    Case("mindformers has no checksums", fixture("mf190_20_single"), SCRUB),
    Case(
        "repaired from a bucket that has nothing",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        f"scrub {C} --repair --remote file:///nowhere/else",
    ),
]
