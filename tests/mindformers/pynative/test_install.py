"""The installation into the PyNative trainer: completely or not at all."""

import functools
import sys
import types
from dataclasses import replace

import pytest

pytest.importorskip("mindformers.tools")

from pynative_trainers import BuiltIn, Plain  # noqa: E402

from mindresume.errors import ConfigError  # noqa: E402
from mindresume.mindformers import installation, upstream  # noqa: E402
from mindresume.mindformers.patches import PYNATIVE_WRAPPERS as WRAPPERS  # noqa: E402
from mindresume.mindformers.upstream import PROFILES, Profile  # noqa: E402

MODULE = "pynative_trainer_of_the_test"


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType(MODULE)

    class Trainer(Plain):
        def train(self, checkpoint_path=None, mode="pretrain"):
            """Has the signature of all releases."""

        def _load_checkpoint(self, checkpoint_path, model, optimizer=None, global_step=None):
            """Has the signature of all releases."""

        def _create_dataset_iterator(self, dataset):
            """Has the signature of all releases."""

        def get_batch(self, dataset_iter):
            """Has the signature of all releases."""

    class CallbackHandler:
        def on_step_begin(self, args, state, **kwargs):
            """Has the signature of all releases."""

        def on_step_end(self, args, state, **kwargs):
            """Has the signature of all releases."""

    class LossCallback:
        def _print_log(self, log_info):
            """Has the signature of all releases."""

    made.Trainer, made.CheckpointCallback, made.CallbackHandler = Trainer, BuiltIn, CallbackHandler
    made.LossCallback = LossCallback
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def rows(**changed):
    """The rows that are wrapped, for the module of this test. ``changed``: {name with _ for dots:
    signature}."""
    found = [symbol for symbol in PROFILES[1].pynative if symbol.is_wrapped]
    return tuple(
        replace(
            row,
            module=MODULE,
            signature=changed.get(row.name.replace(".", "_"), row.signature),
        )
        for row in found
    )


def profile(symbols):
    return Profile(PROFILES[1].versions, (), symbols)


def test_every_wrapped_row_has_a_wrapper_and_every_wrapper_a_row():
    for each in PROFILES[1:]:
        assert {row.name for row in each.pynative if row.is_wrapped} == set(WRAPPERS), each.name
    assert PROFILES[0].pynative == ()  # 1.8.0 has no such trainer that trains


def test_all_wrappers_are_installed_once(module):
    for _ in range(2):
        installation.install_pynative(profile(rows()))
    for name in WRAPPERS:
        replaced = functools.reduce(getattr, name.split("."), module)
        assert replaced._mindresume and not getattr(
            getattr(replaced, "__wrapped__", None), "_mindresume", False
        )
    assert (
        issubclass(module.CheckpointCallback, BuiltIn) and module.CheckpointCallback is not BuiltIn
    )


def test_a_place_that_differs_is_refused_by_name_and_nothing_is_patched(module):
    before = dict(vars(module)), dict(vars(module.Trainer))
    with pytest.raises(ConfigError) as error:
        installation.install_pynative(
            profile(
                rows(
                    Trainer_train="self, a, b, c", Trainer__create_dataset_iterator="self, data, n"
                )
            )
        )
    lines = [line for line in str(error.value).splitlines() if MODULE in line]
    assert len(lines) == 2 and "Trainer.train" in lines[0] and "self, a, b, c" in lines[0]
    assert "Trainer._create_dataset_iterator" in lines[1]
    assert (dict(vars(module)), dict(vars(module.Trainer))) == before


def test_the_real_trainer_of_this_release_has_all_places():
    if not hasattr(sys.modules[upstream.PYNATIVE_TRAINER], "Trainer"):
        pytest.skip("it cannot be imported here")
    installed, _ = upstream.profile_for(upstream.installed_versions())
    assert upstream.check(installed.pynative) == []
