"""A plugin of pytest: puts one known cause of defects back into the product while a test runs,
which has to fail then.

``test_causes.py`` runs these tests. They are of causes that the simulation cannot see, because it
replaces that part of the product or has no network: the others are mutants of
``simulation/test_teeth.py``.
"""

from collections.abc import Iterator

import pytest
from simulation.test_teeth import Edit, mutate

from mindresume.coordination import liveness
from mindresume.mindformers import adapter, network_state
from mindresume.saving import upload

# test -> (the cause, what puts it back)
MUTANTS = {
    "coordination/test_liveness.py::test_a_hidden_process_is_not_dead[None-None]": (
        "a process that cannot be looked at counts as dead",
        Edit(
            liveness,
            "_without_entry",
            "pass\n    return None",
            "pass\n    return False",
        ),
    ),
    "coordination/test_liveness.py::test_a_process_that_has_ended_is_dead_also_without_a_descriptor_to_look_at_it": (  # noqa: E501
        "an entry of /proc that cannot be read counts as none",
        Edit(
            liveness,
            "is_running",
            "except OSError:\n        return _without_entry(pid)",
            "except OSError:\n        return False",
        ),
    ),
    "saving/test_remote_checkpoints.py::test_a_disk_that_takes_no_lock_prevents_no_upload[30-True]": (  # noqa: E501
        "what cannot be locked is not uploaded",
        Edit(
            upload.Uploader,
            "_protect",
            "if error.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):",
            "if True:",
        ),
    ),
    "mindformers/test_loaded_weights.py::test_another_value_is_named[large--1]": (
        "loaded weights are not compared with the parameters at the first step",
        Edit(network_state.LoadedWeights, "difference", "if not altered:", "if True:"),
    ),
    "mindformers/test_patches.py::test_the_selection_sees_the_keys_as_mindformers_converts_them[keys0]": (  # noqa: E501
        "the configuration is read before mindformers has converted it",
        Edit(adapter, "convert_health_keys", "if hasattr(", "if False and hasattr("),
    ),
    "mindformers/test_network_state.py::test_the_optimizer_shard_is_kept_apart_from_tensor_parallelism": (  # noqa: E501
        "the optimizer shard is folded into the tensor map",
        Edit(
            network_state,
            "strategy_layouts",
            "found, split = {}, split or {}",
            "found, split = {}, {}",
        ),
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name, _ = MUTANTS[item.nodeid.removeprefix("tests/")]
        item.add_marker(pytest.mark.xfail(raises=AssertionError, strict=True, reason=name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _, edit = MUTANTS[item.nodeid.removeprefix("tests/")]
    right = vars(edit.owner)[edit.name]
    with pytest.MonkeyPatch.context() as patch:
        try:
            mutate(patch, [edit])
        except AssertionError as error:  # or it would be the failure that is expected
            raise ValueError("the product has another text") from error
        # the test has imported it
        for name in [name for name, value in vars(item.module).items() if value is right]:
            patch.setattr(item.module, name, vars(edit.owner)[edit.name])
        return (yield)
