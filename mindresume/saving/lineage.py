"""Finds the checkpoints of one training in a directory: of a run, of the run that it resumed from, and so on.

    lineage = continued(chosen, run, same_folder)        # of a run that begins; every record and manifest of it says so
    others(found, lineage)                               # checkpoints of other trainings in the directory of this one

A lineage is named after the run that began it. A resume inherits the name, a fresh start has its own. Early versions recorded no
name, and neither did runs that resumed from their checkpoints: then it is empty, and in one directory all of these are one
lineage. A resume in another directory uses the run that it resumed from.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from mindresume.formats import Candidate


def continued(chosen: Candidate | None, run: str, same_folder: bool) -> str:
    """Returns the lineage of ``run``, which resumes from ``chosen`` (None: a fresh start), in the same directory or in another
    one. A checkpoint of mindformers has no known lineage."""
    if chosen is None or chosen.run is None:
        return run
    return chosen.lineage or ("" if same_folder else chosen.run)


def lineage_of(found: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Returns a function that returns the lineage of a candidate of one scan; of one with unreadable records that of its run."""
    by_run = {candidate.run: candidate.lineage for candidate in found if candidate.lineage}
    return lambda candidate: candidate.lineage or by_run.get(candidate.run, "")


def others(found: Sequence[Candidate], lineage: str) -> list[Candidate]:
    """Returns the candidates of other trainings that may have completed."""
    of = lineage_of(found)
    return [candidate for candidate in found if candidate.maybe_completed and not candidate.listing_error
            and of(candidate) != lineage]


def newest_lineage(found: Sequence[Candidate]) -> str:
    """Returns the lineage of the training that saved last."""
    of = lineage_of(found)
    return next((of(candidate) for candidate in found if candidate.committed), "")
