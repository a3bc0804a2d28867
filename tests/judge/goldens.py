"""The golden transcripts: one text file a story, one section a case."""

import difflib
import shutil
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

from tests.judge import jobs
from tests.judge.case import Case, play
from tests.judge.folders import memory, remove_made

HERE = Path(__file__).parent
STORIES = tuple(sorted(path.stem for path in (HERE / "stories").glob("[!_]*.py")))
RANKS = "_ranks"  # of st/test_judge.py: only played where it is named
HEAD = "## "


@cache
def cases(story: str) -> dict[str, Case]:
    """Returns the cases of a story by name."""
    table = import_module(f"tests.judge.stories.{story}").CASES
    return {case.name: case for case in table}


def matching(words: list[str]) -> list[tuple[str, Case]]:
    """Returns (story, case) of all cases, or of those that ``words`` name: a story, or a part of a
    case's name."""
    return [
        (story, case)
        for story in (*STORIES, RANKS)
        for case in cases(story).values()
        if any(word == story or word in case.name for word in words) or not words and story != RANKS
    ]


def recorded(story: str) -> dict[str, str]:
    """Returns the transcripts in the golden file of a story."""
    path = HERE / "golden" / f"{story}.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    sections = [section.partition("\n") for section in ("\n" + text).split("\n" + HEAD)[1:]]
    return {name: body.rstrip("\n") + "\n" for name, _, body in sections}


def store(story: str, name: str, transcript: str) -> None:
    """Writes one transcript into the golden file; sections of cases that are gone are removed."""
    known = {**recorded(story), name: transcript}
    text = "\n".join(f"{HEAD}{case}\n{known[case]}" for case in cases(story) if case in known)
    (HERE / "golden").mkdir(exist_ok=True)
    (HERE / "golden" / f"{story}.txt").write_text(text, encoding="utf-8")


def compared(story: str, case: Case) -> tuple[str, str]:
    """Plays a case. Returns its transcript, and how it differs from the golden one; empty: not at
    all."""
    folder = Path(tempfile.mkdtemp(prefix="mindresume-judge-", dir=memory()))
    try:
        (folder / "case").mkdir()
        found = play(case, folder / "case")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    golden = recorded(story).get(case.name, "")
    difference = difflib.unified_diff(
        golden.splitlines(),
        found.splitlines(),
        f"golden: {story}: {case.name}",
        "found",
        n=5,
        lineterm="",
    )
    return found, "\n".join(difference)


def end() -> None:
    """Ends the host of the trainings, and removes the folders that the recipes keep."""
    jobs.end()
    remove_made()
