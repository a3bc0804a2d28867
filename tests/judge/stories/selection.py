"""Which checkpoint a resume would take, and why nothing newer: one process that answers for all
ranks."""

from tests.judge.case import Case
from tests.judge.folders import (
    copy,
    edit,
    empty,
    fixture,
    flip,
    flip_header,
    folder_at,
    four,
    link,
    move,
    part,
    remove,
    touch_all,
    trained,
    truncate,
    unname,
    write,
)

C = "output/checkpoint"
WHICH = f"which {C}"
# of the training "1.0": steps 10, 15, 20
NEWEST = f"{C}/rank_0/net_rank_0-2_10.safetensors"
SECOND = f"{C}/rank_0/net_rank_0-2_5.safetensors"
RECORDS = f"{C}/.mindresume/step-0000000020-*"
TRACKER = f"{C}/latest_checkpointed_iteration.txt"
STEP_20 = f"{C}/iteration_00000020"
SELECT = f"mindresume.open('{C}').select"

CASES = [
    # ---- of mindresume, rank folders
    Case(
        "newest",
        trained("1.0"),
        WHICH,
        f"which {C} --json",
        f">>> mindresume.open('{C}').steps()",
        f">>> mindresume.open('{C}').latest().step",
    ),
    Case(
        "weights truncated, emptied, removed",
        trained("1.0"),
        truncate(NEWEST),
        WHICH,
        empty(NEWEST),
        WHICH,
        remove(NEWEST),
        WHICH,
    ),
    Case(
        "bits flipped",
        trained("1.0"),
        flip(NEWEST),
        flip_header(SECOND),
        WHICH,
        f">>> mindresume.open('{C}').steps()",
        f">>> {SELECT}(verify=False).chosen.step",
    ),
    Case(
        "record removed, then the manifest too",
        trained("1.0"),
        remove(f"{RECORDS}/rank_00000.json"),
        WHICH,
        remove(RECORDS),
        WHICH,
    ),
    Case(
        "manifest truncated, removed",
        trained("1.0"),
        truncate(f"{RECORDS}/manifest.json"),
        WHICH,
        remove(f"{RECORDS}/manifest.json"),
        WHICH,
        f">>> {SELECT}().chosen.committed",
    ),
    Case("a record rotted", trained("1.0"), flip(f"{RECORDS}/rank_00000.json"), WHICH),
    Case(
        "all damaged", trained("1.0"), flip(f"{C}/rank_0/*.safetensors"), WHICH, f"which {C} --json"
    ),
    Case(
        "meta.json does not count",
        trained("1.0"),
        edit(
            f"{C}/rank_0/meta.json",
            last_epoch=1,
            last_step=10,
            last_ckpt_file="net_rank_0-1_10.safetensors",
        ),
        WHICH,
        remove(f"{C}/rank_0/meta.json"),
        WHICH,
    ),
    Case(
        "what is no save yet",
        trained("1.0"),
        copy(NEWEST, f"{C}/rank_0/.net_rank_0-3_5.safetensors.0001-0000abcd.mindresume-tmp"),
        copy(NEWEST, f"{C}/rank_0/net_rank_0-3_5.safetensors"),
        WHICH,
    ),
    Case("ckpt", trained("1.0 ckpt"), WHICH, truncate(f"{C}/rank_0/*-2_10.ckpt"), WHICH),
    Case(
        "one by name",
        trained("1.0"),
        f">>> {SELECT}(name='net_rank_0-2_5.safetensors').description",
        f">>> {SELECT}(name='net_rank_0-9_9').error",
        flip(SECOND),
        f">>> {SELECT}(name='net_rank_0-2_5')",
    ),
    # ---- where the path leads
    Case(
        "above, below, a link",
        trained("1.0"),
        link(C, "linked"),
        "which output",
        "which .",
        f"which {C}/rank_0",
        f"which {NEWEST}",
        "which linked",
    ),
    Case(
        "no folder, an empty one, something else",
        WHICH,
        f">>> mindresume.open('{C}')",
        f">>> mindresume.open('{C}', missing_ok=True).steps()",
        folder_at(C),
        WHICH,
        write(f"{C}/README.txt", "notes"),
        WHICH,
    ),
    Case(
        "leftovers of a first start",
        trained("1.0"),
        remove(f"{C}/rank_0/*"),
        remove(f"{C}/.mindresume/step-*"),
        WHICH,
    ),
    Case(
        "copied, without and with its records",
        trained("1.0"),
        copy(f"{C}/rank_0", "copied/rank_0"),
        "which copied",
        copy(f"{C}/.mindresume", "copied/.mindresume"),
        "which copied",
    ),
    # ---- several ranks
    Case("four ranks", four(), WHICH, f"which {C} --world-size 8"),
    Case(
        "four ranks, a file damaged and a record missing",
        four(),
        flip(f"{C}/rank_2/*-2_5.safetensors"),
        remove(f"{C}/.mindresume/step-0000000010-*/rank_00003.json"),
        WHICH,
    ),
    Case(
        "four ranks, a folder lost that has replicas, then these too",
        four(),
        remove(f"{C}/rank_3"),
        WHICH,
        remove(f"{C}/rank_1"),
        WHICH,
    ),
    Case(
        "four ranks, all records and one folder lost",
        four(),
        remove(f"{C}/.mindresume"),
        remove(f"{C}/rank_3"),
        WHICH,
    ),
    # ---- of mindresume, iteration folders
    Case(
        "2.0 newest, one folder",
        trained("2.0"),
        WHICH,
        f"which {C} --json",
        f"which {C}/iteration_00000015",
    ),
    Case(
        "2.0 common.json altered, missing",
        trained("2.0"),
        edit(f"{STEP_20}/common.json", step_num=7),
        WHICH,
        remove(f"{STEP_20}/common.json"),
        WHICH,
    ),
    Case(
        "2.0 metadata.json truncated, other ranks",
        four("iteration"),
        truncate(f"{C}/iteration_00000015/metadata.json"),
        WHICH,
        f"which {C} --world-size 2",
    ),
    Case(
        "2.0 manifest missing, then the records too",
        trained("2.0"),
        remove(f"{STEP_20}/.mindresume/*/manifest.json"),
        WHICH,
        remove(f"{STEP_20}/.mindresume"),
        WHICH,
    ),
    Case(
        "2.0 trackers",
        trained("2.0"),
        write(TRACKER, "15"),
        WHICH,
        write(TRACKER, "many"),
        WHICH,
        write(TRACKER, "99"),
        WHICH,
        remove(TRACKER),
        WHICH,
    ),
    Case("2.0 committed under its hidden name", trained("2.0"), unname(20), WHICH),
    # ---- of mindformers
    Case(
        "mindformers ckpt",
        fixture("mf190_10_ckpt_dp2tp2opt"),
        WHICH,
        fixture("mf180_10_ckpt_tp2", "old"),
        "which old",
    ),
    Case(
        "mindformers without redundancy",
        fixture("mf190_10_safetensors_dp2tp2_nodup"),
        WHICH,
        f"which {C} --world-size 8",
    ),
    Case(
        "mindformers, a file missing, one truncated",
        fixture("mf190_10_safetensors_dp2tp2"),
        remove(f"{C}/rank_1/*-2_5.*"),
        WHICH,
        truncate(f"{C}/rank_3/*-2_5.*"),
        WHICH,
    ),
    Case(
        "mindformers, the step in the file counts, a suffix is newer",
        fixture("mf190_10_safetensors_single"),
        move(
            f"{C}/rank_0/qwen3_rank_0-1_5.safetensors", f"{C}/rank_0/qwen3_rank_0-9_9.safetensors"
        ),
        WHICH,
        move(
            f"{C}/rank_0/qwen3_rank_0-9_9.safetensors", f"{C}/rank_0/qwen3_rank_0_1-1_5.safetensors"
        ),
        WHICH,
    ),
    Case(
        "mindformers, two prefixes",
        fixture("mf190_10_safetensors_single"),
        touch_all(f"{C}/rank_0/*", 1_700_000_000),
        move(
            f"{C}/rank_0/qwen3_rank_0-1_5.safetensors", f"{C}/rank_0/other_rank_0-1_5.safetensors"
        ),
        touch_all(f"{C}/rank_0/other_*", 1_700_000_100),
        WHICH,
    ),
    Case(
        "mindformers beside mindresume",
        trained("1.0"),
        part(
            "mf190_10_safetensors_single/output/checkpoint/rank_0/qwen3_rank_0-2_5.safetensors",
            f"{C}/rank_0/net_rank_0_9-9_9.safetensors",
        ),
        WHICH,
    ),
    Case(
        "mindformers 2.0",
        fixture("mf190_20_dp2tp2opt"),
        WHICH,
        f"which {C} --world-size 2",
        remove(f"{C}/iteration_00000015/metadata.json"),
        WHICH,
        truncate(f"{C}/iteration_00000010/qwen3-model-*"),
        WHICH,
    ),
    Case(
        "consolidated by mindformers",
        part("mf190_unified_from_dp2tp2/unified_checkpoint", "merged"),
        "which merged",
    ),
]
