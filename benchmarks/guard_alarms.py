"""The rule for spikes of the guard: alarms about normal losses, and which spikes it finds.

    python benchmarks/guard_alarms.py [--factors 5 10 20] [--window 128] [--min-steps 32]
                                      [--steps 100000] [--seed 1] [--json FILE]
    python benchmarks/guard_alarms.py --record [NAME ...] [--dir FOLDER]

``--record`` trains each configuration of RECORDED with the real Trainer on the CPU cluster of st/
and writes the loss and the norm of the gradients of each step to guard_curves.json beside this
file, which is kept: about 20 minutes on two cores. Without it, these curves and synthetic ones are
judged. Synthetic losses fall from 10 to 2 as a power of the step, in SYNTHETIC ways to vary about
that; each curve has 10,000 steps, and is a run of its own.

Printed: a table of false alarms, and of the share of spikes of each size that is found with
the middle factor: a loss 1.1 to 4 times as large, a norm 3 to 30 times, at 200 random steps
after the first 100; then all recorded curves, with the 90 % range of the rate (Poisson). The JSON
has each curve, and its range of alarms a million values.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mindresume.report.advice import count_range  # noqa: E402
from mindresume.saving.spike_rule import SpikeRule  # noqa: E402
from st.training_run import ONE_LAYER, Run, make_data  # noqa: E402

CURVES = Path(__file__).with_name("guard_curves.json")
LENGTH = 10_000  # steps of a synthetic curve
SPIKES = 200  # of each size, on each kind of curve
LOSSES, NORMS = (1.1, 1.3, 2.0, 4.0), (3.0, 10.0, 30.0)  # times as large

# ---- recorded curves -----------------------------------------------------------------------------

MANY = "--train_dataset.data_loader.num_samples 3600"
SHUFFLED = f"{MANY} --train_dataset.data_loader.shuffle True"
# {name: (configuration, processes, words of the command line)}
RECORDED: dict[str, tuple[str, int, str]] = {
    "80 samples, 100 epochs": ("quickstart_qwen3.yaml", 1, "--epochs 100"),
    "3,600 samples in the order of the text": ("quickstart_qwen3.yaml", 1, f"--epochs 3 {MANY}"),
    "shuffled": ("quickstart_qwen3.yaml", 1, f"--epochs 3 {SHUFFLED}"),
    "batch of 2": ("quickstart_qwen3.yaml", 1, f"--epochs 1 --batch_size 2 {SHUFFLED}"),
    "dropout": (
        "quickstart_qwen3.yaml",
        1,
        f"--epochs 3 --model.model_config.hidden_dropout 0.1 {SHUFFLED}",
    ),
    "ten times the learning rate": (
        "quickstart_qwen3.yaml",
        1,
        f"--epochs 3 --lr_schedule.learning_rate 1e-2 {SHUFFLED}",
    ),
    "float16": (
        "quickstart_qwen3.yaml",
        1,
        f"--epochs 3 --model.model_config.compute_dtype float16 {SHUFFLED}",
    ),
    "Llama": ("quickstart_llama.yaml", 1, f"--epochs 3 {SHUFFLED}"),
    "four processes": ("quickstart_qwen3_dp2tp2.yaml", 4, f"--epochs 2 {SHUFFLED}"),
}


def train(name: str, data: Path, folder: Path) -> Run:
    """Trains one configuration to its end."""
    config, workers, words = RECORDED[name]
    run = Run(
        folder, config, data, workers, legacy="llama" in config, options=f"{ONE_LAYER} {words}"
    )
    return run.start("--callbacks.1.save_checkpoint_steps 100000").wait_for_success(3600)


def record(names: Sequence[str], folder: Path) -> None:
    """Trains them, and writes their curves beside those that are there."""
    data = folder / "data"
    make_data(data, "--samples", "3600")
    curves = json.loads(CURVES.read_text(encoding="utf-8")) if CURVES.exists() else {}
    for name in names or RECORDED:
        rows = train(name, data, folder / name.replace(" ", "_").replace(",", "")).steps()
        curves[name] = {
            kind: [float(f"{row[field]:.5g}") for row in rows]
            for kind, field in (("loss", "loss"), ("norm of the gradients", "norm"))
            if rows[0][field] is not None
        }
        print(name, {kind: len(values) for kind, values in curves[name].items()}, flush=True)
        text = json.dumps({name: curves[name] for name in RECORDED if name in curves})
        CURVES.write_text(text.replace("}, ", "},\n").replace("], ", "],\n") + "\n", "utf-8")


# ---- synthetic curves ----------------------------------------------------------------------------

Draw = random.Random


def trend(step: int) -> float:
    return 2.0 + 8.0 * (1.0 + step / 50.0) ** -0.7


def student(draw: Draw, freedom: int) -> float:
    chi = sum(draw.gauss(0, 1) ** 2 for _ in range(freedom))
    return draw.gauss(0, 1) / math.sqrt(chi / freedom)


def correlated(draw: Draw) -> Iterator[float]:
    """Neighbours resemble each other: correlation 0.95."""
    value = 0.0
    while True:
        value = 0.95 * value + draw.gauss(0, 0.02)
        yield value


def each(value: Callable[[Draw, int], float]) -> Callable[[Draw], list[float]]:
    return lambda draw: [value(draw, step) for step in range(LENGTH)]


def walk(draw: Draw) -> list[float]:
    return [trend(step) + more for step, more in zip(range(LENGTH), correlated(draw), strict=False)]


SYNTHETIC: dict[str, Callable[[Draw], list[float]]] = {
    "Gauss": each(lambda draw, step: trend(step) + draw.gauss(0, 0.05)),
    "Gauss, very little": each(lambda draw, step: trend(step) + draw.gauss(0, 0.001)),
    "Gauss, correlated": walk,
    "Laplace": each(
        lambda draw, step: trend(step) + 0.05 * draw.choice((-1, 1)) * draw.expovariate(1)
    ),
    "Student, 3 degrees": each(lambda draw, step: trend(step) + 0.05 * student(draw, 3)),
    "log-normal": each(lambda draw, step: trend(step) * draw.lognormvariate(0, 0.3)),
    "flat, rounded to bfloat16": each(
        lambda draw, step: round((2.0 + draw.gauss(0, 0.004)) * 64) / 64
    ),
    "two sources, 2.0 and 3.0, in turn": each(
        lambda draw, step: 2.0 + step % 2 + draw.gauss(0, 0.05)
    ),
    "one step in 20 lies 1.0 higher": each(
        lambda draw, step: trend(step) + (draw.random() < 0.05) + draw.gauss(0, 0.05)
    ),
    "warm-up: rises from 1 to 3 in 500 steps": each(
        lambda draw, step: 1 + 2 * min(step / 500, 1) + draw.gauss(0, 0.05)
    ),
    "curriculum: each 1,000 steps 0.3 higher": each(
        lambda draw, step: trend(step) + 0.3 * (step // 1000) + draw.gauss(0, 0.05)
    ),
    "curriculum: each 1,000 steps 1.0 higher": each(
        lambda draw, step: trend(step) + 1.0 * (step // 1000) + draw.gauss(0, 0.05)
    ),
}

# ---- what the rule makes of them -----------------------------------------------------------------


def alarms(values: Sequence[float], rule: SpikeRule) -> int:
    return sum(bool(rule.judge(value)) for value in values)


def found(
    values: Sequence[float], sizes: Sequence[float], rule: SpikeRule, draw: Draw
) -> dict[float, float]:
    """Returns {size: share of spikes that are found}, each alone in its run."""
    counts = dict.fromkeys(sizes, 0)
    for _ in range(SPIKES):
        at, fresh = draw.randrange(100, len(values)), copy.deepcopy(rule)
        alarms(values[max(0, at - 160) : at], fresh)
        for size in sizes:
            counts[size] += bool(copy.deepcopy(fresh).judge(values[at] * size))
    return {size: count / SPIKES for size, count in counts.items()}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each curve."""
    recorded = json.loads(CURVES.read_text(encoding="utf-8"))
    curves = [
        (f"{name}: {kind}", kind == "loss", [values])
        for name, kinds in recorded.items()
        for kind, values in kinds.items()
    ]
    for name, make in SYNTHETIC.items():
        draw = Draw(f"{args.seed} {name}")
        runs = [make(draw) for _ in range(max(1, args.steps // LENGTH))]
        curves.append((f"synthetic: {name}", True, runs))
    for name, is_loss, runs in curves:
        row = {"curve": name, "steps": sum(map(len, runs)), "alarms": {}, "range": {}, "found": {}}
        for factor in args.factors:
            rule, draw = SpikeRule(args.window, factor, args.min_steps), Draw(f"{args.seed} {name}")
            count = sum(alarms(values, copy.deepcopy(rule)) for values in runs)
            row["alarms"][factor] = count
            row["range"][factor] = [
                round(end * 1e6 / row["steps"], 1) for end in count_range(count)
            ]
            row["found"][factor] = found(runs[0], LOSSES if is_loss else NORMS, rule, draw)
        yield row


def table(rows: Sequence[dict[str, Any]], factors: Sequence[float]) -> str:
    """Returns a table in Markdown, with one row for the losses and one for the norms of the
    recorded curves but the first, where the network knows its samples by heart."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name, _, kind = row["curve"].partition(": ")
        is_one = name in ("synthetic", next(iter(RECORDED)))
        groups.setdefault(
            row["curve"] if is_one else f"the other recorded ones: {kind}", []
        ).append(row)
    shown, middle = ", ".join(f"{factor:g}" for factor in factors), factors[len(factors) // 2]
    lines = [
        f"| curve | values | false alarms with `factor` {shown} | spikes found with {middle:g} |",
        "|---|---|---|---|",
    ]
    for name, group in groups.items():
        counts = ", ".join(str(sum(row["alarms"][factor] for row in group)) for factor in factors)
        values = sum(row["steps"] for row in group)
        lines.append(f"| {name} | {values:,} | {counts} | {shares(group, middle)} |")
    return "\n".join(lines)


def shares(group: Sequence[dict[str, Any]], factor: float) -> str:
    """Returns the share of spikes of each size that is found, or the least and the largest of
    several curves."""
    words = []
    for size in group[0]["found"][factor]:
        found_in = [row["found"][factor][size] for row in group]
        low, high = (f"{share:.0%}" for share in (min(found_in), max(found_in)))
        words.append(f"×{size:g}: {low if low == high else f'{low} to {high}'}")
    return "; ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--factors", type=float, nargs="+", default=[5, 10, 20])
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--min-steps", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100_000, help="of each synthetic kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", nargs="*", metavar="NAME", choices=[*RECORDED])
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    if args.record is not None:
        with tempfile.TemporaryDirectory() as folder:
            record(args.record, args.dir or Path(folder))
        return
    rows = []
    for row in measure(args):
        rows.append(row)
        print(row["curve"], row["alarms"], file=sys.stderr, flush=True)
    print(table(rows, args.factors))
    real = [row for row in rows if not row["curve"].startswith("synthetic")]
    for factor in args.factors:
        count, steps = (sum(row["alarms"][factor] for row in real), sum(r["steps"] for r in real))
        low, high = (end / steps for end in count_range(count))
        print(f"factor {factor:g}: {count} false alarms in {steps:,} recorded values", end="")
        print(f", {low:.1e} to {high:.1e} a value")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
