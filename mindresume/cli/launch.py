"""Joins the processes of a launch (msrun, mpirun, srun) that run one command together."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mindresume.errors import ConfigError

if TYPE_CHECKING:
    from mindresume.coordination.collectives import Group

Timeout = Annotated[float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Under msrun, mpirun or srun, which start "
                                        "several processes that share the work: an error, if one of them gives no sign for so "
                                        "long.")]
Part = Annotated[str | None, typer.Option("--part", metavar="K/N", help="Take only the K-th of N shares of the files, and do not "
                                          "wait for the others. Under msrun, mpirun or srun each process takes one by itself.")]
TIMEOUT = 1800.0


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


def share_of_process(part: str | None, timeout: float, alone: bool = False) -> ShareOfProcess:
    """Returns the share that ``part`` names, else that of this process in its launch, else all. The scheduler process of msrun
    ends here, with status 0; with ``alone`` all processes but the first one, too.

    Raises:
        ConfigError: ``part`` is no K/N; and as ``launched_process``.
    """
    from mindresume.coordination.launched_process import is_scheduler, launched_process
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
    from mindresume.cli.common import say
    say(f"this is process {process.rank} of {process.size}, as {process.source} in the environment say", error=True)
    return ShareOfProcess((process.rank + 1, process.size), timeout, process.rank == 0)


@contextmanager
def launched_group(path: str, command: str, timeout: float, alone: bool = False) -> Iterator[Group]:
    """Yields the processes of this launch once all of them have come; without a launcher this process alone. They meet in a
    hidden folder beside ``path``. The scheduler process of msrun ends here, with status 0.

    Process 0 prints the result inside the block: the others end after it.

    Args:
        alone: process 0 works alone, and the others end with status 0.
    Raises:
        ConfigError, ProcessLostError: As ``launched_process`` and ``file_group``.
    """
    from mindresume.coordination.collectives import SingleProcess
    from mindresume.coordination.launched_process import is_scheduler, launched_process
    if is_scheduler(os.environ):
        sys.exit(0)
    process = launched_process(os.environ)
    if process is not None and alone and process.rank:
        sys.exit(0)
    if process is None or alone:
        yield SingleProcess()
        return
    from mindresume.cli.common import say
    from mindresume.coordination.file_group import file_group
    from mindresume.events.log_lines import line_of
    from mindresume.storage.atomic_publish import TEMPORARY
    from mindresume.storage.posix import PosixStorage
    folder, name = os.path.split(os.path.realpath(path))
    meeting = os.path.join(folder, f".{name}.{command}{TEMPORARY}")
    with file_group(PosixStorage(), meeting, process, sys.argv[1:], timeout,
                    lambda event: say(line_of(event)[1], error=True)) as group:
        yield group
        sys.stdout.flush()          # before the others may end: a launcher kills all when one ends with an error
