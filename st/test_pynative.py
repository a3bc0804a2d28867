"""The PyNative trainer of mindformers with mindresume: trainings that die, and what the same
command then does.

1.9.0 always, other releases if they are installed. See st/pynative_cases.py. The results are a
table in docs/releases.md.
"""

import random
import shutil
import subprocess
import sys

import pytest

from st.checkpoint_files import flip_bit, iteration_steps, tensors_in, tracker
from st.pynative_cases import (
    DECAY,
    DIED,
    OURS,
    STEPS,
    assert_same,
    build,  # noqa: F401
    dies,
    each,
    same_losses,
    steps_of,
    whole,  # noqa: F401
)  # noqa: F401
from st.pynative_run import PynativeRun
from st.run_attempts import FIXTURES, LIMIT, PROGRAMS, assert_event, contains, known_steps
from st.training_run import ROOT, Run

# ruff: noqa: F811  build and whole are fixtures


# ---- kill and resume -----------------------------------------------------------------------------


@each(
    "kills in each of three epochs and in saves, fall-back, retention",
    "1.9.0",
    "2.1.0",
    soak=("2.0.0", "1.9.0-2", "2.0.0-2", "2.1.0-2"),
)
def test_deaths_in_each_epoch_and_in_a_save(whole, build, release, workers):
    """Also: the changes between synchronous and asynchronous saves, the fall-back from damage, and
    retention."""
    reference, run = whole(release, workers), build("run", release, workers)
    # in the first save: a fresh start follows
    run.resume(CPU_CLUSTER_KILL_IN_SAVE="0@5:3", **OURS)
    dies(run)
    assert_same(run, reference, 1, 4)
    run.resume(CPU_CLUSTER_KILL="all@13", **OURS)
    dies(run)
    assert_same(run, reference, 1, 13)
    run.resume(CPU_CLUSTER_KILL_IN_SAVE="0@25:2", **OURS)
    dies(run)
    assert_event(run, "resumed", step=10)
    # a step is recorded after its save
    assert_same(run, reference, 11, 24)
    run.resume({"checkpoint.async_save": True}, CPU_CLUSTER_KILL="all@33", **OURS)
    dies(run)
    assert_event(run, "resumed", step=20)
    assert_same(run, reference, 21, 33)
    damaged = sorted((run.checkpoints / "iteration_00000030").glob("*-opt-*"))[-1]
    flip_bit(damaged)
    run.resume({"checkpoint.async_save": True}, **OURS).wait_for_success()
    assert_event(run, "candidate_refused", step=30, file=contains(damaged.name))
    assert_event(run, "resumed", step=25)
    assert_same(run, reference, 26)
    # the last asynchronous save
    assert tracker(run.checkpoints) == STEPS and iteration_steps(run.checkpoints)[-1] == STEPS
    assert assert_event(run, "training_ended", outcome="finished", step=STEPS)
    # save_max: 3
    assert iteration_steps(reference.checkpoints) == [35, 40, 45]
    assert all(step in (25, 30, 35, 40, 45) for step in iteration_steps(run.checkpoints))


@pytest.mark.soak
@each("ten random deaths", "1.9.0", "2.0.0-2", "2.1.0")
def test_ten_deaths_anywhere(whole, build, release, workers):
    """Each attempt dies at a random step, at its end or at a random file operation of its next
    save."""
    reference, run, draw, step = (
        whole(release, workers),
        build("run", release, workers),
        random.Random(19),
        0,
    )
    for _ in range(10):
        last = min(step + draw.randint(1, 12), STEPS - 1)
        place = (
            {"CPU_CLUSTER_KILL": f"all@{last}"}
            if draw.random() < 0.5
            else {"CPU_CLUSTER_KILL_IN_SAVE": f"0@{last}:{draw.randint(1, 6)}"}
        )
        run.resume({"checkpoint.async_save": draw.random() < 0.5}, **place, **OURS)
        dies(run)
        found = steps_of(run)
        assert not found or found[0] in (step + 1, *range(1, step + 1))
        assert_same(run, reference, found[0] if found else 1, found[-1] if found else 0)
        step = max([step, *found])
    run.resume(**OURS).wait_for_success()
    assert_same(run, reference, steps_of(run)[0])


@each(
    "two processes that save each tensor once (remove_redundancy)",
    "2.0.0-2",
    soak=("1.9.0-2", "2.1.0-2"),
)
def test_two_processes_that_save_each_tensor_once(whole, build, release, workers):
    once = {"checkpoint.remove_redundancy": True}
    run = build("run", release, workers, once)
    run.start(CPU_CLUSTER_KILL_IN_SAVE="0@15:3", **OURS)
    dies(run)
    assert_same(run, whole(release, workers), 1, 14)
    continued = build("theirs", release, workers, once)
    shutil.copytree(run.checkpoints, continued.checkpoints)
    # mindformers alone
    continued.resume(CPU_CLUSTER_KILL="all@14")
    dies(continued)
    assert same_losses(continued.steps(-1), whole(release, workers), 11, 14)
    sizes = [
        path.stat().st_size
        for path in sorted((run.checkpoints / "iteration_00000010").glob("*-model-*"))
    ]
    assert len(sizes) == 2 and sum(sizes) < 1.5 * max(
        path.stat().st_size
        for path in (whole(release, workers).checkpoints / "iteration_00000045").glob("*-model-*")
    )
    run.resume({"training.steps": STEPS}, **OURS).wait_for_success()
    assert_same(run, whole(release, workers), 11)


def test_a_callback_that_loads_weights_of_its_own_trains_no_step(build):
    """Its ``on_step_begin`` comes after ours; and a training that saves nothing has no callback of
    ours."""
    run = build("run")
    run.start(CPU_CLUSTER_KILL="all@7", **OURS)
    dies(run)
    run.program = PROGRAMS / "pynative_loads_weights.py"
    for saves in (True, False):
        run.resume({"checkpoint.enable_save": saves}, **OURS).wait(LIMIT)
        assert run.process.returncode == 1 and steps_of(run) == []
        assert_event(
            run,
            "training_ended",
            outcome="failed",
            reason=contains("AlteredWeightsError", "LoadsWeights"),
        )


# ---- configurations of data and numbers ----------------------------------------------------------


def killed_and_resumed(reference: PynativeRun, run: PynativeRun, **environment: str) -> None:
    """The training dies after step 33, in the second epoch, and ends like ``reference``."""
    run.start(CPU_CLUSTER_KILL="all@33", **OURS, **environment)
    dies(run)
    assert_same(run, reference, 1, 33)
    run.resume(**OURS, **environment).wait_for_success()
    assert_same(run, reference, 31)


@each("shuffled data", "1.9.0", soak=("2.0.0", "2.1.0", "1.9.0-2", "2.0.0-2", "2.1.0-2"))
def test_a_shuffled_data_set(whole, build, release, workers):
    shuffled = {"train_dataset.dataloader.shuffle": True}
    reference = whole(release, workers, shuffled)
    order = [row["batch"] for row in reference.steps()]
    assert order[:20] != [row["batch"] for row in whole(release, workers).steps()][:20]
    killed_and_resumed(reference, build("run", release, workers, shuffled))


@each("gradient accumulation", "2.1.0", soak=("1.9.0", "2.0.0"))
def test_gradient_accumulation(whole, build, release, workers):
    """A step has four micro-batches, which 2.1.0 reads as four items of the data set."""
    micro = {"training.local_batch_size": 2}
    killed_and_resumed(whole(release, workers, micro), build("run", release, workers, micro))


@pytest.mark.soak
@each(
    "a batch size that grows (rampup_batch_size)",
    "2.1.0",
    "2.1.0-2",
    absent="rampup_batch_size: since mindformers 2.1.0",
)
def test_a_batch_size_that_grows(whole, build, release, workers):
    """From 2 samples to 8, in levels of 40 samples: with two processes a level has two steps
    less."""
    grows = {"training.rampup_batch_size": [2, 2, 120], "training.local_batch_size": 2 // workers}
    reference = whole(release, workers, grows)
    sizes = [row["state"]["global_batch_size"] for row in reference.steps()]
    assert (
        sizes[0] == 2 and sizes[-1] == 8 and set(sizes) == {2, 4, 6, 8} and sizes == sorted(sizes)
    )
    assert [row["consumed"] for row in reference.steps()] == [
        sum(sizes[:end]) for end in range(1, STEPS + 1)
    ]
    run = build("run", release, workers, grows)
    # a save every five steps: several batch sizes
    for last, saved in ((7, 0), (13, 5), (24, 10), (33, 20)):
        run.resume(CPU_CLUSTER_KILL=f"all@{last}", **OURS)
        dies(run)
        assert_same(run, reference, saved + 1, last)
    run.resume(**OURS).wait_for_success()
    assert_same(run, reference, 31)


@pytest.mark.soak
@each(
    "data balance between the ranks (balance_enabled)",
    "2.1.0-2",
    absent="balance_enabled: since mindformers 2.1.0",
)
def test_samples_that_are_balanced_between_the_ranks(shared, build, release, workers):
    """mindformers gives each rank samples that cost the same, and finds its position by itself. The
    network ignores the ends of the documents, because the CPU has no flash attention."""
    pytest.importorskip("datasets")
    packed = shared(
        "packed",
        lambda folder: subprocess.run(
            [sys.executable, str(ROOT / "st" / "data" / "make_packed.py"), str(folder)], check=True
        ),
    )
    balance = {
        "train_dataset.balance_enabled": True,
        "training.local_batch_size": 2,
        "train_dataset.dataloader": {
            "type": "HFDataLoader",
            "load_func": "load_from_disk",
            "dataset_path": str(packed),
            "shuffle": False,
            "create_compressed_eod_mask": True,
            "compressed_eod_mask_length": 4,
        },
    }
    reference, run = (
        build("reference", release, workers, balance),
        build("run", release, workers, balance),
    )
    reference.start(**OURS).wait_for_success()
    one_pass = [
        sample
        for rank in range(workers)
        for row in reference.steps(rank=rank)[:20]
        for sample in row["samples"]
    ]
    assert len(set(one_pass)) == len(one_pass) == 160
    killed_and_resumed(reference, run)


@each(
    "bfloat16 weights with float32 copies",
    "2.1.0",
    soak=("2.0.0",),
    absent="no float32 copies before mindformers 2.0.0",
)
def test_bfloat16_weights_with_float32_copies(whole, build, release, workers, soak):
    """The optimizer holds the copies. The computation stays in float32: the CPU has no MatMul of
    bfloat16. With --soak also a resume of what mindformers saved."""
    half = {"model.params_dtype": "bfloat16"}
    reference = whole(release, workers, half)
    saved = {
        name
        for path in (reference.checkpoints / "iteration_00000045").glob("*-opt-*")
        for name in tensors_in(path)
    }
    assert any(name.startswith("main_param.") for name in saved)
    killed_and_resumed(reference, build("run", release, workers, half))
    if not soak:
        return
    theirs = build("theirs", release, workers, half)
    theirs.start(CPU_CLUSTER_KILL="all@12")  # mindformers alone
    dies(theirs)
    theirs.resume(CPU_CLUSTER_KILL="all@14", **OURS)
    dies(theirs)
    assert [row["hex"] for row in theirs.steps(-1)] == [
        row["hex"] for row in reference.steps()[10:14]
    ]


@pytest.mark.soak
@each(
    "steps without an update (use_skip_step_on_nan)",
    "2.1.0",
    "2.1.0-2",
    absent="use_skip_step_on_nan: since mindformers 2.1.0",
)
def test_steps_that_the_trainer_skips(whole, build, release, workers):
    """The optimizer counts them not; the trainer counts all of them, and those in a row, of which
    the third is the end."""
    skips, broken = (
        {"training.use_skip_step_on_nan": True, "training.max_consecutive_skipped_steps": 3},
        "7,29,30,32",
    )
    reference, run = (
        whole(release, workers, skips, CPU_CLUSTER_NAN=broken),
        build("run", release, workers, skips),
    )
    assert [reference.steps()[-1][key] for key in ("step", "opt_step")] == [STEPS, STEPS - 4]
    assert reference.steps()[-1]["state"]["skipped_steps"] == 4
    killed_and_resumed(reference, run, CPU_CLUSTER_NAN=broken)
    third = build("third", release, workers, skips)
    third.start(CPU_CLUSTER_KILL="all@10", CPU_CLUSTER_NAN="9,10", **OURS)
    dies(third)
    third.resume(CPU_CLUSTER_NAN="11", **OURS)
    assert third.wait(LIMIT) not in (0, *DIED) and steps_of(third) == []
    assert "max_consecutive_skipped_steps=3" in third.log()


@pytest.mark.soak
@each("numbers that callbacks keep in TrainerState", "1.9.0", "2.0.0", "2.1.0")
def test_numbers_of_callbacks(build, release, workers):
    reference, run = build("reference", release, workers), build("run", release, workers)
    reference.program = run.program = ROOT / "st" / "programs" / "pynative_counting.py"
    reference.start(**OURS).wait_for_success()
    last = reference.steps()[-1]["state"]
    assert (
        last["best_model_checkpoint"] == "/weights/step-42"
        and last["best_metric"] > 4
        and last["loss_scale"] == 2.0**7
    )
    killed_and_resumed(reference, run)


# ---- the built-in --------------------------------------------------------------------------------


@each(
    "resumes what mindformers saved, and the other way round",
    "1.9.0",
    soak=("2.0.0", "2.1.0", "1.9.0-2", "2.0.0-2"),
)
def test_each_continues_what_the_other_saved(whole, build, release, workers):
    reference = whole(release, workers)
    theirs, ours = (build(name, release, workers) for name in ("theirs", "ours"))
    theirs.start(CPU_CLUSTER_KILL="all@23")
    dies(theirs)
    theirs.resume(CPU_CLUSTER_KILL="all@26", **OURS)
    dies(theirs)
    assert_event(theirs, "resumed", step=20)
    assert same_losses(theirs.steps(-1), reference, 21, 26)
    ours.start(CPU_CLUSTER_KILL="all@13", **OURS)
    dies(ours)
    # without mindresume, to the end of the epoch
    ours.resume(CPU_CLUSTER_KILL="all@20")
    dies(ours)
    assert same_losses(ours.steps(-1), reference, 11, 20)


# ---- the graph trainer ---------------------------------------------------------------------------

GRAPH = FIXTURES / "mf190_20_single"
AS_GRAPH = {
    "training.steps": 20,
    "model.vocab_size": 128,
    "model.num_hidden_layers": 2,
    "model.seq_length": 16,
    "model.max_position_embeddings": 16,
    "model.eos_token_id": 1,
    "train_dataset.dataloader.num_samples": 80,
    "lr_scheduler.type": "ConstantWarmUpLR",
    "lr_scheduler.warmup_ratio": 0,
}


def assert_close(found: list[dict], expected: list[dict]) -> None:
    """The first loss depends on the weights alone, and the second on the state of the optimizer.
    Then the two trainers drift apart, because their optimizers and norms compute in another order:
    0.004 in ten steps, the loss changes by 0.15."""
    pairs = [
        (row["step"], abs(row["loss"] - other["loss"]))
        for row, other in zip(found, expected, strict=True)
    ]
    assert (
        [row["step"] for row in found] == [row["step"] for row in expected] == list(range(11, 21))
    )
    assert (
        pairs[0][1] < 1e-4 and pairs[1][1] < 3e-4 and max(pairs, key=lambda pair: pair[1])[1] < 0.01
    ), pairs


def refuses(run: PynativeRun, changes: dict, *facts: str) -> None:
    run.start(changes, **OURS)
    assert run.wait(LIMIT) not in (0, *DIED) and steps_of(run) == []
    assert contains(*facts)(run.log()), run.log()[-3000:]


@each("resumes what the graph trainer of 1.9.0 saved", "1.9.0", soak=("2.0.0", "2.1.0"))
def test_a_checkpoint_of_the_graph_trainer(sequences, tmp_path, release, workers):
    settings = {
        key: value for key, value in DECAY.items() if key not in AS_GRAPH and "lr_end" not in key
    }
    run = PynativeRun(tmp_path, data=sequences, release=release, changes={**settings, **AS_GRAPH})
    source = {"checkpoint.load_path": str(GRAPH / "output" / "checkpoint" / "iteration_00000010")}
    run.start(source, **OURS).wait_for_success()
    assert_event(run, "resumed", step=10)
    assert_close(run.steps(-1), [row for row in known_steps(GRAPH.name) if row["step"] > 10])
    refused = PynativeRun(
        tmp_path / "refused", data=sequences, release=release, changes=run.changes
    )
    refuses(
        refused,
        {**source, "model.use_contiguous_weight_layout_attention": True},
        "use_contiguous_weight_layout_attention",
    )


@each("refuses another order of elements within a tensor", "1.9.0", soak=("2.0.0", "2.1.0"))
def test_an_order_that_only_the_graph_trainer_has(sequences, tmp_path, release, workers, soak):
    """The graph trainer records it; neither trainer resumes with another one, the graph trainer
    only with --soak."""
    key = "use_contiguous_weight_layout_attention"
    graph = Run(tmp_path / "graph", str(GRAPH / "config.yaml"), sequences)
    graph.start(f"--model.model_config.{key} True --runner_config.epochs 1").wait_for_success()
    run = PynativeRun(tmp_path / "pynative", data=sequences, release=release, changes=AS_GRAPH)
    refuses(
        run,
        {"checkpoint.load_path": str(graph.checkpoints)},
        str(graph.checkpoints),
        f"{key}: True, this one False",
    )
    if not soak:
        return
    graph.start(
        f"--model.model_config.{key} False --load_checkpoint {graph.checkpoints} --resume_training "
        "True"
    )
    assert graph.wait(LIMIT) != 0 and graph.steps(-1) == []
    assert contains(str(graph.checkpoints), f"{key}: True, this one False")(graph.log())


@pytest.mark.soak
@each("the graph trainer resumes what it saved", "1.9.0")
def test_the_graph_trainer_continues(sequences, tmp_path, release, workers):
    run = PynativeRun(tmp_path / "pynative", data=sequences, changes=AS_GRAPH)
    run.start(**OURS).wait_for_success()
    expected = [row for row in run.steps() if row["step"] > 10]
    graph = Run(tmp_path / "graph", str(GRAPH / "config.yaml"), sequences)
    graph.start(
        f"--load_checkpoint {run.checkpoints / 'iteration_00000010'} --resume_training True"
    ).wait_for_success()
    assert_close(graph.steps(-1), expected)
