"""How far apart the losses of the same steps are when they are trained again in another way: what
TOLERANCES of mindresume/resume/step_ledger.py rest on.

    python benchmarks/tolerances.py [--dtype float32] [--trainer graph] [--dir FOLDER] [--json FILE]

graph     the quickstart's training with one layer, 40 steps on one rank; the steps after 30 are
          trained again: in the same way, on four ranks (data parallel 2 x model parallel 2), and on
          these with two micro-batches of half the size in a step
pynative  its own tiny model, 35 steps on one rank; the steps after 25 are trained again: in the
          same way, with two micro-batches, and on two ranks. mindformers 2.0.0 if it is installed
          (scripts/release_env.sh), because 1.9.0 has no micro-batches there and one rank only

for float32, float16 and bfloat16 as ``compute_dtype``. The numbers are those of the event
``resume_proved``: of the losses that mindformers prints. What this machine does not compute has its
error instead.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _measure as measure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindresume.resume.step_ledger import TOLERANCES  # noqa: E402
from st.pynative_run import PynativeRun, why_not  # noqa: E402
from st.releases import HERE  # noqa: E402
from st.run_attempts import LIMIT, events  # noqa: E402
from st.training_run import ONE_LAYER, Run  # noqa: E402

FIRST = "one rank"
DTYPE = "model.model_config.compute_dtype", "model.compute_dtype"  # graph, PyNative
# the difference is what is measured, so none is too large
MEASURE = {"MINDRESUME_PROOF_TOLERANCE": "1"}
PLUGIN = {"CPU_CLUSTER_PLUGIN": "mindresume.plugin"}


@dataclass(frozen=True)
class Way:
    """One way to train the steps again.

    Attributes:
        name: for the table.
        ranks: processes.
        options: of the graph trainer, words of the command line.
        changes: of the PyNative trainer, {key: value} of the configuration.
    """

    name: str
    ranks: int = 1
    options: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)


CONVERTED = "--auto_trans_ckpt True"
WAYS = {
    "graph": (
        Way("the same"),
        Way("dp2 x mp2", 4, CONVERTED),
        Way(
            "dp2 x mp2, two micro-batches",
            4,
            f"{CONVERTED} --runner_config.batch_size 2 "
            "--runner_config.gradient_accumulation_steps 2",
        ),
    ),
    "pynative": (
        Way("the same"),
        Way("two micro-batches", changes={"training.local_batch_size": 4}),
        Way("dp2", 2),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=TOLERANCES, action="append")
    parser.add_argument("--trainer", choices=WAYS, action="append")
    parser.add_argument("--dir", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-tolerances-", dir=options.dir))
    rounds, rows = measure.Rounds(), []
    try:
        subprocess.run(
            [sys.executable, str(ROOT / "st" / "data" / "make_data.py"), str(folder / "data")],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for trainer in options.trainer or WAYS:
            for dtype in options.dtype or TOLERANCES:
                rows += Trainings(folder, trainer, dtype).rows()
                rounds.loads.append(os.getloadavg()[0])
        columns = ["trainer", "dtype", "trained again", "steps", "largest difference", "tolerance"]
        measure.finish(
            "Losses of the same steps",
            str(folder),
            rounds,
            measure.table(columns, rows),
            options.json,
            {"rows": [dict(zip(columns, row, strict=True)) for row in rows]},
        )
    finally:
        shutil.rmtree(folder)


class Trainings:
    """The trainings of one trainer and dtype, in folders of ``folder``."""

    def __init__(self, folder: Path, trainer: str, dtype: str):
        self.folder, self.trainer, self.dtype = folder, trainer, dtype
        self.release = HERE if why_not("2.0.0") else "2.0.0"
        self.title = "graph" if trainer == "graph" else f"PyNative {self.release}"

    def rows(self) -> list[list[str]]:
        """Trains, and returns the rows of the table."""
        whole = self.run(Way(FIRST), "whole")
        if problem := self.train(whole):
            return [[self.title, self.dtype, FIRST, "", problem, ""]]
        rows = []
        for way in WAYS[self.trainer]:
            run = self.run(way, f"again-{way.name}")
            shutil.copytree(whole.folder / "output", run.folder / "output")
            self.forget_newest(run)
            rows.append([self.title, self.dtype, way.name, *self.outcome(run, way)])
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
        return rows

    def outcome(self, run: Run, way: Way) -> list[str]:
        if problem := self.train(run, way, again=True):
            return ["", problem, ""]
        proofs = events(run, "resume_proved")
        if not proofs or not proofs[-1]["steps"]:
            return ["0", proofs[-1]["unproved"] if proofs else "not compared", ""]
        largest = proofs[-1]["largest_loss_difference"]
        return [str(proofs[-1]["steps"]), f"{largest:.1e}", str(TOLERANCES[self.dtype])]

    def run(self, way: Way, name: str) -> Run:
        where, data = self.folder / f"{self.trainer}-{self.dtype}-{name}", self.folder / "data"
        if self.trainer == "pynative":
            changes = {"training.steps": 35, DTYPE[1]: self.dtype, **way.changes}
            if way.ranks > 1:
                changes["training.local_batch_size"] = 8 // way.ranks
            return PynativeRun(
                where, data=data, workers=way.ranks, release=self.release, changes=changes
            )
        config = "quickstart_qwen3.yaml" if way.ranks == 1 else "quickstart_qwen3_dp2tp2.yaml"
        return Run(where, config, data, way.ranks, options=f"{ONE_LAYER} --{DTYPE[0]} {self.dtype}")

    def train(self, run: Run, way: Way | None = None, again: bool = False) -> str:
        """Returns the error of the training; empty: it was trained to its end."""
        if isinstance(run, PynativeRun):
            load = {"checkpoint.load_path": str(run.checkpoints)} if again else {}
            run.start(load, **PLUGIN, **MEASURE)
        else:
            run.start(way.options if way is not None else "", **MEASURE)
        if run.wait(LIMIT) == 0:
            return ""
        ended = [row for row in events(run, "training_ended") if row["outcome"] == "failed"]
        text = ended[-1]["reason"] if ended else run.log()[-300:]
        return re.sub(r"[\s|-]+", " ", text)[:160]

    @staticmethod
    def forget_newest(run: Run) -> None:
        """Removes all checkpoints but the oldest one that was kept."""
        saves = sorted((run.checkpoints / ".mindresume").glob("step-*"))
        steps = sorted(run.checkpoints.glob("iteration_*"))
        for path in (*saves[1:], *steps[1:]):
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
