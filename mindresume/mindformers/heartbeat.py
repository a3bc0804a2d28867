"""Writes the heartbeat of this rank for the supervisor (``mindresume run``). Without a supervisor
nothing is written.

begin()            when mindresume is installed         enter(LOADING), step(500)     where no event
                   says it
FromEvents()       a handler of the training's events: selected, resumed, saved, committed, ended
"""

from __future__ import annotations

import faulthandler
import os
import signal
from contextlib import suppress

from mindresume import events as ev
from mindresume import runtime
from mindresume.coordination import rank_heartbeat
from mindresume.coordination.liveness import start_ticks, start_time
from mindresume.coordination.preemption import BY_UNKNOWN
from mindresume.coordination.rank_heartbeat import OUTCOMES, STACKS, SUFFIX, RankHeartbeat
from mindresume.errors import OutOfSpaceError
from mindresume.events import Event, Handler
from mindresume.mindformers.process_group import join_sooner

_STACKS_SIGNAL = signal.SIGRTMIN + 7  # frameworks and launchers use the named ones
_own: list[RankHeartbeat] = []  # of this process: one or none
# when the imports of this process were done: one time or none
_imported: list[float] = []


def begin() -> None:
    """Starts the heartbeat of this process, if a supervisor asks for one. Idempotent. The variable
    is removed, because a child of a rank, such as a worker of its data set, is no rank; nor is the
    scheduler of msrun. A rank under a supervisor joins its job sooner."""
    folder = os.environ.pop(rank_heartbeat.VARIABLE, "")
    if not folder or _own or os.environ.get("MS_ROLE") == "MS_SCHED":
        return
    join_sooner(os.environ)
    rank = os.environ.get("RANK_ID", "")
    # the supervisor has ended, or its folder is full: it watches processes only
    with suppress(OSError):
        _own.append(
            RankHeartbeat.create(folder, int(rank) if rank.isdigit() else rank_heartbeat.NONE)
        )
        _write_stacks_on_signal(_own[0])


def _write_stacks_on_signal(heartbeat: RankHeartbeat) -> None:
    """Makes a signal write the stacks of all threads into a file. The handler is written in C and
    runs also while the interpreter lock is held, for example in a collective that never ends."""
    if signal.getsignal(_STACKS_SIGNAL) != signal.SIG_DFL:
        return
    # open until the process ends
    file = open(heartbeat.path.removesuffix(SUFFIX) + STACKS, "ab")  # noqa: SIM115
    faulthandler.register(_STACKS_SIGNAL, file, all_threads=True)
    heartbeat.set(signal=_STACKS_SIGNAL)


def enter(phase: str) -> None:
    """Begins a phase, see ``RankHeartbeat.enter``."""
    for heartbeat in _own:
        heartbeat.enter(phase)


def step(number: int) -> None:
    """Records that a step is finished, with everything that follows it, such as a save."""
    for heartbeat in _own:
        heartbeat.reach(number)


def begin_step() -> None:
    """Records that the network begins a step, see ``RankHeartbeat.begin_step``."""
    for heartbeat in _own:
        heartbeat.begin_step()


def writing(number: int) -> None:
    """Records the step that a thread in the background begins to write; 0: it has ended. Called by
    any thread."""
    for heartbeat in _own:
        heartbeat.set(writing=number)


class FromEvents(Handler):
    """Handles the events of a training: sets phases and numbers of the heartbeat. ``output``:
    output folder of the training."""

    def __init__(self, rank: int, output: str):
        for heartbeat in _own:
            heartbeat.set(rank=rank)
            heartbeat.set_output(output)

    def handle(self, event: Event, time_s: float) -> None:
        for heartbeat in _own:
            if isinstance(event, ev.TrainingStarted):
                heartbeat.set(world_size=event.world_size)
                heartbeat.enter(rank_heartbeat.SELECTING)
            elif isinstance(event, (ev.CheckpointSelected, ev.FreshStart)):
                heartbeat.enter(rank_heartbeat.BUILDING)
            elif isinstance(event, ev.ProgressRestored):
                heartbeat.set(resumed=event.step)
            elif isinstance(event, ev.SaveBegun):
                heartbeat.set(begun=event.step)
                # the last save belongs to the end, as what follows it
                if heartbeat.phase != rank_heartbeat.ENDING:
                    heartbeat.enter(rank_heartbeat.SAVING)
            elif isinstance(event, (ev.SaveStaged, ev.SaveWritten, ev.SaveFailed)):
                if isinstance(event, ev.SaveWritten):
                    heartbeat.set(written=event.step, failed=0)
                elif isinstance(event, ev.SaveFailed):
                    heartbeat.set(
                        failed=event.failures_in_a_row, full=event.code == OutOfSpaceError.code
                    )
                # the training thread has done its part
                if heartbeat.phase == rank_heartbeat.SAVING:
                    heartbeat.enter(rank_heartbeat.TRAINING)
            elif isinstance(event, ev.SaveCommitted) and event.run_id is None:
                heartbeat.set(committed=event.step)
            elif isinstance(event, ev.TrainingEnded):
                heartbeat.set(
                    outcome=OUTCOMES.index(event.outcome), unasked=int(event.reason == BY_UNKNOWN)
                )
                heartbeat.enter(rank_heartbeat.ENDED)


# ---- when this process began ---------------------------------------------------------------------


def process_started() -> float | None:
    """Returns when the kernel started this process, in seconds since 1970, to about a hundredth of
    a second; None where it does not tell."""
    return start_time(start_ticks(os.getpid()))


def mark_imported() -> None:
    """Notes that MindSpore and mindformers are imported, and the rank begins to join its job. Only
    the first call counts."""
    if not _imported:
        _imported.append(runtime.time())
        enter(rank_heartbeat.JOINING)


def imported() -> float | None:
    """Returns when the imports were done, in seconds since 1970; None: not yet."""
    return _imported[0] if _imported else None
