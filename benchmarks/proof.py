"""What the proof of a resume costs: the step ledger in each step, the comparison of the weights at
a start.

    python benchmarks/proof.py [--only row|weights|steps|start] [--rounds 20] [--mib 512]
    [--block 100] [--dir FOLDER] [--json FILE]

row      StepLedger.add, target 20 us, beside a pwrite of as many bytes; what SeenValues takes of a
         step: numbers of the loss monitor, batches of several sizes (four tensors of int32, as the
         quickstart has), beside MindSpore's asnumpy of them and xxh3 of the bytes that are hashed
weights  LoadedWeights at the load and at the first step, with `proof: full` and `sample`, of --mib
         in live MindSpore parameters, half float32, half bfloat16, beside xxh3 of the same bytes
steps    the quickstart's training on the real Trainer: of each two steps one, drawn at random, has
         no ledger (_proof_job.py); a round is --block steps of each kind; target 0.5 % of a step.
         "own" is the time in mindresume's callback and in what the loss monitor hands over: its
         difference is the cost without the noise of the step. Medians of the rounds
start    the same training with 300 MiB of weights and moments is resumed with `proof: off`,
         `sample` and `full`, in changing order; target 2 % of a start; at most 5 rounds
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import _measure as measure
import numpy as np
import xxhash

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindresume.mindformers.network_state import LoadedWeights  # noqa: E402
from mindresume.mindformers.step_proof import SeenValues  # noqa: E402
from mindresume.resume.step_ledger import LedgerRun, StepLedger, StepRow, encode_row  # noqa: E402
from st.training_run import Run  # noqa: E402

TARGET_ROW, TARGET_STEP, TARGET_START = 20e-6, 0.005, 0.02
JOB = ROOT / "benchmarks" / "_proof_job.py"
# of a function, in a round of "row": so few calls are timed at once that other work on the machine
# seldom falls into them
GROUPS, CALLS = 100, 10
BATCHES = ((8, 32), (1, 4096), (8, 8192))
NO_SAVE = "--callbacks.1.save_checkpoint_steps 1000000"
LARGER = " ".join(
    f"--model.model_config.{key} {value}"
    for key, value in {"hidden_size": 1024, "head_dim": 256, "intermediate_size": 2816}.items()
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--block", type=int, default=100)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-proof-", dir=options.dir)
    everything, texts = measure.Rounds(), []
    try:
        for name in options.only or PARTS:
            rounds, text = PARTS[name](Path(folder) / name, options)
            texts.append(text)
            everything.values |= {f"{name}: {key}": row for key, row in rounds.values.items()}
            everything.loads += rounds.loads
        measure.finish("The proof of a resume", folder, everything, "\n".join(texts), options.json)
    finally:
        shutil.rmtree(folder)


def percent(share: float) -> str:
    return f"{100 * share:.3f} %"


# ---- one row -------------------------------------------------------------------------------------


def measure_row(folder: Path, options: argparse.Namespace) -> tuple[measure.Rounds, str]:
    import mindspore as ms

    folder.mkdir()
    ledger = StepLedger(str(folder / "ours.steps"), LedgerRun("0001-00000000"))
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    row = StepRow(1201, 3, 307456, 0x5E1A77BD, 1e-4, 1.0, 2.1875)
    encoded, seen = encode_row(row), SeenValues()
    numbers = {
        "loss": np.float32(2.1875),
        "loss_scale": np.ones(1, np.float32),
        "learning_rate": np.array(1e-4, np.float32),
    }

    def batch_of(tensors: list[Any]) -> None:
        seen.batch(tensors)
        seen.clear()

    def numpy_of(tensors: list[Any]) -> None:
        for tensor in tensors:
            tensor.asnumpy()

    def finish(tensors: Iterable[Any] = ()) -> None:
        seen.batch(tensors)
        seen.monitor(**numbers)
        ledger.add(seen.row(1201, 3, 307456))

    works: dict[str, Callable[[], Any]] = {
        f"pwrite of {len(encoded)} bytes": lambda: os.pwrite(plain, encoded, 4096),
        f"xxh3 of {len(encoded)} bytes": lambda: xxhash.xxh3_64_digest(encoded),
        "StepLedger.add": lambda: ledger.add(row),
        "numbers of the loss monitor, and StepLedger.add": finish,
    }
    base = {name: f"pwrite of {len(encoded)} bytes" for name in works}
    for samples, tokens in BATCHES:
        arrays = [
            np.random.default_rng(kind).integers(0, 512, (samples, tokens), np.int32)
            for kind in range(4)
        ]
        tensors, size = [ms.Tensor(array) for array in arrays], sum(it.nbytes for it in arrays)
        what = f"4 x {samples} x {tokens} ({size / 1024:.0f} KiB)"
        edges = b"".join(edge.tobytes() for array in arrays for edge in edges_of(array))
        works |= {
            f"xxh3 of what is hashed, {what}": partial(xxhash.xxh3_64_intdigest, edges),
            f"asnumpy, {what}": partial(numpy_of, tensors),
            f"SeenValues.batch, {what}": partial(batch_of, tensors),
            f"all of a step: batch, numbers, row, {what}": partial(finish, tensors),
        }
        base |= {
            f"{name}, {what}": f"asnumpy, {what}"
            for name in (
                "xxh3 of what is hashed",
                "asnumpy",
                "SeenValues.batch",
                "all of a step: batch, numbers, row",
            )
        }
    rounds = measure.Rounds()
    for number in rounds.numbers(options.rounds):
        for name in measure.shuffled(list(works), number):
            rounds.add(name, seconds_of(works[name]))
    ledger.close()
    os.close(plain)
    rows = [
        [
            name,
            f"{1e6 * rounds.median(name):.1f}",
            f"{1e6 * min(rounds.values[name]):.1f} to {1e6 * max(rounds.values[name]):.1f}",
            f"{rounds.ratio(name, base[name]):.1f}",
            target(rounds.median(name) <= TARGET_ROW) if "add" in name else "",
        ]
        for name in works
    ]
    columns = ["what", "median us", "us, of the rounds", "ratio to its base", "target 20 us"]
    return rounds, f"A row, {GROUPS * CALLS} calls a round:\n\n{measure.table(columns, rows)}"


def seconds_of(work: Callable[[], Any]) -> float:
    """Returns the seconds of a call: the median of the groups."""
    found = []
    for _ in range(GROUPS):
        started = time.perf_counter()
        for _ in range(CALLS):
            work()
        found.append((time.perf_counter() - started) / CALLS)
    return statistics.median(found)


def edges_of(array: np.ndarray) -> Iterable[np.ndarray]:
    """Returns the parts of a tensor of a batch that are hashed."""
    from mindresume.mindformers.step_proof import _EDGE

    flat = array.reshape(-1)
    count = _EDGE // flat.itemsize
    return [flat] if flat.nbytes <= 2 * _EDGE else [flat[:count], flat[-count:]]


def target(met: bool) -> str:
    return "met" if met else "missed"


# ---- the weights ---------------------------------------------------------------------------------


def measure_weights(folder: Path, options: argparse.Namespace) -> tuple[measure.Rounds, str]:
    arrays = measure.arrays(options.mib)
    live = measure.parameters(arrays)
    size, rounds = measure.size_of(arrays), measure.Rounds()
    works: dict[str, Callable[[], Any]] = {
        "xxh3 of all bytes": lambda: [
            xxhash.xxh3_64_digest(array.reshape(-1).view("u1")) for array in arrays.values()
        ]
    }

    def compare(loaded: LoadedWeights) -> None:
        if loaded.difference(live, []):
            raise SystemExit("the same weights are reported as others")

    for proof in ("full", "sample"):
        works[f"{proof}, at the load"] = partial(LoadedWeights.of, arrays, proof)
        works[f"{proof}, at the first step"] = partial(compare, LoadedWeights.of(arrays, proof))
    for number in rounds.numbers(options.rounds):
        for name in measure.shuffled(list(works), number):
            rounds.timed(name, works[name])
    rows = [
        [
            name,
            f"{1e3 * rounds.median(name):.2f}",
            f"{rounds.ratio(name, 'xxh3 of all bytes'):.3f}",
            rounds.spread(name, "xxh3 of all bytes"),
        ]
        for name in works
    ]
    columns = ["what", "median ms", "ratio to xxh3", "ratios of the rounds"]
    return rounds, (
        f"The weights, {size / 2**20:.0f} MiB in {len(arrays)} tensors:\n\n"
        f"{measure.table(columns, rows)}"
    )


# ---- a training ----------------------------------------------------------------------------------


def make_data(folder: Path) -> Path:
    data = folder / "data"
    subprocess.run(
        [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(data)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return data


def measure_steps(folder: Path, options: argparse.Namespace) -> tuple[measure.Rounds, str]:
    folder.mkdir()
    # the last step of each epoch is not measured, one round warms up; and a reserve
    epochs = (2 * options.block * (options.rounds + 1)) // 8 + 5
    run = Run(
        folder / "run",
        "quickstart_qwen3.yaml",
        make_data(folder),
        program=JOB,
        options=f"--runner_config.epochs {epochs} {NO_SAVE}",
    )
    lines, rounds = folder / "steps.jsonl", measure.Rounds()
    run.start(PROOF_STEPS=str(lines))
    done: dict[bool, list[dict[str, float]]] = {}
    try:
        for number in rounds.numbers(options.rounds):
            while True:
                done = blocks(lines, number, options.block)
                if min(map(len, done.values())) == options.block:
                    break
                if run.process.poll() is not None:
                    raise SystemExit(f"{run.folder}: the training ended:\n{run.log()[-3000:]}")
                time.sleep(0.5)
            for ledger, name in ((True, "with"), (False, "without")):
                for what in ("step", "own", "step, CPU", "own, CPU"):
                    rounds.add(
                        f"{name}: {what}", statistics.median(line[what] for line in done[ledger])
                    )
    finally:
        run.kill()
    return rounds, steps_text(rounds, options)


def blocks(path: Path, number: int, size: int) -> dict[bool, list[dict[str, float]]]:
    """Returns the steps of a round, with and without the ledger."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {
        ledger: [line for line in lines if line["ledger"] == ledger][
            number * size : (number + 1) * size
        ]
        for ledger in (True, False)
    }


def steps_text(rounds: measure.Rounds, options: argparse.Namespace) -> str:
    rows = []
    for kind in ("", ", CPU"):
        base = rounds.values[f"without: step{kind}"]
        for what, name in (("step", "a step"), ("own", "of it mindresume's own")):
            on, off = f"with: {what}{kind}", f"without: {what}{kind}"
            growths = [
                (ours - other) / step
                for ours, other, step in zip(
                    rounds.values[on], rounds.values[off], base, strict=True
                )
            ]
            growth = statistics.median(growths)
            rows.append(
                [
                    name + (" (CPU time)" if kind else ""),
                    f"{1e3 * rounds.median(off):.3f}",
                    f"{1e3 * rounds.median(on):.3f}",
                    percent(growth),
                    f"{percent(min(growths))} to {percent(max(growths))}",
                    target(growth <= TARGET_STEP) if what == "own" else "",
                ]
            )
    columns = [
        "what",
        "without, ms",
        "with, ms",
        "growth, of a step",
        "of the rounds",
        "target 0.5 %",
    ]
    count = 2 * options.block * options.rounds
    return (
        f"{count} steps of the quickstart, growth of the medians:\n\n{measure.table(columns, rows)}"
    )


WAYS = ("off", "sample", "full")


def measure_start(folder: Path, options: argparse.Namespace) -> tuple[measure.Rounds, str]:
    folder.mkdir()
    data, graphs = make_data(folder), folder / "graphs"
    first = Run(
        folder / "first",
        "quickstart_qwen3.yaml",
        data,
        program=JOB,
        options=LARGER,
        graphs=graphs,
    )
    first.start().wait_for_success()
    # the oldest one that was kept is resumed
    for path in sorted((first.checkpoints / ".mindresume").glob("step-*"))[1:]:
        shutil.rmtree(path)
    rounds = measure.Rounds()
    for number in rounds.numbers(min(options.rounds, 5)):
        for name in measure.shuffled(list(WAYS), number):
            run = first.like(folder / f"{number}-{name}")
            shutil.copytree(first.checkpoints, run.checkpoints)
            found = run.folder / "start.json"
            run.start(PROOF_START=str(found), MINDRESUME_PROOF=name).wait()
            if not found.exists():
                raise SystemExit(f"{run.folder}: no step was trained:\n{run.log()[-3000:]}")
            for what, value in json.loads(found.read_text(encoding="utf-8")).items():
                rounds.add(f"{name}: {what}", value)
            shutil.rmtree(run.folder)
    return rounds, start_text(rounds)


def start_text(rounds: measure.Rounds) -> str:
    rows = []
    for name in WAYS:
        both = [
            sum(pair)
            for pair in zip(
                rounds.values[f"{name}: load"], rounds.values[f"{name}: first step"], strict=True
            )
        ]
        starts = rounds.values[f"{name}: start"]
        share = statistics.median(own / start for own, start in zip(both, starts, strict=True))
        rows.append(
            [
                name,
                f"{rounds.median(f'{name}: tensors'):.0f}",
                f"{rounds.median(f'{name}: compared_bytes') / 2**20:.1f}",
                f"{1e3 * rounds.median(f'{name}: load'):.1f}",
                f"{1e3 * rounds.median(f'{name}: first step'):.1f}",
                percent(share),
                target(share <= TARGET_START),
                f"{rounds.median(f'{name}: start'):.2f}",
                rounds.spread(f"{name}: start", "off: start"),
            ]
        )
    columns = [
        "proof",
        "tensors",
        "compared, MiB",
        "at the load, ms",
        "at the first step, ms",
        "share of the start",
        "target 2 %",
        "start, s",
        "ratios to off, of the rounds",
    ]
    return f"Starts:\n\n{measure.table(columns, rows)}"


PARTS = {
    "row": measure_row,
    "weights": measure_weights,
    "steps": measure_steps,
    "start": measure_start,
}


if __name__ == "__main__":
    main()
