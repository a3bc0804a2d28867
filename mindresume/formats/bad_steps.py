"""The note of bad steps in a checkpoint directory: ``{root}/.mindresume/bad_steps.json``.

``saving/guard.py`` writes it, on each disk, before the job ends. A scan reads it if it lists it,
and refuses what the run has saved since. The samples of a bad step are skipped by their position
(``resume.progress.skip_windows``), so another batch size, sink size or layout skips the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from mindresume.errors import RecordError
from mindresume.formats import Candidate, CheckpointDir
from mindresume.model.manifest import FOLDER
from mindresume.model.training_state import DataPosition
from mindresume.storage import publish_json, read_json
from mindresume.typed import Count, decode

BAD_STEPS = "bad_steps.json"
_MOST = 256  # rows that are kept


@dataclass(frozen=True)
class BadStep:
    """Describes one bad step.

    Attributes:
        run: that trained it.
        lineage: of that run.
        step: the first bad step; in sink mode the first of its sink.
        until: the last step that the run trained.
        rank: that found it.
        reason: what was bad.
        rollbacks: in a row without a good checkpoint between them, with this one; 0: the job
            stopped.
        samples: to skip; 0: none.
        data: where they begin; None: not known.
    """

    run: str
    lineage: str
    step: Count
    until: Count
    rank: Count
    reason: str
    rollbacks: Count = 0
    samples: Count = 0
    data: DataPosition | None = None


def read_bad_steps(directory: CheckpointDir) -> tuple[BadStep, ...]:
    """Returns the rows of the note, oldest first; none if there is no note. Raises OSError,
    RecordError, or ValueError."""
    try:
        value = read_json(directory.storage, directory.path(FOLDER, BAD_STEPS))
    except FileNotFoundError:
        return ()
    return decode(tuple[BadStep, ...], value, BAD_STEPS)


def add_bad_step(directory: CheckpointDir, row: BadStep) -> None:
    """Adds a row to the note; one that cannot be read is replaced. Raises OSError."""
    try:
        rows = read_bad_steps(directory)
    except (RecordError, ValueError):
        rows = ()
    publish_json(
        directory.storage,
        directory.path(FOLDER, BAD_STEPS),
        [asdict(each) for each in [*rows, row][-_MOST:]],
        row.run,
    )


def refuse_bad(found: Sequence[Candidate], rows: Iterable[BadStep]) -> list[Candidate]:
    """Returns the candidates; those that a run has saved after a bad step are refused."""
    by_run = {row.run: row for row in rows}
    return [
        replace(c, problem=c.refuse(f"run {row.run} saved it after step {row.step}: {row.reason}"))
        if (row := by_run.get(c.run or "")) is not None and (c.step or 0) >= row.step
        else c
        for c in found
    ]
