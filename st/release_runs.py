"""The trainings of the release matrix (st/test_releases.py): 10 steps in two epochs of 5, saved at
3, 6 and 9.

    run = small_run(folder, data, "2.0.0", "2.0", workers=4)
    run_killed(run)                                 # after step 8: the newest checkpoint is step 6
    expect_resumed(run, whole.steps())

Four processes are data parallel 2 x model parallel 2 with a sharded optimizer. A folder is resumed
automatically: the command of the second attempt is that of the first.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from st.releases import ReleaseRun
from st.run_attempts import LIMIT, selected_step, steps_of
from st.training_run import ROOT, SIZES, differences

EPOCH, EPOCHS, INTERVAL, KILLED = 5, 2, 3, 8
# SAVED: the newest checkpoint after the kill; BEFORE: the one before it
STEPS, SAVED, BEFORE = EPOCH * EPOCHS, 6, 3
CONFIGS = {
    1: "quickstart_qwen3.yaml",
    2: "quickstart_qwen3_dp2tp2.yaml",
    4: "quickstart_qwen3_dp2tp2.yaml",
}
SHARDED = {
    "parallel.enable_parallel_optimizer": True,
    "parallel.parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
}
FORMATS = {
    "1.0 ckpt": ("ckpt", True),
    "1.0 safetensors": ("safetensors", True),
    "2.0": ("safetensors", False),
}
# Releases that compute the same bits. mindspore 2.7.2, with 1.8.0, rounds the loss of a later step
# differently, by one unit in the last place of a float32.
SAME_BITS = ({"1.8.0"}, {"1.9.0", "2.0.0", "2.1.0"})
# relative difference of losses between releases of other bits
NEARLY = 1e-6
# and between layouts, which add in another order
OTHER_LAYOUT = 1e-4


def small_run(
    folder: Path,
    data: Path,
    release: str,
    kind: str,
    workers: int = 1,
    monitor: Mapping[str, Any] | None = None,
    epochs: int = EPOCHS,
    graphs: Path | None = None,
    **changes: Any,
) -> ReleaseRun:
    """Returns a training that is not started. ``kind``: one of FORMATS. ``monitor``: arguments of
    the CheckpointMonitor. ``graphs``: see ``Run``. ``changes``: of the top level of the
    configuration."""
    run = ReleaseRun(folder, CONFIGS[workers], data, workers, graphs=graphs, release=release)
    files, legacy = FORMATS[kind]
    config = yaml.safe_load((ROOT / "configs" / run.config).read_text(encoding="utf-8"))
    for callback in config["callbacks"]:
        if callback["type"] == "CheckpointMonitor":
            callback.update(
                {"save_checkpoint_steps": INTERVAL, "checkpoint_format": files, **(monitor or {})}
            )
    sections = ("train_dataset", "train_dataset_task.dataset_config")
    return run.configure(
        {
            **SIZES,
            **{f"{section}.data_loader.num_samples": 8 * EPOCH for section in sections},
            **(SHARDED if workers > 1 else {}),
            **({"parallel_config.model_parallel": 1} if workers == 2 else {}),
            "runner_config.epochs": epochs,
            "callbacks": config["callbacks"],
            "use_legacy_format": legacy,
            "load_ckpt_format": files,
            **changes,
        }
    )


def run_killed(run: ReleaseRun, step: int = KILLED, extra: str = "") -> None:
    """Runs an attempt until the end of ``step``, where all its processes get SIGKILL."""
    status = run.start(extra, CPU_CLUSTER_KILL=f"all@{step}").wait(LIMIT)
    assert status != 0 and steps_of(run)[-1:] == [step], (
        f"exit status {status}:\n{run.log()[-4000:]}"
    )


def copy_of(run: ReleaseRun, folder: Path, **changes: Any) -> ReleaseRun:
    """Returns the same training in another folder, with the checkpoints of ``run`` as they are now.
    ``changes``: of fields."""
    shutil.copytree(run.checkpoints, folder / "output" / "checkpoint")
    if (run.folder / "output" / "strategy").exists():
        shutil.copytree(run.folder / "output" / "strategy", folder / "output" / "strategy")
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # mindformers makes files 0400
    return run.like(folder, **changes)


def expect_resumed(
    run: ReleaseRun,
    reference: list[dict],
    step: int = SAVED,
    last: int = STEPS,
    tolerance: float = 0.0,
) -> None:
    """Runs another attempt to the end. AssertionError if it does not resume from ``step``, or if a
    step of ``reference`` is not the same: the samples, and the loss bit by bit, or with a relative
    ``tolerance``."""
    run.start().wait_for_success(LIMIT)
    assert selected_step(run) == step
    assert steps_of(run) == list(range(step + 1, last + 1))
    expect_equal(run.steps(-1), reference, tolerance)


def expect_equal(found: list[dict], reference: list[dict], tolerance: float = 0.0) -> None:
    """Compares the steps that both have. AssertionError if they have fewer than two in common: the
    loss of the first one does not depend on the state of the optimizer."""
    both = {row["step"] for row in reference} & {row["step"] for row in found}
    known, here = (
        {row["step"]: row for row in rows if row["step"] in both} for rows in (reference, found)
    )
    assert len(both) >= 2
    if tolerance == 0.0:
        assert differences(list(known.values()), list(here.values())) == []
        return
    far = [
        f"step {step}: loss {known[step]['loss']!r} and {here[step]['loss']!r}"
        for step in sorted(both)
        if abs(known[step]["loss"] - here[step]["loss"]) > tolerance * abs(known[step]["loss"])
    ]
    far += [
        f"step {step}: other samples"
        for step in sorted(both)
        if known[step]["samples"] != here[step]["samples"]
    ]
    assert far == []


def tolerance_of(*releases: str) -> float:
    """Returns how far the losses of trainings of these releases may differ: 0.0 if they compute the
    same bits."""
    return 0.0 if any(set(releases) <= same for same in SAME_BITS) else NEARLY
