"""Runs of one training in changing parallel layouts (st/test_iterations.py): the command line of a
layout, the uninterrupted run, the parameters and samples of every attempt. The program is
st/programs/record_start.py.

The global batch size is 8 in all attempts. MindDataset deals the samples out like cards (sample i
goes to data-parallel rank i mod dp): a step sees the same 8 samples in every layout. Weights and
moments must go from attempt to attempt bit for bit. The losses need not: sums over ranks are taken
in another order.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindresume.model.manifest import TensorRecord
from st.checkpoint_files import merged
from st.run_attempts import RunAttempt
from st.training_run import ONE_LAYER, ROOT, Run

PROGRAM = ROOT / "st" / "programs" / "record_start.py"
TOLERANCE = 1e-5  # of a loss of about 6 in float32
BATCH, STEPS = 8, 20
COLUMNS = 4  # of the data
ATTEMPT_LIMIT = 600.0  # seconds that one attempt may take on a busy machine
# of a file of Checkpoint 1.0, not of the network
COUNTERS = {"epoch_num", "step_num", "loss_scale", "global_batch_size"}


@dataclass(frozen=True)
class Layout:
    """Has optimizer shards if there are several ranks."""

    dp: int
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.tp

    @property
    def options(self) -> str:
        """The words of the command line that change the layout of a configuration for one
        process."""
        if self.ranks == 1:
            return f"--use_parallel False --batch_size {BATCH}"
        strategy = json.dumps([[self.dp, 1]] * COLUMNS, separators=(",", ":"))
        return (
            f"--use_parallel True --batch_size {BATCH // self.dp} --parallel.dataset_strategy "
            f"{strategy} "
            f"--parallel_config.data_parallel {self.dp} --parallel_config.model_parallel {self.tp} "
            # with no threshold, or nothing so small is cut
            "--parallel.enable_parallel_optimizer True --parallel.parallel_optimizer_config "
            "'{gradient_accumulation_shard: False, parallel_optimizer_threshold: 0}'"
        )


FIRST = Layout(dp=2, tp=2)


@dataclass(frozen=True)
class Plan:
    """One attempt: its layout, the step whose checkpoint it must take (None: a fresh start), the
    step after which it is killed, and what is special about its command."""

    layout: Layout
    takes: int | None
    killed: int | None
    extra: str = ""

    @property
    def saves(self) -> int:
        """The last step that it saves."""
        return (self.killed or STEPS) // 5 * 5


@dataclass
class Outcome:
    """One attempt after its end. ``saved``: global tensors of the checkpoint before it; ``loaded``:
    of its start, without transient state of a step. ``samples``: {step: ids that all ranks saw}."""

    plan: Plan
    attempt: RunAttempt
    saved: dict[str, np.ndarray]
    loaded: dict[str, np.ndarray]
    samples: dict[int, list[str]]
    table: Mapping[str, TensorRecord] = field(default_factory=dict)


def recorded_run(folder: Path, data: Path, device: str, graphs: Path) -> Run:
    """Returns a run of record_start.py, not started yet."""
    return Run(
        folder,
        "quickstart_qwen3.yaml",
        data,
        program=PROGRAM,
        device=device,
        options=ONE_LAYER,
        graphs=graphs,
    )


def record_folder(run: Run, attempt: int) -> Path:
    """Returns the folder in which attempt ``attempt`` (from 1) records its ranks' state at the
    start."""
    return run.folder / f"start_{attempt}"


def start_recorded(run: Run, *extra: str, kill: str | None = None, **environment: str) -> Run:
    """Starts an attempt of a run of record_start.py. ``kill``: "12@10", see there."""
    own = {
        "RECORD_START": str(record_folder(run, len(run.attempts) + 1)),
        **({"KILL_AFTER_SAVE": kill} if kill else {}),
    }
    return run.start(" ".join(extra), MSRUN_GRACE="1", **own, **environment)


def start_layout(run: Run, layout: Layout, *extra: str, kill: str | None = None) -> Run:
    """Starts an attempt of two epochs in ``layout``."""
    run.workers = layout.ranks
    return start_recorded(run, "--epochs 2", layout.options, *extra, kill=kill)


# ---- the start and the samples of an attempt -----------------------------------------------------


def loaded_tensors(run: Run, table: Mapping[str, TensorRecord]) -> dict[str, np.ndarray]:
    """Returns the global tensors with which the ranks of the last attempt started. ``table``:
    records of this layout, as a later save has them."""
    folder = record_folder(run, len(run.attempts))
    return merged(
        (rank, dict(np.load(folder / f"rank_{rank}.npz")), table) for rank in range(run.workers)
    )


def samples(run: Run) -> dict[int, list[str]]:
    """{step: sorted ids of the samples that the ranks of the last attempt saw}. Steps that all
    ranks recorded."""
    others = [
        path.read_text(encoding="utf-8").splitlines()
        for path in sorted(record_folder(run, len(run.attempts)).glob("steps_*.jsonl"))
    ]
    rows = [
        run.steps(-1),
        *([json.loads(line) for line in lines if line.endswith("}")] for lines in others),
    ]
    assert len(rows) == run.workers
    ranks = [{row["step"]: row["samples"] for row in rank} for rank in rows]
    return {
        step: sorted({sample for rank in ranks for sample in rank[step]})
        for step in ranks[0]
        if all(step in rank for rank in ranks)
    }


# ---- conditions of a chain of attempts -----------------------------------------------------------


def assert_losses(whole: Run, attempts: Iterable[tuple[Layout, list[dict]]], capsys: Any) -> None:
    """The losses are those of the uninterrupted run within TOLERANCE, the learning rates exactly.
    Prints the differences."""
    reference = {row["step"]: row for row in whole.steps()}
    assert (
        sorted(reference) == list(range(1, STEPS + 1))
        and reference[1]["loss"] - reference[STEPS]["loss"] > 0.5
    )
    rows = [(layout, row) for layout, steps in attempts for row in steps]
    found = {}
    for layout, row in rows:
        found[layout] = max(
            found.get(layout, 0.0), abs(row["loss"] - reference[row["step"]]["loss"])
        )
    with capsys.disabled():
        print(
            "\nlargest difference of a loss: "
            + ", ".join(
                f"dp{layout.dp}tp{layout.tp} {difference:.2e}"
                for layout, difference in found.items()
            )
        )
    assert max(found.values()) <= TOLERANCE
    assert all(row["lr"] == reference[row["step"]]["lr"] for _, row in rows)


def assert_samples(whole: Run, attempts: Iterable[tuple[int, int, dict[int, list[str]]]]) -> None:
    """Every step sees the samples that it sees in the uninterrupted run. ``attempts``: (step
    resumed from, last step, seen)."""
    reference = samples(whole)
    assert {len(ids) for ids in reference.values()} == {BATCH}
    for first, last, seen in attempts:
        assert {step: ids for step, ids in seen.items() if reference[step] != ids} == {}
        assert set(range(first + 1, last + 1)) <= set(seen)
