"""The last save of a job that had lost ranks: of data parallel 2 each rank holds everything; of 4
processes, data parallel 2 x model parallel 2, ranks 0 and 3 do together, and 0 and 2 do not. Both
formats; the same command resumes from the last save.
"""

import pytest

from st.run_attempts import LIMIT, assert_no_process_left, assert_resumed, run_beside, steps_of
from st.training_run import Run, differences

pytestmark = pytest.mark.timeout(1200)


def lose_ranks(run: Run, left: str, command: str) -> Run:
    run.start(command, CPU_CLUSTER_LOSE=f"{left}@12")
    assert run.wait(LIMIT) not in (0, None)
    assert_no_process_left(run)
    assert steps_of(run)[-1] == 12
    return run


@pytest.mark.parametrize(
    "command", [pytest.param("", marks=pytest.mark.soak), "--use_legacy_format False"]
)
def test_remaining_ranks_that_hold_everything_are_enough(whole_several, tmp_path, command):
    left = {2: "1", 4: "0,3"}[whole_several.workers]
    run = lose_ranks(run_beside(whole_several, tmp_path / "run", copied=False), left, command)
    assert run.which()["chosen"]["step"] == 12
    run.start(command).wait_for_success(LIMIT)
    assert_resumed(run, whole_several, 12)
    assert differences(whole_several.steps(), run.steps()) == []


@pytest.mark.soak
def test_remaining_ranks_that_lack_something_are_refused(whole_four, tmp_path):
    run = lose_ranks(run_beside(whole_four, tmp_path / "run", copied=False), "0,2", "")
    found = run.which()
    assert found["chosen"]["step"] == 10 and "rank 1, 3" in found["refused"][0]["reason"]
