"""The setting ``keep_graphs``: the second start reads the graph that the first one compiled, and
trains what an uninterrupted run trains; a graph with dropout is not kept."""

import pytest

from st.run_attempts import LIMIT, not_identical
from st.training_run import differences

pytestmark = pytest.mark.timeout(900)
KEPT, READ = "and kept for the next start", "Use the compilation cache"


def test_the_next_start_reads_the_graph_and_trains_the_same(whole_single, tmp_path):
    run = whole_single.like(tmp_path / "run", graphs=None)
    run.start(MINDRESUME_KEEP_GRAPHS="1").wait_for_step(7)
    run.kill()
    assert KEPT in run.log() and READ not in run.log()
    # killed before its first step, so it seals nothing
    run.start(MINDRESUME_KEEP_GRAPHS="1")
    while READ not in run.log():
        assert run.process.poll() is None, run.log()[-3000:]
    run.kill()
    if not run.steps(-1):
        run.start(MINDRESUME_KEEP_GRAPHS="1").wait_for_step(9)
        run.kill()
        assert KEPT in run.log() and READ not in run.log()
    run.start(MINDRESUME_KEEP_GRAPHS="1").wait_for_success(LIMIT)
    assert READ in run.log() and KEPT not in run.log()
    assert differences(whole_single.steps(), run.steps(-1)) == []
    assert not_identical(whole_single, run.steps()) == []


def test_four_ranks_read_their_graphs(whole_four, tmp_path):
    run = whole_four.like(tmp_path / "run", graphs=None)
    run.start(MINDRESUME_KEEP_GRAPHS="1").wait_for_step(7)
    run.kill()
    run.start(MINDRESUME_KEEP_GRAPHS="1").wait_for_success(LIMIT)
    assert all(READ in run.log(rank) for rank in range(4))
    assert differences(whole_four.steps(), run.steps(-1)) == []


def test_a_graph_with_dropout_is_not_kept(whole_single, tmp_path):
    run = whole_single.like(tmp_path / "run", graphs=None)
    command = "--model.model_config.hidden_dropout 0.1"
    run.start(command, MINDRESUME_KEEP_GRAPHS="1").wait_for_step(2)
    run.kill()
    assert "it draws random numbers" in run.log()
    run.start(command, MINDRESUME_KEEP_GRAPHS="1").wait_for_step(2)
    run.kill()
    assert KEPT in run.log() and READ not in run.log()
