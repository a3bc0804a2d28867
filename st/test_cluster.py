"""Several processes, started by scripts/msrun_launcher.sh: one training that dies three times, in
one folder. Data parallel 2; with --soak also data parallel 2 x model parallel 2.

    attempt 1   SIGKILL to all in the middle of a save          the half-written checkpoint is
                refused
    attempt 2   SIGKILL to one rank                             the whole job ends by itself, with
                an exit status
    attempt 3   a rank folder is lost before; SIGKILL to all    its replicas are read instead
    attempt 4   a bit of the newest checkpoint flips before     all ranks fall back to the one
                before; to the end

Then all steps of all attempts are compared with the uninterrupted run of the same command.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindresume.model.manifest import FOLDER, MANIFEST, attempts
from mindresume.storage import TEMPORARY
from st.checkpoint_files import flip_bit
from st.run_attempts import (
    ALL_RANKS_END,
    RunAttempt,
    finished_attempt,
    not_identical,
    run_beside,
)
from st.training_run import differences

pytestmark = pytest.mark.timeout(1800)
STEPS = 40
TENSOR = "adam_v.decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def chance() -> random.Random:
    """ST_SEED repeats the choice of moments and ranks; the activity of the job at that moment is
    not repeatable."""
    seed = int(os.environ.get("ST_SEED", time.time_ns() % 10**6))
    print(f"ST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def chain(whole_several, chance, tmp_path_factory) -> SimpleNamespace:
    """Runs the four attempts. Only what keeps the next one from starting is asserted here.
    ``lost``: the rank whose folder is removed; ``damaged``: the newest file of the one before."""
    run = whole_several.like(tmp_path_factory.mktemp("chain"))
    chain = SimpleNamespace(
        run=run, ranks=run.workers, lost=run.workers - 1, attempts=[], builtin=None
    )

    run.start()
    chain.half_written = run.stop_in_a_save(first_step=8)
    chain.processes = run.kill()
    chain.attempts.append(finished_attempt(run))
    chain.left_half_written = run.half_written()
    chain.builtin = run_beside(run, tmp_path_factory.mktemp("builtin"))

    prediction = run.which()
    run.start()
    run.wait_for_step(prediction["chosen"]["step"] + chance.randint(2, 8))
    time.sleep(chance.uniform(0, 0.5))
    chain.killed_rank = chance.randrange(chain.ranks)
    os.kill(run.worker(chain.killed_rank), 9)
    chain.status = run.wait(ALL_RANKS_END)
    chain.attempts.append(finished_attempt(run, prediction))

    chain.before_loss = run.which()
    shutil.rmtree(run.checkpoints / f"rank_{chain.lost}")
    prediction = run.which()
    chain.missing = [path for path in prediction["chosen"]["files"] if not os.path.exists(path)]
    run.start()
    # one more save is complete by then
    run.wait_for_step(prediction["chosen"]["step"] + chance.randint(6, 8))
    time.sleep(chance.uniform(0, 0.5))
    run.kill()
    chain.attempts.append(finished_attempt(run, prediction))

    chain.before_damage = run.which()
    chain.damaged = Path(chain.before_damage["chosen"]["files"][chain.lost - 1])
    flip_bit(chain.damaged, TENSOR)
    prediction = run.which()
    chain.still_missing = [
        path for path in prediction["chosen"]["files"] if not os.path.exists(path)
    ]
    run.start().wait()
    chain.attempts.append(finished_attempt(run, prediction))
    chain.verify_end = run.mindresume("verify", "--json", str(run.checkpoints))
    return chain


def reasons(answer: dict) -> dict[int, str]:
    """{step: why it was refused}"""
    return {refusal["step"]: refusal["reason"] for refusal in answer["refused"]}


def resumed_where_predicted(attempt: RunAttempt) -> None:
    """Checks that all ranks selected the step that ``which`` printed before, loaded weights, and
    trained the next step first."""
    step = attempt.predicted["chosen"]["step"]
    assert attempt.selected == [step] * len(attempt.events)
    assert attempt.trained()[0] == step + 1
    for rank, rows in enumerate(attempt.events):
        assert rank in [row["rank"] for row in rows if row["event"] == "weights_loaded"]


def test_attempt_1_killed_in_the_middle_of_a_save(chain):
    first = chain.attempts[0]
    assert chain.processes >= chain.ranks and first.status != 0
    assert first.selected == [None] * chain.ranks and first.trained()[0] == 1
    assert chain.half_written, "no save was cut"
    # SIGKILL: nothing was tidied up
    assert set(chain.half_written) <= set(chain.left_half_written)
    assert all(
        Path(path).name.startswith(".qwen3_rank_") and path.endswith(TEMPORARY)
        for path in chain.half_written
    )


def test_attempt_2_which_names_the_half_written_checkpoint(chain):
    second = chain.attempts[1]
    chosen = second.predicted["chosen"]["step"]
    assert chosen == chain.attempts[0].committed[-1]
    assert list(reasons(second.predicted)) == [chosen + 5]
    assert "the save never completed" in reasons(second.predicted)[chosen + 5]
    assert chosen + 5 in [
        row["step"] for row in second.events[0] if row["event"] == "candidate_refused"
    ]
    resumed_where_predicted(second)


def test_attempt_2_removes_the_half_written_checkpoint(chain):
    """Each rank cleans its own folder when it starts to save."""
    for path in chain.left_half_written:
        rank = int(Path(path).parent.name.removeprefix("rank_"))
        assert any(
            Path(path).name in row["text"]
            for row in chain.attempts[1].events[rank]
            if row["event"] == "notice"
        )
        assert not Path(path).exists()


def test_attempt_2_the_job_ends_by_itself_when_one_rank_dies(chain):
    """Within ALL_RANKS_END seconds (else the fixture fails), with the status of a process that got
    SIGKILL."""
    assert chain.status == 128 + 9, (
        f"exit status {chain.status} after SIGKILL to rank {chain.killed_rank}"
    )
    assert chain.attempts[1].trained()[-1] < STEPS


def test_attempt_3_a_lost_rank_folder_changes_nothing(chain):
    """Data parallel 2: of four ranks, rank 1 holds what rank 3 has lost, bit by bit."""
    third = chain.attempts[2]
    before = chain.before_loss["chosen"]
    assert [third.predicted["chosen"][key] for key in ("step", "epoch", "files")] == [
        before[key] for key in ("step", "epoch", "files")
    ] and before["warnings"] == []
    (remark,) = third.predicted["chosen"]["warnings"]
    assert f"rank {chain.lost} " in remark
    assert remark in [
        row["text"]
        for row in third.events[0]
        if row["event"] == "notice" and row["level"] == "warning"
    ]
    assert [Path(path).parent.name for path in chain.missing] == [f"rank_{chain.lost}"]
    assert third.predicted["chosen"]["step"] >= max(
        [chain.attempts[1].selected[0], *chain.attempts[1].committed]
    )
    resumed_where_predicted(third)


def test_attempt_4_a_flipped_bit_is_named_and_all_ranks_fall_back(chain):
    fourth, newest = chain.attempts[3], chain.before_damage["chosen"]["step"]
    # it saved once or twice before it was killed, as fast as the machine is
    third = chain.attempts[2]
    assert newest > third.predicted["chosen"]["step"]
    assert fourth.predicted["chosen"]["step"] == max(
        step for step in [third.predicted["chosen"]["step"], *third.committed] if step < newest
    )
    refusal = next(refusal for refusal in fourth.predicted["refused"] if refusal["step"] == newest)
    assert (refusal["rank"], refusal["file"]) == (
        chain.lost - 1,
        str(chain.damaged),
    ) and TENSOR in refusal["reason"]
    refused = next(
        row
        for row in fourth.events[0]
        if row["event"] == "candidate_refused" and row["step"] == newest
    )
    assert TENSOR in refused["reason"] and refused["file"].endswith(
        f"rank_{chain.lost - 1}/{chain.damaged.name}"
    )
    resumed_where_predicted(fourth)
    # the one whose rank folder was lost
    if chain.before_loss["chosen"]["files"] == fourth.predicted["chosen"]["files"]:
        assert chain.still_missing == chain.missing


def test_every_step_of_every_attempt_is_that_of_the_uninterrupted_run(chain, whole_several):
    assert [not_identical(whole_several, attempt.steps) for attempt in chain.attempts] == [
        [],
        [],
        [],
        [],
    ]
    assert differences(whole_several.steps(), chain.attempts[-1].steps) == []
    # A step is recorded after its save: of the last one before a kill there may be the checkpoint
    # alone.
    done = {
        step for attempt in chain.attempts for step in (*attempt.trained(), *attempt.selected)
    } - {None}
    assert done == set(range(1, STEPS + 1))
    assert chain.attempts[-1].status == 0


def test_the_last_attempt_leaves_three_complete_checkpoints_and_nothing_else(chain):
    """keep_checkpoint_max 3 counts over all attempts; what killed ones left is removed."""
    run = chain.run
    assert chain.verify_end.returncode == 0, chain.verify_end.stdout
    rows = json.loads(chain.verify_end.stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (40, "verified"),
        (35, "verified"),
        (30, "verified"),
    ]
    folder = run.checkpoints / FOLDER
    assert (
        {step for _, step, _ in attempts(os.listdir(folder))}
        == {30, 35, 40}
        == {int(path.parent.name[5:15]) for path in folder.glob(f"*/{MANIFEST}")}
    )
    for rank in range(chain.ranks):
        names = {
            path.name.rpartition("-")[2]: path.name
            for path in (run.checkpoints / f"rank_{rank}").iterdir()
        }
        assert set(names) - {"meta.json"} == {
            "3_10.safetensors",
            "4_10.safetensors",
            "4_5.safetensors",
        }, names
        assert ("meta.json" in names) is (rank == 0)


@pytest.mark.soak
def test_mindformers_alone_resumes_from_our_folder(chain, whole_several):
    """It uses a copy of the folder after attempt 1, with half-written files: meta.json of rank 0
    names the last commit."""
    run, expected = chain.builtin, chain.attempts[1].predicted["chosen"]["step"]
    run.start("--no-mindresume").wait_for_success()
    assert [row["step"] for row in run.steps()] == list(range(expected + 1, STEPS + 1))
    assert differences(whole_several.steps(), run.steps()) == []
    assert run.event_files() == []
    # and back: what mindformers saved since then is the newest
    answer = run.which()
    assert answer["chosen"]["step"] == STEPS
    assert (
        all(Path(path).is_file() for path in answer["chosen"]["files"])
        and len(answer["chosen"]["files"]) == chain.ranks
    )
