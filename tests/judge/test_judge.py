"""Plays all cases, and compares their transcripts with the golden ones; see the docstring of the
package."""

import ast
import sys
from importlib.util import find_spec

import pytest

from tests.judge.case import Train
from tests.judge.goldens import HERE, STORIES, cases, compared, end, matching, recorded

ALLOWED = {"mindresume", "mindresume.plugin"}
UPDATE = "If a user shall see this change: python -m tests.judge --update {!r}"


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    end()


def needs_mindformers(case):
    return any(isinstance(step, Train) or getattr(step, "is_trained", False) for step in case.steps)


@pytest.mark.parametrize(
    "story, case",
    [pytest.param(story, case, id=f"{story}: {case.name}") for story, case in matching([])],
)
def test_a_case(story, case):
    if needs_mindformers(case) and not (sys.platform == "linux" and find_spec("mindformers")):
        pytest.skip("needs mindformers")
    _, difference = compared(story, case)
    assert not difference, "\n" + difference + "\n\n" + UPDATE.format(case.name)


@pytest.mark.parametrize("story", STORIES)
def test_each_section_belongs_to_a_case(story):
    assert list(recorded(story)) == list(cases(story)) and cases(story)


def imported(path):
    """Returns the modules that a file imports, and the names that it takes from mindresume."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (
                [f"mindresume.{alias.name}" for alias in node.names]
                if node.module == "mindresume"
                else [node.module or "."]
            )
            yield from names


def test_nothing_of_mindresume_is_imported_but_its_public_face():
    files = sorted(HERE.rglob("*.py"))
    found = {
        (path.name, name)
        for path in files
        for name in imported(path)
        if name.split(".")[0] == "mindresume"
    }
    assert len(files) > 15 and {name for _, name in found} == ALLOWED, found


def test_and_no_helper_of_other_tests():
    """Those import what is inside. ``st.cpu_cluster`` lets mindformers run on a CPU and has nothing
    of mindresume, but for the program that starts it."""
    helpers = ("st", "tests", *(path.stem for path in HERE.parent.glob("*.py")))
    ours = {
        name
        for path in HERE.rglob("*.py")
        for name in imported(path)
        if name.split(".")[0] in helpers
    }
    assert {name for name in ours if not name.startswith("tests.judge")} == {
        "st",
        "st.cpu_cluster",
        "st.cpu_cluster.launch",
    }
    used = [
        path
        for path in (HERE.parents[1] / "st" / "cpu_cluster").glob("*.py")
        if path.name != "run.py"
    ]
    assert used and not [
        name for path in used for name in imported(path) if name.split(".")[0] == "mindresume"
    ]
