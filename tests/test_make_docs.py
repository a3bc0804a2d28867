"""The generated parts of the guide are those of their sources, and whole in both languages."""

import re

import pytest
from typer.testing import CliRunner

from mindresume import cli, errors
from mindresume.events.metrics import METRICS, parts_of
from mindresume.mindformers.upstream import FEATURES
from mindresume.settings import settings_of
from scripts.make_docs import commands, metrics, settings, upstream
from scripts.make_docs.pages import DOCS, PAGES, made

ROOT = DOCS.parent
RETIRED: set[str] = set()  # codes of errors that are gone: never given to another one


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


def test_every_metric_has_a_meaning_in_chinese_and_nothing_else_has():
    assert set(metrics.CHINESE) == {parts_of(row)[0] for row in METRICS}


def test_every_text_of_a_feature_has_a_chinese_one_and_nothing_else_has():
    texts = {each for row in FEATURES.values() for each in (row.name, row.without)} - {""}
    assert set(upstream.CHINESE) == texts


@pytest.mark.parametrize("name", [name for name, _ in commands.commands()])
def test_the_reference_of_a_command_has_the_options_of_its_help(name):
    environment = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "TERM": "dumb", "NO_COLOR": "1"}
    shown = CliRunner().invoke(cli.app, [name, "--help"], env=environment).output
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    options = set(re.findall(r"--[a-z][a-z-]*[a-z]", shown)) - {"--help"}
    for language in ("en", "zh"):
        _, _, rest = commands.part(language).partition(f"\n## `mindresume {name}`\n")
        found = re.findall(r"--[a-z][a-z-]*[a-z]", rest.partition("\n## ")[0])
        assert options and options == set(found), language


def test_every_help_text_has_a_chinese_one_and_nothing_else_has():
    """A changed help needs its Chinese text again: under a new key of commands.zh.json."""
    texts = {commands.key(text): (name, text) for name, text in commands.english() if text.strip()}
    missing = [
        f"mindresume {name}: {key!r}: {text}"
        for key, (name, text) in texts.items()
        if not re.search(r"[\u4e00-\u9fff]", commands.CHINESE.get(key, ""))
    ]
    assert missing == [] and sorted(set(commands.CHINESE) - set(texts)) == []


def test_every_error_has_a_code_of_its_own_that_both_languages_explain():
    declared = {}
    for path in sorted((ROOT / "mindresume").rglob("*.py")):
        for name, body in re.findall(
            r"(?ms)^class (\w+)\(.*?\):(.*?)(?=^\S|\Z)", path.read_text("utf-8")
        ):
            for code in re.findall(r'(?m)^    code = "(.*)"$', body):
                assert code not in declared, f"{code} is that of {declared[code]} and {name}"
                declared[code] = name
    assert declared["MR-100"] == "MindResumeError" and not declared.keys() & RETIRED
    of_module = {name for name in vars(errors) if name.endswith("Error")}
    assert of_module <= set(declared.values()), "an error without a code of its own"
    for page in ("messages.md", "messages.zh.md"):
        rows = re.findall(r"(?m)^\| (MR-\d+) \| `(\w+)`", (DOCS / page).read_text("utf-8"))
        assert rows == sorted(declared.items()), page
