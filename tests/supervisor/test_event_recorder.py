"""supervisor/evidence.py: no event is lost, and the paths of evidence hold in every folder."""

import json

import pytest

from mindresume.events import Emitter, JobStarted
from mindresume.events.event_file import FOLDER, SupervisorEventFile
from mindresume.supervisor.evidence import EventRecorder


@pytest.fixture
def recorder():
    emit = Emitter()
    made = EventRecorder(emit)
    emit.add(made)
    return made


def starts(folder):
    (file,) = (folder / FOLDER).iterdir()
    return [json.loads(line)["start"] for line in file.read_text().splitlines()]


def test_events_from_before_the_folder_is_known_come_first(recorder, tmp_path):
    recorder.handle(JobStarted(1, 7), 0.0)
    recorder.open(str(tmp_path / "output"))
    recorder.open(str(tmp_path / "other"))
    recorder.handle(JobStarted(2, 8), 0.0)
    recorder.close()
    assert starts(tmp_path / "output") == [1, 2] and not (tmp_path / "other").exists()


def test_paths_of_stacks_hold_in_every_folder(recorder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder.open("output")  # --events output
    recorder.close()
    assert recorder.evidence().startswith(str(tmp_path / "output" / FOLDER))


def test_a_file_that_fails_is_reported(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(SupervisorEventFile, "handle", lambda *given: 1 / 0)
    recorder = EventRecorder(seen.append)
    recorder.open(str(tmp_path))
    recorder.handle(JobStarted(1, 7), 0.0)
    recorder.close()
    assert [event.level for event in seen] == ["warning"]
