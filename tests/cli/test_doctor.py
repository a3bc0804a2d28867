"""``mindresume doctor`` in places where something is wrong."""

import socket
import sys

import pytest

COMMAND = "doctor"


@pytest.fixture
def framework(tmp_path, monkeypatch):
    """Returns a function that puts packages before the installed mindformers and mindspore, for
    the process of the examination: {path: text}; a version makes metadata, too."""

    def put(files, **versions):
        folder = tmp_path / "packages"
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        for name, version in versions.items():
            info = folder / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{':'.join(filter(None, sys.path))}")

    return put


@pytest.fixture
def checks(read, tmp_path):
    """Returns (exit status, {what: check}) of a run."""

    def run(*arguments):
        status, document = read("--dir", tmp_path / "output", *arguments)
        return status, {check["about"]: check for check in document["checks"]}

    return run


def test_a_framework_that_ends_the_process_is_named_with_its_status(framework, checks):
    framework({"mindspore/__init__.py": "import os; os._exit(139)", "mindformers/__init__.py": ""})
    # mindresume itself imports mindspore only through mindformers
    framework({"mindformers/__init__.py": "import mindspore"})
    status, found = checks()
    assert status == 1
    assert found["installation"]["state"] == "wrong"
    assert "status 139" in found["installation"]["found"]
    assert found["installation"]["remedy"]


@pytest.mark.parametrize(
    "packages, versions, text",
    [
        ({}, {"mindformers": "1.2.0"}, "mindformers 1.2.0 is installed; mindresume needs"),
        ({"mindformers/__init__.py": "import absent_package"}, {}, "absent_package"),
    ],
    ids=["too old", "incomplete"],
)
def test_an_installation_that_cannot_train_is_wrong(framework, checks, packages, versions, text):
    framework(packages, **versions)
    status, found = checks()
    assert status == 1 and text in found["installation"]["found"]


def test_a_release_that_was_not_tested_is_a_note(framework, checks):
    framework({}, mindspore="9.9.0")
    status, found = checks()
    assert status == 0
    assert found["releases"]["state"] == "note" and "mindspore 9.9.0" in found["releases"]["found"]


def test_a_tier_that_would_not_lie_in_memory_is_wrong(checks, tmp_path):
    config = tmp_path / "my.yaml"
    config.write_text("mindresume: {memory_tier: {every_steps: 5, dir: /proc}}")
    status, found = checks("--config", config)
    assert status == 1 and "/proc is no tmpfs but proc" in found["memory for saves"]["found"]


def test_a_missing_configuration_is_wrong(checks, tmp_path):
    status, found = checks("--config", tmp_path / "absent.yaml")
    assert status == 1 and "no such file" in found["configuration"]["found"]


def test_without_a_framework_the_configuration_is_not_examined(framework, checks, tmp_path):
    framework({"mindformers/__init__.py": "import absent_package"})
    _, found = checks("--config", tmp_path / "my.yaml")
    assert found["configuration"]["state"] == "note"


@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_gets_lines_that_fit(framework, call, monkeypatch, columns):
    framework({"mindformers/__init__.py": "import absent_package"})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = call()
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= columns


def test_nothing_is_left_behind(call, framework, tmp_path, monkeypatch):
    framework({"mindformers/__init__.py": "import absent_package"})
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    status, out, _ = call()
    assert status == 1 and "wrong: installation" in out
    assert set(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_written_is_wrong(framework, read):
    framework({"mindformers/__init__.py": "import absent_package"})
    _, document = read("--dir", "/proc/output")
    row = next(check for check in document["checks"] if check["about"] == "output folder")
    assert row["state"] == "wrong" and "/proc" in row["found"]


def test_what_else_takes_part_in_a_recovery_is_named(framework, checks, monkeypatch):
    framework({"mindformers/__init__.py": "import absent_package"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MS_SCHED_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1}")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        _, found = checks()
    assert "in use" in found["scheduler's port"]["found"]
    assert "save the last step" in found["MS_ENABLE_TFT TTP"]["found"]
    assert found["MindIO TTP"]["state"] == "note" and found["MindIO TTP"]["remedy"]
    assert found["Kubernetes"]["state"] == "ok"
