"""The job is killed, its disk is lost, and the same command resumes from the object store: in
ModelArts, with a fake moxing, and elsewhere, with an S3 server."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from mindresume.formats.iterations import TRACKER
from mindresume.model.manifest import FOLDER
from mindresume.storage.object_store import FsspecStore, RetryingStore
from st.checkpoint_files import tracker
from st.run_attempts import (
    LIMIT,
    assert_event,
    assert_resumed,
    contains,
    log_has,
    run_beside,
    steps_of,
)
from st.training_run import FORMAT_2, ROOT, Run, differences
from tests.fakes import s3

URL = "obs://bucket/job"
ALWAYS = (
    f"--remote_save_url {URL} --callbacks.1.save_checkpoint_steps 5 "
    "--callbacks.1.keep_checkpoint_max 2"
)


class Moxing:
    """ModelArts with a fake moxing; the bucket survives the loss of the job's disk."""

    url = URL

    @staticmethod
    def environment(run: Run, **more: str) -> dict[str, str]:
        objects = run.folder.parent / f"{run.folder.name}_objects"
        return {
            "MA_JOB_DIR": "/home/ma-user/modelarts",
            "FAKE_MOXING_ROOT": str(objects),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "fakes")]),
            **more,
        }

    @staticmethod
    def committed(run: Run) -> list[int]:
        """Steps whose manifest is in the bucket."""
        folder = run.folder.parent / f"{run.folder.name}_objects" / "bucket" / "job" / "checkpoint"
        return sorted(
            int(path.parent.name[5:15])
            for path in folder.glob("step-*/.mindresume/*/manifest.json")
        )


class S3:
    """Any machine, with an S3 server."""

    url = f"s3://{s3.BUCKET}/job"

    def __init__(self, server: str):
        self.server, self.store = server, RetryingStore(FsspecStore(self.url))

    def environment(self, run: Run, **more: str) -> dict[str, str]:
        return s3.environment(self.server)

    def committed(self, run: Run) -> list[int]:
        return sorted(
            int(name[5:15])
            for name in self.store.list(f"{self.url}/checkpoint")
            if name.endswith("/manifest.json")
        )


def killed_and_its_disk_lost(run: Run, arguments: str, step: int, store: Moxing | S3) -> list[int]:
    """Kills the job after ``step``, as soon as the bucket has a checkpoint. Returns the contents of
    the bucket."""
    run.start(arguments, **store.environment(run, FAKE_MOXING_DELAY="0.05"))
    run.wait_for_step(step)
    while not store.committed(run) and run.process.poll() is None:
        time.sleep(0.01)
    run.kill()
    shutil.rmtree(run.folder / "output")
    return store.committed(run)


def resumed(whole: Run, run: Run, arguments: str, there: list[int], store: Moxing | S3) -> None:
    run.start(arguments, **store.environment(run)).wait_for_success(LIMIT)
    assert_resumed(run, whole, there[-1])
    assert_event(run, "checkpoint_fetched", step=there[-1], url=contains(f"{store.url}/checkpoint"))
    assert_event(run, "run_opened", run_id=lambda value: value.startswith("0002-"))
    assert store.committed(run)[-1] == 40 and len(store.committed(run)) <= 2
    assert not log_has(run, "WARNING", "step 40", store.url)


def test_a_job_outside_modelarts_resumes_on_an_empty_disk(whole_single, tmp_path, monkeypatch):
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    arguments = ALWAYS.replace(URL, S3.url)
    with s3.serve() as server:
        for name, value in s3.environment(server).items():
            monkeypatch.setenv(name, value)
        run, store = run_beside(whole_single, tmp_path / "run", copied=False), S3(server)
        there = killed_and_its_disk_lost(run, arguments, 17, store)
        resumed(whole_single, run, arguments, there, store)


@pytest.mark.parametrize(
    "layout", [pytest.param("", id="1.0"), pytest.param(FORMAT_2, id="2.0", marks=pytest.mark.soak)]
)
def test_a_job_killed_during_its_download_resumes(whole_single, tmp_path, layout):
    """Half a download is no checkpoint: the next start fetches again, on the same disk."""
    run, command = run_beside(whole_single, tmp_path / "run", copied=False), f"{ALWAYS} {layout}"
    there = killed_and_its_disk_lost(run, command, 17, Moxing)
    assert there and there[-1] in (5, 10, 15)
    run.start(command, **Moxing.environment(run, FAKE_MOXING_KILL="copy 1"))
    assert run.wait(LIMIT) in (-signal.SIGKILL, 128 + signal.SIGKILL, 1)
    assert steps_of(run) == []
    resumed(whole_single, run, command, there, Moxing)


@pytest.mark.parametrize(
    "layout", [pytest.param("", id="1.0", marks=pytest.mark.soak), pytest.param(FORMAT_2, id="2.0")]
)
def test_a_job_killed_during_its_last_upload_uploads_the_step_at_the_next_start(
    whole_single, tmp_path, layout
):
    """That start has nothing to train. The killed job had published the step, in 2.0 not: a death
    before the rename."""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    command = f"{ALWAYS} {layout} --runner_config.epochs 1 --callbacks.1.save_checkpoint_steps 10"
    run.start(command, **Moxing.environment(run, FAKE_MOXING_KILL="copy 1"))
    assert (
        run.wait(LIMIT) in (-signal.SIGKILL, 128 + signal.SIGKILL, 1)
        and Moxing.committed(run) == []
    )
    if layout:
        folder = run.checkpoints / "iteration_00000010"
        (attempt,) = (folder / FOLDER).glob("step-*")
        folder.rename(run.checkpoints / FOLDER / attempt.name)
        (run.checkpoints / TRACKER).unlink()
    run.start(command, **Moxing.environment(run)).wait_for_success(LIMIT)
    assert steps_of(run) == [] and Moxing.committed(run) == [10]
    assert_event(run, "training_ended", outcome="nothing_to_train")
    assert (
        not layout
        or (run.checkpoints / "iteration_00000010").is_dir()
        and tracker(run.checkpoints) == 10
    )
    shutil.rmtree(run.folder / "output")
    run.start(command, **Moxing.environment(run)).wait_for_success(LIMIT)
    assert_event(run, "checkpoint_fetched", step=10)


def test_an_object_store_that_fails_does_not_stop_the_training(whole_single, tmp_path):
    """Every upload fails with a warning, and the job ends well. (One that cannot be listed does
    stop a start.)"""
    run = run_beside(whole_single, tmp_path / "run", copied=False)
    environment = Moxing.environment(
        run, MINDRESUME_COMMIT_TIMEOUT="5", FAKE_MOXING_REFUSE="copy write"
    )
    run.start(ALWAYS, **environment).wait_for_success(LIMIT)
    assert differences(whole_single.steps(), run.steps()) == []
    assert Moxing.committed(run) == []
    # behind the end of the training, after its last event
    assert log_has(run, "WARNING", "step 40", f"{URL}/checkpoint")


def test_a_wrong_setting_is_an_error_at_the_start(whole_single, tmp_path):
    """A url of another kind is an error of mindformers, which checks it first; ModelArts without
    moxing is our error."""
    run = run_beside(whole_single, tmp_path / "url", copied=False)
    run.start("--remote_save_url https://bucket/job", **Moxing.environment(run))
    assert run.wait(LIMIT) == 1
    assert log_has(run, "TypeError", "remote_save_url", "https://bucket/job")
    without = subprocess.run(
        [sys.executable, ROOT / "run_mindformer.py", "--config", ROOT / "configs" / run.config],
        env={**os.environ, "MA_JOB_DIR": "/home/ma-user/modelarts"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert without.returncode == 2
    assert (
        "this job runs in ModelArts (MA_JOB_DIR is set), where mindformers needs the "
        "package moxing" in without.stderr
    )
