"""The generated parts of the guide are those of their sources, and whole in both languages."""

import ast
import re

import pytest
from typer.testing import CliRunner

from mindresume import cli
from mindresume.settings import settings_of
from scripts.make_docs import commands, messages, settings
from scripts.make_docs.marks import END, begin, with_part
from scripts.make_docs.pages import DOCS, PAGES, made
from scripts.make_docs.templates import PACKAGE, Message, Source
from scripts.make_docs.templates import messages as messages_of


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_stale(name):
    assert (DOCS / name).read_text(encoding="utf-8") == made(name), (
        "run: python -m scripts.make_docs"
    )


def test_a_part_is_replaced_between_its_marks():
    page = f"# A\n\n{begin('x.py')}\nold\n{END}\n\nhand-written\n"
    assert (
        with_part(page, "x.py", "new")
        == f"# A\n\n{begin('x.py')}\n\nnew\n\n{END}\n\nhand-written\n"
    )
    with pytest.raises(ValueError, match="y.py"):
        with_part(page, "y.py", "new")


def test_every_setting_has_a_meaning_in_both_languages_and_nothing_else_has():
    names = {
        f"{section}.{field.name}".partition(".")[2]: field
        for section, kind in settings.sections()
        for field in settings_of(kind)
    }
    assert all(field.metadata["meaning"] for field in names.values())
    assert set(settings.CHINESE["meanings"]) == set(names)
    assert set(settings.CHINESE["units"]) == {
        field.metadata["unit"] for field in names.values()
    } - {""}


@pytest.mark.parametrize("name", [name for name, _ in commands.commands()])
def test_the_reference_of_a_command_has_the_options_of_its_help(name):
    environment = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "TERM": "dumb", "NO_COLOR": "1"}
    shown = CliRunner().invoke(cli.app, [name, "--help"], env=environment).output
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    section = commands.part().partition(f"\n## `mindresume {name}`\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z][a-z-]*[a-z]", shown)) - {"--help"}
    assert options and options == set(re.findall(r"--[a-z][a-z-]*[a-z]", section))


def test_a_parameter_without_help_is_refused():
    def command(count: int = 3): ...

    with pytest.raises(TypeError, match="count"):
        commands.parameters(command)


def test_every_error_is_explained_in_both_languages():
    builtin = {
        "BaseException",
        "Exception",
        "RuntimeError",
        "AssertionError",
        "OSError",
        "ValueError",
    }
    defined = messages.source().exceptions(*builtin) - builtin
    assert set(messages.INTERNAL) <= defined
    for page in ("messages.md", "messages.zh.md"):
        titles = re.findall(r"^## (\w+Error)$", (DOCS / page).read_text(encoding="utf-8"), re.M)
        assert sorted(titles) == sorted(defined - set(messages.INTERNAL) - {"MindResumeError"}), (
            page
        )


def test_every_part_of_the_package_that_raises_has_a_label():
    assert {message.room for message in messages.found()} == set(messages.ROOMS)


SOURCE = """
CHOICES = ("a", "b")
class ConfigError(ValueError): ...
class CorruptFileError(Exception):
    def __init__(self, path, reason):
        super().__init__(f"{path}: {reason}")
def where_text(path):
    return f"the folder above {path}"
def check(name, value, rows, path):
    more = "; ..." if len(rows) > 3 else ""
    if name:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(CHOICES)}"[:400]
                          + (f" ({counted(len(rows), 'row')})" if rows else ""))
    raise CorruptFileError(path, f"it has {self.size} bytes, {'none' if more else value.count} expected: "
                                 f"{where_text(path)}{more}")
def choose(step, error):
    raise ConfigError("there is no step at all" if step is None else f"there is no step {step + 1}:\\n{error}")
def pass_on(error):
    raise ConfigError(f"{error}")
def damage(reason):
    return CorruptFileError("x", f"at some byte: {reason}")
def read():
    raise damage("truncated")
"""  # noqa: E501


def test_templates_of_texts():
    tree = ast.parse(SOURCE)
    path = PACKAGE / "formats" / "x.py"
    found = messages_of(Source.of({path: tree}), {"ConfigError", "CorruptFileError"})
    assert found == [
        Message(error, template, "formats")
        for error, template in (
            ("ConfigError", "<name> is <value>; choose one of a, b[ (<number of rows> row[s])]"),
            (
                "CorruptFileError",
                "<path>: it has <size> bytes, [none | <count>] expected: the folder above <path>[; "
                "...]",
            ),
            ("ConfigError", "there is no step at all"),
            ("ConfigError", "there is no step <step + 1>: ⏎ <error>"),
            ("CorruptFileError", "<path>: at some byte: truncated"),
        )
    ]
