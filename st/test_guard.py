"""The guard against bad steps: a run with poisoned samples that is rolled back equals, bit by bit,
a run whose data never had the samples of that step."""

from pathlib import Path

import numpy as np
import pytest

from st.data.make_data import STORY, cut, train_tokenizer
from st.pynative_cases import OURS
from st.pynative_run import PynativeRun, why_not
from st.run_attempts import events
from st.supervised_run import number_of_starts, supervised
from st.training_run import FORMAT_2, ONE_LAYER, Run, differences

pytestmark = pytest.mark.timeout(1200)

BATCH, BAD = 8, 8  # samples of a step; the bad step
STEPS = 10


def write_samples(folder, poisoned):
    """Writes ten steps of samples with floating-point masks. ``poisoned``: one mask of the bad step
    is NaN; else the samples of that step are left out."""
    from mindspore.mindrecord import FileWriter

    text = Path(STORY).read_text(encoding="utf-8")
    tokens = np.array(train_tokenizer(text, 512).encode(text).ids)
    rows = []
    for index, window in enumerate(cut(tokens, BATCH * STEPS, 32)):
        is_bad = index // BATCH == BAD - 1
        mask = np.full(32, np.nan if is_bad and index % BATCH == 3 else 1, np.float32)
        if poisoned or not is_bad:
            rows.append(
                {
                    "input_ids": window[:-1].copy(),
                    "labels": window[1:].copy(),
                    "loss_mask": mask,
                    "position_ids": np.arange(32, dtype=np.int32),
                }
            )
    folder.mkdir()
    kinds = dict.fromkeys(rows[0], "int32") | {"loss_mask": "float32"}
    writer = FileWriter(str(folder / "mcore.mindrecord"), 1, overwrite=True)
    writer.add_schema({name: {"type": kind, "shape": [-1]} for name, kind in kinds.items()}, "")
    writer.set_header_size(1 << 16)
    writer.set_page_size(1 << 16)
    writer.write_raw_data(rows)
    writer.commit()
    return folder


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    return {kind: write_samples(folder / str(kind), kind) for kind in (True, False)}


def training(folder, data, device, options=""):
    run = Run(folder, "quickstart_qwen3_dp2tp2.yaml", data, 4, device=device)
    run.options = f"{ONE_LAYER} {options}"
    size = len(data.name) and (STEPS if data.name == "True" else STEPS - 1) * BATCH
    return run.configure(
        {
            "runner_config.epochs": 1,
            "lr_schedule.total_steps": STEPS,
            "train_dataset.data_loader.num_samples": size,
            "train_dataset_task.dataset_config.data_loader.num_samples": size,
        }
    )


@pytest.mark.parametrize(
    "options",
    [
        FORMAT_2,
        pytest.param("", marks=pytest.mark.soak),
        pytest.param("--runner_config.sink_mode True", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_was_rolled_back_equals_one_without_the_samples(
    tmp_path, samples, device, options
):
    clean = training(tmp_path / "clean", samples[False], device, options)
    run = training(tmp_path / "poisoned", samples[True], device, options)
    clean.start().wait_for_success()
    supervised(run, MINDRESUME_GUARD_NAN="rollback").wait_for_success()
    # step 5 is saved; the bad step; up to it; behind it
    assert number_of_starts(run) == 3
    final = {row["step"]: row for row in run.steps()}
    assert differences(clean.steps(), list(final.values())) == []
    assert [row["bad_step"] for row in events(run, "guard_ended")] == [BAD]
    assert [(row["step"], row["samples"]) for row in events(run, "window_skipped")] == [
        (BAD - 1, BATCH)
    ]


@pytest.mark.parametrize("release, workers", [("2.1.0", 2)])
def test_the_pynative_trainer_too(tmp_path, samples, release, workers):
    if reason := why_not(release, workers):
        pytest.skip(reason)
    changes, guarded = {"training.steps": STEPS - 1}, {**OURS, "MINDRESUME_GUARD_NAN": "rollback"}
    clean, run = (
        PynativeRun(
            tmp_path / name, data=samples[kind], release=release, workers=workers, changes=changes
        )
        for name, kind in (("clean", False), ("poisoned", True))
    )
    clean.start().wait_for_success()
    assert run.start(**guarded).wait() == 67
    assert run.resume(**guarded).wait() == 67
    run.resume(**guarded).wait_for_success()
    final = {row["step"]: row for row in run.steps()}
    kept = ("hex", "samples")
    assert [[row.get(key) for key in kept] for row in final.values()] == [
        [row.get(key) for key in kept] for row in clean.steps()
    ]
