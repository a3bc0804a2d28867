"""PyNative trainings in real processes, of any release of mindformers that is installed, for the
system tests.

    run = PynativeRun(folder, data, release="2.0.0", workers=2)
    # the exit status, -9 or 137
    run.start({"training.steps": 40}, CPU_CLUSTER_KILL="all@13").wait()
    run.start({"checkpoint.load_path": str(run.checkpoints)}).wait_for_success()
    run.steps(-1); run.steps(-1, rank=1); run.log()

Each ``start`` is another attempt in the same folder. The configuration is
st/cpu_cluster/pynative/tiny_qwen3.yaml with the changes of the run and of the attempt; it is
written to config_N.yaml. What each step saw and gave is recorded by
st/cpu_cluster/pynative/recorder.py, where the fields are; faults.py has the variables that kill.
``release``: see st/releases.py.
"""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from st import releases
from st.releases import ReleaseRun
from st.training_run import ROOT

CONFIG = ROOT / "st" / "cpu_cluster" / "pynative" / "tiny_qwen3.yaml"
PROGRAM = ROOT / "st" / "programs" / "pynative_train.py"
GLOBAL_BATCH = 8  # samples a step, over all ranks


def why_not(release: str, workers: int = 1) -> str:
    """Returns why the PyNative trainer of this release cannot be run here in so many processes, or
    "" if it can."""
    if release in ("1.8.0", "1.9.0") and (workers > 1 or release == "1.8.0"):
        return f"mindformers {release} has no PyNative trainer for {workers} process(es)"
    return releases.why_not(release)


@dataclass
class PynativeRun(ReleaseRun):
    """One PyNative training in its own folder. ``data``: folder made by st/data/make_data.py.
    ``changes``: {keys with dots between them: value} of the configuration, in every attempt.
    ``program``: the script to run; it gets ``--config FILE`` and ``options``.
    """

    config: str = ""
    data: Path = Path()
    program: Path = PROGRAM
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def losses(self) -> Path:
        """The file pattern of this attempt's steps, as the recorder takes it."""
        return self.folder / f"steps_{len(self.attempts)}_{{rank}}.jsonl"

    def steps(self, attempt: int | None = None, rank: int = 0) -> list[dict]:
        """Returns the recorded steps of a rank in all attempts in order, or in one (-1: the
        last)."""
        numbers = range(1, len(self.attempts) + 1)
        rows = []
        for number in numbers if attempt is None else [numbers[attempt]]:
            path = self.folder / f"steps_{number}_{rank}.jsonl"
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            rows += [json.loads(line) for line in lines if line.endswith("}")]
        return rows

    def configuration(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the configuration of an attempt with these changes. A section that is missing is
        made."""
        config = copy.deepcopy(yaml.safe_load(CONFIG.read_text(encoding="utf-8")))
        fixed = {
            "train_dataset.dataloader.dataset_files": str(self.data / "mcore.mindrecord"),
            "training.local_batch_size": GLOBAL_BATCH // self.workers,
        }
        for keys, value in {**fixed, **self.changes, **changes}.items():
            *outer, last = keys.split(".")
            section = config
            for key in outer:
                section = section.setdefault(key, {})
            section[last] = value
        return config

    def words(self, extra: str) -> list[str]:
        return [
            str(ROOT / "st" / "cpu_cluster" / "run.py"),
            str(self.program),
            "--config",
            self.config,
            *shlex.split(f"{self.options} {extra}"),
        ]

    def start(
        self,
        changes: Mapping[str, Any] | None = None,
        extra: str = "",
        prefix: tuple[str, ...] = (),
        **environment: str,
    ) -> PynativeRun:
        """Starts the next attempt. ``changes`` of the configuration and ``environment`` are for
        this attempt alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"config_{len(self.attempts) + 1}.yaml"
        path.write_text(
            yaml.safe_dump(self.configuration(changes or {}), sort_keys=False), encoding="utf-8"
        )
        self.config = str(path)
        return super().start(extra, prefix, **{"CPU_CLUSTER_TRAINER": "pynative", **environment})

    def resume(self, changes: Mapping[str, Any] | None = None, **environment: str) -> PynativeRun:
        """Starts the next attempt from the newest checkpoint in the run's folder."""
        return self.start(
            {"checkpoint.load_path": str(self.checkpoints), **(changes or {})}, **environment
        )
