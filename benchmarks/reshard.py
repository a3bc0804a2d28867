"""Another layout: the direct engine beside MindSpore's two and beside a plain copy of the same
bytes.

    python benchmarks/reshard.py --size 1 --rounds 5            # GB of float32, from 8 ranks
    # memory stays flat
    python benchmarks/reshard.py --size 4 --rounds 1 --only direct --case "tp=8 > tp=4"
    python benchmarks/reshard.py --plan-only  # 1,024 ranks x 2,000 parameters -> 768 ranks

All candidates of a case run in every round, in changing order, each after a ``sync``, with the
sources in the page cache. Each has a process of its own, with its imports done before. In the last
round every tensor of every target is compared bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np

from mindresume.formats.parallel_plan import ParallelPlan, strategy_from_plan
from mindresume.formats.strategy import Strategy, encode_strategy
from mindresume.model.layout import TensorLayout, cuts, held
from mindresume.reshard.range_reader import view
from mindresume.tensor_files import encode

CASES = ("tp=8 > tp=4", "dp=2,tp=2,pp=2,opt=2 > tp=4", "tp=4,dp=2,opt=2 > tp=8", "tp=8 > merged")
CANDIDATES = ("copy", "direct", "transform", "unified")
ROW = TensorLayout((2,), (0, -1))
COLUMN = TensorLayout((2,), (-1, 0))
WHOLE = TensorLayout((2,), (-1,))


def model(size: float) -> dict[str, tuple[tuple[int, ...], TensorLayout, tuple[int, ...]]]:
    """{name: (shape, how tensor parallelism cuts it, ())} of a decoder with Adam moments, about
    ``size`` GB of float32."""
    hidden, vocabulary = 1024, 16000
    layers = max(round((size * 1e9 / 12 - 2 * hidden * vocabulary) / (12 * hidden * hidden)), 2)
    found: dict[str, Any] = {"embedding.weight": ((vocabulary, hidden), ROW, ())}
    for i in range(layers):
        for name, shape, layout in (
            ("qkv", (3 * hidden, hidden), ROW),
            ("proj", (hidden, hidden), COLUMN),
            ("norm", (hidden,), WHOLE),
            ("up", (4 * hidden, hidden), ROW),
            ("down", (hidden, 4 * hidden), COLUMN),
        ):
            found[f"layers.{i}.{name}.weight"] = (shape, layout, ())
    found["head.weight"] = ((vocabulary, hidden), ROW, ())
    return {
        prefix + name: row for prefix in ("", "adam_m.", "adam_v.") for name, row in found.items()
    }


@functools.cache
def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).standard_normal(shape, np.float32)


def write_source(folder: Path, strategy: Strategy, tensors: dict[str, Any]) -> None:
    for rank in range(strategy.world_size):
        layouts = strategy.of_rank(rank)
        arrays = {
            name: np.ascontiguousarray(
                view(
                    values(name, tensors[name][0]),
                    held(layout, rank % strategy.stage_size, tensors[name][0]),
                )
            )
            for name, layout in layouts.items()
        }
        path = folder / f"rank_{rank}" / f"net_rank_{rank}-1_1.safetensors"
        path.parent.mkdir(parents=True)
        with open(path, "wb") as file:
            for _, piece in encode("safetensors", arrays, {"format": "ms"}):
                file.write(piece)


def write_strategies(folder: Path, strategy: Strategy) -> tuple[str, str]:
    """(folder of rank files, merged file)"""
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    for rank in range(strategy.world_size):
        stage = rank // strategy.stage_size
        (folder / "ranks" / f"ckpt_strategy_rank_{rank}.ckpt").write_bytes(
            encode_strategy({stage: strategy.stages[stage]})
        )
    merged = folder / "merged.ckpt"
    merged.write_bytes(encode_strategy(dict(enumerate(strategy.stages))))
    return str(folder / "ranks"), str(merged)


class Child:
    def __init__(self, name: str):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "_reshard_job.py"), name],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "GLOG_v": "4"},
        )

    def do(self, task: dict[str, Any]) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed with exit status {self.process.wait()}: {task}")
        return json.loads(line)


def run_case(case: str, options: argparse.Namespace, base: Path) -> list[list[str]]:
    tensors = model(options.size)
    before, after = (text.strip() for text in case.split(">"))
    source, target = (
        None if text == "merged" else strategy_from_plan(ParallelPlan.parse(text), tensors)
        for text in (before, after)
    )
    home = base / "case"
    shutil.rmtree(home, ignore_errors=True)
    write_source(home / "source", source, tensors)
    old, merged_old = write_strategies(home / "from", source)
    new, merged_new = write_strategies(home / "to", target) if target else (None, None)
    size = sum(int(np.prod(shape)) * 4 for shape, _, _ in tensors.values())
    names = [name for name in CANDIDATES if name in options.only]
    kinds = [(name, True) for name in names] + [
        (name, False) for name in names if name in ("copy", "direct")
    ]
    children = {kind: Child(kind[0]) for kind in kinds}
    rounds, last = measure.Rounds(), {}
    for number in rounds.numbers(options.rounds):
        for name, flush in measure.shuffled(kinds, number):
            out = home / f"out-{name}-{flush}"
            for left in (out, Path(f"{out}-unified")):
                shutil.rmtree(left, ignore_errors=True)
            subprocess.run(["sync"], check=True)
            if not options.cold:
                measure.warm_memory(int(2.5 * size))
            result = children[name, flush].do(
                {
                    "source": str(home / "source"),
                    "target": str(out),
                    "from": old,
                    "to": new,
                    "merged_from": merged_old,
                    "merged_to": merged_new,
                    "flush": flush,
                    "workers": options.workers,
                }
            )
            label = _label(name, flush)
            rounds.add(label, result["seconds"])
            rounds.add(f"{label} MiB", result["anonymous"])
            last[label] = result
            if number == options.rounds and name == "direct":
                check(out, target, tensors)
    for child in children.values():
        child.process.stdin.close()
        child.process.wait()
    shutil.rmtree(home, ignore_errors=True)
    rows = []
    for name, flush in kinds:
        label = _label(name, flush)
        base_label = _label("copy", flush if name in ("copy", "direct") else False)
        read = last[label].get("read")
        rows.append(
            [
                case,
                label,
                f"{rounds.median(label):.2f}",
                f"{rounds.ratio(label, base_label):.2f}" if base_label in rounds.values else "",
                f"{rounds.ratio(label, _label('direct', True)):.1f}"
                if name in ("transform", "unified")
                else "",
                f"{rounds.ratio(label, _label('direct', False)):.1f}"
                if name in ("transform", "unified")
                else "",
                f"{max(rounds.values[label + ' MiB']):.0f}",
                f"{read / size:.3f}" if read else "",
            ]
        )
    return rows


def _label(name: str, flush: bool) -> str:
    return f"{name}, flushed" if flush and name in ("copy", "direct") else name


def check(folder: Path, strategy: Strategy | None, tensors: dict[str, Any]) -> None:
    """Every tensor of every target file, against the values it was made from."""
    from safetensors.numpy import load_file

    found: set[str] = set()
    for path in sorted(folder.rglob("*.safetensors")):
        rank = int(path.parent.name.removeprefix("rank_")) if strategy else 0
        arrays = load_file(path)
        for name, array in arrays.items():
            shape = tensors[name][0]
            expected = values(name, shape)
            if strategy:
                layout = strategy.of_rank(rank)[name]
                expected = view(expected, held(layout, rank % strategy.stage_size, shape))
            if expected.tobytes() != array.tobytes():
                raise SystemExit(f"{path}: {name} is wrong")
        found |= set(arrays)
        if strategy and set(arrays) != set(strategy.of_rank(rank)):
            raise SystemExit(f"{path}: holds other tensors than it should")
    if found != set(tensors):
        raise SystemExit(f"{folder}: {len(tensors) - len(found)} tensors are missing")


def planning() -> str:
    """Plans 1,024 source ranks x 2,000 parameters -> 768 ranks: which slice of which rank each
    target rank reads."""
    kinds = {
        "row": ((12288, 6144), (0, -1)),
        "column": ((6144, 12288), (-1, 0)),
        "norm": ((12288,), (-1,)),
        "table": ((49152, 6144), (0, -1)),
    }
    names = {
        f"layers.{i // 20}.{kind}{i}": kind
        for i, kind in zip(range(2000), (list(kinds) * 500), strict=True)
    }
    stages = {name: int(name.split(".")[1]) * 8 // 100 for name in names}

    def layouts(matrix: tuple[int, int], shards: int) -> dict[str, TensorLayout]:
        return {
            kind: TensorLayout(matrix, tensor_map, shards)
            for kind, (_, tensor_map) in kinds.items()
        }

    old, new = layouts((16, 8), 16), layouts((24, 4), 12)
    first_of = {name: stage * 128 for name, stage in stages.items()}

    def plan(rank: int) -> int:
        stage = rank // 96
        local = rank % 96
        count = 0
        for name, kind in names.items():
            if stages[name] == stage:
                shape = kinds[kind][0]
                for cut in cuts(old[kind], shape, held(new[kind], local, shape)):
                    count += first_of[name] + cut.holders[0] >= 0
        return count

    started = time.perf_counter()
    plan(0)
    one = time.perf_counter() - started
    pieces = sum(map(plan, range(768)))
    whole = time.perf_counter() - started
    return measure.table(
        [
            "ranks",
            "parameters",
            "target ranks",
            "pieces to read",
            "all ranks, s",
            "target 5",
            "one rank, ms",
            "target 50",
        ],
        [
            [
                "1024",
                "2000",
                "768",
                str(pieces),
                f"{whole:.2f}",
                "met" if whole <= 5 else "missed",
                f"{one * 1e3:.1f}",
                "met" if one <= 0.05 else "missed",
            ]
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=1.0, help="GB of float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dir", help="where the files go; default the temporary folder")
    parser.add_argument(
        "--case", action="append", help=f"one of: {'; '.join(CASES)}; or any two plans"
    )
    parser.add_argument("--only", action="append", choices=CANDIDATES)
    parser.add_argument(
        "--cold",
        action="store_true",
        help="memory as the kernel has it: its first touch can be slow",
    )
    parser.add_argument("--plan-only", action="store_true")
    options = parser.parse_args()
    options.only = options.only or list(CANDIDATES)
    if options.plan_only:
        print(planning())
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        rows = sum((run_case(case, options, Path(folder)) for case in options.case or CASES), [])
        text = measure.table(
            [
                "layouts",
                "what",
                "median s",
                "ratio to the copy",
                "times direct, flushed",
                "times direct",
                "anonymous memory MiB",
                "bytes read / needed",
            ],
            rows,
        )
        load = f"{os.getloadavg()[0]:.1f} at the end"
        print(
            f"## Another layout: {options.size:g} GB of float32 from 8 "
            f"ranks\n\n{measure.heading(folder, load)}\n{text}"
        )


if __name__ == "__main__":
    main()
