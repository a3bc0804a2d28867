"""The invariants of a run: what the processes must have done, whatever is on the disks."""

from __future__ import annotations

from collections.abc import Iterator

from mindresume.coordination.preemption import BY_UNKNOWN
from mindresume.errors import NoUsableCheckpointError
from mindresume.events import PreemptionRequested
from mindresume.fault_injection.journal import save_order
from sim.jobs import Job, common_saves
from sim.oracle import LOST, MISREPORTED, STUCK, WRONG, Finding
from sim.scenarios import Simulation
from sim.schedule import KILL_LAUNCHER, OWN_SIGNAL, ROT, ROT_IN_MEMORY

# seconds of an operation from which a save may exceed the timeouts of others
LONG = 0.1


def check_memory(sim: Simulation) -> list[Finding]:
    """A job takes nothing older than what all ranks of an earlier one had in memory, unless a host
    or an operation failed, or it has rotted."""
    if any(
        row.fault.kind
        not in ("kill", "kill all", "slow", "pause", "term", "term all", ROT_IN_MEMORY)
        for row in sim.cluster.injected
    ):
        return []
    rotted = {saved for row in sim.cluster.rots for saved in row.saves}
    found, required = [], None
    for job in sim.jobs:
        run = next(
            (
                process.own.target.run
                for process in job.ranks
                if process.own is not None and process.own.session
            ),
            None,
        )
        chosen = sim.history.chosen.get(run, required)
        if (
            required is not None
            and required not in rotted
            and (chosen is None or save_order(chosen) < save_order(required))
        ):
            found.append(
                Finding(
                    LOST, f"{job.name} takes {chosen}, though all ranks had {required} in memory"
                )
            )
        required = max(
            [*([required] if required else []), *common_saves(job)], key=save_order, default=None
        )
    return found


def check_success(sim: Simulation) -> list[Finding]:
    """Checks that every process ends well if no fault was injected. A writer that outlives its
    training has a time limit."""
    if sim.stuck or sim.cluster.injected or sim.schedule.tick >= LONG:
        return []
    return [
        Finding(STUCK, process.ending)
        for process in sim.cluster.processes
        if (process.exit or process.error is not None) and not process.name.endswith(".writer")
    ]


def check_orphans(sim: Simulation) -> list[Finding]:
    """Checks that ranks whose launcher alone was killed train to their end, whatever is started
    beside them."""
    if sim.stuck or sim.cluster.lag or sim.schedule.tick >= LONG:
        return []
    if any(row.fault.kind != KILL_LAUNCHER for row in sim.cluster.injected):
        return []
    return [
        Finding(STUCK, f"an orphan: {process.ending}")
        for process in sim.jobs[0].ranks
        if process.exit
    ]


def check_signals(sim: Simulation) -> list[Finding]:
    """Checks that a job that has sent SIGTERM to itself ends at once and is started again until it
    has finished; one that was asked to stop is not."""
    kinds, newest = {row.fault.kind for row in sim.cluster.injected}, sim.history.newest()
    if kinds <= {OWN_SIGNAL} and (
        late := [
            process for process in sim.cluster.processes if process.hangs and process.exit == -9
        ]
    ):
        return [Finding(STUCK, f"{late[0].name} has failed, and did not end by itself")]
    if kinds <= {OWN_SIGNAL} and (newest is None or newest[1] < sim.training.steps):
        return [
            Finding(STUCK, f"the training ended with {newest}, though nobody had asked it to stop")
        ]
    if not kinds <= {"term", "term all"}:
        return []
    return [
        Finding(WRONG, f"{job.name} was asked to stop, and was started again")
        for job in sim.jobs[:-1]
        if was_asked(job) and not any(process.exit for process in job.ranks)
    ]


def check_sources(sim: Simulation) -> list[Finding]:
    """Checks that no job in the copy resumes from a save that the job in the original has made
    after the snapshot."""
    return [
        *check_success(sim),
        *(
            Finding(
                WRONG, f"run {run}, in the copy, takes {chosen}, a save of the job in the original"
            )
            for run, chosen in sim.history.chosen.items()
            if chosen is not None and chosen not in sim.history.began
        ),
    ]


def check_guard(sim: Simulation) -> list[Finding]:
    """Checks that the training reaches its end without the bad batches, if nothing else strikes."""
    newest = sim.history.newest()
    if sim.stuck or sim.cluster.injected or sim.schedule.tick >= LONG:
        return []
    if newest is not None and newest[1] == sim.training.steps and sim.history.ended:
        return []
    return [Finding(STUCK, f"the training ended with {newest}")]


def was_asked(job: Job) -> bool:
    """Returns whether the ranks have agreed to stop because somebody else has asked them."""
    return any(
        isinstance(event, PreemptionRequested) and event.reason != BY_UNKNOWN
        for process in job.ranks
        for _, event in process.events
    )


def check_rotten(sim: Simulation) -> list[Finding]:
    """Checks that all processes end well if only files rot. A job whose checkpoints have all rotted
    ends with an error."""
    if sim.stuck or any(row.fault.kind != ROT for row in sim.cluster.injected):
        return []
    return [
        Finding(STUCK, process.ending)
        for process in sim.cluster.processes
        if process.error is not None
        and not process.name.endswith(".writer")
        and not (sim.cluster.rots and isinstance(process.error, NoUsableCheckpointError))
    ]


def check_uploads(sim: Simulation) -> list[Finding]:
    """Checks jobs that no fault affected: they end well, and the last one uploads all of its saves.
    Where another job was killed, the ranks of this one learn what they need."""
    if sim.stuck:
        return []
    return [*_check_overtaken(sim), *(_check_ended(sim) if not sim.cluster.injected else ())]


def _check_ended(sim: Simulation) -> Iterator[Finding]:
    for job in sim.jobs:
        for process in job.ranks:
            if process.exit or process.error is not None:
                yield Finding(STUCK, process.ending)
    runs = [run for run in sim.history.ended if (run, sim.training.steps) in sim.history.uploaded]
    if not runs or max(runs) != max(sim.history.ended):
        yield Finding(
            LOST, f"only {runs} of the runs {sim.history.ended} have uploaded their last step"
        )
    for job in sim.jobs:
        for process in job.ranks:
            uploader = getattr(process.own, "uploader", None)
            if uploader is not None and uploader.failed and not _stopped(job, 0):
                yield Finding(
                    LOST, f"{process.name} gave up {uploader.failed} uploads that it had begun"
                )


def _check_overtaken(sim: Simulation) -> Iterator[Finding]:
    """Checks, for jobs that no fault affected: if rank 0 was overtaken, every rank with pending
    uploads was told."""
    for job in sim.jobs:
        if not all(
            injected.fault.kind in ("kill", "kill host")
            and not injected.process.startswith(f"{job.name}.")
            for injected in sim.cluster.injected
        ):
            continue
        stopped = _stopped(job, 0)
        for rank in range(1, len(job.ranks)):
            uploader = getattr(job.ranks[rank].own, "uploader", None)
            if (
                stopped
                and uploader is not None
                and uploader.queue.uploaded < uploader.queue.last
                and not _stopped(job, rank)
            ):
                yield Finding(
                    MISREPORTED,
                    f"{job.name}: rank 0 stopped uploading ({stopped}), and rank {rank} was not "
                    "told",
                )


def _stopped(job: Job, rank: int) -> str:
    uploader = getattr(job.ranks[rank].own, "uploader", None) if rank < len(job.ranks) else None
    return (uploader.queue.stopped or "") if uploader is not None else ""
