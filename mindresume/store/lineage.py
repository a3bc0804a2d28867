"""Which checkpoints of a folder are of one training: what a run resumed from, what that one had resumed from, and so on.

    lineage = continued(chosen, run, same_folder)        # of a run that begins; every record and manifest of it says so
    others(found, lineage)                               # checkpoints of other trainings in the folder of this one

A lineage is named by the run that began it. A resume takes over the name, a fresh start has its own. Where no name was recorded
(before there were any, and of whatever was resumed from there since) it is the empty text: in one folder all of these are one
lineage. Outside of that folder it goes by the run that was resumed from.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from mindresume.formats import Candidate


def continued(chosen: Candidate | None, run: str, same_folder: bool) -> str:
    """Lineage of ``run``, which resumes from ``chosen`` (None: from nothing), in the folder of that or in another one. What
    mindformers wrote belongs to no training that is known."""
    if chosen is None or chosen.run is None:
        return run
    return chosen.lineage or ("" if same_folder else chosen.run)


def lineage_of(found: Sequence[Candidate]) -> Callable[[Candidate], str]:
    """Of candidates of one scan. One whose own records cannot be read is of the lineage of its run."""
    by_run = {candidate.run: candidate.lineage for candidate in found if candidate.lineage}
    return lambda candidate: candidate.lineage or by_run.get(candidate.run, "")


def others(found: Sequence[Candidate], lineage: str) -> list[Candidate]:
    """Those that once were complete and are of another training."""
    of = lineage_of(found)
    return [candidate for candidate in found if candidate.existed and not candidate.unseen and of(candidate) != lineage]


def newest_lineage(found: Sequence[Candidate]) -> str:
    """Of the training that saved last."""
    of = lineage_of(found)
    return next((of(candidate) for candidate in found if candidate.committed), "")
