"""The rest of the Python API, and of the command line."""

from tests.judge.case import Case
from tests.judge.folders import flip, four, trained

C = "output/checkpoint"
OPEN = f"mindresume.open('{C}')"
REPORT = "report REPOSITORY/st/data/recorded_training --json"

CASES = [
    Case(
        "a catalog",
        trained("1.0"),
        f">>> {OPEN}",
        f">>> (len({OPEN}), list({OPEN}), 15 in {OPEN}, '15' in {OPEN})",
        f">>> {OPEN}[12]",
        f">>> {OPEN}[15]",
        f">>> {OPEN}[15].info",
    ),
    Case("the state", trained("1.0"), f">>> {OPEN}[15].state", f">>> sorted({OPEN}[15].tensors)"),
    Case(
        "tensors of 4 ranks",
        four(),
        f">>> {OPEN}[15].tensors['decoder.layers.0.mlp.linear_fc1.weight']",
        f">>> {OPEN}[15].read('decoder.layers.0.mlp.linear_fc1.weight', region=(slice(62, 66), "
        "slice(0, 2)))",
        f">>> {OPEN}[15].read('step_num')",
        f">>> {OPEN}[15].read('nothing')",
    ),
    Case(
        "a rotted tensor is not read",
        trained("1.0"),
        flip(f"{C}/rank_0/*-2_10.*"),
        f">>> {OPEN}[20].read('scale_sense')",
        f">>> {OPEN}[20].read('dense.weight').shape",
    ),
    Case(
        "held and released",
        trained("1.0"),
        f">>> (it := {OPEN}[15], it.is_held, it.hold(), it.is_held, it.release(), it.is_held)[1:]",
        f">>> (it := mindresume.open('{C}', hold=False)[15], it.hold(), it.is_held)[1:]",
        f">>> (it := {OPEN}[15]).hold() or [use.purpose for use in {OPEN}.list().in_use_by]",
    ),
    Case("names", ">>> sorted(mindresume.__all__)", ">>> mindresume.nothing"),
    Case("report", REPORT),
    Case(
        "advise",
        "advise REPOSITORY/st/data/recorded_training",
        "advise REPOSITORY/st/data/recorded_training --json",
    ),
    Case("advise, too little measured", trained("1.0"), "advise output"),
    Case(
        "flush without memory", trained("1.0"), f"flush {C}", f"flush {C} --json", "flush nowhere"
    ),
    Case(
        "commands",
        "plugin-path",
        "nothing",
        "which",
        "which . --nothing",
        "run --max-restarts -1 -- true",
    ),
]
