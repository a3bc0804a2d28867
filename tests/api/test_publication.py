"""Published weights: the bytes of an export, LATEST, what stays, what a dead publisher leaves, and
readers."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_folders import GROUPED, document, random, rules
from huggingface_folders import assemble as in_mindformers
from rank_folders import RUN, name_of, state_of, target_of

import mindresume
from mindresume import runtime
from mindresume.api import publication
from mindresume.api.publication import publish_step, published
from mindresume.errors import ConfigError, MissingCheckpointError, SaveError
from mindresume.events import PublishFailed, WeightsPublished
from mindresume.saving.committer import Committer
from mindresume.saving.publisher import Publisher
from mindresume.saving.shard_writer import rank_shard, write_shard
from mindresume.settings import PublishSettings


def save(root, step, run=RUN):
    """Commits a checkpoint whose weights are those of its step and run."""
    seed = step + 1000 * (run != RUN)
    tensors = in_mindformers(rules(GROUPED), random(GROUPED, seed))
    shard = rank_shard(name_of(0, step), state_of(step), tensors, metadata={"format": "ms"})
    write_shard(target_of(root, 0, 1, run), shard, saved_at=1000.0)
    Committer(target_of(root, 0, 1, run)).poll(step)


class Place:
    """A training with checkpoints at some steps, and the folder where it publishes."""

    def __init__(self, folder: Path, *steps: int, **settings):
        self.root, self.dir, self.events = folder / "checkpoint", folder / "weights", []
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(document(GROUPED)), encoding="utf-8")
        self.config = str(folder / "config.json")
        self.settings = PublishSettings(
            **{"every_steps": 10, "dir": str(self.dir), "config": self.config, **settings}
        )
        for step in steps:
            save(self.root, step)

    def publish(self, step, catches_up=False):
        publish_step(self.settings, str(self.root), step, catches_up, self.events.append)
        return self

    @property
    def latest(self):
        return (self.dir / "LATEST").read_text(encoding="utf-8")

    @property
    def folders(self):
        return sorted(path.name for path in self.dir.glob("step-*"))

    @property
    def told(self):
        return [event.step for event in self.events if isinstance(event, WeightsPublished)]


def contents(folder: Path):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_the_folder_is_that_of_an_export(tmp_path, dtype):
    place = Place(tmp_path, 10, 20, dtype=dtype).publish(10)
    mindresume.export_hf(place.root, tmp_path / "hf", step=10, config=place.config, dtype=dtype)
    assert contents(place.dir / "step-10") == contents(tmp_path / "hf")
    assert place.latest == "step-10\n" and place.told == [10]


def test_a_step_that_is_there_is_not_written_again(tmp_path):
    place = Place(tmp_path, 10).publish(10)
    before = os.stat(place.dir / "step-10").st_ino
    assert place.publish(10, catches_up=True).told == [10]
    assert os.stat(place.dir / "step-10").st_ino == before


def test_the_newest_stay_and_what_is_held(tmp_path):
    place = Place(tmp_path, 10, 20, 30, 40, 50, keep=2).publish(10)
    (place.dir / "step-5").mkdir()  # of somebody else
    with published(place.dir) as held:
        for step in (20, 30, 40):
            place.publish(step)
        assert held == f"{place.dir}/step-10" and Path(held, "config.json").exists()
        assert place.folders == ["step-10", "step-30", "step-40", "step-5"]
    assert place.publish(50).folders == ["step-40", "step-5", "step-50"]
    assert [path.name for path in (place.dir / ".work").iterdir()] == ["lock"]


def test_steps_of_a_training_that_went_back_go_first(tmp_path):
    place = Place(tmp_path, 10, 30, 40, keep=2).publish(30).publish(40).publish(10)
    assert place.latest == "step-10\n" and "step-10" in place.folders
    save(place.root, 20)
    assert place.publish(20).folders == ["step-10", "step-20"]


def test_weights_of_another_save_of_the_step_are_replaced(tmp_path):
    place = Place(tmp_path / "a", 10).publish(10)
    before = contents(place.dir / "step-10")
    again = Place(tmp_path / "b", dir=str(place.dir))
    save(again.root, 10, RUN.replace("1", "2"))
    with published(place.dir), pytest.raises(SaveError, match="step-10"):
        again.publish(10)
    assert contents(place.dir / "step-10") == before
    again.publish(10)
    assert contents(place.dir / "step-10") != before and again.told == [10]


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    place = Place(tmp_path, 10)
    (place.dir / "step-10").mkdir(parents=True)
    (place.dir / "step-10" / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="step-10"):
        place.publish(10)
    assert contents(place.dir / "step-10") == {"notes.txt": b"mine"}


@pytest.mark.parametrize(
    "saved, before, resumed, expected",
    [
        ((10, 20), (10,), 20, [20]),
        ((10, 20), (10,), 25, [20]),  # it resumed from memory
        ((10, 20, 30), (10,), 20, [20]),
        ((10, 15), (10,), 15, []),  # not due
        ((15,), (), 15, [15]),
        ((), (), 10, []),  # from another folder
    ],
)
def test_a_start_publishes_what_the_last_job_did_not(tmp_path, saved, before, resumed, expected):
    place = Place(tmp_path, *saved)
    for step in before:
        place.publish(step)
    place.events.clear()
    assert place.publish(resumed, catches_up=True).told == expected


def test_what_a_dead_publisher_left_is_removed_or_continued(tmp_path, monkeypatch):
    place = Place(tmp_path, 10, 20)

    class Death(BaseException):
        pass

    def die(*arguments):
        raise Death

    monkeypatch.setattr(publication, "publish", die)
    with pytest.raises(Death):
        place.publish(10)  # the folder is there, LATEST is not
    monkeypatch.undo()
    work = place.dir / ".work"
    (work / ".step-5.0123.mindresume-tmp").mkdir()
    (work / "step-5.removed").mkdir()
    (work / "LATEST").write_text("step", encoding="utf-8")
    place.publish(10)
    assert place.latest == "step-10\n"
    assert [path.name for path in work.iterdir()] == ["lock"]


def test_readers_in_a_loop_see_whole_folders(tmp_path):
    """Each of them compares what it reads with an export, while steps come and go."""
    steps = range(10, 90, 10)
    place = Place(tmp_path, *steps, keep=1).publish(10)
    expected = {}
    for step in steps:
        mindresume.export_hf(place.root, tmp_path / f"{step}", step=step, config=place.config)
        expected[f"step-{step}"] = contents(tmp_path / f"{step}")
    done, wrong, seen = threading.Event(), [], set()

    def read():
        while not done.is_set():
            with published(place.dir) as folder:
                name = os.path.basename(folder)
                seen.add(name)
                if contents(Path(folder)) != expected[name]:
                    wrong.append(name)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for step in steps[1:]:
            place.publish(step)
    finally:
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == [] and len(seen) > 1


def test_a_folder_that_goes_between_open_and_lock(tmp_path, monkeypatch):
    place, real, late = Place(tmp_path, 10, 20, keep=1).publish(10), fcntl.flock, [20]

    def flock(file, kind):
        if kind == fcntl.LOCK_SH and late:
            place.publish(late.pop())  # removes step 10
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with published(place.dir) as folder:
        assert folder == f"{place.dir}/step-20" and place.folders == ["step-20"]


def test_nothing_is_published_yet(tmp_path):
    with pytest.raises(MissingCheckpointError, match="LATEST"), published(tmp_path):
        pass


def test_the_folder_that_latest_names_is_gone(tmp_path):
    times = iter(range(1000))
    table = {runtime.monotonic: lambda: next(times), runtime.sleep: lambda seconds: None}
    for name in ("step-10", "../elsewhere"):
        (tmp_path / "LATEST").write_text(name, encoding="utf-8")
        with (
            runtime.answers(table),
            pytest.raises(MissingCheckpointError, match="step-10|elsewhere"),
            published(tmp_path),
        ):
            pass


def test_the_process_that_publishes(tmp_path):
    """What it writes for the training, and that it imports no framework."""
    place = Place(tmp_path, 10)
    given = {"root": str(place.root), "step": 10, "catches_up": False}
    request = {"settings": vars(place.settings), **given}
    command = (
        "import sys; from mindresume.api import publication; publication.main(); "
        "assert not {'mindspore', 'mindformers', 'torch'} & {*sys.modules}"
    )

    def run(given):
        done = subprocess.run(
            [sys.executable, "-c", command, json.dumps(given)], capture_output=True, check=True
        )
        return json.loads(done.stdout)

    assert run(request)["event"] == "weights_published"
    assert run({**request, "step": 30})["event"] == "publish_failed"
    settings = replace(place.settings, config=str(tmp_path / "nowhere"))
    assert run({**request, "settings": vars(settings)})["event"] == "publish_failed"


def test_a_training_learns_what_its_process_did(tmp_path):
    place = Place(tmp_path, 10)
    publisher = Publisher(place.settings, str(place.root), 0, False, place.events.append)
    publisher.committed(10)
    publisher.finish(600.0)
    publisher.committed(20)  # there is no such checkpoint
    publisher.finish(600.0)
    assert place.told == [10] and place.latest == "step-10\n"
    (failed,) = (event for event in place.events if isinstance(event, PublishFailed))
    assert failed.step == 20
