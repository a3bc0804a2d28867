"""The PyNative trainer with the tier in memory: SIGKILL of all ranks, and a node that is lost."""

import os
import shutil

import pytest

from st.pynative_cases import OURS, assert_same, build, dies, whole  # noqa: F401
from st.pynative_run import why_not
from st.run_attempts import LIMIT, assert_event, events
from st.test_memory_tier import in_memory, settings, sources, tier_of  # noqa: F401

# ruff: noqa: F811  build and whole are fixtures


def on(release: str, workers: int, soak: bool = False):
    reason = why_not(release, workers)
    return pytest.param(
        release,
        workers,
        marks=[
            *([pytest.mark.skip(reason=reason)] if reason else []),
            *([pytest.mark.soak] if soak else []),
        ],
    )


@pytest.mark.parametrize(
    "release, workers",
    [
        on("1.9.0", 1),
        on("2.0.0", 2, soak=True),
        on("2.1.0", 1, soak=True),
        on("2.1.0", 2, soak=True),
    ],
)
def test_a_killed_training_resumes_from_memory_and_without_the_node_from_disk(
    whole, build, memory, release, workers
):
    """Saves on disk are at 20 and 40, saves in memory at multiples of 3."""
    reference, run = (
        whole(release, workers),
        build("run", release, workers, {"checkpoint.save_interleaved_steps": 20}),
    )
    run.start(CPU_CLUSTER_KILL="all@29", **OURS, **settings(memory))
    dies(run)
    newest = in_memory(run)[0].step
    # one is whole while the other is written
    assert newest in (24, 27)
    run.resume(CPU_CLUSTER_KILL="all@37", **OURS, **settings(memory))
    dies(run)
    assert sources(run) == ["memory"] * workers
    assert_event(run, "resumed", step=newest)
    assert_same(run, reference, newest + 1, 37)
    shutil.rmtree(tier_of(run))
    run.resume(**OURS, **settings(memory)).wait_for_success(LIMIT)
    assert sources(run) == ["disk"] * workers
    assert_same(run, reference, 21)
    # the last step is on disk
    assert not os.path.exists(tier_of(run)) and not events(run, "tier_refused")
