"""Resumes of the real Trainer at random moments: does the proof of a resume ever say that one
differs, although none does?

    python benchmarks/false_alarms.py [--resumes 300] [--seed 1] [--kinds NAME ...] [--minutes M]
                                      [--dir FOLDER] [--json FILE]

Each kind is a training of a tiny Qwen3 on the CPU cluster of st/, which is killed (SIGKILL some
milliseconds after a random step) or stopped (SIGTERM) again and again, and started by the same
command, or by one with other settings of its kind. After its last step a new training begins. The
kinds take turns; a start takes 2 to 3 seconds.

Printed for each kind: resumes, those with steps that were trained again, these steps, those where
the loss was compared, the largest difference of a loss, and resumes that differ. Each of these, and
each attempt that ended in another way than it should, is printed with its folder, which is kept.
Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks._resume_host import recorded  # noqa: E402
from st.layout_runs import Layout  # noqa: E402
from st.pynative_run import PynativeRun  # noqa: E402
from st.training_run import FORMAT_2, make_data  # noqa: E402

EPOCHS = 6  # of 10 steps of 8 samples
TINY = (
    "--model.model_config.num_hidden_layers 1 --model.model_config.hidden_size 64 "
    "--model.model_config.head_dim 16 --model.model_config.intermediate_size 128 "
    f"--epochs {EPOCHS} --callbacks.1.keep_checkpoint_max 2"
)
ENDS = (-signal.SIGKILL, 0, 128 + signal.SIGTERM)  # exit statuses that are right

Draw = random.Random
# words of a command line for an attempt: those that the graph depends on, and the others
Words = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind of trainings.

    Attributes:
        words: draws the words of an attempt; for PyNative, changes of the configuration as JSON.
        ranks: of an attempt, from its words.
        every: a save each so many steps, drawn for a training.
        caches: compiled graphs can be used again.
        is_small: of the network of tests/judge, 20 numbers: a start takes a second.
    """

    words: Callable[[Draw], Words]
    ranks: Callable[[str], int] = lambda graph: 1
    every: Sequence[int] = (4, 6, 9)
    caches: bool = True
    is_pynative: bool = False
    is_small: bool = False


def fixed(graph: str = "", others: str = "") -> Callable[[Draw], Words]:
    return lambda draw: (graph, others)


def drawn(*choices: Words, stay: float = 0.0) -> Callable[[Draw], Words]:
    """Each attempt has one of these. ``stay``: how often it has the first one."""
    return lambda draw: choices[0] if draw.random() < stay else draw.choice(choices)


SAFE = "--load_ckpt_format safetensors --callbacks.1.checkpoint_format safetensors"
CKPT = "--load_ckpt_format ckpt --callbacks.1.checkpoint_format ckpt"
THREAD, PROCESS = (f"--callbacks.1.async_save {how}" for how in ("thread", "process"))
ONE, DP2, TP2 = (Layout(*size).options for size in ((1, 1), (2, 1), (1, 2)))
OTHER_LAYOUT = "--auto_trans_ckpt True"
SECOND = "--train_dataset {second} --num_samples 120 --ignore_data_skip True"
SILENT = "--train_dataset {second} --num_samples 120"


def two_if_parallel(graph: str) -> int:
    return 2 if "--use_parallel True" in graph else 1


def small(*layouts: str, **changes: Any) -> Callable[[Draw], Words]:
    """Each attempt of a training of tests/judge saves in one of three ways, and has one of these
    layouts, as "2 1": two ranks, tensor parallelism of one. ``changes``: of the configuration."""

    def words(draw: Draw) -> Words:
        how = {"monitor.async_save": draw.choice([False, "thread", "process"])}
        return draw.choice(layouts or ("1 1",)), json.dumps({**how, **changes})

    return words


def micro(size: int, **more: Any) -> Words:
    return json.dumps({"training.local_batch_size": size, **more}), ""


ITERATIONS = {"use_legacy_format": False, "monitor.use_legacy_format": False}
CONVERTS = {"auto_trans_ckpt": True}
SMALL: dict[str, Kind] = {
    "safetensors": Kind(small()),
    "ckpt": Kind(small(**{"load_ckpt_format": "ckpt", "monitor.checkpoint_format": "ckpt"})),
    "Checkpoint 2.0": Kind(small(**ITERATIONS)),
    "memory tier": Kind(small(**{"mindresume.memory_tier.every_steps": 1})),
    "sinks of 1": Kind(small(**{"runner_config.sink_mode": True})),
    "sinks of 5": Kind(
        small(**{"runner_config.sink_mode": True, "runner_config.sink_size": 5}), every=(5, 10)
    ),
    "two ranks, data parallel": Kind(small("2 1")),
    "two ranks, tensor parallel": Kind(small("2 2")),
    "layouts change": Kind(small("1 1", "2 1", "2 2", **CONVERTS)),
    "layouts change, Checkpoint 2.0": Kind(small("1 1", "2 1", "2 2", **CONVERTS, **ITERATIONS)),
}

KINDS: dict[str, Kind] = {
    **{
        f"20 numbers, {name}": replace(kind, is_small=True, ranks=lambda graph: int(graph[0]))
        for name, kind in SMALL.items()
    },
    "one rank": Kind(fixed()),
    "ckpt files": Kind(fixed("", CKPT)),
    "asynchronous saves": Kind(drawn(("", THREAD), ("", PROCESS))),
    "Checkpoint 2.0": Kind(drawn(("", FORMAT_2), ("", f"{FORMAT_2} {THREAD}"))),
    "memory tier": Kind(fixed("", "--mindresume '{memory_tier: {every_steps: 1}}'"), every=(5, 7)),
    "sinks of 1": Kind(fixed("--sink_mode True --runner_config.sink_size 1")),
    "sinks of 2 and 5": Kind(
        lambda draw: ("--sink_mode True --runner_config.sink_size 5", ""), every=(5, 10)
    ),
    "sink size changes": Kind(
        drawn(
            ("--sink_mode True --runner_config.sink_size 2", ""),
            ("--sink_mode True --runner_config.sink_size 1", ""),
            ("", ""),
        ),
        every=(2, 4),
    ),
    "shuffled data": Kind(fixed("--train_dataset.data_loader.shuffle True")),
    "dropout": Kind(
        fixed("--model.model_config.hidden_dropout 0.1 --train_dataset.data_loader.shuffle True"),
        caches=False,
    ),
    "gradient accumulation": Kind(
        fixed("--runner_config.gradient_accumulation_steps 2 --batch_size 4")
    ),
    "loss scale": Kind(fixed("--runner_wrapper.scale_sense 128.0")),
    "float16": Kind(fixed("--model.model_config.compute_dtype float16")),
    "two ranks, data parallel": Kind(fixed(DP2), two_if_parallel),
    "two ranks, tensor parallel": Kind(fixed(TP2, THREAD), two_if_parallel),
    "two ranks, Checkpoint 2.0": Kind(fixed(DP2, FORMAT_2), two_if_parallel),
    "layouts change": Kind(
        drawn((ONE, OTHER_LAYOUT), (DP2, OTHER_LAYOUT), (TP2, OTHER_LAYOUT)), two_if_parallel
    ),
    "layouts change, Checkpoint 2.0": Kind(
        drawn(*((words, f"{OTHER_LAYOUT} {FORMAT_2}") for words in (ONE, DP2, TP2))),
        two_if_parallel,
    ),
    "batch size changes": Kind(
        drawn(("--batch_size 8", ""), ("--batch_size 4", ""), ("--batch_size 16", ""), stay=0.5)
    ),
    "data changes": Kind(drawn(("", ""), ("", SECOND), ("", SILENT), stay=0.5)),
    "PyNative": Kind(
        drawn(micro(8), micro(8, **{"checkpoint.async_save": True})), is_pynative=True
    ),
    "PyNative, gradient accumulation": Kind(fixed(*micro(2)), is_pynative=True),
    "PyNative, micro-batches change": Kind(drawn(micro(8), micro(4), micro(2)), is_pynative=True),
    "PyNative, dropout": Kind(fixed(*micro(8, **{"model.hidden_dropout": 0.1})), is_pynative=True),
    "PyNative, float16": Kind(
        fixed(*micro(8, **{"model.compute_dtype": "float16"})), is_pynative=True
    ),
    "PyNative, shuffled data": Kind(
        fixed(*micro(8, **{"train_dataset.dataloader.shuffle": True})), is_pynative=True
    ),
}


class Host:
    """A process that starts trainings (_resume_host.py)."""

    def __init__(self, trainer: str, folder: Path):
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "_resume_host.py"), trainer],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, **request: Any) -> list[int]:
        """Returns the exit status of each rank."""
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@dataclass
class Training:
    """A training of a kind in its own folder, attempt by attempt."""

    name: str
    kind: Kind
    folder: Path
    data: Path
    second: Path
    draw: Draw
    attempts: int = 0
    every: int = 5
    words: list[Words] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.every = self.draw.choice(self.kind.every)

    def arguments(self, graph: str, others: str) -> list[str] | dict[str, Any]:
        """Returns the command of the next attempt."""
        if self.kind.is_small:
            ranks, tp = map(int, graph.split())
            config = {
                "runner_config.epochs": 20,
                "lr_schedule.total_steps": 200,
                "monitor.save_checkpoint_steps": self.every,
                **json.loads(others),
            }
            return {"config": config, "ranks": ranks, "tp": tp, "actions": [], "plain": False}
        if self.kind.is_pynative:
            run = PynativeRun(self.folder, data=self.data, changes={"training.steps": EPOCHS * 10})
            config = run.configuration(
                {
                    "checkpoint.load_path": str(self.folder / "output" / "checkpoint"),
                    "checkpoint.save_interleaved_steps": self.every,
                    "lr_scheduler.type": "CosineWithWarmUpLR",
                    "lr_scheduler.lr_end": 1e-5,
                    "lr_scheduler.warmup_ratio": 0.1,
                    **json.loads(graph),
                }
            )
            path = self.folder / f"config_{self.attempts}.yaml"
            path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
            return [str(ROOT / "st" / "programs" / "pynative_train.py"), "--config", str(path)]
        words = f"{TINY} {graph} {others} --callbacks.1.save_checkpoint_steps {self.every}"
        return [
            str(ROOT / "run_mindformer.py"),
            *("--config", str(ROOT / "configs" / "quickstart_qwen3.yaml")),
            *("--run_mode", "train", "--train_dataset", str(self.data / "mcore.mindrecord")),
            *shlex.split(words.replace("{second}", str(self.second / "mcore.mindrecord"))),
        ]

    def attempt(self, host: Host, graphs: Path) -> list[int]:
        """Starts it once; returns the exit status of each rank."""
        self.attempts += 1
        graph, others = self.kind.words(self.draw)
        self.words.append((graph, others))
        ranks = self.kind.ranks(graph)
        steps = self.folder / f"steps_{self.attempts}.jsonl"
        last = max((row["step"] for row in self.rows()), default=0)
        environment = {"CPU_CLUSTER_STEPS": str(steps)}
        key = f"{graph} {ranks}"
        if self.kind.is_small:  # the name says sinks
            key += self.name
        kept = graphs / hashlib.sha256(key.encode()).hexdigest()[:16]
        own = kept if kept.exists() else self.folder / "graphs" / str(self.attempts)
        if self.kind.is_pynative:
            environment |= {"CPU_CLUSTER_PLUGIN": "mindresume.plugin"}
        elif self.kind.caches:
            environment |= {
                "MS_COMPILER_CACHE_ENABLE": "1",
                "MS_COMPILER_CACHE_PATH": str(own),
            }
        number = signal.SIGTERM if self.draw.random() < 0.15 else signal.SIGKILL
        end = [last + self.draw.randint(2, 12), self.draw.choice([0, 5, 20, 60]), int(number)]
        arguments = self.arguments(graph, others)
        if isinstance(arguments, dict):
            sink = arguments["config"].get("runner_config.sink_size", 1)
            deed = {
                "step": -(-end[0] // sink) * sink,
                "do": "kill" if number == signal.SIGKILL else "terminate",
            }
            arguments |= {"result": str(steps), "actions": [deed]}
            end = None
        statuses = host.run(
            folder=str(self.folder),
            log=str(self.folder / f"log_{self.attempts}"),
            ranks=ranks,
            environment=environment,
            arguments=arguments,
            steps=str(steps),
            end=end,
        )
        if own != kept and own.exists() and recorded(str(steps)) and not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            own.rename(kept)
        return statuses

    def rows(self) -> list[dict[str, Any]]:
        """Returns the steps of the last attempt that made one."""
        for number in range(self.attempts, 0, -1):
            if rows := recorded(str(self.folder / f"steps_{number}.jsonl")):
                return rows
        return []

    def events(self, seen: set[Path]) -> Iterator[dict[str, Any]]:
        """Yields the events in files that are not in ``seen``, and adds these."""
        for path in sorted(self.folder.glob("output/mindresume_events/*-rank_0-*.jsonl")):
            if path not in seen:
                seen.add(path)
                for line in path.read_text(encoding="ascii").splitlines():
                    if line.endswith("}"):
                        yield json.loads(line)


@dataclass
class Result:
    """What was counted of a kind."""

    counts: Counter = field(default_factory=Counter)
    largest: float = 0.0
    unproved: Counter = field(default_factory=Counter)

    def take(self, event: dict[str, Any]) -> str:
        """Counts an event; returns a sentence on one that should not be."""
        kind = event["event"]
        if kind == "resumed":
            self.counts["resumes"] += 1
        elif kind == "resume_proved":
            self.counts["proved"] += 1
            self.counts["with steps"] += bool(event["steps"])
            self.counts["steps"] += event["steps"]
            self.counts["loss"] += event["steps"] if "loss" in event.get("compared", ()) else 0
            self.largest = max(self.largest, event.get("largest_loss_difference") or 0.0)
            if event.get("unproved"):
                self.unproved[event.get("unproved")] += 1
        elif kind == "resume_differs":
            self.counts["differ"] += 1
            return f"step {event['step']}: {event['what']}\n  {event['first']}\n  {event['again']}"
        elif kind == "notice" and "step ledger is off" in event["text"]:
            self.counts["differ"] += 1
            return str(event["text"])
        return ""


def table(results: dict[str, Result]) -> str:
    """Returns the results as Markdown."""
    names = ("resumes", "with steps", "steps", "loss", "differ", "failed")
    lines = [
        "| kind | resumes | with steps done again | steps | with loss | largest difference "
        "| differ | failed attempts |",
        "|---|" + "---|" * 7,
    ]
    total: Counter = Counter()
    for kind, result in results.items():
        total += result.counts
        row = [str(result.counts[name]) for name in names]
        row.insert(4, f"{result.largest:.1g}")
        lines.append(f"| {kind} | {' | '.join(row)} |")
    row = [str(total[name]) for name in names]
    row.insert(4, f"{max((result.largest for result in results.values()), default=0):.1g}")
    return "\n".join([*lines, f"| all | {' | '.join(row)} |"])


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Result]:
    """Trains until there were so many resumes, or the time is over."""
    draw, kinds = Draw(options.seed), options.kinds or list(KINDS)
    results = {name: Result() for name in kinds}
    hosts: dict[bool, Host] = {}
    trainings: dict[str, tuple[Training, set[Path]]] = {}
    for name, samples in (("data", "160"), ("second", "120")):
        if not (folder / name).exists():
            make_data(folder / name, "--samples", samples)
    (folder / "host").mkdir(exist_ok=True)
    until, number = time.monotonic() + options.minutes * 60, 0
    while sum(result.counts["resumes"] for result in results.values()) < options.resumes:
        for name in kinds:
            if time.monotonic() > until:
                return results
            kind, result = KINDS[name], results[name]
            if name not in trainings:
                number += 1
                made = Training(
                    name,
                    kind,
                    folder / f"{number}-{name.replace(' ', '_').replace(',', '')}",
                    folder / "data",
                    folder / "second",
                    Draw(draw.random()),
                )
                trainings[name] = made, set()
            training, seen = trainings[name]
            if kind.is_pynative not in hosts:
                hosts[kind.is_pynative] = Host(
                    "pynative" if kind.is_pynative else "graph", folder / "host"
                )
            statuses = training.attempt(hosts[kind.is_pynative], folder / "graphs")
            events = list(training.events(seen))
            found = [text for event in events if (text := result.take(event))]
            if wrong := [status for status in statuses if status not in ENDS]:
                result.counts["failed"] += 1
                found.append(f"exit statuses {wrong}")
            for text in found:
                print(f"{name}, {training.folder}, attempt {training.attempts}: {text}", flush=True)
            has_ended = any(
                event.get("outcome") in ("finished", "nothing_to_train") for event in events
            )
            if found or has_ended:
                del trainings[name]
                if not found:
                    shutil.rmtree(training.folder)
            print(f"{name} {statuses} {dict(result.counts)}", file=sys.stderr, flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resumes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=KINDS)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = Path(options.dir or tempfile.mkdtemp(prefix="false-alarms-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = measure(options, folder)
    print(table(results))
    for name, result in results.items():
        for text, count in result.unproved.items():
            print(f"{name}: {count} x {text}")
    if options.json:
        rows = {
            name: {**result.counts, "largest": result.largest} for name, result in results.items()
        }
        Path(options.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return any(result.counts[name] for result in results.values() for name in ("differ", "failed"))


if __name__ == "__main__":
    sys.exit(main())
