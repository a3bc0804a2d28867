"""What else takes part in a recovery."""

import importlib
import re
from pathlib import Path

import pytest

from mindresume.coordination.neighbours import PAGE, neighbours

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Returns a function that installs empty packages of these names."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(*names):
        for name in names:
            (tmp_path / f"{name}.py").touch()
        importlib.invalidate_caches()

    return install


def found(**environment):
    return {each.name: each for each in neighbours(environment)}


def test_nothing_is_told_of_a_plain_machine():
    assert found() == {}
    assert found(MS_ENABLE_TFT="{TTP:0,ARF:0}") == {}


@pytest.mark.parametrize("text", ["{TTP:1,UCE:1}", "{UCE:1 TTP:1}", " { TTP : 1, UCE:1 } "])
def test_flags_are_read_as_people_write_them(installed, text):
    installed("mindio_ttp")
    assert set(found(MS_ENABLE_TFT=text)) == {"MS_ENABLE_TFT TTP", "MS_ENABLE_TFT UCE"}


def test_what_does_not_go_together_has_a_remedy(installed):
    installed("mindio_ttp", "taskd", "mindio_acp")
    every = found(MS_ENABLE_TFT="{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:2,TSP:1,RSC:1}", MINDX_TASK_ID="a")
    assert {name.split()[-1] for name, each in every.items() if each.remedy} == {
        "ARF",
        "TRE",
        "TSP",
        "taskd",
    }
    assert {"MindIO ACP", "MindCluster"} <= set(every)


def test_mindio_is_missed_if_a_flag_needs_it():
    assert found(MS_ENABLE_TFT="{TTP:1}")["MindIO TTP"].remedy
    assert "MindIO TTP" not in found(MS_ENABLE_TFT="{TRE:1}")
    assert "MindIO TTP" not in found(MS_ENABLE_TFT="{RSC:1}")


def test_taskd_takes_the_ranks_of_msrun_only_if_a_flag_asks_for_it(installed):
    installed("taskd")
    assert "taskd" in found(MS_ENABLE_TFT="{RSC:1}")
    assert found() == {} and "taskd" not in found(MS_ENABLE_TFT="{TRE:1}")


def test_the_page_explains_each_flag():
    for page in (PAGE, PAGE.replace(".md", ".zh.md")):
        rows = re.findall(r"(?m)^\| \*\*([A-Z]+)\*\*", (ROOT / page).read_text("utf-8"))
        assert {"TTP", "UCE", "HCCE", "ARF", "TRE", "TSP", "RSC"} <= set(rows), page
