"""Arrays that are filled at once lie in arenas, and do not overlap."""
import numpy as np

from mindresume.tensor_files import arenas


def test_arrays_that_follow_each_other_share_arenas(monkeypatch):
    monkeypatch.setattr(arenas, "ARENA", 10_000)
    monkeypatch.setattr(arenas, "_SMALL", 9_000)
    found = arenas.new_memory({"a": 4_000, "b": 4_001, "empty": 0, "large": 50_000, "c": 9_990, "d": 1})
    assert {name: array.nbytes for name, array in found.items()} == {
        "a": 4_000, "b": 4_001, "empty": 0, "large": 50_000, "c": 9_990, "d": 1}
    for number, array in enumerate(found.values()):
        assert array.flags.writeable and array.ctypes.data % 16 == 0
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(found.values()))       # they do not overlap
    assert np.shares_memory(found["a"].base, found["b"].base)
    assert not np.shares_memory(found["b"].base, found["large"].base)
