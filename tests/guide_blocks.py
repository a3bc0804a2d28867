"""Reads the commands and the code blocks of README.md, README_CN.md and docs/*.md, for tests that
check them.

A block that cannot run here has ``<!-- needs: WHAT -->`` on the line before it, which no page
    shows; WHAT is one of NEEDS.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindresume.fault_injection.scenarios import SCENARIOS
from mindresume.formats.parallel_plan import ParallelPlan, is_plan

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "README_CN.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("shell", "bash", "sh", "console")
NEEDS = (
    "Ascend",
    "ModelArts",
    "Kubernetes",
    "cluster",
    "network",
    "Prometheus",
    "published weights",
)
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*)")
_MARK = re.compile(r"^\s*<!-- needs: (.*?) -->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line``: number of its first line, from 1; ``needs``: of its mark, empty
    without one."""

    page: Path
    line: int
    language: str
    text: str
    needs: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def is_shell(self) -> bool:
        """Whether its lines are commands: by its language, or because it has none and begins with a
        command of mindresume."""
        return self.language in SHELL or not self.language and self.text.startswith("mindresume ")

    @property
    def lines(self) -> list[str]:
        """Returns the commands, with continued lines joined: all lines of a shell block, else those
        behind a prompt."""
        rows = self.text.replace("\\\n", " ").splitlines()
        shown = [row.strip() for row in rows]
        if self.language == "console" or not self.is_shell:
            return [row.removeprefix("$ ") for row in shown if row.startswith("$ ")]
        return [row for row in shown if row and not row.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page."""
    found, fence, needs, start, language, rows = [], None, "", 0, "", []
    before = ""
    for number, row in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        match = _FENCE.match(row)
        if fence is None and match:
            mark = _MARK.match(before)
            fence, language, start, rows, needs = (
                match,
                match[3],
                number + 1,
                [],
                mark[1] if mark else "",
            )
        elif fence is not None and match and match[2].startswith(fence[2]) and not match[3]:
            found.append(Block(page, start, language, "\n".join(rows) + "\n", needs))
            fence = None
        elif fence is not None:
            rows.append(row.removeprefix(fence[1]))
        before = row
    assert fence is None, f"{page.name}:{start}: the block has no end"
    return found


def inline_code(page: Path) -> list[str]:
    """Returns the text between backticks outside of the blocks; it may go over the end of a
    line."""
    return [
        " ".join(code.split())
        for part in re.split(r"\n\s*\n|\n(?=\s*[-|*])", without_blocks(page))
        for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", part)
    ]


_BEGINS = re.compile(
    r"([A-Z_]+=\S+ "
    r")*(mindresume|python|bash|pytest|msrun|srun|mpirun|chrt|nice|pip|REGISTER_PATH=|scripts/"
    r"|benchmarks/|--register_path)(?![\w.])"
)


def without_blocks(page: Path) -> str:
    """Returns the text of a page outside of its fenced blocks."""
    return re.sub(r"(?ms)^\s*(```+|~~~+).*?^\s*\1\s*$", "\n\n", page.read_text(encoding="utf-8"))


def all_commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yields (place, command) of every command of a page that can be told from other code: a line
    of a shell block, a line behind a prompt, and indented and inline code that begins like one."""
    for block in blocks(page):
        for line in block.lines:
            yield from ((block.place, part) for part in simple_commands(line))
    # the code there is text of messages
    if page.name.startswith("messages"):
        return
    indented = re.findall(r"(?m)^ {4,}(\S.*)$", without_blocks(page).replace("\\\n", " "))
    for code in (*indented, *inline_code(page)):
        if _BEGINS.match(code):
            yield from ((page.name, part) for part in simple_commands(code))


def simple_commands(line: str) -> Iterator[str]:
    """Yields the simple commands of a line: those in ``$(...)``, and those between ``;``, ``&&``,
    ``|``."""
    yield from re.findall(r"\$\(([^()]*)\)", line)
    # an option that may be left out
    line = re.sub(r"\[(--[^\]]*)\]", r"\1", line)
    line = re.sub(r'"?\$\([^()]*\)"?', "SUBSTITUTED", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";&|"):
            yield shlex.join(words)
            words = []
        else:
            words.append(word)
    if words:
        yield shlex.join(words)


def split_environment(command: str) -> tuple[dict[str, str], list[str]]:
    """Returns the variables set before a command, and its words."""
    words, found = shlex.split(command), {}
    if words[:1] == ["export"]:
        words = words[1:]
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, found[words[0].split("=")[0]] = words[0].partition("=")
        words = words[1:]
    return found, words


def check_value(command: str, name: str, text: str) -> None:
    """Raises an error for a value that the command checks itself."""
    if (command, name) == ("convert", "to") and is_plan(text):
        ParallelPlan.parse(text)
    if (command, name) == ("drill", "scenario") and text not in SCENARIOS:
        raise ValueError(f"there is no scenario {text!r}")
