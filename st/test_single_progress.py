"""One process: another global batch size at resume, and the two keys that decide which data a
resumed run sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from st.checkpoint_files import names
from st.run_attempts import (
    assert_event,
    in_parallel,
    notices,
    resume_summary,
    run_beside,
    train_well,
    use_register_path,
)
from st.training_run import Run


@pytest.fixture(scope="module")
def resumed(whole_single, tmp_path_factory) -> SimpleNamespace:
    """All resume from the folder of the uninterrupted run (steps 30, 35, 40), each with its own
    output."""
    base, there = (
        tmp_path_factory.mktemp("progress"),
        f"--load_checkpoint {whole_single.checkpoints}",
    )
    runs = {
        name: run_beside(whole_single, base / name, copied=False)
        for name in ("odd", "again", "third")
    }
    at_35 = f"{there} --resume_training qwen3_rank_0-4_5"
    # the way of an unmodified script; the other runs take run_mindformer.py
    skip = use_register_path(
        runs["third"],
        {
            "trainer.data_skip_steps": 2,
            "resume_training": "qwen3_rank_0-4_5",
            "load_checkpoint": str(whole_single.checkpoints),
        },
    )
    in_parallel(
        lambda: train_well(runs["odd"], at_35, "--batch_size 16"),
        lambda: train_well(runs["again"], at_35, "--trainer.ignore_data_skip True"),
        lambda: train_well(runs["third"], skip),
    )
    return SimpleNamespace(**runs)


def samples(run: Run) -> dict[int, list[str]]:
    """{step: ids of its samples} of the last attempt."""
    return {row["step"]: row["samples"] for row in run.steps(-1)}


def test_a_batch_size_that_cuts_a_step_is_rounded_down(resumed, whole_single):
    """35 * 8 / 16 = 17.5 steps: the data of step 35 is seen again, in step 18."""
    run, before = resumed.odd, samples(whole_single)
    assert notices(run, "8 samples", level="warning")
    how, details = resume_summary(run)["step"]
    assert how == "recomputed" and "17.5" in details
    assert samples(run) == {step: before[2 * step - 1] + before[2 * step] for step in range(18, 21)}


def test_ignore_data_skip_restarts_the_data(resumed, whole_single):
    """The counters continue. The epoch that was cut by step 35 is now trained completely, so the
    run ends at step 45."""
    run, before = resumed.again, samples(whole_single)
    assert_event(run, "progress_restored", step=35)
    assert samples(run) == {35 + step: before[step] for step in range(1, 11)}
    assert names(run) == {40: "qwen3_rank_0-4_10.safetensors", 45: "qwen3_rank_0-5_5.safetensors"}


def test_data_skip_steps_skips_that_many_steps(resumed, whole_single):
    """The samples of steps 1 and 2 are left out, the rest of an epoch follows."""
    run, before = resumed.third, samples(whole_single)
    assert_event(run, "progress_restored", step=35)
    assert samples(run) == {33 + step: before[step] for step in range(3, 11)}
    assert names(run) == {40: "qwen3_rank_0-4_10.safetensors", 43: "qwen3_rank_0-5_3.safetensors"}
