"""The recorder alone, as on a real device: a plain mindspore training, nothing patched but the list
of callbacks."""

import json
import os
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


def test_steps_are_recorded_without_the_patches_of_the_cpu(tmp_path):
    program, steps = tmp_path / "program.py", tmp_path / "steps.jsonl"
    program.write_text(PROGRAM)
    subprocess.run(
        [sys.executable, str(ROOT / "st" / "cpu_cluster" / "run.py"), str(program)],
        check=True,
        timeout=600,
        env={**os.environ, "CPU_CLUSTER_DEVICE": "Ascend", "CPU_CLUSTER_STEPS": str(steps)},
    )
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(len(row["samples"]) == 2 for row in rows)
    assert len({sample for row in rows for sample in row["samples"]}) == 8
