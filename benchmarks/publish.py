"""What it costs a training to publish its weights while it goes on.

    python benchmarks/publish.py [--rounds 3] [--epochs 20] [--every 20] [--hidden 1024]
    [--dir FOLDER] [--json FILE]

One process of the real Trainer saves each --every steps of 8 samples (10 steps an epoch), first
with `publish` off, then on, in changing order; the process that publishes has the same cores.
"step" is the median of the steps without a save, "all steps" the time from the fifth step to the
last one, "end" from there to the end of the training, which waits for the last publication.
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import _measure as measure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from st.run_attempts import events  # noqa: E402
from st.training_run import Run  # noqa: E402

FIRST = 5  # steps before it are not measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="bench-publish-", dir=options.dir)
    rounds = measure.Rounds()
    try:
        data = Path(folder) / "data"
        command = [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(data)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for number in rounds.numbers(options.rounds):
            kinds = [
                partial(train, Path(folder), data, rounds, options, on) for on in (False, True)
            ]
            for work in measure.shuffled(kinds, number):
                work()
        measure.finish("Publishing weights", folder, rounds, text_of(rounds, options), options.json)
    finally:
        shutil.rmtree(folder)


def train(
    folder: Path, data: Path, rounds: measure.Rounds, options: argparse.Namespace, on: bool
) -> None:
    """Trains once, with or without publishing."""
    name = "with" if on else "without"
    sizes = {
        "hidden_size": options.hidden,
        "head_dim": options.hidden // 4,
        "intermediate_size": 11 * options.hidden // 4,
    }
    words = [f"--model.model_config.{key} {value}" for key, value in sizes.items()]
    run = Run(
        folder / name,
        "quickstart_qwen3.yaml",
        data,
        options=" ".join(
            [
                *words,
                f"--runner_config.epochs {options.epochs}",
                f"--callbacks.1.save_checkpoint_steps {options.every}",
            ]
        ),
        graphs=folder / "graphs",
    )
    run.folder.mkdir()
    document = {
        "model_type": "qwen3",
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        **sizes,
    }
    config = run.folder / "config.json"
    config.write_text(json.dumps(document), encoding="utf-8")
    settings = {"EVERY_STEPS": options.every, "DIR": run.folder / "weights", "CONFIG": config}
    given = {f"MINDRESUME_PUBLISH_{key}": str(value) for key, value in settings.items()}
    run.start(**(given if on else {})).wait_for_success(3600.0)
    times = {row["step"]: row["time"] for row in run.steps()}
    saves = {row["step"] for row in events(run, "save_committed")}
    plain = [
        times[step] - times[step - 1]
        for step in times
        if step > FIRST and step - 1 not in saves and step not in saves
    ]
    ended = next(row["time"] for row in events(run, "training_ended"))
    rounds.add(f"{name}: step", statistics.median(plain))
    rounds.add(f"{name}: all steps", times[max(times)] - times[FIRST])
    rounds.add(f"{name}: end", ended - times[max(times)])
    if on:
        words = ["export-hf", run.checkpoints, run.folder / "again", "--config", config]
        export = [sys.executable, "-m", "mindresume", *map(str, words)]
        usage = os.wait4(subprocess.Popen(export, stdout=subprocess.DEVNULL).pid, 0)[2]
        rounds.add("memory", usage.ru_maxrss / 2**10)
        done = events(run, "weights_published")
        rounds.add("publications", len(done))
        rounds.add("seconds", statistics.median(row["seconds"] for row in done))
        rounds.add("MiB", done[0]["size_bytes"] / 2**20)
    shutil.rmtree(run.folder)


def text_of(rounds: measure.Rounds, options: argparse.Namespace) -> str:
    rows: list[Sequence[str]] = []
    for what in ("step", "all steps", "end"):
        with_, without = rounds.median(f"with: {what}"), rounds.median(f"without: {what}")
        rows.append([what, f"{without:.3f}", f"{with_:.3f}", f"{with_ - without:+.3f}"])
    names = ("publications", "seconds", "MiB", "memory")
    count, seconds, size, memory = map(rounds.median, names)
    return (
        f"{10 * options.epochs} steps, a save each {options.every} steps; {count:.0f} publications "
        f"of {size:.0f} MiB, {seconds:.2f} s each; memory of an export: {memory:.0f} MiB; "
        f"{os.cpu_count()} cores\n\n" + measure.table(["seconds", "off", "on", "difference"], rows)
    )


if __name__ == "__main__":
    main()
