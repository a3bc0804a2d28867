"""The formula of docs/sizing.md: it gives the numbers of the page, and the bytes of real saves."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "st" / "fixtures"
PAGES = [ROOT / "docs" / name for name in ("sizing.md", "sizing.zh.md")]
EXAMPLES = (  # the columns of the example
    {"bytes_each": 12, "cuts": 256},
    {"bytes_each": 14, "cuts": 256},
    {"bytes_each": 12, "cuts": 32},
    {"bytes_each": 12, "cuts": 32, "once": True},
)


def tensor_bytes(path, prefix=""):
    """Returns the bytes of the tensors of a file whose names begin with ``prefix``."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    places = [row["data_offsets"] for name, row in header.items() if name.startswith(prefix)]
    return sum(end - begin for begin, end in places)


def sizes(page, **given):
    """Returns what the function of a page returns."""
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[1], names)
    return names["sizes"](**given)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_numbers_of_the_example(page):
    rows = {
        row[0]: [float(cell.replace(",", "")) for cell in re.findall(r"[\d,.]*\d", row[1])]
        for row in re.findall(r"(?m)^\| ([^|]+?) \| ((?:[\d,.]+[^|]* \| ?){4})$", page.read_text())
    }
    english = [row for row in re.findall(r'"([\w/ ]+)": ', PAGES[0].read_text())]
    assert len(rows) == len(english) == 10
    computed = [
        sizes(page, parameters=70e9, ranks=256, per_node=8, keep=3, **one) for one in EXAMPLES
    ]
    for shown, name in zip(rows.values(), english, strict=True):
        unit = 1 if name in ("seconds to write", "seconds to load", "stop", "interval") else 1e9
        expected = [one[name] / unit for one in computed]
        assert shown == pytest.approx(expected, abs=0.51 if max(expected) > 500 else 0.051), name


@pytest.mark.parametrize(
    "fixture, step, ranks, cuts, once",
    [
        ("mf190_10_safetensors_single", "1_10", 1, 1, False),
        ("mf190_20_single", "iteration_00000015", 1, 1, False),
        ("mf180_20_tp2", "iteration_00000015", 2, 2, False),
        ("mf190_10_safetensors_dp2tp2", "1_10", 4, 2, False),
        ("mf190_10_safetensors_dp2tp2_nodup", "1_10", 4, 2, True),
        ("mf190_20_dp2tp2opt", "iteration_00000015", 4, 4, False),
    ],
)
def test_the_bytes_of_real_saves(fixture, step, ranks, cuts, once):
    """float32 and AdamW. The model is so small that headers count more than in a real one, so
    tensors are compared."""
    files = [path for path in FIXTURES.glob(f"{fixture}/**/*.safetensors") if step in str(path)]
    assert len(files) >= ranks
    found = sum(tensor_bytes(path) for path in files)
    single = sum(
        tensor_bytes(path, "adam_m")
        for path in FIXTURES.glob("mf190_10_safetensors_single/**/*1_10.safetensors")
    )
    expected = sizes(
        PAGES[0],
        parameters=single / 4,
        bytes_each=12,
        ranks=ranks,
        cuts=cuts,
        per_node=1,
        keep=1,
        once=once,
    )
    # a norm is not cut by tensor parallelism
    assert found == pytest.approx(expected["checkpoint on disk"], rel=0.02)
