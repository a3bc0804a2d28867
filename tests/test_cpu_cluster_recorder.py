"""The recorder alone, as on a real device: a plain mindspore training, nothing patched but the list
of callbacks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import numpy as np
import mindspore as ms
from mindspore import nn
from mindspore.train.model import Model
data = {"x": np.arange(32, dtype=np.float32).reshape(8, 4), "y": np.ones((8, 1), np.float32)}
net = nn.Dense(4, 1)
model = Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.001, 0.9))
model.train(1, ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(2), dataset_sink_mode=False)
assert (Model.build.__module__, Model._train_process.__module__) == ("mindspore.train.model",) * 2
"""


def test_a_kill_can_happen_once_for_jobs_that_start_again_by_themselves(tmp_path):
    program, steps = tmp_path / "program.py", tmp_path / "steps.jsonl"
    program.write_text(PROGRAM)
    ended = [
        subprocess.run(
            [sys.executable, str(ROOT / "st" / "cpu_cluster" / "run.py"), str(program)],
            check=False,
            timeout=600,
            env={
                **os.environ,
                "CPU_CLUSTER_DEVICE": "Ascend",
                "CPU_CLUSTER_STEPS": str(steps),
                "CPU_CLUSTER_KILL": "all@2",
                "CPU_CLUSTER_KILLED": str(tmp_path / "killed"),
            },
        ).returncode
        for _ in range(2)
    ]
    assert ended == [-signal.SIGKILL, 0]
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 1, 2, 3, 4]
    assert all(len(row["samples"]) == 2 for row in rows)
    assert len({sample for row in rows[2:] for sample in row["samples"]}) == 8
