"""Wrong decisions that mutants of ``test_teeth`` put in the place of the right ones. Each is given
the right one."""

import inspect
import os

from mindresume import runtime
from mindresume.errors import UnreadableFileError
from mindresume.model.manifest import FOLDER, run_name, run_sequence
from mindresume.saving import garbage_collector
from mindresume.saving.iteration_publisher import intent_name


def raised(where, error, *_):
    raise error


def attempt_at_once(right):
    def begin(self, *more):
        self.count_hosts()
        self.begin_load_attempt()
        right(self, *more)

    return begin


def unreadable_is_of_another(right):
    def _may_be_of_another(*more):
        try:
            return right(*more)
        except OSError as error:
            if isinstance(error.__cause__, UnreadableFileError):
                return True
            raise

    return _may_be_of_another


class NoSync:
    """A storage on which a flush of a folder does nothing."""

    def __init__(self, storage):
        self.storage = storage

    def __getattr__(self, name):
        return (lambda folder: None) if name == "sync" else getattr(self.storage, name)


def with_argument(name, value):
    """Calls the right one with another ``value`` of an argument."""

    def wrong(right):
        def call(*args, **how):
            bound = inspect.signature(right).bind(*args, **how)
            bound.arguments[name] = value
            return right(*bound.args, **bound.kwargs)

        return call

    return wrong


def weights_removed_first(right):
    def _uncommit(*args):
        *place, candidate, _, _ = args
        garbage_collector._clear_weights(*place, candidate.records_dir, ())
        return right(*args)

    return _uncommit


def intent_removed_first(right):
    def set_tracker(*args):
        *place, step, _ = args
        storage, root = place if len(place) == 2 else (place[0].storage, place[0].root)
        storage.remove(os.path.join(root, FOLDER, intent_name(step)))
        return right(*args)

    return set_tracker


def run_number_reused(right):
    return lambda names: run_name(max(run_sequence(right(names)) - 1, 1), runtime.token_hex(4))
