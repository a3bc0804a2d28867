"""LoRA (``lora_config``) in the PyNative trainer of mindformers 2.0.0 and 2.1.0: a killed
fine-tuning continues exactly, with checkpoints of all parameters."""

import pytest

from st.pynative_cases import OURS, assert_same, build, dies, whole  # noqa: F401
from st.pynative_run import why_not
from st.run_attempts import assert_event

# ruff: noqa: F811  build and whole are fixtures
pytestmark = pytest.mark.timeout(1200)
LORA = {"lora_config": {"target_modules": ".*linear.*", "lora_rank": 4, "lora_alpha": 8}}


@pytest.mark.parametrize(
    "release",
    [
        pytest.param("2.0.0", marks=pytest.mark.soak),
        "2.1.0",
    ],
)
def test_a_killed_fine_tuning_is_the_uninterrupted_one(whole, build, release):
    if reason := why_not(release):
        pytest.skip(reason)
    reference, run = whole(release, 1, LORA), build("run", release, 1, LORA)
    run.resume(CPU_CLUSTER_KILL="all@13", **OURS)
    dies(run)
    run.resume(**OURS).wait_for_success()
    assert_event(run, "resumed", step=10)
    assert_same(run, reference, 11)
