"""Checks the files that configure the project's tools and its pages on hosting platforms: they are valid, and what they name
exists."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def hooks():
    """Returns {id: hook} of .pre-commit-config.yaml."""
    found = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    return {hook["id"]: hook for repository in found["repos"] for hook in repository["hooks"]}


def test_the_hooks_are_valid(tmp_path):
    done = subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")],
                          env={**os.environ, "PRE_COMMIT_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_hook_is_a_command_of_the_tests_and_needs_no_network():
    script = (ROOT / "scripts" / "test.sh").read_text().replace('"$PYTHON"', ".venv/bin/python").replace('"$VENV/', '".venv/')
    commands = {line.replace('"', "") for line in script.splitlines()}
    assert {hook["entry"] for name, hook in hooks().items() if name != "large-files"} <= commands
    assert {hook["language"] for hook in hooks().values()} == {"system"}


def test_a_large_file_is_refused(tmp_path):
    small, large = tmp_path / "small one", tmp_path / "large"
    small.write_bytes(bytes(512 << 10))
    large.write_bytes(bytes((512 << 10) + 1))

    def refused(*paths):
        command = hooks()["large-files"]["entry"].removeprefix("bash -c '").removesuffix("' --")
        done = subprocess.run(["bash", "-c", command, "--", *map(str, paths)], capture_output=True, text=True)
        return done.returncode != 0, done.stdout.split("\n")[:-1]
    assert refused(small) == (False, []) and refused(small, large) == (True, [str(large)])


@pytest.mark.parametrize("name", ["CONTRIBUTING", "SECURITY"])
def test_the_chinese_page_has_the_code_and_the_links_of_the_english_one(name):
    def facts(page):
        text = (ROOT / page).read_text()
        blocks = "".join(re.findall(r"```.*?```", text, re.DOTALL))
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        links = {re.sub(r"_CN|\.zh", "", link) for link in re.findall(r"\]\(([^)]+)\)", prose)}
        return {re.sub(r"#.*", "", line).strip() for line in blocks.splitlines()}, links, set(re.findall(r"`[^`\n]+`", prose))
    assert facts(f"{name}_CN.md") == facts(f"{name}.md")
