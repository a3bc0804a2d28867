"""The judge's cases (tests/judge) with several ranks, and those that take longest. The real Trainer
in processes that one host forks, on the CPU cluster."""

import sys

import pytest

from tests.judge.goldens import RANKS, cases, compared, end, recorded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU cluster needs Linux")


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    end()


@pytest.mark.parametrize("name", cases(RANKS))
def test_a_case(name):
    _, difference = compared(RANKS, cases(RANKS)[name])
    assert not difference, (
        f"\n{difference}\n\nIf a user shall see this change: python -m tests.judge --update "
        f"{name!r}"
    )


def test_each_section_belongs_to_a_case():
    assert list(recorded(RANKS)) == list(cases(RANKS))
