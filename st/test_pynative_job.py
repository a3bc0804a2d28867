"""How a PyNative training with mindresume starts and ends, where its checkpoints go, and what it
does when saves fail."""

import errno
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from mindresume.coordination.preemption import STATUS
from st.checkpoint_files import iteration_steps, tracker
from st.pynative_cases import DIED, OURS, STEPS, assert_same, build, dies, each, steps_of, whole  # noqa: F401
from st.run_attempts import LIMIT, assert_event, contains, events, selected_step
from st.test_remote import Moxing
from st.training_run import ROOT

# ruff: noqa: F811  build and whole are fixtures
OTHERS = ("2.0.0", "2.1.0")


# ---- how it starts and ends ----------------------------------------------------------------------


@each(
    "an empty folder is a fresh start; SIGTERM saves and ends; run_mindformer.py",
    "1.9.0",
    soak=OTHERS,
)
def test_an_empty_folder_is_a_fresh_start_and_sigterm_saves_and_ends(
    whole, build, release, workers
):
    """Through run_mindformer.py --mode 1."""
    run = build("run", release)
    run.program, run.options = ROOT / "run_mindformer.py", "--mode 1"
    # load_path names a folder that does not exist yet
    run.resume()
    run.wait_for_step(7)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(LIMIT) == STATUS, run.log()[-3000:]
    step = steps_of(run)[-1]
    assert_event(run, "training_ended", outcome="preempted", step=step)
    assert tracker(run.checkpoints) == step
    assert_same(run, whole(release), 1, step)
    run.resume(CPU_CLUSTER_KILL="all@22")
    dies(run)
    assert_same(run, whole(release), step + 1, 22)
    shown = run.mindresume("report", str(run.folder / "output"), "--json")
    found = json.loads(shown.stdout)
    assert found["steps"]["reached"] == 22 and found["goodput"] > 0.01 and found["restarts"] == 1


@each("one line of the configuration (auto_register)", "1.9.0", soak=OTHERS)
def test_a_register_path_and_one_line_of_the_configuration(whole, build, release, workers):
    """A start script without mindresume. mindformers runs the registered module before it makes its
    callbacks."""
    run = build(
        "run", release, changes={"lr_scheduler.auto_register": "mindresume_plugin.MindResume"}
    )
    path = run.mindresume("plugin-path").stdout.strip()
    run.start(REGISTER_PATH=path, CPU_CLUSTER_KILL="all@7")
    dies(run)
    run.resume(REGISTER_PATH=path, CPU_CLUSTER_KILL="all@12")
    dies(run)
    assert_event(run, "resumed", step=5)
    assert_same(run, whole(release), 6, 12)


@pytest.mark.soak
@each("a training that is complete does nothing", "1.9.0", *OTHERS)
def test_nothing_is_left_to_train(whole, build, release, workers):
    run = build("run", release)
    run.start({"checkpoint.load_path": str(whole(release).checkpoints)}, **OURS).wait_for_success()
    assert steps_of(run) == [] and assert_event(run, "training_ended", outcome="nothing_to_train")
    assert not run.checkpoints.exists() or iteration_steps(run.checkpoints) == []


@each("weights alone (no_load_optim); a resume without saves", "1.9.0", soak=OTHERS)
def test_weights_alone_and_a_resume_without_saves(whole, build, release, workers):
    alone, unsaved, reference = build("alone", release), build("unsaved", release), whole(release)
    source = {"checkpoint.load_path": str(reference.checkpoints / "iteration_00000040")}
    alone.start(
        {**source, "checkpoint.no_load_optim": True, "training.steps": 3}, **OURS
    ).wait_for_success()
    assert (
        steps_of(alone) == [1, 2, 3]
        and alone.steps()[0]["samples"] == reference.steps()[0]["samples"]
    )
    assert alone.steps()[0]["loss"] < reference.steps()[0]["loss"] - 0.3
    unsaved.start({**source, "checkpoint.enable_save": False}, **OURS).wait_for_success()
    assert_event(unsaved, "resumed", step=40)
    assert_same(unsaved, reference, 41)


# ---- object store --------------------------------------------------------------------------------


@pytest.mark.soak
@each(
    "a resume from the object store on an empty disk (remote_save_url)", "1.9.0", "2.0.0-2", *OTHERS
)
def test_a_lost_disk(whole, build, release, workers):
    """In ModelArts, with a fake moxing."""
    run = build("run", release, workers, {"remote_save_url": Moxing.url})
    run.resume(**Moxing.environment(run, FAKE_MOXING_DELAY="0.02"), **OURS)
    run.wait_for_step(22)  # in the second epoch
    while not Moxing.committed(run) and run.process.poll() is None:
        time.sleep(0.01)
    run.kill()
    there = Moxing.committed(run)
    shutil.rmtree(run.folder / "output")
    run.resume(**Moxing.environment(run), **OURS).wait_for_success(LIMIT)
    assert [selected_step(run, rank) for rank in range(workers)] == [there[-1]] * workers
    assert_event(
        run, "checkpoint_fetched", step=there[-1], url=contains(f"{Moxing.url}/checkpoint")
    )
    assert_same(run, whole(release, workers), there[-1] + 1)
    assert Moxing.committed(run)[-1] == STEPS and len(Moxing.committed(run)) <= 3


# ---- failures ------------------------------------------------------------------------------------

# A file system that root is not needed for, and that ends with the process. It has bytes, which a
# save counts before it begins, but room for 7 files only: a save needs 11.
SMALL_DISK = (
    "unshare",
    "-Urm",
    "bash",
    "-c",
    "D=output/checkpoint; mkdir -p $D && mount -t tmpfs -o nr_inodes=100 none $D && "
    'mkdir $D/ballast && (cd $D/ballast && touch $(seq 91)) && exec "$@"',
    "_",
)


def has_small_disks(folder) -> bool:
    """Returns whether this user may mount a file system in a namespace of its own."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run(
            [*SMALL_DISK, "true"], cwd=folder, capture_output=True, check=False
        ).returncode
        == 0
    )


@each(
    "the disk is full for a while: failed saves are counted, later ones work", "1.9.0", soak=OTHERS
)
def test_a_full_disk(whole, build, tmp_path, release, workers):
    """ENOSPC itself, in the middle of a save: a file system that is full until the first save has
    failed."""
    if not has_small_disks(tmp_path):
        pytest.skip("unshare -Urm and mount are not allowed here")
    run, reference = build("run", release), whole(release)
    run.start(prefix=SMALL_DISK, **OURS)
    while not events(run, "save_failed") and run.process.poll() is None:
        time.sleep(0.01)
    run.signal_all(signal.SIGSTOP)
    disk = f"/proc/{run.process.pid}/root{run.checkpoints}"
    shutil.rmtree(f"{disk}/ballast")
    run.signal_all(signal.SIGCONT)
    run.wait_for_step(23)
    run.signal_all(signal.SIGSTOP)
    shutil.copytree(disk, tmp_path / "saved", symlinks=True)
    run.kill()
    failed, saved = (
        events(run, "save_failed"),
        [event["step"] for event in events(run, "save_committed")],
    )
    assert [(row["step"], row["failures_in_a_row"]) for row in failed] in (
        [(5, 1)],
        [(5, 1), (10, 2)],
    )
    assert all(os.strerror(errno.ENOSPC) in row["reason"] for row in failed)
    assert saved[:1] == [failed[-1]["step"] + 5] and saved[-1] >= 20
    assert_same(run, reference, 1, steps_of(run)[-1])
    shutil.rmtree(run.checkpoints)
    shutil.copytree(tmp_path / "saved", run.checkpoints, symlinks=True)
    assert not set(iteration_steps(run.checkpoints)) & {row["step"] for row in failed}
    run.resume(**OURS).wait_for_success()
    assert selected_step(run) == saved[-1]
    assert_same(run, reference, saved[-1] + 1)


@pytest.mark.soak
@each("a file in the place of a checkpoint folder", "1.9.0", *OTHERS)
def test_failed_saves_are_reported_and_counted(build, release, workers):
    """As after a mistake of a user; the next saves succeed."""
    run = build("run", release, changes={"training.steps": 12})
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "iteration_00000005").write_text("in the way")
    run.start(**OURS).wait(LIMIT)
    failed = [event for event in events(run) if event["event"] == "save_failed"]
    assert failed and failed[0]["step"] == 5, [event["event"] for event in events(run)]
    assert steps_of(run)[-1] == 12 and tracker(run.checkpoints) == 12


@pytest.mark.soak
@each("a checkpoint without an optimizer is refused by name", "1.9.0", *OTHERS)
def test_a_checkpoint_without_an_optimizer_is_refused_by_name(whole, build, release, workers):
    run, folder = (
        build("run", release, changes={"checkpoint.enable_save": False}),
        "iteration_00000040",
    )
    shutil.copytree(whole(release).checkpoints / folder, run.folder / folder)
    for path in (run.folder / folder).iterdir():
        if "-opt-" in path.name:
            path.unlink()
        elif path.is_dir():
            # what is left looks like a folder of mindformers
            shutil.rmtree(path)
    run.start({"checkpoint.load_path": str(run.folder / folder)}, **OURS)
    assert run.wait(LIMIT) not in (0, *DIED) and steps_of(run) == []
    assert "no_load_optim" in run.log()
