"""``ls``, ``Catalog.list``: every saved step, complete or not, with its problems and who uses the
folder."""

from tests.judge.case import Case
from tests.judge.folders import copy, fixture, four, lease, remove, trained, truncate, write

C = "output/checkpoint"
LS = f"ls {C}"

CASES = [
    Case("complete steps", trained("1.0"), LS, f"ls {C} --json"),
    Case(
        "truncated, incomplete, uncommitted",
        trained("1.0"),
        truncate(f"{C}/rank_0/*-2_10.safetensors"),
        remove(f"{C}/.mindresume/step-0000000015-*/rank_00000.json"),
        remove(f"{C}/.mindresume/step-0000000010-*/manifest.json"),
        LS,
        ">>> [(row.step, row.state, row.problem) for row in "
        f"mindresume.open('{C}').list().checkpoints]",
    ),
    Case(
        "a save in progress of a job on another host",
        four(),
        remove(f"{C}/.mindresume/step-0000000015-*/rank_00003.json"),
        remove(f"{C}/.mindresume/step-0000000015-*/manifest.json"),
        lease(C, holds=["step-0000000015-run-0001-00000000"]),
        LS,
        f"ls {C} --json",
    ),
    Case(
        "a reader, a scrub, an unreadable lease",
        trained("1.0"),
        lease(C, "loading", "0000-0000aaaa"),
        lease(C, "scrubbing", "0000-0000bbbb"),
        write(f"{C}/.mindresume/claim-0007-0000abcd.json", "?"),
        LS,
    ),
    Case(
        "after a killed job",
        trained("killed"),
        LS,
        f">>> mindresume.open('{C}').list().in_use_by[0]",
    ),
    Case(
        "2.0 with a tracker set back and a folder that was kept",
        trained("2.0"),
        LS,
        write(f"{C}/latest_checkpointed_iteration.txt", "10"),
        copy(f"{C}/iteration_00000015", f"{C}/iteration_00000015.kept-0000abcd"),
        LS,
    ),
    Case("both formats in one folder", trained("1.0"), trained("2.0"), LS, f"which {C}"),
    Case(
        "mindformers, files missing",
        fixture("mf190_10_safetensors_dp2tp2"),
        LS,
        remove(f"{C}/rank_[12]/*-2_5.*"),
        LS,
    ),
    Case("mindformers 2.0", fixture("mf190_20_dp2tp2opt"), LS, f"ls {C} --json"),
]
