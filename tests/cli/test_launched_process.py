"""Rank and number of processes come from the launcher's variables; a process that no launcher
started is alone."""

import pytest

from mindresume.cli.common import ShareOfProcess, is_scheduler, launched_process, share_of_process
from mindresume.errors import ConfigError

MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_NODE_ID": "3",
    "RANK_ID": "3",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_ID": "0",
}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
# LaunchParameters=use_interactive_step
SALLOC = {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    "environment, rank, size",
    [
        (MSRUN, 3, 8),
        ({"RANK_ID": "1", "MS_WORKER_NUM": "2"}, 1, 2),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "3",
                "PMIX_NAMESPACE": "prterun-a/b@1",
            },
            1,
            3,
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, 0, 2),
        # srun --mpi=pmi2
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4", "PMI_JOBID": "4711.0"}, 2, 4),
        # srun --mpi=pmix
        ({**SRUN, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.4711.0"}, 2, 4),
        (SRUN, 2, 4),
        # srun -n 4 --preserve-env in an allocation of 16
        ({**SRUN, "SLURM_NTASKS": "16"}, 2, 4),
        # mpirun within an allocation
        ({**SRUN, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}, 1, 3),
        ({**MSRUN, "RANK_ID": "0"}, 3, 8),  # that of the scheduler
    ],
)
def test_the_launchers(environment, rank, size):
    found = launched_process(environment)
    assert (found.rank, found.size) == (rank, size)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK_ID": "3", "RANK_SIZE": "8"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        BATCH,
        SALLOC,
        {**SALLOC, "PMIX_RANK": "0"},
        {**SALLOC, "PMI_RANK": "0", "PMI_SIZE": "1"},
        # srun -n 1 --pty bash
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_alone(environment):
    assert launched_process(environment) is None


# on the node of the scheduler RANK_ID is the scheduler's
@pytest.mark.parametrize("rank", [{}, {"RANK_ID": "0"}])
def test_msrun_on_several_nodes_must_say_which_node_this_is(rank):
    without = {key: value for key, value in MSRUN.items() if key not in ("MS_NODE_ID", "RANK_ID")}
    with pytest.raises(ConfigError, match="--node_rank"):
        launched_process({**without, **rank})
    assert launched_process({**without, "MS_WORKER_NUM": "1"}) is None


def test_wrong_numbers_are_refused():
    for rank in ("8", "-1", "one"):
        with pytest.raises(ConfigError, match="RANK_ID="):
            launched_process({"RANK_ID": rank, "MS_WORKER_NUM": "8"})


def test_the_scheduler_of_msrun_has_nothing_to_do():
    assert is_scheduler({**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    assert not is_scheduler(MSRUN)


def test_a_part_by_hand(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "")
    assert share_of_process("2/4") == ShareOfProcess((2, 4))
    for part in ("2", "a/b", "1/"):
        with pytest.raises(ConfigError, match="--part is"):
            share_of_process(part)
