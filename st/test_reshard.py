"""One training, one folder, another parallel layout at every start: auto_trans_ckpt, and nothing
said about the old layout.

    steps  1-5    dp2 x tp2 with optimizer shard, 4 ranks      the folder of the uninterrupted run
           as it was after step 5
    steps  6-12   dp2 with optimizer shard, 2 ranks            SIGKILL after step 12: the newest
           checkpoint is step 10
    steps 11-17   one process                                  SIGKILL after step 17: the newest
                  checkpoint is step 15
    steps 16-20   dp4 with optimizer shard, 4 ranks            to the end

Once with .safetensors files; with .ckpt files the second line, to the end.
"""

import json

import pytest

from mindresume.model.training_state import is_transient
from st.checkpoint_files import copy_checkpoints, merged, not_equal, shards
from st.layout_runs import (
    ATTEMPT_LIMIT,
    COUNTERS,
    KINDS,
    STEPS,
    Layout,
    Outcome,
    Plan,
    assert_losses,
    assert_samples,
    loaded_tensors,
    run_of_kind,
    samples,
    saved_shards,
    start_layout,
    uninterrupted_run,
)
from st.run_attempts import finished_attempt
from st.training_run import Run

# by default st/test_iterations.py, st/test_single_convert.py, st/test_cookbook.py and the judge
pytestmark = [pytest.mark.timeout(1200), pytest.mark.soak]


PLANS = {
    "safetensors": (
        Plan(Layout(dp=2), 5, 12),
        Plan(Layout(dp=1), 10, 17),
        Plan(Layout(dp=4), 15, None),
    ),
    "ckpt": (Plan(Layout(dp=2), 5, None),),
}


# ---- the attempts --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PLANS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(kind, data, device, graphs, trained) -> Run:
    return uninterrupted_run(kind, data, device, graphs, trained)


@pytest.fixture(scope="module")
def chain(kind, whole, data, device, graphs, tmp_path_factory) -> tuple[Run, list[Outcome]]:
    """Runs the attempts. What keeps the next one from starting is asserted here: that an attempt
    ends as planned."""
    run, found = (
        run_of_kind(kind, tmp_path_factory.mktemp(f"chain_{kind}"), data, device, graphs),
        [],
    )
    copy_checkpoints(whole, run, 5)
    for plan in PLANS[kind]:
        saved = merged(saved_shards(run, plan.takes))
        start_layout(
            run,
            plan.layout,
            KINDS[kind].columns,
            "--auto_trans_ckpt True --balanced_load True",
            **{"CPU_CLUSTER_KILL": f"all@{plan.killed}"} if plan.killed else {},
        )
        status = run.wait(ATTEMPT_LIMIT)
        assert (status == 0) == (plan.killed is None), (
            f"exit status {status}:\n" + run.log()[-4000:]
        )
        loaded = loaded_tensors(run, [tensors for _, _, tensors in shards(run, plan.takes + 5)])
        found.append(Outcome(plan, finished_attempt(run), saved, loaded, samples(run)))
    return run, found


# ---- conditions ----------------------------------------------------------------------------------


def test_every_attempt_resumes_from_the_newest_checkpoint_of_the_one_before(chain):
    for found in chain[1]:
        plan = found.plan
        assert found.attempt.selected == [plan.takes] * plan.layout.ranks
        # rank 0 may die before it records it
        lasts = (STEPS,) if plan.killed is None else (plan.killed, plan.killed - 1)
        assert found.attempt.trained() in [list(range(plan.takes + 1, last + 1)) for last in lasts]


def test_an_attempt_starts_bit_for_bit_with_what_was_saved(chain, kind):
    """Compares weights, both moments, the step of the optimizer and the loss scale as global
    tensors, in any layouts."""
    for found in chain[1]:
        saved, loaded = found.saved, found.loaded
        assert set(saved) - set(loaded) == COUNTERS
        assert [name for name in set(loaded) - set(saved) if not is_transient(name)] == []
        wrong = not_equal(
            {name: saved[name] for name in loaded if name in saved},
            {name: loaded[name] for name in saved if name in loaded},
        )
        assert wrong == [], f"{found.plan}: {len(wrong)} of {len(loaded)} tensors"
        assert int(loaded["global_step"][0]) == found.plan.takes
        moments = [name for name in loaded if name.startswith("adam_")]
        assert len(moments) >= (20 if KINDS[kind].options else 36) and all(
            loaded[name].any() for name in moments
        )


def test_the_losses_are_those_of_the_run_that_never_stopped(chain, whole, capsys):
    assert_losses(whole, [(found.plan.layout, found.attempt.steps) for found in chain[1]], capsys)


def test_every_step_sees_the_samples_that_it_sees_in_every_layout(chain, whole):
    assert_samples(
        whole, [(found.plan.takes, found.plan.killed or STEPS, found.samples) for found in chain[1]]
    )


def test_three_checkpoints_are_kept_and_complete(chain, kind):
    """keep_checkpoint_max is 3, over all attempts: what ranks wrote that later attempts do not have
    is removed as well."""
    run = chain[0]
    checked = run.mindresume("verify", "--json", str(run.checkpoints))
    assert checked.returncode == 0, checked.stdout
    assert [(row["step"], row["state"]) for row in json.loads(checked.stdout)["checkpoints"]] == [
        (20, "verified"),
        (15, "verified"),
        (10, "verified"),
    ]
    files = sorted(
        path.relative_to(run.checkpoints).parts[0] for path in run.checkpoints.glob("rank_*/*-*")
    )
    saved_by = {
        step: max(
            (found.plan for found in chain[1] if found.plan.takes < step),
            key=lambda plan: plan.takes,
        ).layout.ranks
        for step in (10, 15, 20)
    }
    assert files == sorted(f"rank_{rank}" for ranks in saved_by.values() for rank in range(ranks))
