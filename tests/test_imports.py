"""Which packages import mindformers, mindspore and the plugin."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mindresume

PACKAGE = Path(mindresume.__file__).parent
# the last one starts transform_worker
MINDFORMERS = ("plugin.py", "mindformers/", "reshard/mindspore_engine.py")


def imported(path):
    """Returns the names of the modules that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    "name, rooms",
    [
        ("mindresume.mindformers", MINDFORMERS),
        ("mindformers", ("mindformers/",)),
        ("mindspore", ("mindformers/",)),
    ],
)
def test_only_listed_packages_import_the_module(name, rooms):
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(f"{module}.".startswith(f"{name}.") for module in imported(path))
    }
    assert found and not [path for path in found if not path.startswith(rooms)]


@pytest.mark.parametrize(
    "modules",
    [
        [
            "saving.checkpoint_manager",
            "saving.save_session",
            "coordination.preemption",
            "resume.job_selection",
        ]
    ],
)
def test_the_flows_of_a_training_are_imported_without_mindformers(modules):
    program = (
        f"import sys, {', '.join('mindresume.' + name for name in modules)}; "
        f"print(sorted({{name.split('.')[0] for name in sys.modules}} & {{'mindformers', "
        f"'mindspore'}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
