"""Checks every command and every YAML of README.md, README_CN.md and docs/*.md: commands parse,
scripts and their options exist, YAML is accepted; each line of a shell block runs here, or a test
named in COVERED runs it, or its block has a mark of what it needs."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main
import yaml
from api.conftest import FIXTURE, small_model, training  # noqa: F401  fixtures
from guide_blocks import (
    NEEDS,
    PAGES,
    ROOT,
    SHELL,
    Block,
    all_commands,
    blocks,
    check_value,
    simple_commands,
    split_environment,
)
from launches import MONITOR, parsed_without_files
from training_logs import history

from mindresume import cli
from mindresume.cli.common import Stopped
from mindresume.errors import MindResumeError
from mindresume.settings import Settings

EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
LAUNCHERS = ("srun", "msrun", "mpirun", "chrt", "nice", "kubectl", "docker", "sudo")
OF_MINDIO = {"MINDIO_FOR_MINDSPORE", "MS_TFT_IP", "MS_TFT_PORT"}  # it alone reads them
PLACEHOLDER = re.compile(r"<.*>|[A-Z][A-Z0-9_./]*|MB/s|\.\.\.|\{\w+\}|.*\.\.\..*")
# Commands that read or write files alone; they run in a folder with a training. Others start
# processes.
ON_FILES = (
    "ls",
    "which",
    "verify",
    "scrub",
    "diff",
    "inspect",
    "merge",
    "convert",
    "prune",
    "report",
    "advise",
    "flush",
    "plugin-path",
)
# Lines of shell blocks that a test runs: pattern of the line, the test and what it runs with, words
# that they must contain.
COVERED = (
    (r"bash scripts/quickstart\.sh", "st/test_quickstart.py", ("quickstart.py",)),
    (
        r"bash scripts/ascend_report\.sh .*--device CPU",
        "st/test_ascend_report.py",
        ("ascend_report.sh", "--device"),
    ),
    (r"bash scripts/test\.sh", ".ci/run", ("scripts/test.sh",)),
    (r"python st/data/make_data\.py data", "tests/test_make_data.py", ("make_data",)),
    (
        r"MSRUN_RESTARTS=\d+ bash scripts/msrun_launcher\.sh .*run_mindformer\.py",
        "st/test_cookbook.py st/training_run.py",
        ("MSRUN_RESTARTS", "msrun_launcher.sh"),
    ),
    (
        r'bash scripts/msrun_launcher\.sh "(st/cpu_cluster/run\.py )?run_mindformer\.py --config '
        r"configs/(resume|incremental)\.yaml",
        "st/test_cookbook.py st/training_run.py",
        ("resume.yaml", "incremental.yaml", "cpu_cluster/run.py", "msrun_launcher.sh"),
    ),
    (
        r'bash scripts/msrun_launcher\.sh "st/cpu_cluster/run\.py run_mindformer\.py --config '
        r'configs/quickstart_qwen3_dp2tp2\.yaml" 4',
        "st/quickstart.py st/training_run.py",
        ("quickstart_qwen3_dp2tp2.yaml", "cpu_cluster/run.py", "msrun_launcher.sh"),
    ),
    (
        r"sed .*st/cpu_cluster/pynative/tiny_qwen3\.yaml|CPU_CLUSTER_TRAINER=pynative bash",
        "st/pynative_run.py st/test_pynative_job.py",
        ("tiny_qwen3.yaml", "CPU_CLUSTER_TRAINER", "run_mindformer.py", "--mode 1"),
    ),
    (r"bash scripts/release_env\.sh", "scripts/test_versions.sh", ("release_env.sh",)),
    (
        r"python st/cpu_cluster/run\.py run_mindformer\.py --config configs/quickstart_qwen3\.yaml",
        "st/test_quickstart.py st/quickstart.py st/training_run.py",
        ("quickstart_qwen3.yaml", "cpu_cluster/run.py", "run_mindformer.py"),
    ),
    (r"mindresume run .*-- +(bash|msrun) ", "st/test_supervisor.py", ("mindresume", "run")),
    (r"mindresume doctor --config ", "tests/cli/test_doctor.py", ("doctor", "--config")),
    (r"mindresume export-hf ", "tests/cli/test_export_hf.py", ("export-hf",)),
    (r"mindresume scrub .*--remote ", "tests/cli/test_cli.py", ("--remote",)),
    (r"python -m sim .*--seeds", "tests/simulation/test_command.py", ("--seeds", "--first-seed")),
    (r"python -m sim .*--systematic", "tests/simulation/test_command.py", ("--systematic",)),
    (r"python -m sim .*--replay", "tests/simulation/test_command.py", ("--replay",)),
    (r"python -m sim --explain", "tests/simulation/test_command.py", ("--explain",)),
    (
        r"python run_mindformer\.py .*--remote_save_url s3://",
        "st/test_remote.py",
        ("remote_save_url", "s3://"),
    ),
)


def commands_of(page: Path) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Yields (place, variables, words) of each command of a page, and of the one that
    msrun_launcher.sh starts."""
    for place, command in all_commands(page):
        variables, words = split_environment(command)
        yield place, variables, words
        inner = next(
            (
                shlex.split(after)
                for word, after in pairwise(words)
                if word.endswith("msrun_launcher.sh")
            ),
            [],
        )
        if len(inner) > 1:
            yield place, {}, inner if inner[0] == "python" else ["python", *inner]


def failed(check, rows) -> list[str]:
    """Returns what ``check`` says about each row that it refuses."""
    found = []
    for place, words in rows:
        problem = check(words)
        if problem:
            found.append(f"{place}: {shlex.join(words)}: {problem}")
    return found


# ---- mindresume ----------------------------------------------------------------------------------


@cache
def known_commands() -> dict:
    """Returns {name: command} of the command line."""
    for path in (ROOT / "mindresume" / "cli").glob("[!_]*.py"):
        importlib.import_module(f"mindresume.cli.{path.stem}")
    return typer.main.get_command(cli.app).commands


def arguments_of_mindresume(words: list[str]) -> list[str] | None:
    """Returns the words behind ``mindresume`` or ``python -m mindresume``; None if the command is
    another one."""
    for index, word in enumerate(words):
        if word == "mindresume" and (
            words[index - 1] == "-m"
            if index and words[index - 1].startswith("-")
            else index == 0 or words[0] in LAUNCHERS
        ):
            return words[index + 1 :]
    return None


def problem_of_arguments(words: list[str]) -> str:
    """Returns why the command line of mindresume refuses ``words``; empty if it does not. Nothing
    is executed."""
    commands = known_commands()
    if not words or PLACEHOLDER.fullmatch(words[0]) or words[0].startswith("-"):
        return ""
    if words[0] not in commands:
        return f"there is no command {words[0]}"
    command, rest = commands[words[0]], [word for word in words[1:] if word != "..."]
    try:
        context = command.context_class(command, info_name=words[0], **command.context_settings)
        given, left, _ = command.make_parser(context).parse_args(list(rest))
        for parameter in command.params:
            value = given.get(parameter.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            texts = [text for text in values if isinstance(text, str)]
            if texts and not any(map(PLACEHOLDER.fullmatch, texts)):
                parameter.process_value(context, value)
                for text in texts:
                    check_value(words[0], parameter.name, text)
            missing = parameter.param_type_name == "argument" and parameter.required and not texts
            if missing and rest and "..." not in words and "--help" not in rest:
                return f"{parameter.human_readable_name} is missing"
    except Exception as error:
        # click's own classes are another module's in each release of typer
        return str(getattr(error, "message", "")) or str(error) or type(error).__name__
    return f"unexpected: {left}" if left else ""


@EACH_PAGE
def test_every_mindresume_command_parses(page):
    rows = [
        (place, found)
        for place, _, words in commands_of(page)
        if (found := arguments_of_mindresume(words)) is not None
    ]
    assert failed(problem_of_arguments, rows) == []


def test_a_wrong_command_is_noticed():
    for words in (
        "frobnicate DIR",
        "ls DIR --frobnicate",
        "verify",
        "convert A",
        "convert A B --to dp=x",
        "ls DIR --every fast",
        "drill --scenario frobnicate",
        "diff A B C",
        "prune DIR --keep-last many",
    ):
        assert problem_of_arguments(words.split()) or words == "verify", words
    for words in (
        "ls DIR",
        "verify",
        "scrub DIR --rate MB/s --repair",
        "run -- COMMAND...",
        "COMMAND --help",
        "convert ...",
    ):
        assert problem_of_arguments(words.split()) == "", words


# ---- scripts, benchmarks, tests, variables -------------------------------------------------------


def problem_of_script(words: list[str]) -> str:
    """Returns what is wrong with a command that starts a file of this repository, or a module;
    empty for other commands."""
    while words and words[0] in LAUNCHERS:  # chrt -r 20 python ...
        words = words[
            next(
                (index for index, word in enumerate(words) if word in ("python", "bash", "pytest")),
                len(words),
            ) :
        ]
    if words[:1] == ["pytest"] or words[:3] == ["python", "-m", "pytest"]:
        return problem_of_pytest(words[1 if words[0] == "pytest" else 3 :])
    if words[:2] == ["python", "-m"]:
        path = ROOT / words[2].replace(".", "/")
        ours = (ROOT / words[2].split(".")[0]).is_dir()
        if not ours:
            return (
                ""
                if importlib.util.find_spec(words[2].split(".")[0])
                else "there is no such module"
            )
        there = path.with_suffix(".py").exists() or (path / "__main__.py").exists()
        return "" if there else "there is no such module"
    if words[:1] in (["python"], ["bash"]) and len(words) > 1 and not words[1].startswith("-"):
        words = words[1:]
    elif not words or not re.match(r"(scripts|benchmarks|st|tests)/.*\.(sh|py)$", words[0]):
        return ""
    script = ROOT / words[0]
    if PLACEHOLDER.fullmatch(words[0]):
        return ""
    if not script.is_file():
        return "there is no such file"
    if script.name == "msrun_launcher.sh":  # ``commands_of`` yields what it starts
        return ""
    if words[0] == "st/cpu_cluster/run.py":
        return problem_of_script(["python", *words[1:]])
    if script.name == "run_mindformer.py":
        return problem_of_run_mindformer(words[1:])
    if script.parent.name == "benchmarks":
        return problem_of_benchmark(script, words[1:])
    text = script.read_text()
    return next(
        (
            f"{script.name} does not know {word}"
            for word in words[1:]
            if word.startswith("--") and not re.search(rf"{re.escape(word.split('=')[0])}\b", text)
        ),
        "",
    )


def problem_of_pytest(words: list[str]) -> str:
    files = [ROOT / word.split("::")[0] for word in words if re.match(r"(st|tests)\b", word)]
    missing = [str(path.relative_to(ROOT)) for path in files if not path.exists()]
    if missing:
        return f"there is no {missing[0]}"
    if "-k" in words:
        name = words[words.index("-k") + 1].split()[0]
        if not any(
            re.search(rf"def test_\w*{name}|[\"'][^\"']*{name}", path.read_text()) for path in files
        ):
            return f"no test is called {name}"
    options = (ROOT / "conftest.py").read_text() + (ROOT / "st" / "conftest.py").read_text()
    return next(
        (
            f"pytest does not know {word}"
            for word in words
            if word.startswith("--") and f'"{word}"' not in options
        ),
        "",
    )


def problem_of_benchmark(script: Path, words: list[str]) -> str:
    """Returns what the script's parser says; the script ends when it has parsed its arguments."""

    class Parsed(BaseException):
        pass

    def parse(parser, *given, **how):
        try:
            original(parser, *given, **how)
        except SystemExit as ended:
            raise Parsed(f"it is refused with status {ended.code}") from ended
        raise Parsed("")

    original = argparse.ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [str(script), *words])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Parsed as parsed:
            return str(parsed)
    return "it parses no arguments"


def problem_of_run_mindformer(words: list[str]) -> str:
    if "..." in words:
        words = [
            "--config",
            "my.yaml",
            *(word for word in words if word not in ("...", "--config")),
        ]
    try:
        found = parsed_without_files(*words)
    except SystemExit:
        return "its arguments are refused"
    if found.config.startswith("configs/") and not (ROOT / found.config).is_file():
        return f"there is no {found.config}"
    unknown = [key for key, _ in found.free if key.split(".")[0] not in known_keys()]
    return f"there is no key {unknown[0]}" if unknown else ""


@EACH_PAGE
def test_every_script_exists_and_knows_its_options(page):
    rows = [
        (place, words)
        for place, _, words in commands_of(page)
        if arguments_of_mindresume(words) is None
    ]
    assert failed(problem_of_script, rows) == []


def test_a_wrong_script_is_noticed():
    for words in (
        "bash scripts/frobnicate.sh",
        "python benchmarks/save.py --frobnicate",
        "benchmarks/save.py --rounds many",
        "scripts/test_versions.sh --frobnicate",
        "pytest st/test_nothing.py",
        "pytest st --frobnicate",
        "pytest st/test_recovery.py -k frobnicate",
        "python -m mindresume.frobnicate",
        "python run_mindformer.py --config a.yaml --mode 7",
    ):
        assert problem_of_script(words.split()), words
    for words in (
        "bash scripts/test.sh",
        "chrt -r 20 python benchmarks/save.py --rounds 7",
        "python -m mindresume",
        "echo a",
    ):
        assert problem_of_script(words.split()) == "", words


@EACH_PAGE
def test_every_variable_is_read_somewhere(page):
    sources = [
        path.read_text()
        for folder in ("mindresume", "scripts", "st")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    ]
    names = {name for _, variables, _ in commands_of(page) for name in variables}
    names |= {
        match
        for block in blocks(page)
        if block.needs == "Kubernetes"
        for match in re.findall(r"- \{?name: ([A-Z]\w+),? *\n? *value:", block.text)
    }
    settings = {f"MINDRESUME_{name.upper()}" for name in Settings.__dataclass_fields__}
    used = page.read_text()  # by the block itself, as $NAME
    assert [
        name
        for name in sorted(names - settings - OF_MINDIO)
        if not any(name in text for text in sources) and not re.search(rf"\$\{{?{name}\b", used)
    ] == []


# ---- YAML ----------------------------------------------------------------------------------------


@cache
def known_keys() -> set[str]:
    """Returns the keys of the top level of a configuration: of mindformers' template, of its
    PyNative trainer, and ours."""
    spec = importlib.util.find_spec("mindformers")
    if spec is None:
        pytest.skip("mindformers is not installed")
    folder, found = Path(spec.origin).parent, {"mindresume"}
    found |= set(
        re.findall(r"(?m)^BASE_CONFIG = '(\w+)'", (folder / "tools/register/config.py").read_text())
    )
    for node in ast.walk(ast.parse((folder / "tools/register/template.py").read_text())):
        if isinstance(node, ast.ClassDef):
            values = {
                target.id: item.value
                for item in node.body
                if isinstance(item, ast.Assign)
                for target in item.targets
            }
            if isinstance(values.get("_name"), ast.Constant):
                found.add(values["_name"].value)
                found |= set(values) if node.name == "GeneralConfig" else set()
    return {key for key in found if key} | set(fields_of("checkpoint"))


def fields_of(key: str) -> dict[str, str]:
    """Returns {field: its class} of the dataclass of the PyNative trainer's configuration that has
    the field ``key``."""
    path = Path(importlib.util.find_spec("mindformers").origin).parent / "pynative/config/config.py"
    for node in ast.walk(ast.parse(path.read_text())):
        rows = {
            item.target.id: ast.unparse(item.annotation)
            for item in getattr(node, "body", [])
            if isinstance(node, ast.ClassDef) and isinstance(item, ast.AnnAssign)
        }
        if key in rows:
            return rows
    return {}


def yaml_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in ("yaml", "yml")]


@pytest.mark.parametrize("block", yaml_blocks(), ids=lambda block: block.place)
def test_every_yaml_is_accepted(block):
    contents = list(yaml.safe_load_all(block.text))
    assert all(isinstance(content, dict) for content in contents)
    if block.needs == "Kubernetes":
        assert all({"apiVersion", "kind", "metadata"} <= set(content) for content in contents)
        return
    (content,) = contents
    Settings.load(content.get("mindresume"), {})
    for callback in content.get("callbacks") or ():
        if callback["type"] == "CheckpointMonitor":
            assert set(callback) - {"type"} - MONITOR == set()
    of_monitor = {
        key for key in content if re.search(rf"^{key}:.*CheckpointMonitor", block.text, re.M)
    }
    assert of_monitor - MONITOR == set()
    assert set(content) - of_monitor - known_keys() == set()
    if isinstance(content.get("checkpoint"), dict):
        assert set(content["checkpoint"]) - set(fields_of("save_interleaved_steps")) == set()


# ---- Python and JSON -----------------------------------------------------------------------------


@EACH_PAGE
def test_every_python_block_parses_and_imports_what_exists(page):
    found = []
    for block in blocks(page):
        for node in ast.walk(ast.parse(block.text)) if block.language in ("python", "py") else ():
            if isinstance(node, ast.Import):
                found += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.module, alias.name) for alias in node.names]
    # which installs
    ours = {
        row
        for row in found
        if row[0].split(".")[0] == "mindresume" and row[0] != "mindresume.plugin"
    }
    assert [
        row
        for row in sorted(ours)
        if row[1]
        and not hasattr(importlib.import_module(row[0]), row[1])
        or importlib.util.find_spec(row[0]) is None
    ] == []


@EACH_PAGE
def test_every_json_block_parses(page):
    for block in blocks(page):
        if block.language == "json":
            json.loads(block.text)


# ---- blocks --------------------------------------------------------------------------------------


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.is_shell]


def test_marks_say_what_is_needed():
    found = {block.place: block.needs for page in PAGES for block in blocks(page) if block.needs}
    assert {place: needs for place, needs in found.items() if needs not in NEEDS} == {}
    assert {
        place
        for place in found
        if place not in {block.place for block in shell_blocks() + yaml_blocks()}
    } == set()


def extras() -> set[str]:
    """Returns the names of the optional dependencies, and of other lists in pyproject.toml."""
    return set(re.findall(r"(?m)^(\w+) = \[", (ROOT / "pyproject.toml").read_text()))


@pytest.fixture
def sandbox(training):  # noqa: F811
    """Returns a folder with output/checkpoint, the logs and events of a training beside it, and
    other/strategy."""
    history().write_all(training / "output")
    shutil.copytree(FIXTURE / "strategy", training / "other" / "strategy")
    return training


def run(words: list[str]) -> int:
    """Runs a command of mindresume in this process; returns its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mindresume", *words])
        try:
            cli.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        except (Stopped, MindResumeError) as error:
            pytest.fail(str(error))
    return 0


@pytest.mark.parametrize("block", shell_blocks(), ids=lambda block: block.place)
def test_every_shell_block_runs_or_is_covered_or_marked(block, request, monkeypatch, capsys):
    if block.needs:
        return
    for line in block.lines:
        row = next((row for row in COVERED if re.match(row[0], line)), None)
        if row is not None:
            text = "".join((ROOT / name).read_text() for name in row[1].split())
            assert [word for word in row[2] if word not in text] == [], row
            continue
        for command in simple_commands(line):
            _, words = split_environment(command)
            if words[:2] == ["pip", "install"]:
                names = [
                    name
                    for word in words[2:]
                    for group in re.findall(r"\[(.*?)\]", word)
                    for name in group.split(",")
                ]
                assert set(names) <= extras()
            elif (given := arguments_of_mindresume(words)) and (
                given[0] in ON_FILES or "--explain" in given
            ):
                monkeypatch.chdir(request.getfixturevalue("sandbox"))
                # two lines may show two ways to make the same folder
                if given[0] in ("convert", "merge"):
                    shutil.rmtree(given[2], ignore_errors=True)
                assert run(given) in (0, 1, 3), f"{command}: {capsys.readouterr()}"
            elif words:
                pytest.fail(
                    f"{line}: it is neither run here nor covered by a test; the block has no mark "
                    "<!-- needs: ... -->"
                )


def test_every_covering_row_is_used():
    lines = [line for block in shell_blocks() for line in block.lines]
    assert [row[0] for row in COVERED if not any(re.match(row[0], line) for line in lines)] == []


def test_every_page_in_chinese_has_the_same_marks():
    for page in PAGES:
        english = page.with_name(page.name.replace(".zh.md", ".md").replace("_CN", ""))
        if english != page:
            marks = [
                [
                    (block.language, block.needs)
                    for block in blocks(each)
                    if block.language in (*SHELL, "yaml")
                ]
                for each in (page, english)
            ]
            assert marks[0] == marks[1], page.name
