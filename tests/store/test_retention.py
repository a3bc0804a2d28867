from dataclasses import dataclass

import pytest

from mindresume.store.retention import KeepAll, KeepLast, KeepPerMinutes, policy_of, surplus


@dataclass(frozen=True)
class Saved:
    step: int
    saved_at: float


MINUTES = [Saved(step, 60.0 * step) for step in range(9, -1, -1)]          # one a minute, newest first


@pytest.mark.parametrize("policy, gone", [
    (KeepAll(), []), (KeepLast(3), [3, 4, 5, 6, 7, 8, 9]), (KeepLast(20), []), (KeepLast(1), list(range(1, 10))),
    (KeepPerMinutes(3), [1, 2, 4, 5, 7, 8]),           # steps 0, 3, 6, 9 stay
])
def test_what_is_removed(policy, gone):
    assert surplus(policy, MINUTES) == gone


def test_the_newest_always_stays():
    class KeepNone:
        def keeps(self, newest_first):
            return set()
    assert surplus(KeepNone(), MINUTES[:2]) == [1]
    assert surplus(KeepNone(), []) == []


def test_the_keys_of_the_yaml():
    assert policy_of(5, 10) == KeepLast(5)
    assert policy_of(0, 10) == KeepPerMinutes(10)
    assert policy_of(None, 0) == KeepAll()
