"""The graph trainer of other releases of mindformers on the CPU cluster, with mindformers' own
checkpointing.

A release that is not installed is skipped, with the reason. Four processes are data parallel 2 x
model parallel 2 with a sharded optimizer.
"""

from pathlib import Path

import pytest
import yaml

from st.releases import HERE, RELEASES, ReleaseRun, why_not
from st.run_attempts import steps_of
from st.training_run import ROOT, SIZES, differences

STEPS, SAVED = 6, 3  # in one epoch; a save every 3 steps
CONFIGS = {1: "quickstart_qwen3.yaml", 4: "quickstart_qwen3_dp2tp2.yaml"}
SHARDED = {
    "parallel.enable_parallel_optimizer": True,
    "parallel.parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
}


def short_run(
    folder: Path, data: Path, release: str, workers: int, **changes: object
) -> ReleaseRun:
    """Returns a training of 6 steps without mindresume, in the 2.0 format. ``changes``: of the top
    level of the configuration."""
    run = ReleaseRun(
        folder,
        CONFIGS[workers],
        data,
        workers,
        release=release,
        program=ROOT / "st/programs/upstream_style.py",
    )
    config = yaml.safe_load((ROOT / "configs" / run.config).read_text(encoding="utf-8"))
    for callback in config["callbacks"]:
        if callback["type"] == "CheckpointMonitor":
            callback["save_checkpoint_steps"] = SAVED
    sections = ("train_dataset", "train_dataset_task.dataset_config")
    samples = {f"{section}.data_loader.num_samples": 8 * STEPS for section in sections}
    return run.configure(
        {
            **SIZES,
            **samples,
            **(SHARDED if workers > 1 else {}),
            "runner_config.epochs": 1,
            "callbacks": config["callbacks"],
            "use_legacy_format": False,
            "load_checkpoint": "",
            "resume_training": False,
            **changes,
        }
    )


CASES = [
    pytest.param(
        release,
        workers,
        id=f"{release}-{workers}",
        marks=[
            pytest.mark.skipif(bool(why_not(release)), reason=why_not(release)),
            *([pytest.mark.soak] if workers > 1 else []),
        ],
    )
    for workers in CONFIGS
    for release in RELEASES
    if release != HERE
]


@pytest.mark.parametrize("release, workers", CASES)
def test_the_built_in_resumes_bit_by_bit(release, workers, data, tmp_path):
    whole = short_run(tmp_path / "whole", data, release, workers).start().wait_for_success()
    assert steps_of(whole) == list(range(1, STEPS + 1))
    assert {int(path.name.partition("_")[2]) for path in whole.checkpoints.glob("iteration_*")} == {
        SAVED,
        STEPS,
    }
    broken = short_run(tmp_path / "broken", data, release, workers)
    assert broken.start(CPU_CLUSTER_KILL=f"all@{SAVED + 1}").wait() != 0
    assert steps_of(broken) == list(range(1, SAVED + 2))
    again = short_run(
        broken.folder,
        data,
        release,
        workers,
        load_checkpoint=str(broken.checkpoints),
        resume_training=True,
    )
    again.attempts = broken.attempts
    again.start().wait_for_success()
    assert steps_of(again) == list(range(SAVED + 1, STEPS + 1))
    assert differences(whole.steps(), again.steps(-1)) == []
