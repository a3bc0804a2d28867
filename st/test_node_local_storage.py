"""Two nodes without shared storage: each half of the ranks works in its own folder. All are killed;
one node has lost its newest checkpoint; the same command resumes from the newest common step and
ends like the uninterrupted run."""

import shutil

import pytest

from mindresume.coordination.storage_topology import newest_committed
from mindresume.formats import CheckpointDir
from mindresume.model.manifest import FOLDER
from mindresume.storage.posix import PosixStorage
from st.run_attempts import LIMIT, assert_resumed, run_beside

pytestmark = pytest.mark.timeout(1200)


def test_the_newest_step_that_both_nodes_have_is_resumed(whole_several, tmp_path):
    run = run_beside(whole_several, tmp_path / "run", copied=False)
    nodes = {"CPU_CLUSTER_NODES": "2", "MINDRESUME_PREEMPTION_CHECK_INTERVAL": "0.2"}
    roots = [run.folder / f"node_{node}" / "output" / "checkpoint" for node in (0, 1)]
    run.start(**nodes)
    run.wait_for_step(22)
    run.kill()
    newest = [newest_committed(CheckpointDir(PosixStorage(), str(root))) for root in roots]
    assert newest[0] and newest[0] == newest[1] and newest[0][0].startswith("step-0000000020"), (
        newest
    )
    half = run.workers // 2
    assert [sorted(path.name for path in root.glob("rank_*")) for root in roots] == [
        [f"rank_{rank}" for rank in range(first, first + half)] for first in (0, half)
    ]
    shutil.rmtree(roots[1] / FOLDER / newest[1][0])
    run.start(**nodes).wait_for_success(LIMIT)
    assert_resumed(run, whole_several, 15)
    assert [
        newest_committed(CheckpointDir(PosixStorage(), str(root)))[0][:15] for root in roots
    ] == ["step-0000000040"] * 2
    assert all(
        len(newest_committed(CheckpointDir(PosixStorage(), str(root)))) <= 6 for root in roots
    )  # 3 are kept, and what is common
