"""Mutation test of rules of docs/design_rules.md that the simulation cannot see: a test fails if
their cause is put back."""

from pathlib import Path

import pytest
from cause_mutants import MUTANTS


def test_each_cause_that_is_put_back_is_found(capsys):
    """In this process, which may have imported mindformers already."""
    here = Path(__file__).parent
    options = ["-q", "-rxX", "-p", "cause_mutants", "-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main(
        [*options, f"--rootdir={here.parent}", *(str(here / one) for one in MUTANTS)]
    )
    shown = capsys.readouterr().out
    assert status == 0 and f"{len(MUTANTS)} xfailed" in shown.splitlines()[-1], shown
