"""Runs one conversion in several processes, which share the target files: process 0 prepares and commits, each writes groups."""
from __future__ import annotations

from collections.abc import Callable

from mindresume.coordination.collectives import Group, Watchdog, gather_results, run_on_rank0
from mindresume.errors import ConfigError, ProcessLostError
from mindresume.reshard.converter import Conversion
from mindresume.reshard.direct_engine import Traffic


def run_shared(conversion: Conversion, work: Callable[[], None], traffic: Traffic, group: Group) -> None:
    """Runs ``work``, which writes the groups of this process. If a process is lost or stopped, what is finished stays in the work
    folder, and the same command continues; any other error removes it.

    Raises:
        ConfigError: The processes opened different checkpoints.
        CollectiveError: On all processes, if one fails.
    """
    seen = gather_results(group, lambda: conversion.plan.fingerprint)
    if len(set(seen)) > 1:
        other = next(rank for rank, found in enumerate(seen) if found != seen[0])
        raise ConfigError(f"process {other} opened another checkpoint than process 0, or with other arguments: was a step saved "
                          f"meanwhile? Give --step. Nothing was changed")
    try:
        suffix = run_on_rank0(group, conversion.prepare)
        if group.rank:
            conversion.join(suffix)
        timeout = getattr(group, "timeout", Watchdog.stall_timeout)
        gather_results(group, work, Watchdog(f"writing {conversion.target}", lambda: traffic.written, timeout))
        run_on_rank0(group, conversion.commit, Watchdog(f"committing {conversion.target}", stall_timeout=timeout))
    except ProcessLostError:
        conversion.keep()
        raise
    except Exception:                               # all processes know of it, and none writes any more
        conversion.abandon()
        raise
    except BaseException:                           # stopped by a signal; others may be writing
        conversion.keep()
        raise


def total_traffic(traffic: Traffic, group: Group) -> Traffic:
    """Returns the sum over all processes."""
    rows = gather_results(group, lambda: [traffic.read, traffic.verified, traffic.written])
    read, verified, written = map(sum, zip(*rows, strict=True))
    return Traffic(read, verified, written)
