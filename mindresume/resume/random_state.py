"""Saves and restores the random generators of one process, Python's and numpy's, as JSON without pickle."""
from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np


def capture() -> dict[str, Any]:
    """Returns the state of the global generators of Python and numpy."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {"python": {"version": version, "internal": _pack(np.asarray(internal, np.uint64)), "gauss": gauss},
            "numpy": {"kind": kind, "keys": _pack(keys), "position": int(position), "has_gauss": int(has_gauss),
                      "cached": float(cached)}}


def restore(state: Mapping[str, Any]) -> list[str]:
    """Sets the generators whose state is in ``state``. Returns their names. Raises ValueError for a state of another kind."""
    restored = []
    if "python" in state:
        value = state["python"]
        random.setstate((value["version"], tuple(int(v) for v in _unpack(value["internal"], np.uint64)), value["gauss"]))
        restored.append("python")
    if "numpy" in state:
        value = state["numpy"]
        np.random.set_state((value["kind"], _unpack(value["keys"], np.uint32), value["position"], value["has_gauss"],
                             value["cached"]))
        restored.append("numpy")
    return restored


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _unpack(text: str, dtype: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()
