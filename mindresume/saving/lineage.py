"""Finds which checkpoints of a directory are of one training: of a run, the run that it resumed from, and so on.

    lineage = continued(chosen, run, same_folder)        # of a run that begins; every record and manifest of it says so
    others(found, lineage)                               # checkpoints of other trainings in the directory of this one

A lineage has the name of the run that began it. A resume takes over the name, a fresh start has its own. Where no name was
recorded (by versions before there were any, and by all that was resumed from there since) it is the empty text: in one directory
all of these are one lineage. Outside of that directory it is the run that was resumed from.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from mindresume.formats import Candidate


def continued(chosen: Candidate | None, run: str, same_folder: bool) -> str:
    """Returns the lineage of ``run``, which resumes from ``chosen`` (None: from nothing), in the directory of that or in another
    one. A checkpoint of mindformers belongs to no training that is known."""
    if chosen is None or chosen.run is None:
        return run
    return chosen.lineage or ("" if same_folder else chosen.run)


def lineage_of(found: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Returns a function that returns the lineage of a candidate of one scan. One whose own records cannot be read has the
    lineage of its run."""
    by_run = {candidate.run: candidate.lineage for candidate in found if candidate.lineage}
    return lambda candidate: candidate.lineage or by_run.get(candidate.run, "")


def others(found: Sequence[Candidate], lineage: str) -> list[Candidate]:
    """Returns the candidates that were complete once and are of another training."""
    of = lineage_of(found)
    return [candidate for candidate in found if candidate.maybe_completed and not candidate.listing_error
            and of(candidate) != lineage]


def newest_lineage(found: Sequence[Candidate]) -> str:
    """Returns the lineage of the training that saved last."""
    of = lineage_of(found)
    return next((of(candidate) for candidate in found if candidate.committed), "")
