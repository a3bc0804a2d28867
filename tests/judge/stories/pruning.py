"""``prune``: what is removed, and what always stays."""

from tests.judge.case import Case
from tests.judge.folders import copy, fixture, flip, four, lease, remove, trained, truncate, write

C = "output/checkpoint"
PRUNE = f"prune {C}"

CASES = [
    Case(
        "the last one",
        trained("1.0"),
        f"{PRUNE} --keep-last 1 --dry-run",
        f"{PRUNE} --keep-last 1",
        f"which {C}",
    ),
    Case(
        "every ten steps, the best",
        trained("1.0"),
        f"{PRUNE} --keep-every-steps 10 --json",
        f"{PRUNE} --keep-best 1 --metric loss --mode max",
    ),
    Case(
        "the newest is truncated, one every five minutes",
        trained("1.0"),
        truncate(f"{C}/rank_0/*-2_10.*"),
        f"{PRUNE} --keep-minutes 5",
    ),
    Case(
        "the newest is damaged, as a scrub found",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        f"scrub {C}",
        f"{PRUNE} --keep-last 1",
        f"which {C}",
    ),
    Case(
        "a save that never completed",
        trained("1.0"),
        remove(f"{C}/.mindresume/step-0000000020-*/*"),
        f"{PRUNE} --keep-last 5",
    ),
    Case(
        "a job on another host saves",
        four(),
        remove(f"{C}/.mindresume/step-0000000015-*/rank_00003.json"),
        remove(f"{C}/.mindresume/step-0000000015-*/manifest.json"),
        lease(C),
        f"{PRUNE} --keep-last 1",
    ),
    Case(
        "a removal that did not end",
        trained("1.0"),
        copy(
            f"{C}/.mindresume/step-0000000010-*",
            f"{C}/.mindresume/trash-step-0000000005-run-0001-0000abcd.0000cdef",
        ),
        f"{PRUNE} --keep-last 5",
    ),
    Case("2.0", trained("2.0"), f"{PRUNE} --keep-last 1"),
    Case(
        "2.0 with a tracker set back",
        trained("2.0"),
        write(f"{C}/latest_checkpointed_iteration.txt", "10"),
        f"{PRUNE} --keep-last 1",
    ),
    Case("of mindformers", fixture("mf190_10_safetensors_single"), f"{PRUNE} --keep-last 1"),
    Case(
        "held by this process",
        trained("1.0"),
        f">>> (it := mindresume.open('{C}')[10]).hold() or mindresume.prune('{C}', "
        "policy=mindresume.KeepLast(1))",
    ),
    Case(
        "wrong arguments",
        trained("1.0"),
        PRUNE,
        f"{PRUNE} --keep-last 0",
        f"{PRUNE} --keep-best 1 --metric speed",
        f"{PRUNE} --keep-last 1 --metric loss",
        "prune nowhere --keep-last 1",
        f"{PRUNE}/rank_0 --keep-last 1",
    ),
]
