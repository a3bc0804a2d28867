"""Runs commands in this process. A test module names its command, COMMAND; without it the first
argument is the command."""

import json
import sys

import pytest
from memory_tiers import memory  # noqa: F401  a fixture
from rank_folders import folder_contents

from mindresume import cli


@pytest.fixture
def call(request, monkeypatch, capsys):
    """Runs the command of the module, or ``command``; returns (exit status, stdout, stderr)."""

    def run(*arguments, command=None):
        command = command or getattr(request.module, "COMMAND", None)
        monkeypatch.setattr(
            sys, "argv", ["mindresume", *([command] if command else []), *map(str, arguments)]
        )
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def read(call):
    """Runs the command with --json; returns (exit status, JSON document). Numbers that JSON does
    not know are an error."""

    def run(*arguments):
        status, out, err = call(*arguments, "--json")
        assert err == ""
        return status, json.loads(
            out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
        )

    return run


@pytest.fixture
def read_ok(read):
    """Runs the command with --json, which must end with status 0; returns the document."""

    def run(*arguments):
        status, document = read(*arguments)
        assert status == 0
        return document

    return run


@pytest.fixture
def refused(call, tmp_path):
    """Runs a command that writes to ``target``; it must end with status 2 and one line on stderr,
    which is returned, and leave nothing."""

    def run(*arguments, target="new"):
        before = folder_contents(tmp_path)
        status, out, err = call(arguments[0], tmp_path / target, *arguments[1:])
        assert (status, out) == (2, ""), err
        assert err.startswith("mindresume: ") and err.count("\n") == 1
        assert folder_contents(tmp_path) == before
        return err

    return run
