"""Finds out from the environment whether a launcher started this process as one of several: msrun, mpirun or srun.

    process = launched_process(os.environ)      # LaunchedProcess(rank=2, size=8, job="slurm-4711.0"), or None
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mindresume.errors import ConfigError

# (variables of the rank, the first that is set; variable of the number of processes; variables that identify the launch).
# SLURM_NTASKS is that of the allocation: a batch script and the shell of salloc have it too, beside SLURM_PROCID=0, though only
# one process runs there. SLURM_STEP_NUM_TASKS is what srun started: absent in a batch script, 1 in the shell of salloc, which may
# be a step. SLURM_STEP_ID identifies no launch of mpiexec: its processes on the first node may have that of the shell, or none.
_LAUNCHERS = (
    (("MS_NODE_ID", "RANK_ID"), "MS_WORKER_NUM", ("MS_SCHED_HOST", "MS_SCHED_PORT")),
    (("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_SIZE", ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")),
    (("PMI_RANK",), "PMI_SIZE", ("PMI_JOBID", "SLURM_JOB_ID")),
    (("SLURM_PROCID",), "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


@dataclass(frozen=True)
class LaunchedProcess:
    """Describes this process of a launch.

    Args:
        rank: its number, from 0.
        size: number of processes of the launch.
        job: text that separates launches, as far as the launcher gives one; usable in a file name.
        source: the variables that say so, for messages.
    """
    rank: int
    size: int
    job: str = ""
    source: str = ""


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Returns whether msrun started this process in addition to the workers, with the same command. It has nothing to do."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def launched_process(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Returns this process's place in its launch; None if no launcher started it, or this process alone.

    Raises:
        ConfigError: The variables of a launcher are no numbers, or the rank is not below the number of processes; msrun on
            several nodes was not told which node this is.
    """
    workers = environment.get("MS_WORKER_NUM", "1")
    if environment.get("MS_ROLE") == "MS_WORKER" and not environment.get("MS_NODE_ID") and workers != "1":
        # RANK_ID is absent or that of the scheduler: MindSpore would assign ranks when the training begins
        raise ConfigError(f"msrun started {workers} processes on several nodes and gave this one no rank (no MS_NODE_ID): "
                          f"give --node_rank to msrun on each node")
    for ranks, count, ids in _LAUNCHERS:
        name = next((name for name in ranks if environment.get(name)), "")
        if not name or not environment.get(count):
            continue
        source = f"{name}={environment[name]} and {count}={environment[count]}"
        try:
            rank, size = int(environment[name]), int(environment[count])
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise ConfigError(f"the environment has {source}; expected a rank from 0 on and a larger number of processes. Unset "
                              f"{count} to run one process")
        job = "-".join(environment[key] for key in ids if environment.get(key))
        return LaunchedProcess(rank, size, re.sub(r"[^A-Za-z0-9.]+", "-", job)[:64], source) if size > 1 else None
    return None
