"""Checks the files that configure the project's tools and its pages on hosting platforms: they are
valid, and what they name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mindresume import cli
from mindresume.events.event_file import FOLDER as EVENTS
from scripts.make_docs.commands import commands

ROOT = Path(__file__).parents[1]


def hooks():
    """Returns {id: hook} of .pre-commit-config.yaml."""
    found = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return {hook["id"]: hook for repository in found["repos"] for hook in repository["hooks"]}


def test_the_hooks_are_valid(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pre_commit",
            "validate-config",
            str(ROOT / ".pre-commit-config.yaml"),
        ],
        env={**os.environ, "PRE_COMMIT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_hook_is_a_command_of_the_tests_and_needs_no_network():
    script = (
        (ROOT / "scripts" / "test.sh")
        .read_text()
        .replace('"$PYTHON"', ".venv/bin/python")
        .replace('"$VENV/', '".venv/')
    )
    commands = {line.replace('"', "") for line in script.splitlines()}
    entries = [hook["entry"] for name, hook in hooks().items() if name != "large-files"]
    parts = {part for entry in entries for part in re.sub(r'bash -c "|"', "", entry).split(" && ")}
    assert parts <= commands
    assert {hook["language"] for hook in hooks().values()} == {"system"}


def test_a_large_file_is_refused(tmp_path):
    small, large = tmp_path / "small one", tmp_path / "large"
    small.write_bytes(bytes(512 << 10))
    large.write_bytes(bytes((512 << 10) + 1))

    def refused(*paths):
        command = hooks()["large-files"]["entry"].removeprefix("bash -c '").removesuffix("' --")
        done = subprocess.run(
            ["bash", "-c", command, "--", *map(str, paths)], capture_output=True, text=True
        )
        return done.returncode != 0, done.stdout.split("\n")[:-1]

    assert refused(small) == (False, []) and refused(small, large) == (True, [str(large)])


@pytest.mark.parametrize("name", ["CONTRIBUTING", "SECURITY"])
def test_the_chinese_page_has_the_code_and_the_links_of_the_english_one(name):
    def facts(page):
        text = (ROOT / page).read_text()
        blocks = "".join(re.findall(r"```.*?```", text, re.DOTALL))
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        links = {re.sub(r"_CN|\.zh", "", link) for link in re.findall(r"\]\(([^)]+)\)", prose)}
        return (
            {re.sub(r"#.*", "", line).strip() for line in blocks.splitlines()},
            links,
            set(re.findall(r"`[^`\n]+`", prose)),
        )

    assert facts(f"{name}_CN.md") == facts(f"{name}.md")


FORMS = sorted(ROOT.glob(".git*/ISSUE_TEMPLATE/*_*.yml"))
TEMPLATES = [*FORMS, *sorted(ROOT.glob(".git*/*TEMPLATE*.md"))]
KINDS = {
    "markdown": {"value"},
    "textarea": {"label"},
    "input": {"label"},
    "checkboxes": {"label", "options"},
}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_form_has_the_keys_that_the_platforms_need(path):
    form = yaml.safe_load(path.read_text())
    assert (
        {"name", "description", "body"}
        <= set(form)
        <= {"name", "description", "title", "labels", "assignees", "body"}
    )
    named = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(set(named)) == len(named) and any(
        element.get("validations") for element in form["body"]
    )
    for element in form["body"]:
        assert (
            KINDS[element["type"]]
            <= set(element["attributes"])
            <= {"value", "label", "description", "options", "render"}
        )


@pytest.mark.parametrize("name", ["ascend_report.yml", "bug_report.yml", "feature_request.yml"])
def test_both_platforms_ask_for_the_same(name):
    asked = [
        [
            (
                element["type"],
                element.get("id"),
                element.get("validations"),
                element["attributes"].get("render"),
            )
            for element in yaml.safe_load((ROOT / platform / "ISSUE_TEMPLATE" / name).read_text())[
                "body"
            ]
        ]
        for platform in (".github", ".gitcode")
    ]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("platform", [".github", ".gitcode"])
def test_the_choice_of_templates(platform):
    config = yaml.safe_load((ROOT / platform / "ISSUE_TEMPLATE" / "config.yml").read_text())
    assert set(config) == {"blank_issues_enabled", "contact_links"}
    assert all(
        set(link) == {"name", "url", "about"} and link["url"].startswith("https://")
        for link in config["contact_links"]
    )


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_template_names_exists(path):
    text = path.read_text()
    for command, rest in re.findall(r"(?<=[`\"])mindresume ([a-z][a-z-]*)([^`\"]*)", text):
        assert command in dict(commands())  # which registers all commands
        run = CliRunner().invoke(
            cli.app, [command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        )
        shown = re.sub(r"\x1b\[[0-9;]*m", "", run.output)
        assert run.exit_code == 0 and set(re.findall(r"--?[a-z]+", rest)) <= set(
            re.findall(r"--?[a-z]+", shown)
        ), rest
    assert [
        name for name in re.findall(r"\b[A-Z]+(?:_CN)?\.md\b", text) if not (ROOT / name).is_file()
    ] == []
    assert set(re.findall(r"\bmindresume_\w+", text)) <= {EVENTS}


def test_a_bug_report_asks_for_what_shows_the_reason():
    for path in (
        *ROOT.glob(".git*/ISSUE_TEMPLATE/bug_report.yml"),
        ROOT / ".gitee" / "ISSUE_TEMPLATE.zh-CN.md",
    ):
        text = path.read_text()
        assert [
            word
            for word in (
                "mindresume which DIR --json",
                "mindresume ls DIR",
                "mindresume --version",
                "CANN",
                f"/{EVENTS}/",
            )
            if word not in text
        ] == []


WORKFLOWS = [".github/workflows/test.yml", ".gitcode/workflows/test.yml", ".workflow/test.yml"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_runs_the_two_commands_of_the_readme(name):
    """The platforms themselves were never asked; here the form and the commands are checked."""
    found = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    if "jobs" in found:
        steps = [step for job in found["jobs"].values() for step in job["steps"]]
        assert all(job["runs-on"] for job in found["jobs"].values())
        assert all(("run" in step) != ("uses" in step) for step in steps)
        texts = [step["run"] for step in steps if "run" in step]
    else:
        texts = [
            command
            for stage in found["stages"]
            for step in stage["steps"]
            for command in step["commands"]
        ]
    for text in texts:
        subprocess.run(["bash", "-n", "-c", text], check=True)
    commands = re.findall(r"(?m)^(?:FAST=1 )?(bash scripts/\w+\.sh)", "\n".join(texts))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert commands == re.findall(r"(?m)^bash scripts/(?:quickstart|test)\.sh", readme)
