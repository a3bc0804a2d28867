"""When weights are published, by which process, and what the training learns of it."""

import json
import signal
import subprocess

import pytest
from manager_jobs import Job, end_jobs

from mindresume.events import Notice, PublishFailed, WeightsPublished
from mindresume.saving import publisher as publishing
from mindresume.saving.publisher import Publisher
from mindresume.settings import PublishSettings, Settings

SETTINGS = PublishSettings(every_steps=10, dir="/weights", config="/config.json")


class Child:
    """A process that publishes, as far as a training sees it."""

    def __init__(self, request):
        self.request, self.returncode, self.signals, self.output = request, None, [], b""
        self.waits = []

    def end(self, status=0, *events):
        self.returncode = status
        self.output = b"".join(json.dumps(event.to_json()).encode() + b"\n" for event in events)

    def publish(self):
        self.end(0, WeightsPublished(self.request["step"], "/weights/step", 5, 1.0))

    def poll(self):
        return self.returncode

    def communicate(self):
        return self.output, None

    def send_signal(self, number):
        self.signals.append(number)

    def kill(self):
        self.returncode = -signal.SIGKILL

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("child", timeout)


@pytest.fixture
def children(monkeypatch):
    found = []

    def start(request):
        found.append(Child(json.loads(request)))
        return found[-1]

    monkeypatch.setattr(publishing, "start_child", start)
    yield found
    end_jobs()


class Training:
    def __init__(self, step=0, resumed=False):
        self.events = []
        self.publisher = Publisher(SETTINGS, "/root", step, resumed, self.events.append)

    def commit(self, *steps):
        for step in steps:
            self.publisher.committed(step)
            self.publisher.poll(False)
        return self

    @property
    def failed(self):
        return [event.step for event in self.events if isinstance(event, PublishFailed)]


def steps_of(children):
    return [child.request["step"] for child in children]


def test_the_first_commit_at_or_after_each_multiple(children):
    training = Training(step=4)
    for step in (6, 9, 12, 18, 35, 40):
        training.commit(step)
        for child in children:
            child.publish()
        training.publisher.poll(False)
    assert steps_of(children) == [12, 35, 40]
    assert [event.step for event in training.events] == [12, 35, 40]
    assert not any(child.request["catches_up"] for child in children)
    assert children[0].request["root"] == "/root"
    assert PublishSettings(**children[0].request["settings"]) == SETTINGS


def test_one_process_at_a_time(children):
    training = Training().commit(10, 20)
    assert steps_of(children) == [10] and training.failed == []
    training.commit(30, 35)  # the newest waits
    assert steps_of(children) == [10] and training.failed == [20]
    children[0].publish()
    training.commit(36)
    assert steps_of(children) == [10, 30]


def test_never_during_a_save(children):
    publisher = Training().publisher
    publisher.committed(10)
    publisher.poll(True)
    assert children == []
    publisher.poll(False)
    for saving in (True, True, False, False, True):
        publisher.poll(saving)
    assert children[0].signals == [signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP]
    publisher.finish(1.0)
    assert children[0].signals[-1] == signal.SIGCONT


def test_a_resume_asks_for_what_is_missing(children):
    training = Training(step=25, resumed=True)
    training.publisher.poll(False)
    assert steps_of(children) == [25] and children[0].request["catches_up"]
    children[0].end()  # it had nothing to do
    training.commit(30)
    assert steps_of(children) == [25, 30] and not children[1].request["catches_up"]
    assert training.events == []


def test_a_kind_of_failure_is_told_once_until_one_succeeds(children):
    training = Training()

    def fail(step):
        training.commit(step)
        children[-1].end(-signal.SIGKILL)
        training.publisher.poll(False)

    fail(10)
    fail(20)
    assert training.failed == [10]
    training.commit(30)
    children[-1].end(0, PublishFailed(30, "the disk is full"), Notice("an old folder stays"))
    children[-1].output = b"words of a library\n[]\n" + children[-1].output
    training.commit(40)
    assert training.failed == [10, 30] and Notice("an old folder stays") in training.events
    children[-1].publish()
    fail(50)
    assert training.failed == [10, 30, 50]


def test_no_process_can_be_started(monkeypatch):
    def start(request):
        raise OSError(11, "no processes")

    monkeypatch.setattr(publishing, "start_child", start)
    training = Training().commit(10, 20)
    training.publisher.finish(1.0)
    assert training.failed == [10]


def test_the_end_publishes_the_newest_that_is_due(children):
    training = Training().commit(10, 20)
    training.publisher.committed(30)
    publisher, first = training.publisher, children[0]
    first.wait = lambda timeout=None: first.publish()
    start = publishing.start_child

    def start_and_end(request):
        child = start(request)
        child.publish()
        return child

    publishing.start_child = start_and_end
    publisher.finish(5.0)
    assert steps_of(children) == [10, 30]
    assert [event.step for event in training.events if isinstance(event, WeightsPublished)] == [
        10,
        30,
    ]


def test_the_end_waits_no_longer_than_its_limit(children):
    training = Training().commit(10)
    training.publisher.finish(5.0)
    assert children[0].waits[0] <= 5.0 and children[0].returncode == -signal.SIGKILL
    assert training.failed == [10]


def test_a_training_publishes_what_it_commits(tmp_path, children):
    """Saves each 5 steps; the last one at its end."""
    settings = Settings(publish=PublishSettings(every_steps=10, dir="w", config="c"))
    job = Job(tmp_path, settings=settings)
    for _ in range(20):
        job.steps(1)
        for child in children:
            child.publish()
    assert steps_of(children) == [10]
    start = publishing.start_child
    publishing.start_child = lambda request: [child := start(request), child.publish()][0]
    job.end()
    assert steps_of(children) == [10, 20]
    assert [event.step for event in job.emitted(WeightsPublished)] == [10, 20]


def test_a_training_that_publishes_nothing_starts_no_process(tmp_path, children):
    Job(tmp_path).steps(20).end()
    assert children == []
