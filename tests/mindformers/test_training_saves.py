"""The scrub in the background: on the first rank of a host, if it is configured, and until the training ends."""
from types import SimpleNamespace

import pytest
from rank_folders import dir_at

from mindresume.events.emitter import Emitter
from mindresume.mindformers import training_saves
from mindresume.mindformers.training_context import Resources, TrainingContext
from mindresume.settings import ScrubSettings, Settings


def started(tmp_path, every_hours, is_first_on_host):
    context = TrainingContext(Settings(scrub=ScrubSettings(every_hours)), resources=Resources(emit=Emitter()))
    manager = SimpleNamespace(target=dir_at(tmp_path))
    training_saves.start_scrub(manager, context, is_first_on_host)
    return context.resources


@pytest.mark.parametrize("every_hours, is_first_on_host", [(0.0, True), (24.0, False)])
def test_it_is_off(tmp_path, every_hours, is_first_on_host):
    resources = started(tmp_path, every_hours, is_first_on_host)
    assert resources.scrub is None
    resources.stop_scrub()


def test_it_runs_until_the_end(tmp_path):
    resources = started(tmp_path, 24.0, True)
    thread = resources.scrub._thread
    assert thread.is_alive() and thread.daemon and resources.scrub in resources.emit._handlers
    resources.stop_scrub()
    resources.stop_scrub()
    assert not thread.is_alive()
