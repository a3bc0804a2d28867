"""The wheel and the source archive: built, installed into empty environments, and used there, away
from this folder. pip takes what they depend on from its package index."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import mindresume
from st.training_run import ROOT

PACKAGE = ROOT / "mindresume"


def ended(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in ``folder``, without the environment of the tests."""
    return subprocess.run(
        list(map(str, words)),
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "200"},
    )


def run(*words: str | Path, folder: Path) -> str:
    """The same with a command that succeeds; returns its output."""
    done = ended(*words, folder=folder)
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """Returns {ending: archive} of what a release publishes. The wheel is built from the source
    archive, in a copy of the files that git knows: what lies beside them here must not be
    needed."""
    folder = tmp_path_factory.mktemp("built")
    listed = (
        subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, listed):
        if (ROOT / name).is_file() and not name.startswith(("st/fixtures/", "docs/images/")):
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "copy" / name)
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
        folder / "copy",
        folder=folder,
    )
    return {path.suffix: path for path in (folder / "dist").iterdir()}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """Returns the ``bin`` of an environment with the wheel and what it asks for, and nothing
    else."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", folder=folder)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        folder / "venv/bin/python",
        "--disable-pip-version-check",
    ]
    # with the environment of the tests: pip's settings may be in it
    done = subprocess.run(
        [*map(str, pip), "install", "--quiet", str(built[".whl"])],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run(*pip, "check", folder=folder)
    return folder / "venv/bin"


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(
            archive.read(f"mindresume-{mindresume.__version__}.dist-info/METADATA")
        )


def test_the_wheel_has_the_package_and_its_licence(built):
    with zipfile.ZipFile(built[".whl"]) as archive:
        names = set(archive.namelist())
        msrun = archive.getinfo("mindresume/supervisor/bin/msrun")
    assert msrun.external_attr >> 16 & 0o111  # found in PATH
    package = {
        f"mindresume/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == package
    assert "mindresume/py.typed" in names and any(
        name.endswith(".dist-info/licenses/LICENSE") for name in names
    )


def test_the_metadata_says_what_the_package_is(built):
    found = metadata(built[".whl"])
    assert (found["Name"], found["Version"], found["License-Expression"]) == (
        "mindresume",
        mindresume.__version__,
        "Apache-2.0",
    )
    assert set(found.get_all("Provides-Extra")) == {
        "mindformers",
        "report",
        "metrics",
        "s3",
        "docs",
        "test",
    }
    assert "# mindresume" in str(found.get_payload())
    assert found["Requires-Python"] == ">=3.10"


def test_the_source_archive_has_all_that_git_knows(built):
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    copy = built[".gz"].parents[1] / "copy"
    files = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert sorted(name for name in files - names if "egg-info" not in name) == []
    assert {"sim/__init__.py", "scripts/msrun_launcher.sh", "st/test_package.py"} <= names


def test_the_command_starts_without_what_is_not_installed(installed, tmp_path):
    listed = json.loads(
        run(
            installed / "python",
            "-c",
            "import importlib.metadata, json; print(json.dumps([d.name for d in "
            "importlib.metadata.distributions()]))",
            folder=tmp_path,
        )
    )
    assert not {"mindspore", "mindformers", "jinja2", "pip"} & {name.lower() for name in listed}
    assert "mindresume COMMAND" in run(installed / "mindresume", "--help", folder=tmp_path).replace(
        "[OPTIONS] ", ""
    )
    assert run(installed / "mindresume", "--version", folder=tmp_path).startswith(
        f"mindresume {mindresume.__version__} (no mindformers, no mindspore, Python 3."
    )
    assert Path(
        run(installed / "mindresume", "plugin-path", folder=tmp_path).strip()
    ).is_relative_to(installed.parent)


def test_a_drill_on_files_passes(installed, tmp_path):
    found = json.loads(
        run(
            installed / "mindresume",
            "drill",
            "--dir",
            tmp_path,
            "--scenario",
            "first save",
            "--every",
            "20",
            "--json",
            folder=tmp_path,
        )
    )
    assert {cell["verdict"] for cell in found["cells"]} == {"PASS"}


def test_what_needs_an_extra_names_it(installed, tmp_path):
    done = ended(installed / "mindresume", "report", ".", folder=tmp_path)
    assert (
        done.returncode == 2
        and "mindresume[report]" in done.stderr
        and done.stderr.count("\n") == 1
    )


def test_a_release_is_built_from_a_clean_clone_and_refused_otherwise(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):  # the release of what is here now
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    for file, before, after in (
        ("mindresume/__init__.py", r'(?m)^__version__ = ".*"', '__version__ = "77.0.0"'),
        ("CHANGELOG.md", r"(?m)^## .*", "## 77.0.0 - 2026-12-01"),
    ):
        text = (clone / file).read_text("utf-8")
        (clone / file).write_text(re.sub(before, after, text, count=1), "utf-8")

    def release():
        return subprocess.run(
            ["bash", "scripts/release.sh"],
            cwd=clone,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(clone)},
        )

    def git(*words):
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *author, *words], cwd=clone, check=True)

    assert "not committed" in release().stderr
    git("add", "-A")
    git("commit", "-qm", "Release")
    done = release()
    assert done.returncode == 0, done.stdout + done.stderr
    dist = clone / "dist"
    endings = ["-guide.tar.gz", "-notes.md", "-py3-none-any.whl", ".sha256", ".tar.gz"]
    assert sorted(path.name for path in dist.iterdir()) == [
        f"mindresume-77.0.0{e}" for e in endings
    ]
    sums = (dist / "mindresume-77.0.0.sha256").read_text()
    assert len(sums.splitlines()) == len(endings) - 1
    with tarfile.open(dist / "mindresume-77.0.0-guide.tar.gz") as archive:
        assert "mindresume-77.0.0-guide/zh/index.html" in archive.getnames()
    assert release().returncode == 0
    assert (
        dist / "mindresume-77.0.0.sha256"
    ).read_text() == sums  # the same commit, the same bytes
    git("tag", "v77.0.0")
    assert "the tag v77.0.0 exists" in release().stderr
