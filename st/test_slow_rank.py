"""The supervisor names the rank whose data comes late, and none in a normal training."""

import pytest

from st.run_attempts import LIMIT
from st.supervised_run import supervised, supervisor_events
from st.training_run import ROOT

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("slow", ["2", "none"])
def test_the_rank_whose_data_comes_late_is_named(whole_four, tmp_path, slow):
    run = whole_four.like(tmp_path / "run", program=ROOT / "st" / "programs" / "slow_data.py")
    supervised(run, "--slow-factor", "3", SLOW_RANK=slow)
    run.wait_for_success(LIMIT)
    found = {event["rank"] for event in supervisor_events(run, "slow_rank")}
    assert found == ({2} if slow == "2" else set())
