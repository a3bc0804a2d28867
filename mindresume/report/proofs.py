"""Reads how each resume of a training was proved, from the event files.

    for proof in proofs_in(folders): print(proof.verdict, proof.text)

The weights are compared with what was loaded at the first step, and the steps that a run trains for
the second time with the step ledgers of the runs that trained them first
(``resume.step_ledger``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mindresume.events import (
    FAILED,
    Resumed,
    ResumeDiffers,
    ResumeProved,
    RunOpened,
    TrainingEnded,
)
from mindresume.report.log_reader import find_event_logs, read_events

# also in the texts of the page
PROVED, WEIGHTS_ONLY, DIFFERS, NOT_PROVED = "proved", "weights", "differs", "unproved"


@dataclass(frozen=True)
class Proof:
    """Describes the proof of one resume.

    Attributes:
        time: of the resume, seconds since 1970.
        run_id: of the run that resumed; None: it is not recorded.
        step: after which it continued.
        verdict: PROVED: weights and steps are the same; WEIGHTS_ONLY: the weights are, and no step
            was done again; DIFFERS; NOT_PROVED: the weights were not compared, or
            the run ended before, or was of an earlier version.
        tensors: how many parameters were compared.
        steps: how many steps were compared.
        largest_loss_difference: relative; None: no loss was compared.
        text: what differs, or why steps were not compared; empty: nothing to say.
    """

    time: float
    run_id: str | None
    step: int
    verdict: str
    tensors: int = 0
    steps: int = 0
    largest_loss_difference: float | None = None
    text: str = ""


def proofs_in(folders: Iterable[str]) -> list[Proof]:
    """Returns the proof of each resume whose events are in ``folders``, in order of time."""
    found = []
    for log in find_event_logs(folders):
        run_id: str | None = None
        resumed: tuple[float, Resumed] | None = None
        proved: ResumeProved | None = None
        problem = ""
        for at, event in read_events(log) if log.rank == 0 else ():
            if isinstance(event, RunOpened):
                run_id = event.run_id
            elif isinstance(event, Resumed):
                resumed = at, event
            elif isinstance(event, ResumeProved):
                proved = event
            elif isinstance(event, ResumeDiffers):
                problem = event.line()
            elif isinstance(event, TrainingEnded) and event.outcome == FAILED:
                altered = event.reason.startswith("AlteredWeightsError")
                problem = problem or (event.reason if altered else "")
        if resumed is not None:
            found.append(_proof(*resumed, run_id, proved, problem))
    return found


def _proof(
    time: float, resumed: Resumed, run_id: str | None, proved: ResumeProved | None, problem: str
) -> Proof:
    proof = proved or ResumeProved(resumed.step, 0, unproved="nothing has been compared yet")
    if proof.differences and not problem:
        problem = f"{proof.differences} of {proof.steps} steps are not as before"
    if problem:
        verdict = DIFFERS
    else:
        proved = PROVED if proof.steps else WEIGHTS_ONLY
        verdict = proved if proof.tensors else NOT_PROVED
    return Proof(
        time,
        run_id,
        resumed.step,
        verdict,
        proof.tensors,
        proof.steps,
        proof.largest_loss_difference,
        problem or proof.unproved,
    )
