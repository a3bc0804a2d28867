"""Commands in this process. A test module says which one: COMMAND."""
import json
import sys

import pytest

from mindresume import cli


@pytest.fixture
def call(request, monkeypatch, capsys):
    """Returns (exit status, stdout, stderr)."""
    def run(*arguments, command=None):
        monkeypatch.setattr(sys, "argv", ["mindresume", command or request.module.COMMAND, *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        return status, *capsys.readouterr()
    return run


@pytest.fixture
def read(call):
    """(exit status, JSON document); numbers that JSON does not know are an error."""
    def run(*arguments):
        status, out, err = call(*arguments, "--json")
        assert err == ""
        return status, json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return run
