"""The last save of a job that had lost ranks: of data parallel 2 each rank holds everything; of 4 processes, data parallel 2 x
model parallel 2, ranks 0 and 3 do together, and 0 and 2 do not. Both formats; the same command goes on behind the last save.
"""
from __future__ import annotations

import pytest

from st.copies import LIMIT, beside, said, steps_of
from st.jobs import Run, differences
from st.lives import assert_nothing_left

pytestmark = pytest.mark.timeout(1200)


def dies(run: Run, left: str, command: str) -> Run:
    run.start(command, CPU_CLUSTER_LOSE=f"{left}@12")
    assert run.wait(LIMIT) not in (0, None)
    assert_nothing_left(run)
    assert steps_of(run)[-1] == 12
    return run


@pytest.mark.parametrize("command", [pytest.param("", marks=pytest.mark.soak), "--use_legacy_format False"])
def test_ranks_that_hold_everything(whole_several, tmp_path, command):
    run = dies(beside(whole_several, tmp_path / "run", copied=False), {2: "1", 4: "0,3"}[whole_several.workers], command)
    assert run.which()["chosen"]["step"] == 12
    run.start(command).ended(LIMIT)
    said(run, "mindresume: resume from step 12,")
    assert steps_of(run) == list(range(13, 41))
    assert differences(whole_several.steps(), run.steps()) == []


@pytest.mark.soak
def test_ranks_that_do_not(whole_four, tmp_path):
    run = dies(beside(whole_four, tmp_path / "run", copied=False), "0,2", "")
    found = run.which()
    assert found["chosen"]["step"] == 10 and "was held by rank 1, 3 alone" in found["refused"][0]["reason"]
