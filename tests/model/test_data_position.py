import pytest

from mindresume.model.data_position import DataPosition, DataRequest


@pytest.mark.parametrize("passes, samples, steps, size, batch, expected", [
    (0, 0, 0, 10, 8, (0, 0)), (0, 0, 10, 10, 8, (1, 0)), (1, 40, 4, 10, 8, (1, 72)), (1, 40, 5, 10, 8, (2, 0)),
    (1, 40, 35, 10, 8, (5, 0)), (0, 64, 1, 5, 16, (1, 0)),
    (0, 44, 1, 10, 8, (0, 48)),                     # half a step was left over
])
def test_after_advances_passes_and_samples(passes, samples, steps, size, batch, expected):
    found = DataPosition(passes, samples, 2, "said", {"type": "T"}).after(steps, size, batch)
    assert (found.passes, found.samples) == expected
    assert (found.first_epoch, found.declared, found.identity) == (2, "said", {"type": "T"})


def test_steps_counts_whole_steps():
    assert DataPosition(2, 40).steps(10, 8) == 25
    assert DataPosition(2, 47).steps(10, 8) == 25
    assert DataPosition(0, 400).steps(10, 8) == 10          # never into the next pass


def test_a_data_request_as_text():
    assert [str(DataRequest(*given)) for given in ((), (True,), (False, 3), (False, 0))] == [
        "", "ignore_data_skip: True", "data_skip_steps: 3", ""]
