"""The generated parts of the guide are those of their sources, and whole in both languages."""

import re

import pytest
from typer.testing import CliRunner

from mindresume import cli
from mindresume.settings import settings_of
from scripts.make_docs import commands, messages, settings
from scripts.make_docs.pages import DOCS, PAGES, made


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_stale(name):
    assert (DOCS / name).read_text(encoding="utf-8") == made(name), (
        "run: python -m scripts.make_docs"
    )


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
