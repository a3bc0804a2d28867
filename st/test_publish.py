"""Weights that a training publishes while it goes on, by the real Trainer: they are those of an
export, readers see whole folders, and the death of the process that writes them costs the training
nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mindresume
from mindresume.formats.consolidated import read_conversion_manifest
from mindresume.storage.posix import PosixStorage
from mindresume.tensor_files import file_checksum
from st.pynative_cases import OURS, build  # noqa: F401
from st.run_attempts import LIMIT, assert_event, assert_resumed, events, run_beside, wrong_steps
from st.training_run import ROOT, SIZES, Run

# ruff: noqa: F811  build is a fixture
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 1024,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 48,
    "max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


SMALL = {**CONFIG, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}


def settings(run: Run, model: dict = CONFIG, **more: object) -> dict[str, str]:
    """Returns the variables with which a run publishes into its folder ``weights``."""
    run.folder.mkdir(parents=True, exist_ok=True)
    config = run.folder / "config.json"
    config.write_text(json.dumps(model), encoding="utf-8")
    given = {"every_steps": 10, "dir": run.folder / "weights", "config": config, "keep": 1, **more}
    return {f"MINDRESUME_PUBLISH_{name.upper()}": str(value) for name, value in given.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_published(run: Run, step: int) -> None:
    """LATEST names this step, whose folder is, byte for byte, that of the command."""
    weights, target = run.folder / "weights", run.folder / f"hf-{step}"
    assert (weights / "LATEST").read_text(encoding="utf-8") == f"step-{step}\n"
    config, source = str(run.folder / "config.json"), str(run.checkpoints)
    words = [source, str(target), "--step", str(step), "--config", config]
    done = run.mindresume("export-hf", *words)
    assert done.returncode == 0, done.stderr
    assert contents(weights / f"step-{step}") == contents(target)


class Reader(threading.Thread):
    """Reads what is published again and again, and compares it with its checksums."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.done, self.torn, self.seen = folder, threading.Event(), [], set()

    def run(self) -> None:
        storage = PosixStorage()
        while not self.done.is_set():
            with suppress(FileNotFoundError), mindresume.published(self.folder) as folder:
                self.seen.add(os.path.basename(folder))
                try:
                    files = read_conversion_manifest(storage, folder).files
                    for file in files:
                        with open(os.path.join(folder, file.path), "rb") as opened:
                            if file_checksum(opened) != (file.checksum, file.size):
                                self.torn.append(file.path)
                except Exception as error:
                    self.torn.append(repr(error))

    def __enter__(self) -> "Reader":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.join()


def publishers(run: Run) -> list[int]:
    """Returns the processes of the job that publish."""
    found = []
    for pid in run.processes():
        with suppress(OSError):
            if b"mindresume.api.publication" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def kill_a_publisher(run: Run) -> None:
    """Kills the first one as soon as there is one."""
    deadline = time.monotonic() + LIMIT
    while run.process.poll() is None and time.monotonic() < deadline:
        for pid in publishers(run):
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)
    raise AssertionError("no process published anything")


def test_four_processes_publish(whole_four, tmp_path):
    """The first process that publishes is killed; then a resume trains on with a reader in a loop,
    and another one that holds the folder of the first attempt."""
    run = run_beside(whole_four, tmp_path / "run", copied=False)
    weights = run.folder / "weights"
    with Reader(weights) as reader:
        run.start(**settings(run))
        kill_a_publisher(run)
        run.wait_for_success(LIMIT)
        assert wrong_steps(run, whole_four) == []
        assert_event(run, "publish_failed")
        assert_event(run, "weights_published", step=40)
        assert_published(run, 40)
        with mindresume.published(weights) as held:
            before = contents(Path(held))
            run.start("--runner_config.epochs 6", **settings(run)).wait_for_success(LIMIT)
            assert contents(Path(held)) == before
    assert_published(run, 60)
    assert {"step-40", "step-60"} <= {path.name for path in weights.iterdir()}
    assert reader.torn == [] and {"step-40", "step-60"} <= reader.seen
    assert [path.name for path in (weights / ".work").iterdir()] == ["lock"]


def test_a_killed_job_publishes_at_its_next_start(whole_single, tmp_path):
    """What was due before the kill is published, and the training is the uninterrupted one."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    given, more = settings(run, every_steps=20), "--callbacks.1.keep_checkpoint_max 9"
    # at the end of the step, before the one after which the process would start
    run.start(more, CPU_CLUSTER_KILL="all@20", **given).wait(LIMIT)
    assert events(run, "weights_published") == []
    run.start(more, **given).wait_for_success(LIMIT)
    assert_resumed(run, whole_single, 20)
    assert [row["step"] for row in events(run, "weights_published")] == [20, 40]
    assert_published(run, 40)


def test_the_pynative_trainer_publishes(build):
    run = build("run", changes={"checkpoint.save_interleaved_steps": 20})
    run.start(**OURS, **settings(run, SMALL, every_steps=20)).wait_for_success(LIMIT)
    assert_event(run, "weights_published", step=40)
    assert_published(run, 40)


@pytest.mark.soak  # the installation of torch
def test_transformers_computes_like_the_checkpoint(whole_single, tmp_path):
    """The logits of the folder that is published, by transformers, are those of the checkpoint, by
    the network of mindformers."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    run.start(**settings(run, every_steps=40)).wait_for_success(LIMIT)
    tokens, ours, theirs = (tmp_path / f"{name}.npy" for name in ("tokens", "ours", "theirs"))
    np.save(tokens, np.random.default_rng(3).integers(1, 512, (2, 32)))
    (source,) = run.checkpoints.glob("rank_0/*-4_10.safetensors")
    changes = [f"{name.rpartition('.')[2]}={value}" for name, value in SIZES.items()]
    interpreter = call("bash", ROOT / "scripts" / "hf_env.sh").split()[-1]
    call(
        sys.executable,
        ROOT / "st" / "cpu_cluster" / "run.py",
        ROOT / "st" / "programs" / "hf_logits.py",
        ROOT / "configs" / "quickstart_qwen3.yaml",
        *(source, tokens, ours, *changes),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with mindresume.published(run.folder / "weights") as folder:
        program = ROOT / "st" / "programs" / "hf_torch.py"
        call(interpreter, program, "logits", folder, tokens, theirs)
    found, expected = np.load(theirs).reshape(64, 512), np.load(ours).reshape(64, 512)
    assert np.ptp(expected) > 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def call(*words: object, **how: Any) -> str:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
