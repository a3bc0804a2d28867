"""The generated parts of the guide are those of their sources, and whole in both languages."""
import re
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from mindresume import cli
from scripts.make_docs import commands, settings
from scripts.make_docs.marks import END, begin, with_part
from scripts.make_docs.pages import DOCS, PAGES, made


@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_stale(name):
    assert (DOCS / name).read_text(encoding="utf-8") == made(name), "run: python -m scripts.make_docs"


def test_a_part_is_replaced_between_its_marks():
    page = f"# A\n\n{begin('x.py')}\nold\n{END}\n\nhand-written\n"
    assert with_part(page, "x.py", "new") == f"# A\n\n{begin('x.py')}\n\nnew\n\n{END}\n\nhand-written\n"
    with pytest.raises(ValueError, match="y.py"):
        with_part(page, "y.py", "new")


def test_every_setting_has_a_meaning_in_both_languages_and_nothing_else_has():
    names = {f"{section}.{field.name}".partition(".")[2]: field for section, kind in settings.sections()
             for field in fields(kind)}
    assert all(field.metadata["meaning"] for field in names.values())
    assert set(settings.CHINESE["meanings"]) == set(names)
    assert set(settings.CHINESE["units"]) == {field.metadata["unit"] for field in names.values()} - {""}


@pytest.mark.parametrize("name", [name for name, _ in commands.commands()])
def test_the_reference_of_a_command_has_the_options_of_its_help(name):
    environment = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "TERM": "dumb", "NO_COLOR": "1"}
    shown = CliRunner().invoke(cli.app, [name, "--help"], env=environment).output
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    section = commands.part().partition(f"\n## `mindresume {name}`\n")[2].partition("\n## ")[0]
    options = set(re.findall(r"--[a-z][a-z-]*[a-z]", shown)) - {"--help"}
    assert options and options == set(re.findall(r"--[a-z][a-z-]*[a-z]", section))
