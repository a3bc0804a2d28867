import json
import random

import numpy as np
import pytest

pytest.importorskip("mindspore")

from mindresume.mindformers.network_state import capture_random, restore_random  # noqa: E402


def draws():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(3).tolist(),
        random.randint(0, 9),
    ]


def test_generators_continue_from_their_saved_state():
    random.seed(3)
    np.random.seed(4)
    random.gauss(0, 1)  # leaves half of a pair inside the generator
    np.random.randn()
    saved = json.dumps(capture_random())  # it must survive the way through JSON
    expected = [draws() for _ in range(700)]  # more than the 624 words of the Mersenne Twister
    random.seed(99)
    np.random.seed(98)
    assert restore_random(json.loads(saved))[:2] == ["python", "numpy"]
    assert [draws() for _ in range(700)] == expected


def test_nothing_is_restored_if_nothing_was_saved():
    assert restore_random({}) == []
