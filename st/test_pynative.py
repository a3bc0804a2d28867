"""The PyNative trainer of mindformers with mindresume: trainings that die, and what the same command then does.

1.9.0 always, other releases if they are installed. An epoch has 20 steps and a training 45, so resumes are in each of three
epochs. The learning rate rises and falls. Losses, samples and random numbers are compared bit by bit.
"""
from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mindresume.coordination.preemption import STATUS
from st.checkpoint_files import flip_bit, iteration_steps, tensors_in, tracker
from st.pynative_run import GLOBAL_BATCH, PynativeRun, why_not
from st.run_attempts import FIXTURES, LIMIT, assert_event, contains, events
from st.training_run import ROOT, Attempt, Run, differences

STEPS = 45
OURS = {"CPU_CLUSTER_PLUGIN": "mindresume.plugin"}
DECAY = {"lr_scheduler.type": "CosineWithWarmUpLR", "lr_scheduler.lr_end": 1e-5, "lr_scheduler.warmup_ratio": 0.1}
DIED = (-9, 137)


def case(release: str, workers: int = 1, soak: bool = False) -> object:
    reason = why_not(release, workers)
    marks = [pytest.mark.skipif(bool(reason), reason=reason), *([pytest.mark.soak] if soak else [])]
    return pytest.param((release, workers), id=f"{release}-{workers}", marks=marks)


CASES = [case("1.9.0"), case("2.0.0", 2), case("2.1.0"), case("2.0.0", soak=True), case("2.1.0", 2, soak=True)]
needs_the_release_of_this_environment = pytest.mark.skipif(bool(why_not("1.9.0")), reason=why_not("1.9.0"))

Build = Callable[..., PynativeRun]


@pytest.fixture
def build(data, tmp_path) -> Build:
    """build(name, release, workers, **changes): a run in a folder of this test, not started yet."""
    def made(name: str = "run", release: str = "1.9.0", workers: int = 1, changes: Mapping[str, Any] | None = None
             ) -> PynativeRun:
        return PynativeRun(tmp_path / name, data=data, release=release, workers=workers,
                           changes={"training.steps": STEPS, **DECAY, **(changes or {})})
    return made


@pytest.fixture(scope="session")
def whole(shared, data) -> Callable[..., PynativeRun]:
    """whole(release, workers, changes): the same training, which nothing interrupts. Read it, do not change it."""
    def found(release: str = "1.9.0", workers: int = 1, changes: Mapping[str, Any] | None = None) -> PynativeRun:
        settings = {"training.steps": STEPS, **DECAY, **(changes or {})}

        def train(folder: Path) -> None:
            PynativeRun(folder, data=data, release=release, workers=workers, changes=settings).start(**OURS).wait_for_success()
        name = "_".join(map(str, ("whole_pynative", release, workers, *sorted((changes or {}).values()))))
        return PynativeRun(shared(name, train), data=data, release=release, workers=workers, changes=settings,
                           attempts=[Attempt()])
    return found


def steps_of(run: PynativeRun) -> list[int]:
    return [row["step"] for row in run.steps(-1)]


def assert_same(run: PynativeRun, reference: PynativeRun, first: int, last: int = STEPS) -> None:
    """The last attempt did the steps ``first`` to ``last`` on each rank, and each is that of ``reference``: loss, samples, random
    numbers, epoch and counters. If rank 0 died within a step, the others may have recorded it."""
    for rank in range(run.workers):
        rows, known = run.steps(-1, rank), {row["step"]: row for row in reference.steps(rank=rank)}
        if rank and rows and rows[-1]["step"] == last + 1:
            del rows[-1]
        assert [row["step"] for row in rows] == list(range(first, last + 1)), run.log(rank)[-3000:]
        expected = [known[row["step"]] for row in rows]
        assert [row for row in differences(expected, rows) if not row.endswith("is missing")] == []
        for key in ("draws", "opt_step", "consumed", "epoch"):
            assert [row[key] for row in rows] == [row[key] for row in expected], key


def dies(run: PynativeRun) -> None:
    assert run.wait(LIMIT) in DIED, run.log()[-3000:]


# ---- kill and resume -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("release_and_workers", CASES)
def test_deaths_in_each_epoch_and_in_a_save(whole, build, release_and_workers):
    """Also: the changes between synchronous and asynchronous saves, the fall-back from damage, and retention."""
    reference, run = whole(*release_and_workers), build("run", *release_and_workers)
    run.resume(CPU_CLUSTER_KILL_IN_SAVE="0@5:3", **OURS)                 # in the first save: a fresh start follows
    dies(run)
    assert_same(run, reference, 1, 4)
    run.resume(CPU_CLUSTER_KILL="all@13", **OURS)
    dies(run)
    assert_same(run, reference, 1, 13)
    run.resume(CPU_CLUSTER_KILL_IN_SAVE="0@25:2", **OURS)
    dies(run)
    assert_event(run, "resumed", step=10)
    assert_same(run, reference, 11, 24)                                  # a step is recorded after its save
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
    assert tracker(run.checkpoints) == STEPS and iteration_steps(run.checkpoints)[-1] == STEPS      # the last asynchronous save
    assert assert_event(run, "training_ended", outcome="finished", step=STEPS)
    assert iteration_steps(reference.checkpoints) == [35, 40, 45]                                   # save_max: 3
    assert all(step in (25, 30, 35, 40, 45) for step in iteration_steps(run.checkpoints))


@pytest.mark.parametrize("release_and_workers", [case("1.9.0"), case("2.1.0", soak=True), case("2.0.0", 2, soak=True)])
def test_a_shuffled_data_set(whole, build, release_and_workers):
    shuffled = {"train_dataset.dataloader.shuffle": True}
    reference, run = whole(*release_and_workers, shuffled), build("run", *release_and_workers, shuffled)
    order = [row["batch"] for row in reference.steps()]
    assert order[:20] != [row["batch"] for row in whole(*release_and_workers).steps()][:20]
    run.start(CPU_CLUSTER_KILL="all@33", **OURS)
    dies(run)
    run.resume(**OURS).wait_for_success()
    assert_same(run, reference, 31)


@pytest.mark.parametrize("release_and_workers", [case("2.0.0", 2), case("2.1.0", 2, soak=True)])
def test_two_processes_that_save_each_tensor_once(whole, build, release_and_workers):
    once = {"checkpoint.remove_redundancy": True}
    run = build("run", *release_and_workers, once)
    run.start(CPU_CLUSTER_KILL="all@13", **OURS)
    dies(run)
    continued = build("theirs", *release_and_workers, once)
    shutil.copytree(run.checkpoints, continued.checkpoints)
    continued.resume(CPU_CLUSTER_KILL="all@14")                                      # mindformers alone
    dies(continued)
    assert [row["hex"] for row in continued.steps(-1)] == [row["hex"] for row in whole(*release_and_workers).steps()[10:14]]
    sizes = [path.stat().st_size for path in sorted((run.checkpoints / "iteration_00000010").glob("*-model-*"))]
    assert len(sizes) == 2 and sum(sizes) < 1.5 * max(
        path.stat().st_size for path in (whole(*release_and_workers).checkpoints / "iteration_00000045").glob("*-model-*"))
    run.resume({"training.steps": STEPS}, **OURS).wait_for_success()
    assert_same(run, whole(*release_and_workers), 11)


@pytest.mark.parametrize("release_and_workers", [case("2.1.0"), case("2.0.0", soak=True)])
def test_gradient_accumulation(whole, build, release_and_workers):
    """A step has four micro-batches, which 2.1.0 reads as four items of the data set."""
    micro = {"training.local_batch_size": 2}
    reference, run = whole(*release_and_workers, micro), build("run", *release_and_workers, micro)
    run.start(CPU_CLUSTER_KILL="all@33", **OURS)
    dies(run)
    run.resume(**OURS).wait_for_success()
    assert_same(run, reference, 31)


@pytest.mark.parametrize("release_and_workers", [case("2.1.0"), case("2.0.0", soak=True)])
def test_bfloat16_weights_with_float32_copies(whole, build, release_and_workers):
    """The optimizer holds the copies. The computation stays in float32: the CPU has no MatMul of bfloat16."""
    half = {"model.params_dtype": "bfloat16"}
    reference, run = whole(*release_and_workers, half), build("run", *release_and_workers, half)
    saved = {name for path in (reference.checkpoints / "iteration_00000045").glob("*-opt-*") for name in tensors_in(path)}
    assert any(name.startswith("main_param.") for name in saved)
    run.start(CPU_CLUSTER_KILL="all@33", **OURS)
    dies(run)
    run.resume(**OURS).wait_for_success()
    assert_same(run, reference, 31)
    theirs = build("theirs", *release_and_workers, half)
    theirs.start({"training.steps": STEPS}, CPU_CLUSTER_KILL="all@12")               # mindformers alone
    dies(theirs)
    theirs.resume(CPU_CLUSTER_KILL="all@14", **OURS)
    dies(theirs)
    assert [row["hex"] for row in theirs.steps(-1)] == [row["hex"] for row in reference.steps()[10:14]]


@pytest.mark.soak
@pytest.mark.parametrize("release_and_workers", [case("1.9.0"), case("2.0.0", 2), case("2.1.0")])
def test_ten_deaths_anywhere(whole, build, release_and_workers):
    """Each attempt dies at a random step, at its end or at a random file operation of its next save."""
    reference, run, draw, step = whole(*release_and_workers), build("run", *release_and_workers), random.Random(19), 0
    for _ in range(10):
        last = min(step + draw.randint(1, 12), STEPS - 1)
        place = ({"CPU_CLUSTER_KILL": f"all@{last}"} if draw.random() < 0.5 else
                 {"CPU_CLUSTER_KILL_IN_SAVE": f"0@{last}:{draw.randint(1, 6)}"})
        run.resume({"checkpoint.async_save": draw.random() < 0.5}, **place, **OURS)
        dies(run)
        found = steps_of(run)
        assert not found or found[0] in (step + 1, *range(1, step + 1))
        assert_same(run, reference, found[0] if found else 1, found[-1] if found else 0)
        step = max([step, *found])
    run.resume(**OURS).wait_for_success()
    assert_same(run, reference, steps_of(run)[0])


# ---- the built-in ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("release_and_workers", [case("1.9.0"), case("2.1.0", soak=True), case("2.0.0", 2, soak=True)])
def test_each_continues_what_the_other_saved(whole, build, release_and_workers):
    reference = whole(*release_and_workers)
    theirs, ours = (build(name, *release_and_workers) for name in ("theirs", "ours"))
    theirs.start(CPU_CLUSTER_KILL="all@23")
    dies(theirs)
    theirs.resume(CPU_CLUSTER_KILL="all@26", **OURS)
    dies(theirs)
    assert_event(theirs, "resumed", step=20)
    rows, known = theirs.steps(-1), reference.steps()[20:26]
    assert [(row["step"], row["hex"], row["samples"]) for row in rows] == [
        (row["step"], row["hex"], row["samples"]) for row in known]             # mindformers saves no random states
    ours.start(CPU_CLUSTER_KILL="all@13", **OURS)
    dies(ours)
    ours.resume(CPU_CLUSTER_KILL="all@20")                       # without mindresume, to the end of the epoch
    dies(ours)
    assert [(row["step"], row["hex"], row["samples"]) for row in ours.steps(-1)] == [
        (row["step"], row["hex"], row["samples"]) for row in reference.steps()[10:20]]


# ---- the graph trainer -----------------------------------------------------------------------------------------------

GRAPH = FIXTURES / "mf190_20_single"
AS_GRAPH = {"training.steps": 20, "model.vocab_size": 128, "model.num_hidden_layers": 2, "model.seq_length": 16,
            "model.max_position_embeddings": 16, "model.eos_token_id": 1, "train_dataset.dataloader.num_samples": 80,
            "lr_scheduler.type": "ConstantWarmUpLR", "lr_scheduler.warmup_ratio": 0}


def assert_close(found: list[dict], expected: list[dict]) -> None:
    """The first loss depends on the weights alone, and the second on the state of the optimizer. Then the two trainers drift
    apart, because their optimizers and norms compute in another order: 0.004 in ten steps, the loss changes by 0.15."""
    pairs = [(row["step"], abs(row["loss"] - other["loss"])) for row, other in zip(found, expected, strict=True)]
    assert [row["step"] for row in found] == [row["step"] for row in expected] == list(range(11, 21))
    assert pairs[0][1] < 1e-4 and pairs[1][1] < 3e-4 and max(pairs, key=lambda pair: pair[1])[1] < 0.01, pairs


@pytest.mark.parametrize("release", [case("1.9.0"), case("2.0.0", soak=True), case("2.1.0", soak=True)])
def test_a_checkpoint_of_the_graph_trainer(data, sequences, tmp_path, release):
    settings = {key: value for key, value in DECAY.items() if key not in AS_GRAPH and "lr_end" not in key}
    run = PynativeRun(tmp_path, data=sequences, release=release[0], changes={**settings, **AS_GRAPH})
    source = {"checkpoint.load_path": str(GRAPH / "output" / "checkpoint" / "iteration_00000010")}
    run.start(source, **OURS).wait_for_success()
    assert_event(run, "resumed", step=10)
    graph = json.loads((GRAPH / "losses.json").read_text(encoding="utf-8"))["uninterrupted"]
    assert_close(run.steps(-1), [row for row in graph if row["step"] > 10])
    refused = PynativeRun(tmp_path / "refused", data=sequences, release=release[0], changes=run.changes)
    refused.start({**source, "model.use_contiguous_weight_layout_attention": True}, **OURS)
    assert refused.wait(LIMIT) not in (0, *DIED) and steps_of(refused) == []
    assert "use_contiguous_weight_layout_attention" in refused.log()


@pytest.mark.soak
@needs_the_release_of_this_environment
def test_the_graph_trainer_continues(sequences, tmp_path):
    run = PynativeRun(tmp_path / "pynative", data=sequences, changes=AS_GRAPH)
    run.start(**OURS).wait_for_success()
    expected = [row for row in run.steps() if row["step"] > 10]
    graph = Run(tmp_path / "graph", str(GRAPH / "config.yaml"), sequences)
    graph.start(f"--load_checkpoint {run.checkpoints / 'iteration_00000010'} --resume_training True").wait_for_success()
    assert_close(graph.steps(-1), expected)


# ---- how it starts and ends ------------------------------------------------------------------------------------------

@needs_the_release_of_this_environment
def test_an_empty_folder_is_a_fresh_start_and_sigterm_saves_and_ends(whole, build):
    """Through run_mindformer.py --mode 1."""
    run = build()
    run.program, run.options = ROOT / "run_mindformer.py", "--mode 1"
    run.resume()                                                 # load_path names a folder that does not exist yet
    run.wait_for_step(7)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(LIMIT) == STATUS, run.log()[-3000:]
    step = steps_of(run)[-1]
    assert_event(run, "training_ended", outcome="preempted", step=step)
    assert tracker(run.checkpoints) == step
    assert_same(run, whole(), 1, step)
    run.resume(CPU_CLUSTER_KILL="all@22")
    dies(run)
    assert_same(run, whole(), step + 1, 22)
    shown = run.mindresume("report", str(run.folder / "output"), "--json")
    found = json.loads(shown.stdout)
    assert found["steps"]["reached"] == 22 and found["goodput"] > 0.01 and found["restarts"] == 1


@needs_the_release_of_this_environment
def test_a_register_path_and_one_line_of_the_configuration(whole, build):
    """A start script without mindresume. mindformers runs the registered module before it makes its callbacks."""
    run = build(changes={"lr_scheduler.auto_register": "mindresume_plugin.MindResume"})
    path = run.mindresume("plugin-path").stdout.strip()
    run.start(REGISTER_PATH=path, CPU_CLUSTER_KILL="all@7")
    dies(run)
    run.resume(REGISTER_PATH=path, CPU_CLUSTER_KILL="all@12")
    dies(run)
    assert_event(run, "resumed", step=5)
    assert_same(run, whole(), 6, 12)


@needs_the_release_of_this_environment
def test_nothing_is_left_to_train(whole, build):
    run = build()
    run.start({"checkpoint.load_path": str(whole().checkpoints)}, **OURS).wait_for_success()
    assert steps_of(run) == [] and assert_event(run, "training_ended", outcome="nothing_to_train")
    assert not run.checkpoints.exists() or iteration_steps(run.checkpoints) == []


@needs_the_release_of_this_environment
def test_weights_alone_and_a_resume_without_saves(whole, build):
    alone, unsaved = build("alone"), build("unsaved")
    source = {"checkpoint.load_path": str(whole().checkpoints / "iteration_00000040")}
    alone.start({**source, "checkpoint.no_load_optim": True, "training.steps": 3}, **OURS).wait_for_success()
    assert steps_of(alone) == [1, 2, 3] and alone.steps()[0]["samples"] == whole().steps()[0]["samples"]
    assert alone.steps()[0]["loss"] < whole().steps()[0]["loss"] - 0.3
    unsaved.start({**source, "checkpoint.enable_save": False}, **OURS).wait_for_success()
    assert_event(unsaved, "resumed", step=40)
    assert_same(unsaved, whole(), 41)


# ---- failures --------------------------------------------------------------------------------------------------------

@needs_the_release_of_this_environment
def test_failed_saves_are_reported_and_counted(build):
    """A file lies where a folder of a save must be, as after a mistake of a user; the next saves succeed."""
    run = build(changes={"training.steps": 12})
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "iteration_00000005").write_text("in the way")
    run.start(**OURS).wait(LIMIT)
    failed = [event for event in events(run) if event["event"] == "save_failed"]
    assert failed and failed[0]["step"] == 5, [event["event"] for event in events(run)]
    assert steps_of(run)[-1] == 12 and tracker(run.checkpoints) == 12


@needs_the_release_of_this_environment
def test_a_checkpoint_without_an_optimizer_is_refused_by_name(whole, build):
    run, folder = build(changes={"checkpoint.enable_save": False}), "iteration_00000040"
    shutil.copytree(whole().checkpoints / folder, run.folder / folder)
    for path in (run.folder / folder).iterdir():
        if "-opt-" in path.name:
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)                                 # what is left looks like a folder of mindformers
    run.start({"checkpoint.load_path": str(run.folder / folder)}, **OURS)
    assert run.wait(LIMIT) not in (0, *DIED) and steps_of(run) == []
    assert "no_load_optim" in run.log()


assert GLOBAL_BATCH == 8
