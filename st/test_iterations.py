"""Checkpoint 2.0 on several ranks: one training, one folder, another parallel layout at every
start; and going over from 1.0.

    steps  1-7    dp2 x tp2 with optimizer shard, 4 ranks      SIGKILL after step 7: the newest
           checkpoint is step 5
    steps  6-12   dp2, replicas, 2 ranks                       SIGKILL after step 12: step 10
    steps 11-17   one process                                  SIGKILL after step 17: step 15
    steps 16-20   dp2 with optimizer shard, 2 ranks            to the end

Nothing is said about old layouts, nothing is converted on disk. The first three save in the
background and without redundancy, the last one neither. The uninterrupted run saves Checkpoint 1.0,
so that a job can change from its rank folders to 2.0.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mindresume.formats import CheckpointDir
from mindresume.formats.iterations import TRACKER, iteration_name
from mindresume.formats.scan import scan
from mindresume.model.manifest import FOLDER, TensorRecord
from mindresume.model.training_state import is_transient
from mindresume.storage.posix import PosixStorage
from st.builtin_versions import VERSIONS, expect_readable
from st.checkpoint_files import (
    common_json,
    copy_checkpoints,
    copy_iterations,
    iteration_files,
    iteration_steps,
    layout_table,
    not_equal,
    of_network,
    saved_tensors,
    slices_of,
    tensors_of_ranks,
    tracker,
)
from st.layout_runs import (
    ATTEMPT_LIMIT,
    BATCH,
    COUNTERS,
    FIRST,
    STEPS,
    TOLERANCE,
    Layout,
    Outcome,
    Plan,
    assert_losses,
    assert_samples,
    loaded_tensors,
    recorded_run,
    samples,
    start_layout,
)
from st.run_attempts import (
    assert_event,
    committed_steps,
    contains,
    finished_attempt,
    not_identical,
    steps_of,
)
from st.training_run import FORMAT_2, Run

pytestmark = pytest.mark.timeout(1200)
KEEP = "--callbacks.1.keep_checkpoint_max 4"
BEHIND = "--callbacks.1.async_save True --callbacks.1.remove_redundancy True"


REPLICAS = "--parallel.enable_parallel_optimizer False"
BALANCED = "--balanced_load True"
PLANS = (
    Plan(FIRST, None, 7, BEHIND),
    Plan(Layout(dp=2), 5, 12, f"{BEHIND} {REPLICAS} {BALANCED}"),
    Plan(Layout(dp=1), 10, 17, BEHIND),
    Plan(Layout(dp=2), 15, None),
)


# ---- the attempts --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(data, device, graphs, trained) -> Run:
    """The uninterrupted run, Checkpoint 1.0. It keeps all four checkpoints."""
    return trained(
        "whole_layouts",
        recorded_run(Path(), data, device, graphs).like(Path(), workers=FIRST.ranks),
        lambda run: start_layout(run, FIRST, "--auto_trans_ckpt True", KEEP).wait_for_success(
            ATTEMPT_LIMIT
        ),
    )


@pytest.fixture(scope="module")
def chain(data, device, graphs, tmp_path_factory) -> tuple[Run, list[Outcome]]:
    """Runs the attempts. What keeps the next one from starting is asserted here: that an attempt
    ends as planned."""
    run, found = recorded_run(tmp_path_factory.mktemp("chain"), data, device, graphs), []
    for plan in PLANS:
        saved = saved_tensors(run.checkpoints, plan.takes) if plan.takes else {}
        start_layout(
            run,
            plan.layout,
            KEEP,
            FORMAT_2,
            plan.extra,
            kill=f"{plan.killed}@{plan.saves}" if plan.killed else None,
        )
        status = run.wait(ATTEMPT_LIMIT)
        assert (status == 0) == (plan.killed is None), (
            f"exit status {status}:\n" + run.log()[-4000:]
        )
        attempt, table = finished_attempt(run), layout_table(run.checkpoints, plan.saves)
        # without a load nothing is compiled, or cut, yet
        loaded = parameters(run, table) if plan.takes else {}
        found.append(Outcome(plan, attempt, saved, loaded, samples(run), table))
    return run, found


def parameters(run: Run, table: Mapping[str, TensorRecord]) -> dict[str, np.ndarray]:
    return {
        name: array for name, array in loaded_tensors(run, table).items() if not is_transient(name)
    }


# ---- the chain -----------------------------------------------------------------------------------


def test_every_attempt_resumes_from_the_newest_checkpoint_of_the_one_before(chain):
    for found in chain[1]:
        plan = found.plan
        assert found.attempt.selected == [plan.takes] * plan.layout.ranks
        assert found.attempt.trained() == list(
            range((plan.takes or 0) + 1, (plan.killed or STEPS) + 1)
        )
        assert (found.attempt.status == 0) == (plan.killed is None)


def test_an_attempt_starts_bit_for_bit_with_what_was_saved(chain):
    """Compares weights, both moments and the step of the optimizer as global tensors, in any
    layouts."""
    for found in chain[1][1:]:
        assert not_equal(found.saved, found.loaded) == [], found.plan
        assert int(found.loaded["global_step"][0]) == found.plan.takes
        moments = [name for name in found.loaded if name.startswith("adam_")]
        assert len(moments) >= 20 and all(found.loaded[name].any() for name in moments)


def test_the_losses_are_those_of_the_run_that_never_stopped(chain, whole, capsys):
    assert not_identical(whole, chain[1][0].attempt.steps) == []
    assert_losses(whole, [(found.plan.layout, found.attempt.steps) for found in chain[1]], capsys)


def test_every_step_sees_the_samples_that_it_sees_in_every_layout(chain, whole):
    assert_samples(
        whole,
        [(found.plan.takes or 0, found.plan.killed or STEPS, found.samples) for found in chain[1]],
    )


def test_the_files_are_those_of_each_job(chain):
    """Four checkpoints of four layouts are in one folder and share only the tracker."""
    root = chain[0].checkpoints
    assert iteration_steps(root) == [5, 10, 15, 20] and tracker(root) == STEPS
    for found in chain[1]:
        ranks, step = found.plan.layout.ranks, found.plan.saves
        weights = [
            f"qwen3-{kind}-{rank:07d}-{ranks:07d}.safetensors"
            for kind in ("model", "opt")
            for rank in range(ranks)
        ]
        assert iteration_files(root, step) == sorted(
            [*weights, "common.json", *["metadata.json"] * (ranks > 1)]
        )
        assert common_json(root, step) == {
            "epoch_num": -(-step // 10),
            "step_num": step,
            "global_step": step,
            "loss_scale": 1.0,
            "global_batch_size": BATCH,
        }
    assert sorted(path.name for path in root.iterdir()) == [
        FOLDER,
        *(iteration_name(s) for s in (5, 10, 15, 20)),
        TRACKER,
    ]


def test_redundancy_is_removed(chain):
    """In dp2 without optimizer shards both ranks have everything; each slice is in the files of one
    of them, and both have some. The other layouts have no replicas."""
    root = chain[0].checkpoints
    for step in (5, 10):
        parts = slices_of(root, step)
        assert len(set(parts)) == len(parts) > 30
    assert all(
        layout.local_shape(row.global_shape) == row.global_shape
        for row in layout_table(root, 10).values()
        if (layout := row.layout) is not None
    )
    shares = [
        {name for name, row in rows.items() if row.layout}
        for rows in tensors_of_ranks(root, 10).values()
    ]
    assert (
        len(shares) == 2 and all(len(share) > 10 for share in shares) and not shares[0] & shares[1]
    )


def traffic(rows: list[dict]) -> tuple[float, float]:
    """(MiB read, MiB from other ranks) of one rank, of the one notice with two sizes."""
    texts = [row["text"] for row in rows if row["event"] == "notice"]
    (found,) = [sizes for text in texts if len(sizes := re.findall(r"([0-9.]+) MiB", text)) == 2]
    return float(found[0]), float(found[1])


def test_balanced_load_reads_once_what_both_ranks_need(chain):
    """The second attempt: each rank reads about half and has the rest from the other; the sum is
    what both need."""
    (first, to_first), (second, to_second) = (traffic(rows) for rows in chain[1][1].attempt.events)
    assert first == pytest.approx(to_second, abs=0.2) and second == pytest.approx(to_first, abs=0.2)
    assert 0.8 < first / second < 1.25


def test_verify_finds_four_complete_checkpoints(chain):
    checked = chain[0].mindresume("verify", "--json", str(chain[0].checkpoints))
    assert checked.returncode == 0, checked.stdout
    assert [(row["step"], row["state"]) for row in json.loads(checked.stdout)["checkpoints"]] == [
        (step, "verified") for step in (20, 15, 10, 5)
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "plan", range(len(PLANS)), ids=["dp2tp2-nodup", "dp2-nodup", "one", "dp2-all"]
)
def test_the_built_in_reads_it_without_a_trainer(chain, version, plan, tmp_path):
    """It reads each in its own layout, in that of the next attempt, and in one process."""
    found, behind = chain[1][plan], chain[1][(plan + 1) % len(PLANS)]
    root = copy_iterations(chain[0].checkpoints, tmp_path / "copy", found.plan.saves)
    tensors = of_network(saved_tensors(chain[0].checkpoints, found.plan.saves))
    for table in (found.table, behind.table, {}):
        layouts = {
            name: row.layout
            for name, row in table.items()
            if row.layout is not None and name in tensors
        }
        expect_readable(root, tensors, layouts or None, version)


# ---- from Checkpoint 1.0 and back ----------------------------------------------------------------


@pytest.fixture(scope="module")
def over(whole, data, device, graphs, tmp_path_factory) -> SimpleNamespace:
    """Returns the rank folders of the uninterrupted run as they were after step 10. One process
    continues in Checkpoint 2.0 and is killed after step 17 (``run``); then the same command without
    the key runs in a folder with only its own saves (``back``)."""
    base = tmp_path_factory.mktemp("over")
    run, back = (recorded_run(base / name, data, device, graphs) for name in ("over", "back"))
    copy_checkpoints(whole, run, 10)
    one = Layout(dp=1)
    start_layout(run, one, KEEP, FORMAT_2, kill="17@15").wait(ATTEMPT_LIMIT)
    copy_iterations(run.checkpoints, back.checkpoints, 15)
    return SimpleNamespace(
        run=run, back=start_layout(back, one, KEEP).wait_for_success(ATTEMPT_LIMIT)
    )


def test_rank_folders_of_four_are_resumed_by_one_process_in_checkpoint_2(over, whole):
    run, reference = over.run, {row["step"]: row for row in whole.steps()}
    assert (
        run.process.returncode == 128 + 9
        and iteration_steps(run.checkpoints) == [15]
        and tracker(run.checkpoints) == 15
    )
    assert_event(run, "checkpoint_selected", step=10, description=contains("4 ranks"))
    assert steps_of(run) == list(range(11, 18))
    saved = {
        name: array
        for name, array in saved_tensors(whole.checkpoints, 10, legacy=True).items()
        if name not in COUNTERS
    }
    assert not_equal(saved, parameters(run, layout_table(run.checkpoints, 15))) == []
    assert (
        max(abs(row["loss"] - reference[row["step"]]["loss"]) for row in run.steps(-1)) <= TOLERANCE
    )


def test_the_rank_folders_are_kept(over):
    """keep_checkpoint_max counts the checkpoints of both formats, and there are three."""
    assert len(list(over.run.checkpoints.glob("rank_*/*.safetensors"))) == 8


def test_newer_iteration_folders_come_first(over):
    assert [
        candidate.step
        for candidate in scan(CheckpointDir(PosixStorage(), str(over.run.checkpoints))).candidates
    ] == [15, 10, 5]


def test_and_back(over):
    """Checkpoint 1.0 resumes from an iteration folder, bit by bit, and saves rank folders beside
    it."""
    back = over.back
    assert_event(back, "checkpoint_selected", step=15, description=contains("iteration_00000015"))
    assert steps_of(back) == [16, 17, 18, 19, 20]
    assert [row["hex"] for row in back.steps()][:2] == [row["hex"] for row in over.run.steps()][-2:]
    assert (
        iteration_steps(back.checkpoints) == [15]
        and len(list(back.checkpoints.glob("rank_0/*.safetensors"))) == 1
    )
    assert committed_steps(back) == [20]
