"""``convert``: another layout, another format, or both."""
from tests.judge.case import Case
from tests.judge.folders import (
    copy,
    fixture,
    flip,
    flip_header,
    four,
    part,
    remove,
    touch_all,
    trained,
    truncate,
    write,
)

C = "output/checkpoint"
FORMATS = "mf190_10_safetensors_dp2tp2"

CASES = [
    # ---- layouts and formats, of what mindformers wrote: the bytes are the same on each machine
    Case("the same layout, and again", fixture(FORMATS), f"convert {C} new", f"diff {C} new", f"convert {C} new"),
    Case("dp2tp2 to tp4", fixture(FORMATS), f"convert {C} new --to dp=1,tp=4 --json", f"diff {C} new", "verify new"),
    Case("dp2tp2 to optimizer shards, to pipeline stages", fixture(FORMATS), f"convert {C} a --to dp=4,opt=all",
         f"convert {C} b --to dp=1,tp=1,pp=2", f"diff {C} a", "diff a b"),
    Case("dp2tp2 to one rank, ckpt", fixture(FORMATS), f"convert {C} new --to dp=1,tp=1 --format ckpt", f"diff {C} new"),
    Case("ckpt with optimizer shards to tp4", fixture("mf190_10_ckpt_dp2tp2opt"),
         f"convert {C} new --to dp=1,tp=4 --engine direct", f"diff {C} new"),
    Case("1.0 in sink mode to 2.0", fixture("mf190_10_safetensors_dp2tp2_sink2"), f"convert {C} new --format iteration",
         "which new",
         f"diff {C} new"),
    Case("2.0 to 1.0 in another layout", fixture("mf190_20_dp2tp2opt"), f"convert {C} new --to dp=2 --format safetensors",
         f"diff {C} new"),
    Case("2.0 to more ranks, 1.8.0 to one", fixture("mf190_20_single"), f"convert {C} new --to dp=2", f"diff {C} new",
         fixture("mf180_20_tp2", "old"), "convert old one --to dp=1", "diff old one"),
    Case("consolidated to ranks", part("mf190_unified_from_dp2tp2/unified_checkpoint", "merged"),
         "convert merged new --to dp=2,tp=2", part("mf190_unified_from_dp2tp2/destination_strategy", "wanted"),
         "convert merged new --to wanted", "diff merged new"),
    Case("of mindresume, with its checksums", four(), f"convert {C} new --to dp=1,tp=4 --json", f"diff {C} new"),

    # ---- which step
    Case("an older step", fixture(FORMATS), f"convert {C} new --step 10 --to dp=4", f"diff {C} new --step-a 10",
         f"convert {C} other --step 11"),
    Case("newest truncated, then all", trained("1.0"), truncate(f"{C}/rank_0/*-2_10.*"), f"convert {C} new", "which new",
         truncate(f"{C}/rank_0/*.safetensors"), f"convert {C} other"),
    Case("newest rotted, found while it is read; then by a scrub", trained("1.0"), flip(f"{C}/rank_0/*-2_10.*"),
         f"convert {C} new",
         f"scrub {C}", f"convert {C} new", f"which {C}", f"convert {C} other --step 20"),
    Case("2.0 damaged, as a scrub found", trained("2.0"), flip(f"{C}/iteration_00000020/*-opt-*"), f"scrub {C}",
         f"convert {C} new", f"which {C}"),
    Case("2.0 with a tracker set back", trained("2.0"), write(f"{C}/latest_checkpointed_iteration.txt", "15"),
         f"convert {C} new", f"which {C}", f"inspect {C}"),

    # ---- the source
    Case("without strategy files, with those of another job", fixture(FORMATS), remove("output/strategy"),
         f"convert {C} new --to dp=4",
         f"convert {C} new --from REPOSITORY/st/fixtures/strategy_dp8opt/output/strategy",
         f"convert {C} new --to dp=4 --from REPOSITORY/st/fixtures/{FORMATS}/output/strategy"),
    Case("a rank missing, with replicas", fixture(FORMATS), remove(f"{C}/rank_3"), f"convert {C} new --to dp=1,tp=4 --step 15",
         f"diff {C} new"),
    Case("a rank folder, a file", fixture(FORMATS), f"convert {C}/rank_0 new --to dp=4",
         f"convert {C}/rank_0/qwen3_rank_0-1_10.safetensors other --to dp=4"),
    Case("two trainings below", trained("1.0", "a"), trained("1.0", "b"), "convert . new"),

    # ---- the target
    Case("a dry run", fixture(FORMATS), f"convert {C} new --to dp=1,tp=4 --dry-run",
         f"convert {C} new --to dp=4 --dry-run --json"),
    Case("the target holds something else, is the source", fixture(FORMATS), write("new/notes.txt", "mine"), f"convert {C} new",
         f"convert {C} {C} --to dp=4"),
    Case("the target was altered, the source changed", fixture("mf190_20_single"), f"convert {C} new",
         flip_header("new/iteration_00000015/*-model-*"), f"convert {C} new",
         touch_all(f"{C}/iteration_00000015/*", 1_700_000_000),
         f"convert {C} new"),
    Case("left by a killed conversion", fixture("mf190_20_single"), f"convert {C} done",
         copy("done", ".new.0123456789abcdef.mindresume-tmp"), f"convert {C} new"),

    # ---- wrong arguments
    Case("plans that do not fit", fixture(FORMATS), f"convert {C} new --to dp=0", f"convert {C} new --to dp=3,tp=3",
         f"convert {C} new --to dp=1,tp=64", f"convert {C} new --to fast=2", f"convert {C} new --to nowhere"),
    Case("arguments", fixture(FORMATS), f"convert {C} new --format pickle", f"convert {C} new --engine fast",
         f"convert {C} new --workers 0", f"convert {C} new --memory-limit much", f"convert {C}", "convert nowhere new"),
    Case("the Python call", fixture(FORMATS), f">>> mindresume.convert(mindresume.open('{C}')[10], 'new', to='dp=1,tp=4')",
         f">>> mindresume.convert('{C}', 'new', to='dp=4', step=12)",
         ">>> mindresume.open('new').latest().read('step_num')"),
]
