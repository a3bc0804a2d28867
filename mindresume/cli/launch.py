"""Finds the share of a process of a launch (msrun, mpirun, srun) whose processes run one command
together."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from mindresume.cli.common import say
from mindresume.errors import ConfigError

Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=1.0,
        metavar="SECONDS",
        help="Under msrun, mpirun or srun, which start several processes that share the work: an "
        "error, if one of them gives no sign for so long.",
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="K/N",
        help="Take only the K-th of N shares of the files, and do not "
        "wait for the others. Under msrun, mpirun or srun each process takes one by itself.",
    ),
]
TIMEOUT = 1800.0

# (variables of the rank, the first that is set; variable of the number of processes). SLURM_NTASKS
# is that of the allocation: a batch script and the shell of salloc have it too, beside
# SLURM_PROCID=0, though only one process runs there. SLURM_STEP_NUM_TASKS is what srun started:
# absent in a batch script, 1 in the shell of salloc, which may be a step.
_LAUNCHERS = (
    (("MS_NODE_ID", "RANK_ID"), "MS_WORKER_NUM"),
    (("OMPI_COMM_WORLD_RANK",), "OMPI_COMM_WORLD_SIZE"),
    (("PMI_RANK",), "PMI_SIZE"),
    (("SLURM_PROCID",), "SLURM_STEP_NUM_TASKS"),
)


@dataclass(frozen=True)
class LaunchedProcess:
    """Describes this process of a launch.

    Args:
        rank: its number, from 0.
        size: number of processes of the launch.
        source: the variables that say so, for messages.
    """

    rank: int
    size: int
    source: str


def is_scheduler(environment: Mapping[str, str]) -> bool:
    """Returns whether msrun started this process in addition to the workers, with the same command.
    It has nothing to do."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def launched_process(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Returns this process's place in its launch; None if no launcher started it, or this process
    alone.

    Raises:
        ConfigError: The variables of a launcher are no numbers, or the rank is not below the number
            of processes; msrun on several nodes was not told which node this is.
    """
    workers = environment.get("MS_WORKER_NUM", "1")
    if (
        environment.get("MS_ROLE") == "MS_WORKER"
        and not environment.get("MS_NODE_ID")
        and workers != "1"
    ):
        # RANK_ID is absent or that of the scheduler: MindSpore would assign ranks when the training
        # begins
        raise ConfigError(
            f"msrun started {workers} processes on several nodes and gave this one no rank (no "
            "MS_NODE_ID): give --node_rank to msrun on each node"
        )
    for ranks, count in _LAUNCHERS:
        name = next((name for name in ranks if environment.get(name)), "")
        if not name or not environment.get(count):
            continue
        source = f"{name}={environment[name]} and {count}={environment[count]}"
        try:
            rank, size = int(environment[name]), int(environment[count])
        except ValueError:
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise ConfigError(
                f"the environment has {source}; expected a rank from 0 on and a larger number of "
                f"processes. Unset {count} to run one process"
            )
        return LaunchedProcess(rank, size, source) if size > 1 else None
    return None


@dataclass(frozen=True)
class ShareOfProcess:
    """What this process does of a command that several run together.

    Args:
        part: (K, N), K from 1.
        timeout: seconds to wait for the others without a sign of them.
        prints: whether it prints the result.
    """

    part: tuple[int, int] = (1, 1)
    timeout: float = 0.0
    prints: bool = True


def share_of_process(part: str | None, timeout: float = 0.0, alone: bool = False) -> ShareOfProcess:
    """Returns the share that ``part`` names, else that of this process in its launch, else all. The
    scheduler process of msrun ends here, with status 0; with ``alone`` all processes but the first
    one, too.

    Raises:
        ConfigError: ``part`` is no K/N; and as ``launched_process``.
    """
    if is_scheduler(os.environ):
        sys.exit(0)
    if part is not None:
        number, slash, count = part.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal()):
            raise ConfigError(f"--part is {part[:80]!r}; expected K/N, such as 1/4")
        return ShareOfProcess((int(number), int(count)))
    process = launched_process(os.environ)
    if process is None:
        return ShareOfProcess()
    if alone:
        if process.rank:
            sys.exit(0)
        return ShareOfProcess()
    say(
        f"this is process {process.rank} of {process.size}, as {process.source} in the environment "
        "say",
        error=True,
    )
    return ShareOfProcess((process.rank + 1, process.size), timeout, process.rank == 0)
