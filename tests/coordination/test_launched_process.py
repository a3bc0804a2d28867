"""Rank and number of processes come from the launcher's variables; a process that no launcher started is alone."""
import pytest

from mindresume.coordination.launched_process import is_scheduler, launched_process
from mindresume.errors import ConfigError

MSRUN = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8", "MS_NODE_ID": "3", "RANK_ID": "3", "MS_SCHED_HOST": "10.0.0.1",
         "MS_SCHED_PORT": "8118"}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize("environment, rank, size, job", [
    (MSRUN, 3, 8, "10.0.0.1-8118"),
    ({"RANK_ID": "1", "MS_WORKER_NUM": "2"}, 1, 2, ""),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "prterun-a/b@1"}, 1, 3, "prterun-a-b-1"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2, ""),
    (SRUN, 2, 4, "4711-0"),
    ({**SRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 1, 3, ""),          # mpirun within an allocation
    ({**MSRUN, "RANK_ID": "0"}, 3, 8, "10.0.0.1-8118"),             # msrun without --node_rank leaves that of the scheduler
])
def test_the_launchers(environment, rank, size, job):
    found = launched_process(environment)
    assert (found.rank, found.size, found.job) == (rank, size, job)


@pytest.mark.parametrize("environment", [
    {}, {"RANK_ID": "3", "RANK_SIZE": "8"}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {key: value for key, value in SRUN.items() if key != "SLURM_STEP_ID"},                          # a batch script
])
def test_a_process_alone(environment):
    assert launched_process(environment) is None


@pytest.mark.parametrize("environment", [
    {"RANK_ID": "8", "MS_WORKER_NUM": "8"}, {"RANK_ID": "-1", "MS_WORKER_NUM": "8"}, {"RANK_ID": "one", "MS_WORKER_NUM": "8"}])
def test_wrong_numbers_are_refused(environment):
    with pytest.raises(ConfigError, match="RANK_ID="):
        launched_process(environment)


def test_the_scheduler_of_msrun_has_nothing_to_do():
    assert is_scheduler({**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    assert not is_scheduler(MSRUN)
